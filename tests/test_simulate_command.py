"""`headway simulate` with --sweep, --page and --replay, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway import config, simulation
from headway.cli import app
from headway.types import UserError

HAND_SIZED = ("--lanes", "2", "--batch-size", "2", "--steps", "2", "--lengths", "1,3,1")


def headway(*words):
    result = CliRunner().invoke(app, ["simulate", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def refusal(*words):
    with pytest.raises(UserError) as refused:
        headway(*words)
    return str(refused.value)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run folder: the hand-sized example, with run_ahead 0."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    resolved = config.resolve(None, [*HAND_SIZED, "--run-ahead", "0"])
    (folder / "config.toml").write_text(resolved.to_toml())
    events = simulation.simulate(resolved.config)
    (folder / "trace.jsonl").write_text("".join(event.to_json() + "\n" for event in events))
    return folder


def test_a_table_for_programs_is_exact_and_has_no_ornaments():
    lines = headway(*HAND_SIZED, "--sweep", "run_ahead=0,1").stdout.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "run_ahead throughput speedup lane_utilization trainer_utilization mean_lag token_lag max_lag over_run_ahead "
        "length_ratio lag_bound",
        "0 0.666667 1 0.5 0.333333 0 0 0 0 1 0",
        "1 1 1.5 1 0.5 0.5 0.666667 1 0 1.125 none",
    ]
    assert len({len(line) for line in lines}) == 1


def test_json_is_a_list_of_the_rows():
    rows = json.loads(headway(*HAND_SIZED, "--sweep", "run_ahead=0,1", "--json").stdout)
    assert [row["schedule.run_ahead"] for row in rows] == ["0", "1"]
    assert [row["speedup"] for row in rows] == [1.0, 1.5]
    assert rows[1]["why"].startswith("order finished")


def test_a_page_without_a_sweep_is_of_run_ahead_and_says_so(tmp_path):
    page = tmp_path / "page.html"
    done = headway(*HAND_SIZED, "--page", page)
    assert "run_ahead=0..8" in done.stderr
    assert done.stdout.splitlines()[-1] == f"page: {page}"
    assert len(done.stdout.splitlines()) == 1 + 9 + 1
    assert (
        "At run_ahead 1 the lanes are busy 100.0 % of the time, 1.5 times the synchronous throughput"
        in page.read_text()
    )


def test_with_json_standard_output_is_json_alone(tmp_path):
    done = headway(*HAND_SIZED, "--page", tmp_path / "page.html", "--json")
    assert len(json.loads(done.stdout)) == 9
    assert "page: " in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sweep", "learning_rate=1,2"], "--train.learning-rate does nothing in headway simulate"),
        (["--sweep", "run_ahead=0..1", "--timeline"], "--timeline draws one run"),
        (["--timeline", "--json"], "--timeline is no JSON"),
        (["--page", "."], "--page . is a folder"),
        (["--page", "nowhere/page.html"], "--page nowhere/page.html: there is no folder nowhere"),
        (["--replay", "nowhere"], "there is no run to replay in nowhere: it holds no config.toml"),
    ],
)
def test_what_is_refused(words, said):
    assert said in refusal(*HAND_SIZED, *words)


def test_a_replay_of_a_run_under_its_own_schedule_is_the_run(recorded):
    assert headway("--replay", recorded, "--timeline").stdout.splitlines()[:3] == [
        "lane A   [r0]............[r2]....",
        "lane B   [----r1----]....[r3]....",
        "trainer  ............[s0]....[s1]",
    ]


def test_what_another_schedule_would_have_given(recorded):
    assert json.loads(headway("--replay", recorded, "--run-ahead", "1", "--json").stdout)["total"] == 4.0
    rows = json.loads(headway("--replay", recorded, "--sweep", "run_ahead=0,1", "--json").stdout)
    assert [row["total"] for row in rows] == [6.0, 4.0]
    assert rows[0]["length_ratio"] == 1.0


def test_the_page_of_a_replay_names_its_run(recorded, tmp_path):
    page = tmp_path / "page.html"
    headway("--replay", recorded, "--sweep", "run_ahead=0,1", "--page", page)
    text = page.read_text()
    assert "<h1>recorded under other schedules</h1>" in text
    assert "trained rollouts per second" in text
    assert "<li>train time" not in text


@pytest.mark.parametrize("words", [["--lengths", "1"], ["--sweep", "train_time=1,2"]], ids=str)
def test_a_replay_refuses_a_workload(recorded, words):
    assert "does nothing in a replay" in refusal("--replay", recorded, *words)


def test_a_replay_brings_its_own_recipe(recorded):
    assert "brings its own recipe; leave recipes/quickstart.toml out" in refusal(
        "recipes/quickstart.toml", "--replay", recorded
    )
