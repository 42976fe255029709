"""What is likely wrong with a run, read off the rows of its train steps: a figure beyond its limit, steps in a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.reports.metrics import is_number
from headway.reports.wording import percent

CONSECUTIVE_STEPS = 3
"""A healthy run has a bad batch now and then; three in a row are no chance."""

TRUNCATED_SHARE = 0.9
"""From here on nearly no answer ends by itself: rewards are those of fragments, and may be 0 for ever."""

ZERO_VARIANCE_SHARE = 0.95
"""A group whose rewards are all equal has advantage 0: beyond this, a step learns from one prompt in twenty."""

ACTED_SHARE = 0.5
"""Corrections are for exceptions: one that acts on most tokens trains another batch than the one that was sampled."""

CANARY_KL = 1e-4
"""Under the same weights only numerics are left: float32 gives 1e-10 and less, a bfloat16 engine some 1e-5."""

PREEMPTED_SHARE = 0.5
"""A rollout that gives way is computed again: beyond this, a good part of the engine's time goes there."""

ESS_SHARE = 0.3
"""Below this the variance of an estimate weighted by the ratios is more than three times that of fresh samples."""


@dataclass(frozen=True)
class _Limit:
    """A figure is beyond it at `at` and above (below: and below). says: a sentence with {figure} and {reason}.

    patience: so many bad steps in a row raise an alarm.
    """

    at: float
    says: str
    below: bool = False
    patience: int = CONSECUTIVE_STEPS

    def is_beyond(self, value: float) -> bool:
        return value <= self.at if self.below else value >= self.at


_LIMITS = {
    "truncated_share": _Limit(
        TRUNCATED_SHARE,
        "the token budget cut off {figure} of the answers, so nearly none ends by itself: raise "
        "generate.max_new_tokens",
    ),
    "zero_variance_share": _Limit(
        ZERO_VARIANCE_SHARE,
        "in {figure} of the groups all rewards are equal, so a baseline of the group leaves nearly "
        "nothing to learn from",
    ),
    "acted_share": _Limit(
        ACTED_SHARE,
        "{reason} cut or masked {figure} of the trained tokens: the update is that of another batch",
    ),
    "canary_kl_k3": _Limit(
        CANARY_KL,
        "engine and trainer disagree under the same weights, by a KL (k3, of canaries) of {figure}: that is numerics",
    ),
    "unequal_tokens": _Limit(
        1,
        "{figure} tokens that were sampled by the weights they train have other log-probs there, and model.parity is "
        "bitwise: that is a fault of the engine or of this machine's libraries",
        patience=1,
    ),
    "preempted_share": _Limit(
        PREEMPTED_SHARE,
        "the engine's cache is too small: rollouts gave way to others, and were computed again, {figure} as often as "
        "rollouts were trained: raise generate.cache_bytes, or lower generate.lanes",
    ),
    "ess_share": _Limit(
        ESS_SHARE,
        "the ratios of trainer to sampler leave an effective sample size of {figure} of the trained tokens",
        below=True,
    ),
}


@dataclass(frozen=True)
class Alarm:
    """A figure that stayed beyond its limit.

    key: of the figure; says: a sentence, with the figure of the last step; first, last: versions of the stretch of
    steps; num_steps: steps in stretches that were long enough, this one and those before.
    """

    key: str
    says: str
    first: int
    last: int
    num_steps: int = 1


class Watch:
    """Takes the rows of train steps in order, and raises an alarm when there have been too many bad ones in a row.

    A step in which the figure was not measured ends the stretch.
    """

    def __init__(self) -> None:
        self._open: dict[str, Alarm] = {}
        self._raised: dict[str, Alarm] = {}

    def add(self, row: Mapping[str, Any], group_size: int) -> list[Alarm]:
        """-> the alarms that this step raised."""
        self._open = {key: self._prolonged(key, says, row["version"]) for key, says in _beyond(row, group_size)}
        raised = [alarm for alarm in self._open.values() if alarm.num_steps == _limit(alarm.key).patience]
        for alarm in self._open.values():
            if alarm.num_steps >= _limit(alarm.key).patience:
                self._keep(alarm)
        return raised

    def _prolonged(self, key: str, says: str, version: int) -> Alarm:
        before = self._open.get(key)
        if before is None:
            return Alarm(key, says, version, version)
        return replace(before, says=says, last=version, num_steps=before.num_steps + 1)

    def _keep(self, alarm: Alarm) -> None:
        before = self._raised.get(alarm.key)
        patience = _limit(alarm.key).patience
        new_steps = patience if alarm.num_steps == patience else 1
        self._raised[alarm.key] = replace(alarm, num_steps=new_steps + (before.num_steps if before else 0))

    @property
    def raised(self) -> list[Alarm]:
        """One alarm for each figure that raised any: its last stretch."""
        return list(self._raised.values())


def alarms(rows: Iterable[Mapping[str, Any]], group_size: int) -> list[Alarm]:
    """Those of a whole run."""
    watch = Watch()
    for row in rows:
        watch.add(row, group_size)
    return watch.raised


def in_words(alarm: Alarm, num_steps: int) -> str:
    """An alarm and how long it stood, for a run of so many train steps."""
    often = f"{alarm.num_steps} of {num_steps} train steps"
    return f"{alarm.says} ({often}, the last in steps {alarm.first} to {alarm.last})"


def _limit(key: str) -> _Limit:
    return _LIMITS[key.partition("/")[0]]


def _beyond(row: Mapping[str, Any], group_size: int) -> Iterator[tuple[str, str]]:
    """Key and sentence of every figure of a step that is beyond its limit."""
    for key, value in _watched(row, group_size):
        (name, _, reason), limit = key.partition("/"), _limit(key)
        if is_number(value) and limit.is_beyond(value):
            figure = percent(value) if name.endswith("_share") else f"{value:.2g}"
            yield key, limit.says.format(figure=figure, reason=reason)


def _watched(row: Mapping[str, Any], group_size: int) -> Iterator[tuple[str, Any]]:
    yield "truncated_share", row.get("truncated_share")
    yield "zero_variance_share", zero_variance_share(row, group_size)
    for key in row:
        if is_acted_share(key):
            yield key, row[key]
    yield "canary_kl_k3", row.get("canary_kl_k3")
    yield "unequal_tokens", row.get("unequal_tokens")
    yield "preempted_share", row.get("preempted_share")
    yield "ess_share", row.get("ess_share")


def is_acted_share(key: str) -> bool:
    """`acted_share/REASON`, of all trained tokens."""
    return key.startswith("acted_share/") and key.count("/") == 1


def zero_variance_share(row: Mapping[str, Any], group_size: int) -> float | None:
    """Share of a step's groups whose rewards are all equal; None where groups have one member, or nothing is known."""
    num_equal, num_rollouts = row.get("zero_variance_groups"), row.get("num_rollouts")
    if group_size < 2 or num_equal is None or not num_rollouts:
        return None
    return num_equal * group_size / num_rollouts
