"""The rules, asked about ledgers set by hand."""

import json
import random
from types import SimpleNamespace

import pytest

from headway.schedule.ledger import Ledger, Settings
from headway.schedule.policy import Rules
from headway.stages import Generated, Scored
from headway.trace import Trace
from headway.types import Receipt, VersionRun


def ledger_of(**sizes):
    settings = Settings(**{"lanes": 8, "batch_size": 2, "steps": 5, **sizes})
    return Ledger(settings, now=lambda: 0.0, changed=lambda: None, trace=Trace())


def generated(ticket, num_tokens=1, finish="stop"):
    runs = (*(ticket.receipt.version_runs if ticket.receipt else ()), VersionRun(ticket.version, num_tokens))
    return Generated("rollout", Receipt(f"prompt {ticket.group}", 0, runs if num_tokens else runs[:-1], finish))


def end(ledger, *tickets, finish="stop", num_tokens=1):
    """They leave their lanes; -> whether they are to be scored."""
    wanted = [ledger.report_generated(ticket, generated(ticket, num_tokens, finish)) for ticket in tickets]
    ledger.settle()
    return wanted


def answer(ledger, *tickets, outcome="scored", reward=1.0):
    for ticket in tickets:
        ledger.report_generated(ticket, generated(ticket))
        ledger.report_scored(ticket, Scored("rollout", outcome, reward if outcome == "scored" else None))
    ledger.settle()


def train(ledger, groups):
    ledger.take(groups)
    ledger.report_trained("weights", {})
    ledger.settle()


def publish(ledger):
    _, version = ledger.publish()
    ledger.report_published(version)
    ledger.settle()


def step(ledger, *groups):
    """A whole step with these groups: afterwards a version has come out."""
    train(ledger, [ledger.active[index] for index in groups])
    publish(ledger)


def indices(groups):
    return groups and [group.index for group in groups]


def who(tickets):
    """Group and member of each."""
    return [(ticket.group, ticket.member) for ticket in tickets]


# Admission


@pytest.mark.parametrize(
    ("run_ahead", "published", "groups_per_batch", "admitted"),
    [
        (0, 0, 2, 2),
        (1, 0, 2, 4),
        (1, 1, 2, 6),
        (0.5, 0, 4, 6),
        (0.5, 3, 4, 18),
        (0.3, 0, 2, 2),  # 2.6 groups, rounded down
        (0.75, 2, 2, 7),
        (2.5, 0, 1, 3),
        (0.29, 0, 100, 129),  # in binary fractions 0.29 x 100 is 28.999...
        (0.04, 7, 25, 201),  # and (7 + 0.04 + 1) x 25 is 200.999...
    ],
)
def test_groups_admitted(run_ahead, published, groups_per_batch, admitted):
    ledger = SimpleNamespace(published=published, settings=SimpleNamespace(groups_per_batch=groups_per_batch))
    assert Rules(run_ahead).num_admitted(ledger) == admitted


@pytest.mark.parametrize("groups_per_batch", [1, 3, 7, 25, 64])
def test_admission_is_exact_in_hundredths(groups_per_batch):
    settings = SimpleNamespace(groups_per_batch=groups_per_batch)
    for hundredths in range(300):
        for published in (0, 1, 7, 1000):
            exact = ((published + 1) * 100 + hundredths) * groups_per_batch // 100
            ledger = SimpleNamespace(published=published, settings=settings)
            assert Rules(hundredths / 100).num_admitted(ledger) == exact


def test_groups_start_until_the_slots_are_taken():
    ledger, rules = ledger_of(), Rules(1)
    while rules.may_start(ledger):
        ledger.start()
    assert ledger.groups_started == 4
    assert len(ledger.idle_lanes) == 4


def test_groups_start_until_the_lanes_are_taken():
    ledger, rules = ledger_of(lanes=3), Rules(1)
    while rules.may_start(ledger):
        ledger.start()
    assert ledger.groups_started == 3


