"""One step is generate -> score -> prepare -> train -> sync; generation runs ahead as far as the rules allow."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from headway.clock import Bell
from headway.schedule.groups import Group, RolloutTicket
from headway.schedule.ledger import Ledger
from headway.schedule.policy import Rules
from headway.stages import Generated, Lost, Reference, Stages


async def run(stages: Stages, ledger: Ledger, rules: Rules, bell: Bell) -> None:
    """Drive the stages until the ledger is done. `bell` is what the ledger rings when something was reported.

    A stage's exception ends the run (an ExceptionGroup with the cause, and a note that says in which rollout or step).
    """

    async def rollout(ticket: RolloutTicket) -> None:
        with Naming(ticket_name(ticket)):
            try:
                answer = await generate(stages, ledger, rules, ticket)
            except Lost as loss:
                ledger.report_lost(ticket, str(loss))
                return
            if ledger.report_generated(ticket, answer):
                ledger.report_scored(ticket, await stages.score(ticket, answer.ref))

    async def step(groups: list[Group]) -> None:
        with Naming(f"train step {ledger.trained + 1}"):
            references = [[ticket.ref for ticket in group.scored] for group in groups]
            result = await stages.train(await stages.prepare(references, ledger.trained))
            ledger.report_trained(result.weights, result.metrics)

    async def publish(weights: Reference, version: int) -> None:
        with Naming(f"publishing version {version}"):
            await send(stages, rules, weights, version)
            ledger.report_published(version)

    async def save(progress: Mapping[str, Any], tickets: Sequence[RolloutTicket]) -> None:
        with Naming(f"saving version {progress['version']}"):
            await stages.save(progress, tickets)
            ledger.report_saved()

    try:
        async with asyncio.TaskGroup() as tasks:

            def begin(coroutine, name: str) -> None:
                tasks.create_task(coroutine, name=name)

            while not ledger.done:
                act_on_stragglers(ledger, rules)
                if groups := rules.batch(ledger):
                    begin(step(ledger.take(groups)), "train step")
                if rules.may_save(ledger):
                    begin(save(*ledger.save()), "save")
                end_early(stages, ledger, rules)
                if rules.may_publish(ledger):
                    begin(publish(*ledger.publish()), "publish")
                    bell.ring()  # a sync that takes no time is over before lanes are filled
                else:
                    if rules.may_begin_iteration(ledger):
                        ledger.next_iteration()
                    while rules.may_evaluate(ledger):
                        begin(rollout(ticket := ledger.evaluate()), ticket_name(ticket))
                    while rules.may_start(ledger):
                        begin(rollout(ticket := ledger.start()), ticket_name(ticket))
                await bell.wait()  # something was reported, and all else of this instant too
                ledger.settle()
            raise _RunEnded
    except* _RunEnded:
        pass


class _RunEnded(Exception):
    """The last version is out: ends the task group and the rollouts still in flight."""


def act_on_stragglers(ledger: Ledger, rules: Rules) -> None:
    """What is too old or teaches nothing is not trained; what is late ends, or begins again."""
    for group in rules.dropped(ledger):
        ledger.drop(group)
    for group in rules.filtered(ledger):
        ledger.filter(group)
    for group in rules.restarted(ledger):
        ledger.restart(group, "max_lag")
    for ticket, why in list(rules.interrupted(ledger)):
        ledger.interrupt(ticket, why)
    for ticket in rules.begun_again(ledger):
        ledger.begin_again(ticket, "new weights")


def end_early(stages: Stages, ledger: Ledger, rules: Rules) -> None:
    """Tell the engine of every rollout that is to end at its next token."""
    for ticket in rules.paused(ledger):
        ledger.pause(ticket, "training")
    for ticket in rules.unwanted(ledger):
        ledger.abandon(ticket, "steps done")
    for ticket in ledger.stopped():
        stages.stop(ticket)


def generate(stages: Stages, ledger: Ledger, rules: Rules, ticket: RolloutTicket) -> Coroutine[Any, Any, Generated]:
    """Generate, within the deadline if there is one."""
    if rules.deadline_s is None:
        return stages.generate(ticket)
    return generate_in_time(stages, ledger, ticket, rules.deadline_s)


async def generate_in_time(stages: Stages, ledger: Ledger, ticket: RolloutTicket, deadline_s: float) -> Generated:
    """Generate, and report when the deadline has passed. Raises Lost when as much time again has passed."""
    left_s = max(0.0, deadline_s - ticket.lane_s)
    deadline = asyncio.get_running_loop().call_later(left_s, ledger.report_overdue, ticket)
    patience = asyncio.timeout(left_s + deadline_s)
    try:
        async with patience:
            return await stages.generate(ticket)
    except TimeoutError:
        if not patience.expired():
            raise
        raise Lost(f"it hung: {deadline_s:g} after its deadline it had not ended") from None
    finally:
        deadline.cancel()


async def send(stages: Stages, rules: Rules, weights: Reference, version: int) -> None:
    """Sync, and again if no acknowledgement comes in time. An engine that stays silent ends the run."""
    for _ in range(rules.max_sends):
        patience = asyncio.timeout(rules.resend_s)
        try:
            async with patience:
                return await stages.sync(weights, version)
        except TimeoutError:
            if not patience.expired():
                raise
    raise RuntimeError(
        f"version {version} was sent {rules.max_sends} times, and no engine acknowledged it within sync.resend_s = "
        f"{rules.resend_s:g}: the engine is gone, or needs longer"
    )


def ticket_name(ticket: RolloutTicket) -> str:
    return f"evaluation answer {ticket.group}" if ticket.evaluation else f"rollout {ticket.index}"


class Naming:
    """A failure says where. A future cancelled under us is a failure, which a TaskGroup would silently drop.

    A class, because one is entered for every rollout: a generator would cost as much as the rollout's ledger entries.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if not (task and task.cancelling()):
                raise RuntimeError(f"{self._what} was given up by its stage without a result") from None
        elif isinstance(error, Exception):
            error.add_note(f"in {self._what}")
