"""What is asked of the probe: a model or a run, how answers are sampled, and which things an engine does otherwise.

It knows no torch, so that what is wrong is said at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway import config as settings
from headway.checkpoint import Checkpoint, newest_checkpoint
from headway.config import Config, Origin, Resolved
from headway.reports.folder import CHECKPOINTS
from headway.types import UserError, did_you_mean, nearest

BATCH, BATCH_OF_SMALL = 16, 128
"""Answers that are sampled together, unless a number is asked for: of a model, and of one of few parameters."""

SMALL_PARAMETERS = 20_000_000

NEW_TOKENS = 32
"""Tokens of an answer at most, unless more are asked for."""

KEY_OF = {
    "model": "model.path",
    "prompts": "data.source",
    "batch": "generate.lanes",
    "new-tokens": "generate.max_new_tokens",
    "engine-dtype": "generate.dtype",
}
"""The command's short options, and the keys of a recipe that they stand for."""

LOOKED_AT = (
    *("run.seed", "run.threads", "model.path", "model.device", "model.parity", "data", "train"),
    *("generate.lanes", "generate.max_new_tokens", "generate.dtype", "generate.temperature", "generate.end_tokens"),
    *("generate.stop", "generate.top_k", "generate.top_p", "generate.min_p", "generate.repetition_penalty"),
)

HEAD_DTYPES = ("float32", "bfloat16")
QUANTIZED = ("int8", "int4", "fp8")

ALWAYS = ("kernels", "batch")
"""Sources that every engine has, unless parity is bitwise."""


@dataclass(frozen=True)
class Setting:
    """What an engine may do otherwise than the trainer, each at the value that is tried.

    given: the sources that the user's own engine has; the others are tried at a usual value. version_lag: in train
    steps, each of `updates` optimizer steps.
    """

    given: frozenset[str]
    dtype: str = "bfloat16"
    head: str = "bfloat16"
    quantize: str = "int8"
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    version_lag: int = 1
    updates: int = 1

    @property
    def truncation(self) -> str:
        values = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        usual = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return ", ".join(f"{name} {value:g}" for name, value in values.items() if value != usual[name])


@dataclass(frozen=True)
class Request:
    """config: of the run, or of the command line alone; checkpoint: whose weights are meant, None for the model's own.

    run: the folder it is about. num_answers: to sample, None for as many as go quickly; of `config` max_new_tokens is
    their length.
    """

    config: Config
    setting: Setting
    run: Path | None
    checkpoint: Checkpoint | None
    num_answers: int | None

    @property
    def path(self) -> str:
        assert self.config.model.path is not None
        return self.config.model.path


@dataclass(frozen=True)
class Options:
    """Words of the command line as they were given; None for what was not."""

    run: Path | None = None
    keys: Mapping[str, str | None] | None = None
    head_dtype: str | None = None
    quantize: str | None = None
    version_lag: str | None = None


def request(options: Options, overrides: Sequence[str] = ()) -> Request:
    """options.keys: by the names of `KEY_OF`. Raises UserError for whatever the user can mend."""
    keys = {name: value for name, value in (options.keys or {}).items() if value is not None}
    if options.run and not (options.run / "config.toml").is_file():
        raise UserError(f"there is no run in {options.run}: it holds no config.toml")
    if options.run and "model" in keys:
        raise UserError(f"--run {options.run} brings its own model; leave --model out")
    resolved = _resolved(options.run, keys, overrides)
    config = _shortened(resolved)
    if config.model.path is None:
        raise UserError("which model? headway mismatch --model MODEL, or --run RUN for the one of a run")
    if config.generate.temperature == 0:
        raise UserError(
            "temperature 0 leaves nothing to compare: a greedy token has log-prob 0 on both sides; give one above 0"
        )
    num_answers = config.generate.lanes if resolved.origins["generate.lanes"] == "command line" else None
    return Request(config, _setting(options, resolved), options.run, _checkpoint(options.run), num_answers)


def _resolved(run: Path | None, keys: Mapping[str, str], overrides: Sequence[str]) -> Resolved:
    """An error names an option as it was given, not the key that it stands for."""
    words = [f"--{KEY_OF[name]}={value}" for name, value in keys.items()]
    try:
        resolved = settings.resolve(run / "config.toml" if run else None, [*words, *overrides])
        settings.only(resolved.origins, LOOKED_AT, "headway mismatch")
    except UserError as error:
        text = str(error)
        for name in keys:
            text = text.replace(f"--{KEY_OF[name].replace('_', '-')} ", f"--{name} ")
        raise UserError(text) from None
    return resolved


def _shortened(resolved: Resolved) -> Config:
    """The first tokens of answers tell enough, unless more were asked for."""
    generate = resolved.config.generate
    if resolved.origins["generate.max_new_tokens"] == "command line":
        return resolved.config
    fewer = generate.model_copy(update={"max_new_tokens": min(generate.max_new_tokens, NEW_TOKENS)})
    return resolved.config.model_copy(update={"generate": fewer})


def _checkpoint(run: Path | None) -> Checkpoint | None:
    """The newest one of a run that has written any."""
    if run is None or not (run / CHECKPOINTS).is_dir():
        return None
    return newest_checkpoint(run / CHECKPOINTS)


def _setting(options: Options, resolved: Resolved) -> Setting:
    config = resolved.config
    head = _one_of("head-dtype", options.head_dtype, HEAD_DTYPES)
    quantize = _one_of("quantize", options.quantize, QUANTIZED)
    lag = _version_lag(options, config)
    has = {
        "kernels": config.model.parity == "close",
        "batch": config.model.parity == "close",
        "products": config.train.compute_dtype != "float32",
        "dtype": config.generate.dtype != "float32",
        "head": head == "bfloat16",
        "quantize": quantize is not None,
        "truncation": config.generate.truncates and _asked_to_truncate(resolved.origins),
        "lag": lag > 0,
        "stale": _goes_on_in_flight(options.run, config),
    }
    tried = config.generate if config.generate.truncates else settings.Generate(top_p=0.95)
    return Setting(
        given=frozenset(name for name, is_given in has.items() if is_given),
        quantize=quantize or "int8",
        top_k=tried.top_k,
        top_p=tried.top_p,
        min_p=tried.min_p,
        version_lag=lag or 1,
        updates=config.train.optimizer_steps * config.train.passes,
    )


def _asked_to_truncate(origins: Mapping[str, Origin]) -> bool:
    """By the command line: of a run's own truncation the embedded engine records the kept set."""
    return any(origins[f"generate.{name}"] == "command line" for name in ("top_k", "top_p", "min_p"))


def _goes_on_in_flight(run: Path | None, config: Config) -> bool:
    """Whether rollouts of the run meet new weights with their cache kept."""
    schedule = config.schedule
    return run is not None and schedule.run_ahead > 0 and schedule.overlap and schedule.in_flight in (None, "keep")


def _version_lag(options: Options, config: Config) -> int:
    if options.version_lag is None:
        return math.ceil(config.schedule.run_ahead) if options.run else 0
    if not options.version_lag.isdecimal():
        raise UserError(f"--version-lag = {options.version_lag!r}: a whole number of train steps, 0 or more")
    return int(options.version_lag)


def _one_of(name: str, value: str | None, choices: Sequence[str]) -> str | None:
    if value is not None and value not in choices:
        raise UserError(f"--{name} = {value!r}: none of {', '.join(choices)}{did_you_mean(*nearest(value, choices))}")
    return value
