"""Models of a generation engine on virtual time: how fast a rollout in a lane gets on.

Both have the same account of prefill: a rollout that is handed to a lane has its context (prompt, and what it had
sampled before it paused) computed first, and `recompute` computes that of every rollout in flight again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headway.simulate.contention import Contention


class Engine(Protocol):
    """What decodes rollouts. Lengths are tokens, or whatever a lane decodes one of per unit of time."""

    async def decode(self, key: int, num_tokens: float, context_tokens: float) -> float:
        """Hold a lane until so many tokens are there, or `stop` -> tokens sampled.

        key: names the rollout in flight; context_tokens: what it has sampled before the first of them.
        """
        ...

    def stop(self, key: int) -> None:
        """`decode` of `key` returns at this instant. Does nothing once it has ended."""
        ...

    def sampled(self, key: int) -> float:
        """Tokens of a rollout in flight, of those that its `decode` was asked for."""
        ...

    def recompute(self) -> None:
        """The caches of all rollouts in flight are computed again, under new weights."""
        ...


@dataclass(frozen=True)
class Prefill:
    """prompt_tokens: of every prompt; tokens_per_s: None where prefill takes no time."""

    prompt_tokens: float = 0.0
    tokens_per_s: float | None = None

    def context(self, sampled_tokens: float) -> float:
        return self.prompt_tokens + sampled_tokens

    def seconds(self, context_tokens: float) -> float:
        return context_tokens / self.tokens_per_s if self.tokens_per_s else 0.0


NO_PREFILL = Prefill()


@dataclass(slots=True, eq=False)
class _Lane:
    """From goes_on_s on, when it had `sampled` tokens, it decodes; before that, it prefills."""

    done: asyncio.Future[float]
    num_tokens: float
    context_tokens: float
    pace_s: float
    goes_on_s: float
    sampled: float = 0.0
    timer: asyncio.TimerHandle | None = None


class ConstantRate:
    """The lane model: one token per unit of time and lane, whatever the other lanes do.

    paces_s: time per token of the rollouts that have a pace of their own, by key. Each lane prefills for itself.
    """

    def __init__(self, prefill: Prefill = NO_PREFILL, paces_s: Mapping[int, float] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._prefill = prefill
        self._paces_s = paces_s or {}
        self._lanes: dict[int, _Lane] = {}

    async def decode(self, key: int, num_tokens: float, context_tokens: float) -> float:
        context = self._prefill.context(context_tokens)
        goes_on_s = self._loop.time() + self._prefill.seconds(context)
        lane = _Lane(self._loop.create_future(), num_tokens, context, self._paces_s.get(key, 1.0), goes_on_s)
        self._lanes[key] = lane
        self._set_timer(lane)
        try:
            return await lane.done
        finally:
            assert lane.timer, "a lane that decodes has a timer"
            lane.timer.cancel()
            del self._lanes[key]

    def _set_timer(self, lane: _Lane) -> None:
        if lane.timer:
            lane.timer.cancel()
        ends_s = lane.goes_on_s + (lane.num_tokens - lane.sampled) * lane.pace_s
        lane.timer = self._loop.call_at(ends_s, _resolve, lane.done, lane.num_tokens)

    def stop(self, key: int) -> None:
        if key in self._lanes:
            _resolve(self._lanes[key].done, self.sampled(key))

    def sampled(self, key: int) -> float:
        lane = self._lanes[key]
        since = max(0.0, self._loop.time() - lane.goes_on_s) / lane.pace_s
        return min(lane.sampled + since, lane.num_tokens)

    def recompute(self) -> None:
        for key, lane in self._lanes.items():
            if lane.done.done():
                continue
            lane.sampled = self.sampled(key)
            lane.goes_on_s = self._loop.time() + self._prefill.seconds(lane.context_tokens + lane.sampled)
            self._set_timer(lane)


def _resolve(done: asyncio.Future[float], sampled: float) -> None:
    if not done.done():
        done.set_result(sampled)


@dataclass(frozen=True)
class Machine:
    """What decides how long a decode step takes: launching it, and reading weights and cache once.

    bandwidth_bytes_per_s: as measured in use, about 0.8 of what the vendor states; rollout_s: of each rollout, beside
    reading its cache, where arithmetic doesn't hide behind reading (on a CPU).
    """

    overhead_s: float
    weight_bytes: float
    kv_bytes_per_token: float
    bandwidth_bytes_per_s: float
    rollout_s: float = 0.0

    def step_s(self, context_tokens: float, num_rollouts: int) -> float:
        """One decode step of so many rollouts, with so many tokens of context all together."""
        read_s = (self.weight_bytes + self.kv_bytes_per_token * context_tokens) / self.bandwidth_bytes_per_s
        return self.overhead_s + num_rollouts * self.rollout_s + read_s

    def decode_s(self, num_steps: float, context_tokens: float, num_rollouts: int) -> float:
        """Time of `num_steps` steps, while every step adds a token to the context of each of the rollouts.

        The integral of step_s(context + n m, n) over m from 0 to num_steps. As a sum over whole steps, a step would
        read the context as it stood before it, which is less by half a token per rollout and step.
        """
        half_growth_s = self.kv_bytes_per_token * num_rollouts / self.bandwidth_bytes_per_s / 2
        return num_steps * (self.step_s(context_tokens, num_rollouts) + half_growth_s * num_steps)

    def steps_in(self, seconds: float, context_tokens: float, num_rollouts: int) -> float:
        """The inverse of `decode_s`: the root of a quadratic, without cancellation."""
        step_s = self.step_s(context_tokens, num_rollouts)
        growth_s = self.kv_bytes_per_token * num_rollouts / self.bandwidth_bytes_per_s
        return 2 * seconds / (step_s + math.sqrt(step_s * step_s + 2 * growth_s * seconds))


@dataclass(slots=True, eq=False)
class _Decoding:
    """first_step, last_step: on the engine's count of steps; sampled: in all, once it has ended."""

    done: asyncio.Future[float]
    num_tokens: float
    context_tokens: float
    first_step: float
    last_step: float
    sampled: float | None = None

    def end(self, sampled: float) -> None:
        self.sampled = sampled
        _resolve(self.done, sampled)


