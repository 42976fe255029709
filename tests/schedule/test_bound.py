"""No trained rollout is older than the bound of its schedule, and some are exactly as old."""

import math
import random
from dataclasses import replace
from itertools import product

import pytest

from headway.schedule.bound import lag_bound
from headway.schedule.groups import RolloutTicket
from headway.schedule.ledger import BoundBroken
from headway.schedule.policy import Rules
from headway.stages import Lost
from tests.schedule.doubles import Awkward, Plain, play, rules_of
from tests.schedule.reference_simulator import Case, random_policies

# Worked values


@pytest.mark.parametrize(
    ("run_ahead", "groups_per_batch", "lag"),
    [(1, 4, 1), (2, 4, 2), (0.5, 4, 1), (1.25, 4, 2), (1.9, 4, 2), (0.25, 4, 1), (0.2, 4, 0), (0.5, 1, 0), (3, 1, 3)],
)
def test_order_started(run_ahead, groups_per_batch, lag):
    assert lag_bound(Rules(run_ahead, order="started"), groups_per_batch).lag == lag


@pytest.mark.parametrize(
    ("run_ahead", "window", "groups_per_batch", "lag"),
    [
        (2, 9, 4, 4),  # 2 + ceil(8 / 4)
        (2, 10, 4, 5),
        (1, 1, 4, 1),
        (1, 2, 4, 2),
        (1, 5, 4, 2),
        (1, 6, 4, 3),
        (0.5, 2, 4, 1),  # ceil((2 + 1) / 4): less than ceil(0.5) + ceil(1 / 4)
        (0.5, 3, 4, 1),
        (0.5, 4, 4, 2),
        (1.9, 2, 4, 2),  # A = 7
        (3, 4, 1, 6),
    ],
)
def test_order_window(run_ahead, window, groups_per_batch, lag):
    assert lag_bound(Rules(run_ahead, order="window", window=window), groups_per_batch).lag == lag


@pytest.mark.parametrize("run_ahead", [0.2, 1, 5])
def test_order_finished_has_no_bound(run_ahead):
    bound = lag_bound(Rules(run_ahead), 8)
    assert (bound.lag, bound.why) == (None, "order finished: a rollout may be overtaken by any number of others")


@pytest.mark.parametrize(("run_ahead", "groups_per_batch"), [(0, 4), (0.1, 4), (0.24, 4), (0.9, 1)])
@pytest.mark.parametrize("order", ["finished", "started", "window"])
def test_without_a_whole_group_of_run_ahead_the_bound_is_0(run_ahead, groups_per_batch, order):
    rules = Rules(run_ahead, order=order, window=9 if order == "window" else None)
    assert lag_bound(rules, groups_per_batch).lag == 0


@pytest.mark.parametrize(
    ("rules", "lag", "why"),
    [
        (Rules(2, max_lag=3, stragglers=("drop",)), 3, "drop"),
        (Rules(2, max_lag=3, stragglers=("drop", "interrupt")), 3, "drop"),
        (Rules(2, max_lag=3, stragglers=("interrupt",)), None, "order finished"),
        (Rules(2, max_lag=3, stragglers=("restart",)), None, "order finished"),
        (Rules(2, max_lag=3), None, "order finished"),
        (Rules(2, order="window", window=9, max_lag=3, stragglers=("drop",)), 3, "drop"),
        (Rules(2, order="window", window=9, max_lag=5, stragglers=("drop",)), 4, "order window"),
        (Rules(2, order="started", max_lag=0, stragglers=("drop",)), 0, "drop"),
        (Rules(2, order="started", max_lag=3, stragglers=("drop",)), 2, "order started"),
        (Rules(0, max_lag=3, stragglers=("drop",)), 0, "run_ahead 0"),
    ],
)
def test_the_smaller_bound_holds_and_says_why(rules, lag, why):
    bound = lag_bound(rules, 4)
    assert bound.lag == lag
    assert bound.why.startswith(why)


# It holds


def losing(stages):
    """Stages whose engine now and then loses a rollout: at once, or as it would have returned it."""

    class Losing(stages):
        attempts = 0

        async def generate(self, ticket):
            self.attempts += 1
            dice = random.Random(f"{self.case.seed}:loss:{self.attempts}").random()
            if dice < 0.03:
                raise Lost("the engine would not have it")
            generated = await super().generate(ticket)
            if dice > 0.95:
                raise Lost("the engine has crashed")
            return generated

    return Losing


