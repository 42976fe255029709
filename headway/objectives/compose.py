"""A description of an objective -> its functions.

Axes: N tokens of a batch or micro-batch, flat; M all trained tokens of a batch; R its rollouts. A train step calls, in
this order:

    select, shaped_rewards   once for the batch: which rollouts are data, and what they earned
    credit                   once for the batch: advantages (and returns) of its tokens
    token_weights            once per optimizer step, for each term: the denominators are global
    normaliser               once per optimizer step, if weights are self-normalised
    loss, value_loss         once for each micro-batch, on its slices; the sum over micro-batches is the loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headway.objectives import advantages as _advantages
from headway.objectives import kl, reduce, surrogates, weights
from headway.objectives.advantages import Advantages
from headway.objectives.parts import (
    Clamped,
    Clipped,
    ClippedValue,
    Objective,
    PolicyRatio,
    Preference,
    Ratio,
    ReferenceKL,
    ScoreFunction,
    SquaredLogRatio,
    Term,
    Weight,
)
from headway.objectives.tokens import Tokens

BASELINES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Advantages]] = {
    "group_mean": _advantages.group_mean,
    "group_mean_std": _advantages.group_mean_std,
    "leave_one_out": _advantages.leave_one_out,
    "group_mean_batch_std": _advantages.group_mean_batch_std,
    "batch_mean": _advantages.batch_mean,
    "reward": _advantages.reward,
    "gae": _advantages.reward,
    "preference": _advantages.preference,
}
"""Name of an advantage -> its function of a batch's rewards. `reward` and `gae` go on from there token by token."""


# ---- once for the batch


@dataclass(frozen=True)
class Selection:
    """Which rollouts of a batch are what.

    usable_R: they are data, and make the denominators; baseline_R: their rewards count in baselines (a rollout that was
    cut off may count there and yet not be trained). dropped: reason -> rollouts that are no data for it.
    """

    usable_R: Tensor
    baseline_R: Tensor
    dropped: Mapping[str, int]


def select(objective: Objective, outcome_R: Tensor, group_R: Tensor, truncated_R: Tensor) -> Selection:
    """Apply the objective's filters. Groups are compared by their *outcome*, before any shaping.

    outcome_R: float, nan where unscored; group_R: int; truncated_R: bool, cut off before their own end.
    """
    compared = BASELINES[objective.advantage.name](outcome_R, group_R, None)
    usable_R, dropped = compared.usable_R, {}

    def drop(reason: str, dropped_R: Tensor) -> Tensor:
        if number := int((usable_R & dropped_R).sum()):
            dropped[reason] = number
        return usable_R & ~dropped_R

    if number := int((~compared.scored_R).sum()):
        dropped["unscored"] = number
    if number := int(compared.lone_R.sum()):
        dropped["lone"] = number
    if objective.advantage.name == "preference":
        usable_R = drop("no_preference", compared.advantage_R == 0)
    if "zero_variance" in objective.filters:
        usable_R = drop("zero_variance", compared.equal_R)
    if "truncated" in objective.filters:
        usable_R = drop("truncated", truncated_R)
    return Selection(usable_R, compared.scored_R, dropped)


def shaped_rewards(objective: Objective, reward_R: Tensor, num_tokens_R: Tensor, budget_tokens: int) -> Tensor:
    """Rewards with what the objective adds for length. nan stays nan."""
    if objective.overlong is None:
        return reward_R
    penalty_R = _advantages.overlong_penalty(num_tokens_R, budget_tokens, objective.overlong.cache_share)
    return reward_R + penalty_R.to(reward_R.dtype)


