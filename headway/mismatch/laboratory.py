"""Engines and trainers over one policy: answers are sampled by the one and scored by the other."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from headway.config import Config, Data
from headway.data import load_items
from headway.generate.episode import Sampling, rollout_of
from headway.generate.lane import Decode
from headway.generate.torch_engine import TorchEngine
from headway.mismatch.policies import own_copy, with_fixed_order
from headway.mismatch.setting import BATCH, BATCH_OF_SMALL, SMALL_PARAMETERS, Request, Setting
from headway.mismatch.states import States, first_in_engine, first_packed, watch
from headway.models.cores import FixedCores
from headway.models.distribution import Shape
from headway.models.policy import Policy, load_policy, load_tokenizer, with_parity
from headway.prepare.pack import Packed, Packing, pack
from headway.render import end_ids, render_prompts
from headway.stages import Sample, SampleRequest
from headway.train.local import LocalTrainer
from headway.types import Prompt, Rollout, UserError

MEMBERS = 4
"""Answers to each prompt, where there are enough prompts."""

ALONE = 0.25
"""Of the answers, what share is sampled again one at a time, which is slow."""

QUESTIONS = (
    "Tell me a story about a fox.",
    "Explain why the sky is blue.",
    "How do I bake a loaf of bread?",
    "What should I see in Rome?",
    "Write a poem about the sea.",
    "Who was Ada Lovelace?",
    "Plan a small vegetable garden.",
    "Why do cats purr?",
)


Run = Callable[[TorchEngine], Awaitable[list[Sample]]]
"""What is done with an engine while it is open."""


@dataclass
class Sampled:
    """What an engine has sampled, and the hidden states of the first rollout as it computed them."""

    rollouts: list[Rollout]
    states: States

    @property
    def logprobs(self) -> list[Sequence[float]]:
        return [rollout.logprobs for rollout in self.rollouts]


@dataclass
class Scored:
    """Log-probs by rollout, as a trainer has them, and the hidden states of the first rollout."""

    logprobs: list[torch.Tensor]
    states: States


@dataclass(frozen=True)
class Material:
    """What is probed, loaded: the trainer's policy, and prompts. checkpoint: of the run that they come from."""

    config: Config
    setting: Setting
    policy: Policy
    decode: Decode
    sampling: Sampling
    prompts: Sequence[Prompt]
    num_answers: int
    checkpoint: Path | None = None


