"""Schedules that look as if they must starve or hang, played by hand: each comes to its end, or says why it can't."""

import asyncio
from dataclasses import dataclass, replace

import pytest

from headway.clock import Deadlock
from headway.schedule.pass_rates import PassRates
from headway.types import UserError
from tests.schedule.doubles import Plain, play, rules_of
from tests.schedule.reference_simulator import Case


class Hangs(Plain):
    """One member of one group never returns and hears no `stop`, the first `attempts` times."""

    def __init__(self, case, group, member=0, attempts=1):
        super().__init__(case)
        self.hanging, self.attempts = (group, member), attempts

    async def generate(self, ticket):
        if (ticket.group, ticket.member) == self.hanging and self.attempts:
            self.attempts -= 1
            await asyncio.get_running_loop().create_future()
        return await super().generate(ticket)


@dataclass(frozen=True)
class Unscored(Case):
    """No answer of the groups from `first` on can be scored."""

    first: int = 0

    def is_scored(self, group, member):
        return group < self.first


def at(played, *kinds):
    return [(event.at_s, event.kind) for event in played.of(*kinds)]


def handed_over(played, kind):
    return [(event.at_s, event["group"]) for event in played.of(kind)]


# Rollouts that pause for weights which only they can bring


def test_rollouts_that_have_all_paused_go_on_without_new_weights():
    """run_ahead 0, two tokens at a stretch: group 0 (3 tokens) and group 1 (5) pause at 2, and group 1 again at 4."""
    case = Case(lanes=2, groups_per_batch=2, run_ahead=0, steps=1, lengths=(3, 5), iteration_tokens=2)
    played = play(case)
    assert handed_over(played, "resumed") == [(2, 0), (2, 1), (4, 1)]
    assert at(played, "generated", "taken") == [(3, "generated"), (5, "generated"), (5, "taken")]


def test_one_lane_is_shared_by_rollouts_that_pause():
    """A paused rollout waits for the next version or for everybody, so groups take turns, and all of them end."""
    case = Case(lanes=1, groups_per_batch=2, run_ahead=0, steps=2, lengths=(3,), iteration_tokens=1)
    played = play(case)
    assert sorted(played.trained_groups) == [0, 1, 2, 3]
    assert [group for _, group in handed_over(played, "started")] == [0, 1, 2, 3]


def test_long_rollouts_that_wait_for_every_train_step_end():
    """APRIL with half a batch ahead. At 9 groups 0 and 1 are trained for 1; group 2 (10 tokens) pauses with 9."""
    case = Case(lanes=3, groups_per_batch=2, run_ahead=0.5, steps=2, lengths=(9, 9, 10, 9), overlap=False)
    played = play(case)
    assert [(event.at_s, event["tokens"]) for event in played.of("paused")][:1] == [(9, 9)]
    assert handed_over(played, "resumed")[:1] == [(10, 2)]
    assert [(event.at_s, event["groups"]) for event in played.of("taken")] == [(9, [0, 1]), (19, [2, 3])]


# Groups that teach nothing


def test_a_run_in_which_every_group_is_filtered_says_so():
    case = Case(lanes=3, group_size=2, groups_per_batch=2, steps=5, dynamic_sampling=True, num_rewards=1)
    with pytest.raises(ExceptionGroup) as ended:
        play(case, max_filtered=6)
    said = r"6 groups since the last train step had equal rewards \(the last one: all 1\).*dynamic_sampling = false"
    assert ended.group_contains(UserError, match=said)


def test_data_of_which_every_group_is_filtered_end():
    case = Case(lanes=3, group_size=2, groups_per_batch=2, num_groups=7, dynamic_sampling=True, num_rewards=1)
    played = play(case)
    assert sorted(event["group"] for event in played.of("filtered")) == [*range(7)]
    assert played.trained_groups == []
    assert played.ledger.published == 0


@pytest.mark.parametrize("first", [0, 3, 4, 5])
@pytest.mark.parametrize("order", ["finished", "started", "window"])
def test_data_whose_last_groups_fail_end(order, first):
    """What is left of a batch is trained when nothing more can come."""
    window = 2 if order == "window" else None
    case = Unscored(groups_per_batch=2, steps=100, num_groups=8, order=order, window=window, first=first)
    played = play(case)
    assert sorted(played.trained_groups) == [*range(first)]
    assert sorted(event["group"] for event in played.of("failed")) == [*range(first, 8)]
    assert played.ledger.published == (first + 1) // 2


# One rollout that never ends


@pytest.mark.parametrize("keep", [False, True])
def test_a_redundant_member_that_hangs_holds_up_nobody(keep):
    """Two of three members are enough. The lane is gone, as there is no deadline; the other two do the rest."""
    case = Case(lanes=3, group_size=2, groups_per_batch=1, num_groups=4, steps=100, lengths=(1,), redundant=1)
    case = replace(case, keep_redundant=keep)
    played = play(case, Hangs(case, 0, member=2))
    assert sorted(played.trained_groups) == [0, 1, 2, 3]
    assert {event["lane"] for event in played.of("started") if event.at_s > 0} == {0, 1}


