"""Closed laws of the schedule, in units of batches and of one rollout's mean time. They choose what is simulated.

N lanes, batches of B rollouts, rollouts of mean duration m, train steps of T, run_ahead k.
"""

from __future__ import annotations

import math


def harmonic(num: int) -> float:
    """H_n = 1 + 1/2 + ... + 1/n: the expected longest of n exponential lengths of mean 1.

    >>> round(harmonic(64), 4)
    4.7439
    """
    return math.fsum(1 / i for i in range(1, num + 1))


def synchronous_utilisation(num_lanes: int) -> float:
    """Of lanes that all wait for the longest of exponential lengths: busy time over elapsed time, 1 / H_N."""
    return 1 / harmonic(num_lanes)


def synchronous_rate(batch: int, mean: float, train_s: float) -> float:
    """Rollouts a second with as many lanes as rollouts in a batch, run_ahead 0 and exponential lengths: a batch takes
    the longest of its rollouts, and its train step.
    """
    return batch / (mean * harmonic(batch) + train_s)


def largest_rate(lanes: float, mean: float, batch: float, train_s: float) -> float:
    """Rollouts a second that no schedule exceeds: min(N / m, B / T)."""
    return min(lanes / mean, batch / train_s if train_s > 0 else math.inf)


def admitted_rate(run_ahead: float, batch: float, stay_s: float) -> float:
    """Rollouts a second by Little's law: at most (k + 1) B are started and not yet trained, and each is for `stay_s`,
    from its start until the batch that takes it is trained and its weights are out.
    """
    return (run_ahead + 1) * batch / stay_s


def most_started(version: int, run_ahead: float, batch: int) -> float:
    """Rollouts that may have been started under `version`: (v + k + 1) B.

    >>> most_started(0, 0, 2), most_started(0, 1, 2), most_started(1, 1, 2)
    (2, 4, 6)
    """
    return (version + run_ahead + 1) * batch


def may_start(num_started: int, version: int, run_ahead: float, batch: int) -> bool:
    """AReaL's form of the same (arXiv 2505.24298): floor((n - 1) / B) <= i + eta, where n counts the new one."""
    return num_started // batch <= version + run_ahead


def saturated_lag(lanes: float, batch: float, trainer_utilisation: float) -> float:
    """Mean lag once lanes are always busy and the trainer is not, whatever the lengths: N / B + U."""
    return lanes / batch + trainer_utilisation


def mean_lag(run_ahead: float, lanes: float, mean: float, batch: float, train_s: float) -> float:
    """Expected mean lag: run_ahead where the trainer or admission is the bound, and never more than that of saturated
    lanes. Near a trainer that is always busy a backlog comes on top, up to run_ahead.
    """
    utilisation = train_s * (lanes / mean) / batch
    return run_ahead if utilisation >= 1 else min(run_ahead, saturated_lag(lanes, batch, utilisation))
