"""Per-token losses -> one number. The only place that knows denominators.

Axes: N tokens of the whole batch, flat; R its rollouts; G its groups. A reduction is a weight per token, computed once
over the *global* batch before the first backward, so that

    loss = sum over tokens of loss_N * weight_N

whatever the split into ranks, micro-batches and packing: a micro-batch takes its slice of `weight_N` and sums. A group
that averages its ranks' gradients multiplies its sums by the number of ranks.

One rule for all reductions: what is no data leaves the numerator and the denominator. That is every token with mask 0,
every token of a rollout that is not usable (unscored, filtered), and every rollout or group that has no other tokens: a
fully masked or empty rollout does not count as a rollout. A token that a *correction* silences is still data: it has
its weight, and the correction makes its loss 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_weights(
    reduction: str,
    mask_N: Tensor,
    rollout_N: Tensor,
    group_R: Tensor,
    usable_R: Tensor | None = None,
    length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weights of every token of a whole batch under a named reduction; 0 for what is no data.

    reduction: token_mean, rollout_mean_token_mean, rollout_mean_token_sum, constant, prompt_mean or pair_mean; mask_N:
    bool, True for trained tokens; rollout_N: int in [0, R), whose token it is; group_R: int, any names; usable_R: bool,
    False for unscored and filtered rollouts (default: all are usable); length: for `constant`. Raises ValueError for an
    unknown reduction, or for `constant` without a length.

    >>> token_weights(
    ...     "rollout_mean_token_mean",
    ...     mask_N=torch.tensor([True, True, False, True]),
    ...     rollout_N=torch.tensor([0, 0, 0, 1]),
    ...     group_R=torch.tensor([0, 0]),
    ... )
    tensor([0.2500, 0.2500, 0.0000, 0.5000])
    """
    assert mask_N.shape == rollout_N.shape, f"mask {mask_N.shape} and rollouts {rollout_N.shape} differ in shape"
    data_N = mask_N if usable_R is None else mask_N & usable_R[rollout_N]
    group_N = torch.unique(group_R, return_inverse=True)[1][rollout_N]
    match reduction:
        case "token_mean":
            weight_N = token_mean(data_N)
        case "rollout_mean_token_mean":
            weight_N = rollout_mean_token_mean(data_N, rollout_N)
        case "rollout_mean_token_sum":
            weight_N = rollout_mean_token_sum(data_N, rollout_N)
        case "constant":
            weight_N = constant(data_N, rollout_N, length)
        case "prompt_mean":
            weight_N = prompt_mean(data_N, group_N)
        case "pair_mean":
            weight_N = pair_mean(data_N, group_N)
        case _:
            raise ValueError(f"unknown reduction {reduction!r}")
    return weight_N.to(dtype)


def weighted_sum(loss_N: Tensor, weight_N: Tensor) -> Tensor:
    """`sum(loss_N * weight_N)`: the loss of a batch, or a micro-batch's part of it. A scalar.

    loss_N must be finite where its weight is 0 (see `weights.log_ratio`): masking here would come too late for the
    backward pass.
    """
    return (loss_N * weight_N).sum()


def token_mean(data_N: Tensor) -> Tensor:
    """`1 / num_tokens`: every trained token of the batch counts the same. Float64.

    Masked tokens, empty and unscored rollouts: in neither numerator nor denominator.

    Source: Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.3.
    """
    return data_N.double() / data_N.sum().clamp(min=1)


def rollout_mean_token_mean(data_N: Tensor, rollout_N: Tensor) -> Tensor:
    """`1 / (num_rollouts * tokens of its rollout)`: mean over rollouts of the mean over their tokens. Float64.

    Masked tokens don't count towards their rollout's length; a rollout that is empty, fully masked or unscored is not
    among the num_rollouts.

    Source: Shao et al. 2024, GRPO in DeepSeekMath, arXiv 2402.03300, section 4.1, equation 3.
    """
    return _mean_of_means(data_N, rollout_N)


def rollout_mean_token_sum(data_N: Tensor, rollout_N: Tensor) -> Tensor:
    """`1 / num_rollouts`: mean over rollouts of the sum over their tokens; the policy gradient itself. Float64.

    A rollout that is empty, fully masked or unscored is not among the num_rollouts.

    Source: Zheng et al. 2025, MiniRL, arXiv 2512.01374.
    """
    return data_N.double() / max(_num_present(data_N, rollout_N), 1)


def constant(data_N: Tensor, rollout_N: Tensor, length: int | None) -> Tensor:
    """`1 / (num_rollouts * length)`: the sum over all tokens by a constant that no answer's length changes. Float64.

    length: in tokens, usually the token budget of a rollout. A rollout that is empty, fully masked or unscored is not
    among the num_rollouts; masked tokens leave `length` as it is. Raises ValueError for a missing length.

    Source: Liu et al. 2025, Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    if length is None or length < 1:
        raise ValueError(f"the reduction constant needs a length of at least 1, as in length=1024 (got {length})")
    return rollout_mean_token_sum(data_N, rollout_N) / length


def prompt_mean(data_N: Tensor, group_N: Tensor) -> Tensor:
    """`1 / (num_groups * tokens of its group)`: mean over prompts of the mean over the tokens of their group. Float64.

    group_N: int >= 0. Masked tokens and those of unscored rollouts don't count towards their group's length; a group
    without any other token is not among the num_groups.

    Source: Khatri et al. 2025, ScaleRL, arXiv 2510.13786 (prompt-level averaging).
    """
    return _mean_of_means(data_N, group_N)


def pair_mean(data_N: Tensor, group_N: Tensor) -> Tensor:
    """`1 / num_pairs` on every token of a pair: mean over the groups that hold one. Float64.

    Only the two rollouts of a pair are data. A pair whose answers are both empty or masked is not among the num_pairs;
    masked tokens leave a pair's log-prob ratio, and no denominator.

    Source: Rafailov et al. 2023, DPO, arXiv 2305.18290, equation 7.
    """
    return data_N.double() / max(_num_present(data_N, group_N), 1)


def _mean_of_means(data_N: Tensor, bucket_N: Tensor) -> Tensor:
    if bucket_N.numel() == 0:
        return data_N.double()
    tokens_in_bucket_N = torch.bincount(bucket_N[data_N], minlength=int(bucket_N.max()) + 1)[bucket_N]
    return data_N.double() / (tokens_in_bucket_N.clamp(min=1) * max(_num_present(data_N, bucket_N), 1))


def _num_present(data_N: Tensor, bucket_N: Tensor) -> int:
    return len(torch.unique(bucket_N[data_N]))
