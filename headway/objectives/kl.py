"""Estimators of the KL divergence between the policy and a frozen reference, and what their gradients really are.

Axis: N sampled tokens, flat. `d = log ref - log pi`. With samples from pi, `k1 = -d` and `k3 = e^d - 1 - d` have the
mean KL(pi, ref), `k2 = d^2 / 2` has not; differentiated as a loss, per sample, they give other things than their values
suggest:

| estimator | mean of its value | mean of its gradient | samples from |
|---|---|---|---|
| k1 | KL(pi, ref) | 0: no constraint at all | pi |
| k2 | near it | that of KL(pi, ref) | pi |
| k3 | KL(pi, ref) | that of KL(ref, pi), the other one | pi |
| k3_value_k2_gradient | KL(pi, ref) | that of KL(pi, ref) | pi |
| k1_corrected = w k1 | KL(pi, ref) | that of KL(pi, ref) | mu |
| k2_corrected = sg(w) k2 | near it | that of KL(pi, ref) | mu |
| k3_corrected = w k3 | KL(pi, ref) | that of KL(pi, ref) | mu |

w = pi / mu, with its gradient but for k2. All is said of one token given its prefix; over a whole answer, a loss
per token leaves out how a token changes the distribution of the later prefixes. Taken off the *reward* as k1, the
policy gradient makes up for that: its mean is the gradient of the KL of whole answers.

Source: Schulman 2020, "Approximating KL Divergence"; corrected: DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.objectives.parts import KL_ESTIMATORS, KLEstimator
from headway.objectives.weights import k3_of, log_ratio


def k1(logp_N: Tensor, reference_N: Tensor, mask_N: Tensor) -> Tensor:
    """`log pi - log ref`, clamped to ±20; 0 where masked."""
    return log_ratio(logp_N, reference_N, mask_N)


def k2(logp_N: Tensor, reference_N: Tensor, mask_N: Tensor) -> Tensor:
    """`(log pi - log ref)^2 / 2`; 0 where masked."""
    return 0.5 * log_ratio(logp_N, reference_N, mask_N).square()


def k3(logp_N: Tensor, reference_N: Tensor, mask_N: Tensor) -> Tensor:
    """`e^d - 1 - d`, d = log ref - log pi; 0 where masked.

    >>> k3(torch.tensor([0.0]), torch.tensor([0.5]), torch.tensor([True]))
    tensor([0.1487])
    """
    return k3_of(-log_ratio(logp_N, reference_N, mask_N))


def estimate(
    estimator: KLEstimator, logp_N: Tensor, reference_N: Tensor, mask_N: Tensor, behaviour_N: Tensor | None = None
) -> Tensor:
    """The estimator of that name, per token, with its gradient. behaviour_N: log mu, for the corrected ones."""
    if not KL_ESTIMATORS[estimator].corrected:
        return _plain(estimator, logp_N, reference_N, mask_N)
    assert behaviour_N is not None, f"{estimator} needs behaviour log-probs"
    weight_N = log_ratio(logp_N, behaviour_N, mask_N).exp()
    plain = estimator.removesuffix("_corrected")
    return (weight_N.detach() if plain == "k2" else weight_N) * _plain(plain, logp_N, reference_N, mask_N)


def _plain(estimator: str, logp_N: Tensor, reference_N: Tensor, mask_N: Tensor) -> Tensor:
    match estimator:
        case "k1":
            return k1(logp_N, reference_N, mask_N)
        case "k2":
            return k2(logp_N, reference_N, mask_N)
        case "k3":
            return k3(logp_N, reference_N, mask_N)
        case "k3_value_k2_gradient":
            gradient_N = k2(logp_N, reference_N, mask_N)
            return k3(logp_N, reference_N, mask_N).detach() + gradient_N - gradient_N.detach()
    raise ValueError(f"unknown KL estimator {estimator!r}")


def token_reward(logp_N: Tensor, reference_N: Tensor, mask_N: Tensor, coefficient: float) -> Tensor:
    """`-coefficient * k1`, a constant: what is taken off each token's reward.

    Source: Ouyang et al. 2022, InstructGPT, arXiv 2203.02155, section 3.5, equation 2.
    """
    return -coefficient * torch.where(mask_N, k1(logp_N.detach(), reference_N, mask_N), 0.0)
