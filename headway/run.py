"""Composition root of real runs: a configuration -> its objective and its stages -> `headway.program` -> a folder.

What is heavy (torch, transformers) is imported where a run is composed, so that reporting starts at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway import clock
from headway.checkpoint import Checkpoint, newest_checkpoint
from headway.config import Config, Resolved
from headway.objectives.describe import description
from headway.objectives.named import objective
from headway.objectives.parts import Objective
from headway.objectives.refusals import Situation, refusals
from headway.program import bound, drive, rules, sizes
from headway.reports import outcome, sinks
from headway.reports.folder import CHECKPOINTS, RunFolder
from headway.reports.page import write_page
from headway.reports.perfetto import write_perfetto
from headway.reports.progress import ProgressLine
from headway.reports.record import RunRecord, read_run
from headway.schedule.pass_rates import PassRates
from headway.simulation import replay
from headway.trace import Event, Trace
from headway.types import UserError

if TYPE_CHECKING:
    from headway.in_process import Parts


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
        top_k=config.generate.top_k,
        truncated_sampling=config.generate.truncates,
        kept_set_recorded=config.generate.truncates,  # the embedded engine records it
    )


def train(
    resolved: Resolved, path: Path, *, resume: bool = False, change: Callable[[Parts], Parts] = lambda parts: parts
) -> None:
    """A real run in this process, kept in the folder `path`.

    resume: go on from the newest checkpoint there; change: a last word on the run's parts, for experiments. Raises
    UserError for whatever is wrong with the configuration, the model, the prompts or the scorer, before the folder is
    made.
    """
    chosen = chosen_objective(resolved.config)
    rules(resolved.config)  # refuses what the engine can't do, before anything is loaded
    sinks.require(resolved.config.report.sinks)
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
    settings = resolved.config.model_dump(mode="json")
    with sinks.opened(resolved.config.report.sinks, folder.path, settings) as attached:
        folder.listen_to(trace, attached)
        trace.subscribe(progress_line)
        await _drive_for_real(resolved, parts, folder, checkpoint, progress_line, trace)


async def _drive_for_real(
    resolved: Resolved,
    parts: Parts,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    progress_line: ProgressLine,
    trace: Trace,
) -> None:
    async with parts.stages(folder) as stages:
        await drive(
            resolved.config,
            stages,
            sizes(resolved.config, num_groups=parts.source.num_groups),
            rules(resolved.config),
            trace,
            clock_name="wall",
            progress=checkpoint.progress if checkpoint else None,
            restored=parts.restored,
            bound_from=parts.bound_from,
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
    schedule, lag = config.schedule, bound(config)
    rules(config)  # refuses what `train` would
    batches = "1 batch" if schedule.run_ahead == 1 else f"{schedule.run_ahead:g} batches"
    return (
        f"{resolved.to_toml()}\n"
        f"# {config.run.steps} steps of {schedule.batch_size} rollouts "
        f"({schedule.batch_size // schedule.group_size} prompts x {schedule.group_size}), "
        f"{config.generate.lanes} in flight, at most {batches} ahead; {chosen.name} on "
        f"{config.model.path or 'no model: set model.path'} "
        f"with {config.data.source or 'no prompts: set data.source'}\n"
        f"# largest lag of a trained rollout: {'no bound' if lag.lag is None else lag.lag} ({lag.why})\n"
    )


def export(folder: Path, perfetto: Path | None = None) -> Path:
    """Write a run's trace as Perfetto and Chrome read it, RUN/trace.perfetto.json unless `perfetto` says where."""
    return write_perfetto(folder, perfetto or folder / "trace.perfetto.json")


def report(folder: Path) -> str:
    """Write a run's outcome and its page -> how it came out, and where the page is."""
    with clock.rare_collections(250_000):  # a run's trace is many objects that live
        run = read_run(folder)
        figures = outcome.outcome(run)
        (folder / "run.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        page = write_page(replace(run, result=figures), _simulated_again(run))
    return f"{outcome.describe(figures)}\npage: {page}"


MAX_ROLLOUTS_AGAIN = 100_000
"""Of a run that is simulated for its page: about ten seconds."""


def _simulated_again(run: RunRecord) -> list[Event] | str:
    """The run replayed under its own schedule, as far as it came; or why it can't be."""
    num_rollouts = sum(event.kind == "generated" for event in run.events)
    if num_rollouts > MAX_ROLLOUTS_AGAIN:
        return f"it has {num_rollouts:,} rollouts, and {MAX_ROLLOUTS_AGAIN:,} are simulated for a page at most"
    try:
        return replay(run.folder, [] if run.ended else ["--run.steps", str(len(run.steps))])
    except (UserError, clock.Deadlock) as error:
        return str(error)
