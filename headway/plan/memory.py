"""What every GPU of a job holds, line by line, in each phase of a step.

Every line has a floor, below which no implementation can come, and what is expected. A GPU needs the most that any one
phase needs, not the sum of all. Whether a job fits is said of what is expected, within a share of the nominal memory
that allocators and drivers leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.plan.activations import logits_bytes, of_model
from headway.plan.lengths import Answers
from headway.plan.shapes import LatentAttention, ModelShape
from headway.plan.states import (
    Models,
    PerGpu,
    Precision,
    Sharding,
    StateBytes,
    adapter_states,
    frozen_states,
    held,
    trained_states,
)

Sleep = Literal["none", "cache", "weights"]
"""What a colocated engine gives back while the trainer trains: nothing, its cache, or its weights too."""

GIB = 2**30

ENGINE_OVERHEAD = (1.0e9, 4.0e9)
"""Of an engine: context, workspaces and captured graphs. 2 to 6 GB are usual."""

TRAINER_OVERHEAD = (1.0e9, 2.0e9)
"""Of a trainer: context, and buffers of the collectives."""

FRAGMENTATION = 0.05
"""Of what comes and goes while a batch is trained, beside it."""

BUCKET = 1 * GIB
"""Of weights under way, unless a single tensor is larger."""


@dataclass(frozen=True)
class Line:
    """One thing that takes memory on a GPU, in bytes: at least, as expected, and why so much."""

    name: str
    floor: float
    expected: float
    why: str


@dataclass(frozen=True)
class Phase:
    """What lies there at once while one thing is done."""

    name: str
    lines: tuple[Line, ...]

    @property
    def floor(self) -> float:
        return sum(line.floor for line in self.lines)

    @property
    def expected(self) -> float:
        return sum(line.expected for line in self.lines)


@dataclass(frozen=True)
class Pool:
    """GPUs that all do the same, and what each of them holds in each phase."""

    name: str
    num_gpus: int
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.expected)

    @property
    def floor(self) -> float:
        return max(phase.floor for phase in self.phases)


@dataclass(frozen=True)
class Generation:
    """How rollouts are generated.

    replicas: engines, each on `tensor` GPUs; lanes: rollouts in flight in all of them; weight_bytes: of a parameter,
    and of a number of the cache.
    """

    replicas: int
    tensor: int
    lanes: int
    weight_bytes: float = 2.0

    @property
    def lanes_each(self) -> int:
        """Of the fullest engine."""
        return -(-self.lanes // self.replicas)


@dataclass(frozen=True)
class Training:
    """How a batch is trained: micro-batches of so many tokens on each data rank.

    offload: optimizer states wait in the host's memory while they are not needed.
    """

    sharding: Sharding
    precision: Precision
    micro_batch_tokens: float
    checkpointing: bool = True
    chunked_logits: bool = True
    offload: bool = False


@dataclass(frozen=True)
class Job:
    """A policy, the models beside it, its answers, and how those are generated and trained.

    nominal_params: a round number of parameters to reckon with instead of those of the shape.
    """

    shape: ModelShape
    models: Models
    answers: Answers
    generation: Generation
    training: Training
    nominal_params: float | None = None

    @property
    def scale(self) -> float:
        """Of everything that is counted by parameter, where a round number stands for the real one."""
        return 1.0 if self.nominal_params is None else self.nominal_params / self.shape.num_params

    @property
    def micro_batch_tokens(self) -> float:
        """A sequence is never cut, so at least the longest one."""
        return max(self.training.micro_batch_tokens, self.answers.prompt + self.answers.longest)


def colocated(job: Job, sleep: Sleep) -> list[Pool]:
    """Every GPU generates, then trains."""
    states = _training_states(job)
    resident = [line for line in states if not (job.training.offload and line.name in OPTIMIZER_LINES)]
    weights, cache, engine = _engine_weights(job), _cache(job), _overhead("engine overhead", ENGINE_OVERHEAD)
    trainer = _overhead("trainer overhead", TRAINER_OVERHEAD)
    kept = {"none": [weights, cache], "cache": [weights], "weights": []}[sleep]
    phases = (
        Phase("generate", (*resident, trainer, weights, cache, engine)),
        Phase("train", (*states, *_training(job), trainer, *kept, engine)),
        Phase("sync", (*resident, trainer, weights, *([cache] if sleep == "none" else []), _staging(job), engine)),
    )
    return [Pool("every GPU", job.training.sharding.gpus, phases)]


def disaggregated(job: Job) -> list[Pool]:
    """Some GPUs generate, the others train."""
    weights, cache, engine = _engine_weights(job), _cache(job), _overhead("engine overhead", ENGINE_OVERHEAD)
    states, trainer = _training_states(job), _overhead("trainer overhead", TRAINER_OVERHEAD)
    generating = (
        Phase("generate", (weights, cache, engine)),
        Phase("sync", (weights, cache, engine, _staging(job))),
    )
    training = (
        Phase("train", (*states, *_training(job), trainer)),
        Phase("sync", (*states, trainer, _staging(job))),
    )
    num_generating = job.generation.replicas * job.generation.tensor
    return [
        Pool("generating GPUs", num_generating, generating),
        Pool("training GPUs", job.training.sharding.gpus, training),
    ]


def lanes_that_fit(job: Job, budget: float, *, others: float) -> int:
    """Rollouts at their longest that one engine's cache has room for beside `others` bytes on each of its GPUs."""
    room = budget - others - _engine_weights(job).expected - ENGINE_OVERHEAD[1]
    return max(0, int(room // _kv_on_gpu(job, job.answers.prompt + job.answers.longest)))


# ---- lines of the trainer

OPTIMIZER_LINES = ("master weights", "Adam's moments", "critic's optimizer")
ENGINE_LINES = ("engine's weights", "keys and values", "engine overhead")


def _training_states(job: Job) -> list[Line]:
    """All models of the trainer's side."""
    models, training = job.models, job.training
    per_gpu = held_on_gpu(job, job.shape)
    if models.adapter_params is None:
        lines = _trained_lines(trained_states(per_gpu, training.precision, training.sharding), training)
    else:
        lines = _adapter_lines(job, per_gpu, models.adapter_params)
    if models.critic:
        critic = held_on_gpu(job, job.shape.as_critic())
        lines += _critic_lines(trained_states(critic, training.precision, training.sharding), training)
    for name, wanted in (("reference", models.holds_reference), ("reward model", models.reward_model)):
        if wanted:
            lines.append(_exact(name, _frozen(per_gpu, training), "frozen weights" + _shared(training, 3)))
    return lines


def held_on_gpu(job: Job, shape: ModelShape) -> PerGpu:
    """Parameters of the job's policy, or of a critic of its shape, on the fullest GPU before ZeRO divides them."""
    per_gpu = held(shape, job.training.sharding)
    return PerGpu(per_gpu.fixed * job.scale, per_gpu.routed * job.scale)


def _trained_lines(states: StateBytes, training: Training) -> list[Line]:
    precision = training.precision
    lines = [
        _exact("weights", states.weights, f"{precision.weights:g} bytes a parameter" + _shared(training, 3)),
        _exact("gradients", states.gradients, f"{precision.gradients:g} bytes a parameter" + _shared(training, 2)),
    ]
    if precision.master:
        lines.append(_exact("master weights", states.master, "float32" + _shared(training, 1)))
    moments = f"two moments, {precision.adam:g} bytes a parameter"
    return [*lines, _exact("Adam's moments", states.adam, moments + _shared(training, 1))]


def _adapter_lines(job: Job, per_gpu: PerGpu, num_params: int) -> list[Line]:
    training = job.training
    states = adapter_states(num_params, training.precision, training.sharding)
    each = f"{num_params / 1e6:,.2f} M trained parameters of {training.precision.trained:g} bytes"
    return [
        _exact("base weights", _frozen(per_gpu, training), "frozen" + _shared(training, 3)),
        _exact("adapter", states.total, each),
    ]


def _critic_lines(states: StateBytes, training: Training) -> list[Line]:
    both = states.weights + states.gradients
    return [
        _exact(
            "critic", both, "weights and gradients of the policy's size, without its LM head" + _shared(training, 3)
        ),
        _exact("critic's optimizer", states.optimizer, "master weights and moments" + _shared(training, 1)),
    ]


def _frozen(per_gpu: PerGpu, training: Training) -> float:
    return frozen_states(per_gpu, training.precision.weights, training.sharding).total


def _shared(training: Training, level: int) -> str:
    sharding = training.sharding
    ways = []
    if sharding.zero >= level and sharding.data > 1:
        ways.append(f"ZeRO over {sharding.data}")
    if sharding.tensor > 1:
        ways.append(f"tensor {sharding.tensor}")
    if sharding.pipeline > 1:
        ways.append(f"pipeline {sharding.pipeline}")
    if sharding.expert > 1:
        ways.append(f"experts over {sharding.expert}")
    return f", divided: {', '.join(ways)}" if ways else ""


def _training(job: Job) -> list[Line]:
    """What comes and goes while a batch is trained."""
    shape, training = job.shape, job.training
    sharding, num_tokens = training.sharding, job.micro_batch_tokens
    number = 4 if training.precision.weights == 4 else 2
    per_token = of_model(shape, number, checkpointing=training.checkpointing)
    # a pipeline's first stage holds as many micro-batches as there are stages, each of its share of the layers
    floor, expected = (num_tokens * bytes_ / sharding.tensor for bytes_ in (per_token.floor, per_token.expected))
    kept = "each layer's input, and one layer at a time" if training.checkpointing else "all layers"
    kept += ", sequence-parallel" if sharding.tensor > 1 else ""
    logits = logits_bytes(num_tokens, shape.vocab, chunked=training.chunked_logits)
    lines = [
        Line("activations", floor, expected, f"{num_tokens:,.0f} tokens of a micro-batch: {kept}"),
        Line("logits", logits.floor, logits.expected, "float32, " + _logits_in_words(job)),
    ]
    if sharding.zero == 3 and sharding.data > 1:
        lines.append(_gathered(job))
    elif sharding.zero == 2 and sharding.data > 1:
        lines.append(_buckets(job))
    moving = sum(line.expected for line in lines)
    return [*lines, Line("fragmentation", 0.0, FRAGMENTATION * moving, f"{FRAGMENTATION:.0%} of what comes and goes")]


def _buckets(job: Job) -> Line:
    """Gradients on their way to the ranks that keep them; no more than there are."""
    training, adapter = job.training, job.models.adapter_params
    num_params = held_on_gpu(job, job.shape).all if adapter is None else adapter
    others = training.precision.gradients * num_params * (1 - 1 / training.sharding.data)
    return Line("gradient buckets", 0.0, min(2 * BUCKET, others), "one is reduced while the next one fills")


def _gathered(job: Job) -> Line:
    """Whole weights that ZeRO 3 collects: of two layers, of the embeddings, and the gradient of the layer at work."""
    training, shape = job.training, job.shape
    share = job.scale / training.sharding.tensor
    layer = shape.largest_layer_params(training.sharding.expert) * share
    embeddings = (1 if shape.tied else 2) * shape.embedding_params * share
    trained = 0.0 if job.models.adapter_params is not None else training.precision.gradients * layer
    weights = training.precision.weights
    return Line(
        "gathered layers",
        weights * layer,
        weights * (2 * layer + embeddings) + trained,
        "the layer at work with its gradient, the next one on its way, and the embeddings",
    )


def _logits_in_words(job: Job) -> str:
    if job.training.chunked_logits:
        return "in chunks"
    return f"{job.micro_batch_tokens:,.0f} tokens x {job.shape.vocab:,} ids, with probabilities and gradients"


# ---- lines of the engine


def _engine_weights(job: Job) -> Line:
    generation = job.generation
    per_gpu = held(job.shape, Sharding(gpus=generation.tensor, tensor=generation.tensor, zero=0))
    divided = f", divided: tensor {generation.tensor}" if generation.tensor > 1 else ""
    size = generation.weight_bytes * per_gpu.all * job.scale
    return _exact("engine's weights", size, f"{generation.weight_bytes:g} bytes a parameter{divided}")


def _cache(job: Job) -> Line:
    num_lanes = job.generation.lanes_each
    floor, expected = (_kv_on_gpu(job, tokens / num_lanes) * num_lanes for tokens in job.answers.held(num_lanes))
    tokens = job.answers.held(num_lanes)[1]
    return Line(
        "keys and values", floor, expected, f"{num_lanes} rollouts in flight hold up to {tokens:,.0f} tokens together"
    )


def _kv_on_gpu(job: Job, num_tokens: float) -> float:
    """Of one rollout. Key-value heads are divided as far as there are any; a latent is on every GPU."""
    ways = min(
        1 if isinstance(layer.attention, LatentAttention) else min(job.generation.tensor, layer.attention.kv_heads)
        for layer, _ in job.shape.kinds
    )
    return job.shape.kv_bytes(num_tokens, job.generation.weight_bytes) / ways


def _staging(job: Job) -> Line:
    """Weights on their way from trainer to engine; of an adapter, the adapter alone."""
    adapter = job.models.adapter_params
    if adapter is not None:
        size = job.training.precision.weights * adapter
        return Line("weights under way", size, 2 * size, "the adapter, sent while the next one is collected")
    largest = job.generation.weight_bytes * max(job.shape.embedding_params, job.shape.largest_matrix_params)
    return Line(
        "weights under way", largest, 2 * max(largest, BUCKET), "two buckets, each of 1 GiB or the largest tensor"
    )


def _overhead(name: str, range_: tuple[float, float]) -> Line:
    return Line(name, *range_, "context, workspaces, buffers")


def _exact(name: str, num_bytes: float, why: str) -> Line:
    return Line(name, num_bytes, num_bytes, why)
