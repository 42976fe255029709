"""What was asked of the planner, the ways to do it, and what was found of each: the nouns of a plan.

`headway.planning` makes them, `headway.reports` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from headway.plan.communication import Route
from headway.plan.lengths import Answers
from headway.plan.memory import Job, Sleep, Training
from headway.plan.placement import Hardware, Placed, generations, sharding
from headway.plan.roofline import Efficiency, TrainPasses
from headway.plan.shapes import ModelShape
from headway.plan.states import Algorithm, Models, Precision

Sharing = Literal["colocated", "disaggregated"]

NEAR = 0.02
"""A speed within so much of the best is as good: then less lag decides, or less memory."""


@dataclass(frozen=True)
class Assumption:
    """A value and where it is from: recipe, command line or assumed."""

    name: str
    value: object
    origin: str


@dataclass(frozen=True)
class Request:
    """Everything a plan starts from.

    price: of one GPU for an hour, None where it was not said; engine_tensor: GPUs of an engine, None: the planner's
    choice, and so of micro_batch_tokens; settings: those of the command line, by key; sleep: what a colocated engine
    gives back while the trainer trains.
    """

    shape: ModelShape
    hardware: Hardware
    algorithm: Algorithm
    models: Models
    lora_rank: int | None
    answers: Answers
    lanes: int
    lanes_said: bool
    batch: int
    group: int
    run_ahead: float | None
    micro_batch_tokens: float | None
    precision: Precision
    tensor: int
    pipeline: int
    expert: int
    zero: int
    engine_tensor: int | None
    sleep: Sleep
    checkpointing: bool
    chunked_logits: bool
    offload: bool
    efficiency: Efficiency
    nominal: float | None
    price: float | None
    lengths: str
    mean: float
    longest: float
    seed: int
    assumptions: tuple[Assumption, ...]
    model: str
    recipe: Path | None
    settings: Mapping[str, Any]

    def jobs(self, num_generating: int, num_training: int) -> list[Job]:
        """One for each size of engine, the smallest first."""
        training = Training(
            sharding(
                self.shape,
                num_training,
                tensor=self.tensor,
                pipeline=self.pipeline,
                expert=self.expert,
                zero=self.zero,
            ),
            self.precision,
            self.micro_batch_tokens or 0.0,
            self.checkpointing,
            self.chunked_logits,
            self.offload,
        )
        engines = generations(
            self.shape, num_generating, self.lanes, weight_bytes=self.engine_bytes, tensor=self.engine_tensor
        )
        return [Job(self.shape, self.models, self.answers, engine, training, self.nominal) for engine in engines]

    @property
    def engine_bytes(self) -> float:
        """Of one number of engine's weights and cache: float32 where the trainer is in float32, else bf16."""
        return self.precision.weights

    @property
    def passes(self) -> TrainPasses:
        models = self.models
        return TrainPasses(
            frozen_base=models.adapter_params is not None,
            checkpointing=self.checkpointing,
            critic=models.critic,
            scored_by=models.reference + models.reward_model,
        )


@dataclass(frozen=True)
class Layout:
    """GPUs that generate and GPUs that train; colocated they are the same ones, by turns.

    sleep: what a colocated engine gives back while the trainer trains. Rollouts that go on afterwards need their cache.
    """

    sharing: Sharing
    generating: int
    training: int
    placed: Placed
    sleep: Sleep = "none"

    @property
    def name(self) -> str:
        tensor = self.placed.job.generation.tensor
        engines = f", engines of {tensor}" if tensor > 1 else ""
        if self.sharing == "colocated":
            return f"all {self.generating} by turns{engines}"
        return f"{self.generating} generate, {self.training} train{engines}"


