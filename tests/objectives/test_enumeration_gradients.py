"""The gradient of every named objective against its closed form, worked out from the papers and written out by hand.

Setting: pi, pi_prox, mu and the reference all differ, so that clips, masks and truncations act (asserted); groups of
two, all pairs of answers of up to 2 tokens (for some, 3), summed with their exact probabilities under mu. What is
compared goes through all of `compose`: filters, shaping, advantages, reductions, weights and loss. The closed form is a
coefficient for each token's grad log pi (`enumeration_by_hand`). Not covered: groups of more than two (see the
baselines), batches of several groups but for ScaleRL, and the critic's own loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log, prod
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.objectives.named import PRESETS, objective
from tests.objectives import enumeration_by_hand as by_hand
from tests.objectives.enumeration import Policies, Toy, gradients_of_batches
from tests.objectives.enumeration_by_hand import Advantages, Answer, Coefficients, Shares, expected_gradient, listed


def stale(max_length: int = 2) -> Policies:
    """Far enough apart that tokens have ratios on both sides of all bounds, those of 5 too."""
    return Policies.random(Toy(max_length), seed=250, staleness=1.0, mismatch=1.0)


# ---- coefficients of grad log pi


def plain(answer: Answer, advantage: list[float]) -> list[float]:
    return advantage


def clip_stops(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> bool:
    """Where PPO's objective is flat: beyond the bound that the advantage pushes to."""
    if advantage >= 0:
        return ratio > high
    return ratio < low or (dual is not None and ratio > dual)


def clipped(low: float = 0.8, high: float = 1.2, dual: float | None = None) -> Coefficients:
    """`d/d log pi of min(rho A, clip(rho) A)`: rho A, or 0 where the clip stops it."""

    def coefficients(answer: Answer, advantage: list[float]) -> list[float]:
        pairs = zip(answer.rho, advantage, strict=True)
        return [0.0 if clip_stops(rho, a, low, high, dual) else rho * a for rho, a in pairs]

    return coefficients


def times(*factors: Any) -> Coefficients:
    """A product over tokens; the last factor is given the advantage too."""
    *constants, last = factors

    def coefficients(answer: Answer, advantage: list[float]) -> list[float]:
        columns = [constant(answer) for constant in constants] + [last(answer, advantage)]
        return [prod(numbers) for numbers in zip(*columns, strict=True)]

    return coefficients


def plus(first: Coefficients, second: Any) -> Coefficients:
    return lambda answer, advantage: [
        one + other for one, other in zip(first(answer, advantage), second(answer), strict=True)
    ]


def gspo(answer: Answer, advantage: list[float]) -> list[float]:
    """GSPO: `s A mean_t grad log pi`, s the geometric mean; the mean over tokens is in the reduction's share."""
    s = prod(answer.rho) ** (1 / answer.length)
    return [0.0 if clip_stops(s, a, 1 - 3e-4, 1 + 4e-4) else s * a for a in advantage]


def minirl(answer: Answer, advantage: list[float]) -> list[float]:
    """MiniRL: `M sg(pi / pi_prox) min(pi_prox / mu, 5) A`."""
    triples = zip(answer.rho, answer.w, advantage, strict=True)
    return [0.0 if clip_stops(rho, a, 0.8, 1.27) else rho * min(w, 5) * a for rho, w, a in triples]


def kimi(answer: Answer, advantage: list[float]) -> list[float]:
    """Kimi K2.5: the ratio times A inside the bounds, 0 outside whatever the sign of A, and `-2 tau log ratio`."""
    pairs = zip(answer.whole, advantage, strict=True)
    return [(whole * a if 0.8 <= whole <= 1.28 else 0.0) - 0.01 * 2 * log(whole) for whole, a in pairs]


def glm5(answer: Answer, advantage: list[float]) -> list[float]:
    """GLM-5: `f(r) A`, f(r) = r inside (0.8, 1.28), else 0."""
    return [whole * a if 0.8 < whole < 1.28 else 0.0 for whole, a in zip(answer.whole, advantage, strict=True)]


