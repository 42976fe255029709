"""Every setting of a run: frozen, validated, and told where each value came from.

A run is a TOML recipe plus overrides of any key. An override names a key by its path (`--schedule.run-ahead 2`) or,
where that is unambiguous, by its last word (`--run-ahead 2`); dash and underscore are the same. An unknown key is an
error that names the nearest valid one. This module knows names and ranges, no implementation.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomlkit
import tomlkit.items
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from headway.types import InFlight, Order, Parity, Straggler, UserError, did_you_mean, nearest

Origin = Literal["default", "recipe", "command line"]


def _split_commas(value: Any) -> Any:
    return [part for part in value.split(",") if part] if isinstance(value, str) else value


Strings = Annotated[tuple[str, ...], BeforeValidator(_split_commas)]
"""A list in TOML; on the command line, words separated by commas."""


def _parse_table(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"a table on the command line is JSON, as in '{{\"min_terms\": 2}}' ({error})") from None


def _without_null(value: Any) -> Any:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _without_null(child)
    if value is None:
        raise ValueError("null has no place in a recipe; leave the parameter out")
    return value


Parameters = Annotated[dict[str, Any], BeforeValidator(_parse_table), AfterValidator(_without_null)]
"""A table in TOML; on the command line, a JSON object."""


class Section(BaseModel):
    """A frozen table of settings; a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class Run(Section):
    """Where the run is kept and how long it goes on."""

    name: str = Field(default="run", description="names the run's folder unless run.out is given")
    out: str | None = Field(default=None, description="the run's folder; default runs/NAME-DATE-TIME")
    seed: int = Field(default=0, description="root of every random choice of the run")
    steps: int = Field(default=100, ge=0, description="train steps, unless the data end before; 0: only evaluate")
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of engine and trainer; default as many as cores"
    )
    share_cores: bool = Field(
        default=True,
        description="engine and trainer share run.threads, all for the one that works alone; false: each uses as many",
    )


class Model(Section):
    """The base policy."""

    path: str | None = Field(
        default=None,
        description="a local Hugging Face folder, a .gguf file, package:NAME for a model a package ships, or a hub id",
    )
    device: str | None = Field(default=None, description="cpu, cuda or cuda:1; default cuda where there is one")
    parity: Parity = Field(
        default="close",
        description="how near the engine's log-probs are to the trainer's: close, to rounding; bitwise, in every bit",
    )


class AdapterSettings(Section):
    """A few trained numbers inside a frozen base, instead of training all of it."""

    kind: Literal["none", "lora", "tinylora"] = Field(
        default="none",
        description="none trains all weights; lora and tinylora train an adapter and keep the base as it is",
    )
    rank: int | None = Field(
        default=None, ge=1, description="of lora's product (default 8), or of tinylora's frozen frame (default 2)"
    )
    alpha: float | None = Field(
        default=None, gt=0, description="of lora: its product is scaled by alpha / rank; default 32"
    )
    scaling: Literal["rank", "sqrt_rank"] | None = Field(
        default=None, description="of lora: what divides alpha, rank (the default) or its square root (rank-stabilised)"
    )
    vector_size: int | None = Field(
        default=None, ge=1, description="of tinylora: trained numbers per vector; default 64, and one vector per layer"
    )
    tying: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="of tinylora: share of layers without a vector of their own; default 0, at 1 all layers have one together",
    )
    targets: Strings | None = Field(
        default=None,
        description="linear layers with an adapter, by the end of their names; default all but the LM head",
    )
    start: str | None = Field(
        default=None, description="an adapter folder to go on from, with its settings; it is also the run's reference"
    )
    merge: bool | None = Field(
        default=None, description="leave a whole model in RUN/model, not an adapter folder (the default)"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_kind(cls, given: Any) -> Any:
        """Fill in what the kind takes, and refuse what it would ignore."""
        kind = given.get("kind", "none") if isinstance(given, dict) else None
        if not isinstance(kind, str) or kind not in ADAPTER_DEFAULTS:
            return given  # and the field says so
        defaults = ADAPTER_DEFAULTS[kind]
        for name in given:
            if given[name] is not None and name in cls.model_fields and name not in {"kind", *defaults}:
                others = [other for other, taken in ADAPTER_DEFAULTS.items() if name in taken]
                raise ValueError(
                    f"adapter.{name} does nothing with adapter.kind {kind}; leave it out, or set adapter.kind to "
                    f"{' or '.join(others)}"
                )
        if given.get("start") is not None:
            defaults = {"merge": False}  # the rest is as in the folder
        return {**defaults, **{name: value for name, value in given.items() if value is not None}}


ADAPTER_DEFAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "lora": {"rank": 8, "alpha": 32, "scaling": "rank", "targets": None, "start": None, "merge": False},
    "tinylora": {"rank": 2, "vector_size": 64, "tying": 0.0, "targets": None, "start": None, "merge": False},
}
"""The keys that each kind of adapter takes, and their values where they are not given."""


