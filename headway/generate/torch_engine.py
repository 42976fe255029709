"""The embedded engine: continuous batching over any policy, on a thread of its own.

At every token boundary the engine obeys what has arrived (new rollouts, interruptions, new weights), prefills what it
does not know yet, and samples one token in every lane. A finished rollout's lane is refilled at the next boundary.
The event loop only ever queues a command and awaits a future; it is never blocked by a forward pass.

What a rollout stands on when it gets a lane, its prompt and whatever it had sampled before it was interrupted, is
computed under the weights of that moment. Later weights leave its keys and values as they are, unless they come with
the word to recompute them.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from headway.generate.randomness import stream_key, uniforms
from headway.models.attention import CachedAttention, KeyValueCache, PackedAttention, Segment
from headway.models.cores import Cores
from headway.models.distribution import sample
from headway.models.policy import Policy
from headway.models.weights import assign_weights, fingerprint
from headway.stages import Sample, SampleRequest
from headway.types import FinishReason, UserError

KNOWN_PROMPTS = 8
"""Prompts whose keys and values are kept for the members of a group that start later."""

PREFILL_TOKENS = 8192
"""Tokens that one prefill pass may hold."""

Tokens = tuple[int, ...]


@dataclass(eq=False)
class _Lane:
    """A rollout that waits for a lane or holds one. `length`: tokens whose keys and values are cached.

    Between two passes that is all of them but the newest, which the next pass is given.
    """

    request: SampleRequest
    answer: asyncio.Future[Sample]
    key: int
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    pause_at: float = math.inf
    aborted: bool = False

    @staticmethod
    def of(request: SampleRequest, answer: asyncio.Future[Sample]) -> _Lane:
        lane = _Lane(request, answer, stream_key(*request.seed_key))
        if before := request.so_far:
            lane.tokens, lane.versions = list(before.tokens), list(before.versions)
            lane.logprobs = list(before.logprobs)
        if request.pause_after is not None:
            lane.pause_at = len(lane.tokens) + request.pause_after
        return lane

    @property
    def context(self) -> Tokens:
        """All tokens that the next one follows."""
        return (*self.request.prompt.tokens, *self.tokens)

    @property
    def ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.request.end_ids


@dataclass(frozen=True)
class _Prefilled:
    """Keys and values [G, P, D] by layer of P tokens, and the hidden state [D] that predicts the token after them."""

    kept: list[tuple[torch.Tensor, torch.Tensor]]
    last_hidden_D: torch.Tensor


class TorchEngine:
    """Implements `headway.stages.Generator`.

    policy: the engine's own copy of the weights; lanes: rollouts in flight at once (more requests than that wait);
    spare_lanes: as many more, for spare requests alone; decode: ids -> text; cores: its claim to CPU cores; version:
    what the policy's weights are called.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        lanes: int,
        decode: Callable[[Sequence[int]], str],
        cores: Cores,
        version: int = 0,
        spare_lanes: int = 0,
    ) -> None:
        self._policy, self._decode, self._cores = policy, decode, cores
        self._num_lanes, self._num_spare, self._version = lanes, spare_lanes, version
        self._lanes: list[_Lane] = []
        self._waiting: deque[_Lane] = deque()
        self._cache = KeyValueCache(lanes + spare_lanes)
        self._cache_is_stale = False
        self._known_prompts: OrderedDict[Tokens, _Prefilled] = OrderedDict()
        self._commands: queue.SimpleQueue[tuple[Callable[[], object], asyncio.Future[Any] | None]] = queue.SimpleQueue()
        self._closed = False
        self._failure: BaseException | None = None
        self._hand_over = threading.Lock()  # the engine must not end between a look at it and the command it is given
        self._thread = threading.Thread(target=self._serve, name="headway engine", daemon=True)
        self._thread.start()

    # ---- called from the event loop

    async def sample(self, request: SampleRequest) -> Sample:
        self._check(request)
        lane = _Lane.of(request, asyncio.get_running_loop().create_future())
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
        def swap() -> None:
            assign_weights(self._policy.weights(), weights)
            self._version = version
            self._known_prompts.clear()  # their keys and values belong to the old weights
            self._cache_is_stale |= recompute

        await self._ask(swap)

    async def fingerprint(self) -> str:
        return await self._ask(lambda: fingerprint(self._policy.weights()))

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
        needed = len(request.prompt.tokens) + request.max_new_tokens
        if not request.prompt.tokens:
            raise UserError(f"prompt {request.prompt.uid} has no tokens, and an answer needs something to follow")
        if needed > self._policy.context_tokens:
            raise UserError(
                f"prompt {request.prompt.uid} has {len(request.prompt.tokens)} tokens; with {request.max_new_tokens} "
                f"new ones that is more than the model's context of {self._policy.context_tokens}: shorten it or lower "
                "max_new_tokens"
            )

    # ---- on the engine's thread

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
            while (self._lanes or self._waiting) and not self._closed:
                with self._cores.unit():
                    self._drop_aborted()
                    self._refresh_cache()
                    self._admit()
                    if self._lanes:
                        self._sample_one_token_everywhere()
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

    def _take_in(self, lane: _Lane) -> None:
        """A rollout waits for a lane, unless it has come as far as it may already."""
        self._waiting.append(lane)
        if finish := self._finish(lane):
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
            self._free(self._lanes.index(lane))

    def _peek(self, request: SampleRequest) -> Sample | None:
        lane = self._find(request)
        return None if lane is None else self._sample(lane, "interrupted")

    def _find(self, request: SampleRequest) -> _Lane | None:
        return next((lane for lane in (*self._lanes, *self._waiting) if lane.request is request), None)

    def _drop_aborted(self) -> None:
        self._waiting = deque(lane for lane in self._waiting if not lane.aborted)
        for number in reversed(range(len(self._lanes))):
            if self._lanes[number].aborted:
                self._free(number)

    def _free(self, number: int) -> None:
        """Lanes in use stay the first ones: the last moves into the gap."""
        last = self._lanes.pop()
        if number < len(self._lanes):
            self._lanes[number] = last
            self._cache.move(len(self._lanes), number, last.length)

    def _refresh_cache(self) -> None:
        """Where new weights came with that word: the keys and values of all rollouts in flight, computed again."""
        if not self._cache_is_stale:
            return
        cached = [lane.context[:-1] for lane in self._lanes]
        for part in _parts(cached):
            prefilled = self._prefill(part)
            for number, tokens in enumerate(cached):
                if tokens in prefilled:
                    self._cache.write(number, prefilled[tokens].kept)
        self._cache_is_stale = False

    def _admit(self) -> None:
        """Hand waiting rollouts free lanes and sample their next token; what they stand on is prefilled once."""
        joining = self._joining()
        if not joining:
            return
        contexts = self._contexts(joining)
        needed = max(len(lane.request.prompt.tokens) + lane.request.max_new_tokens for lane in joining)
        hidden_ND = torch.stack([contexts[lane.context].last_hidden_D for lane in joining])
        first = len(self._lanes)
        for lane in joining:
            context = contexts[lane.context]
            self._cache.reserve(needed, context.kept)
            self._cache.write(len(self._lanes), context.kept)
            lane.length = len(lane.context)
            self._waiting.remove(lane)
            self._lanes.append(lane)
        self._append_tokens(first, hidden_ND)

    def _joining(self) -> list[_Lane]:
        """Who waits and finds a free lane of its kind, first come, first served."""
        num_spare = sum(lane.request.spare for lane in self._lanes)
        free = {False: self._num_lanes - (len(self._lanes) - num_spare), True: self._num_spare - num_spare}
        return [lane for kind, num in free.items() for lane in islice(self._of_kind(kind), num)]

    def _of_kind(self, spare: bool) -> Iterator[_Lane]:
        return (lane for lane in self._waiting if lane.request.spare == spare)

    def _contexts(self, joining: list[_Lane]) -> dict[Tokens, _Prefilled]:
        """What those that join stand on, prefilled where it isn't known. Prompts are kept, but for spare requests'."""
        wanted = dict.fromkeys(lane.context for lane in joining)
        found = {tokens: self._known_prompts[tokens] for tokens in wanted if tokens in self._known_prompts}
        for part in _parts(tokens for tokens in wanted if tokens not in found):
            found |= self._prefill(part)
        for tokens in dict.fromkeys(lane.context for lane in joining if not (lane.tokens or lane.request.spare)):
            self._known_prompts[tokens] = found[tokens]
            self._known_prompts.move_to_end(tokens)
        while len(self._known_prompts) > KNOWN_PROMPTS:
            self._known_prompts.popitem(last=False)
        return found

    def _prefill(self, sequences: list[Tokens]) -> dict[Tokens, _Prefilled]:
        device = self._policy.device
        starts, total = [], 0
        for tokens in sequences:
            starts.append(total)
            total += len(tokens)
        segments = [Segment(start, len(tokens)) for start, tokens in zip(starts, sequences, strict=True)]
        plan = PackedAttention(segments, device, keep=True)
        ids_T = torch.tensor([token for tokens in sequences for token in tokens], device=device)
        positions_T = torch.cat([torch.arange(len(tokens)) for tokens in sequences]).to(device)
        hidden_TD = self._policy.hidden(ids_T, positions_T, plan)
        assert plan.kept is not None
        return {
            tokens: _Prefilled(
                [
                    (key[:, start : start + len(tokens)], value[:, start : start + len(tokens)])
                    for key, value in plan.kept
                ],
                hidden_TD[start + len(tokens) - 1],
            )
            for tokens, start in zip(sequences, starts, strict=True)
        }

    def _sample_one_token_everywhere(self) -> None:
        device = self._policy.device
        ids_N = torch.tensor([lane.tokens[-1] for lane in self._lanes], device=device)
        positions_N = torch.tensor([lane.length for lane in self._lanes], device=device)
        hidden_ND = self._policy.hidden(ids_N, positions_N, CachedAttention(self._cache, positions_N))
        for lane in self._lanes:
            lane.length += 1
        self._append_tokens(0, hidden_ND)

    def _append_tokens(self, first: int, hidden_ND: torch.Tensor) -> None:
        """Sample the next token of every lane from number `first` on, and free the lanes that end with it."""
        lanes, device = self._lanes[first:], self._policy.device
        uniform_N = uniforms(
            torch.tensor([lane.key for lane in lanes]), torch.tensor([len(lane.tokens) for lane in lanes])
        ).to(device)
        temperature_N = torch.tensor([lane.request.temperature for lane in lanes], device=device)
        tokens_N, logprobs_N = sample(self._policy.head, hidden_ND, temperature_N, uniform_N)
        if not logprobs_N.isfinite().all():
            raise UserError(
                f"the log-probs under version {self._version} are not finite: its weights are broken; lower the "
                "learning rate, and resume from a checkpoint before it"
            )
        for lane, token, logprob in zip(lanes, tokens_N.tolist(), logprobs_N.tolist(), strict=True):
            lane.tokens.append(token)
            lane.logprobs.append(logprob)
            lane.versions.append(self._version)
        for number in reversed(range(first, len(self._lanes))):
            if finish := self._finish(self._lanes[number]):
                self._answer(self._lanes[number], finish)
                self._free(number)

    def _finish(self, lane: _Lane) -> FinishReason | None:
        if lane.ended or self._stop_at(lane) is not None:
            return "stop"
        if len(lane.tokens) >= lane.request.max_new_tokens:
            return "length"
        return "interrupted" if len(lane.tokens) >= lane.pause_at else None

    def _stop_at(self, lane: _Lane) -> str | None:
        """The stop string that the newest token completed. Only the tail is decoded: a token is at least one byte."""
        if not lane.request.stop:
            return None
        longest = max(len(stop.encode()) for stop in lane.request.stop)
        tail = self._decode(lane.tokens[-(longest + 4) :])
        return next((stop for stop in lane.request.stop if stop in tail), None)

    def _answer(self, lane: _Lane, finish: FinishReason) -> None:
        _post(lane.answer, self._sample(lane, finish))

    def _sample(self, lane: _Lane, finish: FinishReason) -> Sample:
        text = self._decode(lane.tokens[:-1] if lane.ended else lane.tokens)
        cuts = [text.index(stop) for stop in lane.request.stop if stop in text]
        text = text[: min(cuts)] if cuts else text
        return Sample(tuple(lane.tokens), tuple(lane.logprobs), tuple(lane.versions), finish, text)


def _parts(sequences: Iterable[Tokens]) -> Iterator[list[Tokens]]:
    """The different ones among `sequences`, by the prefill pass they are for."""
    part: list[Tokens] = []
    for tokens in dict.fromkeys(sequences):
        if part and sum(map(len, part)) + len(tokens) > PREFILL_TOKENS:
            yield part
            part = []
        part.append(tokens)
    if part:
        yield part


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
    """Resolve a future of the event loop from the engine's thread, unless its caller has gone."""

    def resolve() -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    loop = answer.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(resolve)
