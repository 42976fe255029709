"""What the trainer makes of canaries: the mismatch between engine and trainer under one version, which is numerics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.objectives.weights import MAX_LOG_RATIO, k3_of
from headway.prepare.pack import Packing, pack
from headway.stages import Trainer
from headway.types import Rollout


def canary_metrics(
    trainer: Trainer, canaries: Sequence[Rollout], *, version: int, micro_batch_tokens: int
) -> dict[str, float]:
    """Figures of the canaries that were sampled wholly under `version`, the trainer's; none where there are none.

    `canary_tokens`; `canary_kl_k1` and `canary_kl_k3`, their means of log mu - log pi and of w - 1 - log w with
    w = pi / mu; `canary_max_abs_log_ratio`; `canary_unequal_tokens`, whose two log-probs differ in any bit.
    Source: Schulman 2020, "Approximating KL Divergence".
    """
    fresh = [rollout for rollout in canaries if rollout.tokens and set(rollout.versions) == {version}]
    if not fresh:
        return {}
    (packs,) = pack(fresh, list(range(len(fresh))), list(range(len(fresh))), Packing(micro_batch_tokens))
    behaviour_M = torch.tensor([logprob for rollout in fresh for logprob in _of_trained(rollout)], dtype=torch.float64)
    log_ratio_M = torch.cat([trainer.forward(one.rows).logp_N.double() for one in packs]) - behaviour_M
    return {
        "canary_tokens": float(len(log_ratio_M)),
        "canary_kl_k1": 0.0 - log_ratio_M.mean().item(),
        "canary_kl_k3": k3_of(log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).mean().item(),
        "canary_max_abs_log_ratio": log_ratio_M.abs().max().item(),
        "canary_unequal_tokens": float((log_ratio_M != 0).sum()),
    }


def _of_trained(rollout: Rollout) -> list[float]:
    return [logprob for logprob, trained in zip(rollout.logprobs, rollout.mask, strict=True) if trained]
