"""Random batches, the way from their rewards to a loss, and every objective to try them on.

Axes: R rollouts of a batch; N its tokens, those that others wrote (masked) among them; M the trained ones of N. All is
float64, so that what ought to be equal is equal to the last few bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from headway.objectives import compose
from headway.objectives.compose import Selection, TokenAux, TokenCredit
from headway.objectives.corrections import CORRECTIONS
from headway.objectives.named import PRESETS, objective
from headway.objectives.parts import KL_ESTIMATORS, Objective, PolicyRatio, Ratio, Term
from headway.objectives.tokens import Tokens

BUDGET_TOKENS = 6
LENGTH = 8
MAX_ROLLOUTS = 16
POLICIES = ("current_N", "proximal_N", "behaviour_N", "reference_N", "value_N", "new_value_N")


# ---- every objective


def preset(name: str, **overrides: Any) -> Objective:
    """A named objective; those that divide by a constant divide by `LENGTH`."""
    chosen = objective(name, **overrides)
    divides = any(term.reduction == "constant" for term in chosen.terms)
    return replace(chosen, length=LENGTH) if divides and chosen.length is None else chosen


def with_loss(loss: Any) -> Objective:
    """REINFORCE with another loss per token: for parts that no preset has."""
    return replace(preset("reinforce"), terms=(Term(loss=loss),))


def _subjects() -> dict[str, Objective]:
    subjects = {name: preset(name) for name in PRESETS}
    for written in CORRECTIONS:
        subjects[f"grpo + {written}"] = preset("grpo", kl_coefficient=0, corrections=[written])
        subjects[f"reinforce + {written}"] = preset("reinforce", corrections=[written])
    for estimator in KL_ESTIMATORS:
        subjects[f"rloo, {estimator}"] = preset("rloo", kl_coefficient=0.5, kl_estimator=estimator)
    for level in ("token", "sequence", "geometric", "geometric_token"):
        subjects[f"policy ratio, {level}"] = with_loss(PolicyRatio(ratio=Ratio(level=level)))
    return subjects | {
        "dapo, dual clip": preset("dapo", dual_clip=3.0),
        "dapo, truncated out": preset("dapo", filters=("zero_variance", "truncated"), overlong_share=0.5),
        "grpo at behaviour": preset("grpo", anchor="behaviour"),
        "decoupled_ppo, interpolated": preset("decoupled_ppo", proximal="interpolated"),
        "olmo3, self-normalised": preset("olmo3", self_normalise=True),
        "glm5_async, self-normalised": preset("glm5_async", self_normalise=True),
        "olmo3, both": preset("olmo3", self_normalise=True, proximal="interpolated"),
        "grpo with a critic": preset("grpo", advantage="gae", gamma=0.9, lam=0.8, reward_kl=0.1),
    }


SUBJECTS = _subjects()
"""Every named objective, every correction on a clipped loss and on a score function, and the parts no preset has."""


# ---- batches


@dataclass(frozen=True)
class Batch:
    """What sampling, scoring and the forward passes leave. outcome_R: nan where unscored. new_value_N: the critic's."""

    outcome_R: Tensor
    group_R: Tensor
    truncated_R: Tensor
    num_tokens_R: Tensor
    bootstrap_R: Tensor
    mask_N: Tensor
    rollout_N: Tensor
    lag_N: Tensor
    current_N: Tensor
    proximal_N: Tensor
    behaviour_N: Tensor
    reference_N: Tensor
    value_N: Tensor
    new_value_N: Tensor

    @property
    def num_rollouts(self) -> int:
        return len(self.group_R)


def random_batch(
    lengths: Sequence[int], group_R: Tensor, seed: int, share_masked: float = 0.3, noise: float = 0.5
) -> Batch:
    """Rewards in quarters (groups with equal ones among them), a fifth of them missing; a third cut off."""
    generator = torch.Generator().manual_seed(seed)
    num_rollouts, num_tokens = len(lengths), sum(lengths)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def chance(size: int, share: float) -> Tensor:
        return torch.rand(size, generator=generator) < share

    outcome_R = torch.randint(0, 4, (num_rollouts,), generator=generator).double() / 4
    current_N = -normal(num_tokens).exp()
    return Batch(
        outcome_R=outcome_R.masked_fill(chance(num_rollouts, 0.2), torch.nan),
        group_R=group_R,
        truncated_R=chance(num_rollouts, 0.3),
        num_tokens_R=torch.tensor(lengths, dtype=torch.long),
        bootstrap_R=normal(num_rollouts),
        mask_N=~chance(num_tokens, share_masked),
        rollout_N=torch.repeat_interleave(torch.arange(num_rollouts), torch.tensor(lengths, dtype=torch.long)),
        lag_N=torch.randint(0, 4, (num_tokens,), generator=generator),
        current_N=current_N,
        proximal_N=current_N + noise * normal(num_tokens),
        behaviour_N=current_N + noise * normal(num_tokens),
        reference_N=current_N + noise * normal(num_tokens),
        value_N=normal(num_tokens),
        new_value_N=normal(num_tokens),
    )


