"""The ledger by hand: reports in any order, one order of settling, and what is derived."""

import itertools
import json

import pytest

from headway.schedule.groups import RolloutTicket
from headway.schedule.ledger import Ledger, Settings
from headway.stages import Generated, Scored
from headway.trace import Trace
from headway.types import Receipt, VersionRun


class Account:
    """A ledger whose clock is set by hand, and all it said."""

    def __init__(self, progress=None, **sizes):
        self.at_s = 0.0
        self.events = []
        self.num_changes = 0
        settings = Settings(**{"lanes": 4, "batch_size": 2, "steps": 5, **sizes})
        self.ledger = Ledger(
            settings, now=lambda: self.at_s, changed=self.count, trace=Trace(self.events.append), progress=progress
        )

    def count(self):
        self.num_changes += 1

    def generated(self, ticket, *runs):
        receipt = Receipt(f"prompt {ticket.group}", 7, runs or (VersionRun(ticket.version, 1),), "stop")
        self.ledger.report_generated(ticket, Generated(f"rollout {ticket.index}", receipt))

    def scored(self, ticket, outcome="scored"):
        self.ledger.report_scored(ticket, Scored(f"scored {ticket.index}", outcome, None))

    def trained(self):
        self.ledger.report_trained("weights", {"loss": 0.5})

    def last(self, kind):
        return [event for event in self.events if event.kind == kind][-1]

    def ready_groups(self, *indices):
        return [self.ledger.active[index] for index in indices]


def progress_of(*, version, watermark, batch_size=2, resolved_above=(), groups_started=None, groups_released=0):
    """The account of a run without anything in flight, with groups of one that each had one rollout."""
    groups_started = watermark if groups_started is None else groups_started
    return {
        "version": version,
        "batch_size": batch_size,
        "group_size": 1,
        "watermark": watermark,
        "resolved_above": list(resolved_above),
        "groups_started": groups_started,
        "groups_released": groups_released,
        "rollouts_started": groups_started,
        "next_order": groups_started,
        "active": [],
        "ready": [],
    }


def test_a_start_takes_the_first_free_lane_and_is_told():
    account = Account(group_size=2)
    first, second, third = (account.ledger.start() for _ in range(3))
    assert [(t.index, t.group, t.member, t.lane) for t in (first, second, third)] == [
        (0, 0, 0, 0),
        (1, 0, 1, 1),
        (2, 1, 0, 2),
    ]
    fields = {"rollout": 2, "group": 1, "member": 0, "lane": 2, "version": 0, "evaluation": False}
    assert (account.events[-1].kind, account.events[-1].fields) == ("started", fields)
    assert len(account.ledger.waiting) == 1
    assert (1, 1) in account.ledger.waiting


def test_freed_lanes_are_given_out_lowest_first():
    account = Account()
    tickets = [account.ledger.start() for _ in range(4)]
    for ticket in (tickets[2], tickets[0]):
        account.generated(ticket)
    account.ledger.settle()
    assert [account.ledger.start().lane, account.ledger.start().lane] == [0, 2]


def test_nothing_applies_before_it_is_settled():
    account = Account()
    ticket = account.ledger.start()
    account.generated(ticket)
    assert account.num_changes == 1
    assert account.ledger.running == {0: ticket}
    account.ledger.settle()
    assert (account.ledger.running, account.ledger.scoring) == ({}, {0: ticket})


def test_what_a_generated_rollout_leaves_in_the_trace():
    account = Account()
    ticket = account.ledger.start()
    account.at_s = 2.5
    account.generated(ticket, VersionRun(0, 3), VersionRun(1, 2))
    account.ledger.settle()
    event = account.last("generated")
    assert event.at_s == 2.5
    assert event.fields == {
        "rollout": 0,
        "lane": 0,
        "prompt": "prompt 0",
        "tokens": 5,
        "prompt_tokens": 7,
        "versions": [[0, 3], [1, 2]],
        "finish": "stop",
    }