def load(request: Request) -> Material:
    """Raises UserError for a model, a run or prompts that can't be used."""
    config = request.config
    torch.set_num_threads(config.run.threads or os.cpu_count() or 1)
    tokenizer = load_tokenizer(request.path)
    policy = load_policy(request.path, config.model.device, config.adapter, config.run.seed)
    checkpoint = request.checkpoint.folder if request.checkpoint else None
    if checkpoint:
        LocalTrainer(policy, config.train, shape=Shape(), num_steps=1).load(checkpoint)
    generate = config.generate
    num_answers = request.num_answers or _num_answers(policy)
    can_end = generate.end_tokens is not None or tokenizer.eos_token_id is not None
    return Material(
        config=config,
        setting=request.setting,
        policy=policy,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        sampling=Sampling(
            max_new_tokens=generate.max_new_tokens,
            temperature=generate.temperature,
            end_ids=end_ids(tokenizer, generate.end_tokens) if can_end else frozenset(),
            stop=generate.stop,
            repetition_penalty=generate.repetition_penalty,
        ),
        prompts=_prompts(config, tokenizer, policy.context_tokens, max(1, num_answers // MEMBERS)),
        num_answers=num_answers,
        checkpoint=checkpoint,
    )


def _num_answers(policy: Policy) -> int:
    num_parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    return BATCH_OF_SMALL if num_parameters < SMALL_PARAMETERS else BATCH


def _prompts(config: Config, tokenizer: Any, context_tokens: int, wanted: int) -> list[Prompt]:
    """At most so many: of the configuration, or a few questions, or sums where it can't spell those."""

    def rendered(items: Sequence[Prompt], chat: bool) -> list[Prompt]:
        return render_prompts(
            items[:wanted],
            tokenizer,
            chat=chat,
            system=config.data.system if chat else None,
            context_tokens=context_tokens,
            max_new_tokens=config.generate.max_new_tokens,
        )

    if config.data.source is not None:
        return rendered(load_items(_only_so_many(config.data, wanted), config.run.seed), config.data.chat)
    try:
        questions = [Prompt(f"question {number}", text) for number, text in enumerate(QUESTIONS)]
        return rendered(questions, bool(tokenizer.chat_template))
    except UserError:
        sums = Data(source="addition", size=wanted)
        return rendered(load_items(sums, config.run.seed), False)


def _only_so_many(data: Data, wanted: int) -> Data:
    """A generator makes no more prompts than are asked for; of a file the first are taken."""
    is_file = data.source is not None and data.source.endswith(".jsonl")
    return data if is_file else data.model_copy(update={"size": wanted})


class Laboratory:
    """Engines and trainers over one policy, made as they are needed."""

    def __init__(self, material: Material) -> None:
        self._material, self.setting = material, material.setting
        self._cores = FixedCores(torch.get_num_threads())
        self.fixed = with_fixed_order(material.policy)
        self.close = with_parity(material.policy, "close")
        self.num_prompts, self.num_answers = len(material.prompts), material.num_answers

    # ---- sampling

    def requests(self, *, truncated: bool = False) -> list[SampleRequest]:
        """Those of a prompt are neighbours."""
        config, prompts, sampling = self._material.config, self._material.prompts, self._material.sampling
        if truncated:
            setting = self.setting
            sampling = replace(sampling, top_k=setting.top_k, top_p=setting.top_p, min_p=setting.min_p)
        members = -(-self.num_answers // len(prompts))
        named = [(prompt, member) for prompt in prompts for member in range(members)][: self.num_answers]
        return [sampling.request(prompt, (config.run.seed, prompt.uid, member)) for prompt, member in named]

    @property
    def truncates(self) -> bool:
        """Whether the answers that the user has asked for are drawn among some of the vocabulary only."""
        return self._material.config.generate.truncates

    def sample(self, policy: Policy, *, truncated: bool = False) -> Sampled:
        """All answers, together."""
        asked = self.requests(truncated=truncated)
        return self._run(policy, asked, len(asked), self._material.decode, _gathered(asked))

    def sample_alone(self) -> Sampled:
        """The first answers, one at a time."""
        asked = self.requests()[: max(1, round(ALONE * self.num_answers))]
        return self._run(own_copy(self.close), asked, 1, self._material.decode, _gathered(asked))

    def sample_across_an_update(self, policy: Policy, update: Policy, num_before: int) -> Sampled:
        """The engine is handed the update's weights when the first rollout has `num_before` tokens.

        A twin of that rollout ends there, and `_HandOver` notices.
        """
        asked = self.requests()
        twin = replace(asked[0], max_new_tokens=num_before)
        asked = asked[: self.num_measured]
        hand_over = _HandOver(update.weights(), num_before)

        async def run(engine: TorchEngine) -> list[Sample]:
            hand_over.begin(engine)
            answers = await asyncio.gather(*(engine.sample(one) for one in (*asked, twin)))
            return answers[:-1]

        return self._run(policy, asked, len(asked) + 1, hand_over, run)

    def _run(self, policy: Policy, asked: Sequence[SampleRequest], lanes: int, decode: Decode, run: Run) -> Sampled:
        async def open_and_run() -> list[Sample]:
            engine = TorchEngine(policy, lanes=lanes, decode=decode, cores=self._cores)
            try:
                return await run(engine)
            finally:
                await engine.close()

        with watch(policy, first_in_engine(len(asked[0].prompt.tokens))) as states:
            samples = asyncio.run(open_and_run())
        rollouts = [
            rollout_of(one.prompt, 0, number, sample)
            for number, (one, sample) in enumerate(zip(asked, samples, strict=True))
        ]
        return Sampled(rollouts, states)

    # ---- the trainer's word

    def score(
        self, policy: Policy, rollouts: Sequence[Rollout], *, with_kept: bool = False, as_configured: bool = False
    ) -> Scored:
        """with_kept: under the kept set of each token where one was recorded. as_configured: the trainer's matrix
        products have the dtype of its settings; they are in float32 otherwise.
        """
        if not with_kept:
            rollouts = [replace(rollout, kept=None) for rollout in rollouts]
        trainer = self._trainer(policy, as_configured)
        packs = self._packs(rollouts)
        first = rollouts[0]
        num_rows = len(first.prompt.tokens) + len(first.tokens) - 1
        logp_M = torch.zeros(sum(len(rollout.tokens) for rollout in rollouts))
        with watch(policy, first_packed(num_rows)) as states:
            for one in packs:
                logp_M[one.token_N] = trainer.forward(one.rows).logp_N
        return Scored(list(logp_M.split([len(rollout.tokens) for rollout in rollouts])), states)

    def _packs(self, rollouts: Sequence[Rollout]) -> list[Packed]:
        uids = list(dict.fromkeys(rollout.prompt.uid for rollout in rollouts))
        groups = [uids.index(rollout.prompt.uid) for rollout in rollouts]
        packing = Packing(self._material.config.prepare.micro_batch_tokens)
        (packs,) = pack(rollouts, groups, range(len(rollouts)), packing)
        return packs

    def _trainer(self, policy: Policy, as_configured: bool) -> LocalTrainer:
        update = {"warmup_steps": 0, "learning_rate_schedule": "constant"}
        update |= {} if as_configured else {"compute_dtype": "float32"}
        settings = self._material.config.train.model_copy(update=update)
        sampling = self._material.sampling
        shape = Shape(sampling.temperature, sampling.repetition_penalty)
        return LocalTrainer(policy, settings, shape=shape, num_steps=1, cores=self._cores)

    # ---- some train steps later

    @property
    def num_measured(self) -> int:
        """Of the rollouts, where the others are what the train steps learn from: in a run they are other ones, too."""
        return max(1, self.num_answers // 2)

    def measured(self, sampled: Sampled) -> Sampled:
        return Sampled(sampled.rollouts[: self.num_measured], sampled.states)

    @cached_property
    def control(self) -> Sampled:
        """By an engine that does all as the trainer does it."""
        return self.sample(own_copy(self.fixed))

    @cached_property
    def together(self) -> Sampled:
        """By an engine whose sums have no fixed order."""
        return self.sample(own_copy(self.close))

    @cached_property
    def truncated(self) -> Sampled:
        return self.sample(own_copy(self.fixed), truncated=True)

    @cached_property
    def trained(self) -> Policy:
        """The policy after `version_lag` train steps, under rewards drawn by lot: half of the answers won."""
        policy = own_copy(self.close)
        trainer = self._trainer(policy, True)
        if self._material.checkpoint:  # the moments of its optimizer
            trainer.load(self._material.checkpoint)
        rollouts = self.control.rollouts[self.num_measured :] or self.control.rollouts
        lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])
        advantage_M = (1.0 - 2.0 * (torch.arange(len(rollouts)) % 2)).repeat_interleave(lengths)
        for _ in range(self.setting.version_lag * self.setting.updates):
            for one in self._packs(rollouts):
                advantage_N = advantage_M[one.token_N].to(policy.device)
                trainer.forward_backward(
                    one.rows, lambda logp_N, advantage_N=advantage_N: -(advantage_N * logp_N).sum() / len(advantage_M)
                )
            trainer.optim_step()
        for parameter in policy.model.parameters():
            parameter.grad = None
        return with_fixed_order(policy)


class _HandOver:
    """An engine's `decode`, which is called on its own thread, between two tokens, with a rollout that has ended.

    At the first one of `num_tokens` it holds the engine up until new weights are on their way, so that they always come
    at the same token.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        self._weights, self._num_tokens = weights, num_tokens
        self._done, self._asked = False, threading.Event()

    def begin(self, engine: TorchEngine) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()

    def __call__(self, ids: Sequence[int]) -> str:
        if len(ids) >= self._num_tokens and not self._done:
            self._done = True
            asyncio.run_coroutine_threadsafe(self._load(), self._loop)
            self._asked.wait()
        return ""

    async def _load(self) -> None:
        loading = asyncio.ensure_future(self._engine.load(self._weights, 1))
        await asyncio.sleep(0)  # the engine has been asked then
        self._asked.set()
        await loading


def _gathered(asked: Sequence[SampleRequest]) -> Run:
    async def run(engine: TorchEngine) -> list[Sample]:
        return await asyncio.gather(*(engine.sample(one) for one in asked))

    return run