def test_an_open_group_goes_on_whatever_the_slots():
    ledger, rules = ledger_of(lanes=3, batch_size=4, group_size=4), Rules(0)
    while rules.may_start(ledger):
        ledger.start()
    assert (ledger.groups_started, ledger.rollouts_started, len(ledger.waiting)) == (1, 3, 1)
    answer(ledger, ledger.running[0])
    assert rules.may_start(ledger)
    ledger.start()
    answer(ledger, ledger.running[1])
    assert not rules.may_start(ledger)


def test_a_failed_group_makes_room_for_another():
    ledger, rules = ledger_of(), Rules(0)
    ledger.start()
    ledger.start()
    assert not rules.may_start(ledger)
    answer(ledger, ledger.running[0], outcome="grader_error")
    assert rules.may_start(ledger)


def test_nothing_starts_after_the_end_of_the_data():
    ledger, rules = ledger_of(num_groups=3), Rules(9)
    while rules.may_start(ledger):
        ledger.start()
    assert ledger.groups_started == 3


# Batches


def test_a_batch_is_the_first_groups_that_were_ready():
    ledger, rules = ledger_of(), Rules(1)
    tickets = [ledger.start() for _ in range(4)]
    answer(ledger, tickets[3])
    assert rules.batch(ledger) is None
    answer(ledger, tickets[1])
    answer(ledger, tickets[0])
    assert [group.index for group in rules.batch(ledger)] == [0, 1]  # all at one instant: in order of start


def test_no_batch_while_the_trainer_is_busy_or_its_weights_travel():
    ledger, rules = ledger_of(), Rules(1)
    for ticket in [ledger.start() for _ in range(4)]:
        answer(ledger, ticket)
    train(ledger, rules.batch(ledger))
    assert rules.batch(ledger) is None
    ledger.publish()
    assert rules.batch(ledger) is None
    ledger.report_published(1)
    ledger.settle()
    assert [group.index for group in rules.batch(ledger)] == [2, 3]


def test_a_short_batch_only_when_nothing_more_can_come():
    ledger, rules = ledger_of(num_groups=2, batch_size=4), Rules(1)
    tickets = [ledger.start() for _ in range(2)]
    answer(ledger, tickets[0])
    assert rules.batch(ledger) is None
    answer(ledger, tickets[1], outcome="grader_timeout")
    assert [group.index for group in rules.batch(ledger)] == [0]


def test_no_batch_after_the_last_step():
    ledger, rules = ledger_of(steps=1), Rules(1)
    for ticket in [ledger.start() for _ in range(4)]:
        answer(ledger, ticket)
    train(ledger, rules.batch(ledger))
    publish(ledger)
    assert rules.may_save(ledger)
    assert rules.batch(ledger) is None
    ledger.save()
    assert not rules.may_save(ledger)
    ledger.report_saved()
    ledger.settle()
    assert ledger.done
    assert rules.batch(ledger) is None
    assert not rules.may_start(ledger)


# Publishing and evaluating


def test_weights_are_published_once():
    ledger, rules = ledger_of(), Rules(1)
    for ticket in [ledger.start() for _ in range(2)]:
        answer(ledger, ticket)
    assert not rules.may_publish(ledger)
    train(ledger, rules.batch(ledger))
    assert rules.may_publish(ledger)
    assert ledger.publish() == ("weights", 1)
    assert not rules.may_publish(ledger)


def test_nothing_is_published_under_an_open_evaluation():
    ledger, rules = ledger_of(evaluation_size=2), Rules(1)
    answers = [ledger.evaluate() for _ in range(2)]
    assert not rules.may_evaluate(ledger)
    for ticket in [ledger.start() for _ in range(2)]:
        answer(ledger, ticket)
    train(ledger, rules.batch(ledger))
    assert not rules.may_publish(ledger)
    for ticket in answers:
        answer(ledger, ticket)
    assert rules.may_publish(ledger)


def test_an_evaluation_needs_a_free_lane():
    ledger, rules = ledger_of(lanes=1, evaluation_size=2), Rules(1)
    assert rules.may_evaluate(ledger)
    ticket = ledger.evaluate()
    assert not rules.may_evaluate(ledger)
    answer(ledger, ticket)
    assert rules.may_evaluate(ledger)