def hold_the_bound(seed):
    """A run with all that can happen to it, and a second one that goes on from one of its checkpoints -> the largest
    lag of both, and the runs. The ledger would raise BoundBroken; the lags are looked at all the same.
    """
    case, pick = random_policies(seed), random.Random(seed)
    bound = lag_bound(rules_of(case), case.groups_per_batch).lag
    kind = losing(pick.choice([Plain, Awkward])) if pick.random() < 0.5 else pick.choice([Plain, Awkward])
    more = {
        "evaluation_size": pick.choice([0, 0, 1, 3]),
        "evaluate_every": pick.randint(0, 3),
        "save_every": pick.choice([0, 1, 2]),
        "max_lost": pick.randint(0, 2),
    }
    stages = kind(case)
    runs = [play(case, stages, **more)]
    if stages.saved:
        at = pick.randrange(len(stages.saved))
        longer = replace(case, steps=case.steps + pick.randint(0, 4))
        runs.append(play(longer, kind(longer), progress=stages.saved[at], restored=stages.kept[at], **more))
    for played in runs:
        assert lags_by_the_trace(played) == played.lags, case
        assert bound is None or max(played.lags, default=0) <= bound, case
    return max((lag for played in runs for lag in played.lags), default=0), runs


def lags_by_the_trace(played):
    """Of every trained rollout, from the versions of its tokens; of a restored one, what the ledger says."""
    versions = {event["rollout"]: [version for version, _ in event["versions"]] for event in played.of("generated")}
    started = {event["rollout"]: event["version"] for event in played.of("started", "resumed")}
    lags = []
    for taken in played.of("taken"):
        for rollout, lag in zip(taken["rollouts"], taken["lags"], strict=True):
            if rollout not in versions:  # restored with its score: it was generated in another life
                assert rollout not in started
                lags.append(lag)
            else:
                lags.append(taken["version"] - min(versions[rollout], default=started[rollout]))
    return lags


@pytest.mark.parametrize("seeds", [range(75), range(75, 150)], ids=str)
def test_random_scenarios_hold_their_bound(seeds):
    for seed in seeds:
        hold_the_bound(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 1000) for first in range(0, 10_000, 1000)], ids=str)
def test_ten_thousand_random_scenarios_hold_their_bound(seeds):
    for seed in seeds:
        hold_the_bound(seed)


def test_the_random_scenarios_meet_what_they_are_for():
    """Everything that a bound has to outlive is in many of them, and lags that reach bounds above 0."""
    met, num_reached = dict.fromkeys(("lost", "restored", "evaluated", "short batch", "resumed"), 0), 0
    for seed in range(1000, 1150):
        case = random_policies(seed)
        largest, runs = hold_the_bound(seed)
        kinds = {event.kind for played in runs for event in played.events}
        batches = [len(event["groups"]) for played in runs for event in played.of("taken")]
        for kind in met:
            met[kind] += kind in kinds or (kind == "short batch" and min(batches, default=99) < case.groups_per_batch)
        num_reached += 0 < largest == lag_bound(rules_of(case), case.groups_per_batch).lag
    assert all(number > 15 for number in met.values()), met
    assert num_reached > 20


# It is tight


def as_old_as_can_be(order, run_ahead, window, groups_per_batch, group_size=1):
    """The last group that is admitted under version 0 is slow: all older ones and window - 1 younger ones pass it."""
    ahead = math.floor(run_ahead * groups_per_batch)
    slow = ahead + groups_per_batch - 1
    lengths = [1.0] * (slow * group_size) + [1000.0] * group_size + [1.0]
    steps = 1 + math.ceil((ahead + window - 1) / groups_per_batch)
    return Case(
        lanes=(slow + 2) * group_size,
        group_size=group_size,
        groups_per_batch=groups_per_batch,
        run_ahead=run_ahead,
        steps=steps,
        lengths=tuple(lengths),
        order=order,
        window=window if order == "window" else None,
    )


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("groups_per_batch", [1, 2, 3, 4])
@pytest.mark.parametrize("run_ahead", [0, 0.25, 0.5, 1, 1.5, 1.75, 2, 3])
def test_there_are_rollouts_as_old_as_the_bound_of_order_started(run_ahead, groups_per_batch, group_size):
    case = as_old_as_can_be("started", run_ahead, 1, groups_per_batch, group_size)
    bound = lag_bound(rules_of(case), groups_per_batch).lag
    assert max(play(case).lags) == bound == math.ceil(math.floor(run_ahead * groups_per_batch) / groups_per_batch)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("groups_per_batch", [1, 2, 3, 4])
@pytest.mark.parametrize("run_ahead", [0.5, 1.0, 1.75, 2.0, 3.0])
def test_there_are_rollouts_as_old_as_the_bound_of_order_window(run_ahead, groups_per_batch, window):
    case = as_old_as_can_be("window", run_ahead, window, groups_per_batch)
    bound = lag_bound(rules_of(case), groups_per_batch).lag
    assert max(play(case).lags) == bound
    assert bound == 0 or not run_ahead.is_integer() or bound == run_ahead + math.ceil((window - 1) / groups_per_batch)