class Data(Section):
    """Where prompts come from."""

    source: str | None = Field(
        default=None,
        description="addition, reasoning_gym:TASK, or a .jsonl file with a prompt (or question) and an answer per line",
    )
    params: Parameters = Field(default_factory=dict, description="parameters of a task generator")
    size: int | None = Field(
        default=None, ge=1, description="how many prompts: of a generator (default 10000), or the first of a file"
    )
    epochs: int | None = Field(
        default=None, ge=1, description="passes over the prompts; default as many as the steps need"
    )
    shuffle: bool = Field(default=True, description="a new order in every epoch")
    template: str = Field(default="{question}", description="the prompt's text; {question} is replaced")
    chat: bool = Field(default=False, description="render through the model's chat template as one user message")
    system: str | None = Field(default=None, description="the system message, when chat is on")


class Generate(Section):
    """The generation engine and its sampling. Nothing is taken from the model folder's generation config."""

    lanes: int = Field(default=16, ge=1, le=1_000_000, description="rollouts in flight at once")
    max_new_tokens: int = Field(
        default=64, ge=1, description="token budget of a rollout; reaching it is finish 'length'"
    )
    temperature: float = Field(
        default=1.0, ge=0.0, description="of sampling and of every log-prob the trainer computes; 0 is greedy"
    )
    end_tokens: Strings | None = Field(
        default=None, description="tokens that end a rollout; default the tokenizer's end token"
    )
    stop: Strings = Field(default=(), description="strings that end a rollout")
    top_k: int = Field(default=0, ge=0, description="sample among the so many most likely tokens; 0: among all")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="sample among the fewest tokens that have so much of the probability"
    )
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="sample among tokens at least so many times as likely as the likeliest one"
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0, description="divides the logits of tokens that the context has already; 1: none"
    )
    force_after: int | None = Field(
        default=None, ge=1, description="sampled tokens after which force_phrase is put into the answer; default never"
    )
    force_phrase: str | None = Field(
        default=None, description="text that is put in, and not trained on; the rest is sampled after it"
    )
    force_unless: str = Field(default="", description="text that an answer may hold by then, and is left alone for")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="of the engine's weights and cache; an adapter and the LM head's product stay float32",
    )
    cache_bytes: int | None = Field(
        default=None,
        ge=1,
        description="for keys and values of rollouts in flight; default for full lanes, at most a quarter of free memory",
    )
    prefill_tokens: int = Field(
        default=512,
        ge=1,
        description="prompt tokens of one forward pass, beside the new tokens of the rollouts under way",
    )
    sleep: Literal["none", "cache", "weights"] = Field(
        default="none",
        description="what the engine gives back while the trainer trains: nothing, its cache, or its weights too",
    )

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn among some of the vocabulary only."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @model_validator(mode="after")
    def _force_is_whole(self) -> Generate:
        if (self.force_after is None) != (not self.force_phrase):
            raise ValueError("generate.force_after and generate.force_phrase go together: give both, or leave both out")
        if self.force_unless and self.force_after is None:
            raise ValueError(
                "generate.force_unless does nothing without generate.force_after and generate.force_phrase; leave it out"
            )
        if self.force_phrase and any(stop in self.force_phrase for stop in self.stop):
            raise ValueError(
                "generate.force_phrase holds a string of generate.stop, which would end every answer it is put into; "
                "leave it out of one of them"
            )
        return self

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("an empty stop string would end every rollout at its first token; leave it out")
        return stop


class ScoreSettings(Section):
    """How answers are graded."""

    scorer: str | None = Field(
        default=None, description="number, reasoning_gym, or module:function(text, prompt) -> reward"
    )
    timeout_s: float = Field(default=10.0, gt=0, description="after this a grader is ended; the rollout is unscored")
    max_errors: int = Field(
        default=0, ge=0, description="grader errors after which the run stops; those before leave rollouts unscored"
    )
    workers: int = Field(default=1, ge=1, description="processes that run a user's grader")


