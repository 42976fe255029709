import asyncio
import re

import pytest

from headway.config import ScoreSettings
from headway.score import ErrorLimit, make_scorer
from headway.types import Prompt, Score, UserError

PROMPT = Prompt("p1", "2+2=", answer="4")


class Scripted:
    """Says what it is told, in order."""

    def __init__(self, *scores):
        self.scores = list(scores)
        self.is_closed = False

    async def score(self, prompt, text):
        return self.scores.pop(0)

    async def close(self):
        self.is_closed = True


def test_the_number_scorer():
    scorer = make_scorer(ScoreSettings(scorer="number"), [PROMPT])
    assert asyncio.run(scorer.score(PROMPT, "4")).reward == 1.0
    assert asyncio.run(scorer.score(PROMPT, "5")).reward == 0.0
    asyncio.run(scorer.close())


def test_a_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.py").write_text("def score(text, prompt):\n    return 1 / len(text)\n")
    scorer = make_scorer(ScoreSettings(scorer="short:score"), [PROMPT])
    assert asyncio.run(scorer.score(PROMPT, "1234")) == Score(0.25)
    with pytest.raises(UserError) as caught:
        asyncio.run(scorer.score(PROMPT, ""))
    assert str(caught.value) == (
        "the grader short:score failed on prompt p1: ZeroDivisionError: division by zero at short.py:2; mend it, "
        "or set --score.max-errors 10 to leave such rollouts unscored and count them"
    )
    asyncio.run(scorer.close())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "score.scorer is not set; choose number, reasoning_gym, or module:function"),
        ("nubmer", "is no scorer; did you mean number?; choose"),
        ("reasoning-gym", "did you mean reasoning_gym?"),
        ("zzz", "'zzz' is no scorer; choose number"),
        ("graders/mine.py:score", "no module:function, as in graders.mine:score"),
        ("mine:", "no module:function, as in mine:FUNCTION"),
    ],
)
def test_unknown_scorers(name, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make_scorer(ScoreSettings(scorer=name), [PROMPT])


def test_prompts_are_looked_at_first():
    with pytest.raises(UserError, match="prompt p2 has no answer"):
        make_scorer(ScoreSettings(scorer="number"), [PROMPT, Prompt("p2", "hm")])
    with pytest.raises(UserError, match="prompt p1 is of no task"):
        make_scorer(ScoreSettings(scorer="reasoning_gym"), [PROMPT])


def test_errors_up_to_the_limit_are_counted_and_one_more_stops():
    error, timeout = Score(None, "grader_error", "ValueError: boom at m.py:1"), Score(None, "grader_timeout", "late")
    inner = Scripted(timeout, error, Score(1.0), error, timeout, timeout, error)
    scorer = ErrorLimit(inner, name="m:f", max_errors=2)

    async def program():
        for _ in range(6):
            await scorer.score(PROMPT, "")
        assert (scorer.num_errors, scorer.num_timeouts) == (2, 3)
        with pytest.raises(UserError, match=r"the grader m:f failed 3 times, the last time on prompt p1: ValueError"):
            await scorer.score(PROMPT, "")
        await scorer.close()

    asyncio.run(program())
    assert inner.is_closed


def test_a_grader_that_gives_no_reward_any_more_stops_the_run():
    late = Score(None, "grader_timeout")
    scores = [late] * 15 + [Score(1.0)] + [late] * 16
    scorer = ErrorLimit(Scripted(*scores), name="m:slow", max_errors=0)
    for _ in range(31):
        asyncio.run(scorer.score(PROMPT, "4"))
    with pytest.raises(UserError, match=r"m:slow gave no reward to 16 rollouts in a row.*--score.timeout-s"):
        asyncio.run(scorer.score(PROMPT, "4"))
