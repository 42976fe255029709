"""Baselines, critics and the on-policy limit, as exact sums over whole batches.

Setting: pi = pi_prox = mu, so that every ratio is 1 and what remains is the advantage and the reduction. Proved: which
advantages give the gradient of J, which a known multiple of it, and what the others ascend instead; that each named
objective without its KL is REINFORCE with its own advantage and reduction, and each surrogate at ratio 1 too; that a
perfect critic has advantages of mean zero in every prefix and gives the gradient of J. Not covered: groups of more than
three, and unscored rollouts.
"""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor

from headway.objectives import advantages
from headway.objectives.named import PRESETS, objective
from headway.objectives.parts import (
    Advantage,
    AdvantageName,
    Clamped,
    Clipped,
    Loss,
    Objective,
    PolicyRatio,
    Ratio,
    RatioLevel,
    ScoreFunction,
    Term,
)
from tests.objectives import enumeration_by_hand as by_hand
from tests.objectives.enumeration import (
    Policies,
    Toy,
    cosine,
    exact_gradient,
    gradients_of_answers,
    gradients_of_batches,
    relative,
)
from tests.objectives.enumeration_by_hand import Answer, expected_gradient, listed


def reinforce(advantage: AdvantageName, **of_advantage: float) -> Objective:
    """`A grad log pi`, summed over an answer's tokens, averaged over the answers."""
    terms = (Term(loss=ScoreFunction(), reduction="rollout_mean_token_sum"),)
    return Objective(name="probe", source="", advantage=Advantage(name=advantage, **of_advantage), terms=terms)


def win_rate_gradient(policies: Policies, reward_Y: Tensor) -> Tensor:
    """Of `E[sign(r(y) - r(y'))]` in pi of y, y' drawn from a frozen copy: how often an answer beats another."""
    sign_YY = (reward_Y[:, None] - reward_Y[None, :]).sign()
    return exact_gradient(policies.toy, policies.current, sign_YY @ policies.toy.logp_Y(policies.current).exp())


# ---- baselines


@pytest.mark.parametrize(("max_length", "group_size"), [(1, 2), (1, 3), (2, 2), (3, 2)])
@pytest.mark.parametrize("advantage", ["leave_one_out", "group_mean", "batch_mean", "reward"])
def test_baselines_and_the_gradient_of_j(advantage, max_length, group_size):
    """Left out of its own baseline an answer gives the gradient itself; contained in it, (G - 1) / G of the gradient.
    The batch's mean contains it too: with one group to a batch that is the same number."""
    policies = Policies.random(Toy(max_length), seed=1)
    exact_P = exact_gradient(policies.toy, policies.current, policies.toy.reward_Y)
    found = gradients_of_batches(reinforce(advantage), policies, policies.toy.reward_Y, group_size, group_size)
    scale = 1 if advantage in ("leave_one_out", "reward") else (group_size - 1) / group_size
    torch.testing.assert_close(found.mean_P, scale * exact_P, rtol=0, atol=1e-12)


