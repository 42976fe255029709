"""A user's own grader: any Python function of an answer's text and its prompt."""

from __future__ import annotations

from headway.score.sandbox import GraderPool
from headway.types import Prompt, Score


class FunctionScorer:
    """Grades with `module:function(text, prompt) -> reward`, in worker processes that can be ended.

    The function gets the answer's text and the prompt as `{"uid", "text", "answer", "task"}`, where `task` holds the
    other keys of the prompt's line in a .jsonl file. It returns a finite number, or True or False. The module is
    looked for in the working directory first. What it raises is a grader error, what takes more than `timeout_s` a
    grader time-out; neither is a reward.

    Raises UserError when the module or the function can't be found or used.
    """

    def __init__(self, target: str, *, workers: int, timeout_s: float) -> None:
        self._pool = GraderPool({"function": target}, workers=workers, timeout_s=timeout_s, setting=target)

    async def score(self, prompt: Prompt, text: str) -> Score:
        given = {"uid": prompt.uid, "text": prompt.text, "answer": prompt.answer, "task": dict(prompt.task)}
        return await self._pool.grade(text=text, prompt=given)

    async def close(self) -> None:
        await self._pool.close()