def test_a_rollout_that_hangs_without_a_deadline_stops_the_run_and_the_clock_says_so():
    case = Case(lanes=2, groups_per_batch=2, run_ahead=0, steps=1, lengths=(1,))
    with pytest.raises(Deadlock, match="rollout 1"):
        play(case, Hangs(case, 1))


def test_weights_that_wait_for_a_hung_rollout_go_out_when_it_is_lost():
    """drain, and a deadline of 4. Group 2 hangs from 1 on; it is to end at 5, and is given up at 9."""
    case = Case(lanes=2, groups_per_batch=2, run_ahead=1, lengths=(1,), in_flight="drain", deadline=4.0)
    played = play(case, Hangs(case, 2))
    assert at(played, "lost") == [(9, "lost")]
    assert at(played, "published")[0] == (9, "published")
    assert sorted(played.trained_groups) == [0, 1, 2, 3]
    assert [event["num"] for event in played.of("lost")] == [1]


def test_a_rollout_that_hangs_each_time_is_given_up():
    case = Case(lanes=2, groups_per_batch=2, steps=100, num_groups=4, lengths=(1,), deadline=1.0)
    played = play(case, Hangs(case, 1, attempts=9), max_lost=2)
    assert [(event["group"], event["num"]) for event in played.of("lost")] == [(1, 1), (1, 2), (1, 3)]
    assert [event["group"] for event in played.of("failed")] == [1]
    assert sorted(played.trained_groups) == [0, 2, 3]


class Silent(Plain):
    """An engine that takes weights and does not say so, the first `times` times; `sent`: when it was sent some."""

    def __init__(self, case, times):
        super().__init__(case)
        self.times, self.sent = times, []

    async def sync(self, weights, version):
        self.sent.append(asyncio.get_running_loop().time())
        if len(self.sent) <= self.times:
            await asyncio.get_running_loop().create_future()


def test_weights_that_nobody_acknowledges_are_sent_again():
    """Every 2 from 2 on, when version 1 is there."""
    case = Case(groups_per_batch=2, lengths=(1,), steps=1)
    stages = Silent(case, 2)
    played = play(case, stages, rules=replace(rules_of(case), resend_s=2.0))
    assert stages.sent == [2, 4, 6]
    assert at(played, "published") == [(6, "published")]


def test_an_engine_that_stays_silent_ends_the_run():
    case = Case(groups_per_batch=2, lengths=(1,), steps=1)
    with pytest.raises(ExceptionGroup) as ended:
        play(case, Silent(case, 3), rules=replace(rules_of(case), resend_s=2.0))
    said = r"version 1 was sent 3 times, and no engine acknowledged it within sync.resend_s = 2"
    assert ended.group_contains(RuntimeError, match=said)


# Order window, and groups that will never come


def test_a_window_whose_oldest_group_fails_moves_on():
    """Two groups wide: groups 1 and 2 may be trained together only once group 0 is out of the way."""

    class TheOldest(Case):
        def is_scored(self, group, member):
            return group > 0

    case = TheOldest(lanes=3, groups_per_batch=2, order="window", window=2, lengths=(5, 1, 1, 1), steps=1)
    played = play(case)
    assert at(played, "failed", "taken") == [(5, "failed"), (5, "taken")]
    assert played.trained_groups == [1, 2]


def test_a_window_passes_over_prompts_that_are_retired():
    """Of three prompts, the first is answered right and is asked no more: groups 3, 6, 9 ... are left out."""

    class RightOnTheFirst(Case):
        def reward(self, group, member):
            return 1.0 if group % 3 == 0 else 0.0

    case = RightOnTheFirst(lanes=2, groups_per_batch=2, run_ahead=0, order="window", window=2, steps=5, lengths=(1,))
    rates = PassRates(lambda group: f"prompt {group % 3}", 3, retire_above=0.9)
    played = play(case, pass_rates=rates)
    assert [event["group"] for event in played.of("retired")] == [0]
    assert [event["groups"] for event in played.of("taken")] == [[0, 1], [2, 4], [5, 7], [8, 10], [11, 13]]


def test_a_window_over_prompts_that_are_all_retired_ends():
    case = Case(lanes=2, groups_per_batch=2, run_ahead=1, order="window", window=3, steps=50, lengths=(1,))
    rates = PassRates(lambda group: f"prompt {group % 3}", 3, retire_above=0.9)
    played = play(case, pass_rates=rates)
    assert len(played.of("retired")) == 3
    assert played.ledger.published < 6
    assert max(played.lags) <= 2, rules_of(case)


def test_groups_that_all_fail_stop_a_run_whose_data_have_no_end():
    with pytest.raises(ExceptionGroup) as raised:
        play(Case(lanes=4, groups_per_batch=2, steps=3, unscored=1.0), max_failed=100)
    (said,) = raised.value.exceptions
    assert isinstance(said, UserError)
    assert "100 groups in a row could not be trained" in str(said)
    assert "grader_error" in str(said)
