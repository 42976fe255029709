"""Scored rollouts in an order that arrival has no say in: their rewards, which of them are data, and their figures.

Axis: R rollouts of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch

from headway.objectives import compose
from headway.objectives.parts import Objective
from headway.types import Rollout, ScoredRollout


@dataclass(frozen=True)
class Gathered:
    """A batch's rollouts R in the order of (prompt, epoch, member).

    rewards: as scored, None where unscored; reward_R: float64, as the objective shapes them, nan where unscored;
    group_R numbers the groups from 0; selection: which rollouts are data, and why the others are not; metrics: figures
    of the rollouts by name.
    """

    rollouts: list[Rollout]
    rewards: list[float | None]
    reward_R: torch.Tensor
    group_R: torch.Tensor
    selection: compose.Selection
    metrics: dict[str, Any]


def gather(objective: Objective, groups: Sequence[Sequence[ScoredRollout]], budget_tokens: int) -> Gathered:
    """Groups in any order -> rollouts in identity order, selected and with their rewards.

    budget_tokens: the token budget of a rollout, near which an objective may take something off its reward.
    """
    ordered = sorted(groups, key=lambda group: (group[0].rollout.prompt.uid, group[0].rollout.epoch))
    members = [sorted(group, key=lambda scored: scored.rollout.member) for group in ordered]
    rollouts = [scored.rollout for group in members for scored in group]
    rewards = [scored.score.reward for group in members for scored in group]
    group_R = torch.tensor([number for number, group in enumerate(members) for _ in group], dtype=torch.long)
    outcome_R = torch.tensor([torch.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
    truncated_R = torch.tensor([rollout.truncated for rollout in rollouts], dtype=torch.bool)
    num_tokens_R = torch.tensor([len(rollout.tokens) for rollout in rollouts], dtype=torch.long)
    selection = compose.select(objective, outcome_R, group_R, truncated_R)
    reward_R = compose.shaped_rewards(objective, outcome_R, num_tokens_R, budget_tokens)
    metrics = _metrics(members) | {f"dropped_rollouts/{reason}": num for reason, num in selection.dropped.items()}
    if objective.overlong is not None and not reward_R.isnan().all():
        metrics["shaped_reward_mean"] = reward_R.nanmean().item()
    return Gathered(rollouts, rewards, reward_R, group_R, selection, metrics)


def _metrics(groups: Sequence[Sequence[ScoredRollout]]) -> dict[str, Any]:
    """Figures of all rollouts, whatever becomes of them. Those of rewards are over the scored ones alone."""
    rollouts = [scored.rollout for group in groups for scored in group]
    lengths = [len(rollout.tokens) for rollout in rollouts]
    return {
        **_reward_metrics(groups),
        "num_rollouts": len(rollouts),
        "response_tokens_mean": fmean(lengths),
        "response_tokens_max": max(lengths),
        "truncated_share": fmean(rollout.finish == "length" for rollout in rollouts),
        "interrupted_share": fmean(rollout.finish == "interrupted" for rollout in rollouts),
        **_lengths_by_finish(rollouts),
    }


def _lengths_by_finish(rollouts: Sequence[Rollout]) -> dict[str, float]:
    reasons = sorted({rollout.finish for rollout in rollouts})
    return {
        f"response_tokens_mean/{reason}": fmean(len(r.tokens) for r in rollouts if r.finish == reason)
        for reason in reasons
    }


def _reward_metrics(groups: Sequence[Sequence[ScoredRollout]]) -> dict[str, Any]:
    by_group = [[s.score.reward for s in group if s.score.reward is not None] for group in groups]
    rewards = [reward for group in by_group for reward in group]
    if not rewards:
        return {"zero_variance_groups": 0}
    return {
        "reward_mean": fmean(rewards),
        "reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "zero_variance_groups": sum(len(set(group)) == 1 for group in by_group),
    }
