"""From hidden states to effective log-probs: the only place where the policy's distribution is computed.

Engine, trainer, evaluation and metrics all call this, so temperature, head precision and the architecture's own
logit transform can't be applied on one side and forgotten on the other.

Axes: N rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 24
"""Logits that exist at one time (64 MiB in float32)."""


@dataclass(frozen=True)
class Head:
    """The LM head with its architecture's logit transform: softcap(scale * (W h + b)).

    `weight_VD` is the model's own parameter, never a copy, so an update in place is seen at once.
    """

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @staticmethod
    def of(model) -> Head:
        """The head of a Hugging Face causal LM. Transforms are read off its configuration: `logit_scale` (Cohere),
        `logits_scaling` (Granite), `final_logit_softcapping` (Gemma); `policy.load_policy` compares the result with the
        model's own forward."""
        head, config = model.get_output_embeddings(), model.config
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        return Head(head.weight, getattr(head, "bias", None), scale, getattr(config, "final_logit_softcapping", None))

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, V] in float32, whatever the dtype of the hidden states: bf16 logits near 20 are 0.125 apart."""
        with torch.autocast(hidden_ND.device.type, enabled=False):
            bias_V = None if self.bias_V is None else self.bias_V.float()
            logits_NV = torch.nn.functional.linear(hidden_ND.float(), self.weight_VD.float(), bias_V)
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        return logits_NV


def logprobs(head: Head, hidden_ND: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs of the whole vocabulary [N, V] at `temperature` > 0."""
    return torch.log_softmax(head.logits(hidden_ND) / temperature, dim=-1)


def token_logprobs(
    head: Head, hidden_ND: torch.Tensor, targets_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each row's target and the entropy of its distribution (without gradient), both [N] in float32.

    Rows are taken in chunks, and a chunk's logits are computed again in the backward pass, so the logits of all rows
    never exist at once.
    """
    rows = max(1, CHUNK_ELEMENTS // head.weight_VD.shape[0])
    parts = [
        _chunk(head, hidden_ND[first : first + rows], targets_N[first : first + rows], temperature)
        for first in range(0, len(targets_N), rows)
    ]
    if not parts:
        empty_N = hidden_ND.new_zeros(0, dtype=torch.float32)
        return empty_N, empty_N
    logp, entropy = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropy)


def _chunk(head: Head, hidden_ND: torch.Tensor, targets_N: torch.Tensor, temperature: float):
    def compute(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        now = Head(weight_VD, head.bias_V, head.scale, head.softcap)
        logp_NV = logprobs(now, hidden_ND, temperature)
        detached_NV = logp_NV.detach()
        entropy_N = -(detached_NV.exp() * detached_NV).nan_to_num(0.0).sum(-1)
        return logp_NV.gather(-1, targets_N[:, None])[:, 0], entropy_N

    if not torch.is_grad_enabled():
        return compute(hidden_ND, head.weight_VD)
    return checkpoint(compute, hidden_ND, head.weight_VD, use_reentrant=False, preserve_rng_state=False)


def sample(
    head: Head, hidden_ND: torch.Tensor, temperature_N: torch.Tensor, uniform_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row and its log-prob under the distribution it was drawn from: ids [N], log-probs [N].

    uniform_N: float64 in [0, 1), one per row; the token is where it falls in the cumulative distribution.
    Temperature 0 takes the most likely token, whose log-prob is then 0. Logits that are nan give log-prob nan.
    """
    greedy_N = temperature_N == 0
    divisor_N1 = torch.where(greedy_N, 1.0, temperature_N)[:, None]
    logp_NV = torch.log_softmax(head.logits(hidden_ND) / divisor_N1, dim=-1)
    cumulative_NV = logp_NV.double().exp_().cumsum_(-1)
    threshold_N1 = uniform_N[:, None] * cumulative_NV[:, -1:]
    drawn_N = torch.searchsorted(cumulative_NV, threshold_N1, right=True)[:, 0].clamp_(max=logp_NV.shape[1] - 1)
    tokens_N = torch.where(greedy_N, logp_NV.argmax(-1), drawn_N)
    chosen_N = logp_NV.gather(-1, tokens_N[:, None])[:, 0]
    return tokens_N, torch.where(greedy_N & ~chosen_N.isnan(), 0.0, chosen_N)