@dataclass(frozen=True)
class Times:
    """Of one layout, in seconds at the stated efficiencies, with all lanes busy and answers at their mean.

    decode_step_s: of one engine, at `context` tokens a rollout; arithmetic_bound: whether that is the longer part;
    answer_s: of an answer of mean length, while the engine prefills others too; prefill_tokens_per_s and
    decode_tokens_per_s: of all engines together; train_s: of a batch, the longer of train_arithmetic_s and of what is
    sent meanwhile (train_hidden_s), and what is sent in between (train_shown_s); sync_s: of new weights by the first of
    sync_ways; room: rollouts at their
    longest for which all caches have room. weight_bytes, kv_bytes, bandwidth, overhead_s: of all engines taken as one,
    as the simulator wants them.
    """

    decode_step_s: float
    context: float
    arithmetic_bound: bool
    crossover: float
    answer_s: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    train_s: float
    train_arithmetic_s: float
    train_hidden_s: float
    train_shown_s: float
    sync_s: float
    sync_ways: tuple[Route, ...]
    room: int
    weight_bytes: float
    kv_bytes: float
    bandwidth: float
    overhead_s: float


@dataclass(frozen=True)
class Curves:
    """Tokens a second of one engine over rollouts in flight, at the length of the workload.

    memory, arithmetic: what each alone would allow at the vendor's figures; expected: at the stated efficiencies.
    batch, tokens_per_s: of the workload.
    """

    batches: tuple[float, ...]
    memory: tuple[float, ...]
    arithmetic: tuple[float, ...]
    expected: tuple[float, ...]
    batch: float
    tokens_per_s: float


@dataclass(frozen=True)
class Figures:
    """Of a simulated candidate, in seconds.

    tokens_per_s: trained answer tokens; price: of a million of them, None without a price; mean_lag, token_lag,
    max_lag: in versions; trainer_idle, lanes_idle: shares of the time.
    """

    step_s: float
    rollouts_per_s: float
    tokens_per_s: float
    price: float | None
    mean_lag: float
    token_lag: float
    max_lag: float
    trainer_idle: float
    lanes_idle: float


@dataclass(frozen=True)
class Candidate:
    """One way to run the job.

    rate: rollouts a second, and expected_lag, by the closed laws; figures: of its simulation,
    None where it was not on the short list.
    """

    layout: Layout
    times: Times
    run_ahead: float
    rate: float
    expected_lag: float
    figures: Figures | None = None

    @property
    def fits(self) -> bool:
        return self.layout.placed.fits


@dataclass(frozen=True)
class OtherBatch:
    """The chosen layout and run_ahead with batches of another size; lanes as many as before where somebody said so."""

    batch: int
    lanes: int
    candidate: Candidate


@dataclass(frozen=True)
class Plan:
    """states: bytes of all models at once, undivided; candidates: all that were looked at, the simulated ones first;
    chosen: the recommended one, None where nothing fits; reasons: why, in sentences; curves: of the engines of
    the one that is shown; batches: what it would be with other ones.
    """

    request: Request
    states: dict[str, float]
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    reasons: tuple[str, ...]
    curves: Curves
    batches: tuple[OtherBatch, ...] = ()

    @property
    def simulated(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.figures]

    @property
    def shown(self) -> Candidate:
        return shown(self.chosen, self.candidates)


def shown(chosen: Candidate | None, candidates: Sequence[Candidate]) -> Candidate:
    """The one whose memory and times are shown: the chosen one, or of those that don't fit the nearest."""
    return chosen or min(candidates, key=lambda candidate: candidate.layout.placed.fullest)


T = TypeVar("T")


def least_lag(found: Sequence[T], speed: Callable[[T], float], lag: Callable[[T], float]) -> T:
    """The one with the least lag among those that are as fast as the fastest.

    >>> least_lag([(100, 3), (99, 1), (90, 0)], speed=lambda one: one[0], lag=lambda one: one[1])
    (99, 1)
    """
    most = max(map(speed, found))
    near = [one for one in found if speed(one) >= (1 - NEAR) * most]
    return min(near, key=lambda one: (lag(one), -speed(one)))
