"""Synthetic learning curves, for the tests of this folder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from headway.scaling.curve import Sigmoid
from headway.scaling.learning_curve import LearningCurve, Measured

START = 0.25

PUBLISHED = {
    "8B ScaleRL": (Sigmoid(START, 0.610, 1.92, 2542), 16_000),
    "32k tokens": (Sigmoid(START, 0.645, 1.89, 11_272), 60_000),
    "17Bx16 Scout": (Sigmoid(START, 0.710, 1.65, 4242), 30_000),
    "batch 2048": (Sigmoid(START, 0.645, 1.70, 10_909), 60_000),
}
"""The fits of arXiv 2510.13786 over GPU-hours, and up to where points are drawn here: some six midpoints."""

EARLY = 1500
"""GPU-hours that its fits leave out."""

NOISE = 0.005
"""Standard deviation of a pass rate over 1,000 prompts with 16 answers each, and a little wandering."""

STATED_ERROR = 0.02
"""Of the asymptote, as the paper has it."""


def spaced(first: float, last: float, num: int) -> list[float]:
    """Evenly in the logarithm."""
    return [first * (last / first) ** (index / (num - 1)) for index in range(num)]


def noisy(
    sigmoid: Sigmoid, computes: Sequence[float], seed: int, noise: float = NOISE, rho: float = 0.0
) -> LearningCurve:
    """rho: how much of a point's noise the next one has."""
    draw, last = random.Random(seed), None
    points: list[Measured] = []
    for compute in computes:
        new = draw.gauss(0.0, noise)
        last = new if last is None else rho * last + (1 - rho**2) ** 0.5 * new
        points.append(Measured(compute, sigmoid(compute) + last))
    return LearningCurve(f"curve {seed}", "gpu_hours", "pass_rate", points)


def published(name: str, seed: int, num: int = 20) -> LearningCurve:
    """With a point at compute 0."""
    sigmoid, last = PUBLISHED[name]
    return noisy(sigmoid, [0.0, *spaced(EARLY, last, num - 1)], seed)


def write_table(path: Path, curve: LearningCurve, x: str = "compute", y: str = "reward") -> Path:
    rows = [f"{x},{y}", *(f"{point.compute!r},{point.reward!r}" for point in curve.points)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path