def test_the_mean_of_a_batch_of_two_groups_scales_by_its_rollouts_not_its_groups():
    policies = Policies.random(Toy(1), seed=1)
    reward_Y = policies.toy.reward_Y
    exact_P = exact_gradient(policies.toy, policies.current, reward_Y)
    by_batch = gradients_of_batches(reinforce("batch_mean"), policies, reward_Y, num_rollouts=4, group_size=2)
    by_group = gradients_of_batches(reinforce("group_mean"), policies, reward_Y, num_rollouts=4, group_size=2)
    torch.testing.assert_close(by_batch.mean_P, 3 / 4 * exact_P, rtol=0, atol=1e-12)
    torch.testing.assert_close(by_group.mean_P, 1 / 2 * exact_P, rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_length", [1, 2])
def test_a_baseline_lowers_the_variance_and_leaves_the_mean(max_length):
    """Rewards far from 0: nothing but the reward itself costs variance."""
    policies = Policies.random(Toy(max_length), seed=1)
    reward_Y = policies.toy.reward_Y + 3
    raw, centred = (gradients_of_batches(reinforce(name), policies, reward_Y) for name in ("reward", "leave_one_out"))
    torch.testing.assert_close(raw.mean_P, centred.mean_P, rtol=0, atol=1e-12)
    assert centred.variance < raw.variance / 2


@pytest.mark.parametrize("max_length", [1, 2, 3])
def test_groups_of_two_divided_by_their_std_ascend_the_rate_of_wins(max_length):
    """`(r - mean) / std` of two is the sign of their difference by sqrt 2, whatever its size, so GRPO's advantage
    ascends how often an answer beats another of the same policy (to the epsilon of 1e-6 in the divisor), not J."""
    policies = Policies.random(Toy(max_length), seed=1)
    reward_Y = policies.toy.reward_Y
    for advantage in ("group_mean_std", "group_mean_batch_std"):
        found = gradients_of_batches(reinforce(advantage), policies, reward_Y)
        expected_P = win_rate_gradient(policies, reward_Y) / sqrt(2)
        torch.testing.assert_close(found.mean_P, expected_P, rtol=1e-5, atol=1e-7)


NOT_A_MULTIPLE = {
    # (T, G): sqrt(1 - cosine^2)
    (1, 2): 0.0676,
    (1, 3): 0.0590,
    (2, 2): 0.0863,
    (2, 3): 0.0816,
    (3, 2): 0.1312,
}


@pytest.mark.parametrize(("max_length", "group_size"), list(NOT_A_MULTIPLE))
def test_dividing_by_the_std_is_no_multiple_of_the_gradient(max_length, group_size):
    """Measured: how far GRPO's expected gradient is from every multiple of that of J, as a share of its own length."""
    policies = Policies.random(Toy(max_length), seed=1)
    exact_P = exact_gradient(policies.toy, policies.current, policies.toy.reward_Y)
    found = gradients_of_batches(reinforce("group_mean_std"), policies, policies.toy.reward_Y, group_size, group_size)
    distance = sqrt(1 - cosine(found.mean_P, exact_P) ** 2)
    assert distance == pytest.approx(NOT_A_MULTIPLE[max_length, group_size], abs=1e-4)


@pytest.mark.parametrize("group_size", [2, 3])
def test_with_rewards_of_0_and_1_the_std_of_a_group_only_rescales(group_size):
    """One prompt and a binary reward: the divisor depends on the number of right answers alone, so the direction is J's
    and the size is not (it is what weighs prompts differently)."""
    policies = Policies.random(Toy(2), seed=1)
    reward_Y = (policies.toy.reward_Y > 1).double()
    exact_P = exact_gradient(policies.toy, policies.current, reward_Y)
    found = gradients_of_batches(reinforce("group_mean_std"), policies, reward_Y, group_size, group_size)
    assert cosine(found.mean_P, exact_P) == pytest.approx(1, abs=1e-12)
    assert abs(float(found.mean_P.norm() / exact_P.norm()) - (group_size - 1) / group_size) > 0.1


@pytest.mark.parametrize("max_length", [1, 2])
def test_online_dpo_ascends_the_rate_of_wins_where_it_is_its_own_reference(max_length):
    """pi = ref: the margin is 0, its slope beta / 2, and the better of each pair is pushed up against the worse: beta
    times the gradient of the rate of wins. For these seeds that is uphill for J as well (measured, not a law)."""
    for seed in range(6):
        policies = Policies.random(Toy(max_length), seed)
        own = Policies(policies.toy, *[policies.current] * 4)
        found = gradients_of_batches(objective("online_dpo"), own, own.toy.reward_Y)
        expected_P = 0.1 * win_rate_gradient(own, own.toy.reward_Y)
        torch.testing.assert_close(found.mean_P, expected_P, rtol=0, atol=1e-12)
        exact_P = exact_gradient(own.toy, own.current, own.toy.reward_Y)
        assert float(found.mean_P @ exact_P) > 0


# ---- every named objective, on-policy


ON_POLICY = {
    # name: (overrides that switch its KL off, advantage of two rewards, reduction)
    "reinforce": ({}, by_hand.centred, by_hand.rollout_mean_token_sum),
    "rloo": ({"reward_kl": 0}, by_hand.others_left_out, by_hand.rollout_mean_token_sum),
    "reinforce_pp": ({"reward_kl": 0}, None, by_hand.token_mean),
    "reinforce_pp_baseline": ({"kl_coefficient": 0}, None, by_hand.token_mean),
    "grpo": ({"kl_coefficient": 0}, by_hand.standardised, by_hand.rollout_mean_token_mean),
    "dr_grpo": ({"length": 5}, by_hand.centred, by_hand.constant(5)),
    "dapo": ({"overlong_share": 0}, by_hand.standardised, by_hand.token_mean),
    "gspo": ({}, by_hand.standardised, by_hand.rollout_mean_token_mean),
    "gspo_token": ({}, by_hand.standardised, by_hand.rollout_mean_token_mean),
    "cispo": ({}, by_hand.standardised, by_hand.token_mean),
    "ppo": ({}, "gae", by_hand.token_mean),
    "decoupled_ppo": ({}, None, by_hand.token_mean),
    "olmo3": ({}, by_hand.centred, by_hand.token_mean),
    "minirl": ({}, by_hand.centred, by_hand.rollout_mean_token_sum),
    "icepop": ({}, by_hand.standardised, by_hand.rollout_mean_token_mean),
    "glm5_async": ({}, by_hand.standardised, by_hand.rollout_mean_token_mean),
    "kimi_k25": ({}, by_hand.centred, by_hand.token_mean),
    "scalerl": ({}, by_hand.standardised, by_hand.token_mean),
}


def test_every_named_objective_is_looked_at():
    assert {*ON_POLICY, "online_dpo"} == set(PRESETS)


def _advantages(kind) -> by_hand.Advantages:
    if kind is None:
        return by_hand.whitened(by_hand.per_rollout(lambda rewards: rewards))
    if kind == "gae":
        return by_hand.whitened(by_hand.generalised(1.0, 0.95))
    return by_hand.per_rollout(kind)


def _plain(answer: Answer, advantage: list[float]) -> list[float]:
    return advantage


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_every_objective_is_reinforce_with_its_advantage_and_reduction(name):
    """No ratio, bound or weight is left: the expected gradient over pairs is `E[share A grad log pi]`."""
    overrides, kind, shares = ON_POLICY[name]
    policies = Policies.random(Toy(2), seed=3)
    value_S = policies.toy.logits(11)[:, 0]
    found = gradients_of_batches(objective(name, **overrides), policies, policies.toy.reward_Y, value_S=value_S)
    every = listed(policies, policies.toy.reward_Y, value_S)
    expected_P = expected_gradient(every, _advantages(kind), shares, _plain)
    torch.testing.assert_close(found.mean_P, expected_P, rtol=0, atol=1e-10)
    assert not any(bool(acts_M.any()) for acts_M in found.acted.values())


SCALE_OF_J = {"reinforce": 1 / 2, "rloo": 1, "dr_grpo": 1 / 2 / 5, "minirl": 1 / 2}


@pytest.mark.parametrize("name", SCALE_OF_J)
def test_sums_over_tokens_give_the_gradient_of_j_by_a_known_scale(name):
    """Centred advantages and a sum over tokens: answers of several tokens, and the scale is (G - 1) / G (and the
    length)."""
    policies = Policies.random(Toy(3), seed=3)
    found = gradients_of_batches(objective(name, **ON_POLICY[name][0]), policies, policies.toy.reward_Y)
    exact_P = exact_gradient(policies.toy, policies.current, policies.toy.reward_Y)
    torch.testing.assert_close(found.mean_P, SCALE_OF_J[name] * exact_P, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in ON_POLICY if name != "ppo"])