def icepop(answer: Answer) -> list[float]:
    return [w if 0.5 <= w <= 5 else 0.0 for w in answer.w]


def grad_k2(answer: Answer) -> list[float]:
    """`d/d log pi of (log pi - log ref)^2 / 2`, downhill, by 0.001."""
    return [-0.001 * log(pi / ref) for pi, ref in zip(answer.pi, answer.ref, strict=True)]


def grad_k3(answer: Answer) -> list[float]:
    """`d/d log pi of ref / pi - 1 - log(ref / pi)` is `1 - ref / pi`, downhill, by 0.04."""
    return [-0.04 * (1 - ref / pi) for pi, ref in zip(answer.pi, answer.ref, strict=True)]


# ---- advantages and filters that only one algorithm has


def rloo_advantages(batch: list[Answer]) -> by_hand.Numbers:
    """The answer as one action: its reward less 0.03 times the log-ratio to the reference of all of it."""
    kl = [sum(log(prox / ref) for prox, ref in zip(answer.prox, answer.ref, strict=True)) for answer in batch]
    left_out = by_hand.others_left_out([answer.reward - 0.03 * own for answer, own in zip(batch, kl, strict=True)])
    return [[number] * answer.length for answer, number in zip(batch, left_out, strict=True)]


def dapo_advantages(batch: list[Answer]) -> by_hand.Numbers:
    """DAPO: an answer of all 2 tokens is at the budget and loses 1; one of 1 stays below 2 - 0.2 * 2 tokens."""
    shaped = [answer.reward - (1.0 if answer.length == 2 else 0.0) for answer in batch]
    return [[number] * answer.length for answer, number in zip(batch, by_hand.standardised(shaped), strict=True)]


def rewards_differ(batch: list[Answer]) -> bool:
    return len({answer.reward for answer in batch}) > 1


@dataclass(frozen=True)
class Case:
    """A named objective's closed form. acts: the weights and clips that must have acted."""

    advantages: Advantages
    shares: Shares
    coefficients: Coefficients
    acts: tuple[str, ...] = ()
    overrides: dict[str, Any] = field(default_factory=dict)
    filtered: bool = False


GRPO = by_hand.per_rollout(by_hand.standardised)
CENTRED = by_hand.per_rollout(by_hand.centred)
RAW = by_hand.per_rollout(lambda rewards: rewards)

CASES: dict[str, Case] = {
    "reinforce": Case(CENTRED, by_hand.rollout_mean_token_sum, plain),
    "rloo": Case(rloo_advantages, by_hand.rollout_mean_token_sum, plain),
    "reinforce_pp": Case(by_hand.whitened(by_hand.rewards_to_go(0.01)), by_hand.token_mean, clipped(), ("clip",)),
    "reinforce_pp_baseline": Case(by_hand.whitened(CENTRED), by_hand.token_mean, plus(clipped(), grad_k2), ("clip",)),
    "grpo": Case(GRPO, by_hand.rollout_mean_token_mean, plus(clipped(), grad_k3), ("clip",)),
    "dr_grpo": Case(CENTRED, by_hand.constant(7), clipped(), ("clip",), {"length": 7}),
    "dapo": Case(dapo_advantages, by_hand.token_mean, clipped(high=1.28), ("clip",), filtered=True),
    "gspo": Case(GRPO, by_hand.rollout_mean_token_mean, gspo, ("clip",)),
    "gspo_token": Case(GRPO, by_hand.rollout_mean_token_mean, gspo, ("clip",)),
    "cispo": Case(
        GRPO, by_hand.token_mean, times(lambda answer: [min(rho, 5) for rho in answer.rho], plain), ("cispo",)
    ),
    "ppo": Case(
        by_hand.whitened(by_hand.generalised(1.0, 0.95)),
        by_hand.token_mean,
        clipped(dual=1.5),
        ("clip",),
        {"dual_clip": 1.5},
    ),
    "decoupled_ppo": Case(
        by_hand.whitened(RAW), by_hand.token_mean, times(lambda answer: answer.w, clipped()), ("clip",)
    ),
    "olmo3": Case(
        CENTRED,
        by_hand.token_mean,
        times(lambda answer: [min(w, 2) for w in answer.w], clipped(high=1.272)),
        ("clip", "tis"),
        filtered=True,
    ),
    "minirl": Case(CENTRED, by_hand.rollout_mean_token_sum, minirl, ("clip", "tis")),
    "icepop": Case(GRPO, by_hand.rollout_mean_token_mean, times(icepop, clipped()), ("clip", "icepop")),
    "glm5_async": Case(GRPO, by_hand.rollout_mean_token_mean, glm5, ("double_sided",)),
    "kimi_k25": Case(CENTRED, by_hand.token_mean, kimi, ("clip",)),
    "scalerl": Case(
        GRPO,
        by_hand.token_mean,
        times(lambda answer: [min(whole, 5) for whole in answer.whole], plain),
        ("cispo",),
        filtered=True,
    ),
}
"""Of one group the batch's std is the group's, and the mean over prompts the mean over tokens: see below for two
groups."""


