"""Runs on virtual time: a configuration, a recorded run or a scenario of faults -> doubles of the verbs -> the loop.

What they are made of is in `headway.simulate`; here it is joined with `headway.program`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from headway import clock
from headway.config import Config, Simulate, only, resolve
from headway.program import drive, rules, sizes
from headway.schedule.ledger import Settings
from headway.schedule.policy import Rules
from headway.simulate import faults, lives
from headway.simulate.contention import Contention
from headway.simulate.doubles import Doubles, Times
from headway.simulate.engines import ConstantRate, Engine, Machine, Prefill, Roofline
from headway.simulate.recording import read_recording
from headway.simulate.replay import Replay
from headway.simulate.trial import Trial, trials
from headway.simulate.workload import Lengths, make_lengths, recorded_lengths
from headway.stages import Stages
from headway.trace import Event, Trace
from headway.types import UserError


def simulate(config: Config) -> list[Event]:
    """The run's schedule on virtual time, with doubles for the verbs -> its trace."""
    simulation = config.simulate
    settings, chosen = sizes(config), rules(config, simulated=True)
    contention = _contention(simulation)
    doubles = Doubles(
        _lengths(config),
        Times(simulation.train_time, simulation.sync_time, simulation.score_time),
        num_members=settings.num_members,
        longest=simulation.longest or math.inf,
        pinned=chosen.in_flight == "pinned",
        recompute=chosen.in_flight == "recompute",
        engine=engine_model(simulation, contention),
        contention=contention,
    )
    return _on_virtual_time(config, doubles, settings, chosen)


def _contention(simulation: Simulate) -> Contention | None:
    engine, trainer = simulation.engine_slowdown or 1.0, simulation.trainer_slowdown or 1.0
    if max(engine, trainer) == 1:
        return None
    return Contention(engine=engine, trainer=trainer, units=simulation.micro_batches or 1)


def _lengths(config: Config) -> Lengths:
    simulation, num_members = config.simulate, sizes(config).num_members
    return make_lengths(simulation.lengths, simulation.mean_length, config.run.seed, num_members=num_members)


def whole_lengths(config: Config, replayed: Path | None = None) -> Lengths:
    """How long each rollout of a simulation is (of a replay of RUN/), if nothing ends it early, by its identity."""
    if replayed:
        return recorded_lengths(read_recording(replayed, config.run.seed), sizes(config).num_members)
    lengths, longest = _lengths(config), config.simulate.longest or math.inf
    return lambda identity: min(lengths(identity), longest)


def engine_model(simulation: Simulate, contention: Contention | None = None) -> Callable[[], Engine]:
    """What makes the engine of a simulation, on the loop that it runs on."""
    prefill = Prefill(simulation.prompt_tokens or 0.0, simulation.prefill_tokens_per_s)
    if simulation.engine == "lanes":
        return lambda: ConstantRate(prefill)
    machine = Machine(*(getattr(simulation, field.name) for field in fields(Machine)))
    return lambda: Roofline(machine, prefill, contention)


REPLAYED = (
    *("run.seed", "run.steps", "generate.lanes", "evaluate.size", "evaluate.every", "checkpoint.every"),
    *("schedule", "simulate.skip_steps"),
)
"""Settings that a replay looks at."""


def replay(folder: Path, overrides: Sequence[str] = ()) -> list[Event]:
    """The run in RUN/ again, on virtual time, as its trace says how long things took -> the trace of that.

    overrides: command-line words, for another schedule; without them it is the run's own. Times are in the units of
    the trace (seconds of a real run). Raises UserError where RUN/ holds too little, and for a setting that a replay
    does not look at.
    """
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} holds no config.toml, so what was run there is not known")
    resolved = resolve(folder / "config.toml", overrides)
    only(resolved.origins, REPLAYED, "a replay")
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


def play(scenario: faults.Scenario) -> lives.History:
    """A run on virtual time with all that befalls it: it dies, is resumed, and so on until it is over."""
    return lives.play(scenario, _live)


def try_faults(seeds: Iterable[int]) -> Iterator[Trial]:
    """Scenarios of faults by their seeds, each played and audited."""
    return trials(seeds, _live)


async def _live(scenario: faults.Scenario, parts: lives.LifeParts) -> None:
    """One life of a scenario's run, to its end or to whatever ends it."""
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
