"""The process that runs a grader. `sandbox` starts it by its path and speaks to it over a socket.

It imports nothing of Headway, so it starts fast and holds no more than its grader does. First message: what to load;
its answer: `{}` or `{"refusal": why}`. Then, for each request: `{"reward": r}` with r finite, or `{"error": why}`.
Requests are pickled by us; answers are JSON, so the process that trains unpickles nothing a grader made.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import math
import numbers
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType
from typing import Any

Verdict = dict[str, Any]
Grader = Callable[..., Verdict]


class Refusal(Exception):
    """The grader can't be loaded, for a reason the user can mend."""


def main(descriptor: int) -> None:
    """Serve until the other side hangs up."""
    connection = Connection(descriptor)
    order = pickle.loads(connection.recv_bytes())
    sys.path[:] = order["sys_path"]
    sys.dont_write_bytecode = True
    _end_me_after(order["start_limit_s"])
    try:
        grader = load_function(order["function"]) if "function" in order else load_reasoning_gym()
        _end_me_after(0)
        connection.send_bytes(b"{}")
    except Refusal as refusal:
        connection.send_bytes(json.dumps({"refusal": str(refusal)}).encode())
        return
    for request in _requests(connection):
        _end_me_after(order["limit_s"])
        verdict = grade(grader, request)
        _end_me_after(0)
        connection.send_bytes(json.dumps(verdict).encode())


def _requests(connection: Connection) -> Iterator[bytes]:
    while True:
        try:
            yield connection.recv_bytes()
        except (EOFError, ConnectionError):
            return


def _end_me_after(seconds: float) -> None:
    """If whoever should end a late grader is gone, the kernel does: it needs no Python, so no grader holds it up."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def grade(grader: Grader, request: bytes) -> Verdict:
    """One verdict, whatever the grader does (short of not returning)."""
    try:
        return grader(**pickle.loads(request))
    except (Exception, SystemExit) as error:  # a grader may raise anything: it is told, and the next answer is graded
        return {"error": describe(error)}


def _checked(reward: Any, low: float = -math.inf, high: float = math.inf) -> Verdict:
    if isinstance(reward, bool | numbers.Real) or type(reward).__module__ == "numpy":
        value = float(reward)
        if math.isfinite(value) and low <= value <= high:
            return {"reward": value}
        wanted = "finite" if math.isinf(low) else f"from {low:g} to {high:g}"
        return {"error": f"it returned {value}; a reward is {wanted}"}
    return {"error": f"it returned a {type(reward).__name__}; a reward is a number, or True or False"}


def describe(error: BaseException) -> str:
    """`ValueError: boom at graders.py:12` on one line; the place is the innermost one in the user's own files."""
    try:
        reason = " ".join(str(error).split())[:300]
    except Exception:  # an exception whose message can't be made: its name must do
        reason = ""
    place = _place(error)
    return f"{type(error).__name__}{': ' if reason else ''}{reason}{f' at {place}' if place else ''}"


def _place(error: BaseException) -> str | None:
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    frames = [(file, line) for file, line in frames if file != __file__ and not file.startswith("<")]
    here = os.getcwd() + os.sep
    own = [(file, line) for file, line in frames if file.startswith(here) and "site-packages" not in file]
    if not frames:
        return None
    file, line = (own or frames)[-1]
    return f"{file.removeprefix(here).rpartition('site-packages/')[2]}:{line}"


# A user's function ---------------------------------------------------------------------------------------------------


def load_function(target: str) -> Grader:
    """The function that `module:function` names, called with the answer's text and the prompt.

    Raises Refusal, with the nearest names, when there is no such module or function or it can't take the two.
    """
    module_name, _, name = target.partition(":")
    module = _import(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        what = "is no function" if hasattr(module, name) else f"is not in {module_name}"
        raise Refusal(f"{name!r} {what}{_near(name, _function_names(module))}")
    if inspect.iscoroutinefunction(function):
        raise Refusal(f"{name!r} is asynchronous; write it with def instead of async def")
    try:
        inspect.signature(function).bind("", {})
    except TypeError as error:
        raise Refusal(f"{name!r} can't be called as {name}(text, prompt): {error}") from None
    except ValueError:  # a built-in without a signature: calling it will tell
        pass

    def graded(text: str, prompt: dict[str, Any]) -> Verdict:
        return _checked(function(text, prompt))

    return graded


def _import(module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            near = _near(module_name, sorted({path.stem for path in Path().glob("*.py")}))
            raise Refusal(f"there is no module {error.name!r} in {os.getcwd()} or among the packages{near}") from None
        raise Refusal(f"importing {module_name} raised {describe(error)}") from None
    except (Exception, SystemExit) as error:  # the user's module may raise anything while it is read
        raise Refusal(f"importing {module_name} raised {describe(error)}") from None


def _function_names(module: Any) -> list[str]:
    return [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]


def _near(word: str, names: list[str]) -> str:
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5) or names[:5]
    return f"; did you mean {' or '.join(near)}?" if near else ""


# reasoning_gym -------------------------------------------------------------------------------------------------------

_NOT_FOR_ANSWERS = {
    *("_exit", "breakpoint", "compile", "delattr", "eval", "exec", "exit", "getattr"),
    *("globals", "input", "locals", "open", "quit", "setattr", "vars"),
}
_OUTSIDE = ("os.", "subprocess.", "shutil.", "socket.", "ctypes.", "pty.", "urllib.", "webbrowser.", "signal.")
_ONLY_LOOKS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Forbidden(Exception):
    """An answer, evaluated by a task's scorer, reached for more than arithmetic."""


class Guard:
    """Some scorers of reasoning_gym evaluate the answer as Python or sympy text. While one runs, this audit hook stops
    whatever an expression could do beyond computing: private and reflective names, files, processes, sockets."""

    def __init__(self) -> None:
        self.offence: str | None = None
        self._is_on = False

    def __enter__(self) -> Guard:
        self.offence, self._is_on = None, True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_on and (offence := _offence(event, args)):
            self.offence = offence
            raise Forbidden(offence)


def _offence(event: str, args: tuple[Any, ...]) -> str | None:
    if event == "exec" and args[0].co_filename == "<string>":
        return next((name for name in _names(args[0]) if name.startswith("__") or name in _NOT_FOR_ANSWERS), None)
    if event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
        return "open"
    return event if event.startswith(_OUTSIDE) and event not in _ONLY_LOOKS else None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def load_reasoning_gym() -> Grader:
    """The scorer of whatever task a request names. Its reward is kept as it is, partial credit included.

    An answer that the guard had to stop has reward 0.0, whatever the task's scorer made of it: it is a wrong answer,
    not a fault of the grader.
    """
    try:
        gym = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise Refusal(f"reasoning_gym needs {error.name}: pip install 'headway[gym]'") from None
    guard = Guard()
    sys.addaudithook(guard)
    scorers: dict[bytes, Callable[..., Any]] = {}

    def score(task: str, params: Mapping[str, Any], entry: Mapping[str, Any], answer: str) -> Verdict:
        key = pickle.dumps((task, params))
        if key not in scorers:
            scorers[key] = gym.create_dataset(task, seed=0, **params).score_answer
        try:
            with guard:
                reward = scorers[key](answer=answer, entry=entry)
        except (Exception, SystemExit):  # the guard's own stop, come through the scorer: the answer is wrong
            if guard.offence is None:
                raise
            reward = 0.0
        return {"reward": 0.0} if guard.offence else _checked(reward, 0.0, 1.0)

    return score


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # not through the exit handlers and threads of the user's modules, which may wait for ever
