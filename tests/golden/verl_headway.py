"""Headway's own functions on the inputs of `verl.json`.

Where a setting of verl has a name in Headway the objective is made by that name, else from the parts.

Axes: R rollouts of a batch; N its tokens, masked ones among them; M the trained ones of N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp, inf, sqrt
from typing import Any

import torch
from torch import Tensor

from headway.models import distribution
from headway.objectives import advantages, compose, diagnostics, kl, named, reduce, weights
from headway.objectives.corrections import correction
from headway.objectives.parts import MISMATCH, STALENESS, Objective, ScoreFunction, SquaredLogRatio, Term, Weight
from headway.objectives.tokens import Tokens
from tests.golden.verl import Batch, Case, Outputs, batch_of, flattened


@dataclass(frozen=True)
class Conventions:
    """What verl does otherwise. The defaults are Headway's; each is explained in `verl_verdicts.REASONS`."""

    lone_keeps_reward: bool = False
    masked_kl: bool = False
    inverse_bounds: bool = False
    rejected_leave_denominators: bool = False
    empty_rollouts_count: bool = False
    whitens_by_root: bool = False
    count_epsilon: float = 0.0
    sums: bool = False
    max_log_ratio: float = weights.MAX_LOG_RATIO
    k3_limit: float = inf


HEADWAY = Conventions()


def headway(case: Case, conventions: Conventions = HEADWAY) -> Outputs:
    """Headway's outputs under the same names; of the metrics only those that it also has."""
    batch = batch_of(case["inputs"]) if "inputs" in case else Batch(0, {})
    evaluate = EVALUATE.get((case["kind"], case["name"])) or EVALUATE[case["kind"], "*"]
    with log_ratios_clamped_at(conventions.max_log_ratio):
        return {name: value.detach() for name, value in evaluate(case, batch, conventions).items()}


@contextmanager
def log_ratios_clamped_at(bound: float) -> Iterator[None]:
    before = weights.MAX_LOG_RATIO
    weights.MAX_LOG_RATIO = diagnostics.MAX_LOG_RATIO = bound
    try:
        yield
    finally:
        weights.MAX_LOG_RATIO = diagnostics.MAX_LOG_RATIO = before


# ---- rewards and advantages


