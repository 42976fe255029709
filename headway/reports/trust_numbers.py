"""The numbers behind the figures of trust: buckets of tokens, and means over steps in which each token counts once."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headway.reports.record import Row

MIN_STEPS_FOR_THIRDS = 6
"""A shorter run is one piece: thirds of a step or two would show chance."""

SOURCE_NAMES = {
    "numerics": "numerics, newest version alone",
    "stale_cache": "stale cache",
    "staleness": "staleness, older versions",
}
"""Where a trained token's mismatch can come from: suffix of its metrics -> what people read."""


@dataclass(frozen=True)
class Bucket:
    """A part of the trained tokens. name: the suffix of its metrics; share: of the trained tokens of all steps."""

    name: str
    label: str
    share: float


def lag_buckets(steps: Sequence[Row]) -> list[Bucket]:
    """By lag, ascending."""
    return _buckets(steps, r"lag_(\d+)", "{0}")


def position_buckets(steps: Sequence[Row]) -> list[Bucket]:
    """By place in the response, ascending; the label counts tokens from 0."""
    return _buckets(steps, r"position_(\d+)_(\d+)", "{0}–{1}")


def _buckets(steps: Sequence[Row], pattern: str, label: str) -> list[Bucket]:
    names = dict.fromkeys(name for row in steps for name in row if name.startswith("tokens/"))
    matches = [match for name in names if (match := re.fullmatch(f"tokens/{pattern}", name))]
    matches.sort(key=lambda match: int(match[1]))
    total = math.fsum(row.get("tokens") or 0.0 for row in steps)
    return [
        Bucket(
            match[0].removeprefix("tokens/"),
            label.format(*match.groups()),
            math.fsum(row.get(match[0]) or 0.0 for row in steps) / total,
        )
        for match in matches
        if total
    ]


def by_bucket(steps: Sequence[Row], metric: str, buckets: Sequence[Bucket]) -> list[float | None]:
    """`metric` of each bucket, the mean over all its tokens in `steps`."""
    return [mean_over_tokens(steps, metric, bucket.name) for bucket in buckets]


def mean_over_tokens(steps: Sequence[Row], metric: str, bucket: str = "") -> float | None:
    """The mean of a metric over steps, each weighted by its tokens (of the bucket); None where it was not measured."""
    suffix = f"/{bucket}" if bucket else ""
    pairs = [(row.get(f"{metric}{suffix}"), row.get(f"tokens{suffix}")) for row in steps]
    known = [(value, tokens) for value, tokens in pairs if value is not None and tokens]
    if not known:
        return None
    return math.fsum(value * tokens for value, tokens in known) / math.fsum(tokens for _, tokens in known)


def thirds(steps: Sequence[Row]) -> list[tuple[str, Sequence[Row]]]:
    """The steps in up to three stretches of equal length, each with its name."""
    num = 3 if len(steps) >= MIN_STEPS_FOR_THIRDS else 1
    edges = [len(steps) * number // num for number in range(num + 1)]
    parts = [steps[first:last] for first, last in pairwise(edges)]
    return [(f"steps {part[0]['version']}–{part[-1]['version']}", part) for part in parts if part]
