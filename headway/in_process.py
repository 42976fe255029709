"""The five verbs of a real run in one process: an engine on one thread, a trainer on another, scoring between."""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from headway.batch import Batch
from headway.checkpoint import Checkpoint, KeptRollout, write_checkpoint
from headway.config import Config
from headway.data import PromptSource, load_items, split_items
from headway.generate.canary import Canaries, CanarySettings
from headway.generate.episode import Episodes, Sampling, generated
from headway.generate.torch_engine import TorchEngine, pool_for
from headway.models.cores import CorePool, Cores, FixedCores, SharedCores
from headway.models.distribution import Shape
from headway.models.policy import Policy, device_name, in_dtype, load_policy, load_tokenizer, save_policy
from headway.models.value import ValueModel
from headway.models.weights import fingerprint
from headway.objectives.parts import Objective
from headway.prepare.canary import canary_metrics
from headway.prepare.prepare import prepare_batch
from headway.render import end_ids, render_prompts
from headway.reports.folder import RunFolder
from headway.score import make_scorer
from headway.stages import Force, Generated, Restored, Scored, Scorer, Ticket, Trained
from headway.sync.memory import MemorySync
from headway.train.critic import LocalCritic
from headway.train.local import LocalTrainer
from headway.train.step import StepResult, train_step
from headway.types import Prompt, Rollout, ScoredRollout, UserError
from headway.work import forget_peak, peak_resident_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Parts:
    """Everything a run is made of, loaded and checked, before anything is written or started.

    critic: None where the objective needs none. reference_hash: of the frozen copy of the base that the objective
    compares with; None where there is none, or where it is the trainer's policy without what its adapter has learned.
    version, restored: where the run begins, and the rollouts that the checkpoint holds; bound_from: the first group, in
    order of start, that started under the rules of this run. memory_before: bytes that the process held at most
    before it loaded anything.
    """

    config: Config
    engine_policy: Policy
    engine_cores: Cores
    trainer_policy: Policy
    trainer: LocalTrainer
    critic: LocalCritic | None
    reference_hash: str | None
    trainer_cores: Cores
    tokenizer: Any
    source: PromptSource
    held_out: list[Prompt]
    scorer: Scorer
    objective: Objective
    sampling: Sampling
    evaluation: Sampling
    version: int
    restored: list[Restored]
    bound_from: int
    memory_before: int

    @asynccontextmanager
    async def stages(self, folder: RunFolder) -> AsyncIterator[InProcessStages]:
        """The stages, with their threads and processes; all of them have ended when the context is left."""
        stages = InProcessStages(self, folder)
        try:
            await stages.catch_up()
            yield stages
        finally:
            await stages.close()