# The order of training


def ready_in_order(*order, **sizes):
    """A ledger whose groups of one are ready in this order; those left out are still in flight."""
    clock = iter(range(1, 100))
    now = 0

    def tick():
        nonlocal now
        now = next(clock)

    settings = Settings(**{"lanes": 20, "batch_size": 2, "steps": 9, **sizes})
    ledger = Ledger(settings, now=lambda: now, changed=lambda: None, trace=Trace())
    tickets = [ledger.start() for _ in range(max(order) + 2)]
    for index in order:
        tick()
        answer(ledger, tickets[index])
    return ledger


FINISHED = Rules(9)
STARTED = Rules(9, order="started")


def window(size):
    return Rules(9, order="window", window=size)


@pytest.mark.parametrize(
    ("rules", "order", "batch"),
    [
        (FINISHED, [3, 1, 0], [3, 1]),
        (STARTED, [3, 1, 0], [0, 1]),
        (STARTED, [3, 1, 2], None),
        (window(2), [3, 1, 0], [1, 0]),
        (window(4), [3, 1, 0], [3, 1]),
        (window(3), [3, 1, 2], [1, 2]),  # 3 is outside, as long as 0 is there
        (window(2), [3, 2, 1], None),
        (window(1), [3, 1, 0], [0, 1]),
        (window(1), [1, 2, 3], None),
    ],
)
def test_which_groups_are_a_batch(rules, order, batch):
    assert indices(rules.batch(ready_in_order(*order))) == batch


@pytest.mark.parametrize(
    ("size", "order", "batch"),
    [
        (2, [2, 3, 0, 1], [0, 2, 1, 3]),  # 0 makes room for 2, which was before 1; 3 enters when 1 has gone
        (2, [4, 0, 1, 2, 3], [0, 1, 2, 4]),
        (3, [4, 0, 1, 2, 3], [0, 1, 4, 2]),
        (3, [2, 4, 0, 3, 1], [2, 0, 3, 1]),  # 4 enters when 1 has gone
        (5, [4, 3, 2, 1, 0], [4, 3, 2, 1]),
        (3, [1, 2, 3, 4], None),
        (4, [1, 2, 3, 4], None),
        (5, [1, 2, 3, 4], [1, 2, 3, 4]),
    ],
)
def test_the_window_moves_on_within_a_batch_when_its_oldest_group_is_chosen(size, order, batch):
    assert indices(window(size).batch(ready_in_order(*order, batch_size=4))) == batch


def test_the_window_stands_still_over_several_batches_until_its_oldest_group_is_taken():
    """Window 4 over groups 0 to 3: with 0 in flight, 1 and 2 are a batch, and 3 has nobody to go with."""
    ledger, rules = ready_in_order(1, 2, 3, 4, 5), window(4)
    assert indices(rules.batch(ledger)) == [1, 2]
    step(ledger, 1, 2)
    assert rules.batch(ledger) is None
    answer(ledger, ledger.running[0])
    assert indices(rules.batch(ledger)) == [3, 0]  # 4 was ready before 0, and the window moves on when 0 goes
    step(ledger, 3, 0)
    assert indices(rules.batch(ledger)) == [4, 5]


def test_a_released_group_leaves_its_place_in_the_window_empty():
    """Window 2 at group 0 is groups 0 and 1, also when 1 has failed."""
    ledger, rules = ready_in_order(2, 3), window(2)
    answer(ledger, ledger.running[1], outcome="grader_error")
    assert rules.batch(ledger) is None
    answer(ledger, ledger.running[0])
    assert indices(rules.batch(ledger)) == [0, 2]


@pytest.mark.parametrize("seed", range(50))
def test_a_window_of_one_takes_what_the_order_of_start_takes(seed):
    order = random.Random(seed).sample(range(8), random.Random(seed).randint(2, 8))
    ledger = ready_in_order(*order, batch_size=1 + seed % 3)
    assert indices(window(1).batch(ledger)) == indices(STARTED.batch(ledger))


