"""Importance weights by exact sums: which are unbiased, by how much the others are not, and what a bound costs.

Proved for every answer of up to 4 tokens, in float64: the whole-answer weight gives the gradient of J = E_pi[r] itself;
a weight per token does so for answers of one token, and beyond that the gradient of something else, which is written
out; truncating and masking cost exactly what the identities below say. Not covered: sampling noise (there is none
here), answers longer than 4, and how large real mismatches are.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.objectives import weights
from headway.objectives.named import objective
from headway.objectives.parts import Advantage, Objective, PolicyRatio, Ratio, Term
from tests.objectives.enumeration import (
    END,
    VOCABULARY,
    Policies,
    Toy,
    answers,
    exact_gradient,
    gradients_of_answers,
    gradients_of_batches,
    relative,
)

NOISES = [0.02, 0.1, 0.3, 1.0]


def reinforce(*corrections: str) -> Objective:
    """`r grad log pi`, the plainest estimator, with corrections on it."""
    return objective("reinforce", advantage="reward", corrections=corrections)


# ---- the toy itself


def test_all_answers_are_listed_once_and_their_probabilities_sum_to_one():
    assert len(answers(3)) == len(set(answers(3))) == 1 + 2 + 4 * 3
    assert len(answers(4)) == len(set(answers(4))) == 1 + 2 + 4 + 8 * 3
    assert all(END not in answer[:-1] for answer in answers(4))
    toy = Toy(4)
    assert float(toy.logp_Y(toy.logits(0)).exp().sum()) == pytest.approx(1, abs=1e-12)
    assert float(toy.visits_S(toy.logits(0)).sum()) == pytest.approx(
        float(toy.logp_Y(toy.logits(0)).exp() @ toy.length_Y.double()), abs=1e-12
    )


def test_the_score_written_by_hand_is_the_gradient_that_autograd_finds():
    toy = Toy(3)
    logits_SV = toy.logits(0).requires_grad_()
    logp_N = toy.logp_N(logits_SV)
    found = [torch.autograd.grad(logp, logits_SV, retain_graph=True)[0].flatten() for logp in logp_N]
    torch.testing.assert_close(toy.score_NP(logits_SV.detach()), torch.stack(found), rtol=0, atol=1e-15)


def test_answers_one_at_a_time_are_answers_all_at_once():
    """The short cut for single answers gives what a train step on each of them gives."""
    policies = Policies.random(Toy(3), seed=1, mismatch=0.5)
    once = gradients_of_answers(reinforce("tis"), policies, policies.toy.reward_Y)
    each = gradients_of_batches(reinforce("tis"), policies, policies.toy.reward_Y, num_rollouts=1, group_size=1)
    torch.testing.assert_close(once.gradient_BP, each.gradient_BP, rtol=0, atol=1e-14)
    torch.testing.assert_close(once.probability_B, each.probability_B, rtol=0, atol=1e-14)


# ---- weights of whole answers


@pytest.mark.parametrize("max_length", [1, 2, 3, 4])
@pytest.mark.parametrize("noise", NOISES)
def test_the_whole_answer_weight_gives_the_exact_gradient(noise, max_length):
    policies = Policies.random(Toy(max_length), seed=1, mismatch=noise)
    reward_Y = policies.toy.reward_Y
    exact_P = exact_gradient(policies.toy, policies.current, reward_Y)
    for advantage_Y in (reward_Y, reward_Y - 0.8):
        found = gradients_of_answers(reinforce("sequence_is"), policies, advantage_Y)
        torch.testing.assert_close(found.mean_P, exact_P, rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_length", [1, 2, 3, 4])
@pytest.mark.parametrize("noise", NOISES)
def test_the_whole_answer_ratio_is_exact_for_stale_policies_too(noise, max_length):
    """pi, pi_prox and mu all differ. The ratio of an answer stands on each of its tokens and carries the gradient of
    all of them, so the *mean* over tokens is the gradient of J; a sum would count each answer by its length."""
    policies = Policies.random(Toy(max_length), seed=2, staleness=noise, mismatch=noise)
    ratio = Ratio(new="current", old="behaviour", level="sequence")
    term = Term(loss=PolicyRatio(ratio=ratio), reduction="rollout_mean_token_mean")
    described = Objective(name="whole", source="", advantage=Advantage(name="reward"), terms=(term,))
    found = gradients_of_answers(described, policies, policies.toy.reward_Y)
    exact_P = exact_gradient(policies.toy, policies.current, policies.toy.reward_Y)
    torch.testing.assert_close(found.mean_P, exact_P, rtol=0, atol=1e-12)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("reduction", ["rollout_mean_token_sum", "rollout_mean_token_mean"])
def test_self_normalised_whole_answer_weights_are_exact_in_large_batches(noise, reduction):
    """Their mean is over answers and tends to 1, whatever the reduction averages. (Over tokens it would tend to
    `E_pi[length] / E_mu[length]`, and the gradient would be off by that factor.)"""
    policies = Policies.random(Toy(4), seed=1, mismatch=noise)
    own_P, plain_P = (
        gradients_of_answers(
            objective(
                "reinforce",
                advantage="reward",
                corrections=["sequence_is"],
                reduction=reduction,
                self_normalise=own,
            ),
            policies,
            policies.toy.reward_Y,
        ).mean_P
        for own in (True, False)
    )
    torch.testing.assert_close(own_P, plain_P, rtol=0, atol=1e-12)
    if reduction == "rollout_mean_token_sum":
        exact_P = exact_gradient(policies.toy, policies.current, policies.toy.reward_Y)
        torch.testing.assert_close(own_P, exact_P, rtol=0, atol=1e-12)


# ---- weights of tokens


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("seed", range(3))
def test_token_weights_are_exact_for_answers_of_one_token(noise, seed):
    policies = Policies.random(Toy(1), seed, mismatch=noise)
    exact_P = exact_gradient(policies.toy, policies.current, policies.toy.reward_Y)
    found = gradients_of_answers(reinforce("is"), policies, policies.toy.reward_Y)
    torch.testing.assert_close(found.mean_P, exact_P, rtol=0, atol=1e-12)
    ignored = gradients_of_answers(reinforce(), policies, policies.toy.reward_Y)
    assert relative(ignored.mean_P, exact_P) > noise / 10


@pytest.mark.parametrize("max_length", [2, 3, 4])
@pytest.mark.parametrize("noise", NOISES)
def test_token_weights_train_on_the_prefixes_and_the_continuations_of_mu(noise, max_length):
    """What token weights give instead: `sum_s d_mu(s) sum_a grad pi(a | s) Q_mu(s, a)`. Only the distribution of the
    token itself is corrected; who comes to its prefix, and what its continuation earns, stay mu's."""
    policies = Policies.random(Toy(max_length), seed=1, mismatch=noise)
    toy, reward_Y = policies.toy, policies.toy.reward_Y
    value_SV = _value_of_tokens(toy, policies.behaviour, reward_Y)
    logits_SV = policies.current.clone().requires_grad_()
    corrected = toy.visits_S(policies.behaviour) @ (logits_SV.softmax(-1) * value_SV).sum(-1)
    expected_P = torch.autograd.grad(corrected, logits_SV)[0].flatten()
    found = gradients_of_answers(reinforce("is"), policies, reward_Y)
    torch.testing.assert_close(found.mean_P, expected_P, rtol=0, atol=1e-12)