@st.composite
def batches(draw: st.DrawFn, noise: float | None = None) -> Batch:
    """Groups of one to four rollouts of zero to five tokens. Some batches have no trained token at all."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=MAX_ROLLOUTS // 4))
    lengths = draw(st.lists(st.integers(0, 5), min_size=sum(sizes), max_size=sum(sizes)))
    share_masked = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    seed = draw(st.integers(0, 2**31))
    group_R = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    chosen_noise = draw(st.sampled_from([1e-4, 0.03, 0.5, 2.0])) if noise is None else noise
    return random_batch(lengths, group_R, seed, share_masked, chosen_noise)


def at_tokens(batch: Batch, index_N: Tensor) -> Batch:
    """The batch with these of its tokens, in this order."""
    of_tokens = {field.name: getattr(batch, field.name) for field in fields(Batch) if field.name.endswith("_N")}
    return replace(batch, **{name: value[index_N] for name, value in of_tokens.items()})


def permuted(batch: Batch, order_R: Tensor) -> tuple[Batch, Tensor]:
    """The batch with its rollouts in another order, and where each of its tokens has come from."""
    places = [torch.nonzero(batch.rollout_N == rollout)[:, 0] for rollout in order_R.tolist()]
    from_N = torch.cat(places) if places else torch.zeros(0, dtype=torch.long)
    of_rollouts = {field.name: getattr(batch, field.name) for field in fields(Batch) if field.name.endswith("_R")}
    moved = replace(batch, **{name: value[order_R] for name, value in of_rollouts.items()})
    new_number_R = torch.empty_like(order_R)
    new_number_R[order_R] = torch.arange(len(order_R))
    moved = at_tokens(moved, from_N)
    return replace(moved, rollout_N=new_number_R[moved.rollout_N]), from_N


# ---- rewards -> tokens -> loss


def selected(description: Objective, batch: Batch) -> Selection:
    return compose.select(description, batch.outcome_R, batch.group_R, batch.truncated_R)


def credited(description: Objective, batch: Batch, selection: Selection) -> TokenCredit:
    """Credit of the trained tokens M."""
    reward_R = compose.shaped_rewards(description, batch.outcome_R, batch.num_tokens_R, BUDGET_TOKENS)
    return compose.credit(
        description,
        selection,
        reward_R,
        batch.group_R,
        batch.rollout_N[batch.mask_N],
        proximal_M=batch.proximal_N[batch.mask_N],
        reference_M=batch.reference_N[batch.mask_N],
        value_M=batch.value_N[batch.mask_N],
        bootstrap_R=torch.where(batch.truncated_R, batch.bootstrap_R, 0.0),
    )


def tokens_of(description: Objective, batch: Batch) -> Tokens:
    """All that the objective is told of a batch. What stands under the mask is what the batch has there."""
    selection = selected(description, batch)
    credit = credited(description, batch, selection)
    weights = compose.token_weights(
        description, batch.mask_N, batch.rollout_N, batch.group_R, selection.usable_R, dtype=torch.float64
    )
    tokens = Tokens(
        mask_N=batch.mask_N,
        rollout_N=batch.rollout_N,
        group_N=batch.group_R[batch.rollout_N],
        behaviour_N=batch.behaviour_N,
        lag_N=batch.lag_N,
        advantage_N=_spread(credit.advantage_M, batch),
        weights=weights,
        proximal_N=batch.proximal_N,
        reference_N=batch.reference_N,
        value_N=batch.value_N,
        return_N=None if credit.return_M is None else _spread(credit.return_M, batch),
    )
    return replace(tokens, normaliser=compose.normaliser(description, [tokens]))


def _spread(item_M: Tensor, batch: Batch) -> Tensor:
    """Values of trained tokens, put where they belong among all; what is under the mask is no value at all."""
    item_N = torch.full_like(batch.current_N, torch.nan)
    item_N[batch.mask_N] = item_M
    return item_N


def take(tokens: Tokens, index_N: Tensor) -> Tokens:
    """A micro-batch: these tokens, in this order."""
    values = {field.name: getattr(tokens, field.name) for field in fields(Tokens)}
    taken = {name: value[index_N] for name, value in values.items() if isinstance(value, Tensor)}
    return replace(tokens, **taken, weights=tuple(weight_N[index_N] for weight_N in tokens.weights))


def data_of(tokens: Tokens) -> Tensor:
    """Bool per token: it counts in some term."""
    return tokens.mask_N & torch.stack([weight_N != 0 for weight_N in tokens.weights]).any(0)


@dataclass(frozen=True)
class Outcome:
    """A loss (the critic's with it), its slope in each token's log-prob and value, and what it did to each token."""

    loss: Tensor
    slope_N: Tensor
    value_slope_N: Tensor
    aux: TokenAux


def outcome(description: Objective, tokens: Tokens, current_N: Tensor, new_value_N: Tensor) -> Outcome:
    logp_N = current_N.clone().requires_grad_()
    value_N = new_value_N.clone().requires_grad_()
    loss, aux = compose.loss(description, logp_N, tokens)
    (slope_N,) = torch.autograd.grad(loss, logp_N)
    if description.value_term is None:
        return Outcome(loss.detach(), slope_N, torch.zeros_like(value_N), aux)
    value_loss = compose.value_loss(description, value_N, tokens)
    (value_slope_N,) = torch.autograd.grad(value_loss, value_N)
    return Outcome((loss + value_loss).detach(), slope_N, value_slope_N, aux)


def outcome_of(description: Objective, batch: Batch) -> Outcome:
    return outcome(description, tokens_of(description, batch), batch.current_N, batch.new_value_N)


def aux_columns(aux: TokenAux) -> dict[str, Tensor]:
    """Everything that is told of each token, by name."""
    plain = {"ratio": aux.ratio_N, "importance": aux.importance_N, "rho": aux.rho_N, "loss": aux.loss_N}
    if aux.interpolation_error_N is not None:
        plain["interpolation_error"] = aux.interpolation_error_N
    return plain | {f"acted/{reason}": acts_N.double() for reason, acts_N in aux.acted.items()}
