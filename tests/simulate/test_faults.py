"""Whole scenarios on virtual time: whatever befalls a run, every prompt is trained once or reported."""

import sys
from collections import Counter
from dataclasses import replace

import pytest

from headway import cli, simulation
from headway.schedule.ledger import Ledger
from headway.simulate.audit import kept_fates
from headway.simulate.faults import DEATHS, DISTURBANCES, Fault, scenario
from headway.simulate.trial import Tally, parse_seeds
from headway.types import UserError


def all_rules_hold(seeds):
    """Else the scenarios of the seeds that failed, with what was wrong."""
    failures = [trial.failure for trial in simulation.try_faults(seeds) if trial.problems]
    assert not failures, "\n".join(failures[:3])


@pytest.mark.parametrize("seeds", [range(first, first + 50) for first in range(0, 400, 50)], ids=str)
def test_every_rule_holds_whatever_befalls_a_run(seeds):
    all_rules_hold(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 250) for first in range(0, 10_000, 250)], ids=str)
def test_every_rule_holds_in_ten_thousand_scenarios(seeds):
    all_rules_hold(seeds)


# A seed is a whole scenario


def test_a_seed_replays_exactly():
    for seed in range(60):
        first, second = (simulation.play(scenario(seed)) for _ in range(2))
        assert [life.events for life in first.lives] == [life.events for life in second.lives]
        assert first.disk == second.disk
        assert [life.died_of for life in first.lives] == [life.died_of for life in second.lives]


def test_two_seeds_are_two_scenarios():
    assert len({str(scenario(seed)) for seed in range(60)}) == 60


def test_every_fault_strikes_and_every_policy_is_drawn():
    tally, schedules = Tally(), []
    for trial in simulation.try_faults(range(300)):
        tally.count(trial)
        schedules.append(trial.scenario.config.schedule)
    assert {*tally.struck} == {*DEATHS, *DISTURBANCES, "no fault"}
    assert {schedule.order for schedule in schedules} == {"finished", "started", "window"}
    in_flights = {schedule.in_flight for schedule in schedules}
    assert in_flights == {None, "keep", "recompute", "drain", "restart", "pinned"}
    assert {word for schedule in schedules for word in schedule.stragglers} == {"drop", "interrupt", "restart"}
    assert {schedule.surplus for schedule in schedules} == {None, "abort", "keep"}
    assert {schedule.overlap for schedule in schedules} == {True, False}
    assert all(any(schedule.dynamic_sampling is given for schedule in schedules) for given in (True, False))
    assert any(schedule.iteration_tokens for schedule in schedules)
    assert any(0 < schedule.run_ahead < 1 for schedule in schedules)


def test_a_scenario_says_what_it_is():
    """Its first line is the seed, its second the words that simulate its schedule."""
    drawn = replace(scenario(17), faults=(Fault("kill", 0, 12), Fault("slow scorer", 1, 3.0, for_s=5.0)))
    first, words, data, *faults = str(drawn).splitlines()
    assert first == "scenario 17"
    assert f"--generate.lanes {drawn.config.generate.lanes}" in words
    assert f"--schedule.order {drawn.config.schedule.order}" in words
    assert f"{drawn.num_groups} groups of data" in data
    assert [line.strip() for line in faults] == [
        "life 0: kill at trace event 12",
        "life 1: slow scorer at time 3, for 5",
    ]


# What is resumed is what was not interrupted


def dies(drawn):
    return any(fault.kind in DEATHS for fault in drawn.faults)


def test_a_run_that_died_and_was_resumed_trains_the_multiset_of_one_that_did_not():
    """Over a drained epoch. Where time decides which groups are dropped, all are trained or reported either way."""
    compared = Counter()
    for seed in range(400):
        drawn = scenario(seed)
        if not (drawn.drains and dies(drawn)):
            continue
        undisturbed = replace(drawn, faults=())
        resumed, whole = (kept_fates(each, simulation.play(each)) for each in (drawn, undisturbed))
        assert sorted(resumed) == sorted(whole) == list(range(drawn.num_groups)), str(drawn)
        if drawn.decided_by_identity:
            assert resumed == whole, str(drawn)
        compared[drawn.decided_by_identity] += 1
    assert min(compared.values()) > 20


def test_dead_runs_are_resumed_from_a_checkpoint_and_from_nothing():
    lives = [life for seed in range(60) for life in simulation.play(scenario(seed)).lives[1:]]
    began_from_version = {life.began_from.progress["version"] if life.began_from else None for life in lives}
    assert None in began_from_version
    assert len(began_from_version) > 3


# For people


def test_one_seed_is_told_in_lines():
    """Scenario, lives, and what became of the groups."""
    (trial,) = simulation.try_faults([4])
    assert str(trial).startswith(str(trial.scenario))
    assert len([line for line in str(trial).splitlines() if ": afresh; " in line or ": from version" in line]) == len(
        trial.history.lives
    )
    assert str(trial).splitlines()[-1] == "  every rule held"


def test_a_failure_is_told_with_its_scenario():
    (trial,) = simulation.try_faults([4])
    broken = replace(trial, problems=["group 3 was trained twice"])
    assert broken.failure == f"{trial.scenario}\n  WRONG: group 3 was trained twice"
    tally = Tally()
    tally.count(broken)
    assert tally.failed == [4]
    assert "1 failed: 4" in str(tally)


@pytest.mark.parametrize("spec", ["seventeen", "9..1", "-3", "1..", ""])
def test_seeds_that_are_none_are_refused(spec):
    with pytest.raises(UserError, match=r"a seed, as in 17, or seeds as in 0\.\.999"):
        parse_seeds(spec)


# The command


def ran(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["headway", "simulate", *words.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def test_seeds_without_a_failure_end_with_a_table_of_what_struck(monkeypatch, capsys):
    assert ran(monkeypatch, "--faults 0..9") == 0
    first, *table = capsys.readouterr().out.splitlines()
    assert first.startswith("10 scenarios, ")
    assert first.endswith("; none failed")
    assert [line.split("  ")[1] for line in table[1:]] == [*DEATHS, *DISTURBANCES, "no fault"]


def test_a_seed_that_fails_is_shown_and_the_command_fails(monkeypatch, capsys):
    """Groups that were released keep their slots."""
    give_back = Ledger._give_back

    def keep_the_slot(ledger, *args, **keywords):
        give_back(ledger, *args, **keywords)
        ledger.groups_released -= 1

    monkeypatch.setattr(Ledger, "_give_back", keep_the_slot)
    assert ran(monkeypatch, "--faults 0..29") == 1
    said = capsys.readouterr().out
    assert "WRONG: life 0, event" in said
    (seed,) = said.splitlines()[0].split()[1:]
    assert f"failed: {seed}" in said
    assert ran(monkeypatch, f"--faults {seed}") == 1
    assert capsys.readouterr().out.startswith(f"scenario {seed}\n")


def test_faults_take_no_other_setting(monkeypatch, capsys):
    assert ran(monkeypatch, "--faults 0..9 --lanes 3") == 2
    assert "--faults draws every setting from its seeds" in capsys.readouterr().err
    assert ran(monkeypatch, "--faults=") == 2
    assert "is not understood; it may be a seed" in capsys.readouterr().err
