"""`headway fit`: what it prints, writes and refuses, and that it starts at once."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from headway.scaling.curve import Sigmoid
from tests.scaling.curves import START, noisy, published, spaced, write_table

NAMES = ("--x", "gpu_hours", "--y", "pass_rate")


@pytest.fixture
def fit(headway, tmp_path):
    """`headway fit` in a folder of its own with two learning curves -> exit status, standard output, standard error."""
    write_table(tmp_path / "scale.csv", published("8B ScaleRL", 1), "gpu_hours", "pass_rate")
    weaker = noisy(Sigmoid(START, 0.52, 1.92, 2542), [0.0, *spaced(1500, 16_000, 20)], seed=2)
    write_table(tmp_path / "weaker.csv", weaker, "gpu_hours", "pass_rate")
    return partial(headway, "fit")


def test_a_table_of_parameters_and_what_they_foretell(fit):
    status, out, err = fit("scale.csv", *NAMES, "--at", "50000")
    assert (status, err) == (0, "")
    rows = {" ".join(line.split()[:2]): line for line in out.splitlines() if line.strip()}
    assert out.startswith("pass_rate over gpu_hours")
    assert "0.61" in rows["asymptote A"]
    assert "[" in rows["midpoint C_mid"]
    assert "(3.1x)" in rows["at 50,000"]
    assert "95 % intervals" in out


def test_what_is_not_determined_is_no_number(fit, tmp_path):
    truth = Sigmoid(START, 0.61, 1.92, 2542)
    write_table(tmp_path / "early.csv", noisy(truth, [0.0, *spaced(100, 900, 20)], seed=1, noise=0.002))
    status, out, _ = fit("early.csv")
    assert status == 0
    assert "not determined [" in next(line for line in out.splitlines() if line.startswith("asymptote A"))
    assert "no plateau in sight: the midpoint may lie beyond compute 900" in " ".join(out.split())
    figures = json.loads(fit("early.csv", "--json")[1])["fits"][0]
    assert figures["asymptote"]["value"] is None
    assert figures["asymptote"]["high"] is None
    assert "no plateau in sight" in figures["asymptote"]["why"]


def test_several_curves_stand_side_by_side_and_are_compared(fit):
    status, out, _ = fit("scale.csv", "weaker.csv", *NAMES)
    assert status == 0
    said = " ".join(out.split())
    assert "weaker.csv ends lower than scale.csv: A of weaker.csv less that of scale.csv is -0.0" in said
    assert "can't tell whether scale.csv or weaker.csv rises more steeply" in said


def test_json(fit):
    status, out, _ = fit("scale.csv", "weaker.csv", *NAMES, "--json", "--skip", "10%", "--until", "60%")
    assert status == 0
    figures = json.loads(out)
    one = figures["fits"][0]
    assert one["num_points"] == {"fitted": 15, "early": 1, "later": 4}
    assert one["asymptote"]["low"] < one["asymptote"]["value"] < one["asymptote"]["high"]
    assert one["held_back"]["num"] == 4
    assert figures["comparisons"][0]["differences"][0]["parameter"] == "asymptote"


def test_a_page(fit, tmp_path):
    status, out, _ = fit("scale.csv", "weaker.csv", *NAMES, "--skip", "10%", "--until", "60%", "--page", "fit.html")
    assert (status, out.splitlines()[-1]) == (0, "page: fit.html")
    page = (tmp_path / "fit.html").read_text()
    text = page.split('<script type="application/json" id="figures">')[1].split("</script>")[0]
    traces = json.loads(text)["curves"]["data"]
    names = [trace.get("name", "") for trace in traces]
    assert {"scale.csv", "scale.csv, left out", "scale.csv, held back", "weaker.csv"} <= set(names)
    assert any(name.startswith("scale.csv, asymptote 0.6") for name in names)
    dashes = [trace["line"]["dash"] for trace in traces if trace.get("mode") == "lines" and "dash" in trace["line"]]
    assert {"solid", "dash", "dot"} == set(dashes)
    at_0 = next(trace for trace in traces if trace.get("name") == "scale.csv")["x"][0]
    assert 0 < at_0 < 1500, "compute 0 is at the left edge of a log axis"
    assert "weaker.csv ends lower than scale.csv" in page.split("<figure>")[0]


def test_what_a_file_is_called_is_no_part_of_the_page(fit, tmp_path):
    (tmp_path / "scale.csv").rename(tmp_path / "<b>a.csv")
    assert fit("<b>a.csv", *NAMES, "--page", "fit.html")[0] == 0
    assert "<b>a.csv" not in (tmp_path / "fit.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which learning curve? headway fit RUN, or a table as in headway fit curve.csv"),
        (("scal.csv",), "there is no learning curve scal.csv; did you mean scale.csv?"),
        (("scale.csv",), "scale.csv has no column compute; it has gpu_hours, pass_rate; name one by --x"),
        (("scale.csv", "--skp", "3"), "unknown option --skp; did you mean --skip?"),
        (("scale.csv", "--lanes", "3"), "unknown option --lanes; headway fit --help lists what there is"),
        (("scale.csv", "--skip", "most"), "--skip most is no number; it is an amount of compute, or a share of it"),
        (("scale.csv", "--skip", ""), "--skip  is no number"),
        (("scale.csv", "--at", "-3"), "--at -3 is no amount of compute: give one above 0"),
        (("scale.csv", "--start", "low"), "--start low is no number; it is the reward at compute 0"),
        (("scale.csv", "--ceiling", "inf"), "--ceiling inf is no number; it is a reward that none can exceed"),
        (("scale.csv", *NAMES, "--skip", "90%"), "has pass_rate at 2 amounts of gpu_hours left, and a fit needs 6"),
        (("scale.csv", "--page", "no/fit.html"), "--page no/fit.html: there is no folder no"),
    ],
)
def test_bad_input_is_one_line(fit, words, said):
    status, out, err = fit(*words)
    assert (status, out) == (2, "")
    assert err.startswith("headway: ")
    assert err.count("\n") == 1
    assert said in err


def test_it_imports_no_torch(tmp_path):
    path = write_table(tmp_path / "curve.csv", published("8B ScaleRL", 1))
    program = (
        "import sys\nfrom headway.cli import main\n"
        f"sys.argv = ['headway', 'fit', {str(path)!r}]\n"
        "try:\n    main()\nexcept SystemExit as ending:\n    assert not ending.code\n"
        "print('heavy:', sorted({'torch', 'transformers', 'peft', 'ray', 'vllm', 'pandas'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert "heavy: []" in done.stdout.splitlines()