def test_answers_of_one_token_leave_no_room_for_reductions(name):
    """There every objective gives J's gradient by a scale, or (divided by a std, or whitened) that of the rate of
    wins."""
    overrides, kind, _ = ON_POLICY[name]
    policies = Policies.random(Toy(1), seed=3)
    reward_Y = policies.toy.reward_Y
    found = gradients_of_batches(objective(name, **overrides), policies, reward_Y)
    if kind in (by_hand.centred, by_hand.others_left_out):
        scale = {"rloo": 1.0, "dr_grpo": 0.1}.get(name, 0.5)
        torch.testing.assert_close(
            found.mean_P, scale * exact_gradient(policies.toy, policies.current, reward_Y), rtol=0, atol=1e-12
        )
    else:
        expected_P = win_rate_gradient(policies, reward_Y) / sqrt(2)
        torch.testing.assert_close(found.mean_P, expected_P, rtol=1e-5, atol=1e-7)


def test_means_over_tokens_have_another_direction():
    """Dividing by an answer's length weighs short answers more, by the batch's it does so a little: measured, how far
    the expected gradient is from every multiple of J's. (MiniRL with another reduction, on-policy.)"""
    policies = Policies.random(Toy(3), seed=3)
    exact_P = exact_gradient(policies.toy, policies.current, policies.toy.reward_Y)
    for reduction, measured in (("token_mean", 0.0621), ("rollout_mean_token_mean", 0.1746)):
        described = objective("minirl", reduction=reduction)
        found = gradients_of_batches(described, policies, policies.toy.reward_Y)
        assert sqrt(1 - cosine(found.mean_P, exact_P) ** 2) == pytest.approx(measured, abs=1e-4)


