"""What is asked of the planner: a model, GPUs, an algorithm and a workload, each with where it was said.

What nobody said is assumed, and the plan lists it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from headway import config as settings
from headway.config import Config, Resolved
from headway.plan.gpus import find_gpu
from headway.plan.lengths import Answers
from headway.plan.memory import Sleep
from headway.plan.models import find_model
from headway.plan.placement import Hardware, check_division
from headway.plan.proposal import Assumption, Request
from headway.plan.roofline import Efficiency
from headway.plan.shapes import ModelShape
from headway.plan.states import PRECISIONS, Algorithm, Models, Precision, models_of
from headway.planning.pace import efficiency, measured
from headway.simulate.workload import make_lengths
from headway.types import UserError, did_you_mean, nearest

LOOKED_AT = (
    *("run.seed", "model.path", "adapter.kind", "adapter.rank", "adapter.vector_size", "objective.kl_coefficient"),
    *("generate.lanes", "generate.max_new_tokens", "prepare.micro_batch_tokens", "adapter.tying"),
    *("schedule.batch_size", "schedule.group_size", "schedule.run_ahead"),
    *("simulate.lengths", "simulate.mean_length", "simulate.prompt_tokens"),
)
"""Settings that a plan looks at, of a recipe and of the command line."""

ASSUMED: Mapping[str, object] = {
    "schedule.batch_size": 256,
    "schedule.group_size": 8,
    "generate.max_new_tokens": 4096,
    "simulate.prompt_tokens": 512.0,
    "simulate.lengths": "lognormal:1",
}
"""Of a job that no recipe describes; lanes are as many as rollouts of a batch, and answers a quarter of the longest."""

MOST_GPUS, MOST_TOKENS = 100_000, 10_000_000

NUM_LENGTHS = 2000
"""Lengths of answers that stand for their distribution."""


@dataclass(frozen=True)
class Options:
    """Words of the command line as they were given; None for what was not."""

    gpu: str | None = None
    num_gpus: str | None = None
    algorithm: str | None = None
    kl: bool = False
    lora_rank: str | None = None
    nominal: str | None = None
    precision: str | None = None
    zero: str | None = None
    tensor: str | None = None
    pipeline: str | None = None
    expert: str | None = None
    engine_tensor: str | None = None
    usable: str | None = None
    price: str | None = None
    sleep: str | None = None
    prompt_tokens: str | None = None
    mean_tokens: str | None = None
    longest: str | None = None
    whole_logits: bool = False
    no_checkpointing: bool = False
    offload: bool = False
    efficiency: Mapping[str, str] | None = None


def request(
    options: Options,
    model: str | None,
    recipe: Path | None,
    overrides: Sequence[str] = (),
    calibrate: Sequence[Path] = (),
) -> Request:
    """calibrate: runs whose efficiencies stand for assumed ones. Raises UserError for whatever the user can mend."""
    words = [*([f"--model.path={model}"] if model else []), *overrides]
    resolved = settings.resolve(recipe, words)
    settings.only(resolved.origins, LOOKED_AT, "headway plan")
    path = resolved.config.model.path
    if path is None:
        raise UserError("which model? headway plan --model MODEL --gpu GPU --num-gpus N")
    if options.gpu is None:
        raise UserError("which GPU? headway plan --model MODEL --gpu GPU --num-gpus N")
    shape = find_model(path)
    hardware = Hardware(
        find_gpu(options.gpu),
        _whole("num-gpus", options.num_gpus, 1, most=MOST_GPUS),
        usable=_number("usable", options.usable, 0.9, most=1.0),
    )
    workload = Workload(resolved, options)
    reached = efficiency([measured(folder) for folder in calibrate], hardware.gpu) if calibrate else {}
    models = _models(options, resolved, shape)
    tensor, pipeline, expert = (
        _whole(name, value, 1)
        for name, value in (("tensor", options.tensor), ("pipeline", options.pipeline), ("expert", options.expert))
    )
    check_division(shape, hardware.num, tensor=tensor, pipeline=pipeline, expert=expert, what="train")
    return Request(
        shape=shape,
        hardware=hardware,
        algorithm=_algorithm(options.algorithm),
        models=models,
        lora_rank=None if options.lora_rank is None else int(options.lora_rank),
        answers=workload.answers(),
        lanes=workload.lanes,
        lanes_said=workload.lanes_said,
        batch=workload.batch,
        group=workload.group,
        run_ahead=workload.run_ahead,
        micro_batch_tokens=_micro_batch_tokens(workload, resolved),
        precision=_precision(options.precision),
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        zero=_whole("zero", options.zero, 3, least=0),
        engine_tensor=None if options.engine_tensor is None else _whole("engine-tensor", options.engine_tensor, 1),
        sleep=_sleep(options.sleep, models),
        checkpointing=not options.no_checkpointing,
        chunked_logits=not options.whole_logits,
        offload=options.offload,
        efficiency=_efficiency(options.efficiency or {}, reached),
        nominal=None if options.nominal is None else _number("nominal", options.nominal, 0.0),
        price=None if options.price is None else _number("price", options.price, 0.0),
        lengths=workload.lengths,
        mean=workload.mean,
        longest=workload.longest,
        seed=resolved.config.run.seed,
        assumptions=(*workload.assumptions, *_said(options, models, resolved), *_calibrated(calibrate)),
        model=path,
        recipe=recipe,
        settings=said(resolved),
    )


def _micro_batch_tokens(workload: Workload, resolved: Resolved) -> float | None:
    key = "prepare.micro_batch_tokens"
    said = resolved.origins[key] != "default"
    value = float(workload.micro_batch_tokens) if said else None
    workload.assumptions.append(Assumption(key, value or "chosen", resolved.origins[key] if said else "planned"))
    return value


def _calibrated(runs: Sequence[Path]) -> list[Assumption]:
    return [Assumption("efficiencies", "as measured", ", ".join(map(str, runs)))] if runs else []


def said(resolved: Resolved) -> dict[str, Any]:
    """Settings of the command line, by key."""
    return {key: resolved.config.setting(key) for key, origin in resolved.origins.items() if origin == "command line"}


def _said(options: Options, models: Models, resolved: Resolved) -> list[Assumption]:
    """Of the job itself, what else a reader of the plan has to know."""
    usual = {"algorithm": "grpo", "precision": "mixed", "sleep": _sleep(None, models), "zero": "3"}
    said = {
        "algorithm": options.algorithm,
        "precision": options.precision,
        "sleep": options.sleep,
        "zero": options.zero,
    }
    found = [Assumption(name, said[name] or usual[name], "command line" if said[name] else "assumed") for name in usual]
    if models.adapter_params is not None:
        origin = "command line" if options.lora_rank else resolved.origins["adapter.kind"]
        found.append(Assumption("adapter parameters", models.adapter_params, origin))
    return found


class Workload:
    """Sizes of batches and answers: those of the recipe and the command line, and assumed ones for the rest.

    assumed: by key; what it lacks is as a run would have it; origin: where all that is from; known: it goes
    before what a recipe says. lanes_said: whether somebody did.
    """

    def __init__(
        self,
        resolved: Resolved,
        options: Options,
        assumed: Mapping[str, object] = ASSUMED,
        origin: str = "assumed",
        *,
        known: bool = False,
    ) -> None:
        self._resolved, self._assumed, self._origin, self._known = resolved, assumed, origin, known
        self.assumptions: list[Assumption] = []
        self.batch = int(self._value("schedule.batch_size"))
        self.group = int(self._value("schedule.group_size"))
        self.lanes = int(self._value("generate.lanes", assumed.get("generate.lanes", self.batch)))
        self.lanes_said = resolved.origins["generate.lanes"] != "default"
        self.longest = self._tokens("longest", options.longest, "generate.max_new_tokens")
        self.prompt_tokens = self._tokens("prompt-tokens", options.prompt_tokens, "simulate.prompt_tokens")
        self.lengths = str(self._value("simulate.lengths"))
        self.mean = self._mean(options)
        self.micro_batch_tokens = resolved.config.prepare.micro_batch_tokens
        said = resolved.origins["schedule.run_ahead"] != "default"
        self.run_ahead = resolved.config.schedule.run_ahead if said else None
        if self.batch % self.group:
            raise UserError(f"a batch of {self.batch} rollouts is no multiple of groups of {self.group}")

    def _value(self, key: str, assumed: object = None) -> Any:
        origin = self._resolved.origins[key]
        if origin == "default" or (self._known and key in self._assumed and origin != "command line"):
            usual = self._assumed.get(key, self._resolved.config.setting(key))
            value, origin = (usual if assumed is None else assumed), self._origin
        else:
            value = self._resolved.config.setting(key)
        self.assumptions.append(Assumption(key, value, origin))
        return value

    def _mean(self, options: Options) -> float:
        """Lengths out of a run or a file have their own."""
        if self.lengths.startswith(("run:", "file:")):
            if options.mean_tokens is not None:
                raise UserError(f"--mean-tokens {options.mean_tokens} does nothing where lengths are {self.lengths}")
            return 1.0
        return self._tokens("mean-tokens", options.mean_tokens, "simulate.mean_length", self.longest / 4)

    def _tokens(self, option: str, word: str | None, key: str, assumed: object = None) -> float:
        """By an option of the command, where it was given, else by a setting."""
        if word is None:
            return float(self._value(key, assumed))
        value = float(_whole(option, word, 1, most=MOST_TOKENS))
        self.assumptions.append(Assumption(option, value, "command line"))
        return value

    def answers(self) -> Answers:
        length = make_lengths(self.lengths, self.mean, self._resolved.config.run.seed, num_members=self.group)
        return Answers.of(self.prompt_tokens, [length(identity) for identity in range(NUM_LENGTHS)], self.longest)


def _algorithm(word: str | None) -> Algorithm:
    known = get_args(Algorithm)
    if word is None:
        return "grpo"
    for algorithm in known:
        if word.lower() == algorithm:
            return algorithm
    raise UserError(f"--algorithm {word!r} is not known; it may be {' or '.join(known)}")


def _models(options: Options, resolved: Resolved, shape: ModelShape) -> Models:
    config = resolved.config
    kl = options.kl or bool(config.objective.kl_coefficient)
    return models_of(_algorithm(options.algorithm), kl=kl, adapter_params=_adapter_params(options, config, shape))


def _adapter_params(options: Options, config: Config, shape: ModelShape) -> int | None:
    if options.lora_rank is not None:
        return shape.adapter_params(_whole("lora-rank", options.lora_rank, 8))
    return adapter_params(config, shape)


def adapter_params(config: Config, shape: ModelShape) -> int | None:
    """Of the adapter that the configuration trains; None where it trains all weights."""
    if config.adapter.kind == "lora":
        return shape.adapter_params(config.adapter.rank or 8)
    if config.adapter.kind == "tinylora":
        num = shape.num_linear_layers
        return (config.adapter.vector_size or 64) * max(1, num - int(num * (config.adapter.tying or 0.0)))
    return None


def _sleep(word: str | None, models: Models) -> Sleep:
    """By default all that a sync brings back: of an adapter's base nothing is."""
    adapter = models.adapter_params is not None
    if word is None:
        return "cache" if adapter else "weights"
    for sleep in get_args(Sleep):
        if word == sleep:
            if sleep == "weights" and adapter:
                raise UserError("--sleep weights gives back what a sync brings, which is the adapter alone; take cache")
            return sleep
    raise UserError(f"--sleep {word!r} is not known; it may be {', '.join(get_args(Sleep))}")


