"""The other side of the comparison: gradients written out as sums of grad log pi, in plain Python floats.

Nothing here imports the objectives. An algorithm is three things: what each token's advantage is, what share of the
loss each token has (the reduction), and a coefficient: by how much its grad log pi counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import log, prod
from statistics import mean, stdev

import torch
from torch import Tensor

from tests.objectives.enumeration import Policies


@dataclass(frozen=True)
class Answer:
    """One answer: its tokens' probabilities under the four policies, its reward, and grad log pi of each token."""

    pi: list[float]
    prox: list[float]
    mu: list[float]
    ref: list[float]
    reward: float
    value: list[float]
    score_TP: Tensor

    @property
    def length(self) -> int:
        return len(self.pi)

    @property
    def rho(self) -> list[float]:
        """pi / pi_prox: staleness."""
        return [new / old for new, old in zip(self.pi, self.prox, strict=True)]

    @property
    def w(self) -> list[float]:
        """pi_prox / mu: mismatch."""
        return [new / old for new, old in zip(self.prox, self.mu, strict=True)]

    @property
    def whole(self) -> list[float]:
        """pi / mu: both."""
        return [new / old for new, old in zip(self.pi, self.mu, strict=True)]


def listed(policies: Policies, reward_Y: Tensor, value_S: Tensor | None = None) -> list[Answer]:
    """All answers of the toy."""
    toy = policies.toy
    tables = policies.current, policies.proximal, policies.behaviour, policies.reference
    probabilities = [toy.logp_N(logits_SV).exp() for logits_SV in tables]
    value_N = torch.zeros(len(toy.answer_N)) if value_S is None else value_S[toy.state_N]
    score_NP = toy.score_NP(policies.current)
    found = []
    for answer, reward in enumerate(reward_Y.tolist()):
        own_N = toy.answer_N == answer
        lists = [probability_N[own_N].tolist() for probability_N in probabilities]
        found.append(Answer(*lists, reward, value_N[own_N].tolist(), score_NP[own_N]))
    return found


Numbers = list[list[float]]
"""One number per token of each answer of a batch."""
Advantages = Callable[[list[Answer]], Numbers]
Shares = Callable[[list[Answer]], Numbers]
Coefficients = Callable[[Answer, list[float]], list[float]]


def expected_gradient(
    every: list[Answer],
    advantages: Advantages,
    shares: Shares,
    coefficients: Coefficients,
    data: Callable[[list[Answer]], bool] = lambda batch: True,
    num_rollouts: int = 2,
) -> Tensor:
    """The exact mean, over batches drawn from mu, of `sum_i sum_t share_it coefficient_it grad log pi(y_it)`.

    data: False for a batch (of one group) that is filtered out and has no gradient.
    """
    total_P = torch.zeros(every[0].score_TP.shape[1], dtype=torch.float64)
    for batch in product(every, repeat=num_rollouts):
        batch = list(batch)
        if not data(batch):
            continue
        probability = prod(prod(answer.mu) for answer in batch)
        advantage, share = advantages(batch), shares(batch)
        for answer, own_advantage, own_share in zip(batch, advantage, share, strict=True):
            coefficient = torch.tensor(coefficients(answer, own_advantage), dtype=torch.float64)
            total_P += probability * (coefficient * torch.tensor(own_share, dtype=torch.float64)) @ answer.score_TP
    return total_P


# ---- advantages


def per_rollout(of_rewards: Callable[[list[float]], list[float]]) -> Advantages:
    """One number per answer, the same on all its tokens."""

    def advantages(batch: list[Answer]) -> Numbers:
        numbers = of_rewards([answer.reward for answer in batch])
        return [[number] * answer.length for answer, number in zip(batch, numbers, strict=True)]

    return advantages


def centred(rewards: list[float]) -> list[float]:
    return [reward - mean(rewards) for reward in rewards]


def standardised(rewards: list[float]) -> list[float]:
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    return [(reward - mean(rewards)) / (stdev(rewards) + 1e-6) for reward in rewards]


def others_left_out(rewards: list[float]) -> list[float]:
    return [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]


def whitened(advantages: Advantages) -> Advantages:
    """To mean 0 and standard deviation 1 over the tokens of the batch."""

    def over_tokens(batch: list[Answer]) -> Numbers:
        raw = advantages(batch)
        flat = [number for numbers in raw for number in numbers]
        if max(flat) == min(flat):
            return [[0.0] * len(numbers) for numbers in raw]
        return [[(number - mean(flat)) / (stdev(flat) + 1e-8) for number in numbers] for numbers in raw]

    return over_tokens


def rewards_to_go(reward_kl: float) -> Advantages:
    """The reward, minus `reward_kl log(pi_prox / ref)` of the token and of all after it."""

    def advantages(batch: list[Answer]) -> Numbers:
        found = []
        for answer in batch:
            kl = [log(prox / ref) for prox, ref in zip(answer.prox, answer.ref, strict=True)]
            found.append([answer.reward - reward_kl * sum(kl[place:]) for place in range(answer.length)])
        return found

    return advantages


def generalised(gamma: float, lam: float) -> Advantages:
    """GAE as its definition says: `A_t = sum_l (gamma lam)^l (r + gamma V' - V)_(t + l)`."""

    def of_answer(answer: Answer) -> list[float]:
        reward = [0.0] * (answer.length - 1) + [answer.reward]
        value = [*answer.value, 0.0]
        delta = [reward[t] + gamma * value[t + 1] - value[t] for t in range(answer.length)]
        return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, answer.length)) for t in range(answer.length)]

    return lambda batch: [of_answer(answer) for answer in batch]


# ---- reductions, of a batch of one group


def _all(number: float, batch: list[Answer]) -> Numbers:
    return [[number] * answer.length for answer in batch]


def token_mean(batch: list[Answer]) -> Numbers:
    return _all(1 / sum(answer.length for answer in batch), batch)


def rollout_mean_token_mean(batch: list[Answer]) -> Numbers:
    return [[1 / len(batch) / answer.length] * answer.length for answer in batch]


def rollout_mean_token_sum(batch: list[Answer]) -> Numbers:
    return _all(1 / len(batch), batch)


def constant(length: int) -> Shares:
    return lambda batch: _all(1 / len(batch) / length, batch)
