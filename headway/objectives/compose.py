"""A description of an objective -> its functions.

Axes: N tokens of a batch or micro-batch, flat; R rollouts of the whole batch. A train step calls, in this order:

    advantages     once for the batch
    token_weights  once for the batch: the denominators are global
    loss           once for each micro-batch, on its slices; the sum over micro-batches is the loss of the batch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.objectives import advantages as _advantages
from headway.objectives import reduce, surrogates, weights
from headway.objectives.advantages import Advantages
from headway.objectives.named import Objective
from headway.objectives.reduce import TokenWeights

ADVANTAGES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Advantages]] = {
    "group_mean_std": _advantages.group_mean_std,
    "group_mean": _advantages.group_mean,
}


@dataclass(frozen=True)
class TokenAux:
    """What the loss did to each token; detached, and neutral (ratio 1, False, loss 0) where masked.

    ratio_N: w = pi_prox / mu before truncation; importance_N: the weight that was used; rho_N: pi / pi_prox;
    truncated_N: the cap acted; clipped_N: the clip stopped the gradient; loss_N: the loss before the reduction.
    """

    ratio_N: Tensor
    importance_N: Tensor
    rho_N: Tensor
    truncated_N: Tensor
    clipped_N: Tensor
    loss_N: Tensor


def advantages(objective: Objective, reward_R: Tensor, group_R: Tensor, scored_R: Tensor | None = None) -> Advantages:
    """The objective's advantage of every rollout of a batch: see `headway.objectives.advantages`."""
    return ADVANTAGES[objective.advantage](reward_R, group_R, scored_R)


def token_weights(
    objective: Objective,
    mask_N: Tensor,
    rollout_N: Tensor,
    group_R: Tensor,
    usable_R: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> TokenWeights:
    """The objective's reduction over a whole batch: see `reduce.token_weights`. `usable_R` is `Advantages.usable_R`."""
    return reduce.token_weights(objective.reduction, mask_N, rollout_N, group_R, usable_R, objective.length, dtype)


def loss(
    objective: Objective,
    logp_N: Tensor,
    behaviour_N: Tensor,
    proximal_N: Tensor | None,
    advantage_N: Tensor,
    mask_N: Tensor,
    weight_N: Tensor,
) -> tuple[Tensor, TokenAux]:
    """`sum_N weight * min(w, C) * surrogate(rho, A)`: the part of the batch's loss that these tokens make. A scalar.

    logp_N: current log-probs, with gradient; behaviour_N: recorded at sampling; proximal_N: the trainer's before this
    train step, or None where one optimizer step is taken per batch (then `pi_prox = sg(pi)`); advantage_N: of each
    token's rollout; mask_N: bool; weight_N: the slice of `token_weights`. What stands under the mask, or has weight 0,
    changes nothing, be it inf or nan.

    Source: Yao et al. 2025 (w), Schulman et al. 2017, arXiv 1707.06347 (rho), Hilton et al. 2021 (pi_prox apart from
    mu); the formula is equation 1 of Olmo 3, arXiv 2512.13961.
    """
    kept_N = mask_N & (weight_N != 0)
    proximal_N = logp_N.detach() if proximal_N is None else proximal_N
    advantage_N = torch.where(kept_N, advantage_N, 0.0)
    ratio_N = weights.log_ratio(proximal_N.detach(), behaviour_N, kept_N).exp()
    importance_N = WEIGHTS[objective.weight](objective, ratio_N)
    rho_N = weights.log_ratio(logp_N, proximal_N, kept_N).exp()
    surrogate_N, clipped_N = SURROGATES[objective.surrogate](objective, rho_N, advantage_N)
    loss_N = importance_N * surrogate_N
    truncated_N = ratio_N > (objective.weight_cap if objective.weight == "truncated" else torch.inf)
    aux = TokenAux(ratio_N, importance_N, rho_N.detach(), truncated_N, clipped_N, loss_N.detach())
    return reduce.weighted_sum(loss_N, weight_N), aux


def _no_weight(objective: Objective, ratio_N: Tensor) -> Tensor:
    return torch.ones_like(ratio_N)


def _truncated(objective: Objective, ratio_N: Tensor) -> Tensor:
    return weights.truncated(ratio_N, objective.weight_cap)


def _policy_gradient(objective: Objective, rho_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
    return surrogates.policy_gradient(rho_N, advantage_N), torch.zeros_like(rho_N, dtype=torch.bool)


def _clipped(objective: Objective, rho_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
    clip = (objective.clip_low, objective.clip_high, objective.dual_clip)
    clipped_N = surrogates.clip_acts(rho_N.detach(), advantage_N, *clip)
    return surrogates.clipped(rho_N, advantage_N, *clip), clipped_N


WEIGHTS: dict[str, Callable[[Objective, Tensor], Tensor]] = {"none": _no_weight, "truncated": _truncated}
"""Name -> the weight of each token, from its ratio w."""

SURROGATES: dict[str, Callable[[Objective, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "policy_gradient": _policy_gradient,
    "clipped": _clipped,
}
"""Name -> the loss of each token, and where its gradient is stopped."""