def test_every_named_objective_has_a_closed_form():
    assert {*CASES, "online_dpo"} == set(PRESETS)


@pytest.mark.parametrize(
    ("name", "max_length"), [*((name, 2) for name in CASES), ("gspo", 3), ("ppo", 3), ("minirl", 3), ("kimi_k25", 3)]
)
def test_the_gradient_is_the_closed_form(name, max_length):
    case, policies = CASES[name], stale(max_length)
    toy = policies.toy
    value_S = toy.logits(11)[:, 0]
    found = gradients_of_batches(objective(name, **case.overrides), policies, toy.reward_Y, value_S=value_S)
    for reason in case.acts:
        assert 0 < int(found.acted[reason].sum()) < len(found.acted[reason]), f"{reason} never acts, or always"
    data = rewards_differ if case.filtered else lambda batch: True
    every = listed(policies, toy.reward_Y, value_S)
    expected_P = expected_gradient(every, case.advantages, case.shares, case.coefficients, data)
    torch.testing.assert_close(found.mean_P, expected_P, rtol=0, atol=1e-10)
    assert float(expected_P.norm()) > 1e-3


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].acts])
def test_the_closed_form_notices_a_bound_that_does_not_act(name):
    """Without its clips, masks and caps each objective has another gradient here: the comparison can see them."""
    case, policies = CASES[name], stale()
    every = listed(policies, policies.toy.reward_Y, policies.toy.logits(11)[:, 0])
    unbounded = {"rho": times(lambda answer: answer.rho, plain), "whole": times(lambda answer: answer.whole, plain)}
    data = rewards_differ if case.filtered else lambda batch: True
    own_P = expected_gradient(every, case.advantages, case.shares, case.coefficients, data)
    for coefficients in unbounded.values():
        other_P = expected_gradient(every, case.advantages, case.shares, coefficients, data)
        assert float((own_P - other_P).norm() / own_P.norm()) > 1e-2


# ---- pairs


def test_online_dpo_is_its_closed_form():
    """Uphill `beta sigma(-beta margin) (grad log pi(y+) - grad log pi(y-))`, the margin in log pi / ref; pairs of
    equal rewards give nothing, and mu plays no part but to draw them."""
    policies = stale()
    every = listed(policies, policies.toy.reward_Y)
    expected_P = torch.zeros(every[0].score_TP.shape[1], dtype=torch.float64)
    for first in every:
        for second in every:
            if first.reward == second.reward:
                continue
            best, worst = (first, second) if first.reward > second.reward else (second, first)
            margin = log(prod(best.pi) / prod(best.ref)) - log(prod(worst.pi) / prod(worst.ref))
            slope = 0.1 / (1 + exp(0.1 * margin))
            pair_P = best.score_TP.sum(0) - worst.score_TP.sum(0)
            expected_P += prod(first.mu) * prod(second.mu) * slope * pair_P
    found = gradients_of_batches(objective("online_dpo"), policies, policies.toy.reward_Y)
    torch.testing.assert_close(found.mean_P, expected_P, rtol=0, atol=1e-10)
    assert float(expected_P.norm()) > 1e-3


