"""Rewards -> advantages, of rollouts or of tokens.

Axes: R rollouts of a batch, G groups, M trained tokens. A rollout without a reward (its grader failed or was late) is
*unscored*: it leaves the baseline, its advantage is 0 and it is no data. A group needs two scored rollouts to compare;
the only scored rollout of a group is *lone*: its advantage is 0 too, and its group should be dropped and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def leave_one_out(reward_R: Tensor, group_R: Tensor, scored_R: Tensor | None = None) -> Advantages:
    """Reward minus the mean of the group's *other* rollouts: `G / (G - 1) (r - mean(r))`; the baseline is unbiased.

    Arguments and errors as in `group_mean`.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0])).advantage_R
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])

    Source: Kool et al. 2019; Ahmadian et al. 2024, RLOO, arXiv 2402.14740, section 3.
    """
    groups = _compare(reward_R, group_R, scored_R)
    return groups.advantages(groups.centred_R * groups.num_R / (groups.num_R - 1).clamp(min=1))


def group_mean_batch_std(
    reward_R: Tensor, group_R: Tensor, scored_R: Tensor | None = None, epsilon: float = 1e-6
) -> Advantages:
    """`A = (r - mean(r)) / (std + epsilon)`: centred in its group, divided by one sample std (ddof 1) of those
    differences over all scored rollouts of the batch.

    Arguments and errors as in `group_mean`.

    >>> group_mean_batch_std(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])).advantage_R
    tensor([ 1.2247, -1.2247,  0.0000,  0.0000])

    Source: Khatri et al. 2025, ScaleRL, arXiv 2510.13786 (batch-level normalisation).
    """
    groups = _compare(reward_R, group_R, scored_R)
    usable_R = groups.scored_R & ~groups.lone_R
    std = groups.centred_R[usable_R].std() if int(usable_R.sum()) > 1 else groups.centred_R.new_zeros(())
    return groups.advantages(groups.centred_R / (std + epsilon))


def batch_mean(reward_R: Tensor, group_R: Tensor, scored_R: Tensor | None = None) -> Advantages:
    """Reward minus the mean of all scored rollouts of the batch; groups play no part, and none is lone.

    Arguments and errors as in `group_mean`.

    Source: Williams 1992, REINFORCE, section 4 (reinforcement comparison).
    """
    plain = reward(reward_R, group_R, scored_R)
    value_R = torch.where(plain.scored_R, reward_R.double(), 0.0)
    scored_rewards = value_R[plain.scored_R]
    if not len(scored_rewards) or scored_rewards.min() == scored_rewards.max():
        return replace(plain, advantage_R=torch.zeros_like(plain.advantage_R))
    centred_R = torch.where(plain.scored_R, value_R - scored_rewards.mean(), 0.0)
    return replace(plain, advantage_R=centred_R.to(plain.advantage_R.dtype))


def reward(reward_R: Tensor, group_R: Tensor, scored_R: Tensor | None = None) -> Advantages:
    """The reward itself, without a baseline; 0 where unscored. Arguments and errors as in `group_mean`."""
    groups = _compare(reward_R, group_R, scored_R)
    value_R = torch.where(groups.scored_R, reward_R.to(groups.dtype), 0.0)
    none_R = torch.zeros_like(groups.scored_R)
    return Advantages(value_R, groups.scored_R, none_R, groups.equal_R)


def preference(reward_R: Tensor, group_R: Tensor, scored_R: Tensor | None = None) -> Advantages:
    """+1 for the best rollout of a group, -1 for its worst, 0 for the rest and for groups whose rewards are all equal.

    Of equally good (or bad) rollouts the first is taken. Arguments and errors as in `group_mean`.

    >>> preference(torch.tensor([0.5, 1.0, 0.0, 1.0, 2.0, 2.0]), torch.tensor([0, 0, 0, 0, 1, 1])).advantage_R
    tensor([ 0.,  1., -1.,  0.,  0.,  0.])

    Source: Guo et al. 2024, arXiv 2402.04792 (pairs); best against worst: Noukhovitch et al. 2024, arXiv 2410.18252.
    """
    groups = _compare(reward_R, group_R, scored_R)
    sign_R = torch.zeros_like(groups.centred_R)
    for group in torch.unique(group_R).tolist():
        members = torch.nonzero((group_R == group) & groups.scored_R & ~groups.equal_R & ~groups.lone_R).flatten()
        if len(members):
            sign_R[members[reward_R[members].argmax()]] = 1.0
            sign_R[members[reward_R[members].argmin()]] = -1.0
    return groups.advantages(sign_R)


# ---- over tokens: M trained tokens of a batch, flat, in the order of their rollouts


def token_rewards(reward_R: Tensor, rollout_M: Tensor, penalty_M: Tensor | None = None) -> Tensor:
    """Each rollout's reward at its last trained token, plus a penalty per token: `[M]`.

    reward_R: no nan; rollout_M: int >= 0, ascending. Tokens that others wrote are not among M and end nothing.
    """
    reward_M = torch.zeros_like(reward_R[rollout_M]) if penalty_M is None else penalty_M.to(reward_R.dtype).clone()
    last_M = torch.ones_like(rollout_M, dtype=torch.bool)
    last_M[:-1] = rollout_M[1:] != rollout_M[:-1]
    return reward_M + torch.where(last_M, reward_R[rollout_M], 0.0)


def gae(
    reward_M: Tensor,
    value_M: Tensor,
    rollout_M: Tensor,
    bootstrap_R: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns, both `[M]`.

    `delta_t = r_t + gamma V_(t+1) - V_t`, `A_t = sum_l (gamma lam)^l delta_(t+l)`, returns `A_t + V_t`. After the last
    token of a rollout V is 0, or bootstrap_R where it was cut off by its token budget and would have gone on.

    value_M: the critic's, of the state *before* each token; rollout_M: int >= 0, ascending.

    >>> rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.6, 0.7])
    >>> gae(rewards, values, torch.zeros(3, dtype=torch.long))[0]
    tensor([0.4657, 0.3850, 0.3000])

    Source: Schulman et al. 2016, arXiv 1506.02438, equation 16.
    """
    if not len(reward_M):
        return reward_M, value_M
    place_M, num_rollouts = _places(rollout_M), int(rollout_M.max()) + 1
    shape = (num_rollouts, int(place_M.max()) + 1)
    reward_RL, value_RL = value_M.new_zeros(shape), value_M.new_zeros(shape)
    present_RL = torch.zeros(shape, dtype=torch.bool, device=value_M.device)
    reward_RL[rollout_M, place_M] = reward_M.to(value_M.dtype)
    value_RL[rollout_M, place_M] = value_M
    present_RL[rollout_M, place_M] = True
    next_value_R = value_M.new_zeros(num_rollouts)
    if bootstrap_R is not None:
        next_value_R = bootstrap_R[:num_rollouts].to(value_M.dtype)
    advantage_R = value_M.new_zeros(num_rollouts)
    advantage_RL = value_M.new_zeros(shape)
    for place in reversed(range(shape[1])):
        here_R = present_RL[:, place]
        delta_R = reward_RL[:, place] + gamma * next_value_R - value_RL[:, place]
        advantage_R = torch.where(here_R, delta_R + gamma * lam * advantage_R, advantage_R)
        next_value_R = torch.where(here_R, value_RL[:, place], next_value_R)
        advantage_RL[:, place] = advantage_R
    advantage_M = advantage_RL[rollout_M, place_M]
    return advantage_M, advantage_M + value_M


