import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headway.score.function import FunctionScorer
from headway.types import Prompt, Score, UserError

GRADERS = """
import os, subprocess, sys, time

if "torch" in sys.modules or "pydantic" in sys.modules:
    raise ImportError("a worker imports only what its grader imports")

def by_word(text, prompt):
    word, _, rest = text.partition(" ")
    return ACTIONS[word](rest, prompt)

def boom():
    raise ValueError("boom\\nand more")

def numpy_true():
    import numpy
    return numpy.array(1.0) == 1.0

def leave_a_child(rest):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open("child", "w").write(str(child.pid))
    time.sleep(60)

class Strange(Exception):
    def __str__(self):
        raise RuntimeError

def raise_strange():
    raise Strange

ACTIONS = {
    "equal": lambda rest, prompt: rest == prompt["answer"],
    "float": lambda rest, prompt: float(rest),
    "uid": lambda rest, prompt: len(prompt["uid"]) + len(prompt["text"]) + prompt["task"]["level"],
    "keys": lambda rest, prompt: sorted(prompt) == ["answer", "task", "text", "uid"],
    "sleep": lambda rest, prompt: time.sleep(float(rest)) or 1.0,
    "spin": lambda rest, prompt: len(str(7 ** 10 ** 8)),  # one step of the interpreter: nothing else gets a turn
    "boom": lambda rest, prompt: boom(),
    "strange": lambda rest, prompt: raise_strange(),
    "exit": lambda rest, prompt: sys.exit(1),
    "die": lambda rest, prompt: os._exit(3),
    "crash": lambda rest, prompt: os.abort(),
    "none": lambda rest, prompt: None,
    "word": lambda rest, prompt: "1.0",
    "dict": lambda rest, prompt: {"reward": 1.0},
    "huge": lambda rest, prompt: 10 ** 400,
    "numpy": lambda rest, prompt: numpy_true(),
    "print": lambda rest, prompt: print("{}") or 1.0,
    "pid": lambda rest, prompt: os.getpid(),
    "child": lambda rest, prompt: leave_a_child(rest),
    "deep": lambda rest, prompt: ACTIONS["deep"](rest, prompt),
}

def one_argument(text):
    return 1.0

async def later(text, prompt):
    return 1.0

number = 5
"""

PROMPT = Prompt("p1", "why?", answer="42", task={"level": 30})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graders")
    (folder / "my_graders.py").write_text(GRADERS)
    (folder / "broken.py").write_text("x = 1\nraise OSError('no disk')\n")
    (folder / "needs.py").write_text("import not_installed_at_all\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def make(workers=1, timeout_s=20.0, target="my_graders:by_word"):
    return FunctionScorer(target, workers=workers, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def patient(folder):
    scorer = make()
    yield scorer
    asyncio.run(scorer.close())


def grade(scorer, *texts):
    async def all_of_them():
        return await asyncio.gather(*(scorer.score(PROMPT, text) for text in texts))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("text", "reward"),
    [("equal 42", 1.0), ("equal 41", 0.0), ("float -2.5", -2.5), ("uid", 36.0), ("keys", 1.0), ("numpy", 1.0)],
)
def test_rewards(patient, text, reward):
    assert grade(patient, text) == [Score(reward)]


def test_what_a_grader_prints_does_not_mix_with_its_answers(patient):
    assert grade(patient, "print", "equal 42") == [Score(1.0), Score(1.0)]


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("boom", "ValueError: boom and more at my_graders.py:12"),
        ("strange", "Strange at my_graders.py:28"),
        ("no-such-word", "KeyError: 'no-such-word' at my_graders.py:9"),
        ("exit", "SystemExit: 1 at my_graders.py:"),
        ("deep", "RecursionError: maximum recursion depth exceeded"),
        ("float nan", "it returned nan; a reward is finite"),
        ("float -inf", "it returned -inf; a reward is finite"),
        ("none", "it returned a NoneType; a reward is a number, or True or False"),
        ("word", "it returned a str"),
        ("dict", "it returned a dict"),
        ("huge", "OverflowError"),
    ],
)
def test_an_error_of_the_grader_is_no_reward(patient, text, detail):
    """Case B21(d) and (e)."""
    (score,) = grade(patient, text)
    assert (score.reward, score.outcome) == (None, "grader_error")
    assert score.detail.startswith(detail)
    assert "\n" not in score.detail
    assert grade(patient, "equal 42") == [Score(1.0)]


@pytest.mark.parametrize(("text", "how"), [("die", "with exit code 3"), ("crash", "by signal SIGABRT")])
def test_a_worker_that_dies_is_replaced(patient, text, how):
    assert grade(patient, text, "equal 42") == [
        Score(None, "grader_error", f"its process ended {how}"),
        Score(1.0),
    ]


def test_a_worker_serves_many_requests_and_event_loops(patient):
    assert grade(patient, "pid") == grade(patient, "pid")


def test_hostile_text_is_only_handed_over(patient, folder):
    """Case B21(c)."""
    texts = [f"equal {hostile}" for hostile in ("__import__('os').system('touch touched')", "{prompt.__class__}", "\0")]
    assert grade(patient, *texts, "equal 42") == [Score(0.0)] * 3 + [Score(1.0)]
    assert not (folder / "touched").exists()


