"""The toy in which every expectation is a sum: vocabulary 3, answers of up to 4 tokens, a table of logits, float64.

Axes: S unfinished prefixes (states), V the vocabulary, P = S * V parameters, flat; Y all answers, N their tokens, flat;
B batches, R rollouts of a batch, M the tokens of all batches.

Token 2 ends an answer; the last position ends it too. A policy is a table `logits_SV`, and the gradient of `log
pi(token | state)` is written out by hand (`Toy.score_NP`), so an estimator's gradient is a sum of known vectors with
one coefficient per token: the derivative of the composed loss by that token's log-prob. Gradients are given uphill, as
minus the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from headway.objectives import compose
from headway.objectives.parts import Objective
from headway.objectives.tokens import Tokens

VOCABULARY, END = 3, 2


def answers(max_length: int) -> list[tuple[int, ...]]:
    """Every answer: the tokens up to the first END, or max_length tokens without one."""
    ended = {
        tokens[: tokens.index(END) + 1] if END in tokens else tokens
        for tokens in product(range(VOCABULARY), repeat=max_length)
    }
    return sorted(ended)


class Toy:
    """All answers Y, flattened to tokens N; prefixes S index the tables."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.answers = answers(max_length)
        self.states = sorted({answer[:cut] for answer in self.answers for cut in range(len(answer))})
        places = [
            (self.states.index(answer[:position]), token, index)
            for index, answer in enumerate(self.answers)
            for position, token in enumerate(answer)
        ]
        self.state_N, self.token_N, self.answer_N = torch.tensor(places).unbind(1)
        self.length_Y = torch.bincount(self.answer_N)

    def logits(self, seed: int, noise: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return noise * torch.randn(len(self.states), VOCABULARY, generator=generator, dtype=torch.float64)

    @property
    def reward_Y(self) -> Tensor:
        """One number per answer, without structure that could hide an error."""
        return torch.tensor([(sum(answer) * 7 + 3 * len(answer)) % 5 / 2 for answer in self.answers]).double()

    def logp_N(self, logits_SV: Tensor) -> Tensor:
        return logits_SV.log_softmax(-1)[self.state_N, self.token_N]

    def logp_Y(self, logits_SV: Tensor) -> Tensor:
        return self.sum_Y(self.logp_N(logits_SV))

    def sum_Y(self, item_N: Tensor) -> Tensor:
        """The sum over each answer's tokens, of numbers or of vectors."""
        return item_N.new_zeros(len(self.answers), *item_N.shape[1:]).index_add(0, self.answer_N, item_N)

    def score_NP(self, logits_SV: Tensor) -> Tensor:
        """The gradient of each token's log-prob: `onehot(token) - pi(. | state)` in its state's row, 0 in the
        others."""
        row_NV = one_hot(self.token_N, VOCABULARY) - logits_SV.softmax(-1)[self.state_N]
        state_NS = one_hot(self.state_N, len(self.states)).double()
        return (state_NS[:, :, None] * row_NV[:, None, :]).flatten(1)

    def score_YP(self, logits_SV: Tensor) -> Tensor:
        return self.sum_Y(self.score_NP(logits_SV))

    def visits_S(self, logits_SV: Tensor) -> Tensor:
        """The probability that an answer passes through each unfinished prefix."""
        logp_SV = logits_SV.log_softmax(-1)
        return torch.stack(
            [
                torch.stack([logp_SV[self.states.index(state[:cut]), state[cut]] for cut in range(len(state))])
                .sum()
                .exp()
                if state
                else logp_SV.new_ones(())
                for state in self.states
            ]
        )

    def value_S(self, logits_SV: Tensor, reward_Y: Tensor) -> Tensor:
        """What a perfect critic says: the expected reward of an answer that has come to each prefix."""
        probability_Y = self.logp_Y(logits_SV).exp()
        value_S = []
        for state in self.states:
            through_Y = torch.tensor([answer[: len(state)] == state for answer in self.answers])
            value_S.append((probability_Y * reward_Y)[through_Y].sum() / probability_Y[through_Y].sum())
        return torch.stack(value_S)


def exact_gradient(toy: Toy, logits_SV: Tensor, reward_Y: Tensor) -> Tensor:
    """Gradient `[P]` of J = sum_y pi(y) r(y): no estimator, no log-derivative trick."""
    logits_SV = logits_SV.clone().requires_grad_()
    return torch.autograd.grad((toy.logp_Y(logits_SV).exp() * reward_Y).sum(), logits_SV)[0].flatten()


def exact_kl(toy: Toy, logits_SV: Tensor, other_SV: Tensor) -> Tensor:
    """KL(pi, other) of whole answers, with a gradient in both tables."""
    logp_Y = toy.logp_Y(logits_SV)
    return (logp_Y.exp() * (logp_Y - toy.logp_Y(other_SV))).sum()


@dataclass(frozen=True)
class Policies:
    """The tables of logits of pi, pi_prox, mu and the reference, `[S, V]` each."""

    toy: Toy
    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    reference: Tensor

    @staticmethod
    def random(toy: Toy, seed: int, staleness: float = 0.0, mismatch: float = 0.0) -> Policies:
        """pi_prox is pi with a change of logits of that standard deviation, mu is pi_prox with another."""
        current = toy.logits(4 * seed)
        proximal = current + toy.logits(4 * seed + 1, staleness)
        behaviour = proximal + toy.logits(4 * seed + 2, mismatch)
        return Policies(toy, current, proximal, behaviour, current + toy.logits(4 * seed + 3, 0.5))

    @cached_property
    def probability_Y(self) -> Tensor:
        """Of being sampled: mu(y)."""
        return self.toy.logp_Y(self.behaviour).exp()

    @cached_property
    def weight_Y(self) -> Tensor:
        """pi(y) / mu(y)."""
        return (self.toy.logp_Y(self.current) - self.toy.logp_Y(self.behaviour)).exp()

    def tokens(
        self, place_M: Tensor, rollout_M: Tensor, group_M: Tensor, advantage_M: Tensor, *weights: Tensor
    ) -> Tokens:
        """place_M: which of the toy's tokens each one is."""
        return Tokens(
            mask_N=torch.ones_like(place_M, dtype=torch.bool),
            rollout_N=rollout_M,
            group_N=group_M,
            behaviour_N=self.toy.logp_N(self.behaviour)[place_M],
            lag_N=torch.full_like(place_M, 2),
            advantage_N=advantage_M,
            weights=weights,
            proximal_N=self.toy.logp_N(self.proximal)[place_M],
            reference_N=self.toy.logp_N(self.reference)[place_M],
        )


@dataclass(frozen=True)
class Gradients:
    """The uphill gradient of every batch, and how likely each is under mu.

    Of the tokens M of all batches: importance_M, the product of their weights; acted, where a weight or a clip did.
    """

    gradient_BP: Tensor
    probability_B: Tensor
    importance_M: Tensor
    acted: Mapping[str, Tensor]

    @property
    def mean_P(self) -> Tensor:
        """The exact expectation."""
        return self.probability_B @ self.gradient_BP

    @property
    def variance(self) -> float:
        """`E|g|^2 - |E g|^2` of one batch."""
        return float(self.probability_B @ self.gradient_BP.square().sum(-1) - self.mean_P.square().sum())


def gradients_of_answers(objective: Objective, policies: Policies, advantage_Y: Tensor) -> Gradients:
    """Every answer as a batch of its own, with an advantage that is given; all of them in one call of the loss.

    An answer's tokens are summed, or averaged where the reduction says so. Weights that are self-normalised are divided
    by their exact mean under mu, which is the limit of large batches. Terms of pairs don't fit in here.
    """
    toy = policies.toy
    one_Y = torch.ones(len(toy.answers), dtype=torch.float64)
    share_Y = {"rollout_mean_token_sum": one_Y, "rollout_mean_token_mean": 1 / toy.length_Y.double()}
    weights = [share_Y[term.reduction][toy.answer_N] for term in objective.terms]
    place_N = torch.arange(len(toy.answer_N))
    tokens = policies.tokens(place_N, toy.answer_N, toy.answer_N, advantage_Y[toy.answer_N], *weights)
    if objective.self_normalise:
        tokens = replace(tokens, normaliser=_limit_of_the_normaliser(objective, policies, tokens, place_N))
    coefficient_N, aux = _coefficients(objective, policies, tokens, place_N)
    gradient_YP = toy.sum_Y(coefficient_N[:, None] * toy.score_NP(policies.current))
    return Gradients(gradient_YP, policies.probability_Y, aux.importance_N.detach(), aux.acted)


def _limit_of_the_normaliser(
    objective: Objective, policies: Policies, tokens: Tokens, place_N: Tensor
) -> tuple[float, ...] | None:
    """What the mean weight of a large batch tends to: each answer counts with its probability under mu."""
    toy, (term, *_) = policies.toy, objective.terms
    if all(weight.ratio.level == "token" for weight in term.weights):
        probable = tuple(weight_N * policies.probability_Y[toy.answer_N] for weight_N in tokens.weights)
        return compose.normaliser(objective, [replace(tokens, weights=probable)])
    _, aux = _coefficients(objective, policies, tokens, place_N)
    importance_Y = toy.sum_Y(aux.importance_N) / toy.length_Y  # the same at each token of an answer
    return (float(policies.probability_Y @ importance_Y),)


def every_batch(toy: Toy, num_rollouts: int) -> Tensor:
    """All ways to draw that many answers, in order: `[B, R]`."""
    return torch.cartesian_prod(*[torch.arange(len(toy.answers))] * num_rollouts).reshape(-1, num_rollouts)


def gradients_of_batches(
    objective: Objective,
    policies: Policies,
    reward_Y: Tensor,
    num_rollouts: int = 2,
    group_size: int = 2,
    value_S: Tensor | None = None,
) -> Gradients:
    """Every batch of answers through all of `compose`, as a train step goes through it, and what its gradient is."""
    toy = policies.toy
    answer_BR = every_batch(toy, num_rollouts)
    places_Y = [torch.nonzero(toy.answer_N == answer).flatten() for answer in range(len(toy.answers))]
    score_NP = toy.score_NP(policies.current)
    gradients, seen = [], []
    for answer_R in answer_BR:
        place_M = torch.cat([places_Y[answer] for answer in answer_R])
        tokens = _prepared(objective, policies, reward_Y, answer_R, place_M, group_size, value_S)
        coefficient_M, aux = _coefficients(objective, policies, tokens, place_M)
        gradients.append(coefficient_M @ score_NP[place_M])
        seen.append(aux)
    probability_B = policies.probability_Y[answer_BR].prod(1)
    importance_M = torch.cat([aux.importance_N.detach() for aux in seen])
    acted = {reason: torch.cat([aux.acted[reason] for aux in seen]) for reason in seen[0].acted}
    return Gradients(torch.stack(gradients), probability_B, importance_M, acted)


def _prepared(
    objective: Objective,
    policies: Policies,
    reward_Y: Tensor,
    answer_R: Tensor,
    place_M: Tensor,
    group_size: int,
    value_S: Tensor | None,
) -> Tokens:
    """One batch's tokens, with their advantages and reductions."""
    toy = policies.toy
    length_R, rollouts_R = toy.length_Y[answer_R], torch.arange(len(answer_R))
    group_R, rollout_M = rollouts_R // group_size, rollouts_R.repeat_interleave(length_R)
    selection = compose.select(objective, reward_Y[answer_R], group_R, torch.zeros_like(group_R, dtype=torch.bool))
    shaped_R = compose.shaped_rewards(objective, reward_Y[answer_R], length_R, budget_tokens=toy.max_length)
    credit = compose.credit(
        objective,
        selection,
        shaped_R,
        group_R,
        rollout_M,
        proximal_M=toy.logp_N(policies.proximal)[place_M],
        reference_M=toy.logp_N(policies.reference)[place_M],
        value_M=None if value_S is None else value_S[toy.state_N[place_M]],
    )
    everything_M = torch.ones_like(rollout_M, dtype=torch.bool)
    usable_R = selection.usable_R
    weights = compose.token_weights(objective, everything_M, rollout_M, group_R, usable_R, dtype=torch.float64)
    tokens = policies.tokens(place_M, rollout_M, group_R[rollout_M], credit.advantage_M, *weights)
    return replace(tokens, normaliser=compose.normaliser(objective, [tokens]))


def _coefficients(
    objective: Objective, policies: Policies, tokens: Tokens, place_M: Tensor
) -> tuple[Tensor, compose.TokenAux]:
    """Minus the derivative of the loss by each token's log-prob, and what was done to the tokens."""
    logp_M = policies.toy.logp_N(policies.current)[place_M].requires_grad_()
    loss, aux = compose.loss(objective, logp_M, tokens)
    (slope_M,) = torch.autograd.grad(loss, logp_M)
    return -slope_M, aux


def relative(estimate_P: Tensor, truth_P: Tensor) -> float:
    """|estimate - truth| / |truth|."""
    return float((estimate_P - truth_P).norm() / truth_P.norm())


def cosine(first_P: Tensor, second_P: Tensor) -> float:
    return float(first_P @ second_P / first_P.norm() / second_P.norm())
