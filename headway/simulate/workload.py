"""How long a rollout is: given lengths, those of a file or of a run, or a distribution keyed by its identity.

A length is a pure function of (seed, identity), so two schedules of one workload meet the same rollouts. The identity
of a rollout is group x members per group + member: its number, where groups start one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

from headway.simulate.randomness import uniforms
from headway.simulate.recording import Recording, read_recording
from headway.types import UserError

Lengths = Callable[[int], float]
"""Identity of a rollout -> its length: in tokens, or in units of time at one unit of length per unit of time."""

LONGEST = 1e9
_KINDS = "constant, exponential, lognormal:SIGMA, file:PATH, run:RUN, or numbers as in 1,3,1"
_STANDARD_NORMAL = NormalDist()


def make_lengths(spec: str, mean: float, seed: int, *, num_members: int = 1) -> Lengths:
    """`spec` as in the setting simulate.lengths. num_members: rollouts per group, for lengths by (group, member)."""
    kind, _, parameter = spec.partition(":")
    if kind == "constant" and not parameter:
        return lambda identity: mean
    if kind == "exponential" and not parameter:
        draw = uniforms("length", seed)
        return lambda identity: -mean * math.log(draw(identity))
    if kind == "lognormal":
        return _lognormal(_sigma(parameter or "1"), mean, seed)
    if kind == "file" and parameter:
        return _of_file(Path(parameter), seed)
    if kind == "run" and parameter:
        return recorded_lengths(read_recording(Path(parameter), seed), num_members)
    return _given(spec)


def _lognormal(sigma: float, mean: float, seed: int) -> Lengths:
    draw, quantile = uniforms("length", seed), _STANDARD_NORMAL.inv_cdf
    mu = math.log(mean) - sigma * sigma / 2
    return lambda identity: math.exp(mu + sigma * quantile(draw(identity)))


WIDEST = 10.0
"""Largest sigma: a wider one has lengths that are 0 in a float."""


def _sigma(parameter: str) -> float:
    try:
        sigma = float(parameter)
    except ValueError:
        sigma = math.nan
    if not 0 < sigma <= WIDEST:
        raise UserError(
            f"simulate.lengths: lognormal:{parameter} needs a number above 0 and at most {WIDEST:g} after the colon"
        )
    return sigma


def _of_file(path: Path, seed: int) -> Lengths:
    """One length per line; identities beyond the last line draw one of them."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"simulate.lengths: {path} can't be read ({why}); it holds one length per line") from None
    lengths = [_of_line(path, number, line) for number, line in enumerate(lines, 1)]
    if not lengths:
        raise UserError(f"simulate.lengths: {path} is empty; it holds one length per line")
    draw = uniforms("file", seed)

    def length(identity: int) -> float:
        return lengths[identity if identity < len(lengths) else int(draw(identity) * len(lengths))]

    return length


def _of_line(path: Path, number: int, line: str) -> float:
    try:
        length = float(line)
    except ValueError:
        length = math.nan
    if not 0 < length <= LONGEST:
        raise UserError(
            f"simulate.lengths: {path}:{number} is {line[:40]!r}, and a line holds one number above 0 and at most "
            f"{LONGEST:g}"
        )
    return length


def recorded_lengths(recording: Recording, num_members: int) -> Lengths:
    """Tokens of the rollouts that a run recorded; others are as long as those that stand in for them."""
    rollouts = recording.rollouts
    return lambda identity: rollouts.stay(divmod(identity, num_members)).tokens


def _given(spec: str) -> Lengths:
    """Numbers, used in order; the last one repeats."""
    try:
        lengths = [float(word) for word in spec.split(",")]
    except ValueError:
        raise UserError(f"simulate.lengths {spec!r} is not understood; it may be {_KINDS}") from None
    if not all(0 < length <= LONGEST for length in lengths):
        raise UserError(f"simulate.lengths {spec!r}: every length must be above 0 and at most {LONGEST:g}")
    return lambda identity: lengths[min(identity, len(lengths) - 1)]
