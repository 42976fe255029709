"""Composition root: a configuration -> stages -> the loop, real or simulated.

What is heavy (torch, transformers) is imported where a real run is composed, so that simulating starts at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway import clock
from headway.checkpoint import Checkpoint, newest_checkpoint
from headway.config import Config, Resolved
from headway.objectives.describe import description
from headway.objectives.named import objective
from headway.objectives.parts import Objective
from headway.objectives.refusals import Situation, refusals
from headway.reports import outcome
from headway.reports.folder import CHECKPOINTS, RunFolder
from headway.reports.page import write_page
from headway.reports.progress import ProgressLine
from headway.reports.record import read_run
from headway.schedule import loop
from headway.schedule.ledger import Ledger, Settings
from headway.schedule.pass_rates import PassRates
from headway.schedule.policy import Rules
from headway.simulate.doubles import Doubles, Times
from headway.simulate.workload import make_lengths
from headway.stages import Stages
from headway.trace import Event, Trace
from headway.types import UserError

if TYPE_CHECKING:
    from headway.in_process import Parts


async def drive(
    config: Config,
    stages: Stages,
    settings: Settings,
    trace: Trace,
    *,
    clock_name: str,
    progress: Mapping[str, Any] | None = None,
    pass_rates: PassRates | None = None,
    unsound: Sequence[str] = (),
) -> Ledger:
    """One run of the loop on the running event loop's clock; the first cause of a failure is raised by itself.

    unsound: what objective.unsound overrides; it marks the run.
    """
    time = asyncio.get_running_loop().time
    began_s = time()

    def now() -> float:
        return time() - began_s

    bell = clock.Bell()
    trace.emit(
        "run",
        0.0,
        lanes=settings.lanes,
        batch_size=settings.batch_size,
        group_size=settings.group_size,
        run_ahead=config.schedule.run_ahead,
        steps=settings.steps,
        max_lag=config.schedule.max_lag,
        seed=config.run.seed,
        clock=clock_name,
        version=progress["version"] if progress else 0,
        unsound=list(unsound),
    )
    ledger = Ledger(settings, now=now, changed=bell.ring, trace=trace, progress=progress, pass_rates=pass_rates)
    try:
        await loop.run(stages, ledger, Rules(config.schedule.run_ahead), bell)
    except BaseExceptionGroup as group:
        raise _first_cause(group) from None
    trace.emit("ended", now(), reason="steps done" if ledger.published >= settings.steps else "data ended")
    return ledger


def _first_cause(group: BaseExceptionGroup) -> BaseException:
    cause: BaseException = group
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause


def sizes(config: Config, *, num_groups: int | None = None) -> Settings:
    """The sizes the ledger needs. num_groups: how many groups the data hold; None for no end."""
    return Settings(
        lanes=config.generate.lanes,
        batch_size=config.schedule.batch_size,
        group_size=config.schedule.group_size,
        steps=config.run.steps,
        num_groups=num_groups,
        evaluation_size=config.evaluate.size,
        evaluate_every=config.evaluate.every,
        save_every=config.checkpoint.every,
    )


def named_objective(config: Config) -> Objective:
    """The objective that the configuration names, with its corrections and values in place.

    Raises UserError for an unknown name or value, and for a value that nothing in the objective answers to.
    """
    values = config.objective.model_dump(exclude={"name", "corrections"})
    try:
        return objective(config.objective.name, corrections=config.objective.corrections, **values)
    except ValueError as error:
        raise UserError(f"objective: {error}") from None


def chosen_objective(config: Config) -> Objective:
    """`named_objective`, ready for this run: raises UserError for what it would silently do wrong in it, unless
    objective.unsound says that this is wanted.
    """
    chosen = named_objective(config)
    if chosen.length is None:
        chosen = replace(chosen, length=config.generate.max_new_tokens)
    for refusal in refusals(chosen, situation(config)):
        if refusal.impossible:
            raise UserError(str(refusal))
        if not chosen.unsound:
            raise UserError(f"{refusal}; or say objective.unsound = true to train it all the same")
    return chosen


def overridden(config: Config, chosen: Objective) -> list[str]:
    """Why `chosen` would be refused in this run, where objective.unsound trains it all the same."""
    return [refusal.reason for refusal in refusals(chosen, situation(config))]


def situation(config: Config) -> Situation:
    """What the run does that an objective depends on."""
    return Situation(
        stale=config.schedule.run_ahead > 0,
        optimizer_steps=config.train.optimizer_steps * config.train.passes,
        group_size=config.schedule.group_size,
        temperature=config.generate.temperature,
    )


def simulate(config: Config) -> list[Event]:
    """The run's schedule on virtual time, with doubles for the verbs -> its trace."""
    simulation = config.simulate
    lengths = make_lengths(simulation.lengths, simulation.mean_length, config.run.seed)
    times = Times(simulation.train_time, simulation.sync_time, simulation.score_time)
    doubles = Doubles(lengths, times, simulation.in_flight)
    events: list[Event] = []
    clock.run(drive(config, doubles, sizes(config), Trace(events.append), clock_name="virtual"), virtual=True)
    return events