def _value_of_tokens(toy: Toy, logits_SV: Tensor, reward_Y: Tensor) -> Tensor:
    """Q[s, a]: the expected reward after taking token a in prefix s, going on under that policy."""
    value_S = toy.value_S(logits_SV, reward_Y)
    value_of = dict(zip(toy.states, value_S, strict=True)) | dict(zip(toy.answers, reward_Y, strict=True))
    return torch.stack(
        [torch.stack([value_of[(*state, token)] for token in range(VOCABULARY)]) for state in toy.states]
    )


MEASURED = {
    # (noise, T): relative bias of the gradient for seeds 0, 1, 2, without a weight and with one per token
    (0.1, 2): ([0.1708, 0.1798, 0.0732], [0.0424, 0.0908, 0.0623]),
    (0.1, 3): ([0.1116, 0.0880, 0.1178], [0.1086, 0.0844, 0.1117]),
    (0.1, 4): ([0.0725, 0.1010, 0.1013], [0.0633, 0.1056, 0.1193]),
    (0.3, 2): ([0.5468, 0.4639, 0.2371], [0.1394, 0.2505, 0.2090]),
    (0.3, 3): ([0.3314, 0.2124, 0.3571], [0.3264, 0.2399, 0.3387]),
    (0.3, 4): ([0.2168, 0.2817, 0.2804], [0.2179, 0.3025, 0.3589]),
    (1.0, 2): ([1.3359, 0.9039, 0.8769], [0.5865, 0.6285, 0.8550]),
    (1.0, 3): ([0.7655, 0.5979, 1.0281], [0.9266, 0.6115, 0.9023]),
    (1.0, 4): ([0.8469, 0.8690, 0.7024], [0.7898, 0.7409, 1.0428]),
}


