"""Rewards of a batch -> the advantage of every rollout, and what they say in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch

from headway.objectives import compose
from headway.objectives.advantages import Advantages
from headway.objectives.named import Objective
from headway.types import ScoredRollout


@dataclass(frozen=True)
class Credit:
    """Rollouts R in identity order with their advantages. group_R numbers the groups from 0."""

    rollouts: list[ScoredRollout]
    group_R: torch.Tensor
    advantages: Advantages
    metrics: dict[str, Any]


def assign_credit(objective: Objective, groups: Sequence[Sequence[ScoredRollout]]) -> Credit:
    """Groups in any order -> credit in the order of (prompt, epoch, member), so that arrival leaves no trace."""
    ordered = sorted(groups, key=lambda group: (group[0].rollout.prompt.uid, group[0].rollout.epoch))
    members = [sorted(group, key=lambda scored: scored.rollout.member) for group in ordered]
    rollouts = [scored for group in members for scored in group]
    group_R = torch.tensor([number for number, group in enumerate(members) for _ in group])
    rewards = [scored.score.reward for scored in rollouts]
    assert None not in rewards, "an unscored rollout reached a batch"
    reward_R = torch.tensor(rewards, dtype=torch.float64)
    return Credit(rollouts, group_R, compose.advantages(objective, reward_R, group_R), _metrics(members))


def _metrics(groups: Sequence[Sequence[ScoredRollout]]) -> dict[str, Any]:
    rollouts = [scored for group in groups for scored in group]
    rewards = [scored.score.reward or 0.0 for scored in rollouts]
    lengths = [len(scored.rollout.tokens) for scored in rollouts]
    spreads = [{scored.score.reward for scored in group} for group in groups]
    return {
        "reward_mean": fmean(rewards),
        "reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "num_rollouts": len(rollouts),
        "zero_variance_groups": sum(len(spread) == 1 for spread in spreads),
        "response_tokens_mean": fmean(lengths),
        "response_tokens_max": max(lengths),
        "truncated_share": fmean(scored.rollout.finish == "length" for scored in rollouts),
    }
