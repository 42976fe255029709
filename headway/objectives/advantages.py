"""Rewards of a group -> advantages.

Axes: R rollouts of a batch, G groups. A rollout without a reward (its grader failed or was late) is *unscored*: it
leaves the baseline, its advantage is 0 and it is no data. A group needs two scored rollouts to compare; the only
scored rollout of a group is *lone*: its advantage is 0 too, and its group should be dropped and counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Advantages:
    """Advantages of a batch and what they rest on.

    advantage_R: in the dtype of the rewards; exactly 0 where unscored, lone, or where all rewards of a group are equal.
    scored_R: has a reward. lone_R: the only scored rollout of its group. equal_R: scored, not lone, and every scored
    rollout of its group has the same reward, so the group says nothing (yet it is data, and stays in denominators).
    """

    advantage_R: Tensor
    scored_R: Tensor
    lone_R: Tensor
    equal_R: Tensor

    @property
    def usable_R(self) -> Tensor:
        """Rollouts that are data: scored, in a group with at least two scored rollouts."""
        return self.scored_R & ~self.lone_R


def group_mean(reward_R: Tensor, group_R: Tensor, scored_R: Tensor | None = None) -> Advantages:
    """Reward minus the mean of its group: `A = r - mean(r)`.

    reward_R: float, nan where unscored; group_R: int, any names of groups, in any order; scored_R: bool, marks more
    rollouts as unscored, whatever their reward. Raises ValueError for an infinite reward.

    >>> group_mean(torch.tensor([1.0, float("nan"), 0.0, 1.0, 1.0]), torch.tensor([7, 7, 7, 8, 8])).advantage_R
    tensor([ 0.5000,  0.0000, -0.5000,  0.0000,  0.0000])

    Source: Liu et al. 2025, Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    groups = _compare(reward_R, group_R, scored_R)
    return groups.advantages(groups.centred_R)


def group_mean_std(
    reward_R: Tensor, group_R: Tensor, scored_R: Tensor | None = None, epsilon: float = 1e-6
) -> Advantages:
    """Reward normalised in its group: `A = (r - mean(r)) / (std(r) + epsilon)`, std of the sample (ddof 1).

    Arguments and errors as in `group_mean`.

    >>> group_mean_std(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0])).advantage_R
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])

    Source: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, section 4.1 (which leaves ddof open).
    """
    groups = _compare(reward_R, group_R, scored_R)
    return groups.advantages(groups.centred_R / (groups.std_R + epsilon))


@dataclass(frozen=True)
class _Groups:
    """Statistics of each rollout's group over its scored members, in float64."""

    centred_R: Tensor
    std_R: Tensor
    scored_R: Tensor
    lone_R: Tensor
    equal_R: Tensor
    dtype: torch.dtype

    def advantages(self, value_R: Tensor) -> Advantages:
        usable_R = self.scored_R & ~self.lone_R
        # The mean of equal numbers is off by a rounding and their std is noise: both are cut here, not trusted.
        advantage_R = torch.where(usable_R & ~self.equal_R, value_R, 0.0).to(self.dtype)
        return Advantages(advantage_R, self.scored_R, self.lone_R, self.equal_R)


def _compare(reward_R: Tensor, group_R: Tensor, scored_R: Tensor | None) -> _Groups:
    assert reward_R.shape == group_R.shape, f"rewards {reward_R.shape} and groups {group_R.shape} differ in shape"
    has_reward_R = ~reward_R.isnan()
    scored_R = has_reward_R if scored_R is None else has_reward_R & scored_R
    if bool((scored_R & reward_R.isinf()).any()):
        raise ValueError("a reward is infinite; mark rollouts without a reward as nan")
    names_G, index_R = torch.unique(group_R, return_inverse=True)
    value_R = torch.where(scored_R, reward_R.double(), 0.0)

    def group_sum(item_R: Tensor) -> Tensor:
        return item_R.new_zeros(len(names_G)).index_add(0, index_R, item_R)

    num_G = group_sum(scored_R.double())
    mean_G = group_sum(value_R) / num_G.clamp(min=1)
    centred_R = torch.where(scored_R, value_R - mean_G[index_R], 0.0)
    std_G = (group_sum(centred_R.square()) / (num_G - 1).clamp(min=1)).sqrt()
    highest_G = _extreme(reward_R, scored_R, index_R, len(names_G), "amax")
    lowest_G = _extreme(reward_R, scored_R, index_R, len(names_G), "amin")
    lone_R = scored_R & (num_G == 1)[index_R]
    equal_R = scored_R & ~lone_R & (highest_G == lowest_G)[index_R]
    dtype = torch.promote_types(reward_R.dtype, torch.float32)
    return _Groups(centred_R, std_G[index_R], scored_R, lone_R, equal_R, dtype)


def _extreme(reward_R: Tensor, scored_R: Tensor, index_R: Tensor, num_groups: int, which: str) -> Tensor:
    out_of_the_way = -torch.inf if which == "amax" else torch.inf
    value_R = torch.where(scored_R, reward_R.double(), out_of_the_way)
    return value_R.new_full((num_groups,), out_of_the_way).scatter_reduce(0, index_R, value_R, which)
