"""Every cell of the table of KL estimators in `headway/objectives/kl.py`, as exact sums.

Proved: the mean value and the mean gradient (as a loss) of each estimator, under samples from pi, and of the corrected
ones under samples from mu != pi; for one token given its prefix, which is the whole answer at T = 1. For longer
answers: what a loss per token gives (the KL of each prefix, weighted by how often *the sampling policy* comes there)
and what it leaves out; and that the same penalty in the reward is the gradient of the KL of whole answers. Not covered:
the clamp of log-ratios at ±20, which no answer here reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from headway.objectives import kl
from headway.objectives.named import objective
from headway.objectives.parts import KL_ESTIMATORS, Advantage, Objective, ReferenceKL, Term
from tests.objectives.enumeration import (
    Policies,
    Toy,
    exact_gradient,
    exact_kl,
    gradients_of_answers,
    gradients_of_batches,
    relative,
)

PLAIN = [name for name in KL_ESTIMATORS if not KL_ESTIMATORS[name].corrected]
CORRECTED = [name for name in KL_ESTIMATORS if KL_ESTIMATORS[name].corrected]
SEEDS = range(3)


def one_token(seed: int, mismatch: float = 0.0) -> Policies:
    return Policies.random(Toy(1), seed, mismatch=mismatch)


def mean_and_gradient(estimator: str, policies: Policies) -> tuple[float, Tensor]:
    """Of the sum over an answer's tokens, over answers from mu: its exact mean, and the mean of its gradient."""
    toy = policies.toy
    logits_SV = policies.current.clone().requires_grad_()
    everything_N = torch.ones_like(toy.token_N, dtype=torch.bool)
    estimate_N = kl.estimate(
        estimator, toy.logp_N(logits_SV), toy.logp_N(policies.reference), everything_N, toy.logp_N(policies.behaviour)
    )
    mean = policies.probability_Y @ toy.sum_Y(estimate_N)
    return float(mean.detach()), torch.autograd.grad(mean, logits_SV)[0].flatten()


def gradient_of(function: Callable[[Tensor], Tensor], logits_SV: Tensor) -> Tensor:
    logits_SV = logits_SV.clone().requires_grad_()
    return torch.autograd.grad(function(logits_SV), logits_SV)[0].flatten()


def true_kls(policies: Policies) -> dict[str, tuple[float, Tensor]]:
    """The two divergences of whole answers, by name: value and gradient in pi."""
    toy, pi_SV, ref_SV = policies.toy, policies.current, policies.reference
    forwards = partial(exact_kl, toy, other_SV=ref_SV)

    def backwards(logits_SV: Tensor) -> Tensor:
        return exact_kl(toy, ref_SV, logits_SV)

    return {
        "KL(pi, ref)": (float(forwards(pi_SV)), gradient_of(forwards, pi_SV)),
        "KL(ref, pi)": (float(backwards(pi_SV)), gradient_of(backwards, pi_SV)),
        "": (float("nan"), torch.zeros(pi_SV.numel(), dtype=torch.float64)),
    }


# ---- one token given its prefix: whole answers of one token


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_what_the_table_says_of_one_token(estimator, seed):
    """All cells but the values of k2: mean value and mean gradient are those of the named divergence, the corrected
    ones under samples from mu. Read from `KL_ESTIMATORS`, which refusals rest on."""
    gives = KL_ESTIMATORS[estimator]
    policies = one_token(seed, mismatch=0.7 if gives.corrected else 0.0)
    true = true_kls(policies)
    value, gradient_P = mean_and_gradient(estimator, policies)
    if gives.value:
        assert value == pytest.approx(true[gives.value][0], abs=1e-12)
    if gives.gradient or estimator == "k1":
        torch.testing.assert_close(gradient_P, true[gives.gradient][1], rtol=0, atol=1e-12)
    assert float((true["KL(pi, ref)"][1] - true["KL(ref, pi)"][1]).norm()) > 1e-3, "the two must be told apart"


