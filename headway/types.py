"""The nouns every stage shares: plain, picklable, no tensors.

A `Prompt` is answered by `group_size` rollouts; a `Rollout` is one sampled answer in which every token remembers
the log-prob it was really sampled with and the version of the weights that sampled it; a `Score` is what a scorer
said of it; a `Receipt` is all the scheduler may know of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "interrupted"]
"""Why a rollout ended. Said by the sampler; never read off token values. An interrupted one may go on from there."""

Outcome = Literal["scored", "grader_error", "grader_timeout", "lost"]
"""What became of a rollout. A wrong answer is `scored` with a low reward; the others have no reward. `lost`: the engine
lost it again and again, and it was never scored."""

Order = Literal["finished", "started", "window"]
"""In which order groups are trained: first finished first, in order of start, or finished first among the oldest."""

Straggler = Literal["drop", "interrupt", "restart"]
"""What is done about groups that come to max_lag."""

InFlight = Literal["keep", "recompute", "drain", "restart", "pinned"]
"""What becomes of rollouts in flight when there are new weights."""


Parity = Literal["close", "bitwise"]
"""How near the engine's log-probs are to the trainer's: to rounding in float32, or in every bit."""


class UserError(ValueError):
    """Something the user can mend. The message is one line: what was wrong, where, and the nearest valid choice."""


def nearest(word: str, choices: Iterable[str], *, num: int = 1, cutoff: float = 0.5) -> list[str]:
    """The choices most like `word`, at most `num` of them; none that is less like it than `cutoff`, from 0 to 1.

    >>> nearest("run_ahed", ["run_ahead", "max_lag"])
    ['run_ahead']
    """
    return difflib.get_close_matches(word, list(choices), n=num, cutoff=cutoff)


def did_you_mean(*choices: object) -> str:
    """The end of a `UserError`'s message; nothing without a choice.

    >>> did_you_mean("addition", "subtraction"), did_you_mean()
    ('; did you mean addition or subtraction?', '')
    """
    return f"; did you mean {' or '.join(map(str, choices))}?" if choices else ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is answered.

    uid: stable name, the same in every run that reads the same data.
    text: what a person reads; `tokens` are what the model is given (never re-encoded after this).
    answer: the reference answer, for scorers that compare.
    task: whatever else the scorer needs (the whole entry of a task generator, for instance).
    """

    uid: str
    text: str
    tokens: tuple[int, ...] = ()
    answer: str | None = None
    task: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionRun:
    """`num_tokens` consecutive tokens sampled under weights `version`; in the lane model, units of length."""

    version: int
    num_tokens: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer. All per-token tuples have the length of `tokens`; the prompt is not among them.

    logprobs: log-prob of each token under the distribution it was really sampled from, recorded at that moment.
    versions: the version of the weights that sampled each token.
    mask: True where the token was sampled and may be trained; False for text that others wrote.
    text: the decoded answer as graded, cut before a stop string; tokens are never derived from it.
    kept: the ids among which each token was drawn, None for one that could have been any; None: that holds for all.
    """

    prompt: Prompt
    epoch: int
    member: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    mask: tuple[bool, ...]
    finish: FinishReason
    text: str
    kept: tuple[Sequence[int] | None, ...] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.logprobs), len(self.versions), len(self.mask)}
        lengths |= {len(self.kept)} if self.kept is not None else set()
        assert len(lengths) == 1, f"per-token fields of a rollout differ in length: {lengths}"

    @property
    def truncated(self) -> bool:
        """It was cut off before its own end: by its token budget, or because it was interrupted."""
        return self.finish != "stop"

    @property
    def version_runs(self) -> tuple[VersionRun, ...]:
        """The versions of the tokens, run-length encoded, in order of sampling."""
        runs: list[VersionRun] = []
        for version in self.versions:
            if runs and runs[-1].version == version:
                runs[-1] = VersionRun(version, runs[-1].num_tokens + 1)
            else:
                runs.append(VersionRun(version, 1))
        return tuple(runs)


@dataclass(frozen=True, slots=True)
class Score:
    """A scorer's word on one rollout.

    reward: None exactly when `outcome` is not "scored". detail: what went wrong. misplaced: whether a wrong answer
    holds the right result where it doesn't count, so that a better format would earn it; None: the scorer can't say.
    """

    reward: float | None
    outcome: Outcome = "scored"
    detail: str = ""
    misplaced: bool | None = None

    def __post_init__(self) -> None:
        assert (self.reward is None) == (self.outcome != "scored"), "a score has a reward if and only if it is scored"


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout with its score: what preparing a batch starts from."""

    rollout: Rollout
    score: Score


@dataclass(frozen=True, slots=True)
class Receipt:
    """All the scheduler knows of a rollout it passes by reference.

    prompt_uid: whose answer it is; version_runs: which weights sampled how many of its tokens, in order.
    """

    prompt_uid: str
    num_prompt_tokens: int
    version_runs: tuple[VersionRun, ...]
    finish: FinishReason

    @property
    def num_tokens(self) -> float:
        """Sampled tokens (in the lane model, units of length)."""
        return sum(run.num_tokens for run in self.version_runs)