@pytest.mark.parametrize("seed", range(50))
def test_a_window_over_everything_takes_what_is_finished_first(seed):
    order = random.Random(seed).sample(range(8), random.Random(seed).randint(2, 8))
    ledger = ready_in_order(*order, batch_size=1 + seed % 3)
    assert indices(window(99).batch(ledger)) == indices(FINISHED.batch(ledger))


def test_groups_with_an_interrupted_rollout_are_taken_first():
    ledger = ready_in_order(3, 1)
    ledger.interrupt(ledger.running[0], "max_lag")
    answer(ledger, ledger.running[0])
    assert indices(FINISHED.batch(ledger)) == [0, 3]
    assert indices(window(2).batch(ledger)) == [0, 1]
    assert indices(window(4).batch(ledger)) == [0, 3]


# What is too old


def aged(*, steps, **sizes):
    """Groups 0 and 1 started under version 0, the steps are made of others. -> the ledger; a version has come out."""
    ledger = ledger_of(lanes=30, **sizes)
    tickets = [ledger.start() for _ in range(2 + 2 * steps)]
    for number in range(steps):
        answer(ledger, *tickets[2 + 2 * number : 4 + 2 * number])
        step(ledger, 2 + 2 * number, 3 + 2 * number)
    return ledger


@pytest.mark.parametrize(("max_lag", "dropped"), [(0, [0, 1]), (1, [0, 1]), (2, []), (3, [])])
def test_finished_groups_are_dropped_above_max_lag_when_a_version_comes_out(max_lag, dropped):
    rules = Rules(9, stragglers=("drop",), max_lag=max_lag)
    ledger = ledger_of(lanes=30)
    tickets = [ledger.start() for _ in range(6)]
    answer(ledger, *tickets)
    step(ledger, 2, 3)
    step(ledger, 4, 5)
    assert indices(rules.dropped(ledger)) == dropped
    assert Rules(9, max_lag=max_lag).dropped(ledger) == []


@pytest.mark.parametrize(("max_lag", "dropped"), [(0, [0]), (1, [0]), (2, []), (3, [])])
def test_a_group_that_finishes_too_old_is_dropped_then(max_lag, dropped):
    rules = Rules(9, stragglers=("drop",), max_lag=max_lag)
    ledger = aged(steps=2)
    assert rules.dropped(ledger) == []  # nothing old has finished
    answer(ledger, ledger.running[0])
    assert indices(rules.dropped(ledger)) == dropped
    ledger.settle()
    assert not ledger.newly_ready


def test_the_lag_of_a_group_is_that_of_its_oldest_member():
    """Member 1 starts a version after member 0."""
    ledger = ledger_of(lanes=3, batch_size=4, group_size=2)
    first, second, third = ledger.start(), ledger.start(), ledger.start()
    answer(ledger, first, second)
    fourth = ledger.start()
    answer(ledger, fourth)
    train(ledger, [ledger.active[0]])
    publish(ledger)
    assert ledger.group_lag(ledger.active[1]) == 1
    answer(ledger, third)
    assert ledger.group_lag(ledger.active[1]) == 1
    assert indices(Rules(9, stragglers=("drop",), max_lag=0).dropped(ledger)) == [1]


@pytest.mark.parametrize(("max_lag", "late"), [(0, [(0, 0), (1, 0)]), (2, [(0, 0), (1, 0)]), (3, [])])
def test_unfinished_groups_are_interrupted_when_they_reach_max_lag(max_lag, late):
    rules = Rules(9, stragglers=("interrupt",), max_lag=max_lag)
    ledger = aged(steps=2)
    interrupted = list(rules.interrupted(ledger))
    assert who(ticket for ticket, _ in interrupted) == late
    assert {why for _, why in interrupted} <= {"max_lag"}
    for ticket, why in interrupted:
        ledger.interrupt(ticket, why)
    assert list(rules.interrupted(ledger)) == []  # once
    ledger.settle()
    assert list(rules.interrupted(ledger)) == []  # only when a version comes out


