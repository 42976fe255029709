"""The inputs that verl and Headway are compared on: rollouts of several lengths, in short decimals.

Axes: R rollouts, T padded positions.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

DIGITS = 12


@dataclass(frozen=True)
class Batch:
    """Rollouts of several lengths: a field has a list per rollout (per token), or a number per rollout.

    `mask` is 1 for trained tokens; a 0 inside a rollout is a token that the model did not write. Beyond a rollout's
    length, up to `width`, is padding.
    """

    name: str
    width: int
    fields: dict[str, list]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.fields["mask"]]

    def tensor(self, field: str) -> Tensor:
        rows = self.fields[field]
        if not isinstance(rows[0], list):
            return torch.tensor(rows, dtype=torch.float64)
        return torch.tensor([row + [0] * (self.width - len(row)) for row in rows], dtype=torch.float64)

    @property
    def mask_RT(self) -> Tensor:
        return self.tensor("mask")

    def per_token(self, field: str) -> Tensor:
        """A field per token as it is; one per rollout on each of its trained tokens, as verl's advantages are."""
        value = self.tensor(field)
        return value if value.dim() == 2 else value.unsqueeze(-1) * self.mask_RT

    def last_token_reward(self, field: str = "reward") -> Tensor:
        """verl puts a rollout's reward on its last token."""
        reward_RT = torch.zeros(len(self.lengths), self.width, dtype=torch.float64)
        for row, (length, reward) in enumerate(zip(self.lengths, self.fields[field], strict=True)):
            reward_RT[row, length - 1] = reward
        return reward_RT

    def ragged(self, value: Tensor) -> list:
        value = value.detach()
        if value.dim() == 1:
            return [rounded(item) for item in value.tolist()]
        return [
            [rounded(item) for item in row[:length]] for row, length in zip(value.tolist(), self.lengths, strict=True)
        ]


