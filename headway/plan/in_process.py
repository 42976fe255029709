"""What one process holds that generates and trains at the same time, as Headway runs a recipe on one machine.

Weights and optimizer are in float32; the engine has weights and a cache of its own; no activation is computed again.
It is that of a CPU, where memory is taken when it is first written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.plan.activations import LOGIT_COPIES, logits_bytes, of_layer, of_model
from headway.plan.lengths import Answers
from headway.plan.memory import Line, Phase, Pool
from headway.plan.shapes import ModelShape
from headway.plan.states import Models

CACHE_BLOCK = 32
"""Tokens of a block of the engine's cache (`models.attention.BLOCK`)."""

PREFILL_TOKENS = 512
"""Of prompts in one pass of the engine (`generate.torch_engine.PREFILL_TOKENS`)."""

SLACK = 0.2
"""Of what comes and goes with every micro-batch, beside it: the C library's allocator keeps it in pieces that do not
all fit what comes next. A fifth was seen with SmolLM2, in several runs.
"""

CPU_KERNELS = 130e6
"""What oneDNN and torch each keep for the last 128 shapes of a product, about half a megabyte apiece. Beside it engine
and trainer each keep the scratch space of their widest product, which is the LM head's.
"""

OF_THE_PROGRAM = (50e6, 150e6)
"""Tokenizer, prompts, rollouts under way, and whatever libraries import when they are first used."""


@dataclass(frozen=True)
class InProcessJob:
    """A recipe's run in one process.

    group: rollouts that share a prompt; engine_bytes: of a number of the engine's weights and cache; packs: the engine
    lays out a copy of its weights, as it does in float32; half_products: the trainer's products are in bf16.
    cache_bytes: the budget of the engine's cache, None for a quarter of `memory`, the bytes that are free.
    """

    shape: ModelShape
    models: Models
    answers: Answers
    lanes: int
    batch: int
    group: int
    micro_batch_tokens: float
    memory: float
    engine_bytes: float = 4.0
    packs: bool = True
    cache_bytes: float | None = None
    half_products: bool = False

    @property
    def trained_params(self) -> float:
        adapter = self.models.adapter_params
        return self.shape.num_params if adapter is None else adapter

    @property
    def pass_tokens(self) -> float:
        """Of the largest micro-batch: no more than a batch has, and a sequence is never cut."""
        of_batch = self.batch * self.answers.longest + self.batch / self.group * self.answers.prompt
        longest = self.answers.prompt + self.answers.longest
        return max(min(self.micro_batch_tokens, of_batch), longest)


def in_process(job: InProcessJob) -> Pool:
    """While it loads, and while it generates and trains, when everything is there at once."""
    weights = 4.0 * job.shape.num_params
    loading = Phase(
        "load",
        (
            _exact("weights", weights, "float32"),
            Line("weights as they are read", 0.0, weights, "in the file's pages, until they are copied"),
        ),
    )
    return Pool("this process", 1, (loading, Phase("generate and train", tuple(_at_work(job)))))


def _at_work(job: InProcessJob) -> list[Line]:
    params, trained = job.shape.num_params, job.trained_params
    lines = [_exact("weights", 4.0 * params, "float32" + (", frozen" if trained < params else ""))]
    if job.models.adapter_params is not None:
        lines.append(_exact("adapter", 4.0 * trained, f"{trained:,.0f} trained numbers"))
    lines += [
        _exact("gradients", 4.0 * trained, "float32"),
        _exact("Adam's moments", 8.0 * trained, "two, in float32"),
    ]
    if job.models.holds_reference:
        lines.append(_exact("reference", 4.0 * params, "a frozen copy, for the KL term"))
    if job.models.critic:
        lines.append(_exact("critic", 16.0 * job.shape.as_critic().num_params, "weights, gradients and moments"))
    lines.append(_exact("engine's weights", job.engine_bytes * params, f"{job.engine_bytes:g} bytes a parameter"))
    if job.packs:
        packed = 4.0 * job.shape.num_matrix_params
        lines.append(_exact("engine's weights, laid out", packed, "a copy that the processor reads fastest"))
    moving = [*_passing(job), _engine_pass(job)]
    slack = SLACK * sum(line.expected for line in (*moving, *_of_name(lines, "gradients")))
    lines += [_cache(job), *moving, Line("fragmentation", 0.0, slack, f"{SLACK:.0%} of what comes and goes")]
    if job.packs:
        scratch = CPU_KERNELS + 2 * 4.0 * job.shape.embedding_params
        lines.append(Line("products", 0.0, scratch, "kernels for 128 shapes, and room to lay out the widest weights"))
    return [*lines, Line("the program", *OF_THE_PROGRAM, "tokenizer, prompts, rollouts under way")]


def _of_name(lines: Sequence[Line], name: str) -> list[Line]:
    return [line for line in lines if line.name == name]


def _passing(job: InProcessJob) -> list[Line]:
    """What is kept of a micro-batch's forward pass."""
    tokens = job.pass_tokens
    per_token = of_model(job.shape, 2 if job.half_products else 4, checkpointing=False)
    logits = logits_bytes(tokens, job.shape.vocab, chunked=True)
    lines = [
        Line("activations", tokens * per_token.floor, tokens * per_token.expected, f"{tokens:,.0f} tokens, all layers"),
        Line("logits", logits.floor, logits.expected, f"float32, of {tokens:,.0f} tokens x {job.shape.vocab:,} ids"),
    ]
    if job.half_products:
        cast = 2.0 * job.shape.num_matrix_params
        lines.append(_exact("weights in bf16", cast, "for the products of a pass"))
    return lines


def _engine_pass(job: InProcessJob) -> Line:
    shape, rows = job.shape, job.lanes + PREFILL_TOKENS
    logits = 4.0 * job.lanes * shape.vocab
    one_layer = max(of_layer(layer, shape.hidden, job.engine_bytes).expected for layer, _ in shape.kinds)
    return Line("engine's pass", logits, LOGIT_COPIES * logits + rows * one_layer, "logits of all lanes, and one layer")


def _cache(job: InProcessJob) -> Line:
    """Whole blocks: of each rollout in flight its own, of each prompt those that its group shares, and of prompts that
    nobody answers any more as many as there are lanes.
    """
    answers, lanes = job.answers, job.lanes
    per_block = CACHE_BLOCK * job.shape.kv_bytes_per_token(job.engine_bytes)
    most = job.cache_bytes if job.cache_bytes is not None else job.memory / 4
    prompts = math.ceil(lanes / job.group)
    floor = per_block * (lanes * _blocks(answers.mean) + prompts * _blocks(answers.prompt))
    expected = per_block * (lanes * _blocks(answers.longest) + (prompts + lanes) * _blocks(answers.prompt))
    why = f"blocks of {CACHE_BLOCK} tokens of {lanes} rollouts, their prompts, and prompts that were answered"
    return Line("keys and values", min(floor, most), min(expected, most), why)


def _blocks(num_tokens: float) -> int:
    return math.ceil(num_tokens / CACHE_BLOCK)


def _exact(name: str, num_bytes: float, why: str) -> Line:
    return Line(name, num_bytes, num_bytes, why)