@dataclass(frozen=True)
class TokenCredit:
    """Advantages of a batch's trained tokens M, and what their values should have been (None without a critic)."""

    advantage_M: Tensor
    return_M: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def credit(
    objective: Objective,
    selection: Selection,
    reward_R: Tensor,
    group_R: Tensor,
    rollout_M: Tensor,
    *,
    proximal_M: Tensor | None = None,
    reference_M: Tensor | None = None,
    value_M: Tensor | None = None,
    bootstrap_R: Tensor | None = None,
) -> TokenCredit:
    """Rewards -> advantages of tokens.

    reward_R: shaped, float, nan where unscored; rollout_M: int, ascending, whose token each is; proximal_M and
    reference_M: log-probs, for a KL in the reward; value_M, bootstrap_R: of the critic, in the units of the reward.
    """
    baseline_R, data_M = selection.baseline_R, selection.usable_R[rollout_M]
    penalty_M, metrics = None, {}
    if objective.reward_kl > 0:
        penalty_M, metrics = _kl_penalty(objective.reward_kl, data_M, proximal_M, reference_M, reward_R.dtype)
    earned_R = torch.where(baseline_R, reward_R, 0.0)
    return_M = None
    match objective.advantage.name:
        case "gae":
            assert value_M is not None, "gae needs values"
            reward_M = _advantages.token_rewards(earned_R, rollout_M, penalty_M)
            advantage = objective.advantage
            advantage_M, return_M = _advantages.gae(
                reward_M, value_M.to(reward_M.dtype), rollout_M, bootstrap_R, advantage.gamma, advantage.lam
            )
        case "reward":
            reward_M = _advantages.token_rewards(earned_R, rollout_M, penalty_M)
            advantage_M = _advantages.rewards_to_go(reward_M, rollout_M)
        case name:
            if penalty_M is not None:
                reward_R = reward_R + torch.zeros_like(reward_R).index_add(0, rollout_M, penalty_M)
            advantage_M = BASELINES[name](reward_R, group_R, baseline_R).advantage_R[rollout_M]
    if objective.advantage.whiten:
        advantage_M = _advantages.whiten(advantage_M, data_M)
    if penalty_M is not None:
        advantage_M = advantage_M + 0.0 * penalty_M  # a nan of the KL passed for a missing reward till here
    return TokenCredit(advantage_M, return_M, metrics)


def _kl_penalty(
    coefficient: float, data_M: Tensor, proximal_M: Tensor | None, reference_M: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, dict[str, float]]:
    """What a KL in the reward takes off each token's reward, and the mean of that KL over the tokens that are data."""
    assert proximal_M is not None, "a KL in the reward needs proximal log-probs"
    assert reference_M is not None, "a KL in the reward needs reference log-probs"
    penalty_M = kl.token_reward(proximal_M, reference_M, torch.ones_like(data_M), coefficient).to(dtype)
    own = penalty_M[data_M]
    return penalty_M, {"reward_kl": -float(own.mean()) / coefficient if len(own) else 0.0}


