"""One step is generate -> score -> prepare -> train -> sync; generation runs ahead as far as the rules allow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headway.clock import Bell
from headway.schedule.ledger import Group, Ledger, RolloutTicket
from headway.schedule.policy import Rules
from headway.stages import Reference, Stages


async def run(stages: Stages, ledger: Ledger, rules: Rules, bell: Bell) -> None:
    """Drive the stages until the ledger is done. `bell` is what the ledger rings when something was reported.

    A stage's exception ends the run (an ExceptionGroup with the cause, and a note that says in which rollout or step).
    """

    async def rollout(ticket: RolloutTicket) -> None:
        with named(ticket_name(ticket)):
            answer = await stages.generate(ticket)
            ledger.report_generated(ticket, answer)
            ledger.report_scored(ticket, await stages.score(ticket, answer.ref))

    async def step(groups: list[Group]) -> None:
        with named(f"train step {ledger.trained + 1}"):
            references = [[ticket.ref for ticket in group.scored] for group in groups]
            result = await stages.train(await stages.prepare(references, ledger.trained))
            ledger.report_trained(result.weights, result.metrics)

    async def publish(weights: Reference) -> None:
        with named(f"publishing version {ledger.trained}"):
            await stages.sync(weights, ledger.trained)
            ledger.report_published()

    async def save(progress: Mapping[str, Any]) -> None:
        with named(f"saving version {progress['version']}"):
            await stages.save(progress)
            ledger.report_saved()

    try:
        async with asyncio.TaskGroup() as tasks:

            def begin(coroutine, name: str) -> None:
                tasks.create_task(coroutine, name=name)

            while not ledger.done:
                if groups := rules.batch(ledger):
                    begin(step(ledger.take(groups)), "train step")
                if rules.may_save(ledger):
                    begin(save(ledger.save()), "save")
                if rules.may_publish(ledger):
                    begin(publish(ledger.publish()), "publish")
                    bell.ring()  # a sync that takes no time is over before lanes are filled
                else:
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


def ticket_name(ticket: RolloutTicket) -> str:
    return f"evaluation answer {ticket.group}" if ticket.evaluation else f"rollout {ticket.index}"


@contextmanager
def named(what: str) -> Iterator[None]:
    """A failure says where. A future cancelled under us is a failure, which a TaskGroup would silently drop."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task and task.cancelling():
            raise
        raise RuntimeError(f"{what} was given up by its stage without a result") from None
    except Exception as error:
        error.add_note(f"in {what}")
        raise