def test_a_rollout_under_the_newest_weights_is_no_straggler():
    """Nothing older than what is published is in flight when step 1 ends: all wait until version 1 is out."""
    rules = Rules(9, stragglers=("interrupt",), max_lag=1)
    ledger = ledger_of()
    tickets = [ledger.start() for _ in range(4)]
    answer(ledger, *tickets[:2])
    train(ledger, [ledger.active[0], ledger.active[1]])
    assert (ledger.trained, ledger.published, ledger.lag(tickets[2])) == (1, 0, 1)
    assert list(rules.interrupted(ledger)) == []
    publish(ledger)
    assert who(ticket for ticket, _ in rules.interrupted(ledger)) == [(2, 0), (3, 0)]


def test_the_members_of_a_late_group_are_interrupted_whatever_their_own_lag():
    """Group 0: member 0 is done under version 0; member 1 begins under version 1 and ends when version 2 is out."""
    rules = Rules(9, stragglers=("interrupt",), max_lag=2)
    ledger = ledger_of(lanes=5, batch_size=4, group_size=2)
    tickets = [ledger.start() for _ in range(5)]
    ledger.begin_again(tickets[1], "new weights")
    end(ledger, tickets[1], finish="interrupted")
    answer(ledger, tickets[0], *tickets[2:4])
    step(ledger, 1)
    again = ledger.start()
    assert (again.group, again.member, again.version) == (0, 1, 1)
    other = ledger.start()
    answer(ledger, tickets[4], other)
    step(ledger, 2)
    assert ledger.lag(again) == 1
    assert who(ticket for ticket, _ in rules.interrupted(ledger)) == [(0, 1)]


def test_late_groups_begin_again_as_often_as_they_may_and_then_end():
    rules = Rules(9, stragglers=("restart",), max_lag=1, max_restarts=2)
    ledger = ledger_of(batch_size=1, steps=9)
    old = ledger.start()
    for restart in (1, 2):
        answer(ledger, ledger.start())
        step(ledger, max(ledger.active))
        assert indices(rules.restarted(ledger)) == [0]
        ledger.restart(ledger.active[0], "max_lag")
        assert list(rules.interrupted(ledger)) == []
        assert ledger.active[0].num_restarts == restart
        end(ledger, old, finish="interrupted")
        old = ledger.start()
        assert (old.group, old.version) == (0, restart)
    answer(ledger, ledger.start())
    step(ledger, max(ledger.active))
    assert rules.restarted(ledger) == []
    assert [(ticket, why) for ticket, why in rules.interrupted(ledger)] == [(old, "max_lag")]


def test_a_late_group_begins_again_when_the_new_weights_are_published_and_not_before():
    """At lag 2 of 2 when step 2 ends; until its weights are out, it would begin again under version 1."""
    rules = Rules(9, stragglers=("restart",), max_lag=2)
    ledger = ledger_of(batch_size=1)
    ledger.start()
    for _ in range(2):
        answer(ledger, ledger.start())
        train(ledger, [ledger.active[max(ledger.active)]])
        if ledger.trained == 1:
            publish(ledger)
    assert ledger.group_lag(ledger.active[0]) == 2
    assert (rules.restarted(ledger), list(rules.interrupted(ledger))) == ([], [])
    publish(ledger)
    assert indices(rules.restarted(ledger)) == [0]


def test_a_paused_rollout_is_interrupted_where_it_stands():
    """It gets a lane once more, with no token to sample there."""
    rules = Rules(9, stragglers=("interrupt",), max_lag=1)
    ledger = ledger_of(batch_size=1, iteration_tokens=5)
    paused, other = ledger.start(), ledger.start()
    assert paused.max_tokens == 5
    assert end(ledger, paused, finish="interrupted", num_tokens=5) == [False]
    answer(ledger, other)
    step(ledger, 1)
    ((ticket, why),) = rules.interrupted(ledger)
    assert (ticket, why) == (paused, "max_lag")
    ledger.interrupt(ticket, why)
    assert ledger.start() is paused
    assert paused.max_tokens == 0
    assert end(ledger, paused, finish="interrupted", num_tokens=0) == [True]