@pytest.mark.parametrize(("noise", "max_length"), list(MEASURED))
def test_token_weights_are_not_unbiased_beyond_one_token(noise, max_length):
    """Numbers measured for these seeds, kept here so that nobody believes otherwise: of the bias of longer answers a
    token weight removes some, little or none (rewards centred on their mean, as all baselines do)."""
    toy = Toy(max_length)
    for seed, (none, token) in enumerate(zip(*MEASURED[noise, max_length], strict=True)):
        policies = Policies.random(toy, seed, mismatch=noise)
        advantage_Y = toy.reward_Y - policies.probability_Y @ toy.reward_Y
        exact_P = exact_gradient(toy, policies.current, toy.reward_Y)
        ignored, weighted, truncated = (
            relative(gradients_of_answers(reinforce(*names), policies, advantage_Y).mean_P, exact_P)
            for names in ((), ("is",), ("tis",))
        )
        assert ignored == pytest.approx(none, abs=1e-4)
        assert weighted == pytest.approx(token, abs=1e-4)
        assert weighted > 0.04
        if noise == 0.1:
            assert truncated == pytest.approx(weighted, abs=1e-12), "no weight of one token reaches 2 here"


@pytest.mark.parametrize("seed", range(3))
def test_a_constant_baseline_moves_the_mean_only_where_nothing_is_corrected(seed):
    """Without a weight `E_mu[b grad log pi]` is not 0, so rewards far from 0 make the bias larger; a token weight makes
    it exactly 0 (each token's scores are averaged under pi, whatever the prefix), and so does one of whole answers."""
    policies = Policies.random(Toy(4), seed, mismatch=0.3)
    reward_Y = policies.toy.reward_Y

    def moved(*names: str) -> float:
        near, far = (gradients_of_answers(reinforce(*names), policies, reward_Y + b).mean_P for b in (0.0, 10.0))
        return float((near - far).norm())

    assert moved() > 0.5
    assert moved("is") < 1e-12
    assert moved("sequence_is") < 1e-12
    assert moved("mis:1.5") > 0.1


# ---- the cost of a bound

CAPS = [0.5, 1.0, 1.2, 2.0, 1e6]


def _mean(probability_Y: Tensor, item_Y: Tensor) -> Tensor:
    return torch.tensordot(probability_Y, item_Y, dims=1)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("max_length", [1, 4])
