"""One train step over any trainer: gradients of all micro-batches under global denominators, then an optimizer step.

A batch may be trained in several optimizer steps, one for each of its parts, and several times over. The step is blind
to algorithms: the objective gives the loss of a micro-batch from log-probs (and from values, where there is a critic),
and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from headway.batch import Batch, MicroBatch
from headway.objectives import compose
from headway.objectives.diagnostics import MismatchDiagnostics
from headway.objectives.parts import Objective
from headway.objectives.tokens import Tokens
from headway.stages import Critic, ForwardResult, Trainer
from headway.train.ranks import Ranks


@dataclass(frozen=True)
class StepResult:
    """metrics: figures of the step by name; log_ratios: log pi - log mu per trained token, by rollout.

    Figures of optimizer steps (`loss`, `grad_norm`, and `value_loss`, `critic_grad_norm` of a critic) are means over
    those of the train step. log pi is under the weights before the step; a rollout for whose tokens it isn't known has
    no log-ratios.
    """

    metrics: dict[str, Any]
    log_ratios: list[list[float]]


def train_step(
    trainer: Trainer,
    critic: Critic | None,
    objective: Objective,
    batch: Batch,
    *,
    passes: int = 1,
    train_policy: bool = True,
    ranks: Ranks | None = None,
) -> StepResult:
    """Train `batch`: `passes` times over, one optimizer step for each of its parts.

    train_policy: False lets only the critic learn. A part without a trained token is skipped, and said: weights and
    optimizer are left as they are. ranks: those that train together, of which each calls this with its share of the
    batch (`train.ranks.share`) and gets the result of all.
    """
    assert ranks is None or critic is None, "a critic's gradients are not added up over ranks"
    step = _TrainStep(trainer, critic, objective, batch, train_policy)
    for number_of_pass in range(passes):
        for place, part in enumerate(batch.optimizer_steps):
            micro_batches = [micro for micro in part if micro.filler or not micro.empty]
            if micro_batches:
                step.optimizer_step(micro_batches, measured=number_of_pass == 0)
            elif number_of_pass == 0:
                step.skipped.append(place)
    if ranks is not None:
        step.join(ranks.gather(step.done))
    return step.result()


@dataclass(frozen=True)
class _Done:
    """What one rank did that others have to know: losses of optimizer steps, figures and log-ratios of tokens."""

    policy_losses: list[float]
    value_losses: list[float]
    diagnostics: MismatchDiagnostics
    log_ratios: list[list[float]]


@dataclass
class _TrainStep:
    """A train step under way, and what is known of it so far.

    policy_steps, critic_steps: the figures of each optimizer step; skipped: the parts without one.
    """

    trainer: Trainer
    critic: Critic | None
    objective: Objective
    batch: Batch
    train_policy: bool
    policy_steps: list[Mapping[str, Any]] = field(default_factory=list)
    critic_steps: list[Mapping[str, Any]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    diagnostics: MismatchDiagnostics = field(default_factory=MismatchDiagnostics)

    def __post_init__(self) -> None:
        self.log_ratios: list[list[float]] = [[] for _ in self.batch.rollouts]

    def optimizer_step(self, micro_batches: Sequence[MicroBatch], *, measured: bool) -> None:
        """One of the policy and one of the critic. measured: so is the mismatch of its tokens, which is done once; what
        the loss did to them is counted every time.
        """
        policy_loss = value_loss = 0.0
        for micro in micro_batches:
            result, aux = self._policy_pass(micro, last=micro is micro_batches[-1])
            if not micro.filler:
                policy_loss += result.loss or 0.0
                self.diagnostics.saw(micro.tokens, aux)
                if measured:
                    self._measure(micro.tokens, result, aux)
            if self.objective.needs_critic:
                value_loss += self._critic_pass(micro)
        self.policy_steps.append({"loss": policy_loss, **(self.trainer.optim_step() if self.train_policy else {})})
        if self.critic is not None and self.objective.needs_critic:
            self.critic_steps.append({"loss": value_loss, **self.critic.optim_step()})

    @property
    def done(self) -> _Done:
        return _Done(
            [step["loss"] for step in self.policy_steps],
            [step["loss"] for step in self.critic_steps],
            self.diagnostics,
            self.log_ratios,
        )

    def join(self, ranks: Sequence[_Done]) -> None:
        """The account of all ranks in the place of its own."""
        self.policy_steps = _added(self.policy_steps, [rank.policy_losses for rank in ranks])
        self.critic_steps = _added(self.critic_steps, [rank.value_losses for rank in ranks])
        self.diagnostics = MismatchDiagnostics.joined([rank.diagnostics for rank in ranks])
        of_ranks = zip(*(rank.log_ratios for rank in ranks), strict=True)
        self.log_ratios = [[ratio for ratios in rollout for ratio in ratios] for rollout in of_ranks]

    def _policy_pass(self, micro: MicroBatch, *, last: bool) -> tuple[ForwardResult, compose.TokenAux]:
        """Gradients, and what the loss did to each token; a pass for the figures alone where only the critic learns."""
        noted: list[compose.TokenAux] = []

        def loss(logp_N: torch.Tensor) -> torch.Tensor:
            value, aux = compose.loss(self.objective, logp_N, micro.tokens.to(logp_N.device))
            noted.append(aux)
            return value

        if self.train_policy:
            return self.trainer.forward_backward(micro.rows, loss, last=last), noted[0]
        result = self.trainer.forward(micro.rows)
        return replace(result, loss=loss(result.logp_N).item()), noted[0]

    def _critic_pass(self, micro: MicroBatch) -> float:
        assert self.critic is not None, f"{self.objective.name} has a value term, and there is no critic"

        def loss(value_N: torch.Tensor) -> torch.Tensor:
            return compose.value_loss(self.objective, value_N, micro.tokens.to(value_N.device))

        return self.critic.forward_backward(micro.rows, loss).loss or 0.0

    def _measure(self, tokens: Tokens, result: ForwardResult, aux: compose.TokenAux) -> None:
        """Count each trained token once, under the weights before the train step, where those log-probs are known."""
        not_moved = not (self.train_policy and self.policy_steps)
        before_N = result.logp_N if tokens.proximal_N is None and not_moved else tokens.proximal_N
        if before_N is None:
            return
        self.diagnostics.add(before_N, tokens, result.entropy_N, aux)
        log_ratio_N = (before_N - tokens.behaviour_N)[tokens.mask_N].tolist()
        for rollout, log_ratio in zip(tokens.rollout_N[tokens.mask_N].tolist(), log_ratio_N, strict=True):
            self.log_ratios[rollout].append(log_ratio)

    def result(self) -> StepResult:
        metrics = dict(self.batch.metrics)
        if not self.policy_steps:
            warning = "no token of this batch may be trained: the step was skipped and the weights are unchanged"
            return StepResult({**metrics, "warning": warning}, self.log_ratios)
        metrics |= {"optimizer_steps": len(self.policy_steps), **_figures(self.policy_steps, "loss", "")}
        if self.critic_steps:
            metrics |= _figures(self.critic_steps, "value_loss", "critic_")
        if not self.train_policy:
            metrics["value_warmup"] = True
        if warnings := self._warnings():
            metrics["warning"] = "; ".join(warnings)
        return StepResult({**metrics, **self.diagnostics.result()}, self.log_ratios)

    def _warnings(self) -> list[str]:
        num_parts = len(self.batch.optimizer_steps)
        said = [f"part {place + 1} of {num_parts} has no token to train and was skipped" for place in self.skipped]
        said += [step["warning"] for step in self.policy_steps if "warning" in step]
        said += [f"of the critic, {step['warning']}" for step in self.critic_steps if "warning" in step]
        return list(dict.fromkeys(said))


def _added(steps: list[Mapping[str, Any]], losses: Sequence[Sequence[float]]) -> list[Mapping[str, Any]]:
    """Optimizer steps with the losses of all ranks; whatever else they say is the same on each."""
    return [{**step, "loss": sum(of_ranks)} for step, of_ranks in zip(steps, zip(*losses, strict=True), strict=True)]


def _figures(steps: list[Mapping[str, Any]], loss: str, prefix: str) -> dict[str, Any]:
    """Of several optimizer steps: means of losses and norms, what the last one says of the rest."""
    figures: dict[str, Any] = {loss: fmean(step["loss"] for step in steps)}
    figures |= {f"{prefix}{name}": value for name, value in steps[-1].items() if name not in ("loss", "warning")}
    if "grad_norm" in steps[-1]:
        norms = [step["grad_norm"] for step in steps if step["grad_norm"] is not None]
        figures[f"{prefix}grad_norm"] = fmean(norms) if norms else None
    return figures
