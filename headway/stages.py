"""The contracts between the verbs.

Two faces of one system:

- `Stages` is what the loop in `schedule/` drives: the five verbs of a training step, passing opaque references. It
  never looks into a reference; what it may know of a rollout comes beside it, as a receipt.
- `Generator`, `Trainer` and `Critic` are the boundary to the models: `sample`, `forward`, `forward_backward`,
  `optim_step`, `save`/`load`. The real stages are made of them, and so can a loop of your own be.

Every `Generator` passes the conformance tests in `tests/contract/`; doubles and real stages run through one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headway.types import FinishReason, Outcome, Prompt, Receipt, Score

Reference = Any
"""Something a stage made and another stage understands: the thing itself in one process, an object reference on Ray."""


class Ticket(Protocol):
    """A rollout's place in the schedule, as a stage sees it.

    index: the rollout's number in order of start; group, member: which answer to which prompt it is; version: the
    newest published weights when it was handed to its lane; evaluation: True for a held-out prompt that is answered
    greedily; max_tokens: how many tokens it may sample before it is to pause (None: as many as it needs). ref: the
    rollout, finished or as far as it had come when it was interrupted; None while nothing of it has been returned.
    """

    index: int
    group: int
    member: int
    version: int
    evaluation: bool
    max_tokens: float | None
    ref: Reference


class Lost(Exception):
    """Raised by `Stages.generate`: the rollout is gone (its engine has crashed, say). The schedule begins it again."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A rollout that has ended, or as far as it came before it was interrupted; by reference, with its receipt."""

    ref: Reference
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Scored:
    """A scored rollout, by reference. `reward` is for the record; the schedule acts on `outcome` alone."""

    ref: Reference
    outcome: Outcome
    reward: float | None


@dataclass(frozen=True, slots=True)
class Restored:
    """A rollout out of a checkpoint: what `generate` had returned of it, and its score where it had one.

    version: of its ticket.
    """

    group: int
    member: int
    version: int
    generated: Generated
    scored: Scored | None = None