class Prepare(Section):
    """How rollouts are packed."""

    micro_batch_tokens: int = Field(default=4096, ge=1, description="token budget of a micro-batch")


class ObjectiveSettings(Section):
    """The loss. Unset values are the objective's own: `headway objectives NAME` shows them."""

    name: str = Field(default="olmo3", description="a named objective; headway objectives lists them")
    corrections: Strings = Field(
        default=(),
        description="weights for the gap to the policy that sampled: tis, tis:5, icepop:0.5:4 ...; headway objectives lists them",
    )
    advantage: str | None = Field(
        default=None,
        description="group_mean, group_mean_std, leave_one_out, group_mean_batch_std, batch_mean, reward, gae or preference",
    )
    whiten: bool | None = Field(default=None, description="advantages to mean 0 and std 1 over the batch's tokens")
    gamma: float | None = Field(default=None, ge=0, le=1, description="discount of the advantage gae")
    lam: float | None = Field(default=None, ge=0, le=1, description="lambda of the advantage gae")
    anchor: Literal["proximal", "behaviour"] | None = Field(
        default=None,
        description="the older policy of its ratios: the trainer's before the step, or the one that sampled",
    )
    proximal: Literal["recomputed", "interpolated"] | None = Field(
        default=None, description="with several optimizer steps: by a forward pass, or guessed from versions (A-3PO)"
    )
    reduction: str | None = Field(
        default=None,
        description="token_mean, rollout_mean_token_mean, rollout_mean_token_sum, constant or prompt_mean",
    )
    length: int | None = Field(
        default=None, ge=1, description="constant of the reduction constant; default generate.max_new_tokens"
    )
    clip_low: float | None = Field(default=None, gt=0, le=1, description="ratios are clipped at 1 - clip_low")
    clip_high: float | None = Field(default=None, gt=0, description="ratios are clipped at 1 + clip_high")
    dual_clip: float | None = Field(
        default=None, ge=0, description="bound of the loss of negative advantages, above 1; 0: none"
    )
    kl_coefficient: float | None = Field(default=None, ge=0, description="of a KL term to the reference; 0: none")
    kl_estimator: str | None = Field(
        default=None,
        description="of the KL term: k2, k3 or k3_value_k2_gradient; for data that are stale k1_corrected, k2_corrected or k3_corrected",
    )
    reward_kl: float | None = Field(default=None, ge=0, description="KL taken off the reward of each token; 0: none")
    quadratic_coefficient: float | None = Field(default=None, gt=0, description="of a squared log-ratio (tau)")
    value_clip: float | None = Field(
        default=None, ge=0, description="how far the value loss lets values move; 0: as far as they will"
    )
    beta: float | None = Field(default=None, gt=0, description="of the preference loss")
    overlong_share: float | None = Field(
        default=None, ge=0, le=1, description="last share of the token budget in which an answer is penalised; 0: none"
    )
    filters: Strings | None = Field(
        default=None, description="rollouts that are no data: zero_variance (of groups), truncated"
    )
    retire_above: float | None = Field(
        default=None, ge=0, le=1, description="a prompt with this pass rate is not asked again; 0: none"
    )
    self_normalise: bool | None = Field(default=None, description="divide weights by their mean over an optimizer step")
    unsound: bool = Field(
        default=False, description="train what is refused for a reason; every page of the run says so"
    )


class Train(Section):
    """The trainer and its optimizer."""

    learning_rate: float | None = Field(
        default=None, ge=0, description="default 1e-5, and 1e-4 with an adapter: it takes ten times that of all weights"
    )
    optimizer_steps: int = Field(default=1, ge=1, description="parts of a batch, one optimizer step each")
    passes: int = Field(default=1, ge=1, description="times a batch is trained; PPO calls them epochs")
    warmup_steps: int = Field(
        default=0, ge=0, description="optimizer steps over which the learning rate rises linearly"
    )
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of the learning rate after warm-up"
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="of Adam's mean of gradients")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="of Adam's mean of squared gradients")
    epsilon: float = Field(default=1e-8, gt=0, description="of Adam's divisor")
    weight_decay: float = Field(default=0.0, ge=0, description="times the learning rate, off each weight in each step")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are scaled down to this global norm")
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the trainer's matrix products; master weights and LM head stay float32"
    )


