"""The page of a sweep: whole, small, safe, and nothing in it is computed by the browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest

from headway import config, sweep
from headway.reports import gantt, simulation_page, simulation_pictures
from headway.reports.simulation_pictures import SweptRuns
from headway.reports.simulation_style import SCRIPT

SIZES = ("--lanes", "20", "--batch-size", "8", "--steps", "12", "--train-time", "0.5")


@pytest.fixture(autouse=True)
def light(monkeypatch):
    """Plotly's 4 MB are no part of what is tested here."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* library */")


def simulated(*words, overrides=SIZES):
    jobs = sweep.jobs(None, overrides, sweep.parse(words), for_page=True)
    return sweep.simulate(jobs), jobs[0].resolved


def page(*words, overrides=SIZES, chosen=0):
    runs, resolved = simulated(*words, overrides=overrides)
    return simulation_page.page(runs, chosen, resolved)


def figures_in(document):
    return json.loads(re.search(r'id="figures">(.*?)</script>', document, re.DOTALL).group(1))


def says(*words, number, overrides=SIZES):
    runs, _ = simulated(*words, overrides=overrides)
    return simulation_page.says(SweptRuns(runs), runs[number])


def test_it_holds_every_run_and_every_picture():
    shown = figures_in(page("run_ahead=0..2", "order=finished,started"))
    assert shown["controls"] == [
        {"name": "run_ahead", "values": ["0", "1", "2"]},
        {"name": "order", "values": ["finished", "started"]},
    ]
    assert len(shown["runs"]) == 6
    pictures = ["throughput", "lag", "max-lag", "lanes", "lags", "lengths", "steps"]
    assert all(list(run["figures"]) == pictures for run in shown["runs"])


def test_the_script_looks_up_and_draws_and_computes_no_schedule():
    called = set(re.findall(r"Plotly\.(\w+)", SCRIPT))
    assert called == {"react"}
    assert not {"fetch", "import", "eval", "innerHTML", "Worker"} & set(re.findall(r"\w+", SCRIPT))


def test_only_its_own_two_scripts_may_run():
    document = page("run_ahead=0..2")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', document).group(1)
    hashes = re.findall(r"'sha256-([^']+)'", policy)
    scripts = ["/* library */", SCRIPT]
    assert hashes == [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert "default-src 'none'" in policy
    assert not re.search(r"\son\w+=", document.partition('<script type="application/json"')[0])


def test_what_a_user_wrote_is_escaped(tmp_path):
    hostile = tmp_path / "<img src=x>&.txt"
    hostile.write_text("1\n2\n")
    document = page(f"lengths=file:{hostile},constant", overrides=(*SIZES, "--run-ahead", "1"))
    assert "<img" not in document
    assert "&lt;img src=x&gt;&amp;.txt" in document


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("run_ahead=0..2", '<input type="range"'),
        ("seed=1,2", '<input type="radio"'),
        ("order=finished,started", '<input type="radio"'),
        ("lengths=constant,exponential,lognormal:1,lognormal:2", '<input type="radio"'),
        ("lengths=constant,exponential,lognormal:1,lognormal:2,lognormal:0.5", "<select"),
    ],
)
def test_the_kind_of_a_control_suits_its_values(words, kind):
    assert kind in page(words)


def test_the_sentence_of_a_synchronous_run():
    assert says("run_ahead=0,1", number=0, overrides=(*SIZES, "--lengths", "1")) == (
        "At run_ahead 0 the lanes are busy 26.7 % of the time, which all else is compared with; trained rollouts lag "
        "0.0 versions on average, 0 at most; never more than 0 (run_ahead 0: nothing starts before the batch before it "
        "is published)."
    )


def test_a_run_is_compared_with_the_synchronous_one_of_its_own_kind():
    text = says("order=finished,started", "run_ahead=0,1", number=3, overrides=(*SIZES, "--lengths", "1"))
    assert text.startswith("At order started, run_ahead 1 the lanes are busy ")
    assert "times the synchronous throughput" in text
    assert "never more than 1 (order started: run_ahead, rounded up)" in text


def test_without_a_synchronous_run_it_is_compared_with_the_first():
    assert "times the throughput of the first run" in says("run_ahead=1,2", number=1)
    assert "throughput" not in says("run_ahead=1,2", number=0)


def test_bars_are_few_enough_for_many_runs(monkeypatch):
    monkeypatch.setattr(simulation_pictures, "MAX_BARS", 300)
    runs, _ = simulated("run_ahead=0..2")
    drawings = [run.seen.drawing for run in runs]
    assert all(80 < drawing.num_bars <= 100 for drawing in drawings)
    assert all(len(drawing.lanes) == simulation_pictures.MAX_LANES for drawing in drawings)


def test_the_shares_of_a_histogram_are_of_all_trained_rollouts():
    runs, _ = simulated("run_ahead=0..2")
    for run in runs:
        bars = simulation_pictures.lag_histogram(SweptRuns(runs), run).data[:2]
        assert sum(share for bar in bars for share in bar.y if share is not None) == pytest.approx(1, abs=1e-4)
        assert sum(bars[1].y[lag] or 0 for lag in range(len(bars[1].y))) == pytest.approx(
            run.figures["over_run_ahead"], abs=1e-4
        )
        for trace in simulation_pictures.length_histogram(SweptRuns(runs), run).data:
            assert sum(trace.y) == pytest.approx(1, abs=1e-4)


def test_the_early_batches_of_finished_are_short_and_those_of_started_are_not():
    runs, _ = simulated("order=finished,started", overrides=("--lanes", "64", "--batch-size", "32", "--steps", "30"))
    first = [run.seen.steps[0][0] for run in runs]
    assert first[0] < 0.6 < 0.75 < first[1]


def test_the_curves_are_over_run_ahead_wherever_it_is_swept():
    runs, _ = simulated("seed=1..5", "run_ahead=0,1")
    assert SweptRuns(runs).axis == "schedule.run_ahead"
    runs, _ = simulated("order=finished,started", "seed=1..3")
    assert SweptRuns(runs).axis == "run.seed"
    runs, _ = simulated("order=finished,started")
    figure = simulation_pictures.throughput(SweptRuns(runs), runs[1])
    assert figure.layout.xaxis.type == "category"
    assert figure.data[-1].x == ("started",)  # the ring


def test_a_sync_without_length_is_not_in_the_legend():
    for time, shown in (("0", [False]), ("0.2", [None])):
        runs, _ = simulated("run_ahead=0,1", overrides=(*SIZES, "--sync-time", time))
        figure = simulation_pictures.lanes(SweptRuns(runs), runs[0])
        assert [trace.showlegend for trace in figure.data if trace.name == "sync"] == shown


def test_the_lanes_are_those_of_a_runs_own_page():
    runs, _ = simulated("run_ahead=1")
    drawn = simulation_pictures.lanes(SweptRuns(runs), runs[0])
    assert [trace.x for trace in drawn.data] == [trace.x for trace in gantt.picture(runs[0].seen.drawing, "units").data]


def test_what_was_set_is_said_once_and_what_is_swept_is_not():
    document = page("run_ahead=0..2", overrides=(*SIZES, "--order", "started", "--max-lag", "3"))
    chips = re.findall(r"<li>([^<]+) <b>([^<]+)</b></li>", document)
    assert ("order", "started") in chips
    assert ("max lag", "3") in chips
    assert "run ahead" not in dict(chips)
    assert len(chips) == len(dict(chips))


def test_the_configuration_is_there():
    assert config.resolve(None, [*SIZES, "--schedule.run_ahead=0"]).to_toml().splitlines()[0] in page("run_ahead=0,1")