@dataclass(frozen=True, slots=True)
class Trained:
    """What a train step leaves: the new weights, by reference, and its metrics by name."""

    weights: Reference
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Stages(Protocol):
    """The training step. Each verb is one coroutine; an exception in any of them ends the run with its cause."""

    async def generate(self, ticket: Ticket) -> Generated:
        """Sample the ticket's rollout, from `ticket.ref` on where that is set.

        It returns early, with finish "interrupted", when it has sampled `ticket.max_tokens` tokens more, or at the next
        token boundary after `stop`. Raises Lost where the engine has lost it.
        """
        ...

    def stop(self, ticket: Ticket) -> None:
        """Ask for what there is of a rollout in flight: its `generate` returns it. Too late, it does nothing."""
        ...

    async def score(self, ticket: Ticket, rollout: Reference) -> Scored: ...

    async def prepare(self, groups: Sequence[Sequence[Reference]], version: int) -> Reference:
        """Scored rollouts by group -> one batch, ready to train. `version`: the weights it will be trained under."""
        ...

    async def train(self, batch: Reference) -> Trained: ...

    async def sync(self, weights: Reference, version: int) -> None:
        """Returns when every engine has acknowledged that it samples from `version`."""
        ...

    async def save(self, progress: Mapping[str, Any], tickets: Sequence[Ticket]) -> None:
        """Keep what a resume needs: the trainer; `progress`, the ledger's own account of the run, as JSON holds it; and
        the rollouts of `tickets`, which no train step has taken yet: finished ones with their score, those in flight as
        far as they have come. They go on meanwhile.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """What an engine returns: ids, behaviour log-probs and versions, one of each per token, and why it ended.

    mask: False for tokens that were put in, not sampled; their log-prob is 0. kept: the ids among which each token was
    drawn, in ascending order, None for one that could have been any; None where that holds for all of them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: FinishReason
    text: str
    mask: tuple[bool, ...]
    kept: tuple[Sequence[int] | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Force:
    """A phrase that is put in after `after_tokens` sampled ones, unless the answer holds `unless` by then."""

    after_tokens: int
    tokens: tuple[int, ...]
    unless: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """One rollout to sample. Token `t` is drawn with uniform `t` of the stream that `seed_key` names.

    max_new_tokens: of the whole answer; temperature: 0 means greedy; end_ids: ids that end the rollout and are part of
    it; stop: strings that end it; every id sampled so far is kept. top_k (0: all), top_p, min_p, repetition_penalty (1:
    none): as in `models.distribution`; force: a phrase to put in. so_far: an interrupted sample of this rollout to go
    on from; pause_after: it is interrupted after so many more tokens. spare: it takes one of the engine's spare lanes,
    which no ticket is for. A request is itself: two that look alike are two rollouts.
    """

    prompt: Prompt
    seed_key: tuple[int | str, ...]
    max_new_tokens: int
    temperature: float = 1.0
    end_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    force: Force | None = None
    so_far: Sample | None = None
    pause_after: int | None = None
    spare: bool = False


class Generator(Protocol):
    """A generation engine. Its weights are its own: nothing is true by sharing storage with a trainer."""

    async def sample(self, request: SampleRequest) -> Sample:
        """The whole answer, `so_far` included; an interrupted one has finish "interrupted".

        Cancelling the caller frees the rollout's place at the next token boundary.
        """
        ...

    def interrupt(self, request: SampleRequest) -> None:
        """`sample(request)` returns what there is at the next token boundary. Too late, it does nothing."""
        ...

    async def peek(self, request: SampleRequest) -> Sample | None:
        """What there is of a rollout in flight at a token boundary; it goes on. None: it is not in flight."""
        ...

    async def load(self, weights: Mapping[str, Any], version: int, *, recompute: bool = False) -> None:
        """Swap weights at a token boundary; rollouts in flight go on. Names and shapes must match exactly.

        recompute: their keys and values are computed again under the new weights; else those cached are kept.
        """
        ...

    async def fingerprint(self) -> str:
        """A hash of every weight the engine samples from, taken at a token boundary."""
        ...

    async def sleep(self, *, weights: bool = False) -> None:
        """Give back the memory of the cache, and with `weights` that of the weights that `load` brings.

        Rollouts in flight stand still; what they stand on is computed again after `wake`.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again and go on. Raises UserError where the weights are gone and none have been loaded."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Of the N trained tokens of some rows, on the CPU: log-prob and entropy, and their loss.

    logp_N, entropy_N: float32 tensors without gradient; loss: a number (None where none was asked for).
    """

    logp_N: Any
    entropy_N: Any
    loss: float | None = None


class Trainer(Protocol):
    """The weights being optimised, in fp32, with their optimizer; and the frozen reference, where one is needed.

    Rows are `models.rows.Rows`.
    """

    def forward(self, rows: Any, *, reference: bool = False) -> ForwardResult:
        """Every trained token under the current weights, or under the frozen reference, without gradients."""
        ...

    def forward_backward(self, rows: Any, loss: Callable[[Any], Any], *, last: bool = True) -> ForwardResult:
        """Add the gradient of `loss(logp_N)`, a scalar tensor; gradients accumulate until `optim_step`.

        logp_N comes with its gradient, on the trainer's device. last: no other pass comes before `optim_step`, so those
        who train together may add up their gradients now.
        """
        ...

    def optim_step(self) -> Mapping[str, Any]:
        """One optimizer step on what has accumulated; skipped, counted and said when it is not finite."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """Name -> tensor of every weight an engine needs. Valid until the next `optim_step`."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Values:
    """What a critic says of some rows, on the CPU; float32 tensors without gradient.

    value_N: of the state before each trained token; bootstrap_R: of the state in which each of the rollouts
    `Rows.last_rollout_R` was cut off; loss: a number (None where none was asked for).
    """

    value_N: Any
    bootstrap_R: Any
    loss: float | None = None


class Critic(Protocol):
    """A value function being optimised beside the policy, with an optimizer of its own."""

    def forward(self, rows: Any) -> Values:
        """Values under the current weights, without gradients."""
        ...

    def forward_backward(self, rows: Any, loss: Callable[[Any], Any]) -> Values:
        """Add the gradient of `loss(value_N)`, a scalar tensor; gradients accumulate until `optim_step`."""
        ...

    def optim_step(self) -> Mapping[str, Any]:
        """As `Trainer.optim_step`."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class Scorer(Protocol):
    """Grades one answer. A grader that fails or is late is said so; it is never reward 0."""

    async def score(self, prompt: Prompt, text: str) -> Score: ...

    async def close(self) -> None: ...
