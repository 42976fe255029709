"""Reading a run folder: the trace decides, the rest may be missing or cut, and what is wrong is said."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headway import config, run
from headway.reports.folder import RunFolder
from headway.reports.record import read_run, thinned
from headway.trace import Event, Trace
from headway.types import UserError


def test_rows_come_from_the_trace_and_what_only_the_file_knows(simulated, write_run) -> None:
    metrics = [{"version": 1, "at_s": 0.0, "extra": 7, "lag_max": 99}, {"version": 1, "evaluated": 4, "at_s": 0.0}]
    steps = read_run(write_run(simulated(), metrics=metrics)).steps
    assert [row["version"] for row in steps] == [1, 2]
    assert [row["step_s"] for row in steps] == [3.0, 1.0]
    assert (steps[0]["extra"], steps[0]["lag_max"]) == (7, 0)


def test_a_resumed_run_has_each_version_once(resumed: list[Event], write_run) -> None:
    rows = [{"version": version, "step_s": 1.0, "note": note} for version, note in ((1, 1), (2, 2), (2, 3))]
    run = read_run(write_run(resumed, metrics=rows))
    assert [(row["version"], row["reward_mean"], row["note"]) for row in run.steps] == [(1, 0.1, 1), (2, 0.3, 3)]
    assert run.header["version"] == 1


def test_rollouts_of_lost_steps_are_left_out(simulated, write_run) -> None:
    rollouts = [{"version": version, "text": text} for version, text in ((1, "a"), (2, "lost"), (3, "lost"), (2, "b"))]
    kept = read_run(write_run(simulated(), rollouts=rollouts)).rollouts
    assert [rollout["text"] for rollout in kept] == ["a", "lost", "b"]


def test_values_that_are_no_finite_numbers_are_none(simulated, write_run) -> None:
    metrics = [{"version": 1, "step_s": 1.0, "loss": math.nan, "word": "x", "none": None, "flag": True}]
    row = read_run(write_run(simulated(), metrics=metrics)).steps[0]
    assert [row[name] for name in ("loss", "word", "none", "flag")] == [None, None, None, None]


def test_lines_cut_by_a_kill_are_counted(simulated, write_run) -> None:
    folder = write_run(simulated())
    (folder / "metrics.jsonl").write_text('{"version": 1, "loss": 1.0}\n{"version": 2, "lo')
    (folder / "rollouts.jsonl").write_text('{"vers{"version": 2}\n[1]\n{"version": 2}\n')
    run = read_run(folder)
    assert run.notes == [
        "1 line of metrics.jsonl can't be read and was left out.",
        "2 lines of rollouts.jsonl can't be read and were left out.",
    ]
    assert len(run.rollouts) == 1


def test_a_broken_configuration_is_said(simulated, write_run) -> None:
    folder = write_run(simulated())
    (folder / "config.toml").write_text("[run\n")
    (folder / "run.json").write_text("{")
    notes = read_run(folder).notes
    assert notes[0].startswith("config.toml can't be read")
    assert notes[1].startswith("run.json can't be read")


def test_a_missing_folder_names_the_nearest(simulated, write_run, tmp_path: Path) -> None:
    write_run(simulated(), name="addition-0412")
    write_run(simulated(), name="chess")
    with pytest.raises(UserError, match=r"no run folder .*additon; did you mean .*addition-0412\?"):
        read_run(tmp_path / "additon")
    with pytest.raises(UserError, match=r"holds no trace.jsonl, so it is no run folder; did you mean"):
        read_run(tmp_path)


def test_folders_that_are_no_runs(tmp_path: Path, simulated, write_run) -> None:
    with pytest.raises(UserError, match="no run lies in"):
        read_run(tmp_path / "nothing" / "here")
    folder = write_run(simulated())
    for text, said in (
        ("", "doesn't begin with a run"),
        ("[1]\n", "is not a trace event"),
        ("x\n{}\n", "is not a trace event"),
    ):
        (folder / "trace.jsonl").write_text(text)
        with pytest.raises(UserError, match=said) as caught:
            read_run(folder)
        assert "\n" not in str(caught.value)


def test_thinned_joins_neighbours_and_keeps_extremes() -> None:
    rows = [{"version": 1 + n, "loss": float(n), "lag_max": n % 3, "ratio_min": 1.0 - n} for n in range(5)]
    assert thinned(rows, 5) == rows
    assert thinned(rows, 3) == [
        {"version": 2, "loss": 0.5, "lag_max": 1, "ratio_min": 0.0},
        {"version": 4, "loss": 2.5, "lag_max": 2, "ratio_min": -2.0},
        {"version": 5, "loss": 4.0, "lag_max": 1, "ratio_min": -3.0},
    ]
    assert thinned([{"version": 1, "loss": None}, {"version": 2}], 1) == [{"version": 2, "loss": None}]


def test_what_unsound_overrides_is_in_the_trace_and_what_is_trained_in_the_folder(simulated, tmp_path: Path) -> None:
    words = ("--objective.name", "ppo", "--objective.unsound", "true", "--run-ahead", "1")
    settings = config.resolve(None, words).config
    (reason,) = run.overridden(settings, run.chosen_objective(settings))
    assert "ppo has no weight against the policy that sampled them" in reason
    folder = RunFolder(tmp_path / "kept")
    folder.write_objective("ppo\n    its source")
    trace = Trace()
    folder.listen_to(trace)
    for event in simulated():
        trace.emit(event.kind, event.at_s, **{**event.fields, **({"unsound": [reason]} if event.kind == "run" else {})})
    folder.close()
    kept = read_run(folder.path)
    assert (kept.unsound, kept.objective_text) == ([reason], "ppo\n    its source\n")


def test_a_sound_run_overrides_nothing(simulated, write_run) -> None:
    settings = config.resolve(
        None, ("--objective.name", "ppo", "--objective.unsound", "true", "--run-ahead", "0")
    ).config
    assert run.overridden(settings, run.chosen_objective(settings)) == []
    assert simulated()[0]["unsound"] == []
    assert read_run(write_run(simulated())).unsound == []
