"""Every pair of policies that is not refused runs to its end, in every combination with the others."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest

from headway import program
from headway.config import Config
from tests.schedule.doubles import Awkward, Plain, history_of, play
from tests.schedule.reference_simulator import Case, simulate

POLICIES: dict[str, list[dict[str, Any]]] = {
    "run_ahead": [{"run_ahead": run_ahead} for run_ahead in (0, 0.5, 2)],
    "order": [{"order": "finished"}, {"order": "started"}, {"order": "window", "window": 3}],
    "stragglers": [
        {},
        {"stragglers": ("accept",), "max_lag": 1},
        *({"stragglers": ("drop",), "max_lag": max_lag} for max_lag in (0, 1)),
        *({"stragglers": ("interrupt",), "max_lag": max_lag} for max_lag in (0, 1)),
        *({"stragglers": ("restart",), "max_lag": max_lag, "max_restarts": 2} for max_lag in (0, 1)),
        {"stragglers": ("drop", "interrupt"), "max_lag": 1},
        {"stragglers": ("drop", "restart"), "max_lag": 1},
    ],
    "in_flight": [{"in_flight": word} for word in ("keep", "recompute", "drain", "restart", "pinned")],
    "overlap": [{}, {"overlap": False}],
    "iteration_tokens": [{}, {"iteration_tokens": 2}],
    "redundant": [{}, {"redundant": 1}, {"redundant": 1, "surplus": "keep"}],
    "dynamic_sampling": [{}, {"dynamic_sampling": True}],
    "deadline": [{}, {"deadline_s": 5.0}],
    "group_size": [{"group_size": 1, "batch_size": 2}, {"group_size": 2, "batch_size": 4}],
}


@cache
def allowed() -> list[dict[str, Any]]:
    """Every combination that a configuration may hold."""
    found = []
    for values in product(*POLICIES.values()):
        schedule = {name: value for policy in values for name, value in policy.items()}
        try:
            Config(schedule=schedule)
        except ValueError:
            continue
        found.append(schedule)
    return found


class Patient(Plain):
    """Gives up on a schedule that gets nowhere."""

    num_generated = 0

    async def generate(self, ticket):
        self.num_generated += 1
        assert self.num_generated < 2000, "the schedule goes round in circles"
        return await super().generate(ticket)


def case_of(config: Config, seed: int) -> Case:
    """A tiny case of what is configured; in half of them the data end."""
    rules, settings, pick = program.rules(config, simulated=True), program.sizes(config), random.Random(seed)
    return Case(
        lanes=pick.choice([1, 3, 5]),
        group_size=settings.group_size,
        groups_per_batch=settings.groups_per_batch,
        run_ahead=rules.run_ahead,
        steps=4,
        train_time=pick.choice([0.0, 2.0]),
        sync_time=pick.choice([0.0, 1.0]),
        score_times=pick.choice([(0.0,), (0.0, 2.0, 0.5)]),
        longest=9,
        unscored=pick.choice([0.0, 0.1]),
        num_groups=pick.choice([None, 7]),
        seed=seed,
        order=rules.order,
        window=rules.window,
        max_lag=rules.max_lag,
        stragglers=rules.stragglers,
        max_restarts=rules.max_restarts,
        in_flight=rules.in_flight,
        overlap=rules.overlap,
        redundant=settings.redundant,
        keep_redundant=settings.keep_redundant,
        dynamic_sampling=rules.dynamic_sampling,
        num_rewards=2 if rules.dynamic_sampling else 1,
        deadline=rules.deadline_s,
        iteration_tokens=settings.iteration_tokens,
    )


def run_to_the_end(schedule: dict[str, Any], seed: int) -> None:
    """All steps, or all data; as the independent simulator has it."""
    config = Config(schedule=schedule)
    case = case_of(config, seed)
    played = play(case, Patient(case), rules=program.rules(config, simulated=True))
    ledger = played.ledger
    assert ledger.published == case.steps or (case.num_groups is not None and not ledger.active), case
    expected = replace(case, in_flight="keep") if case.in_flight in ("recompute", "pinned") else case
    assert history_of(played) == simulate(expected), case


def test_every_pair_of_policies_that_is_not_refused_runs():
    """Each pair of values, with the first allowed combination that holds it."""
    wanted = {}
    for number, schedule in enumerate(random.Random(0).sample(allowed(), len(allowed()))):
        items = sorted((name, value) for name, value in schedule.items())
        for pair in combinations(items, 2):
            wanted.setdefault(str(pair), (number, schedule))
    chosen = dict(wanted.values())
    assert len(wanted) > 250
    for number, schedule in chosen.items():
        run_to_the_end(schedule, number)


@pytest.mark.parametrize("part", range(2))
def test_random_combinations_of_policies_run(part):
    for seed, schedule in enumerate(random.Random(part).sample(allowed(), 150)):
        run_to_the_end(schedule, seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_combination_of_policies_that_is_not_refused_runs(part):
    for seed, schedule in enumerate(allowed()[part::8]):
        run_to_the_end(schedule, seed)


def test_most_combinations_make_sense_and_many_do_not():
    num_all = len(list(product(*POLICIES.values())))
    assert 0.3 * num_all < len(allowed()) < 0.7 * num_all


@pytest.mark.parametrize("seed", range(20))
def test_awkward_stages_change_nothing_in_a_combination(seed):
    config = Config(schedule=random.Random(f"awkward:{seed}").choice(allowed()))
    case, rules = case_of(config, seed), program.rules(config, simulated=True)
    assert history_of(play(case, Plain(case), rules=rules)) == history_of(play(case, Awkward(case), rules=rules))