def token_weights(
    objective: Objective,
    mask_N: Tensor,
    rollout_N: Tensor,
    group_R: Tensor,
    usable_R: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """The reduction of each of the objective's terms over all tokens of an optimizer step: see `reduce.token_weights`.

    usable_R: `Selection.usable_R`.
    """
    return tuple(
        reduce.token_weights(term.reduction, mask_N, rollout_N, group_R, usable_R, objective.length, dtype)
        for term in objective.terms
    )


def normaliser(objective: Objective, parts: Sequence[Tokens]) -> tuple[float, ...] | None:
    """For each term the mean weight over an optimizer step; None if not asked for.

    Over tokens, as the term's reduction counts them; where a weight is of whole answers, over answers: a mean over
    tokens would count long ones more, and miss by E_pi[len] / E_mu[len] however large the batch. The zeros of a mask
    are part of the mean, so what is left counts for what was cut.

    parts: all micro-batches of the step, with their proximal log-probs. A mean of 0 (all masked) gives 1.
    """
    if not objective.self_normalise:
        return None
    interpolated = objective.proximal == "interpolated"
    return tuple(_mean_weight(term, place, parts, interpolated) for place, term in enumerate(objective.terms))


def _mean_weight(term: Term, place: int, parts: Sequence[Tokens], interpolated: bool) -> float:
    total = mean = 0.0
    for tokens in parts:
        assert tokens.proximal_N is not None, "self-normalisation needs proximal log-probs"
        weight_N = tokens.weights[place]
        logs = _LogProbs.of(tokens.proximal_N, tokens, tokens.mask_N & (weight_N != 0), interpolated)
        share_N = weights.rollout_share(logs.kept_N, tokens.rollout_N) if _of_whole_answers(term) else weight_N
        mean += float((_importance(term, logs, tokens.advantage_N, {}) * share_N).sum())
        total += float(share_N.sum())
    return 1.0 if mean == 0 else mean / total


def _of_whole_answers(term: Term) -> bool:
    return any(weight.ratio.level != "token" for weight in term.weights if not weight.binary)


# ---- once for each micro-batch


@dataclass(frozen=True)
class TokenAux:
    """What the loss did to each token; detached, and neutral (ratio 1, False, loss 0) where masked.

    ratio_N: w = pi_prox / mu; importance_N: the product of the first policy term's weights; rho_N: the ratio that
    carries its gradient. acted: reason -> where a weight was cut or masked, or a clip stopped the gradient. loss_N: the
    loss before the reduction, all terms of token or rollout level together. interpolation_error_N: log of the guessed
    over the current policy, where the proximal policy is interpolated.
    """

    ratio_N: Tensor
    importance_N: Tensor
    rho_N: Tensor
    acted: Mapping[str, Tensor]
    loss_N: Tensor
    interpolation_error_N: Tensor | None = None


def loss(objective: Objective, logp_N: Tensor, tokens: Tokens) -> tuple[Tensor, TokenAux]:
    """`sum over terms of coefficient * sum_N reduction * weights * loss`: these tokens' part of the loss. A scalar.

    logp_N: current log-probs, with gradient. The critic's term is left out: see `value_loss`. What stands under the
    mask, or has weight 0 in a reduction, changes nothing, be it inf or nan.
    """
    data_N = tokens.mask_N & torch.stack(tokens.weights).ne(0).any(0)
    logs_of_batch = _LogProbs.of(logp_N, tokens, data_N, objective.proximal == "interpolated")
    total = logp_N.new_zeros(())
    acted: dict[str, Tensor] = {}
    loss_N = torch.zeros_like(logs_of_batch.current_N)
    importance_N = rho_N = None
    for place, term in enumerate(objective.terms):
        if isinstance(term.loss, ClippedValue):
            continue
        reduction_N = tokens.weights[place]
        kept_N = tokens.mask_N & (reduction_N != 0)
        logs = logs_of_batch.on(kept_N)
        advantage_N = torch.where(kept_N, tokens.advantage_N, 0.0)
        if isinstance(term.loss, Preference):
            total = total + term.coefficient * _preference(term.loss, logs, advantage_N, reduction_N)
            continue
        weight_N = _importance(term, logs, advantage_N, acted)
        if tokens.normaliser is not None:
            weight_N = torch.where(kept_N, weight_N / tokens.normaliser[place], 1.0)
        own_N, own_rho_N = _token_loss(term, logs, advantage_N, acted)
        term_N = weight_N * own_N
        total = total + term.coefficient * reduce.weighted_sum(term_N, reduction_N)
        loss_N = loss_N + term.coefficient * term_N.detach()
        if term.uses_advantage and importance_N is None:
            importance_N, rho_N = weight_N, own_rho_N
    neutral_N = torch.ones_like(loss_N)
    return total, TokenAux(
        ratio_N=weights.log_ratio(logs_of_batch.proximal_N, tokens.behaviour_N, data_N).exp(),
        importance_N=neutral_N if importance_N is None else importance_N,
        rho_N=neutral_N if rho_N is None else rho_N.detach(),
        acted=acted,
        loss_N=loss_N,
        interpolation_error_N=logs_of_batch.interpolation_error_N if objective.proximal == "interpolated" else None,
    )


def value_loss(objective: Objective, value_N: Tensor, tokens: Tokens) -> Tensor:
    """The critic's term, for its values with gradient. A scalar."""
    term = objective.value_term
    assert term is not None, "this objective has no value loss"
    assert isinstance(term.loss, ClippedValue)
    assert tokens.value_N is not None, "a value loss needs the values before the train step"
    assert tokens.return_N is not None, "a value loss needs returns"
    reduction_N = tokens.weights[objective.terms.index(term)]
    kept_N = tokens.mask_N & (reduction_N != 0)
    now_N, old_N, return_N = (torch.where(kept_N, item, 0.0) for item in (value_N, tokens.value_N, tokens.return_N))
    loss_N = surrogates.clipped_value(now_N, old_N, return_N, term.loss.value_clip)
    return term.coefficient * reduce.weighted_sum(loss_N, reduction_N)


# ---- parts


@dataclass(frozen=True)
class _LogProbs:
    """Log-probs of every policy for tokens N; current_N has the gradient, kept_N says which tokens count."""

    current_N: Tensor
    proximal_N: Tensor
    behaviour_N: Tensor
    reference_N: Tensor | None
    rollout_N: Tensor
    group_N: Tensor
    kept_N: Tensor

    @staticmethod
    def of(logp_N: Tensor, tokens: Tokens, kept_N: Tensor, interpolated: bool = False) -> _LogProbs:
        proximal_N = logp_N.detach() if tokens.proximal_N is None else tokens.proximal_N.detach()
        if interpolated:
            proximal_N = weights.interpolated_proximal(logp_N, tokens.behaviour_N, tokens.lag_N)
        return _LogProbs(
            logp_N, proximal_N, tokens.behaviour_N, tokens.reference_N, tokens.rollout_N, tokens.group_N, kept_N
        )

    def on(self, kept_N: Tensor) -> _LogProbs:
        return replace(self, kept_N=kept_N)

    def pair(self, ratio: Ratio) -> tuple[Tensor, Tensor]:
        """The log-probs of a ratio's new and old policy."""
        new_N = self.current_N if ratio.new == "current" else self.proximal_N
        return new_N, self.proximal_N if ratio.old == "proximal" else self.behaviour_N

    def log_ratio(self, ratio: Ratio) -> Tensor:
        return weights.log_ratio_at(ratio.level, *self.pair(ratio), self.kept_N, self.rollout_N)

    def ratio(self, ratio: Ratio) -> Tensor:
        return self.log_ratio(ratio).exp()

    @property
    def interpolation_error_N(self) -> Tensor:
        return weights.log_ratio(self.proximal_N, self.current_N.detach(), self.kept_N)


def _importance(term: Term, logs: _LogProbs, advantage_N: Tensor, acted: dict[str, Tensor]) -> Tensor:
    """The product of a term's weights, per token; notes in `acted` where each of them acted."""
    product_N = torch.ones_like(logs.current_N.detach())
    for weight in term.weights:
        factor_N, acts_N = _factor(weight, logs, advantage_N)
        # To a comparison a nan is outside, or not; a token is not left out, nor kept, for that: the loss becomes nan.
        factor_N = torch.where(logs.log_ratio(weight.ratio).isnan(), torch.nan, factor_N)
        product_N = product_N * torch.where(logs.kept_N, factor_N, 1.0)
        _note(acted, weight.name, acts_N & logs.kept_N)
    return product_N


def _note(acted: dict[str, Tensor], reason: str, acts_N: Tensor) -> None:
    acted[reason] = acted[reason] | acts_N if reason in acted else acts_N


def _factor(weight: Weight, logs: _LogProbs, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
    """A weight's factor of each token, and where it changed anything: see `parts.Weight`."""
    low, high = weight.low, weight.high
    new_N, old_N = logs.pair(weight.ratio)
    match weight.act:
        case "keep_k3":
            kept_N = weights.keep_k3(new_N, old_N, logs.kept_N, logs.rollout_N, high)
        case "veto":
            kept_N = weights.without_veto(new_N, old_N, logs.kept_N, logs.rollout_N, low)
        case "off_policy_mask":
            kept_N = weights.on_policy_enough(new_N, old_N, advantage_N, logs.kept_N, logs.rollout_N, high)
        case _:
            return _factor_of_ratio(weight, logs.ratio(weight.ratio).detach(), advantage_N)
    return kept_N.to(new_N.dtype), ~kept_N


def _factor_of_ratio(weight: Weight, w_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
    low, high = weight.low, weight.high
    outside_N = ~weights.inside(w_N, low, high)
    match weight.act:
        case "truncate":
            return weights.truncated(w_N, high, low), outside_N
        case "mask":
            return weights.masked(w_N, low, high), outside_N
        case "keep":
            return (~outside_N).to(w_N.dtype), outside_N
        case "clip_mask":
            stops_N = surrogates.clip_acts(w_N, advantage_N, 1 - low, high - 1)
            return (~stops_N).to(w_N.dtype), stops_N
    raise ValueError(f"unknown act of a weight {weight.act!r}")


def _token_loss(
    term: Term, logs: _LogProbs, advantage_N: Tensor, acted: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The loss of each token, and the ratio that carries its gradient (None: there is none)."""
    match term.loss:
        case ScoreFunction():
            return surrogates.score_function(logs.current_N, advantage_N, logs.kept_N), None
        case PolicyRatio(ratio=ratio):
            rho_N = logs.ratio(ratio)
            return surrogates.policy_gradient(rho_N, advantage_N), rho_N
        case Clipped() as clip:
            rho_N = logs.ratio(clip.ratio)
            bounds = clip.clip_low, clip.clip_high
            _note(acted, "clip", surrogates.clip_acts(rho_N.detach(), advantage_N, *bounds, clip.dual_clip))
            return surrogates.clipped(rho_N, advantage_N, *bounds, clip.dual_clip), rho_N
        case Clamped() as clip:
            rho_N = logs.ratio(clip.ratio)
            _note(acted, "clip", surrogates.clamp_acts(rho_N.detach(), clip.clip_low, clip.clip_high))
            return surrogates.clamped(rho_N, advantage_N, clip.clip_low, clip.clip_high), rho_N
        case SquaredLogRatio(ratio=ratio):
            return surrogates.squared_log_ratio(logs.log_ratio(ratio)), None
        case ReferenceKL(estimator=estimator):
            assert logs.reference_N is not None, "a KL term needs reference log-probs"
            own_N = kl.estimate(estimator, logs.current_N, logs.reference_N, logs.kept_N, logs.behaviour_N)
            return own_N, None
    raise ValueError(f"no loss per token: {term.loss}")


def _preference(own: Preference, logs: _LogProbs, sign_N: Tensor, reduction_N: Tensor) -> Tensor:
    """The loss of whole pairs: sign_N is +1 on the preferred answer's tokens, -1 on the other's."""
    assert logs.reference_N is not None, "a preference loss needs reference log-probs"
    if not len(sign_N):
        return logs.current_N.sum()
    num_groups = int(logs.group_N.max()) + 1
    signed_N = sign_N * weights.log_ratio(logs.current_N, logs.reference_N, logs.kept_N)
    margin_G = signed_N.new_zeros(num_groups).index_add(0, logs.group_N, signed_N)
    weight_G = reduction_N.new_zeros(num_groups).scatter_reduce(0, logs.group_N, reduction_N, "amax")
    return reduce.weighted_sum(surrogates.preference(margin_G, own.beta), weight_G)