@pytest.mark.parametrize("max_lag", [0, 1, 2, 3])
def test_there_are_rollouts_as_old_as_max_lag_where_older_ones_are_dropped(max_lag):
    case = Case(lanes=8, groups_per_batch=2, run_ahead=max_lag + 1, steps=12, train_time=4, lengths=(1,))
    played = play(replace(case, max_lag=max_lag, stragglers=("drop",)))
    assert played.of("dropped")
    assert max(played.lags) == max_lag


# What breaks it is seen


@pytest.mark.parametrize(("groups_per_batch", "run_ahead", "window"), [(1, 1, 3), (2, 1, 3), (2, 1.5, 4), (4, 2, 5)])
def test_a_window_that_is_one_group_too_wide_breaks_the_bound(groups_per_batch, run_ahead, window):
    case = as_old_as_can_be("window", run_ahead, window + 1, groups_per_batch)
    narrow = replace(case, window=window)
    play(narrow)
    with pytest.raises(BoundBroken):
        first_cause(narrow, rules_of(case))


@pytest.mark.parametrize(("groups_per_batch", "run_ahead"), [(1, 1), (2, 1), (4, 2), (3, 3)])
def test_one_group_admitted_too_many_breaks_the_bound(groups_per_batch, run_ahead):
    case = as_old_as_can_be("started", run_ahead + 1 / groups_per_batch, 1, groups_per_batch)
    with pytest.raises(BoundBroken, match=f"lag {run_ahead + 1}, and the schedule's bound is {run_ahead}"):
        first_cause(replace(case, run_ahead=run_ahead), rules_of(case))


@pytest.mark.parametrize(("order", "window"), [("started", None), ("window", 3)])
def test_batches_in_the_wrong_order_break_the_bound(order, window):
    case = Case(lanes=4, groups_per_batch=1, run_ahead=2, steps=20, lengths=(1, 12, 1), order=order, window=window)
    with pytest.raises(BoundBroken):
        first_cause(case, Rules(2))


def test_a_bound_on_what_is_in_flight_alone_breaks_it(monkeypatch):
    """The queue of finished groups counts too."""

    def counts_what_is_in_flight(rules, ledger):
        return len(ledger.active) - len(ledger.ready) < (rules.run_ahead + 1) * ledger.settings.groups_per_batch

    case = Case(lanes=4, groups_per_batch=2, run_ahead=1, steps=8, train_time=5, lengths=(1,), order="started")
    play(case)
    monkeypatch.setattr(Rules, "admits", counts_what_is_in_flight)
    with pytest.raises(BoundBroken):
        first_cause(case)


def test_an_admission_counter_that_restarts_at_zero_breaks_it():
    case = Case(lanes=9, groups_per_batch=2, run_ahead=1, steps=9, train_time=5, lengths=(1,), order="started")
    stages = Plain(case)
    play(case, stages, save_every=1)
    saved, kept = stages.saved[3], stages.kept[3]
    play(case, progress=saved, restored=kept)
    with pytest.raises(BoundBroken):
        first_cause(case, progress=saved | {"groups_started": len(saved["active"])}, restored=kept)


def test_a_lag_that_counts_from_where_a_rollout_went_on_is_wrong(monkeypatch):
    """A rollout that paused has its oldest token from before."""
    case = Case(lanes=4, groups_per_batch=2, run_ahead=0.5, steps=9, lengths=(1, 1, 4, 1), overlap=False)
    played = play(case)
    assert lags_by_the_trace(played) == played.lags
    assert max(played.lags) > 1
    monkeypatch.setattr(RolloutTicket, "oldest_version", property(lambda ticket: ticket.version))
    wrong = play(case)
    assert lags_by_the_trace(wrong) != wrong.lags


def test_a_version_is_a_train_step_however_many_optimizer_steps_it_takes():
    class TakesFour(Plain):
        async def train(self, batch):
            trained = await super().train(batch)
            return replace(trained, metrics={"optimizer_steps": 4})

    case = Case(steps=5, lengths=(1,), train_time=4, order="started")
    played = play(case, TakesFour(case))
    assert [event["version"] for event in played.of("trained")] == [1, 2, 3, 4, 5]
    assert max(played.lags) == 1


def first_cause(case, rules=None, **more):
    try:
        play(case, rules=rules, **more)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


# A surplus rollout that comes late


@pytest.mark.parametrize(("redundant", "order"), list(product([1, 2], ["finished", "started", "window"])))
def test_a_late_surplus_rollout_makes_its_group_no_older_than_max_lag(redundant, order):
    for seed in range(30):
        case = replace(
            random_policies(seed),
            redundant=redundant,
            keep_redundant=True,
            stragglers=("drop",),
            max_lag=seed % 2,
            order=order,
            window=4 if order == "window" else None,
            in_flight="keep",
            dynamic_sampling=False,
        )
        assert max(play(case).lags, default=0) <= case.max_lag, case
