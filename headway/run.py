"""Composition root: a configuration -> stages -> the loop, real or simulated.

What is heavy (torch, transformers) is imported where a real run is composed, so that simulating starts at once.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from headway import clock
from headway.checkpoint import Checkpoint, newest_checkpoint
from headway.config import Config, Resolved, Simulate, resolve
from headway.objectives.describe import description
from headway.objectives.named import objective
from headway.objectives.parts import Objective
from headway.objectives.refusals import Situation, refusals
from headway.reports import outcome, sinks
from headway.reports.folder import CHECKPOINTS, RunFolder
from headway.reports.page import write_page
from headway.reports.perfetto import write_perfetto
from headway.reports.progress import ProgressLine
from headway.reports.record import RunRecord, read_run
from headway.schedule import loop
from headway.schedule.bound import Bound, lag_bound
from headway.schedule.ledger import Ledger, Settings
from headway.schedule.pass_rates import PassRates
from headway.schedule.policy import Rules, Straggler
from headway.simulate import faults, lives
from headway.simulate.doubles import Doubles, Times
from headway.simulate.engines import ConstantRate, Engine, Machine, Prefill, Roofline
from headway.simulate.recording import read_recording
from headway.simulate.replay import Replay
from headway.simulate.trial import Trial, trials
from headway.simulate.workload import Lengths, make_lengths, recorded_lengths
from headway.stages import Restored, Stages
from headway.trace import Event, Trace
from headway.types import UserError

if TYPE_CHECKING:
    from headway.in_process import Parts


async def drive(
    config: Config,
    stages: Stages,
    settings: Settings,
    rules: Rules,
    trace: Trace,
    *,
    clock_name: str,
    progress: Mapping[str, Any] | None = None,
    restored: Sequence[Restored] = (),
    bound_from: int = 0,
    pass_rates: PassRates | None = None,
    unsound: Sequence[str] = (),
    made: Callable[[Ledger], object] = lambda ledger: None,
) -> Ledger:
    """One run of the loop on the running event loop's clock; the first cause of a failure is raised by itself.

    progress, restored: what a checkpoint holds of the run that this one goes on with; bound_from: see `Ledger`;
    unsound: what objective.unsound overrides; it marks the run; made: told of the ledger before anything starts.
    """
    time = asyncio.get_running_loop().time
    began_s = time()

    def now() -> float:
        return time() - began_s

    bell = clock.Bell()
    bound = lag_bound(rules, settings.groups_per_batch)
    trace.emit(
        "run",
        0.0,
        lanes=settings.lanes,
        batch_size=settings.batch_size,
        group_size=settings.group_size,
        steps=settings.steps,
        num_groups=settings.num_groups,
        **asdict(rules),
        redundant=settings.redundant,
        iteration_tokens=settings.iteration_tokens,
        lag_bound=bound.lag,
        seed=config.run.seed,
        clock=clock_name,
        version=progress["version"] if progress else 0,
        unsound=list(unsound),
    )
    ledger = Ledger(
        settings,
        now=now,
        changed=bell.ring,
        trace=trace,
        progress=progress,
        restored=restored,
        pass_rates=pass_rates,
        lag_bound=bound.lag,
        bound_from=bound_from,
    )
    made(ledger)
    try:
        await loop.run(stages, ledger, rules, bell)
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
    schedule = config.schedule
    max_filtered = 10 if schedule.max_filtered is None else schedule.max_filtered
    return Settings(
        lanes=config.generate.lanes,
        batch_size=schedule.batch_size,
        group_size=schedule.group_size,
        steps=config.run.steps,
        num_groups=num_groups,
        evaluation_size=config.evaluate.size,
        evaluate_every=config.evaluate.every,
        save_every=config.checkpoint.every,
        redundant=schedule.redundant,
        keep_redundant=schedule.surplus == "keep",
        max_lost=schedule.max_lost,
        max_filtered=max_filtered * (schedule.batch_size // schedule.group_size),
        iteration_tokens=schedule.iteration_tokens,
    )


def rules(config: Config, *, simulated: bool = False) -> Rules:
    """The rules of the schedule. Raises UserError for what the engine at hand can't do."""
    schedule = config.schedule
    if schedule.in_flight == "pinned" and not simulated:
        raise UserError(
            "schedule.in_flight pinned needs an engine that holds several versions at once, which only a simulation "
            "has; take keep"
        )
    if schedule.iteration_tokens and not simulated and schedule.iteration_tokens >= config.generate.max_new_tokens:
        raise UserError(
            f"schedule.iteration_tokens {schedule.iteration_tokens} would pause no rollout: generate.max_new_tokens is "
            f"{config.generate.max_new_tokens}; take less, or leave it out"
        )
    return Rules(
        run_ahead=schedule.run_ahead,
        order=schedule.order,
        window=schedule.window,
        max_lag=schedule.max_lag,
        stragglers=tuple(word for word in get_args(Straggler) if word in schedule.stragglers),
        max_restarts=schedule.max_restarts or 1,
        in_flight=schedule.in_flight or ("pinned" if simulated else "keep"),
        overlap=schedule.overlap,
        dynamic_sampling=schedule.dynamic_sampling,
        deadline_s=schedule.deadline_s,
        resend_s=config.sync.resend_s,
    )