def test_reports_of_an_instant_are_settled_in_one_order_however_they_came():
    """Finishes before scores before train ends, each in order of start."""
    logs = []
    for order in itertools.permutations(range(5)):
        account = Account(batch_size=1)
        tickets = [account.ledger.start() for _ in range(4)]
        for ticket in tickets[:3]:
            account.generated(ticket)
        account.scored(tickets[0])
        account.ledger.settle()
        account.ledger.take(account.ready_groups(0))
        account.at_s = 1.0
        reports = [
            lambda account=account, ticket=tickets[2]: account.scored(ticket),
            account.trained,
            lambda account=account, ticket=tickets[3]: account.generated(ticket),
            lambda account=account, ticket=tickets[1]: account.scored(ticket),
            lambda account=account, ticket=tickets[3]: account.scored(ticket),
        ]
        for place in order:
            reports[place]()
        account.ledger.settle()
        logs.append([(event.kind, event.fields.get("rollout")) for event in account.events if event.at_s == 1.0])
        assert [index for *_, index in account.ledger.ready] == [1, 2, 3]
    expected = [("generated", 3), ("scored", 1), ("scored", 2), ("scored", 3), ("trained", None)]
    assert all(log == expected for log in logs)


def test_reports_of_different_times_are_settled_in_order_of_time():
    account = Account()
    tickets = [account.ledger.start() for _ in range(2)]
    for ticket in tickets:
        account.generated(ticket)
    account.at_s = 1.0
    account.scored(tickets[1])
    account.at_s = 2.0
    account.scored(tickets[0])
    account.ledger.settle()
    assert [(at_s, index) for _, at_s, index in account.ledger.ready] == [(1.0, 1), (2.0, 0)]


def test_lag_counts_from_the_oldest_token_and_is_fixed_when_a_batch_is_taken():
    account = Account(progress=progress_of(version=4, watermark=8), steps=9)
    ledger = account.ledger
    tickets = [ledger.start() for _ in range(2)]
    assert ledger.lag(tickets[0]) == 0
    account.generated(tickets[0], VersionRun(2, 5), VersionRun(3, 1), VersionRun(4, 4))
    account.generated(tickets[1], VersionRun(3, 10))
    for ticket in tickets:
        account.scored(ticket)
    ledger.settle()
    ledger.take(account.ready_groups(8, 9))
    taken = account.last("taken")
    assert taken.fields == {
        "version": 4,
        "groups": [8, 9],
        "rollouts": [8, 9],  # the resumed run counts on
        "lags": [2, 1],
        "token_lag": (2 * 5 + 1 * 1 + 0 * 4 + 1 * 10) / 20,
    }


def test_the_trainer_is_busy_until_its_weights_are_published():
    account = Account(batch_size=1)
    ledger, ticket = account.ledger, account.ledger.start()
    account.generated(ticket)
    account.scored(ticket)
    ledger.settle()
    ledger.take(account.ready_groups(0))
    assert ledger.trainer_busy
    account.trained()
    ledger.settle()
    assert (ledger.trained, ledger.published, ledger.trainer_busy) == (1, 0, True)
    assert account.last("trained").fields == {"version": 1, "metrics": {"loss": 0.5}}
    assert ledger.publish() == ("weights", 1)
    assert ledger.unpublished is None
    ledger.report_published(1)
    ledger.settle()
    assert (ledger.trained, ledger.published, ledger.trainer_busy) == (1, 1, False)


def test_a_failed_group_is_told_with_its_prompt_and_reason():
    account = Account(group_size=2)
    tickets = [account.ledger.start() for _ in range(2)]
    for ticket, outcome in zip(tickets, ("scored", "grader_timeout"), strict=True):
        account.generated(ticket)
        account.scored(ticket, outcome)
    account.ledger.settle()
    assert account.last("failed").fields == {
        "group": 0,
        "prompt": "prompt 0",
        "rollouts": [0, 1],
        "tokens": 2,
        "reason": "1 of its 2 rollouts were scored",
    }
    assert (account.ledger.groups_released, account.ledger.active, account.ledger.ready) == (1, {}, [])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_watermark_rises_over_groups_that_are_resolved_in_any_order(order):
    account = Account(batch_size=1)
    tickets = [account.ledger.start() for _ in range(3)]
    for ticket in tickets:
        account.generated(ticket)
    resolved = set()
    for index in order:
        account.scored(tickets[index], "grader_error")
        account.ledger.settle()
        resolved.add(index)
        progress = account.ledger.progress()
        below = min(set(range(4)) - resolved)
        assert progress["watermark"] == below
        assert progress["resolved_above"] == sorted(group for group in resolved if group > below)
        assert json.loads(json.dumps(progress)) == progress