def test_the_cost_of_truncation(cap, noise, max_length):
    """`E_mu[min(w, C) f] = E_pi[min(1, C / w) f]`; the bias is `-E_mu[(w - C)+ f] = -E_pi[(1 - C / w)+ f]`, bounded by
    the mass that was cut, and the second moment by `C E_pi[f^2]`."""
    policies = Policies.random(Toy(max_length), seed=3, mismatch=noise)
    mu_Y, w_Y = policies.probability_Y, policies.weight_Y
    pi_Y = mu_Y * w_Y
    for f_Y in (policies.toy.reward_Y, policies.toy.reward_Y - 0.8):
        truncated = float(_mean(mu_Y, weights.truncated(w_Y, cap) * f_Y))
        assert truncated == pytest.approx(float(_mean(pi_Y, (cap / w_Y).clamp(max=1) * f_Y)), abs=1e-12)
        bias = truncated - float(_mean(pi_Y, f_Y))
        assert bias == pytest.approx(-float(_mean(mu_Y, (w_Y - cap).clamp(min=0) * f_Y)), abs=1e-12)
        assert bias == pytest.approx(-float(_mean(pi_Y, (1 - cap / w_Y).clamp(min=0) * f_Y)), abs=1e-12)
        lost_mass, largest = float((pi_Y - cap * mu_Y).clamp(min=0).sum()), float(f_Y.abs().max())
        assert abs(bias) <= largest * lost_mass + 1e-12
        assert lost_mass <= float(pi_Y[w_Y > cap].sum()) + 1e-12
        second_moment = float(_mean(mu_Y, (weights.truncated(w_Y, cap) * f_Y).square()))
        assert second_moment <= cap * float(_mean(pi_Y, f_Y.square())) + 1e-12


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("noise", NOISES)
def test_the_cost_of_masking(cap, noise):
    """The bias of a mask is `-E_pi[1{w > C} f]`: for f >= 0 at least that of the truncation at the same C."""
    policies = Policies.random(Toy(4), seed=3, mismatch=noise)
    mu_Y, w_Y, f_Y = policies.probability_Y, policies.weight_Y, policies.toy.reward_Y
    pi_Y = mu_Y * w_Y
    truth = float(_mean(pi_Y, f_Y))
    masked = float(_mean(mu_Y, weights.masked(w_Y, 0.0, cap) * f_Y)) - truth
    truncated = float(_mean(mu_Y, weights.truncated(w_Y, cap) * f_Y)) - truth
    assert masked == pytest.approx(-float(_mean(pi_Y, (w_Y > cap) * f_Y)), abs=1e-12)
    assert masked <= truncated + 1e-12
    assert truncated <= 1e-12
    below = float(_mean(mu_Y, weights.masked(w_Y, 0.5, cap) * f_Y)) - truth
    outside_Y = (w_Y > cap) | (w_Y < 0.5)
    assert below == pytest.approx(-float(_mean(pi_Y, outside_Y * f_Y)), abs=1e-12)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("noise", NOISES)
def test_the_identities_hold_for_gradients(cap, noise):
    """f = r grad log pi, through the composed objective: Seq-TIS and Seq-MIS lose exactly what the identities say."""
    policies = Policies.random(Toy(4), seed=3, mismatch=noise)
    toy, w_Y = policies.toy, policies.weight_Y
    pi_Y = policies.probability_Y * w_Y
    f_YP = toy.reward_Y[:, None] * toy.score_YP(policies.current)
    exact_P = exact_gradient(toy, policies.current, toy.reward_Y)
    truncated_P = gradients_of_answers(reinforce(f"sequence_tis:{cap}"), policies, toy.reward_Y).mean_P
    lost_P = _mean(pi_Y, (1 - cap / w_Y).clamp(min=0)[:, None] * f_YP)
    torch.testing.assert_close(truncated_P, exact_P - lost_P, rtol=0, atol=1e-12)
    masked_P = gradients_of_answers(reinforce(f"sequence_mis:{cap}"), policies, toy.reward_Y).mean_P
    torch.testing.assert_close(masked_P, exact_P - _mean(pi_Y, (w_Y > cap)[:, None] * f_YP), rtol=0, atol=1e-12)
    largest = float(f_YP.norm(dim=-1).max())
    lost_mass = float((pi_Y - cap * policies.probability_Y).clamp(min=0).sum())
    assert float((truncated_P - exact_P).norm()) <= largest * lost_mass + 1e-12


def test_the_caps_of_these_tests_act():
    """At the largest mismatch every cap but the last cuts something, at the smallest only those of 1 and below do."""
    cut = {
        noise: [bool((Policies.random(Toy(4), 3, mismatch=noise).weight_Y > cap).any()) for cap in CAPS]
        for noise in NOISES
    }
    assert cut[1.0] == [True, True, True, True, False]
    assert cut[0.02] == [True, True, False, False, False]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", NOISES)
def test_ignoring_the_mismatch_costs_at_most_the_total_variation(noise, seed):
    """The gap is `sum_y (mu - pi) A grad log pi`, at most `2 TV(mu, pi) max |A grad log pi|`."""
    policies = Policies.random(Toy(4), seed, mismatch=noise)
    toy, mu_Y = policies.toy, policies.probability_Y
    f_YP = toy.reward_Y[:, None] * toy.score_YP(policies.current)
    exact_P = exact_gradient(toy, policies.current, toy.reward_Y)
    found_P = gradients_of_answers(reinforce(), policies, toy.reward_Y).mean_P
    gap_Y = mu_Y - mu_Y * policies.weight_Y
    torch.testing.assert_close(found_P - exact_P, _mean(gap_Y, f_YP), rtol=0, atol=1e-12)
    assert float((found_P - exact_P).norm()) <= float(gap_Y.abs().sum() * f_YP.norm(dim=-1).max())