def rounded(number: float) -> float | int:
    short = float(f"{number:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e6 else short


@dataclass(frozen=True)
class Draw:
    """Random numbers for every token of a batch, in short decimals; the same for the same name."""

    source: random.Random
    mask: list[list[int]]

    def tokens(self, low: float, high: float) -> list[list[float]]:
        return [[round(self.source.uniform(low, high), 4) for _ in row] for row in self.mask]

    def rollouts(self, low: float, high: float) -> list[float]:
        return [round(self.source.uniform(low, high), 3) for _ in self.mask]

    def near(self, rows: list[list[float]], spread: float, scales: list[float]) -> list[list[float]]:
        """Rows moved by up to `spread`, and some tokens by up to three times that; a scale per rollout, in turn."""

        def moved(rollout: int, position: int, value: float) -> float:
            scale = scales[rollout % len(scales)] * (3.0 if (rollout + position) % 5 == 4 else 1.0)
            return round(value + scale * self.source.uniform(-spread, spread), 4)

        return [[moved(i, j, value) for j, value in enumerate(row)] for i, row in enumerate(rows)]


def random_batch(name: str, width: int, group: list[int], reward: list[float], mask: list[list[int]]) -> Batch:
    """Rollouts whose policies differ: in some by hardly anything, in some tokens beyond every clip and cap."""
    draw = Draw(random.Random(name), mask)
    old, value, token_reward = draw.tokens(-4.5, -2.3), draw.tokens(-1.0, 1.0), draw.tokens(-0.2, 0.2)
    for row, last in zip(token_reward, reward, strict=True):
        row[-1] = round(row[-1] + last, 4)
    fields = {
        "group": group,
        "mask": mask,
        "reward": reward,
        "second_reward": draw.rollouts(0.0, 1.0),
        "greedy_reward": draw.rollouts(0.0, 1.0),
        "token_reward": token_reward,
        "logp": draw.near(old, 0.7, [1.0, 0.8, 0.3]),
        "old": old,
        "rollout": draw.near(old, 0.6, [1.0, 0.002, 0.2, 0.6]),
        "ref": draw.near(old, 0.6, [1.0]),
        "advantage": draw.rollouts(-1.5, 1.5),
        "token_advantage": draw.tokens(-1.5, 1.5),
        "old_value": value,
        "value": draw.near(value, 0.6, [1.0, 0.4]),
        "return": draw.tokens(-1.0, 1.0),
        "sum_pi_squared": draw.tokens(0.1, 0.6),
        "loss": draw.tokens(-1.0, 1.0),
    }
    return Batch(name, width, fields)


def plain_batch() -> Batch:
    """Three groups of four; all rewards of the last are equal. Nothing is masked, the longest is below the width."""
    lengths = [3, 5, 1, 6, 4, 2, 6, 3, 5, 4, 2, 7]
    reward = [1, 0, 0, 1, 0.5, -0.25, 1, 0, 1, 1, 1, 1]
    return random_batch("plain", 8, [0] * 4 + [1] * 4 + [2] * 4, reward, [[1] * length for length in lengths])


def masked_batch() -> Batch:
    """Groups of four, one and two; masked tokens inside three rollouts, and a rollout with nothing else."""
    mask = [[1, 1, 0, 0, 1], [0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0, 1, 1], [1, 1], [1, 1, 1], [1, 1, 1, 1]]
    return random_batch("masked", 7, [0, 0, 0, 0, 1, 2, 2], [1, 0, 0, 0.5, 1, 1, 0], mask)


def extreme_batch() -> Batch:
    """Log-ratios beyond every clamp: of current to old, of old to rollout, and of the reference to current."""
    old = -30.0
    policy = [[0.1, 4.0, 21.0, -21.0], [-0.1, 4.0, 25.0, -25.0], [15.0, 16.0]]
    mismatch = [[0.0, 21.0, -21.0, 3.0], [25.0, -30.0, 1.0, 2.0], [0.1, -0.05]]
    reference = [[2.3, 2.7, 3.0, 25.0], [-9.0, -11.0, -12.0, -25.0], [0.0, 0.5]]
    fields = {
        "group": [0, 0, 0],
        "mask": [[1] * len(row) for row in policy],
        "logp": [[old + item for item in row] for row in policy],
        "old": [[old for _ in row] for row in policy],
        "rollout": [[old - item for item in row] for row in mismatch],
        "advantage": [1.0, -1.0, -1.0],
    }
    fields["ref"] = [
        [logp + item for logp, item in zip(*rows, strict=True)] for rows in zip(fields["logp"], reference, strict=True)
    ]
    return Batch("extreme", 4, fields)


def one_token_each(name: str, **fields: list[float]) -> Batch:
    num = len(next(iter(fields.values())))
    return Batch(name, 1, {"group": [0] * num, "mask": [[1]] * num, **fields})


def one_rollout(name: str, **fields: list[float]) -> Batch:
    rows = {field: [row] for field, row in fields.items()}
    length = len(next(iter(fields.values())))
    return Batch(name, length, {"group": [0], "mask": [[1] * length], **rows})


def worked_batches() -> list[Batch]:
    """Inputs small enough to work by hand."""
    ratios = [0.6, 0.79, 0.81, 1.0, 1.2, 1.27, 1.29, 1.6, 5.0]
    clip = {"old": [-3.0] * 9, "logp": [-3.0 + math.log(ratio) for ratio in ratios]}
    weights = [math.log(weight) for weight in (0.3, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 6.0)]
    three = [[math.log(p) for p in row] for row in ([0.5, 0.4, 0.9], [0.4, 0.5, 0.85], [0.38, 0.6, 0.8])]
    lengths = (2, 4, 6)
    aggregate = {
        "group": [0, 1, 1],
        "mask": [[1] * length for length in lengths],
        "loss": [[float(i + 1)] * length for i, length in enumerate(lengths)],
    }
    return [
        one_token_each("worked_rewards", reward=[1, 0, 0, 1, 1, 0, 0, 0]),
        one_rollout("worked_clip_positive", **clip, advantage=[1.0] * 9),
        one_rollout("worked_clip_negative", **clip, advantage=[-1.0] * 9),
        one_rollout("worked_weights", old=weights, rollout=[0.0] * 8),
        one_rollout("worked_gae", token_reward=[0.0, 0.0, 1.0], old_value=[0.5, 0.6, 0.7]),
        one_rollout("worked_kl", logp=[0.0] * 5, ref=[-0.5, -0.1, 0.0, 0.1, 0.5]),
        one_rollout("worked_gspo", old=[-2.0] * 4, logp=[-1.98, -2.01, -1.97, -2.02], advantage=[1.0] * 4),
        one_rollout("worked_three_policies", logp=three[0], old=three[1], rollout=three[2], advantage=[0.5] * 3),
        Batch("worked_aggregation", 10, aggregate),
    ]


def batches() -> dict[str, Batch]:
    """All of them by name."""
    listed = (plain_batch(), masked_batch(), extreme_batch(), *worked_batches())
    return {batch.name: batch for batch in listed}
