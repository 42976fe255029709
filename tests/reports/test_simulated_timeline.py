"""A run beside itself: measured, and simulated from its trace."""

import json
import re

from headway import run
from headway.reports import gantt, simulated_timeline
from headway.reports.page import write_page
from headway.reports.record import read_run

WORDS = "--lanes 4 --batch-size 4 --steps 30 --run-ahead 1 --lengths 1,3,2,4 --in-flight keep --sync-time 0.5"
FIXED = WORDS.split(" ")


def figures(document):
    text = re.search(r'<script type="application/json" id="figures">(.*?)</script>', document, re.DOTALL)
    assert text
    return json.loads(text[1])


def test_a_report_shows_the_run_again_below_itself(simulated, write_run):
    folder = write_run(simulated(*FIXED), words=FIXED)
    assert "page: " in run.report(folder)
    document = (folder / "index.html").read_text(encoding="utf-8")
    plots = figures(document)
    measured, again = plots["figure-timeline"], plots["figure-simulated"]
    assert [bar["x"] for bar in again["data"]] == [bar["x"] for bar in measured["data"]], "times are fixed"
    assert again["layout"]["xaxis"]["range"] == measured["layout"]["xaxis"]["range"]
    assert document.index('id="figure-timeline"') < document.index('id="figure-simulated"')
    total = read_run(folder).figures["total"]
    assert f"30 train steps took {total:.4g} units" in document
    assert f"simulated they take {total:.4g} units, 100.0 % of that" in document


def test_both_pictures_show_the_same_stretches_of_time(simulated, write_run, monkeypatch):
    """Where the beginning and the end alone are drawn, and the simulation is over earlier."""
    monkeypatch.setattr(gantt, "MAX_BARS", 60)
    folder = write_run(simulated(*FIXED), words=FIXED)
    shorter = simulated(*FIXED[:-1], "0")
    record = read_run(write_page(read_run(folder), shorter).parent)
    plots = figures((folder / "index.html").read_text(encoding="utf-8"))
    measured, again = plots["figure-timeline"], plots["figure-simulated"]
    views = [
        [button["args"][0]["xaxis.range"] for button in plot["layout"]["updatemenus"][0]["buttons"]]
        for plot in (measured, again)
    ]
    assert views[0] == views[1]
    num_bars = [sum(len(bar.get("base") or ()) for bar in plot["data"]) for plot in (measured, again)]
    assert 0 < num_bars[1] <= 1.2 * num_bars[0]
    assert record.simulated == ()


def test_a_killed_run_is_simulated_as_far_as_it_came(simulated, write_run):
    whole = simulated(*FIXED)
    end = next(number for number, event in enumerate(whole) if event.kind == "published" and event["version"] == 12)
    folder = write_run(whole[: end + 4], words=FIXED)
    run.report(folder)
    assert f"12 train steps took {whole[end].at_s:.4g} units" in (folder / "index.html").read_text(encoding="utf-8")


def test_a_page_says_why_a_run_isnt_simulated(simulated, write_run):
    whole = simulated(*FIXED)
    end = next(number for number, event in enumerate(whole) if event.kind == "trained")
    folder = write_run(whole[:end], words=FIXED)
    run.report(folder)
    document = (folder / "index.html").read_text(encoding="utf-8")
    assert "figure-simulated" not in figures(document)
    assert "The same run can't be simulated from its trace: " in document
    assert "no train step of the run has ended, so how long one takes is not known." in document


def test_a_page_by_itself_simulates_nothing(simulated, write_run):
    folder = write_run(simulated(*FIXED), words=FIXED)
    document = write_page(read_run(folder)).read_text(encoding="utf-8")
    assert "figure-simulated" not in figures(document)
    assert "simulated from its trace" not in document
    assert simulated_timeline.comparison(read_run(folder)) == ""
