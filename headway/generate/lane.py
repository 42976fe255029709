"""A rollout that waits for a lane or holds one, and when it ends."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from headway.generate.prefixes import Prefix
from headway.generate.randomness import stream_key
from headway.models.distribution import Shape, Truncation
from headway.models.paged import Stretch
from headway.stages import Sample, SampleRequest
from headway.types import FinishReason

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


@dataclass(eq=False)
class Lane:
    """tokens, logprobs, versions, mask, kept: what there is of the rollout, as in `Sample`.

    prefix: its prompt's keys and values, once it holds a lane; own: blocks of its tokens' keys and values, of which the
    first `cached` are there. number: in order of admission.
    """

    request: SampleRequest
    answer: asyncio.Future[Sample]
    key: int
    shape: Shape
    truncation: Truncation
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    kept: list[Sequence[int] | None] = field(default_factory=list)
    prefix: Prefix | None = None
    own: list[int] = field(default_factory=list)
    cached: int = 0
    number: int = -1
    pause_at: float = math.inf
    aborted: bool = False

    @staticmethod
    def of(request: SampleRequest, answer: asyncio.Future[Sample]) -> Lane:
        lane = Lane(
            request,
            answer,
            stream_key(*request.seed_key),
            Shape(request.temperature, request.repetition_penalty),
            Truncation(request.top_k, request.top_p, request.min_p),
        )
        if before := request.so_far:
            lane.tokens, lane.logprobs = list(before.tokens), list(before.logprobs)
            lane.versions, lane.mask = list(before.versions), list(before.mask)
            lane.kept = list(before.kept) if before.kept is not None else [None] * len(lane.tokens)
        if request.pause_after is not None:
            lane.pause_at = len(lane.tokens) + request.pause_after
        return lane

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are not cached. Between two passes at least the newest."""
        return len(self.tokens) - self.cached

    def stretch(self, num_rows: int) -> Stretch:
        """The next so many of its tokens as rows of a pass."""
        assert self.prefix is not None
        return Stretch(self.cached, num_rows, self.own, self.prefix.blocks, len(self.prefix.tokens))

    def seen(self) -> torch.Tensor | None:
        """Ids in its context, where a repetition penalty wants them."""
        if self.shape.repetition_penalty == 1.0:
            return None
        return torch.tensor(sorted({*self.request.prompt.tokens, *self.tokens}))

    def append(self, token: int, logprob: float, version: int, kept: torch.Tensor | None) -> None:
        """A token that was sampled."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.mask.append(True)
        self.kept.append(None if kept is None else array("i", kept.tolist()))

    def force_phrase(self, version: int, decode: Decode) -> int:
        """If it is time for it: the request's phrase, which nobody sampled, as far as the budget has room for it.

        -> tokens that were put in.
        """
        force = self.request.force
        if force is None or sum(self.mask) != force.after_tokens or not all(self.mask):
            return 0
        if force.unless and force.unless in decode(self.tokens):
            return 0
        phrase = force.tokens[: max(0, self.request.max_new_tokens - len(self.tokens))]
        self.tokens += phrase
        self.logprobs += [0.0] * len(phrase)
        self.versions += [version] * len(phrase)
        self.mask += [False] * len(phrase)
        self.kept += [None] * len(phrase)
        return len(phrase)

    def finish(self, decode: Decode, *, num_new: int = 1) -> FinishReason | None:
        """Why it ends here, with so many tokens that are new; None: it goes on."""
        if self._ended or self._meets_a_stop_string(decode, num_new):
            return "stop"
        if len(self.tokens) >= self.request.max_new_tokens:
            return "length"
        return "interrupted" if len(self.tokens) >= self.pause_at else None

    @property
    def _ended(self) -> bool:
        return bool(self.tokens) and self.mask[-1] and self.tokens[-1] in self.request.end_ids

    def _meets_a_stop_string(self, decode: Decode, num_new: int) -> bool:
        """With the newest tokens. Only the tail is decoded: a token is at least one byte."""
        if not self.request.stop:
            return False
        longest = max(len(stop.encode()) for stop in self.request.stop)
        tail = decode(self.tokens[-(longest + 3 + num_new) :])
        return any(stop in tail for stop in self.request.stop)

    def sample(self, finish: FinishReason, decode: Decode) -> Sample:
        text = decode(self.tokens[:-1] if self._ended else self.tokens)
        cuts = [text.index(stop) for stop in self.request.stop if stop in text]
        return Sample(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish=finish,
            text=text[: min(cuts)] if cuts else text,
            mask=tuple(self.mask),
            kept=tuple(self.kept) if any(ids is not None for ids in self.kept) else None,
        )
