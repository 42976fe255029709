"""What a fit says, in plain floats: each figure with its 95 % interval, or why the points don't determine it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PARAMETERS = {"asymptote": "A", "efficiency": "B", "midpoint": "C_mid", "start": "R_0"}
"""The names of a fit's parameters, and their letters in the formula."""


@dataclass(frozen=True)
class Estimate:
    """One figure and its 95 % interval.

    value: None where the points don't determine the figure, and `why` says why. low, high: None where the points set
    no such end. held: it was given and not fitted, and low and high are the value.
    """

    value: float | None
    low: float | None
    high: float | None
    why: str = ""
    held: bool = False


@dataclass(frozen=True)
class Point:
    """compute: in the unit of the curve's x; role: "fitted", "early" (left out) or "later" (held back)."""

    compute: float
    reward: float
    role: str = "fitted"


@dataclass(frozen=True)
class Drawn:
    """The curve of the best fit at one compute, None where that is not determined, and its 95 % interval there."""

    compute: float
    reward: float | None
    low: float
    high: float


@dataclass(frozen=True)
class Extrapolation:
    """The reward at one compute. times: that compute over the largest one that was fitted."""

    compute: float
    times: float
    reward: Estimate


@dataclass(frozen=True)
class HeldBack:
    """How the extrapolation came out on points that were held back.

    num: how many; num_inside: how many lie in the 95 % interval of the curve widened by the noise of a point;
    mean_miss: mean of seen minus foretold; rms_miss: root mean square of that.
    """

    num: int
    num_inside: int
    mean_miss: float
    rms_miss: float


@dataclass(frozen=True)
class Fit:
    """One learning curve and the sigmoid through it.

    name: of the curve; x, y: what compute and reward are; points: all of them, in order of compute. noise: standard
    deviation of a point about the curve; autocorrelation: of neighbouring points' noise, from 0. curve: for drawing,
    from the first point to the farthest extrapolation. held_back: None where nothing was. notes: what else must be
    said.
    """

    name: str
    x: str
    y: str
    points: Sequence[Point]
    asymptote: Estimate
    efficiency: Estimate
    midpoint: Estimate
    start: Estimate
    noise: float
    autocorrelation: float
    extrapolations: Sequence[Extrapolation]
    curve: Sequence[Drawn]
    held_back: HeldBack | None
    notes: Sequence[str]

    def num(self, role: str) -> int:
        """How many points have that role."""
        return sum(point.role == role for point in self.points)

    @property
    def fitted(self) -> list[Point]:
        return [point for point in self.points if point.role == "fitted"]

    @property
    def reaches(self) -> float:
        """The largest compute that was fitted."""
        return self.fitted[-1].compute

    def estimate(self, name: str) -> Estimate:
        """Of a parameter, by the names of `PARAMETERS`."""
        return getattr(self, name)

    def to_json(self) -> dict[str, Any]:
        """Without the points and the curve."""
        facts = {name: value for name, value in asdict(self).items() if name not in ("points", "curve")}
        roles = {role: self.num(role) for role in ("fitted", "early", "later")}
        return facts | {"num_points": roles, "reaches": self.reaches}


@dataclass(frozen=True)
class Difference:
    """One parameter of two fits: the second's minus the first's, or over the first's (`is_ratio`).

    value, low, high: None where a parameter isn't determined. verdict: in words.
    """

    parameter: str
    is_ratio: bool
    value: float | None
    low: float | None
    high: float | None
    told: bool
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """Two fits. told (of a difference): whether the points can tell which is larger."""

    first: str
    second: str
    differences: Sequence[Difference]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