# ---- every surrogate at ratio 1

LEVELS: list[RatioLevel] = ["token", "sequence", "geometric", "geometric_token"]
SURROGATES: list[Loss] = [ScoreFunction()] + [
    surrogate(ratio=Ratio(old=old, level=level))
    for surrogate in (PolicyRatio, Clipped, Clamped)
    for old in ("proximal", "behaviour")
    for level in LEVELS
]


@pytest.mark.parametrize("loss", SURROGATES, ids=lambda loss: f"{type(loss).__name__}-{loss.formula[:40]}")
def test_at_ratio_1_every_surrogate_has_reinforces_gradient(loss):
    """Of each answer alone: the mean over its tokens of `A grad log pi`. The ratio of a whole answer carries the sum in
    every token, so under a mean over tokens it is the sum."""
    policies = Policies.random(Toy(3), seed=4)
    term = Term(loss=loss, reduction="rollout_mean_token_mean")
    described = Objective(name="probe", source="", advantage=Advantage(name="reward"), terms=(term,))
    advantage_Y = policies.toy.reward_Y - 0.8
    found = gradients_of_answers(described, policies, advantage_Y)
    summed = getattr(getattr(loss, "ratio", None), "level", "token") == "sequence"
    length_Y = torch.ones_like(policies.toy.length_Y) if summed else policies.toy.length_Y
    expected_YP = (advantage_Y / length_Y)[:, None] * policies.toy.score_YP(policies.current)
    torch.testing.assert_close(found.gradient_BP, expected_YP, rtol=0, atol=1e-13)


# ---- critics


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_gae_is_the_sum_of_its_definition(gamma, lam, seed):
    """Rollouts of random lengths, of which random tokens are trained (what others wrote is no state of the chain), some
    cut off and bootstrapped: `A_t = sum_l (gamma lam)^l delta_(t + l)` over the trained tokens, by two loops."""
    generator = torch.Generator().manual_seed(seed)
    rollout_N = torch.arange(6).repeat_interleave(torch.tensor([1, 4, 7, 2, 5, 3]))
    trained_N = torch.rand(len(rollout_N), generator=generator) < 0.6
    trained_N[rollout_N == 3] = False
    rollout_M = rollout_N[trained_N]
    reward_M, value_M = torch.randn(2, len(rollout_M), generator=generator, dtype=torch.float64)
    bootstrap_R = torch.tensor([0.0, 1.5, 0.0, 0.0, -0.7, 0.0]).double()
    found_M, return_M = advantages.gae(reward_M, value_M, rollout_M, bootstrap_R, gamma, lam)
    for rollout in range(6):
        place_T = torch.nonzero(rollout_M == rollout).flatten().tolist()
        values = [float(value_M[place]) for place in place_T] + [float(bootstrap_R[rollout])]
        delta = [float(reward_M[p]) + gamma * values[t + 1] - values[t] for t, p in enumerate(place_T)]
        for t, place in enumerate(place_T):
            expected = sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, len(place_T)))
            assert float(found_M[place]) == pytest.approx(expected, abs=1e-12)
            assert float(return_M[place]) == pytest.approx(expected + values[t], abs=1e-12)