def test_the_table_is_what_it_says():
    """Fixed here by hand, so that the test above can't follow a table that was changed by mistake."""
    reverse, forward = "KL(pi, ref)", "KL(ref, pi)"
    assert {name: (gives.value, gives.gradient, gives.corrected) for name, gives in KL_ESTIMATORS.items()} == {
        "k1": (reverse, "", False),
        "k2": ("", reverse, False),
        "k3": (reverse, forward, False),
        "k3_value_k2_gradient": (reverse, reverse, False),
        "k1_corrected": (reverse, reverse, True),
        "k2_corrected": ("", reverse, True),
        "k3_corrected": (reverse, reverse, True),
    }


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["k2", "k2_corrected"])
def test_the_value_of_k2_is_near_and_is_not_the_divergence(estimator, seed):
    policies = one_token(seed, mismatch=0.7 if KL_ESTIMATORS[estimator].corrected else 0.0)
    value, _ = mean_and_gradient(estimator, policies)
    true = true_kls(policies)["KL(pi, ref)"][0]
    assert 1e-3 < abs(value / true - 1) < 0.3


@pytest.mark.parametrize("estimator", PLAIN)
def test_uncorrected_estimators_are_wrong_under_samples_of_another_policy(estimator):
    """Neither their values nor their gradients are the table's, so `corrected` matters."""
    policies = one_token(0, mismatch=0.7)
    true = true_kls(policies)
    value, gradient_P = mean_and_gradient(estimator, policies)
    assert abs(value - true["KL(pi, ref)"][0]) > 1e-3
    assert float((gradient_P - true[KL_ESTIMATORS[estimator].gradient][1]).norm()) > 1e-3


@pytest.mark.parametrize("estimator", CORRECTED)
def test_corrected_estimators_are_the_plain_ones_where_mu_is_pi(estimator):
    """In value. In gradient k1 and k3 have one more term, the score times their value, and that is what mends them."""
    policies = one_token(1)
    plain = estimator.removesuffix("_corrected")
    assert mean_and_gradient(estimator, policies)[0] == pytest.approx(mean_and_gradient(plain, policies)[0], abs=1e-14)


# ---- longer answers


def by_prefix(policies: Policies, sampler_SV: Tensor, direction: str) -> Callable[[Tensor], Tensor]:
    """`sum_s d(s) KL of the next token at s`: how often the sampler comes to each prefix is a constant."""
    visits_S, logref_SV = policies.toy.visits_S(sampler_SV), policies.reference.log_softmax(-1)

    def weighted(logits_SV: Tensor) -> Tensor:
        logp_SV = logits_SV.log_softmax(-1)
        new_SV, old_SV = (logp_SV, logref_SV) if direction == "KL(pi, ref)" else (logref_SV, logp_SV)
        return visits_S @ (new_SV.exp() * (new_SV - old_SV)).sum(-1)

    return weighted


@pytest.mark.parametrize("max_length", [2, 4])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_longer_answers_sum_the_divergences_of_their_prefixes(estimator, max_length):
    """With d the visits of the policy that *sampled*: pi for the plain estimators, mu for the corrected, whose weight
    of one token leaves the prefixes as they came."""
    gives = KL_ESTIMATORS[estimator]
    policies = Policies.random(Toy(max_length), seed=1, mismatch=0.7 if gives.corrected else 0.0)
    value, gradient_P = mean_and_gradient(estimator, policies)
    if gives.value:
        expected = by_prefix(policies, policies.behaviour, gives.value)(policies.current)
        assert value == pytest.approx(float(expected), abs=1e-12)
    if gives.gradient:
        expected_P = gradient_of(by_prefix(policies, policies.behaviour, gives.gradient), policies.current)
        torch.testing.assert_close(gradient_P, expected_P, rtol=0, atol=1e-12)
    else:
        assert float(gradient_P.norm()) < 1e-12