def compose(config: Config, objective: Objective, checkpoint: Checkpoint | None, say: Callable[[str], object]) -> Parts:
    """Load and check all parts of a run. `say` is told what takes its time.

    Raises UserError for whatever the user can mend.
    """
    if config.model.path is None:
        raise UserError("model.path is not set: give a local Hugging Face folder, or package:NAME, or a hub id")
    forget_peak()
    memory_before = peak_resident_bytes()
    say("reading the prompts")
    split = split_items(load_items(config.data, config.run.seed), config.data, config.evaluate, config.run.seed)
    if split.num_left_out:
        say(f"{split.num_left_out} prompts are left out of training: their text is that of a held-out one")
    say("loading the model")
    tokenizer = load_tokenizer(config.model.path)
    torch.set_num_threads(_num_threads(config))  # parity is tried with as many as will compute
    trainer_policy = load_policy(
        config.model.path, config.model.device, config.adapter, config.run.seed, config.model.parity
    )
    sampling, evaluation = _samplings(config, tokenizer)
    render = partial(
        render_prompts,
        tokenizer=tokenizer,
        chat=config.data.chat,
        system=config.data.system,
        context_tokens=trainer_policy.context_tokens,
    )
    training = render(split.training, max_new_tokens=sampling.max_new_tokens)
    held_out = render(split.held_out, max_new_tokens=evaluation.max_new_tokens)
    source = PromptSource(training, seed=config.run.seed, shuffle=config.data.shuffle, epochs=config.data.epochs)
    engine_cores, trainer_cores = _claims(config)
    reference = _frozen_reference(objective, trainer_policy)
    reference_hash = fingerprint(reference.weights()) if reference else None
    trainer = _trainer(config, trainer_policy, reference, trainer_cores)
    critic = _critic(config, objective, trainer_cores)
    restored: list[Restored] = []
    if checkpoint:
        _check_resume(source, config, reference_hash, checkpoint)
        restored = [_restored(kept) for kept in checkpoint.rollouts(source.at)]
        trainer.load(checkpoint.folder)
        if critic:
            critic.load(checkpoint.folder)
    engine_policy = _engine_policy(config, trainer_policy)
    pool = pool_for(engine_policy, config.generate.lanes, config.generate.cache_bytes)
    for prompts, how in ((training, sampling), (held_out, evaluation)):
        longest = max(prompts, key=lambda prompt: len(prompt.tokens), default=None)
        if longest:
            pool.check_room(longest.uid, len(longest.tokens), how.max_new_tokens)
    return Parts(
        config=config,
        engine_policy=engine_policy,
        engine_cores=engine_cores,
        trainer_policy=trainer_policy,
        trainer=trainer,
        critic=critic,
        reference_hash=reference_hash,
        trainer_cores=trainer_cores,
        tokenizer=tokenizer,
        source=source,
        held_out=held_out,
        scorer=make_scorer(config.score, training + held_out),  # last: it starts processes
        objective=objective,
        sampling=sampling,
        evaluation=evaluation,
        version=checkpoint.progress["version"] if checkpoint else 0,
        restored=restored,
        bound_from=_bound_from(config, checkpoint.progress) if checkpoint else 0,
        memory_before=memory_before,
    )


def _engine_policy(config: Config, trainer_policy: Policy) -> Policy:
    """The same base, adapter and frame, in storage of its own, and in the engine's dtype."""
    policy = copy.deepcopy(trainer_policy)
    return policy if config.generate.dtype == "float32" else in_dtype(policy, torch.bfloat16)


def _samplings(config: Config, tokenizer: Any) -> tuple[Sampling, Sampling]:
    """How training rollouts are sampled, and how held-out prompts are answered."""
    _check_stop_strings(config.generate.stop, tokenizer)
    sampling = Sampling(
        max_new_tokens=config.generate.max_new_tokens,
        temperature=config.generate.temperature,
        end_ids=end_ids(tokenizer, config.generate.end_tokens),
        stop=config.generate.stop,
        top_k=config.generate.top_k,
        top_p=config.generate.top_p,
        min_p=config.generate.min_p,
        repetition_penalty=config.generate.repetition_penalty,
        force=_force(config, tokenizer),
    )
    evaluation_tokens = config.evaluate.max_new_tokens or sampling.max_new_tokens
    return sampling, replace(sampling, max_new_tokens=evaluation_tokens, temperature=0.0)


def _force(config: Config, tokenizer: Any) -> Force | None:
    """The phrase that is put into long answers: of characters that are known, and with room for one token after it."""
    settings = config.generate
    if settings.force_after is None:
        return None
    tokens = tuple(tokenizer.encode(settings.force_phrase, add_special_tokens=False))
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens:
        raise UserError(
            f"generate.force_phrase = {settings.force_phrase!r} holds characters that the model's tokenizer doesn't "
            "know: give a phrase that it can spell"
        )
    needed = settings.force_after + len(tokens) + 1
    if needed > settings.max_new_tokens:
        raise UserError(
            f"generate.force_after {settings.force_after} and the {len(tokens)} tokens of generate.force_phrase leave "
            f"no room for an answer in generate.max_new_tokens {settings.max_new_tokens}: give at least {needed}"
        )
    return Force(settings.force_after, tokens, settings.force_unless)


def _check_stop_strings(stop: Sequence[str], tokenizer: Any) -> None:
    """Answers are decoded without special tokens, so a stop string that spells one would never be met."""
    for word in stop:
        special = [token for token in tokenizer.all_special_tokens if token in word]
        if special:
            raise UserError(f"generate.stop holds {word!r}, a special token: name it in generate.end_tokens instead")


