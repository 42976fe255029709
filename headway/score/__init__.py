"""Verb 2: grading answers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headway.config import ScoreSettings
from headway.score.function import FunctionScorer
from headway.score.reasoning_gym import ReasoningGymScorer
from headway.score.verifier import NumberVerifier
from headway.stages import Scorer
from headway.types import Prompt, Score, UserError, did_you_mean, nearest

UNSCORED_IN_A_ROW = 16
CHOICES = "number, reasoning_gym, or module:function"


def make_scorer(settings: ScoreSettings, prompts: Sequence[Prompt]) -> ErrorLimit:
    """The scorer that `settings` name, after a look whether `prompts` have what it needs.

    Raises UserError for an unknown scorer, a grader that can't be loaded, or a prompt it can't grade.
    """
    return ErrorLimit(_scorer(settings, prompts), name=settings.scorer or "", max_errors=settings.max_errors)


def _scorer(settings: ScoreSettings, prompts: Sequence[Prompt]) -> Scorer:
    name = settings.scorer
    if name is None:
        raise UserError(f"score.scorer is not set; choose {CHOICES}")
    if name == "number":
        verifier = NumberVerifier()
        for prompt in prompts:
            verifier.check(prompt)
        return verifier
    if name == "reasoning_gym":
        for prompt in prompts:
            ReasoningGymScorer.check(prompt)
        return ReasoningGymScorer(workers=settings.workers, timeout_s=settings.timeout_s)
    _check_target(name)
    return FunctionScorer(name, workers=settings.workers, timeout_s=settings.timeout_s)


def _check_target(name: str) -> None:
    if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
        return
    if ":" in name:
        module, _, function = name.partition(":")
        near = f"{module.removesuffix('.py').replace('/', '.')}:{function or 'FUNCTION'}"
        raise UserError(f"score.scorer = {name!r} is no module:function, as in {near}")
    hint = did_you_mean(*nearest(name, ["number", "reasoning_gym"]))
    raise UserError(f"score.scorer = {name!r} is no scorer{hint}; choose {CHOICES}")


class ErrorLimit:
    """A scorer that counts what went wrong in grading and stops the run after too many errors of the grader.

    num_errors, num_timeouts: rollouts left unscored so far. A time-out alone doesn't stop the run: a slow answer is the
    model's doing more often than the grader's. But `UNSCORED_IN_A_ROW` rollouts without a reward do, whatever the
    reason: groups would fail and be replaced for ever.
    """

    def __init__(self, scorer: Scorer, *, name: str, max_errors: int) -> None:
        self._scorer = scorer
        self._name = name
        self._max_errors = max_errors
        self.num_errors = 0
        self.num_timeouts = 0
        self._num_unscored_in_a_row = 0

    async def score(self, prompt: Prompt, text: str) -> Score:
        """Raises UserError with more than `max_errors` errors of the grader, or when it gives no reward any more."""
        score = await self._scorer.score(prompt, text)
        self.num_timeouts += score.outcome == "grader_timeout"
        self.num_errors += score.outcome == "grader_error"
        if score.outcome == "grader_error" and self.num_errors > self._max_errors:
            raise UserError(self._too_many(prompt, score))
        self._num_unscored_in_a_row = 0 if score.outcome == "scored" else self._num_unscored_in_a_row + 1
        if self._num_unscored_in_a_row >= UNSCORED_IN_A_ROW:
            raise UserError(
                f"the grader {self._name} gave no reward to {UNSCORED_IN_A_ROW} rollouts in a row (the last, to prompt "
                f"{prompt.uid}: {score.outcome} {score.detail}); mend it, or raise --score.timeout-s if it is only slow"
            )
        return score

    def _too_many(self, prompt: Prompt, score: Score) -> str:
        before = f"failed {self.num_errors} times, the last time" if self._max_errors else "failed"
        return (
            f"the grader {self._name} {before} on prompt {prompt.uid}: {score.detail}; mend it, or set "
            f"--score.max-errors {max(10, 10 * self._max_errors)} to leave such rollouts unscored and count them"
        )

    async def close(self) -> None:
        await self._scorer.close()