@pytest.mark.parametrize("max_length", [2, 4])
def test_a_loss_per_token_leaves_out_how_tokens_change_later_prefixes(max_length):
    """By samples of pi the *value* of k1 and k3 is the divergence of whole answers (chain rule); the gradient of the KL
    of whole answers is that of the loss per token plus `sum_s KL_s grad d(s)`, which is not small."""
    policies = Policies.random(Toy(max_length), seed=1)
    toy, logits_SV = policies.toy, policies.current
    true, true_P = true_kls(policies)["KL(pi, ref)"]
    for estimator in ("k1", "k3", "k3_value_k2_gradient"):
        assert mean_and_gradient(estimator, policies)[0] == pytest.approx(true, abs=1e-12)
    logp_SV, logref_SV = logits_SV.log_softmax(-1), policies.reference.log_softmax(-1)
    kl_S = (logp_SV.exp() * (logp_SV - logref_SV)).sum(-1)
    left_out_P = gradient_of(lambda logits_SV: toy.visits_S(logits_SV) @ kl_S, logits_SV)
    _, gradient_P = mean_and_gradient("k2", policies)
    torch.testing.assert_close(gradient_P + left_out_P, true_P, rtol=0, atol=1e-12)
    assert relative(gradient_P, true_P) > 0.05


@pytest.mark.parametrize("max_length", [2, 4])
def test_k3_on_longer_answers_is_not_the_other_kl_of_whole_answers(max_length):
    """It is the other KL of each prefix, but prefixes come from pi, where KL(ref, pi) of whole answers has them from
    the reference."""
    policies = Policies.random(Toy(max_length), seed=1)
    _, gradient_P = mean_and_gradient("k3", policies)
    _, forward_P = true_kls(policies)["KL(ref, pi)"]
    assert relative(gradient_P, forward_P) > 0.1
    from_reference = gradient_of(by_prefix(policies, policies.reference, "KL(ref, pi)"), policies.current)
    torch.testing.assert_close(from_reference, forward_P, rtol=0, atol=1e-12)


# ---- in the reward


@pytest.mark.parametrize("max_length", [1, 2, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_k1_in_the_reward_is_the_gradient_of_the_kl_of_whole_answers(seed, max_length):
    """pi = pi_prox = mu. Each token's advantage is the penalty of it and of all after it, and that is enough."""
    policies = Policies.random(Toy(max_length), seed)
    described = objective("reinforce", advantage="reward", reward_kl=0.3)
    nothing_Y = torch.zeros_like(policies.toy.reward_Y)
    found = gradients_of_batches(described, policies, nothing_Y, num_rollouts=1, group_size=1)
    _, true_P = true_kls(policies)["KL(pi, ref)"]
    torch.testing.assert_close(found.mean_P, -0.3 * true_P, rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_length", [1, 2, 3])
def test_rloo_ascends_the_reward_less_the_kl_exactly(max_length):
    """The named objective as it stands, over all pairs: `grad (E[r] - 0.03 KL(pi, ref))` of whole answers."""
    policies = Policies.random(Toy(max_length), seed=1)
    found = gradients_of_batches(objective("rloo"), policies, policies.toy.reward_Y)
    exact_P = exact_gradient(policies.toy, policies.current, policies.toy.reward_Y)
    _, true_P = true_kls(policies)["KL(pi, ref)"]
    torch.testing.assert_close(found.mean_P, exact_P - 0.03 * true_P, rtol=0, atol=1e-12)


# ---- as a term of an objective


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_a_kl_term_is_the_estimator_by_its_coefficient(estimator):
    """Through the composed loss, under mu, for answers of several tokens: minus the coefficient times the mean
    gradient."""
    policies = Policies.random(Toy(3), seed=2, mismatch=0.7)
    term = Term(loss=ReferenceKL(estimator=estimator), coefficient=0.3, reduction="rollout_mean_token_sum")
    described = Objective(name="kl", source="", advantage=Advantage(name="reward"), terms=(term,))
    found = gradients_of_answers(described, policies, policies.toy.reward_Y)
    _, gradient_P = mean_and_gradient(estimator, policies)
    torch.testing.assert_close(found.mean_P, -0.3 * gradient_P, rtol=0, atol=1e-12)