def bound(config: Config) -> Bound:
    """The largest lag that a trained rollout can have in a run of `config`."""
    return lag_bound(rules(config, simulated=True), config.schedule.batch_size // config.schedule.group_size)


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
    settings, chosen = sizes(config), rules(config, simulated=True)
    doubles = Doubles(
        _lengths(config),
        Times(simulation.train_time, simulation.sync_time, simulation.score_time),
        num_members=settings.num_members,
        longest=simulation.longest or math.inf,
        pinned=chosen.in_flight == "pinned",
        recompute=chosen.in_flight == "recompute",
        engine=engine_model(simulation),
    )
    return _on_virtual_time(config, doubles, settings, chosen)


def _lengths(config: Config) -> Lengths:
    simulation, num_members = config.simulate, sizes(config).num_members
    return make_lengths(simulation.lengths, simulation.mean_length, config.run.seed, num_members=num_members)


def whole_lengths(config: Config, replayed: Path | None = None) -> Lengths:
    """How long each rollout of a simulation is (of a replay of RUN/), if nothing ends it early, by its identity."""
    if replayed:
        return recorded_lengths(read_recording(replayed, config.run.seed), sizes(config).num_members)
    lengths, longest = _lengths(config), config.simulate.longest or math.inf
    return lambda identity: min(lengths(identity), longest)


def engine_model(simulation: Simulate) -> Callable[[], Engine]:
    """What makes the engine of a simulation, on the loop that it runs on."""
    prefill = Prefill(simulation.prompt_tokens or 0.0, simulation.prefill_tokens_per_s)
    if simulation.engine == "lanes":
        return lambda: ConstantRate(prefill)
    machine = Machine(*(getattr(simulation, field.name) for field in fields(Machine)))
    return lambda: Roofline(machine, prefill)


def replay(folder: Path, overrides: Sequence[str] = ()) -> list[Event]:
    """The run in RUN/ again, on virtual time, as its trace says how long things took -> the trace of that.

    overrides: command-line words, for another schedule; without them it is the run's own. Times are in the units of
    the trace (seconds of a real run). Raises UserError where RUN/ holds too little, and for a setting that a replay
    does not look at.
    """
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} holds no config.toml, so what was run there is not known")
    resolved = resolve(folder / "config.toml", overrides)
    sections = ("run", "generate", "schedule", "evaluate", "checkpoint")
    for key, origin in resolved.origins.items():
        looked_at = key.split(".")[0] in sections or key == "simulate.skip_steps"
        if origin == "command line" and not looked_at:
            raise UserError(f"{key} does nothing in a replay, which looks at {', '.join(sections)}; leave it out")
    config = resolved.config
    recording = read_recording(folder, config.run.seed)
    if not recording.num_steps:
        raise UserError(f"{folder}: no train step of the run has ended, so how long one takes is not known")
    settings = sizes(config, num_groups=recording.num_groups)
    chosen = replace(
        rules(config, simulated=True),
        in_flight=config.schedule.in_flight or "keep",
        resend_s=None,  # how long a sync took is with whatever was sent again
    )
    doubles = Replay(recording, num_members=settings.num_members, pinned=chosen.in_flight == "pinned")
    return _on_virtual_time(config, doubles, settings, chosen)


def _on_virtual_time(config: Config, stages: Stages, settings: Settings, rules: Rules) -> list[Event]:
    events: list[Event] = []
    clock.run(drive(config, stages, settings, rules, Trace(events.append), clock_name="virtual"), virtual=True)
    return events


def play(scenario: faults.Scenario) -> lives.Outcome:
    """A run on virtual time with all that befalls it: it dies, is resumed, and so on until it is over."""
    return lives.play(scenario, _live)


def try_faults(seeds: Iterable[int]) -> Iterator[Trial]:
    """Scenarios of faults by their seeds, each played and audited."""
    return trials(seeds, _live)


async def _live(scenario: faults.Scenario, parts: lives.LifeParts) -> None:
    config = scenario.config
    await drive(
        config,
        parts.stages,
        sizes(config, num_groups=scenario.num_groups),
        rules(config, simulated=True),
        parts.trace,
        clock_name="virtual",
        progress=parts.progress,
        restored=parts.restored,
        made=parts.made,
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
    rules(resolved.config)
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
    rules(config)
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
    run = read_run(folder)
    figures = outcome.outcome(run)
    (folder / "run.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return f"{outcome.describe(figures)}\npage: {write_page(folder, _simulated_again(run))}"


MOST_ROLLOUTS_AGAIN = 100_000
"""Of a run that is simulated for its page: about ten seconds."""


def _simulated_again(run: RunRecord) -> list[Event] | str:
    """The run replayed under its own schedule, as far as it came; or why it can't be."""
    num_rollouts = sum(event.kind == "generated" for event in run.events)
    if num_rollouts > MOST_ROLLOUTS_AGAIN:
        return f"it has {num_rollouts:,} rollouts, and {MOST_ROLLOUTS_AGAIN:,} are simulated for a page at most"
    try:
        return replay(run.folder, [] if run.ended else ["--run.steps", str(len(run.steps))])
    except (UserError, clock.Deadlock) as error:
        return str(error)
