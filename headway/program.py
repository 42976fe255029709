"""One program for real and simulated runs: the sizes and rules that a configuration asks for, and the loop on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from headway import clock
from headway.config import Config
from headway.schedule import loop
from headway.schedule.bound import Bound, lag_bound
from headway.schedule.ledger import Ledger, Settings
from headway.schedule.pass_rates import PassRates
from headway.schedule.policy import Rules
from headway.stages import Restored, Stages
from headway.trace import Trace
from headway.types import Straggler, UserError


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
    _emit_run(
        trace,
        settings,
        rules,
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


def _emit_run(trace: Trace, settings: Settings, rules: Rules, **known: Any) -> None:
    """The event that begins a trace: what runs, in which sizes, by which rules."""
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
        **known,
    )


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
        max_failed=schedule.max_failed,
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
        by_turns=config.generate.sleep != "none",
        dynamic_sampling=schedule.dynamic_sampling,
        deadline_s=schedule.deadline_s,
        resend_s=config.sync.resend_s,
    )


def bound(config: Config) -> Bound:
    """The largest lag that a trained rollout can have in a run of `config`."""
    return lag_bound(rules(config, simulated=True), config.schedule.batch_size // config.schedule.group_size)
