"""The audit sees what it is there to see: each test breaks the schedule in one way, and some seed reports it."""

import re

from headway import simulation
from headway.schedule.groups import RolloutTicket
from headway.schedule.ledger import Ledger
from headway.schedule.policy import Rules


def seen(monkeypatch, owner, name, broken, *, within=150):
    """What the first seeds report once `owner.name` is `broken(original)`."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, broken(original))
    reported = []
    for trial in simulation.try_faults(range(within)):
        reported += trial.problems
        if len(reported) > 30:
            break
    return "\n".join(reported)


def after(change):
    """The method as it is, and then a change to its ledger."""

    def broken(original):
        def method(ledger, *args, **keywords):
            result = original(ledger, *args, **keywords)
            change(ledger)
            return result

        return method

    return broken


def says(report, pattern):
    assert re.search(pattern, report), report or "no seed reported anything"


# Lags and bounds


def test_a_lag_that_is_taken_from_the_version_at_the_finish(monkeypatch):
    def newest(ticket):
        runs = ticket.receipt.version_runs if ticket.receipt else ()
        return max((each.version for each in runs), default=ticket.version)

    says(
        seen(monkeypatch, RolloutTicket, "oldest_version", lambda _: property(newest)),
        r"its lags are said to be .*, and are",
    )


def test_an_admission_that_counts_what_is_in_flight_and_not_what_is_queued(monkeypatch):
    def admits(rules, ledger):
        size = ledger.settings.groups_per_batch
        in_flight = sum(not group.ready for group in ledger.active.values())
        return in_flight < size + rules.groups_ahead(size)

    says(seen(monkeypatch, Rules, "admits", lambda _: admits), r"hold slots, and \d+ are admitted")


def test_an_admission_counter_that_restarts_at_zero_on_a_resume(monkeypatch):
    def from_zero(ledger):
        ledger.groups_started = 0

    says(seen(monkeypatch, Ledger, "_resume", after(from_zero)), r"life [1-9].* hold slots, and \d+ are admitted")


def test_versions_that_count_optimizer_steps(monkeypatch):
    """Two of them in each train step."""

    def another(ledger):
        ledger.trained += 1

    says(seen(monkeypatch, Ledger, "_trained", after(another)), r"version 2 is sent while version 1 is the newest")


def test_an_acknowledgement_that_is_counted_each_time_it_comes(monkeypatch):
    def count(ledger, at_s, version):
        ledger.published += 1
        ledger.aged, ledger.publishing, ledger.batch = True, False, None
        ledger._trace.emit("published", at_s, version=ledger.published)
        ledger.next_iteration()

    says(seen(monkeypatch, Ledger, "_published", lambda _: count), r"version \d+ is published after version \d+")


def test_a_window_that_is_not_kept(monkeypatch):
    def first_finished(rules, ledger, size):
        return [ledger.active[index] for _, _, index in ledger.ready[:size]]

    says(
        seen(monkeypatch, Rules, "_in_window", lambda _: first_finished),
        r"is trained while \d+ waits, and the window is \d+",
    )


def test_groups_that_are_too_old_and_are_not_dropped(monkeypatch):
    """The ledger's own bound and the audit's see it."""
    report = seen(monkeypatch, Rules, "dropped", lambda _: lambda rules, ledger: [])
    says(report, r"a rollout of lag \d+ is trained, and the bound is \d+")
    says(report, "BoundBroken")


# Slots and lanes


def test_released_slots_that_are_not_given_back(monkeypatch):
    def keep_the_slot(ledger):
        ledger.groups_released -= 1

    says(
        seen(monkeypatch, Ledger, "_give_back", after(keep_the_slot)),
        r"afterwards a lane is idle, and a new group could start",
    )


def test_a_run_that_starves_of_slots_says_who_waits(monkeypatch):
    def keep_the_slot(ledger):
        ledger.groups_released -= 1

    says(seen(monkeypatch, Ledger, "_give_back", after(keep_the_slot)), r"Deadlock: no timer is set")


def test_a_lane_that_is_given_to_two(monkeypatch):
    def free_twice(ledger):
        ledger.idle_lanes.insert(0, 0)

    says(seen(monkeypatch, Ledger, "_free_lane", after(free_twice)), r"lane 0 is not free")


def test_a_lost_rollout_that_does_not_begin_again(monkeypatch):
    def forget(ledger, group, ticket):
        del group.members[ticket.member]

    says(seen(monkeypatch, Ledger, "_begin_again", lambda _: forget), r"a lane is idle, and member \d of group \d+")


# What a checkpoint holds


def saying(**changed):
    """A checkpoint's account, with something else in some places."""

    def broken(original):
        return lambda ledger: {
            **original(ledger),
            **{key: change(ledger, original(ledger)) for key, change in changed.items()},
        }

    return broken


def test_a_cursor_at_pulled_and_not_at_trained(monkeypatch):
    broken = saying(
        watermark=lambda ledger, account: ledger._next_group,
        resolved_above=lambda ledger, account: [],
        active=lambda ledger, account: [],
        ready=lambda ledger, account: [],
    )
    says(seen(monkeypatch, Ledger, "progress", broken), r"groups \[.*\] were neither trained nor reported")


def test_a_group_that_is_trained_twice(monkeypatch):
    """The account forgets the last of the groups that were trained."""
    broken = saying(watermark=lambda ledger, account: max(0, account["watermark"] - 1))
    says(seen(monkeypatch, Ledger, "progress", broken), r"group \d+ was trained before")


def test_paused_rollouts_that_are_forgotten_in_a_checkpoint(monkeypatch):
    def broken(original):
        def save(ledger):
            account, tickets = original(ledger)
            return account, [ticket for ticket in tickets if (ticket.group, ticket.member) not in ledger.paused]

        return save

    says(seen(monkeypatch, Ledger, "save", broken), r"the tokens of rollout \d+ .* are not in the checkpoint")


def test_finished_rollouts_that_are_generated_again(monkeypatch):
    def broken(original):
        def restore(ledger, group, rollout):
            if rollout.scored is None:
                original(ledger, group, rollout)
            else:
                ledger.waiting.add((group.index, rollout.member))

        return restore

    says(
        seen(monkeypatch, Ledger, "_restore_rollout", broken),
        r"\(finished\) is generated again",
    )


def test_evaluations_during_which_new_weights_are_sent(monkeypatch):
    def at_once(rules, ledger):
        return ledger.trained > ledger.published and not ledger.publishing

    says(seen(monkeypatch, Rules, "may_publish", lambda _: at_once), r"new weights are sent during an evaluation")


def test_nothing_is_seen_where_nothing_is_broken(monkeypatch):
    """Else every test above would hold by itself."""
    assert seen(monkeypatch, Ledger, "_give_back", after(lambda ledger: None), within=60) == ""
