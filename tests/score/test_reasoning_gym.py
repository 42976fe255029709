import asyncio
from pathlib import Path

import pytest

from headway.config import Data
from headway.data import load_items
from headway.score.reasoning_gym import ReasoningGymScorer
from headway.types import Prompt, Score, UserError


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("work"))
        scorer = ReasoningGymScorer(workers=1, timeout_s=20)
        yield scorer
        asyncio.run(scorer.close())


def prompt_of(task, **params):
    return load_items(Data(source=f"reasoning_gym:{task}", params=params, size=1), 0)[0]


def grade(scorer, prompt, text):
    return asyncio.run(scorer.score(prompt, text))


def test_the_right_answer_white_space_aside(scorer):
    prompt = prompt_of("chain_sum")
    assert grade(scorer, prompt, f"\n {prompt.answer} ") == Score(1.0)
    assert grade(scorer, prompt, f"{prompt.answer}.00") == Score(1.0)


def test_partial_credit_is_kept(scorer):
    """This task's scorer gives the share of the text that is the answer."""
    prompt = prompt_of("leg_counting")
    text = f"{prompt.answer}, I think"
    assert grade(scorer, prompt, text) == Score(len(str(prompt.answer)) / len(text))
    assert grade(scorer, prompt, "") == Score(0.0)


def test_a_task_is_scored_under_its_own_parameters(scorer):
    """Under its default parameters the scorer of word_ladder knows only words of four letters."""
    prompt = prompt_of("word_ladder", min_word_length=5, max_word_length=5)
    assert prompt.answer is not None
    assert grade(scorer, prompt, prompt.answer) == Score(1.0)


def test_a_task_whose_answer_is_an_expression(scorer):
    """The guard does not stop the honest use of what it watches."""
    prompt = prompt_of("simple_integration")
    assert prompt.answer is not None
    assert grade(scorer, prompt, prompt.answer) == Score(1.0)
    matrix = prompt_of("binary_matrix")
    assert grade(scorer, matrix, str([list(map(int, row.split())) for row in str(matrix.answer).split("\n")])).reward


@pytest.mark.parametrize("task", ["n_queens", "binary_matrix", "spiral_matrix", "simple_integration", "countdown"])
@pytest.mark.parametrize(
    "text",
    [
        "__import__('pathlib').Path('touched').touch()",
        "__import__('os').system('touch touched')",
        "__import__('os')._exit(0)",
        "open('touched', 'w')",
        "exec('import os; os.system(chr(116))')",
        "(lambda: ().__class__.__base__.__subclasses__())()",
        "exit()",
    ],
)
def test_hostile_text_is_a_wrong_answer_without_effect(scorer, task, text):
    """Case B21(c): some scorers evaluate what they are given."""
    prompt = prompt_of(task)
    reward = grade(scorer, prompt, text).reward
    assert reward is not None
    assert reward <= 0.01  # countdown gives that much for any text that is no sum
    assert not Path("touched").exists()
    if task != "countdown":
        assert grade(scorer, prompt, str(prompt.answer)) == Score(1.0)


def test_a_fault_of_a_scorer_is_an_error(scorer):
    prompt = Prompt("p", "q", task={"reasoning_gym": "chain_sum", "params": {}, "entry": {}})
    score = grade(scorer, prompt, "1")
    assert (score.reward, score.outcome) == (None, "grader_error")
    assert score.detail.startswith("KeyError: 'answer' at reasoning_gym/")


def test_a_prompt_of_no_task_is_refused(scorer):
    with pytest.raises(UserError, match=r"prompt p is of no task of reasoning_gym; set data.source"):
        grade(scorer, Prompt("p", "q"), "1")