def test_texts_that_are_long_or_hold_half_characters(patient):
    assert grade(patient, "equal " + "x" * 10**6, "equal \ud800") == [Score(0.0), Score(0.0)]


def test_a_grader_that_holds_the_interpreter_is_ended_and_others_are_not_touched(folder):
    """Case B21(b): only the end of its process bounds it."""
    scorer = make(workers=2, timeout_s=1.5)
    start_s = time.monotonic()
    late, *others = grade(scorer, "spin", "equal 42", "equal 41", "float 3")
    assert late == Score(None, "grader_timeout", "no verdict within 1.5 s")
    assert others == [Score(1.0), Score(0.0), Score(3.0)]
    assert grade(scorer, "equal 42", "equal 42") == [Score(1.0), Score(1.0)]
    assert time.monotonic() - start_s < 8
    asyncio.run(scorer.close())


def test_answers_come_in_the_order_of_the_questions(folder):
    """Case B21(f): the first is the slowest."""
    scorer = make(workers=2)
    assert [score.reward for score in grade(scorer, "sleep 0.4", "float 2", "float 3")] == [1.0, 2.0, 3.0]
    asyncio.run(scorer.close())


def test_the_event_loop_goes_on_while_graders_run(folder):
    async def program(scorer):
        grading = asyncio.create_task(scorer.score(PROMPT, "sleep 1"))
        longest_s, before_s = 0.0, time.monotonic()
        while not grading.done():
            await asyncio.sleep(0.01)
            longest_s, before_s = max(longest_s, time.monotonic() - before_s), time.monotonic()
        return longest_s

    scorer = make()
    assert asyncio.run(program(scorer)) < 0.8
    asyncio.run(scorer.close())


def test_a_cancelled_call_ends_its_grader_and_leaves_the_pool_usable(folder):
    async def program(scorer):
        running = asyncio.create_task(scorer.score(PROMPT, "sleep 60"))
        waiting = asyncio.create_task(scorer.score(PROMPT, "sleep 60"))
        await asyncio.sleep(0.3)
        waiting.cancel()
        running.cancel()
        outcomes = await asyncio.gather(running, waiting, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        return await scorer.score(PROMPT, "equal 42")

    scorer = make()
    start_s = time.monotonic()
    assert asyncio.run(program(scorer)) == Score(1.0)
    assert time.monotonic() - start_s < 10
    asyncio.run(scorer.close())


def test_cancelling_at_any_moment_harms_no_other_call(folder):
    async def program(scorer):
        for step in range(20):
            task = asyncio.create_task(scorer.score(PROMPT, "sleep 0.005"))
            await asyncio.sleep(step * 0.001)
            task.cancel()
            assert await scorer.score(PROMPT, "equal 42") == Score(1.0)

    scorer = make()
    asyncio.run(program(scorer))
    asyncio.run(scorer.close())


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_late_grader_is_ended_with_its_own_children(folder):
    scorer = make(timeout_s=1.5)
    (score,) = grade(scorer, "child")
    assert score.outcome == "grader_timeout"
    time.sleep(0.1)
    assert not is_running(int((folder / "child").read_text()))
    asyncio.run(scorer.close())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_closing_leaves_no_process_and_no_thread(folder):
    async def program():
        scorer = make(workers=2)
        pids = [score.reward for score in await asyncio.gather(*(scorer.score(PROMPT, "pid") for _ in range(20)))]
        busy = asyncio.create_task(scorer.score(PROMPT, "sleep 60"))
        await asyncio.sleep(0.1)
        await scorer.close()
        await scorer.close()
        assert (await busy).outcome == "grader_error"
        return {int(pid) for pid in pids}

    before = threading.active_count()
    pids = asyncio.run(program())
    assert not [pid for pid in pids if is_running(pid)]
    assert threading.active_count() == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_when_their_owner_is_killed(folder):
    program = (
        "import asyncio, os, signal\n"
        "from headway.score.function import FunctionScorer\n"
        "from headway.types import Prompt\n"
        "scorer = FunctionScorer('my_graders:by_word', workers=1, timeout_s=9)\n"
        "print(int(asyncio.run(scorer.score(Prompt('p', 'q'), 'pid')).reward), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        timeout=30,
        check=False,
    )
    pid = int(ended.stdout)
    deadline_s = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my_grader:by_word", "there is no module 'my_grader' in .*; did you mean my_graders?"),
        ("my_graders.sub:f", "there is no module 'my_graders.sub'"),
        ("my_graders:by_world", "'by_world' is not in my_graders; did you mean by_word?"),
        ("my_graders:number", "'number' is no function; did you mean"),
        ("my_graders:later", "'later' is asynchronous"),
        ("my_graders:one_argument", r"'one_argument' can't be called as one_argument\(text, prompt\)"),
        ("broken:f", "importing broken raised OSError: no disk at broken.py:2"),
        ("needs:f", "importing needs raised ModuleNotFoundError: No module named 'not_installed_at_all' at needs.py:1"),
    ],
)
def test_a_grader_that_can_not_be_used_is_refused_at_once(folder, target, message):
    before = threading.active_count()
    with pytest.raises(UserError, match=message) as caught:
        make(target=target, workers=2)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"score.scorer = {target!r}: ")
    assert threading.active_count() == before