def test_a_taken_batch_counts_as_resolved_only_when_it_is_trained():
    account = Account(batch_size=1)
    ticket = account.ledger.start()
    account.generated(ticket)
    account.scored(ticket)
    account.ledger.settle()
    account.ledger.take(account.ready_groups(0))
    assert account.ledger.progress()["watermark"] == 0
    account.trained()
    account.ledger.settle()
    assert account.ledger.progress() == progress_of(version=1, watermark=1, batch_size=1)


def test_a_group_is_urgent_when_a_rollout_that_it_waits_for_is_interrupted_and_not_when_a_surplus_one_is():
    account = Account(batch_size=1, redundant=1, keep_redundant=True)
    ledger, tickets = account.ledger, [account.ledger.start() for _ in range(4)]
    account.generated(tickets[0])
    account.scored(tickets[0])
    account.ledger.settle()
    ledger.interrupt(tickets[1], "deadline")
    ledger.interrupt(tickets[2], "deadline")
    assert [(group["group"], group["urgent"]) for group in ledger.progress()["active"]] == [(0, False), (1, True)]


def test_a_released_group_is_reported_as_a_change():
    """It may have been the last one, and then no stage reports anything more."""
    account = Account(batch_size=1)
    ticket = account.ledger.start()
    account.generated(ticket)
    account.scored(ticket)
    account.ledger.settle()
    before = account.num_changes
    account.ledger.drop(account.ledger.active[0])
    assert account.num_changes == before + 1
    assert account.last("dropped").fields["reason"] == "its lag of 0 is above max_lag"


def test_an_evaluation_is_outside_every_count():
    account = Account(evaluation_size=2)
    answers = [account.ledger.evaluate() for _ in range(2)]
    assert [(t.index, t.group, t.member, t.lane, t.evaluation) for t in answers] == [
        (-1, 0, 0, 0, True),
        (-2, 1, 0, 1, True),
    ]
    assert (account.ledger.groups_started, account.ledger.rollouts_started, account.ledger.active) == (0, 0, {})
    assert account.ledger.start().index == 0


def test_saving_marks_the_version():
    account = Account(batch_size=1, steps=1)
    ledger, ticket = account.ledger, account.ledger.start()
    account.generated(ticket)
    account.scored(ticket)
    ledger.settle()
    ledger.take(account.ready_groups(0))
    assert not ledger.save_due
    account.trained()
    ledger.settle()
    assert ledger.save_due
    ledger.publish()
    ledger.report_published(1)
    ledger.settle()
    assert ledger.save() == (ledger.progress(), [])
    assert (ledger.save_due, ledger.saving, ledger.trainer_busy, ledger.done) == (False, True, True, False)
    ledger.report_saved()
    ledger.settle()
    assert (ledger.saving, ledger.trainer_busy, ledger.done) == (False, False, True)


def test_groups_resolved_above_the_watermark_are_not_started_again():
    progress = progress_of(version=1, watermark=2, resolved_above=[3, 4, 6], groups_started=5, groups_released=1)
    account = Account(progress=progress, num_groups=9, lanes=9)
    groups = []
    while not account.ledger.exhausted:
        groups.append(account.ledger.start().group)
    assert groups == [2, 5, 7, 8]
    assert (account.ledger.groups_started, account.ledger.groups_released) == (9, 1)


def test_a_ticket_holds_no_way_back_to_its_group():
    """A cycle would keep payloads alive until the garbage collector runs."""
    account = Account()
    ticket = account.ledger.start()
    held = [getattr(ticket, name) for name in RolloutTicket.__slots__]
    assert all(value is None or isinstance(value, int | float | bool | str) for value in held)


def test_an_empty_data_set_is_done_from_the_start():
    assert Account(num_groups=0).ledger.done


def test_a_rollout_that_ends_while_its_group_becomes_complete_is_not_waited_for():
    """All three reports are settled at once, as on a wall clock: the redundant one was on its way to its scorer."""
    account = Account(group_size=2, redundant=1)
    first, second, third = (account.ledger.start() for _ in range(3))
    for ticket in (first, second):
        account.generated(ticket)
        account.at_s += 1
        account.scored(ticket)
        account.at_s += 1
    account.generated(third)
    account.ledger.settle()
    assert account.ready_groups(0)[0].ready
    assert (account.last("aborted")["rollout"], account.last("aborted")["lane"]) == (third.index, third.lane)
    account.scored(third)
    account.ledger.settle()
    assert account.ledger.scoring == {}
    assert [event["rollout"] for event in account.events if event.kind == "scored"] == [0, 1]
