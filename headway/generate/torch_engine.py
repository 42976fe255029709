"""The embedded engine: continuous batching over any policy, on a thread of its own.

At every token boundary the engine obeys what has arrived (new rollouts, interruptions, new weights), then makes one
forward pass: one new token for every rollout that is under way, and beside them a bounded number of tokens of prompts
(and of rollouts that go on) whose keys and values are still missing, so that a long prompt holds nobody up. Whoever has
the state that predicts his next token then draws it. The event loop only ever queues a command and awaits a future; it
is never blocked by a forward pass.

What a rollout stands on when it gets a lane, its prompt and whatever it had sampled before it was interrupted, is
computed under the weights of that moment. Later weights leave its keys and values as they are, unless they come with
the word to recompute them.

Keys and values lie in blocks of a pool of a fixed size. When it is full, the rollout that was admitted last gives way:
it waits with all its tokens, and goes on when there is room.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from headway.generate.lane import Decode, Lane
from headway.generate.prefixes import Prefix, Prefixes
from headway.generate.randomness import uniforms
from headway.models.cores import Cores, dismiss_helpers
from headway.models.distribution import sample
from headway.models.paged import CachedPass, KeyValuePool, Stretch, num_blocks_for
from headway.models.policy import Policy
from headway.models.weights import assign_weights, fingerprint, free_storage, take_storage
from headway.stages import Sample, SampleRequest
from headway.types import FinishReason, UserError
from headway.work import WorkLog

PREFILL_TOKENS = 512
"""Tokens of prompts, and of rollouts that go on, in one pass."""


def pool_for(policy: Policy, lanes: int, cache_bytes: int | None) -> KeyValuePool:
    """Of so many bytes (default: for full lanes, but at most a quarter of the memory that is free now), not taken yet.

    Raises UserError for less than two blocks.
    """
    return KeyValuePool.sized(
        policy.cache_shapes,
        policy.dtype,
        policy.device,
        num_sequences=lanes,
        longest=policy.context_tokens,
        num_bytes=cache_bytes,
    )


@dataclass(frozen=True)
class EngineStatus:
    """An engine at a token boundary.

    num_lanes, num_waiting: rollouts that hold a lane, and those that wait for one. Of the cache's blocks `blocks_free`
    hold nothing and `blocks_unused` prompts on which no rollout stands; rollouts stood on `blocks_most_used` in the
    fullest pass since the status was last asked for. num_preempted: how often a rollout gave way so far; num_passes:
    forward passes so far.
    """

    version: int
    num_lanes: int
    num_waiting: int
    blocks: int
    blocks_free: int
    blocks_unused: int
    blocks_most_used: int
    num_preempted: int
    num_passes: int
    asleep: bool


@dataclass(frozen=True)
class _Work:
    """One stretch of a pass: of a lane's own tokens, or of a prompt."""

    whose: Lane | Prefix
    stretch: Stretch
    ids: Sequence[int]

    @property
    def is_newest_token(self) -> bool:
        """A rollout under way goes on, which nothing may hold up."""
        return isinstance(self.whose, Lane) and self.whose.num_pending == 1

    @property
    def positions(self) -> range:
        start = self.stretch.prefix_length + self.stretch.first
        return range(start, start + self.stretch.num_rows)