# ---- several groups in one batch


def test_scalerl_over_two_groups():
    """The std is of all centred rewards of the batch; groups without a difference leave it in neither numerator nor
    count, but their zeros stay in the std, which is taken before the filter. Answers of one token, four of them."""
    policies = stale(max_length=1)
    every = listed(policies, policies.toy.reward_Y)
    expected_P = expected_gradient(every, _scalerl_advantages, _scalerl_shares, _truncated_at_5, num_rollouts=4)
    found = gradients_of_batches(objective("scalerl"), policies, policies.toy.reward_Y, num_rollouts=4, group_size=2)
    torch.testing.assert_close(found.mean_P, expected_P, rtol=0, atol=1e-10)


def _scalerl_advantages(batch: list[Answer]) -> by_hand.Numbers:
    rewards = [answer.reward for answer in batch]
    centred = by_hand.centred(rewards[:2]) + by_hand.centred(rewards[2:])
    spread = (sum(number**2 for number in centred) / 3) ** 0.5
    return [[number / (spread + 1e-6)] for number in centred]


def _scalerl_shares(batch: list[Answer]) -> by_hand.Numbers:
    differ = [batch[0].reward != batch[1].reward] * 2 + [batch[2].reward != batch[3].reward] * 2
    num_groups = max(sum(differ) // 2, 1)
    return [[1 / num_groups / 2 if own else 0.0] for own in differ]


def _truncated_at_5(answer: Answer, advantage: list[float]) -> list[float]:
    return [min(whole, 5) * a for whole, a in zip(answer.whole, advantage, strict=True)]


# ---- corrections on top


def _of_whole_answer(factor: Any) -> Any:
    """A factor of an answer, on each of its tokens."""
    return lambda answer, advantage: [float(factor(answer, advantage[0]))] * answer.length


def _geometric(answer: Answer) -> float:
    return prod(answer.w) ** (1 / answer.length)


def _mean_k3(answer: Answer) -> float:
    return sum(w - 1 - log(w) for w in answer.w) / answer.length


def _distance(answer: Answer) -> float:
    """DeepSeek-V3.2: mean over tokens of log mu - log pi."""
    return sum(-log(whole) for whole in answer.whole) / answer.length


def _by_token(factor: Any) -> Any:
    return lambda answer, advantage: [float(factor(w)) for w in answer.w]


CORRECTIONS: dict[str, Any] = {
    "is": _by_token(lambda w: w),
    "tis": _by_token(lambda w: min(w, 2)),
    "tis:1.3": _by_token(lambda w: min(w, 1.3)),
    "clamped_is": _by_token(lambda w: min(max(w, 0.5), 5)),
    "mis": _by_token(lambda w: w * (w <= 2)),
    "icepop": _by_token(lambda w: w * (0.5 <= w <= 5)),
    "icepop_glm5": _by_token(lambda w: w * (0.5 <= w <= 2)),
    "sequence_is": _of_whole_answer(lambda answer, a: prod(answer.w)),
    "sequence_tis": _of_whole_answer(lambda answer, a: min(prod(answer.w), 2)),
    "sequence_mis": _of_whole_answer(lambda answer, a: prod(answer.w) * (prod(answer.w) <= 2)),
    "geometric_rejection:0.7:1.1": _of_whole_answer(lambda answer, a: 0.7 <= _geometric(answer) <= 1.1),
    "geometric_rejection_is:0.7:1.1": lambda answer, advantage: [
        w * (0.7 <= _geometric(answer) <= 1.1) for w in answer.w
    ],
    "k3_rejection:0.2": _of_whole_answer(lambda answer, a: _mean_k3(answer) <= 0.2),
    "veto:0.3": _of_whole_answer(lambda answer, a: min(answer.w) >= 0.3),
    "off_policy_mask:0.1": _of_whole_answer(lambda answer, a: not (a < 0 and _distance(answer) > 0.1)),
}


@pytest.mark.parametrize("written", CORRECTIONS)
def test_a_correction_multiplies_the_coefficients(written):
    """On Dr. GRPO's clipped ratio, by the factor of its definition."""
    policies = stale()
    described = objective("dr_grpo", length=7, corrections=[written])
    found = gradients_of_batches(described, policies, policies.toy.reward_Y)
    if written not in ("is", "sequence_is"):
        reason = described.terms[0].weights[0].name
        assert 0 < int(found.acted[reason].sum()) < len(found.acted[reason]), f"{reason} never acts, or always"

    def coefficients(answer: Answer, advantage: list[float]) -> list[float]:
        pairs = zip(CORRECTIONS[written](answer, advantage), clipped()(answer, advantage), strict=True)
        return [factor * own for factor, own in pairs]

    every = listed(policies, policies.toy.reward_Y)
    expected_P = expected_gradient(every, CENTRED, by_hand.constant(7), coefficients)
    torch.testing.assert_close(found.mean_P, expected_P, rtol=0, atol=1e-10)


def test_self_normalised_weights_are_divided_by_their_mean_over_the_batch():
    """The mean in the sense of the term's reduction: here over all tokens of both answers."""
    policies = stale()
    described = objective("olmo3", self_normalise=True)
    found = gradients_of_batches(described, policies, policies.toy.reward_Y)

    def normalised(batch: list[Answer]) -> by_hand.Numbers:
        weights = [min(w, 2) for answer in batch for w in answer.w]
        return [[number * len(weights) / sum(weights) for number in numbers] for numbers in CENTRED(batch)]

    every = listed(policies, policies.toy.reward_Y)
    case = CASES["olmo3"]
    expected_P = expected_gradient(every, normalised, case.shares, case.coefficients, rewards_differ)
    torch.testing.assert_close(found.mean_P, expected_P, rtol=0, atol=1e-10)


def test_an_interpolated_proximal_policy_is_a_point_on_the_way_from_mu_to_pi():
    """A-3PO: `log pi_prox = log mu + 2/3 (log pi - log mu)` for tokens that are 2 versions old."""
    policies = stale()
    described = objective("decoupled_ppo", proximal="interpolated")
    found = gradients_of_batches(described, policies, policies.toy.reward_Y)

    def coefficients(answer: Answer, advantage: list[float]) -> list[float]:
        w, rho = ([whole**share for whole in answer.whole] for share in (2 / 3, 1 / 3))
        triples = zip(w, rho, advantage, strict=True)
        return [0.0 if clip_stops(rho_t, a, 0.8, 1.2) else w_t * rho_t * a for w_t, rho_t, a in triples]

    every = listed(policies, policies.toy.reward_Y)
    expected_P = expected_gradient(every, by_hand.whitened(RAW), by_hand.token_mean, coefficients)
    torch.testing.assert_close(found.mean_P, expected_P, rtol=0, atol=1e-10)


def test_the_toy_has_ratios_on_both_sides_of_every_bound():
    policies = stale()
    every = listed(policies, policies.toy.reward_Y)

    def spread(name: str) -> Tensor:
        return torch.tensor([ratio for answer in every for ratio in getattr(answer, name)])

    for name in ("rho", "w", "whole"):
        assert float(spread(name).min()) < 0.5
        assert float(spread(name).max()) > 5