class CriticSettings(Section):
    """The value function, where the objective has one. What is not here is as in [train]."""

    value_learning_rate: float | None = Field(
        default=None, ge=0, description="default 1e-5, near the 9e-6 of InstructGPT (arXiv 2203.02155, C.4)"
    )
    value_warmup_steps: int = Field(default=0, ge=0, description="train steps in which only the critic learns")


class Diagnostics(Section):
    """What is measured beside training."""

    canary_tokens: int = Field(
        default=8, ge=0, description="sampled under each version by itself, to see numerics without staleness; 0: none"
    )


class Sync(Section):
    """How new weights reach the engine."""

    verify: bool = Field(default=True, description="compare a hash of the weights on both sides after every sync")
    resend_s: float | None = Field(
        default=None,
        gt=0,
        description="weights without an acknowledgement by then are sent again, up to three times in all",
    )


class Schedule(Section):
    """How far generation may run ahead of training, in which order it is trained, and what becomes of what is late."""

    batch_size: int = Field(default=32, ge=1, description="rollouts per train step")
    group_size: int = Field(default=1, ge=1, description="rollouts per prompt")
    run_ahead: float = Field(
        default=1.0, ge=0, le=1e6, description="batches that generation may run ahead; 0 is synchronous"
    )
    order: Order = Field(
        default="finished",
        description="of training: first finished first, in order of start, or first finished among the oldest groups",
    )
    window: int | None = Field(default=None, ge=1, description="of order window: how many of the oldest groups")
    max_lag: int | None = Field(
        default=None,
        ge=0,
        description="versions that a rollout may lag; those above it are counted, and stragglers says what else is done",
    )
    stragglers: Strings = Field(
        default=(),
        description="at max_lag: drop finished groups above it; interrupt or restart unfinished ones that reach it; default accept, which does nothing",
    )
    max_restarts: int | None = Field(
        default=None,
        ge=1,
        description="of stragglers restart: times a group begins again, then it is interrupted; default 1",
    )
    in_flight: InFlight | None = Field(
        default=None,
        description="what rollouts in flight do when new weights come: go on (keep), go on with their cache computed again (recompute), end before the weights are let in (drain), begin again (restart), go on with the old weights (pinned: simulation only, its default); default keep",
    )
    overlap: bool = Field(
        default=True, description="rollouts go on while a batch is trained; false: they pause until its weights are out"
    )
    iteration_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens that a rollout may sample at a stretch; then it pauses until the next version",
    )
    redundant: int = Field(
        default=0,
        ge=0,
        description="rollouts started per prompt beyond group_size; a group is done when any group_size of all are",
    )
    surplus: Literal["abort", "keep"] | None = Field(
        default=None,
        description="redundant rollouts that are still in flight when their group is done: aborted (the default), or trained if they end before it is taken",
    )
    dynamic_sampling: bool = Field(
        default=False, description="replace groups in which all answers earn the same (DAPO, arXiv 2503.14476)"
    )
    max_filtered: int | None = Field(
        default=None,
        ge=1,
        description="of dynamic_sampling: how many batches' worth of groups may be replaced for one step; then the run stops; default 10",
    )
    deadline_s: float | None = Field(
        default=None,
        gt=0,
        description="time in a lane after which a rollout is interrupted; after twice that it is lost",
    )
    max_lost: int = Field(
        default=3,
        ge=0,
        description="times that a rollout which the engine has lost begins again, before it is given up",
    )
    max_failed: int = Field(
        default=100, ge=1, description="groups in a row with too few scored rollouts, after which the run stops"
    )

    @model_validator(mode="after")
    def _whole_groups(self) -> Schedule:
        if self.batch_size % self.group_size:
            below = self.batch_size // self.group_size * self.group_size
            nearest = f"{below} or {below + self.group_size}" if below else f"{self.group_size}"
            raise ValueError(
                f"batch_size {self.batch_size} is no multiple of group_size {self.group_size}; try batch_size {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _sensible_together(self) -> Schedule:
        for nonsense, reason in self._refusals():
            if nonsense:
                raise ValueError(reason)
        return self

    def _refusals(self) -> Iterator[tuple[bool, str]]:
        """Combinations that make no sense, and why."""
        stragglers = set(self.stragglers) - {"accept"}
        unknown = [word for word in self.stragglers if word not in STRAGGLERS]
        near = did_you_mean(*nearest(unknown[0], STRAGGLERS)) if unknown else ""
        yield bool(unknown), f"stragglers {' '.join(unknown[:1])} is none of {', '.join(STRAGGLERS)}{near}"
        yield "accept" in self.stragglers and bool(stragglers), "stragglers accept goes with no other policy"
        yield (
            {"interrupt", "restart"} <= stragglers,
            "stragglers interrupt and restart can't both act on one group; restart interrupts after max_restarts",
        )
        yield (
            bool(stragglers) and self.max_lag is None,
            f"stragglers {','.join(self.stragglers)} acts at max_lag, which is not set; set schedule.max_lag",
        )
        yield (
            self.max_restarts is not None and "restart" not in stragglers,
            f"max_restarts does nothing without stragglers restart{_take_back('max-restarts')}",
        )
        yield (
            self.order == "window" and self.window is None,
            "order window needs a number of groups; set schedule.window",
        )
        yield (
            self.order != "window" and self.window is not None,
            f"window does nothing with order {self.order}{_take_back('window')}",
        )
        yield (
            self.in_flight == "drain" and bool(stragglers & {"interrupt", "restart"}),
            "with in_flight drain no rollout in flight is older than the weights, so stragglers have nothing to "
            "interrupt or restart",
        )
        yield (
            self.in_flight == "drain" and not self.overlap,
            "in_flight drain waits for rollouts that overlap = false has paused until after; take in_flight keep",
        )
        yield (
            self.in_flight in ("drain", "restart") and self.iteration_tokens is not None,
            f"iteration_tokens pauses rollouts until there are new weights, and in_flight {self.in_flight} lets none "
            "outlive them; take in_flight keep or recompute",
        )
        yield (
            self.surplus is not None and not self.redundant,
            f"surplus does nothing without redundant rollouts{_take_back('surplus')}",
        )
        yield (
            self.dynamic_sampling and self.group_size == 1,
            "dynamic_sampling compares the answers of a group that are trained, and group_size is 1",
        )
        yield (
            self.max_filtered is not None and not self.dynamic_sampling,
            f"max_filtered does nothing without dynamic_sampling{_take_back('max-filtered')}",
        )


def _take_back(flag: str) -> str:
    return f"; leave it out, or say --{flag} none"


STRAGGLERS = ("accept", *get_args(Straggler))
"""What schedule.stragglers may hold."""


class Evaluate(Section):
    """Greedy answers to held-out prompts."""

    size: int = Field(default=0, ge=0, description="held-out prompts; 0 turns evaluation off")
    every: int = Field(
        default=0, ge=0, description="steps between evaluations; 0: only before the first and after the last"
    )
    source: str | None = Field(
        default=None, description="a .jsonl file of held-out prompts; default the training source, kept apart"
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="token budget of an answer; default generate.max_new_tokens"
    )


class Checkpoint(Section):
    """What a killed run can be resumed from."""

    every: int = Field(default=10, ge=0, description="steps between checkpoints; 0: only after the last step")
    keep: int = Field(default=2, ge=1, description="newest checkpoints that are kept")


SINKS = ("tensorboard", "wandb", "trackio")


class Report(Section):
    """What a run leaves for people."""

    rollouts_per_step: int = Field(default=2, ge=0, description="trained rollouts written out per step")
    sinks: Strings = Field(
        default=(),
        description="where metrics go besides the run's folder: tensorboard, wandb (offline unless WANDB_MODE is set), trackio; each an extra",
    )

    @field_validator("sinks")
    @classmethod
    def _known_sinks(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            if word not in SINKS:
                raise ValueError(f"{word} is none of {', '.join(SINKS)}{did_you_mean(*nearest(word, SINKS))}")
        return tuple(dict.fromkeys(words))


class Simulate(Section):
    """The doubles of the five verbs on virtual time. Times are in units of your choice; with a roofline, in seconds."""

    lengths: str = Field(
        default="exponential",
        description="1,3,1 (the last one repeats), constant, exponential or lognormal:SIGMA (of mean mean_length), file:PATH (one per line), or run:RUN (tokens of a run's rollouts)",
    )
    mean_length: float = Field(
        default=1.0,
        gt=0,
        le=1e9,
        description="of rollouts, before longest cuts them: time that a lane takes, or tokens with a roofline",
    )
    longest: float | None = Field(
        default=None, gt=0, description="length at which a rollout ends at the latest, its token budget; default none"
    )
    engine: Literal["lanes", "roofline"] = Field(
        default="lanes",
        description="lanes: one token per lane and unit of time; roofline: a decode step takes overhead_s + rollout_s x rollouts + (weight_bytes + kv_bytes_per_token x tokens in all caches) / bandwidth_bytes_per_s",
    )
    overhead_s: float | None = Field(
        default=None, ge=0, description="of a roofline: of a decode step, for launching and sampling; default 0.001"
    )
    weight_bytes: float | None = Field(
        default=None,
        gt=0,
        description="of a roofline: read in every decode step; default 3087428608, Qwen2.5-1.5B in bf16 (1543714304 parameters)",
    )
    kv_bytes_per_token: float | None = Field(
        default=None,
        ge=0,
        description="of a roofline: 2 x layers x KV heads x head size x bytes; default 28672, Qwen2.5-1.5B in bf16",
    )
    bandwidth_bytes_per_s: float | None = Field(
        default=None,
        gt=0,
        description="of a roofline: in use, about 0.8 of the vendor's; default 2.68e12, an H100 SXM (3.35e12)",
    )
    rollout_s: float | None = Field(
        default=None,
        ge=0,
        description="of a roofline: of each rollout in a decode step, beside reading its cache; default 0",
    )
    engine_slowdown: float | None = Field(
        default=None,
        ge=1,
        description="of a roofline: how many times as long the engine takes while the trainer works, where they share a machine; default 1",
    )
    trainer_slowdown: float | None = Field(
        default=None, ge=1, description="of a roofline: the same of the trainer while the engine works; default 1"
    )
    micro_batches: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="of a train step: whether the trainer is slowed down is settled when each begins; default 1",
    )
    prompt_tokens: float | None = Field(
        default=None, ge=0, description="of every prompt, in its cache from the start; default 0"
    )
    prefill_tokens_per_s: float | None = Field(
        default=None,
        gt=0,
        description="of prompts, of rollouts that go on, and of all in flight where new weights recompute; default no time",
    )
    train_time: float = Field(default=1.0, ge=0, le=1e9, description="of a train step")
    sync_time: float = Field(default=0.0, ge=0, le=1e9, description="from trained to published")
    score_time: float = Field(default=0.0, ge=0, le=1e9, description="from the end of a rollout to its score")
    skip_steps: int = Field(
        default=0, ge=0, description="first train steps that the figures leave out, to show the steady state"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_engine(cls, given: Any) -> Any:
        """Fill in what a roofline takes, and refuse what the engine would ignore."""
        if not isinstance(given, dict):
            return given  # and pydantic says so
        engine = given.get("engine", "lanes")
        values = {name: value for name, value in given.items() if value is not None}
        if engine == "roofline":
            return {**ROOFLINE, **values}
        ignored = set(ROOFLINE) - ({"prompt_tokens"} if "prefill_tokens_per_s" in values else set())
        for name in values:
            if name in ignored and engine == "lanes":
                raise ValueError(
                    f"simulate.{name} does nothing with simulate.engine lanes; leave it out, or set simulate.engine to "
                    "roofline"
                )
        return values


ROOFLINE: dict[str, float] = {
    "overhead_s": 0.001,
    "weight_bytes": 3_087_428_608,
    "kv_bytes_per_token": 28_672,
    "bandwidth_bytes_per_s": 2.68e12,
    "rollout_s": 0,
    "engine_slowdown": 1,
    "trainer_slowdown": 1,
    "micro_batches": 1,
    "prompt_tokens": 0,
}
"""The keys of simulate.engine roofline, and their values where they are not given: Qwen2.5-1.5B on an H100 SXM."""


class Config(Section):
    """A complete run."""

    run: Run = Field(default_factory=Run)
    model: Model = Field(default_factory=Model)
    adapter: AdapterSettings = Field(default_factory=AdapterSettings)
    data: Data = Field(default_factory=Data)
    generate: Generate = Field(default_factory=Generate)
    score: ScoreSettings = Field(default_factory=ScoreSettings)
    prepare: Prepare = Field(default_factory=Prepare)
    objective: ObjectiveSettings = Field(default_factory=ObjectiveSettings)
    train: Train = Field(default_factory=Train)
    critic: CriticSettings = Field(default_factory=CriticSettings)
    diagnostics: Diagnostics = Field(default_factory=Diagnostics)
    sync: Sync = Field(default_factory=Sync)
    schedule: Schedule = Field(default_factory=Schedule)
    evaluate: Evaluate = Field(default_factory=Evaluate)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    report: Report = Field(default_factory=Report)
    simulate: Simulate = Field(default_factory=Simulate)

    def setting(self, key: str) -> Any:
        """The value of `section.name`."""
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    @model_validator(mode="after")
    def _fill_in_the_learning_rate(self) -> Config:
        if self.train.learning_rate is None:
            rate = 1e-5 if self.adapter.kind == "none" else 1e-4
            object.__setattr__(self, "train", self.train.model_copy(update={"learning_rate": rate}))
        return self

    @model_validator(mode="after")
    def _sensible_together(self) -> Config:
        for nonsense, reason in self._refusals():
            if nonsense:
                raise ValueError(reason)
        return self

    def _refusals(self) -> Iterator[tuple[bool, str]]:
        """Settings of several sections that make no sense together, and why."""
        bitwise, sleep, schedule = self.model.parity == "bitwise", self.generate.sleep, self.schedule
        yield (
            bitwise and self.generate.dtype != "float32",
            f"model.parity bitwise can't be had with generate.dtype {self.generate.dtype}, since the trainer's weights "
            "are float32; take generate.dtype float32, or model.parity close",
        )
        yield (
            bitwise and self.train.compute_dtype != "float32",
            f"model.parity bitwise can't be had with train.compute_dtype {self.train.compute_dtype}, since the engine's "
            "products are float32; take train.compute_dtype float32, or model.parity close",
        )
        yield (
            sleep != "none" and schedule.overlap and schedule.run_ahead > 0,
            f"generate.sleep {sleep} stops generation while a batch is trained, and schedule.overlap lets rollouts go "
            "on; set schedule.overlap to false, so that they pause, or schedule.run_ahead to 0",
        )
        yield (
            sleep == "weights" and self.adapter.kind != "none",
            f"generate.sleep weights gives back what a sync brings, which with adapter.kind {self.adapter.kind} is the "
            "adapter alone; take cache",
        )


@dataclass(frozen=True)
class Resolved:
    """A valid configuration and where each of its values came from, by dotted key."""

    config: Config
    origins: Mapping[str, Origin]

    def to_toml(self) -> str:
        """The whole configuration as a recipe that gives the same run, each value with its origin as a comment."""
        document = tomlkit.document()
        for section_name, section in self.config:
            table = tomlkit.table()
            for name, value in section:
                key = f"{section_name}.{name}"
                if value is None:
                    table.add(tomlkit.comment(f"{name} is not set ({self.origins[key]})"))
                else:
                    table.add(name, _toml_item(value).comment(self.origins[key]))
            document.add(section_name, table)
        return tomlkit.dumps(document)


def _toml_item(value: Any) -> tomlkit.items.Item:
    if isinstance(value, dict):
        inline = tomlkit.inline_table()
        inline.update(value)
        return inline
    return tomlkit.item(list(value) if isinstance(value, tuple) else value)


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every key (`section.name`) with its description, default and type."""
    for section_name, section in Config.model_fields.items():
        assert isinstance(section.annotation, type)
        for name, info in section.annotation.model_fields.items():
            yield f"{section_name}.{name}", info


KEYS: tuple[str, ...] = tuple(key for key, _ in fields())


def _may_be_unset(annotation: Any) -> bool:
    """Where "none" is no value of its own."""
    kinds = get_args(annotation)
    return type(None) in kinds and str not in kinds


UNSETTABLE: frozenset[str] = frozenset(key for key, info in fields() if _may_be_unset(info.annotation))
"""Keys for which the word none on the command line takes back what a recipe has set."""


def last_word(key: str) -> str:
    """
    >>> last_word("schedule.run_ahead")
    'run_ahead'
    """
    return key.split(".")[1]


def only(origins: Mapping[str, Origin], looked_at: Sequence[str], what: str) -> None:
    """Refuse the settings of the command line that `what` would not look at.

    looked_at: keys, and sections of which it looks at all. Raises UserError.
    """
    for key, origin in origins.items():
        if origin == "command line" and not {key, key.split(".")[0]} & set(looked_at):
            raise UserError(
                f"--{_dashed(key)} does nothing in {what}, which looks at {', '.join(looked_at)}; leave it out"
            )


def resolve(recipe: Path | None, overrides: Sequence[str] = ()) -> Resolved:
    """A recipe file (or none: all defaults) plus command-line words -> a configuration.

    Raises UserError for a missing or malformed file, an unknown key, a missing or unfit value.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(KEYS, "default")
    for key, value in (_recipe_values(recipe) if recipe else {}).items():
        values[key], origins[key] = value, "recipe"
    for key, value in _override_values(overrides).items():
        values[key], origins[key] = value, "command line"
        if value == "none" and key in UNSETTABLE:
            del values[key]
    nested: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    try:
        config = Config.model_validate(nested)
    except ValidationError as error:
        raise UserError(_first_problem(error, origins, recipe)) from None
    return Resolved(config, origins)


def _recipe_values(recipe: Path) -> dict[str, Any]:
    if not recipe.is_file():
        near = sorted(str(path) for path in recipe.parent.glob("*.toml")) if recipe.parent.is_dir() else []
        raise UserError(f"there is no recipe {recipe}{did_you_mean(*nearest(str(recipe), near))}")
    try:
        tables = tomllib.loads(recipe.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{recipe} is not valid TOML: {error}") from None
    values: dict[str, Any] = {}
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{recipe}: {section!r} stands outside a section; {_suggestion(section)}")
        if not table and section not in Config.model_fields:
            (near,) = nearest(section, Config.model_fields, cutoff=0.0)
            raise UserError(f"{recipe}: unknown section [{section}]; the nearest valid section is [{near}]")
        for name, value in table.items():
            key = f"{section}.{name.replace('-', '_')}"
            if key not in KEYS:
                raise UserError(f"{recipe}: unknown key {section}.{name}; {_suggestion(key)}")
            if key in values:
                raise UserError(f"{recipe}: {key} is given twice, with a dash and with an underscore")
            values[key] = value
    return values


def _override_values(words: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    position = 0
    while position < len(words):
        word = words[position]
        if not word.startswith("--") or word == "--":
            raise UserError(f"unexpected word {word!r}: an override is --section.key value")
        flag, equals, value = word[2:].partition("=")
        if not equals:
            position += 1
            if position == len(words) or words[position].startswith("--"):
                raise UserError(f"{word} needs a value, as in {word} VALUE")
            value = words[position]
        values[full_key(flag)] = value
        position += 1
    return values


def full_key(flag: str) -> str:
    """`--run-ahead` without its dashes -> schedule.run_ahead. Raises UserError for an unknown or ambiguous key."""
    key = flag.replace("-", "_")
    if key in KEYS:
        return key
    matches = [known for known in KEYS if last_word(known) == key]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"--{flag} is ambiguous: write one of {', '.join('--' + _dashed(match) for match in matches)}")
    raise UserError(f"unknown key --{flag}; {_suggestion(key)}")


def is_known(flag: str) -> bool:
    """Whether `flag`, without its dashes, names a setting, or several.

    >>> is_known("run-ahead"), is_known("schedule.run-ahead"), is_known("runahead")
    (True, True, False)
    """
    key = flag.replace("-", "_")
    return key in KEYS or any(last_word(known) == key for known in KEYS)


def _suggestion(key: str) -> str:
    """By the whole key where one is much like it, else by its last word alone."""
    near = nearest(key, KEYS, cutoff=0.75)
    if not near:
        by_last_word = {last_word(known): known for known in reversed(KEYS)}
        near = [by_last_word[word] for word in nearest(key.rsplit(".", 1)[-1], by_last_word, cutoff=0.0)]
    return f"the nearest valid key is {near[0]}"


def _dashed(key: str) -> str:
    return key.replace("_", "-")


def _first_problem(error: ValidationError, origins: Mapping[str, Origin], recipe: Path | None) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"][:2])
    message = problem["msg"].removeprefix("Value error, ")
    where = {"command line": f"--{_dashed(key)}", "recipe": f"{recipe}: {key}"}.get(origins.get(key, ""), key)
    if "." not in key:
        return f"{_given_in(key, origins, recipe)}: {message}"
    return f"{where} = {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _given_in(section: str, origins: Mapping[str, Origin], recipe: Path | None) -> str:
    """Where settings that don't go together may stand; section: of all of them, or empty."""
    given = {origin for key, origin in origins.items() if key.startswith(section and f"{section}.")}
    places = [str(recipe)] if "recipe" in given else []
    return " and ".join(places + ["command line"] * ("command line" in given))


def choices(annotation: Any) -> str:
    """A short name of a setting's type, for help texts."""
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(choices(kind) for kind in get_args(annotation) if kind is not type(None))
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return {tuple: "words", dict: "table"}.get(get_origin(plain), getattr(plain, "__name__", str(plain)))