def kl_in_reward(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    counted_N = torch.ones_like(batch.mask_N) if conventions.masked_kl else batch.mask_N
    rollout_N = batch.rollout_N[counted_N]
    old_N, ref_N = batch.flat("old")[counted_N], batch.flat("ref")[counted_N]
    penalty_N = kl.token_reward(old_N, ref_N, torch.ones_like(rollout_N).bool(), case["settings"]["kl_ratio"])
    reward_N = torch.zeros(len(counted_N), dtype=torch.float64)
    reward_N[counted_N] = advantages.token_rewards(flattened(batch.fields["reward"]), rollout_N, penalty_N)
    return {"rewards": reward_N}


def outcome_objective(case: Case) -> Objective:
    match case["name"]:
        case "grpo" | "grpo_vectorized" if case["settings"]["norm_adv_by_std_in_grpo"]:
            return named.objective("grpo")
        case "grpo" | "grpo_vectorized":
            return named.objective("dr_grpo")
        case "rloo" | "rloo_vectorized":
            return named.objective("rloo", reward_kl=0)
        case "reinforce_plus_plus_baseline":
            return named.objective("reinforce_pp_baseline")
    raise KeyError(case["name"])


def outcome_advantage(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    """One advantage per rollout, on each of its trained tokens."""
    objective, reward_R = outcome_objective(case), flattened(batch.fields["reward"])
    if conventions.lone_keeps_reward:
        return {"advantages": _with_lone_rewards(objective, batch, reward_R)}
    selection = compose.select(objective, reward_R, batch.group_R, torch.zeros(len(reward_R)).bool())
    credit = compose.credit(objective, selection, reward_R, batch.group_R, batch.rollout_M)
    return {"advantages": batch.spread(credit.advantage_M)}


def _with_lone_rewards(objective: Objective, batch: Batch, reward_R: Tensor) -> Tensor:
    """verl: the mean of a group of one is 0, and its std 1 in float32."""
    compared = compose.BASELINES[objective.advantage.name](reward_R, batch.group_R, None)
    scaled_R = reward_R / (torch.tensor(1.0) + 1e-6) if objective.advantage.name == "group_mean_std" else reward_R
    advantage_M = torch.where(compared.lone_R, scaled_R, compared.advantage_R)[batch.rollout_M]
    if objective.advantage.whiten:
        advantage_M = advantages.whiten(advantage_M, torch.ones_like(advantage_M).bool())
    return batch.spread(advantage_M)


def gae(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    gamma, lam = case["settings"]["gamma"], case["settings"]["lam"]
    value_M = batch.trained("old_value")
    reward_M = batch.trained("token_reward")
    advantage_M, return_M = advantages.gae(reward_M, value_M, batch.rollout_M, gamma=gamma, lam=lam)
    return _whitened(batch, advantage_M, return_M, conventions)


def rewards_to_go(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    """The preset has no discount; gae without values and with lam 1 has."""
    reward_M = batch.trained("token_reward")
    nothing_M = torch.zeros_like(reward_M)
    return_M, _ = advantages.gae(reward_M, nothing_M, batch.rollout_M, gamma=case["settings"]["gamma"], lam=1.0)
    return _whitened(batch, return_M, return_M, conventions)


def _whitened(batch: Batch, advantage_M: Tensor, return_M: Tensor, conventions: Conventions) -> Outputs:
    every_M = torch.ones_like(advantage_M).bool()
    white_M = _whitened_by_root(advantage_M) if conventions.whitens_by_root else advantages.whiten(advantage_M, every_M)
    return {"advantages": batch.spread(white_M), "returns": batch.spread(return_M)}


def _whitened_by_root(advantage_M: Tensor) -> Tensor:
    num = len(advantage_M)
    centred_M = advantage_M - advantage_M.sum() / (num + 1e-8)
    variance = centred_M.square().sum() / (num + 1e-8) * num / (num - 1)
    return centred_M / (variance + 1e-8).sqrt()


# ---- statistics and reductions


def whitened_statistic(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    return {"value": advantages.whiten(batch.flat("token_advantage"), batch.mask_N)}


def mean(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    mean_of_tokens = reduction_weights("token_mean", batch, batch.mask_N, {})
    return {"value": reduce.weighted_sum(batch.flat("token_advantage"), mean_of_tokens)}


def entropy(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    logits_NV = flattened(case["settings"]["logits"]).reshape(-1, 3)
    targets_N = torch.zeros(len(logits_NV), dtype=torch.long)
    head, shape = distribution.Head(torch.eye(3)), distribution.Shape()
    _, entropy_N = distribution.token_logprobs(head, logits_NV, targets_N, shape)
    return {"value": entropy_N.double()}


REDUCTIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_mean",
    "seq-mean-token-mean": "rollout_mean_token_mean",
    "seq-mean-token-sum": "rollout_mean_token_sum",
    "seq-mean-token-sum-norm": "constant",
}


def length_of(settings: dict, batch: Batch) -> int | None:
    """verl's default is the width it pads to; Headway has none."""
    if settings["loss_agg_mode"] != "seq-mean-token-sum-norm":
        return None
    return settings.get("loss_scale_factor", batch.width)


def reduction_weights(name: str, batch: Batch, mask_N: Tensor, settings: dict, length: int | None = None) -> Tensor:
    """Weights of the batch's tokens; `settings` may make it one of `dp_size` parts of a larger one.

    Its other rollouts and tokens are only counted, and their losses are not in these sums. Gradients are averaged over
    the parts, so the weights are multiplied by their number.
    """
    num_tokens = int(mask_N.sum())
    num_rollouts = len(torch.unique(batch.rollout_N[mask_N]))
    other_rollouts = settings.get("global_batch_size", num_rollouts) - num_rollouts
    other_tokens = settings.get("batch_num_tokens", num_tokens) - num_tokens
    lengths = [other_tokens - other_rollouts + 1] + [1] * (other_rollouts - 1) if other_rollouts else []
    others_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
    first = len(batch.group_R)
    weight_N = reduce.token_weights(
        name,
        torch.cat([mask_N, torch.ones_like(others_N).bool()]),
        torch.cat([batch.rollout_N, first + others_N]),
        torch.zeros(first + len(lengths), dtype=torch.long),
        length=length,
        dtype=torch.float64,
    )
    return settings.get("dp_size", 1) * weight_N[: len(mask_N)]


def reduced_as_asked(batch: Batch, mask_N: Tensor, settings: dict, conventions: Conventions) -> Tensor:
    """The weights that `loss_agg_mode` stands for."""
    reduction = REDUCTIONS[settings["loss_agg_mode"]]
    weight_N = reduction_weights(reduction, batch, mask_N, settings, length_of(settings, batch))
    if conventions.sums:
        weight_N = weight_N * settings.get("batch_num_tokens", mask_N.sum())
    lengths_N = weights.rollout_sum(mask_N.double(), batch.rollout_N)
    return weight_N * lengths_N / (lengths_N + conventions.count_epsilon) if conventions.count_epsilon else weight_N


def aggregation(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    weight_N = reduced_as_asked(batch, batch.mask_N, case["settings"], conventions)
    return with_gradient(lambda loss_N: reduce.weighted_sum(loss_N, weight_N), batch.flat("loss"))


def with_gradient(function: Callable[[Tensor], Tensor], value_N: Tensor) -> Outputs:
    value_N = value_N.clone().requires_grad_()
    loss = function(value_N)
    (gradient_N,) = torch.autograd.grad(loss, value_N)
    return {"loss": loss, "gradient": gradient_N}


# ---- corrections


def band(written: str | float, symmetric: bool = False) -> tuple[float, float]:
    """`0.5_2.0`, or an upper bound u: then from 0, or from 1/u."""
    if isinstance(written, str) and "_" in written:
        low, high = map(float, written.split("_"))
        return low, high
    return (1 / float(written) if symmetric else 0.0), float(written)


def importance_weights(settings: dict) -> tuple[Weight, ...]:
    """verl's `rollout_is`: one bound truncates, a band masks."""
    level, written = settings["rollout_is"], settings["rollout_is_threshold"]
    low, high = band(written)
    if not isinstance(written, str):
        return correction(f"{'' if level == 'token' else 'sequence_'}tis:{high}")
    if level == "token":
        return correction(f"icepop:{low}:{high}")
    return (replace(correction("sequence_mis")[0], low=low, high=high),)


def rejections(settings: dict, conventions: Conventions) -> tuple[Weight, ...]:
    """verl's `rollout_rs`: one or several statistics with a threshold each."""
    options, written = settings["rollout_rs"].split(","), settings["rollout_rs_threshold"]
    thresholds = written.split(",") if isinstance(written, str) else [written] * len(options)
    return tuple(rejection(*each, conventions) for each in zip(options, thresholds, strict=True))


def rejection(option: str, written: str | float, conventions: Conventions) -> Weight:
    if option == "seq_mean_k3":
        return correction(f"k3_rejection:{written}")[0]
    low, high = band(written, symmetric=True)
    if option == "token_k2":
        spread = sqrt(2 * float(written))
        low, high = exp(-spread), exp(spread)
    elif conventions.inverse_bounds:
        low, high = 1 / high, 1 / low
    if option == "seq_mean_k1":
        return correction(f"geometric_rejection:{low}:{high}")[0]
    ratio = {"token_k1": MISMATCH, "token_k2": MISMATCH, "seq_sum_k1": replace(MISMATCH, level="sequence")}[option]
    return Weight(name=option, ratio=ratio, act="keep", low=low, high=high)


def of_current(weight: Weight) -> Weight:
    """The same against the current policy: verl's bypass mode leaves the proximal policy out."""
    return replace(weight, ratio=replace(weight.ratio, new="current"))


def corrected(objective: Objective, added: tuple[Weight, ...]) -> Objective:
    terms = tuple(
        replace(term, weights=(*term.weights, *added)) if term.uses_advantage else term for term in objective.terms
    )
    return replace(objective, terms=terms)


def tokens_of(batch: Batch, objective: Objective, weight_N: Tensor, advantage: str = "advantage") -> Tokens:
    def field(name: str) -> Tensor:
        return batch.flat(name) if name in batch.fields else torch.zeros(len(batch.mask_N), dtype=torch.float64)

    return Tokens(
        mask_N=batch.mask_N,
        rollout_N=batch.rollout_N,
        group_N=batch.group_R[batch.rollout_N],
        behaviour_N=field("rollout"),
        lag_N=torch.zeros_like(batch.rollout_N),
        advantage_N=field(advantage),
        weights=(weight_N,) * len(objective.terms),
        proximal_N=field("old"),
        value_N=field("old_value"),
        return_N=field("return"),
    )


def importance(batch: Batch, added: tuple[Weight, ...], reduction: str, normalise: bool) -> tuple[Tensor, Outputs]:
    """The weights that a loss is multiplied by, and the metrics that verl has too."""
    objective = corrected(named.objective("reinforce", reduction=reduction, self_normalise=normalise), added)
    tokens = tokens_of(batch, objective, reduction_weights(reduction, batch, batch.mask_N, {}))
    tokens = replace(tokens, normaliser=compose.normaliser(objective, [tokens]))
    assert tokens.proximal_N is not None
    _, aux = compose.loss(objective, tokens.proximal_N, tokens)
    acted_N = torch.stack(list(aux.acted.values())).any(0)
    metrics = {"acted": acted_N[batch.mask_N].double().mean()}
    if tokens.normaliser is not None:
        metrics["factor"] = torch.tensor(tokens.normaliser[0], dtype=torch.float64)
    return torch.where(batch.mask_N, aux.importance_N, 0.0), metrics


def correction_weights(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    settings = case["settings"]
    by_token, masks = settings["rollout_is"] == "token", isinstance(settings["rollout_is_threshold"], str)
    reduction = "token_mean" if by_token else "rollout_mean_token_mean"
    normalise = settings["rollout_is_batch_normalize"]
    weight_N, metrics = importance(batch, importance_weights(settings), reduction, normalise)
    outputs = {"weights": weight_N}
    if masks or by_token:
        outputs[f"metrics/{'oob_ratio' if masks else 'ratio_fraction_high'}"] = metrics["acted"]
    if normalise:
        outputs["metrics/batch_norm_factor"] = metrics["factor"]
    return outputs


def rejection_mask(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    kept_N, metrics = importance(batch, rejections(case["settings"], conventions), "token_mean", False)
    return {"mask": kept_N, "metrics/masked_fraction": metrics["acted"]}


def off_policy_metrics(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    """verl clamps log-ratios for chi^2, and not for k3."""
    measured = diagnostics.MismatchDiagnostics()
    tokens = tokens_of(batch, named.objective("reinforce"), batch.mask_N.double())
    measured.add(batch.flat("old"), tokens)
    k3 = measured.result()["mismatch_kl_k3"]
    with log_ratios_clamped_at(HEADWAY.max_log_ratio):
        result = measured.result()
    present, every = len(torch.unique(batch.rollout_M)), len(batch.group_R)
    share = present / every if conventions.empty_rollouts_count else 1.0
    metrics = {
        "kl": result["mismatch_kl_k1"],
        "k3_kl": k3,
        "chi2_token": result["chi2_token"],
        "chi2_seq": share * result["chi2_sequence"],
    }
    return {f"metrics/{name}": flattened(value) for name, value in metrics.items()}


# ---- losses


def clips(settings: dict) -> dict[str, float | None]:
    dual_clip = settings["clip_ratio_c"]
    return {
        "clip_low": settings["clip_ratio_low"],
        "clip_high": settings["clip_ratio_high"],
        "dual_clip": dual_clip if dual_clip < 1e9 else None,
    }


def policy_objective(case: Case, batch: Batch) -> Objective:
    settings = case["settings"]
    reduction: dict[str, Any] = {
        "reduction": REDUCTIONS[settings["loss_agg_mode"]],
        "length": length_of(settings, batch),
    }
    match case["name"]:
        case "vanilla":
            return named.objective("grpo", kl_coefficient=0, **clips(settings), **reduction)
        case "gspo":
            bounds = {"clip_low": settings["clip_ratio_low"], "clip_high": settings["clip_ratio_high"]}
            return named.objective("gspo_token", **bounds, **reduction)
        case "cispo":
            return _cispo(settings, reduction)
        case "gpg":
            return named.objective("reinforce", **reduction)
        case "dro":
            return _direct_reward(settings["policy_loss"]["dro_beta"], reduction)
        case "bypass_mode" if settings["policy_loss"]["rollout_correction"]["loss_type"] == "ppo_clip":
            return named.objective("grpo", kl_coefficient=0, anchor="behaviour", **clips(settings), **reduction)
        case "bypass_mode":
            return named.objective("reinforce", **reduction)
    raise KeyError(case["name"])


def _cispo(settings: dict, reduction: dict[str, Any]) -> Objective:
    """The preset has no lower bound, as its paper; verl has one."""
    objective = named.objective("cispo", clip_high=settings["clip_ratio_high"], **reduction)
    (term,) = objective.terms
    (weight,) = term.weights
    return replace(objective, terms=(replace(term, weights=(replace(weight, low=1 - settings["clip_ratio_low"]),)),))


def _direct_reward(beta: float, reduction: dict[str, Any]) -> Objective:
    """No preset: log pi A - beta/2 (log pi/pi_prox)^2, from two parts."""
    name = reduction["reduction"]
    pull = Term(loss=SquaredLogRatio(ratio=STALENESS), coefficient=beta / 2, reduction=name)
    objective = named.objective("reinforce", **reduction)
    return replace(objective, terms=(Term(loss=ScoreFunction(), reduction=name), pull))


def policy_corrections(case: Case, conventions: Conventions) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Weights and rejections of a loss."""
    settings = case["settings"]
    if case["name"] != "bypass_mode":
        added = importance_weights(settings["weights"]) if "weights" in settings else ()
        return added, rejections(settings["rejection"], conventions) if "rejection" in settings else ()
    own = settings["policy_loss"]["rollout_correction"]
    added = importance_weights(own) if own.get("rollout_is") else ()
    rejecting = rejections(own, conventions) if "rollout_rs" in own else ()
    return tuple(map(of_current, added)), tuple(map(of_current, rejecting))


def policy_loss(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    settings = case["settings"]
    added, rejecting = policy_corrections(case, conventions)
    objective = corrected(policy_objective(case, batch), (*added, *rejecting))
    kept_N = _kept(batch, rejecting)
    mask_N = batch.mask_N & kept_N if conventions.rejected_leave_denominators else batch.mask_N
    weight_N = reduced_as_asked(batch, mask_N, settings, conventions)
    tokens = tokens_of(batch, objective, weight_N, settings.get("advantage", "advantage"))
    outputs = with_gradient(lambda logp_N: compose.loss(objective, logp_N, tokens)[0], batch.flat("logp"))
    _, aux = compose.loss(objective, batch.flat("logp"), tokens)
    clip_N = aux.acted.get("clip", aux.acted.get("cispo"))
    return outputs if clip_N is None else {**outputs, "metrics/clipped": clip_N[batch.mask_N & kept_N].double().mean()}


def _kept(batch: Batch, rejecting: tuple[Weight, ...]) -> Tensor:
    """Tokens that no rejection silences."""
    if not rejecting:
        return torch.ones_like(batch.mask_N)
    objective = corrected(named.objective("reinforce"), rejecting)
    tokens = tokens_of(batch, objective, batch.mask_N.double())
    return compose.loss(objective, batch.flat("logp"), tokens)[1].importance_N > 0


def value_loss(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    settings = case["settings"]
    reduction = REDUCTIONS[settings["loss_agg_mode"]]
    objective = named.objective("ppo", value_clip=settings["cliprange_value"], reduction=reduction)
    tokens = tokens_of(batch, objective, reduction_weights(reduction, batch, batch.mask_N, {}))
    return with_gradient(lambda value_N: compose.value_loss(objective, value_N, tokens), batch.flat("value"))


KL_ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "k3+": "k3_value_k2_gradient"}


def kl_estimate(case: Case, batch: Batch, conventions: Conventions) -> Outputs:
    """`k3_limit` bounds values; where a value is its own loss, its gradient ends there too."""
    estimator, limit = KL_ESTIMATORS[case["name"]], conventions.k3_limit
    reference_N, own_N = batch.flat("ref"), batch.flat("logp").requires_grad_()
    value_N = kl.estimate(estimator, own_N, reference_N, batch.mask_N)  # type: ignore[arg-type]
    if estimator == "k3":
        value_N = value_N.clamp(max=limit)
    (gradient_N,) = torch.autograd.grad(value_N.sum(), own_N)
    return {"value": value_N.clamp(max=limit) if estimator.startswith("k3") else value_N, "gradient": gradient_N}


EVALUATE: dict[tuple[str, str], Callable[[Case, Batch, Conventions], Outputs]] = {
    ("reward", "kl_in_reward"): kl_in_reward,
    ("advantage", "gae"): gae,
    ("advantage", "reinforce_plus_plus"): rewards_to_go,
    ("advantage", "*"): outcome_advantage,
    ("statistics", "whiten"): whitened_statistic,
    ("statistics", "mean"): mean,
    ("statistics", "entropy"): entropy,
    ("aggregation", "*"): aggregation,
    ("policy_loss", "*"): policy_loss,
    ("value_loss", "*"): value_loss,
    ("kl", "*"): kl_estimate,
    ("weights", "*"): correction_weights,
    ("rejection", "*"): rejection_mask,
    ("diagnostics", "*"): off_policy_metrics,
}
"""(kind, name) -> Headway's side; `*`: any other name of that kind."""
