"""Metric sinks: the real packages where they are installed, and a stand-in of trackio's three functions."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway import config, run
from headway.config import SINKS as SINK_WORDS
from headway.reports import sinks
from headway.reports.folder import RunFolder
from headway.trace import Trace
from headway.types import UserError

SETTINGS = {"run": {"seed": 3}, "schedule": {"run_ahead": 1.0, "stragglers": ["drop"]}}
ROWS = [
    {"version": 1, "loss": 0.5, "mismatch_kl_k3/lag_1": 2, "warning": "none", "bad": float("nan"), "flag": True},
    {"version": 2, "loss": 0.25},
    {"version": 1, "evaluated": 4, "greedy_accuracy": None},
]


def _write(name: str, folder: Path) -> None:
    with sinks.opened([name], folder, SETTINGS) as (sink,):
        for row in ROWS:
            sink(row)


def test_the_words_of_the_setting_are_the_sinks_there_are() -> None:
    assert set(SINK_WORDS) == set(sinks.SINKS)


def test_only_numbers_are_passed_on() -> None:
    assert sinks.numbers(ROWS[0]) == {"loss": 0.5, "mismatch_kl_k3/lag_1": 2}


def test_tensorboard_holds_every_number_at_its_version(tmp_path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.util.tensor_util import make_ndarray

    _write("tensorboard", tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["tensors"]) == {"loss", "mismatch_kl_k3/lag_1", "evaluated"}
    points = [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors("loss")]
    assert points == [(1, 0.5), (2, 0.25)]


def _wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: blocks of 32 KiB of (checksum, length, type, bytes), as in a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def _wandb_rows(file: Path) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Rows and settings as they stand in the file; a service of wandb's own writes it, in its own time."""
    rows, settings = list[dict[str, str]](), dict[str, str]()
    for record in _wandb_records(file):
        if record.HasField("history"):
            rows.append({"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item})
        settings |= {item.key: item.value_json for item in record.run.config.update}
    return rows, settings


@pytest.mark.slow
def test_wandb_is_offline_and_stays_inside_the_run(tmp_path, monkeypatch, capfd) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    _write("wandb", tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, settings = _wandb_rows(file)
    patience = time.monotonic() + 60
    while len(rows) < 3 and time.monotonic() < patience:
        time.sleep(0.2)
        rows, settings = _wandb_rows(file)
    assert [(row["version"], row.get("loss"), row.get("evaluated")) for row in rows] == [
        *[("1", "0.5", None), ("2", "0.25", None), ("1", None, "4")]
    ]
    assert json.loads(settings["run"]) == {"seed": 3}
    assert capfd.readouterr() == ("", "")  # the terminal is the progress line's


def test_trackio_gets_numbers_steps_and_the_configuration(tmp_path, monkeypatch) -> None:
    told: list[tuple] = []
    stand_in = SimpleNamespace(
        init=lambda **options: told.append(("init", options)),
        log=lambda row, step: told.append((step, row)),
        finish=lambda: told.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    _write("trackio", tmp_path / "a-run")
    assert told == [
        ("init", {"project": "headway", "name": "a-run", "config": SETTINGS}),
        (1, {"loss": 0.5, "mismatch_kl_k3/lag_1": 2}),
        (2, {"loss": 0.25}),
        (1, {"evaluated": 4}),
        ("finish",),
    ]


def test_a_run_s_rows_reach_its_sinks_and_its_file(simulated, tmp_path) -> None:
    rows: list[dict] = []

    class Kept:
        def __call__(self, row) -> None:
            rows.append(dict(row))

        def close(self) -> None: ...

    folder, trace = RunFolder(tmp_path / "kept"), Trace()
    folder.listen_to(trace, [Kept()])
    for event in simulated():
        trace.emit(event.kind, event.at_s, **event.fields)
    folder.close()
    assert [row["version"] for row in rows] == [1, 2]
    assert len((tmp_path / "kept" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_sink_is_closed_when_the_run_fails(tmp_path, monkeypatch) -> None:
    told: list[str] = []
    stand_in = SimpleNamespace(init=lambda **_: None, log=lambda *_: None, finish=lambda: told.append("finish"))
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    with pytest.raises(ZeroDivisionError), sinks.opened(["trackio"], tmp_path, SETTINGS):
        raise ZeroDivisionError
    assert told == ["finish"]


def test_a_missing_package_is_named_with_its_extra_before_anything_is_done(tmp_path, monkeypatch) -> None:
    real = sinks.importlib.util.find_spec
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None if name == "trackio" else real(name))
    resolved = config.resolve(None, ("--sinks", "trackio", "--run-ahead", "0", "--group-size", "8"))
    with pytest.raises(UserError, match=r"report.sinks trackio needs .* pip install 'headway\[trackio\]'"):
        run.train(resolved, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(UserError, match="trackio, which is not installed"):
        sinks.require(["trackio"])


def test_an_unknown_sink_is_told() -> None:
    with pytest.raises(
        UserError, match=r"tensorbord is none of tensorboard, wandb, trackio; did you mean tensorboard\?"
    ):
        config.resolve(None, ("--sinks", "tensorbord"))