def test_gae_without_values_is_the_reward_to_go():
    """gamma = lam = 1, values 0, through the composed objective: outcome rewards reach every token, and gae is
    `reward`."""
    policies = Policies.random(Toy(3), seed=1)
    toy = policies.toy
    zero_S = torch.zeros(len(toy.states), dtype=torch.float64)
    by_critic = gradients_of_batches(reinforce("gae"), policies, toy.reward_Y, 1, 1, zero_S)
    plain = gradients_of_batches(reinforce("reward"), policies, toy.reward_Y, 1, 1)
    torch.testing.assert_close(by_critic.gradient_BP, plain.gradient_BP, rtol=0, atol=1e-14)
    reward_N = torch.randn(len(toy.answer_N), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    to_go_N = advantages.rewards_to_go(reward_N, toy.answer_N)
    for place, answer in enumerate(toy.answer_N.tolist()):
        rest = reward_N[place:][toy.answer_N[place:] == answer]
        assert float(to_go_N[place]) == pytest.approx(float(rest.sum()), abs=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("max_length", [1, 3, 4])
def test_a_perfect_critic_has_advantages_of_mean_zero_and_the_gradient_of_j(max_length, lam):
    """gamma = 1, V(s) = E[r | s]: given any prefix the mean advantage is 0, and any lam gives the exact gradient."""
    policies = Policies.random(Toy(max_length), seed=1)
    toy = policies.toy
    value_S = toy.value_S(policies.current, toy.reward_Y)
    reward_N = advantages.token_rewards(toy.reward_Y, toy.answer_N)
    advantage_N, return_N = advantages.gae(reward_N, value_S[toy.state_N], toy.answer_N, None, 1.0, lam)
    weight_N = policies.probability_Y[toy.answer_N]
    in_state_S = torch.zeros(len(toy.states), dtype=torch.float64)
    for item_N, expected_S in ((advantage_N, 0 * value_S), (return_N, value_S * toy.visits_S(policies.current))):
        mean_S = in_state_S.index_add(0, toy.state_N, weight_N * item_N)
        torch.testing.assert_close(mean_S, expected_S, rtol=0, atol=1e-12)
    found = gradients_of_batches(reinforce("gae", lam=lam), policies, toy.reward_Y, 1, 1, value_S)
    exact_P = exact_gradient(toy, policies.current, toy.reward_Y)
    torch.testing.assert_close(found.mean_P, exact_P, rtol=0, atol=1e-12)


def test_a_wrong_critic_is_harmless_at_lam_1_and_biased_below():
    """With lam = 1 values are a baseline, whatever they are; with lam < 1 they stand in for the rest of the answer."""
    policies = Policies.random(Toy(3), seed=1)
    toy = policies.toy
    wrong_S = toy.logits(11)[:, 0]
    exact_P = exact_gradient(toy, policies.current, toy.reward_Y)
    whole, short = (
        gradients_of_batches(reinforce("gae", lam=lam), policies, toy.reward_Y, 1, 1, wrong_S).mean_P
        for lam in (1.0, 0.5)
    )
    torch.testing.assert_close(whole, exact_P, rtol=0, atol=1e-12)
    assert relative(short, exact_P) > 0.1


def test_a_perfect_critic_lowers_the_variance():
    """Of single answers: the reward itself, the reward less its mean, and the advantage of a perfect critic."""
    policies = Policies.random(Toy(4), seed=1)
    toy = policies.toy
    reward_Y = toy.reward_Y
    value_S = toy.value_S(policies.current, reward_Y)
    mean_reward = policies.probability_Y @ reward_Y
    raw = gradients_of_answers(reinforce("reward"), policies, reward_Y).variance
    centred = gradients_of_answers(reinforce("reward"), policies, reward_Y - mean_reward).variance
    critic = gradients_of_batches(reinforce("gae", lam=0.0), policies, reward_Y, 1, 1, value_S).variance
    assert critic < centred < raw
