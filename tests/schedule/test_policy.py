"""The rules, asked about ledgers set by hand."""

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


def answer(ledger, ticket, outcome="scored"):
    receipt = Receipt(f"prompt {ticket.group}", 0, (VersionRun(ticket.version, 1),), "stop")
    ledger.report_generated(ticket, Generated("rollout", receipt))
    ledger.report_scored(ticket, Scored("rollout", outcome, 1.0 if outcome == "scored" else None))
    ledger.settle()


def train(ledger, groups):
    ledger.take(groups)
    ledger.report_trained("weights", {})
    ledger.settle()


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
    assert (ledger.groups_started, ledger.rollouts_started, ledger.group_open) == (1, 3, True)
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
    ledger.report_published()
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
    ledger.publish()
    ledger.report_published()
    ledger.settle()
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
    assert ledger.publish() == "weights"
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


def test_the_rules_change_nothing():
    ledger, rules = ledger_of(evaluation_size=1), Rules(1)
    before = ledger.progress(), list(ledger.idle_lanes), ledger.groups_started, ledger.evaluation.num_started
    for rule in (rules.batch, rules.may_publish, rules.may_evaluate, rules.may_start, rules.num_admitted):
        rule(ledger)
    after = ledger.progress(), list(ledger.idle_lanes), ledger.groups_started, ledger.evaluation.num_started
    assert before == after