def _precision(word: str | None) -> Precision:
    if word is None:
        return PRECISIONS["mixed"]
    if word not in PRECISIONS:
        raise UserError(
            f"--precision {word!r} is not known{did_you_mean(*nearest(word, PRECISIONS))}; it may be "
            f"{', '.join(PRECISIONS)}"
        )
    return PRECISIONS[word]


def _efficiency(words: Mapping[str, str], reached: Mapping[str, float]) -> Efficiency:
    """By the names of `Efficiency`, shares up to 1 and seconds. reached: instead of usual values, unless words say
    otherwise.
    """
    usual = Efficiency()
    values = dict(reached)
    for name, word in words.items():
        seconds = name == "step_overhead_s"
        option = "step-overhead" if seconds else f"{name}-efficiency"
        values[name] = _number(option, word, 0.0, most=math.inf if seconds else 1.0, zero=seconds)
    return Efficiency(**{**vars(usual), **values})


def _whole(option: str, word: str | None, default: int, *, least: int = 1, most: int | None = None) -> int:
    if word is None:
        return default
    if not (word.strip().isdecimal() and len(word) < 16 and least <= int(word) and (most is None or int(word) <= most)):
        bound = f"at least {least}" + (f" and at most {most:,}" if most else "")
        raise UserError(f"--{option} = {word!r}: a whole number, {bound}")
    return int(word)


def _number(option: str, word: str | None, default: float, *, most: float = math.inf, zero: bool = False) -> float:
    if word is None:
        return default
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not (0 <= number <= most and math.isfinite(number)) or (number == 0 and not zero):
        bound = "" if most == math.inf else f" and at most {most:g}"
        least = "0 or more" if zero else "above 0"
        raise UserError(f"--{option} = {word!r}: a number {least}{bound}")
    return number