def _num_updates(config: Config, num_train_steps: int) -> int:
    """Optimizer steps of so many train steps."""
    return num_train_steps * config.train.optimizer_steps * config.train.passes


def _frozen_reference(objective: Objective, policy: Policy) -> Policy | None:
    """A copy of the base, where the objective compares with it and the policy can't be switched back to it.

    `policy` is as it was loaded: before a checkpoint's weights come into it.
    """
    if not objective.needs_reference or policy.has_own_reference:
        return None
    reference = copy.deepcopy(policy)
    reference.model.requires_grad_(False)
    return reference


def _trainer(config: Config, policy: Policy, reference: Policy | None, cores: Cores) -> LocalTrainer:
    return LocalTrainer(
        policy,
        config.train,
        shape=Shape(config.generate.temperature, config.generate.repetition_penalty),
        num_steps=_num_updates(config, config.run.steps - config.critic.value_warmup_steps),
        cores=cores,
        reference=reference,
    )


def _critic(config: Config, objective: Objective, cores: Cores) -> LocalCritic | None:
    """A full copy of the base as value function, where the policy trains an adapter only, too."""
    if not objective.needs_critic:
        unused = {"value_learning_rate": None, "value_warmup_steps": 0}
        for name, value in config.critic:
            if value != unused[name]:
                raise UserError(
                    f"critic.{name} is {value}, and the objective {objective.name} has no critic: leave it out, or set "
                    "objective.name to ppo"
                )
        return None
    assert config.model.path is not None
    return LocalCritic(
        ValueModel(load_policy(config.model.path, config.model.device)),
        config.train,
        learning_rate=1e-5 if config.critic.value_learning_rate is None else config.critic.value_learning_rate,
        num_steps=_num_updates(config, config.run.steps),
        cores=cores,
    )


def _restored(kept: KeptRollout) -> Restored:
    rollout, score = kept.rollout, kept.score
    scored = Scored(ScoredRollout(rollout, score), score.outcome, score.reward) if score else None
    return Restored(kept.group, rollout.member, kept.version, generated(rollout), scored)


def _bound_from(config: Config, progress: Mapping[str, Any]) -> int:
    """What had started under another schedule may be older than the bound of this one allows."""
    same = progress["schedule"] == config.schedule.model_dump(mode="json")
    return progress["bound_from"] if same else progress["next_order"]


def _check_resume(source: PromptSource, config: Config, reference_hash: str | None, checkpoint: Checkpoint) -> None:
    """Groups are counted in batches, prompts by group, rewards against the reference: none of it may have changed."""
    if "active" not in checkpoint.progress:
        raise UserError(
            f"{checkpoint.folder} was written by an older Headway, which kept no account of unfinished groups: resume "
            "with that one, or start a new run"
        )
    for name in ("batch_size", "group_size", "redundant"):
        before, now = checkpoint.progress["schedule"][name], getattr(config.schedule, name)
        if before != now:
            raise UserError(
                f"schedule.{name} is {now}, and was {before} in the run that wrote {checkpoint.folder}: resume with "
                f"--schedule.{name.replace('_', '-')} {before}, or start a new run from its model"
            )
    _check_adapter(config, checkpoint)
    if checkpoint.progress["data"] != source.fingerprint:
        raise UserError(
            f"the prompts are not those of the run that wrote {checkpoint.folder}: resume with the same data and seed"
        )
    compared_with = checkpoint.progress.get("reference")
    if compared_with and reference_hash and compared_with != reference_hash:
        raise UserError(
            f"{config.model.path} holds other weights than for the run that wrote {checkpoint.folder}, and the "
            "objective compares with them: resume with the same model.path"
        )