def train(
    resolved: Resolved, path: Path, *, resume: bool = False, change: Callable[[Parts], Parts] = lambda parts: parts
) -> None:
    """A real run in this process, kept in the folder `path`.

    resume: go on from the newest checkpoint there; change: a last word on the run's parts, for experiments. Raises
    UserError for whatever is wrong with the configuration, the model, the prompts or the scorer, before the folder is
    made.
    """
    chosen = chosen_objective(resolved.config)
    checkpoint = newest_checkpoint(path / CHECKPOINTS) if resume else None
    with ProgressLine(evaluation_size=resolved.config.evaluate.size) as progress_line:
        progress_line.phase("importing torch and transformers")
        from headway.in_process import compose

        parts = change(compose(resolved.config, chosen, checkpoint, progress_line.phase))
        folder = RunFolder(path)
        try:
            clock.run(_train(resolved, parts, folder, checkpoint, progress_line))
        finally:
            folder.close()


def what_is_left(path: Path) -> str:
    """What a run that was interrupted can be used for, in a sentence."""
    if not (path / "trace.jsonl").is_file():
        return "nothing had begun"
    page = f"headway report {path} shows it so far"
    try:
        version = newest_checkpoint(path / CHECKPOINTS).progress["version"]
    except UserError:
        return f"it had written no checkpoint yet; {page}"
    return f"headway train --resume {path} goes on after step {version}; {page}"


async def _train(
    resolved: Resolved, parts: Parts, folder: RunFolder, checkpoint: Checkpoint | None, progress_line: ProgressLine
) -> None:
    if checkpoint is None or "command line" in resolved.origins.values():
        folder.write_config(resolved)
        folder.write_objective(description(parts.objective))
    trace = Trace()
    folder.listen_to(trace)
    trace.subscribe(progress_line)
    async with parts.stages(folder) as stages:
        await drive(
            resolved.config,
            stages,
            sizes(resolved.config, num_groups=parts.source.num_groups),
            trace,
            clock_name="wall",
            progress=checkpoint.progress if checkpoint else None,
            pass_rates=_pass_rates(parts),
            unsound=overridden(resolved.config, parts.objective),
        )
        progress_line.phase("saving the model")
        await stages.export(folder.model)


def _pass_rates(parts: Parts) -> PassRates | None:
    if parts.objective.retire_above is None:
        return None
    return PassRates(lambda group: parts.source.at(group)[0].uid, len(parts.source), parts.objective.retire_above)


def describe(resolved: Resolved) -> str:
    """What `train` would run: the effective configuration, and its sizes in a sentence."""
    config = resolved.config
    chosen = chosen_objective(config)
    schedule = config.schedule
    batches = "1 batch" if schedule.run_ahead == 1 else f"{schedule.run_ahead:g} batches"
    return (
        f"{resolved.to_toml()}\n"
        f"# {config.run.steps} steps of {schedule.batch_size} rollouts "
        f"({schedule.batch_size // schedule.group_size} prompts x {schedule.group_size}), "
        f"{config.generate.lanes} in flight, at most {batches} ahead; {chosen.name} on "
        f"{config.model.path or 'no model: set model.path'} "
        f"with {config.data.source or 'no prompts: set data.source'}\n"
    )


def report(folder: Path) -> str:
    """Write a run's outcome and its page -> how it came out, and where the page is."""
    figures = outcome.outcome(read_run(folder))
    (folder / "run.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return f"{outcome.describe(figures)}\npage: {write_page(folder)}"