class Roofline:
    """Every decode step gives each rollout in flight a token, and takes as long as reading weights and cache does.

    So a batch that drains speeds up, and a context that grows slows all down. Decoding is a fluid: the count of steps
    is a real number, and between two events, with n rollouts in flight, the time of m steps has a closed form
    (`Machine.decode_s`). One timer waits for the next rollout to end; an event costs O(log n), a token nothing. A
    prefill has the engine for itself.

    Source: the roofline of a decode step, t = (weights + cache) / bandwidth, as in Pope et al. 2022, "Efficiently
    Scaling Transformer Inference" (arXiv 2211.05102), section 2, with a constant for what is launched.
    """

    def __init__(self, machine: Machine, prefill: Prefill = NO_PREFILL, contention: Contention | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._machine, self._prefill = machine, prefill
        self._contention, self._slowness = contention, 1.0
        if contention:
            contention.tell_engine = self._slow_down
        self._rollouts: dict[int, _Decoding] = {}
        self._num_in_flight = 0
        self._ends: list[tuple[float, int, _Decoding]] = []
        self._order = itertools.count()
        self._step = 0.0  # steps done at `_at_s`; before that, the engine prefills
        self._at_s = 0.0
        self._context_less_steps = 0.0  # the context is this much plus `_step` per rollout in flight
        self._timer: asyncio.TimerHandle | None = None
        self._timer_is_due = False

    async def decode(self, key: int, num_tokens: float, context_tokens: float) -> float:
        self._advance()
        context = self._prefill.context(context_tokens)
        rollout = _Decoding(self._loop.create_future(), num_tokens, context, self._step, self._step + num_tokens)
        self._rollouts[key] = rollout
        self._num_in_flight += 1
        self._say_whether_it_works()
        self._context_less_steps += context - self._step
        heapq.heappush(self._ends, (rollout.last_step, next(self._order), rollout))
        self._hold(context)
        try:
            return await rollout.done
        finally:
            del self._rollouts[key]
            if rollout.sampled is None:  # cancelled
                self._leave(rollout, 0.0)

    def stop(self, key: int) -> None:
        rollout = self._rollouts.get(key)
        if rollout and rollout.sampled is None:
            self._leave(rollout, self.sampled(key))

    def sampled(self, key: int) -> float:
        rollout = self._rollouts[key]
        if rollout.sampled is not None:
            return rollout.sampled
        self._advance()
        return min(self._step - rollout.first_step, rollout.num_tokens)

    def recompute(self) -> None:
        self._advance()
        self._hold(self._context)

    @property
    def _context(self) -> float:
        """Tokens in the caches of all rollouts in flight."""
        return self._context_less_steps + self._num_in_flight * self._step

    def _advance(self) -> None:
        """Count the steps up to now, at most those to the next end (a timer is as exact as a float is)."""
        now_s = self._loop.time()
        if now_s <= self._at_s:
            return
        if self._num_in_flight:
            work_s = (now_s - self._at_s) / self._slowness
            num_steps = self._machine.steps_in(work_s, self._context, self._num_in_flight)
            self._step = min(self._step + num_steps, self._next_end())
        self._at_s = now_s

    def _next_end(self) -> float:
        """The last step of the rollout in flight that ends next. There has to be one."""
        while self._ends[0][2].sampled is not None:
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _hold(self, context_tokens: float) -> None:
        """Nothing is decoded while so much is prefilled."""
        self._at_s = max(self._at_s, self._loop.time()) + self._prefill.seconds(context_tokens) * self._slowness
        self._set_timer_soon()

    def _slow_down(self, slowness: float) -> None:
        """From now on everything takes so many times as long as it would alone, what is being prefilled too."""
        self._advance()
        now_s = self._loop.time()
        self._at_s = now_s + max(0.0, self._at_s - now_s) * slowness / self._slowness
        self._slowness = slowness
        self._set_timer_soon()

    def _say_whether_it_works(self) -> None:
        if self._contention:
            self._contention.engine_works(self._num_in_flight > 0)

    def _leave(self, rollout: _Decoding, sampled: float) -> None:
        self._advance()
        rollout.end(sampled)
        self._num_in_flight -= 1
        self._context_less_steps -= rollout.context_tokens - rollout.first_step
        if not self._num_in_flight:  # what rounding has left
            self._context_less_steps = self._step = 0.0
            self._ends.clear()
            self._say_whether_it_works()
        self._set_timer_soon()

    def _set_timer_soon(self) -> None:
        """Once for all that happens at this instant."""
        if not self._timer_is_due:
            self._timer_is_due = True
            self._loop.call_soon(self._set_timer)

    def _set_timer(self) -> None:
        self._timer_is_due = False
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._num_in_flight:
            num_steps = self._next_end() - self._step
            work_s = self._machine.decode_s(num_steps, self._context, self._num_in_flight)
            ends_s = self._at_s + work_s * self._slowness
            self._timer = self._loop.call_at(ends_s, self._end)

    def _end(self) -> None:
        """The rollouts in flight whose last step is the next one to come have come to their end."""
        self._advance()
        if not self._num_in_flight:
            return
        self._step = end = self._next_end()
        while self._num_in_flight and self._next_end() <= end:
            rollout = self._ends[0][2]
            self._leave(rollout, rollout.num_tokens)
