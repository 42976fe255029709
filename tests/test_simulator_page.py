"""`docs/simulator.md` says what the simulator does: its commands run, its tables follow from what they print."""

import json
import re

import pytest

from tests.simulator_page import PAGE, REPOSITORY, printed, shown, workplace

TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = shown(TEXT)


def commands():
    assert len(COMMANDS) > 15
    for number, command in enumerate(COMMANDS):
        marks = [pytest.mark.slow] if command.is_long else []
        yield pytest.param(command, id=f"command-{number}", marks=marks)


@pytest.fixture
def at_the_workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(workplace(tmp_path))
    return tmp_path


@pytest.mark.parametrize("command", list(commands()))
def test_the_command_prints_what_the_page_shows(command, at_the_workplace):
    output = printed(command.command)
    assert output.strip()
    if command.has_output:
        assert command.of(output) == command.lines, "refresh the page: python -m tests.simulator_page"
    if "--page" in command.command:
        assert (at_the_workplace / command.command.split("--page ")[1]).stat().st_size > 10_000


# The tables that compare


def rows_of(heading):
    """Of the Markdown table below a heading, as words without its head."""
    section = TEXT.split(f"### {heading}")[1].split("\n#")[0]
    lines = [line for line in section.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def throughputs(command):
    """Of one run, or of each row of a sweep, by its first column."""
    if match := re.search(r"throughput ([\d.e+-]+)", command.lines[0]):
        return float(match[1])
    rows = [line.split() for line in command.lines]
    column = rows[0].index("throughput")
    return {row[0]: float(row[column]) for row in rows[1:]}


def outputs_of(recipe):
    return [throughputs(command) for command in COMMANDS if recipe in command.command]


def test_the_comparison_with_areal_follows_from_the_commands():
    synchronous, by_run_ahead = outputs_of("areal-fig5c")
    table = {row[0]: row[1:] for row in rows_of("AReaL")}
    assert list(table) == list(by_run_ahead) == ["0", "1", "2", "4", "8", "16"]
    for run_ahead, (simulated, _) in table.items():
        assert simulated == f"{by_run_ahead[run_ahead] / synchronous:.2f}"


def test_the_simulated_speed_ups_are_near_those_of_areal_up_to_4_and_then_stay_behind():
    table = {row[0]: row[1:] for row in rows_of("AReaL")}
    for run_ahead in ("1", "2", "4"):
        simulated, published = map(float, table[run_ahead])
        assert simulated == pytest.approx(published, rel=0.03)
    assert [float(table[run_ahead][0]) for run_ahead in ("4", "8", "16")] == [2.75, 2.75, 2.75]


def test_the_comparison_with_april_follows_from_the_commands():
    found = outputs_of("april")
    gains = [f"+{(found[base + more] / found[base] - 1) * 100:.0f} %" for base in (0, 3) for more in (1, 2)]
    assert [row[2] for row in rows_of("APRIL")] == gains


# What overlap is worth


def throughput(*words):
    always = ["--batch-size", "64", "--steps", "60", "--skip-steps", "12", "--mean-length", "3", "--json"]
    return json.loads(printed(" ".join(["headway simulate", *always, *map(str, words)])))["throughput"]


@pytest.mark.parametrize(("lanes", "train_time"), [(32, 2), (48, 4), (56, 8)])
@pytest.mark.parametrize("run_ahead", [1, 2, 8])
def test_machines_that_are_split_win_nothing_without_a_tail(lanes, train_time, run_ahead):
    """A share s of 64 lanes generates, and a train step that took 1 on all machines takes 1 / (1 - s)."""
    together = throughput("--lengths", "constant", "--lanes", 64, "--train-time", 1, "--run-ahead", 0)
    split = throughput("--lengths", "constant", "--lanes", lanes, "--train-time", train_time, "--run-ahead", run_ahead)
    assert together == 64 / (3 + 1)
    assert split <= together
    best_split = (lanes, run_ahead) == (48, 2) or (lanes, run_ahead) == (48, 8)
    assert (split == together) == best_split


def test_what_splitting_them_wins_is_the_tail():
    """Of 64 exponentials of mean 3 the longest is 3 x H(64) = 14.2 on average, so that a step together takes 15.2."""
    together = throughput("--lengths", "exponential", "--lanes", 64, "--train-time", 1, "--run-ahead", 0)
    split = throughput("--lengths", "exponential", "--lanes", 48, "--train-time", 4, "--run-ahead", 4)
    assert together == pytest.approx(64 / 15.2, rel=0.1)
    assert split == pytest.approx(16, rel=0.01)


def test_machines_that_keep_their_speed_win_at_most_twice():
    rates = [throughput("--lengths", "constant", "--lanes", 64, "--train-time", 3, "--run-ahead", k) for k in (0, 1, 2)]
    assert rates == pytest.approx([64 / 6, 64 / 3, 64 / 3])


@pytest.mark.parametrize(
    "recipe", sorted((REPOSITORY / "recipes" / "simulated").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_recipe_of_a_simulation_is_on_the_page_and_simulates(recipe):
    assert f"recipes/simulated/{recipe.name}" in TEXT
    figures = json.loads(printed(f"headway simulate {recipe} --steps 3 --skip-steps 0 --json"))
    assert len(figures["batches"]) == 3
    assert figures["mean_lag"] <= 1