# Deadlines


def test_a_rollout_over_its_deadline_is_interrupted():
    ledger, rules = ledger_of(), Rules(9, deadline_s=3.0)
    late, done = ledger.start(), ledger.start()
    ledger.report_overdue(done)
    ledger.report_overdue(late)
    answer(ledger, done)  # ended at the same instant
    assert list(rules.interrupted(ledger)) == [(late, "deadline")]
    ledger.settle()
    assert list(rules.interrupted(ledger)) == []


def test_a_deadline_is_of_no_interest_for_a_rollout_that_was_thrown_away_at_that_instant():
    """A surplus rollout is over its deadline at the moment in which its group is dropped."""
    rules = Rules(9, stragglers=("drop",), max_lag=0, deadline_s=3.0)
    ledger = ledger_of(batch_size=1, redundant=1, keep_redundant=True)
    tickets = [ledger.start() for _ in range(4)]
    answer(ledger, tickets[0])
    answer(ledger, tickets[2])
    train(ledger, [ledger.active[1]])
    ledger.report_overdue(tickets[1])
    ledger.publish()
    ledger.report_published(1)
    ledger.settle()
    assert ledger.overdue == [tickets[1]]
    ledger.drop(rules.dropped(ledger)[0])
    assert list(rules.interrupted(ledger)) == []


def test_a_deadline_is_of_no_interest_for_a_rollout_that_was_lost_at_that_instant():
    """It was the last member of its group, which has failed with it."""
    ledger, rules = ledger_of(batch_size=1, max_lost=0), Rules(9, deadline_s=3.0)
    late = ledger.start()
    ledger.report_overdue(late)
    ledger.report_lost(late, "it hung")
    ledger.settle()
    assert list(rules.interrupted(ledger)) == []


# New weights


def test_in_flight_restart_begins_again_what_is_older_than_the_new_weights():
    rules = Rules(9, in_flight="restart")
    ledger = ledger_of(lanes=6, batch_size=1, evaluation_size=1)
    ledger.evaluate()
    running, scoring, paused, done = (ledger.start() for _ in range(4))
    end(ledger, scoring)
    end(ledger, paused, finish="interrupted")
    answer(ledger, done)
    train(ledger, [ledger.active[3]])
    assert rules.begun_again(ledger) == []  # trained, not published
    answer(ledger, ledger.running[-1])  # the evaluation is over
    publish(ledger)
    assert rules.begun_again(ledger) == [running, paused]
    for ticket in rules.begun_again(ledger):
        ledger.begin_again(ticket, "new weights")
    assert rules.begun_again(ledger) == []
    new = ledger.start()
    assert (new.group, new.version) == (0, 1)
    assert rules.begun_again(ledger) == []
    assert Rules(9, in_flight="keep").begun_again(ledger) == []


def test_what_is_interrupted_does_not_begin_again():
    rules = Rules(9, in_flight="restart", stragglers=("interrupt",), max_lag=1)
    ledger = aged(steps=1)
    for ticket, why in list(rules.interrupted(ledger)):
        ledger.interrupt(ticket, why)
    assert rules.begun_again(ledger) == []


def test_in_flight_drain_publishes_when_every_lane_is_empty_and_starts_nothing_before():
    ledger, rules = ledger_of(lanes=4), Rules(9, in_flight="drain")
    tickets = [ledger.start() for _ in range(3)]
    assert rules.may_start(ledger)
    answer(ledger, *tickets[:2])
    train(ledger, [ledger.active[0], ledger.active[1]])
    assert (rules.may_publish(ledger), rules.may_start(ledger)) == (False, False)
    assert Rules(9).may_publish(ledger)
    assert Rules(9).may_start(ledger)
    end(ledger, tickets[2])  # it need not be scored
    assert (rules.may_publish(ledger), rules.may_start(ledger)) == (True, False)
    publish(ledger)
    assert rules.may_start(ledger)