class TorchEngine:
    """Implements `headway.stages.Generator`.

    policy: the engine's own copy of the weights; lanes: rollouts in flight at once (more requests than that wait);
    spare_lanes: as many more, for spare requests alone; decode: ids -> text; cores: its claim to CPU cores; version:
    what the policy's weights are called; cache_bytes: for keys and values (default: for full lanes, but at most a
    quarter of the memory that is free now); prefill_tokens: of a pass, besides the new tokens of rollouts under way.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        lanes: int,
        decode: Decode,
        cores: Cores,
        version: int = 0,
        spare_lanes: int = 0,
        cache_bytes: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        self._policy, self._decode, self._cores = policy, decode, cores
        self._num_lanes, self._num_spare, self._version = lanes, spare_lanes, version
        self._prefill_tokens = prefill_tokens
        self._context_tokens = policy.context_tokens
        self._lanes: list[Lane] = []
        self._waiting: deque[Lane] = deque()
        self._num_admitted = self._num_preempted = self._num_passes = self._most_used = 0
        self._pool = pool_for(policy, lanes + spare_lanes, cache_bytes)
        self._blocks = self._pool.blocks
        self._prefixes = Prefixes(self._blocks, max_unused=lanes)
        self._is_asleep = self._lacks_weights = self._is_packed = False
        self._log = WorkLog()
        self._commands: queue.SimpleQueue[tuple[Callable[[], object], asyncio.Future[Any] | None]] = queue.SimpleQueue()
        self._closed = False
        self._failure: BaseException | None = None
        self._hand_over = threading.Lock()  # the engine must not end between a look at it and the command it is given
        dismiss_helpers()  # those of the thread that has loaded the model
        self._thread = threading.Thread(target=self._serve, name="headway engine", daemon=True)
        self._thread.start()

    # ---- called from the event loop

    async def sample(self, request: SampleRequest) -> Sample:
        self._check(request)
        lane = Lane.of(request, asyncio.get_running_loop().create_future())
        self._command(lambda: self._take_in(lane), lane.answer)
        try:
            return await lane.answer
        except asyncio.CancelledError:
            lane.aborted = True
            raise

    def interrupt(self, request: SampleRequest) -> None:
        with self._hand_over:
            if self._failure is None and not self._closed:
                self._commands.put((lambda: self._interrupt(request), None))

    async def peek(self, request: SampleRequest) -> Sample | None:
        return await self._ask(lambda: self._peek(request))

    async def load(self, weights: Mapping[str, Any], version: int, *, recompute: bool = False) -> None:
        await self._ask(lambda: self._load(weights, version, recompute))

    async def fingerprint(self) -> str:
        return await self._ask(self._fingerprint)

    async def sleep(self, *, weights: bool = False) -> None:
        await self._ask(lambda: self._sleep(weights))

    async def wake(self) -> None:
        await self._ask(self._wake)

    async def status(self) -> EngineStatus:
        """Also checks, if nothing is in flight, that every block is accounted for."""
        return await self._ask(self._status)

    async def work(self) -> list[dict[str, Any]]:
        """Its passes since this was last asked for, as `WorkLog.take` gives them: kind "pass", with the new tokens of
        rollouts under way (`rows`), the tokens in their caches (`cached`), and those of prompts and of rollouts that go
        on (`prefill`).
        """
        return await self._ask(self._log.take)

    async def close(self) -> None:
        """Ends the thread; whoever still waits for an answer gets an error. May be called again."""
        self._closed = True
        self._commands.put((lambda: None, None))
        await asyncio.to_thread(self._thread.join)

    async def _ask(self, question: Callable[[], Any]) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def answer_it() -> None:
            try:
                result = question()
            except UserError as error:  # said to the caller; the engine is as it was
                _post(answer, error=error)
            except BaseException as failure:  # the engine may be half changed: it ends, and the caller is told too
                _post(answer, error=_told(failure))
                raise
            else:
                _post(answer, result)

        self._command(answer_it, answer)
        return await answer

    def _command(self, command: Callable[[], object], answer: asyncio.Future[Any]) -> None:
        with self._hand_over:
            if self._failure is not None:
                raise _told(self._failure)
            if self._closed:
                raise _told(_Closed())
            self._commands.put((command, answer))

    def _check(self, request: SampleRequest) -> None:
        assert self._num_spare or not request.spare, "a spare request, and the engine has no spare lane"
        assert request.so_far is None or request.so_far.finish == "interrupted", "this rollout has ended"
        prompt, budget = request.prompt, request.max_new_tokens
        if not prompt.tokens:
            raise UserError(f"prompt {prompt.uid} has no tokens, and an answer needs something to follow")
        if len(prompt.tokens) + budget > self._context_tokens:
            raise UserError(
                f"prompt {prompt.uid} has {len(prompt.tokens)} tokens; with {budget} new ones that is more than the "
                f"model's context of {self._context_tokens}: shorten it or lower max_new_tokens"
            )
        self._pool.check_room(prompt.uid, len(prompt.tokens), budget)

    # ---- on the engine's thread: commands

    def _serve(self) -> None:
        try:
            with torch.no_grad():
                while not self._closed:
                    self._obey(wait=True)
                    self._generate_until_idle()
            self._tell_all(_Closed())
        except BaseException as failure:  # handed to everyone who waits; a silent dead thread would hang them
            self._tell_all(failure)

    def _generate_until_idle(self) -> None:
        with self._cores.busy():
            while (self._lanes or self._waiting) and not (self._closed or self._is_asleep):
                with self._cores.unit() as share:
                    began = time.perf_counter()
                    work = self._next_tokens()
                    self._note(work, share, time.perf_counter() - began)
                self._obey(wait=False)

    def _obey(self, *, wait: bool) -> None:
        """Run the commands that have arrived; if there is none, wait for one or go on."""
        while not self._closed:
            try:
                command, _ = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            command()

    def _tell_all(self, failure: BaseException) -> None:
        """The engine has ended: an error for everyone who waits, and for everyone who comes later."""
        answers = [lane.answer for lane in (*self._lanes, *self._waiting)]
        with self._hand_over:
            self._failure = failure
            while not self._commands.empty():
                _, answer = self._commands.get()
                answers += [answer] if answer else []
        for answer in answers:
            _post(answer, error=_told(failure))

    def _take_in(self, lane: Lane) -> None:
        """A rollout waits for a lane, unless it has come as far as it may already.

        One that paused just where a phrase is put in gets it now.
        """
        self._waiting.append(lane)  # at once: should its text fail to decode, it is told
        if finish := self._end_of(lane):
            self._answer(lane, finish)
            self._waiting.remove(lane)

    def _interrupt(self, request: SampleRequest) -> None:
        lane = self._find(request)
        if lane is None:
            return
        self._answer(lane, "interrupted")
        if lane in self._waiting:
            self._waiting.remove(lane)
        else:
            self._free(lane)

    def _peek(self, request: SampleRequest) -> Sample | None:
        lane = self._find(request)
        return None if lane is None else lane.sample("interrupted", self._decode)

    def _find(self, request: SampleRequest) -> Lane | None:
        return next((lane for lane in (*self._lanes, *self._waiting) if lane.request is request), None)

    def _load(self, weights: Mapping[str, Any], version: int, recompute: bool) -> None:
        own = self._policy.weights()
        if self._lacks_weights:
            take_storage(own)
        try:
            assign_weights(own, weights)
        except UserError:
            if self._lacks_weights:
                free_storage(own)
            raise
        self._lacks_weights, self._is_packed, self._version = False, False, version
        for lane in self._lanes:
            if recompute or lane.prefix is None or not lane.prefix.is_complete or lane.num_pending > 1:
                self._give_back_cache(lane)  # the last three had only begun to be computed
        self._prefixes.forget()

    def _fingerprint(self) -> str:
        self._need_weights()
        return fingerprint(self._policy.weights())

    def _sleep(self, weights: bool) -> None:
        for lane in self._lanes:
            self._give_back_cache(lane)
        self._prefixes.forget()
        self._pool.release()
        if weights and not self._lacks_weights:
            self._policy, self._is_packed = self._policy.unpacked(), False
            free_storage(self._policy.weights())
            self._lacks_weights = True
        self._is_asleep = True

    def _wake(self) -> None:
        self._need_weights()
        self._is_asleep = False

    def _need_weights(self) -> None:
        if self._lacks_weights:
            raise UserError("the engine's weights were given up when it went to sleep: load new ones first")

    def _status(self) -> EngineStatus:
        if not self._lanes:
            held = self._prefixes.num_blocks + self._blocks.num_free
            assert held == self._blocks.total, f"{self._blocks.total - held} blocks of the cache are lost"
        most_used, self._most_used = self._most_used, 0
        return EngineStatus(
            version=self._version,
            num_lanes=len(self._lanes),
            num_waiting=len(self._waiting),
            blocks=self._blocks.total,
            blocks_free=self._blocks.num_free,
            blocks_unused=self._prefixes.num_evictable,
            blocks_most_used=most_used,
            num_preempted=self._num_preempted,
            num_passes=self._num_passes,
            asleep=self._is_asleep,
        )

    # ---- on the engine's thread: one token boundary

    def _next_tokens(self) -> Sequence[_Work]:
        """-> what went through the model."""
        self._drop_aborted()
        self._admit()
        if not self._lanes:
            return []
        self._pool.allocate()
        if not self._is_packed:
            self._policy, self._is_packed = self._policy.packed_up(), True
        work = self._plan_pass()
        num_used = self._blocks.total - self._blocks.num_free - self._prefixes.num_evictable
        self._most_used = max(self._most_used, num_used)
        ready = self._make_pass(work) if work else []
        ready += self._first_tokens()
        if ready:
            self._draw([lane for lane, _ in ready], torch.stack([hidden_D for _, hidden_D in ready]))
        return work

    def _note(self, work: Sequence[_Work], share: float, seconds: float) -> None:
        singles = [one.stretch for one in work if one.stretch.is_single]
        if work:
            self._log.add(
                "pass",
                share=share,
                seconds=seconds,
                rows=len(singles),
                prefill=sum(one.stretch.num_rows for one in work) - len(singles),
                cached=sum(stretch.prefix_length + stretch.first for stretch in singles),
            )

    def _drop_aborted(self) -> None:
        self._waiting = deque(lane for lane in self._waiting if not lane.aborted)
        for lane in [lane for lane in self._lanes if lane.aborted]:
            self._free(lane)

    def _admit(self) -> None:
        """Hand waiting rollouts free lanes, as long as there is room for what they stand on and one block more."""
        room = self._blocks.num_free + self._prefixes.num_evictable - self._prefixes.num_missing
        for lane in self._joining():
            prompt = lane.request.prompt.tokens
            needed = self._prefixes.num_needed(prompt) + num_blocks_for(len(lane.tokens) + 1)
            if needed > room and self._lanes:
                return
            room -= needed
            lane.prefix = self._prefixes.stand_on(prompt)
            lane.number = self._num_admitted
            self._num_admitted += 1
            self._waiting.remove(lane)
            self._lanes.append(lane)

    def _joining(self) -> list[Lane]:
        """Who waits and finds a free lane of its kind, first come, first served."""
        num_spare = sum(lane.request.spare for lane in self._lanes)
        free = {False: self._num_lanes - (len(self._lanes) - num_spare), True: self._num_spare - num_spare}
        return [lane for kind, num in free.items() for lane in islice(self._of_kind(kind), num)]

    def _of_kind(self, spare: bool) -> Iterator[Lane]:
        return (lane for lane in self._waiting if lane.request.spare == spare)

    def _plan_pass(self) -> list[_Work]:
        """Single tokens first, then as much of what is missing as a pass may hold; each with its blocks."""
        planned: list[_Work] = []
        allowed = self._prefill_tokens
        begun: set[Prefix] = set()
        for lane in sorted(self._lanes, key=lambda lane: lane.number):
            if lane not in self._lanes:  # it has given way to one before it
                continue
            work = self._next_work(lane, begun, allowed)
            if work is None:
                continue
            planned.append(work)
            if isinstance(work.whose, Prefix):
                begun.add(work.whose)
            if not work.is_newest_token:
                allowed -= work.stretch.num_rows
        return sorted(planned, key=lambda work: not work.stretch.is_single)

    def _next_work(self, lane: Lane, begun: set[Prefix], allowed: int) -> _Work | None:
        """What the lane needs first: its prompt, unless another lane has begun it in this pass, or tokens of its own.

        None: nothing, or nothing that the pass still has room for.
        """
        if lane.prefix is None:
            lane.prefix = self._prefixes.stand_on(lane.request.prompt.tokens)
        whose = lane if lane.prefix.is_complete else lane.prefix
        if whose in begun:
            return None
        missing = len(whose.tokens) - whose.cached
        num = missing if whose is lane and missing == 1 else min(missing, allowed)
        blocks = lane.own if whose is lane else lane.prefix.blocks
        if not num or not self._make_room(lane, blocks, whose.cached + num, high=whose is not lane):
            return None
        return _Work(whose, whose.stretch(num), whose.tokens[whose.cached : whose.cached + num])

    def _make_room(self, lane: Lane, blocks: list[int], num_tokens: int, *, high: bool = False) -> bool:
        """Blocks for so many tokens, if need be those of unused prompts, then those of rollouts admitted later.

        False: there were none, and the lane itself has given way.
        """
        while len(blocks) < num_blocks_for(num_tokens):
            if not (self._blocks.num_free or self._prefixes.evict_one()):
                youngest = max(self._lanes, key=lambda other: other.number)
                self._preempt(youngest)
                if youngest is lane:
                    return False
                continue
            blocks.append(self._blocks.take(high=high))
        return True

    def _preempt(self, lane: Lane) -> None:
        self._free(lane)
        self._waiting.appendleft(lane)
        self._num_preempted += 1

    def _make_pass(self, work: Sequence[_Work]) -> list[tuple[Lane, torch.Tensor]]:
        """-> the lanes whose own tokens are all cached now, each with the state that predicts its next."""
        device = self._policy.device
        ids_T = torch.tensor([token for one in work for token in one.ids], device=device)
        positions_T = torch.tensor([position for one in work for position in one.positions], device=device)
        plan = CachedPass(self._pool, [one.stretch for one in work], fixed_order=self._policy.fixed_order)
        hidden_TD = self._policy.hidden(ids_T, positions_T, plan)
        self._num_passes += 1
        ready, last_row = [], -1
        for one in work:
            last_row += one.stretch.num_rows
            one.whose.cached += one.stretch.num_rows
            if isinstance(one.whose, Lane):
                if not one.whose.num_pending:
                    ready.append((one.whose, hidden_TD[last_row]))
            elif one.whose.cached == len(one.whose.tokens):
                one.whose.last_hidden_D = hidden_TD[last_row].clone()
        return ready

    def _first_tokens(self) -> list[tuple[Lane, torch.Tensor]]:
        """Lanes that have no token yet, and whose prompt predicts one."""
        return [
            (lane, lane.prefix.last_hidden_D)
            for lane in self._lanes
            if not lane.tokens and lane.prefix is not None and lane.prefix.last_hidden_D is not None
        ]

    def _draw(self, lanes: Sequence[Lane], hidden_ND: torch.Tensor) -> None:
        """The next token of these lanes; those that end with it are freed."""
        keys_N = torch.tensor([lane.key for lane in lanes])
        uniform_N = uniforms(keys_N, torch.tensor([len(lane.tokens) for lane in lanes])).to(self._policy.device)
        drawn = sample(
            self._policy.head,
            hidden_ND,
            uniform_N,
            [lane.shape for lane in lanes],
            [lane.truncation for lane in lanes],
            [lane.seen() for lane in lanes],
        )
        if not all(logprob - logprob == 0 for logprob in drawn.logprobs):
            raise UserError(
                f"the log-probs under version {self._version} are not finite: its weights are broken; lower the "
                "learning rate, and resume from a checkpoint before it"
            )
        ended = []
        for lane, token, logprob, kept in zip(lanes, drawn.tokens, drawn.logprobs, drawn.kept, strict=True):
            lane.append(token, logprob, self._version, kept)
            if finish := self._end_of(lane):
                ended.append((lane, lane.sample(finish, self._decode)))
        _post_all([(lane.answer, sample) for lane, sample in ended])
        for lane, _ in ended:  # whoever holds a lane is told if anything before fails
            self._free(lane)

    def _end_of(self, lane: Lane) -> FinishReason | None:
        """Why it ends here; None: it goes on, with the phrase that its request puts in, if it is time for it."""
        finish = lane.finish(self._decode)
        if finish is None and (num_new := lane.force_phrase(self._version, self._decode)):
            finish = lane.finish(self._decode, num_new=num_new)
        return finish

    def _free(self, lane: Lane) -> None:
        """It holds a lane no longer."""
        self._give_back_cache(lane)
        self._lanes.remove(lane)

    def _give_back_cache(self, lane: Lane) -> None:
        """Its keys and values are computed again, if it goes on."""
        self._blocks.give_back(lane.own)
        lane.own, lane.cached = [], 0
        if lane.prefix is not None:
            self._prefixes.leave(lane.prefix)
            lane.prefix = None

    def _answer(self, lane: Lane, finish: FinishReason) -> None:
        _post(lane.answer, lane.sample(finish, self._decode))


class _Closed(Exception):
    """The engine ended because it was told to."""


def _told(failure: BaseException) -> Exception:
    """Why the engine has ended, as an exception of each waiter's own: a shared one would gather everybody's notes."""
    if isinstance(failure, UserError):
        return UserError(*failure.args)
    if isinstance(failure, _Closed):
        return RuntimeError("the engine is closed")
    error = RuntimeError(f"the engine has failed: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error


def _post(answer: asyncio.Future[Any], result: Any = None, *, error: BaseException | None = None) -> None:
    """Resolve a future of an event loop from the engine's thread, unless its caller has gone."""
    _post_all([(answer, result)], error=error)


def _post_all(answers: Sequence[tuple[asyncio.Future[Any], Any]], *, error: BaseException | None = None) -> None:
    """Resolve several: each event loop is woken once, since to wake it takes longer than to resolve one."""
    for loop in {answer.get_loop() for answer, _ in answers}:
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(_resolve, [pair for pair in answers if pair[0].get_loop() is loop], error)


def _resolve(answers: Sequence[tuple[asyncio.Future[Any], Any]], error: BaseException | None) -> None:
    for answer, result in answers:
        if answer.done():
            continue
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)
