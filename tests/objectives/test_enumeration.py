"""Truth by enumeration: vocabulary 3, answers of up to 4 tokens, every expectation a sum over all answers, float64.

A policy is a table of logits, one row per unfinished prefix. Token 2 ends an answer; the last position ends it too.

Not covered: that a per-token weight removes the bias of several-token answers. It does not; only one-token answers are
exact under it.
"""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from headway.objectives import compose
from headway.objectives.named import Objective, objective
from headway.objectives.weights import truncated

VOCABULARY, END = 3, 2


def answers(max_length: int) -> list[tuple[int, ...]]:
    """Every answer: the tokens up to the first END, or max_length tokens without one."""
    ended = {
        tokens[: tokens.index(END) + 1] if END in tokens else tokens
        for tokens in product(range(VOCABULARY), repeat=max_length)
    }
    return sorted(ended)


class Enumeration:
    """All answers Y of a tabular policy, flattened to tokens N; prefixes S index the table of logits."""

    def __init__(self, max_length: int) -> None:
        self.answers = answers(max_length)
        states = sorted({answer[:cut] for answer in self.answers for cut in range(len(answer))})
        self.num_states = len(states)
        places = [
            (states.index(answer[:position]), token, index)
            for index, answer in enumerate(self.answers)
            for position, token in enumerate(answer)
        ]
        self.state_N, self.token_N, self.answer_N = torch.tensor(places).unbind(1)

    def random_logits(self, seed: int, noise: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return noise * torch.randn(self.num_states, VOCABULARY, generator=generator, dtype=torch.float64)

    def rewards(self) -> Tensor:
        """One number per answer, without structure that could hide an error."""
        return torch.tensor([(sum(answer) * 7 + 3 * len(answer)) % 5 / 2 for answer in self.answers]).double()

    def logp_N(self, logits_SV: Tensor) -> Tensor:
        return logits_SV.log_softmax(-1)[self.state_N, self.token_N]

    def logp_Y(self, logits_SV: Tensor) -> Tensor:
        zero_Y = torch.zeros(len(self.answers), dtype=torch.float64)
        return zero_Y.index_add(0, self.answer_N, self.logp_N(logits_SV))


def exact_gradient(every: Enumeration, logits_SV: Tensor, reward_Y: Tensor) -> Tensor:
    """Gradient of J = sum_y pi(y) r(y): no estimator, no log-derivative trick."""
    logits_SV = logits_SV.clone().requires_grad_()
    expected_reward = (every.logp_Y(logits_SV).exp() * reward_Y).sum()
    return torch.autograd.grad(expected_reward, logits_SV)[0]


def expected_loss_gradient(
    description: Objective, every: Enumeration, logits_SV: Tensor, behaviour_SV: Tensor, advantage_Y: Tensor
) -> Tensor:
    """Expectation over one answer from mu of the gradient of the composed loss of that answer alone."""
    logits_SV = logits_SV.clone().requires_grad_()
    mask_N = torch.ones(len(every.token_N), dtype=torch.bool)
    probability_Y = every.logp_Y(behaviour_SV).exp()
    loss, _ = compose.loss(
        description,
        every.logp_N(logits_SV),
        every.logp_N(behaviour_SV),
        None,
        advantage_Y[every.answer_N],
        mask_N,
        weight_N=probability_Y[every.answer_N],
    )
    return torch.autograd.grad(loss, logits_SV)[0]


def test_all_answers_are_listed_once_and_their_probabilities_sum_to_one():
    assert len(answers(3)) == 1 + 2 + 4 * 3
    assert len(answers(4)) == 1 + 2 + 4 + 8 * 3
    assert all(first != second for first, second in pairwise(answers(4)))
    every = Enumeration(4)
    assert every.logp_Y(every.random_logits(0)).exp().sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("max_length", [1, 3, 4])
@pytest.mark.parametrize("surrogate", ["clipped", "policy_gradient"])
@pytest.mark.parametrize("baseline", [0.0, 0.8])
def test_on_policy_the_loss_has_the_exact_policy_gradient(max_length, surrogate, baseline):
    """mu = pi: all ratios are 1, and minus the expected gradient is the gradient of J, whatever the baseline."""
    every = Enumeration(max_length)
    logits_SV = every.random_logits(1)
    description = objective("grpo", surrogate=surrogate, reduction="rollout_mean_token_sum")
    gradient = expected_loss_gradient(description, every, logits_SV, logits_SV, every.rewards() - baseline)
    torch.testing.assert_close(-gradient, exact_gradient(every, logits_SV, every.rewards()), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("reduction", "length", "scale"), [("rollout_mean_token_sum", None, 1), ("constant", 3, 1 / 3)]
)
def test_on_policy_groups_of_two_without_std_have_the_policy_gradient_by_one_half(reduction, length, scale):
    """Every pair of answers is a group. The group's mean contains the rollout itself, so J's gradient is scaled by
    (G - 1) / G = 1/2 and keeps its direction; a constant denominator scales it again."""
    every = Enumeration(3)
    logits_SV = every.random_logits(2).requires_grad_()
    num_answers = len(every.answers)
    answer_R = torch.cartesian_prod(torch.arange(num_answers), torch.arange(num_answers)).flatten()
    group_R = torch.arange(num_answers**2).repeat_interleave(2)
    tokens_of = [torch.nonzero(every.answer_N == answer).flatten() for answer in range(num_answers)]
    place_N = torch.cat([tokens_of[answer] for answer in answer_R])
    rollout_N = torch.repeat_interleave(
        torch.arange(len(answer_R)), torch.tensor([len(tokens_of[answer]) for answer in answer_R])
    )
    description = objective("grpo", advantage="group_mean", reduction=reduction, length=length)
    mask_N = torch.ones(len(place_N), dtype=torch.bool)
    result = compose.advantages(description, every.rewards()[answer_R], group_R)
    weights = compose.token_weights(description, mask_N, rollout_N, group_R, result.usable_R, dtype=torch.float64)
    probability_G = every.logp_Y(logits_SV.detach()).exp()[answer_R].reshape(-1, 2).prod(1)
    # The batch's denominators count every pair once; an expectation counts each by its probability.
    expectation_N = len(probability_G) * probability_G[group_R[rollout_N]] * weights.weight_N
    logp_N = every.logp_N(logits_SV)[place_N]
    loss, _ = compose.loss(
        description, logp_N, logp_N.detach(), None, result.advantage_R[rollout_N], mask_N, expectation_N
    )
    (gradient,) = torch.autograd.grad(loss, logits_SV)
    expected = scale * exact_gradient(every, logits_SV.detach(), every.rewards()) / 2
    torch.testing.assert_close(-gradient, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_off_policy_one_token_answers_are_exact_under_the_untruncated_weight(noise):
    every = Enumeration(1)
    logits_SV = every.random_logits(3)
    behaviour_SV = logits_SV + every.random_logits(4, noise)
    description = objective("grpo", weight_cap=float("inf"), reduction="rollout_mean_token_sum")
    gradient = expected_loss_gradient(description, every, logits_SV, behaviour_SV, every.rewards())
    expected = exact_gradient(every, logits_SV, every.rewards())
    torch.testing.assert_close(-gradient, expected, rtol=0, atol=1e-14)
    ignored = objective("grpo", weight="none", reduction="rollout_mean_token_sum")
    biased = expected_loss_gradient(ignored, every, logits_SV, behaviour_SV, every.rewards())
    assert float((-biased - expected).norm() / expected.norm()) > 0.01


@pytest.mark.parametrize("cap", [0.5, 1.0, 2.0, 1e6])
@pytest.mark.parametrize("noise", [0.3, 1.0])
@pytest.mark.parametrize("max_length", [1, 3, 4])
def test_the_cost_of_truncation(cap, noise, max_length):
    """E_mu[min(w, C) f] = E_pi[min(1, C / w) f]; the bias is -E_mu[(w - C)+ f], bounded by the mass that was cut."""
    every = Enumeration(max_length)
    logits_SV = every.random_logits(5)
    mu_Y = every.logp_Y(logits_SV + every.random_logits(6, noise)).exp()
    pi_Y = every.logp_Y(logits_SV).exp()
    f_Y, ratio_Y = every.rewards(), pi_Y / mu_Y
    truncated_mean = float((mu_Y * truncated(ratio_Y, cap) * f_Y).sum())
    assert truncated_mean == pytest.approx(float((pi_Y * (cap / ratio_Y).clamp(max=1) * f_Y).sum()), abs=1e-12)
    bias = truncated_mean - float((pi_Y * f_Y).sum())
    assert bias == pytest.approx(-float((mu_Y * (ratio_Y - cap).clamp(min=0) * f_Y).sum()), abs=1e-12)
    lost_mass = float((pi_Y - cap * mu_Y).clamp(min=0).sum())
    assert abs(bias) <= float(f_Y.max()) * lost_mass + 1e-12
    second_moment = float((mu_Y * truncated(ratio_Y, cap).square() * f_Y.square()).sum())
    assert second_moment <= cap * float((pi_Y * f_Y.square()).sum()) + 1e-12