# Pausing


def test_without_overlap_rollouts_pause_from_the_batch_to_its_weights():
    ledger, rules = ledger_of(evaluation_size=1), Rules(1, overlap=False)
    ledger.evaluate()
    tickets = [ledger.start() for _ in range(4)]
    assert rules.paused(ledger) == []
    answer(ledger, *tickets[:2])
    ledger.take(rules.batch(ledger))
    assert rules.paused(ledger) == tickets[2:]
    assert Rules(1).paused(ledger) == []
    for ticket in tickets[2:]:
        ledger.pause(ticket, "training")
    assert ledger.stopped() == tickets[2:]
    assert (rules.paused(ledger), ledger.stopped()) == ([], [])
    assert end(ledger, *tickets[2:], finish="interrupted") == [False, False]
    assert not rules.may_start(ledger)
    ledger.report_trained("weights", {})
    answer(ledger, ledger.running[-1])
    assert not rules.may_start(ledger)
    publish(ledger)
    assert rules.may_start(ledger)
    assert ledger.start() is tickets[2]
    assert tickets[2].version == 1
    assert tickets[2].oldest_version == 0


def test_an_engine_that_sleeps_while_a_batch_is_trained_ends_its_evaluation_before():
    ledger, rules = ledger_of(evaluation_size=1), Rules(1, overlap=False, by_turns=True)
    asked = ledger.evaluate()
    answer(ledger, *[ledger.start() for _ in range(2)])
    assert rules.batch(ledger) is None
    assert Rules(1, overlap=False).batch(ledger) is not None
    answer(ledger, asked)
    assert rules.batch(ledger) == list(ledger.active.values())


def test_a_rollout_that_pauses_after_the_weights_it_was_to_wait_for_goes_on_at_once():
    """On the wall clock an engine may need longer to its next token than the trainer for its step."""
    ledger, rules = ledger_of(), Rules(1, overlap=False)
    tickets = [ledger.start() for _ in range(4)]
    answer(ledger, *tickets[:2])
    ledger.take(rules.batch(ledger))
    for ticket in rules.paused(ledger):
        ledger.pause(ticket, "training")
    end(ledger, tickets[2], finish="interrupted")
    ledger.report_trained("weights", {})
    ledger.settle()
    publish(ledger)
    end(ledger, tickets[3], finish="interrupted")
    assert [ledger.start(), ledger.start()] == tickets[2:]


def test_what_ends_now_does_not_pause():
    ledger, rules = ledger_of(), Rules(1, overlap=False)
    tickets = [ledger.start() for _ in range(4)]
    answer(ledger, *tickets[:2])
    ledger.interrupt(tickets[2], "deadline")
    ledger.take(rules.batch(ledger))
    assert rules.paused(ledger) == [tickets[3]]


def test_paused_rollouts_go_on_with_the_next_version_or_when_nothing_else_is_left_to_do():
    ledger, rules = ledger_of(lanes=2, batch_size=1, iteration_tokens=2), Rules(1)
    first, second = ledger.start(), ledger.start()
    end(ledger, first, finish="interrupted")
    assert not rules.may_begin_iteration(ledger)  # another is in a lane
    assert not rules.may_start(ledger)  # nobody wants one: no slot is free
    end(ledger, second)
    assert not rules.may_begin_iteration(ledger)  # it is being scored
    ledger.report_scored(second, Scored("rollout", "scored", 1.0))
    ledger.settle()
    ledger.take(rules.batch(ledger))
    assert not rules.may_begin_iteration(ledger)  # and trained
    ledger.report_trained("weights", {})
    ledger.settle()
    assert not rules.may_begin_iteration(ledger)  # and published
    publish(ledger)
    assert ledger.start() is first
    end(ledger, first, finish="interrupted")
    assert not rules.may_begin_iteration(ledger)  # a new group may start
    third = ledger.start()
    end(ledger, third, finish="interrupted")
    assert rules.may_begin_iteration(ledger)
    ledger.next_iteration()
    assert not rules.may_begin_iteration(ledger)
    assert ledger.start() is first