def rewards_to_go(reward_M: Tensor, rollout_M: Tensor) -> Tensor:
    """The sum of a rollout's rewards from each token on: `gae` without values, with gamma = lam = 1."""
    return gae(reward_M, torch.zeros_like(reward_M), rollout_M, gamma=1.0, lam=1.0)[0]


def whiten(advantage_M: Tensor, data_M: Tensor, epsilon: float = 1e-8) -> Tensor:
    """`(A - mean) / (std + epsilon)` over the tokens that are data; std of the sample (ddof 1); 0 elsewhere.

    Equal advantages say nothing: they give exactly 0, not rounding noise divided by epsilon.

    Source: PPO practice; over the batch instead of a group: Hu et al. 2025, REINFORCE++, arXiv 2501.03262.
    """
    kept = advantage_M[data_M]
    if len(kept) < 2 or kept.min() == kept.max():
        return torch.zeros_like(advantage_M)
    return torch.where(data_M, (advantage_M - kept.mean()) / (kept.std() + epsilon), 0.0)


def overlong_penalty(num_tokens_R: Tensor, budget_tokens: int, cache_share: float) -> Tensor:
    """0 up to `budget - cache`, then linear down to -1 at the budget; -1 beyond. float64.

    >>> overlong_penalty(torch.tensor([16384, 18432, 20480, 20481]), budget_tokens=20480, cache_share=0.2)
    tensor([ 0.0000, -0.5000, -1.0000, -1.0000], dtype=torch.float64)

    Source: Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.4, equation 13.
    """
    cache_tokens = cache_share * budget_tokens
    return ((budget_tokens - cache_tokens - num_tokens_R.double()) / cache_tokens).clamp(-1, 0)


def _places(rollout_M: Tensor) -> Tensor:
    """The number of each token within its rollout, among the tokens given."""
    counts_R = torch.bincount(rollout_M)
    starts_R = counts_R.cumsum(0) - counts_R
    return torch.arange(len(rollout_M), device=rollout_M.device) - starts_R[rollout_M]


@dataclass(frozen=True)
class _Groups:
    """Statistics of each rollout's group over its scored members, in float64."""

    centred_R: Tensor
    std_R: Tensor
    num_R: Tensor
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
    return _Groups(centred_R, std_G[index_R], num_G[index_R], scored_R, lone_R, equal_R, dtype)


def _extreme(reward_R: Tensor, scored_R: Tensor, index_R: Tensor, num_groups: int, which: str) -> Tensor:
    out_of_the_way = -torch.inf if which == "amax" else torch.inf
    value_R = torch.where(scored_R, reward_R.double(), out_of_the_way)
    return value_R.new_full((num_groups,), out_of_the_way).scatter_reduce(0, index_R, value_R, which)