def _check_adapter(config: Config, checkpoint: Checkpoint) -> None:
    """What is trained, and what it is compared with, are the checkpoint's; other settings would only seem to hold."""
    settings, saved = config.adapter.model_dump(mode="json"), checkpoint.progress.get("adapter", {})
    for name in sorted(saved, key=lambda name: name not in ("kind", "start")):  # the others follow from these
        before, now = saved[name], settings[name]
        if now != before:
            raise UserError(
                f"adapter.{name} is {now}, and was {before} in the run that wrote {checkpoint.folder}: leave it as it "
                "was, or start a new run"
            )


def _num_threads(config: Config) -> int:
    return config.run.threads or os.cpu_count() or 1


def _claims(config: Config) -> tuple[Cores, Cores]:
    """The engine's and the trainer's claim to CPU cores.

    How a gradient's sums are split must not depend on what the engine does, in a run that can be repeated in every bit.
    """
    threads = _num_threads(config)
    if config.run.share_cores:
        pool = CorePool(threads)
        repeatable = config.model.parity == "bitwise" and config.schedule.run_ahead == 0
        return SharedCores(pool), SharedCores(pool, always_all=repeatable)
    return FixedCores(threads), FixedCores(threads)


class InProcessStages:
    """Implements `headway.stages.Stages`: a reference is the thing itself."""

    def __init__(self, parts: Parts, folder: RunFolder) -> None:
        self._parts, self._folder = parts, folder
        config = parts.config
        self._sleep = config.generate.sleep
        self._trainer_thread = ThreadPoolExecutor(1, "headway trainer")
        canaries = CanarySettings(config.diagnostics.canary_tokens, parts.sampling, config.run.seed)
        self._engine = TorchEngine(
            parts.engine_policy,
            lanes=config.generate.lanes,
            decode=lambda ids: parts.tokenizer.decode(ids, skip_special_tokens=True),
            cores=parts.engine_cores,
            version=parts.version,
            spare_lanes=len(canaries.lengths),
            cache_bytes=config.generate.cache_bytes,
            prefill_tokens=config.generate.prefill_tokens,
        )
        self._num_preempted = 0
        self._trainer_s = 0.0
        self._engine_work: list[dict[str, Any]] = []
        self._canaries = Canaries(self._engine, parts.source, canaries)
        self._episodes = Episodes(
            self._engine, parts.source, parts.held_out, parts.sampling, parts.evaluation, config.run.seed
        )
        self._sync = MemorySync(
            self._engine,
            verify=config.sync.verify,
            recompute=config.schedule.in_flight == "recompute",
            dtypes={name: tensor.dtype for name, tensor in parts.engine_policy.weights().items()},
        )

    async def catch_up(self) -> None:
        """Hand a resumed run's weights to its engine, and start the canaries of the version it begins with."""
        if self._parts.version:
            await self._sync.sync(self._parts.trainer.weights(), self._parts.version)
        await self._canaries.start(self._parts.version)

    async def generate(self, ticket: Ticket) -> Generated:
        return await self._episodes.generate(ticket)

    def stop(self, ticket: Ticket) -> None:
        self._episodes.stop(ticket)

    async def score(self, ticket: Ticket, rollout: Rollout) -> Scored:
        score = await self._parts.scorer.score(rollout.prompt, rollout.text)
        if ticket.evaluation:
            self._folder.evaluations(
                {
                    "version": ticket.version,
                    "uid": rollout.prompt.uid,
                    "prompt": rollout.prompt.text,
                    "text": rollout.text,
                    "answer": rollout.prompt.answer,
                    "reward": score.reward,
                    "outcome": score.outcome,
                    "detail": score.detail,
                    "misplaced": score.misplaced,
                    "finish": rollout.finish,
                }
            )
        return Scored(ScoredRollout(rollout, score), score.outcome, score.reward)

    async def prepare(self, groups: Sequence[Sequence[ScoredRollout]], version: int) -> Batch:
        canaries = await self._canaries.finished()
        if self._sleep != "none":  # what is in flight has been told to pause, and an evaluation has ended
            await self._engine.sleep(weights=self._sleep == "weights")
        cache, batch = await asyncio.gather(
            self._cache_metrics(sum(map(len, groups))),
            self._on_trainer_thread(lambda: self._timed(lambda: self._prepare(groups, version, canaries))),
        )
        return replace(batch, metrics={**batch.metrics, **cache})

    async def _cache_metrics(self, num_rollouts: int) -> dict[str, float]:
        """Of the engine's cache since the step before: `cache_used`, the share of blocks that rollouts stood on in the
        fullest pass; `preempted_share`, how often a rollout gave way, per rollout of the batch.
        """
        status, self._engine_work = await asyncio.gather(self._engine.status(), self._engine.work())
        preempted, self._num_preempted = status.num_preempted - self._num_preempted, status.num_preempted
        return {
            "cache_used": status.blocks_most_used / status.blocks,
            "preempted_share": preempted / max(1, num_rollouts),
        }

    def _prepare(self, groups: Sequence[Sequence[ScoredRollout]], version: int, canaries: Sequence[Rollout]) -> Batch:
        parts, config = self._parts, self._parts.config
        micro_batch_tokens = config.prepare.micro_batch_tokens
        with parts.trainer_cores.busy():
            batch = prepare_batch(
                parts.objective,
                groups,
                version=version,
                micro_batch_tokens=micro_batch_tokens,
                budget_tokens=config.generate.max_new_tokens,
                optimizer_steps=config.train.optimizer_steps,
                passes=config.train.passes,
                trainer=parts.trainer,
                critic=parts.critic,
            )
            numerics = canary_metrics(parts.trainer, canaries, version=version, micro_batch_tokens=micro_batch_tokens)
        return replace(batch, metrics={**batch.metrics, **numerics})

    async def train(self, batch: Batch) -> Trained:
        parts, config = self._parts, self._parts.config

        def step() -> StepResult:
            with parts.trainer_cores.busy():
                return train_step(
                    parts.trainer,
                    parts.critic,
                    parts.objective,
                    batch,
                    passes=config.train.passes,
                    train_policy=batch.version >= config.critic.value_warmup_steps,
                )

        result = await self._on_trainer_thread(lambda: self._timed(step))
        self._keep_rollouts(batch, result)
        weights = parts.trainer.weights()
        memory = self._peak_memory_bytes()
        self._keep_work(batch.version + 1, memory)
        metrics = {**result.metrics, **_sizes(parts.trainer_policy, weights), "peak_memory_bytes": memory}
        if config.model.parity == "bitwise":
            recomputed = config.schedule.in_flight == "recompute"
            metrics["unequal_tokens"] = _unequal_tokens(batch, result.log_ratios, recomputed=recomputed)
        return Trained(weights, metrics)

    def _peak_memory_bytes(self) -> int:
        """So far, of the GPU where there is one; else of the process, less what it held before it loaded anything."""
        device = self._parts.trainer_policy.device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return peak_resident_bytes() - self._parts.memory_before

    def _keep_work(self, version: int, memory: int) -> None:
        """Of the engine up to when the batch was prepared. trainer_s: on the trainer's thread, for this batch."""
        parts = self._parts
        logs = [parts.trainer.log, *([parts.critic.log] if parts.critic else [])]
        self._folder.work(
            {
                "version": version,
                "device": device_name(parts.trainer_policy.device),
                "cores": _num_threads(parts.config),
                "peak_memory_bytes": memory,
                "trainer_s": self._trainer_s,
                "work": [*self._engine_work, *(row for log in logs for row in log.take())],
            }
        )
        self._trainer_s = 0.0

    def _keep_rollouts(self, batch: Batch, result: StepResult) -> None:
        wanted = min(self._parts.config.report.rollouts_per_step, len(batch.rollouts))
        for place in range(wanted):
            number = place * len(batch.rollouts) // wanted
            rollout = batch.rollouts[number]
            self._folder.rollouts(
                {
                    "version": batch.version + 1,
                    "prompt": rollout.prompt.text,
                    "text": rollout.text,
                    "reward": batch.rewards[number],
                    "outcome": "scored" if batch.rewards[number] is not None else "unscored",
                    "finish": rollout.finish,
                    "pieces": [self._parts.tokenizer.decode([token]) for token in rollout.tokens],
                    "log_ratios": _by_token(rollout, result.log_ratios[number]),
                    "versions": list(rollout.versions),
                    "lag": batch.version - min(rollout.versions, default=batch.version),
                }
            )

    async def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        await self._sync.sync(weights, version)
        if self._sleep != "none":
            await self._engine.wake()
        await self._canaries.start(version)

    async def save(self, progress: Mapping[str, Any], tickets: Sequence[Ticket]) -> None:
        parts = self._parts
        rollouts = await self._rollouts_of(tickets)
        whole = {
            **progress,
            "schedule": parts.config.schedule.model_dump(mode="json"),
            "bound_from": parts.bound_from,
            "data": parts.source.fingerprint,
            "reference": parts.reference_hash,
            "adapter": parts.config.adapter.model_dump(mode="json", exclude={"merge"}),
        }
        keep = parts.config.checkpoint.keep

        def save_learners(folder: Path) -> None:
            parts.trainer.save(folder)
            if parts.critic:
                parts.critic.save(folder)

        await self._on_trainer_thread(
            lambda: write_checkpoint(self._folder.checkpoints, whole, rollouts, save_learners, keep=keep)
        )

    async def _rollouts_of(self, tickets: Sequence[Ticket]) -> list[KeptRollout]:
        """What there is of these tickets' rollouts. Which of them have a score is seen at once, as progress saw it."""
        scored = [ticket for ticket in tickets if isinstance(ticket.ref, ScoredRollout)]
        kept = [KeptRollout(t.group, t.version, t.ref.rollout, t.ref.score) for t in scored]
        others = [ticket for ticket in tickets if not isinstance(ticket.ref, ScoredRollout)]
        rollouts = await asyncio.gather(*(self._episodes.look_at(ticket) for ticket in others))
        kept += [KeptRollout(t.group, t.version, r) for t, r in zip(others, rollouts, strict=True) if r is not None]
        return sorted(kept, key=lambda one: (one.group, one.rollout.member))

    async def export(self, folder: Path) -> None:
        """Leave the trained policy as a Hugging Face folder."""
        parts, merge = self._parts, bool(self._parts.config.adapter.merge)
        await self._on_trainer_thread(lambda: save_policy(parts.trainer_policy, parts.tokenizer, folder, merge=merge))

    async def _on_trainer_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._trainer_thread, work)

    def _timed(self, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return work()
        finally:
            self._trainer_s += time.perf_counter() - began

    async def close(self) -> None:
        await self._canaries.close()
        await self._engine.close()
        await self._parts.scorer.close()
        await asyncio.to_thread(self._trainer_thread.shutdown, wait=True)


def _sizes(policy: Policy, weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """What is trained, and what a sync carries."""
    return {
        "trainable_parameters": sum(p.numel() for p in policy.model.parameters() if p.requires_grad),
        "sync_bytes": sum(tensor.numel() * tensor.element_size() for tensor in weights.values()),
    }


def _unequal_tokens(batch: Batch, log_ratios: Sequence[Sequence[float]], *, recomputed: bool) -> float:
    """Tokens of lag 0 whose log-prob is not the trainer's in every bit; nan is not.

    Canaries are among them. Tokens that follow older ones of their rollout are so only where what they follow is always
    computed again under new weights.
    """
    num_unequal = batch.metrics.get("canary_unequal_tokens", 0.0)
    for rollout, ratios in zip(batch.rollouts, log_ratios, strict=True):
        if recomputed or set(rollout.versions) == {batch.version}:
            of_tokens = zip(rollout.versions, _by_token(rollout, ratios), strict=True)
            num_unequal += sum(version == batch.version and ratio not in (None, 0) for version, ratio in of_tokens)
    return num_unequal


def _by_token(rollout: Rollout, log_ratios: Sequence[float]) -> list[float | None]:
    """Log-ratios of the trained tokens -> of all tokens of the rollout, None where there is none."""
    if len(log_ratios) != sum(rollout.mask):  # a rollout that was no data, or whose log-probs nobody asked for
        return [None] * len(rollout.mask)
    ratios = iter(log_ratios)
    return [next(ratios) if trained else None for trained in rollout.mask]