def test_a_rollout_that_nobody_wants_any_more_holds_no_iteration_back():
    """Of three members two are done and the third is still with its scorer."""
    ledger = ledger_of(lanes=4, batch_size=4, group_size=2, redundant=1, iteration_tokens=2)
    rules = Rules(0)
    tickets = [ledger.start() for _ in range(4)]
    end(ledger, tickets[2])
    end(ledger, tickets[3], finish="interrupted")
    assert not rules.may_begin_iteration(ledger)
    answer(ledger, *tickets[:2])
    assert tickets[2].discarded
    for _ in range(2):
        end(ledger, ledger.start(), finish="interrupted")
    assert list(ledger.scoring) == [2]
    assert rules.may_begin_iteration(ledger)


# Who is filtered, and who is unwanted


@pytest.mark.parametrize(("rewards", "filtered"), [((1.0, 1.0), [0]), ((0.0, 0.0), [0]), ((1.0, 0.0), [])])
def test_groups_with_one_reward_are_filtered_when_they_finish(rewards, filtered):
    ledger, rules = ledger_of(batch_size=4, group_size=2), Rules(9, dynamic_sampling=True)
    for reward in rewards:
        answer(ledger, ledger.start(), reward=reward)
    assert indices(rules.filtered(ledger)) == filtered
    assert Rules(9).filtered(ledger) == []
    ledger.settle()
    assert rules.filtered(ledger) == []


def test_a_group_that_was_dropped_is_not_filtered_too():
    ledger = ledger_of(batch_size=4, group_size=2)
    rules = Rules(9, stragglers=("drop",), max_lag=0, dynamic_sampling=True)
    tickets = [ledger.start() for _ in range(4)]
    answer(ledger, *tickets[2:])
    step(ledger, 1)
    answer(ledger, *tickets[:2])
    assert indices(rules.dropped(ledger)) == indices(rules.filtered(ledger)) == [0]
    ledger.drop(ledger.active[0])
    assert rules.filtered(ledger) == []


def test_when_all_steps_are_done_and_saved_rollouts_in_flight_are_unwanted():
    ledger, rules = ledger_of(steps=1, batch_size=1, evaluation_size=1), Rules(1)
    evaluation = ledger.evaluate()
    tickets = [ledger.start() for _ in range(2)]
    answer(ledger, tickets[0], evaluation)
    train(ledger, rules.batch(ledger))
    assert rules.unwanted(ledger) == []
    publish(ledger)
    assert rules.unwanted(ledger) == []  # the checkpoint is to hold it
    ledger.save()
    assert rules.unwanted(ledger) == []
    ledger.report_saved()
    ledger.settle()
    ledger.evaluate()
    assert rules.unwanted(ledger) == [tickets[1]]
    ledger.abandon(tickets[1], "steps done")
    assert rules.unwanted(ledger) == []


def test_the_rules_change_nothing():
    ledger = aged(steps=2)
    rules = Rules(9, stragglers=("drop", "interrupt"), max_lag=0, in_flight="restart", overlap=False)
    restarts = Rules(9, stragglers=("restart",), max_lag=0, dynamic_sampling=True)
    answer(ledger, ledger.start())

    def state():
        counts = ledger.trained, ledger.published, len(ledger.waiting), len(ledger.stopped())
        return ledger.progress(), counts, list(ledger.idle_lanes), list(ledger.ready), list(ledger.running)

    before = json.dumps(state())
    for each in (rules, restarts):
        for rule in (each.dropped, each.filtered, each.restarted, each.begun_again, each.paused, each.unwanted):
            rule(ledger)
        list(each.interrupted(ledger))
        for rule in (each.batch, each.may_publish, each.may_evaluate, each.may_start, each.may_save, each.num_admitted):
            rule(ledger)
        each.may_begin_iteration(ledger)
    assert json.dumps(state()) == before
