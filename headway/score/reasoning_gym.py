"""The scorers that come with the tasks of reasoning_gym."""

from __future__ import annotations

from headway.score.sandbox import GraderPool
from headway.types import Prompt, Score, UserError


class ReasoningGymScorer:
    """Grades with the scorer of the prompt's own task, in worker processes that can be ended.

    The whole text, without the white space around it, is handed over as the answer: nothing is cut out of a sentence,
    so the prompt must ask for the answer alone (for tasks whose answers are numbers, the scorer `number` reads the
    last one of a sentence). The reward is what the task's scorer returns, from 0 to 1; many give partial credit, some
    for any text that contains the answer. A scorer is made with the task's own parameters, and an answer that would
    reach beyond computing when the scorer evaluates it has reward 0. A few scorers (prime_factorization, boxnet,
    game_of_life) raise for an answer of a form they do not expect; that is a grader error like any other.

    Raises UserError when reasoning_gym is not installed.
    """

    def __init__(self, *, workers: int, timeout_s: float) -> None:
        self._pool = GraderPool({"reasoning_gym": True}, workers=workers, timeout_s=timeout_s, setting="reasoning_gym")

    @staticmethod
    def check(prompt: Prompt) -> None:
        """Raises UserError when the prompt is of no task of reasoning_gym."""
        if not {"reasoning_gym", "params", "entry"} <= prompt.task.keys():
            raise UserError(
                f"score.scorer = 'reasoning_gym', but prompt {prompt.uid} is of no task of reasoning_gym; "
                "set data.source to reasoning_gym:TASK, or score.scorer to number or module:function"
            )

    async def score(self, prompt: Prompt, text: str) -> Score:
        self.check(prompt)
        task = prompt.task
        return await self._pool.grade(
            task=task["reasoning_gym"], params=dict(task["params"]), entry=task["entry"], answer=text.strip()
        )

    async def close(self) -> None:
        await self._pool.close()
