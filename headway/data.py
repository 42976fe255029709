"""Where prompts come from, what is held out of training, and which prompt a group answers.

Nothing here has a state: items follow from the settings and the seed, and a group's prompt from its number, so a
resumed run needs no more of this module than the numbers of the groups that are resolved.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.config import Data, Evaluate
from headway.types import Prompt, UserError, did_you_mean, nearest

DEFAULT_SIZE = 10_000
"""Prompts that a generator makes when data.size is not set (fewer where it has fewer different ones)."""

GYM_PREFIX = "reasoning_gym:"
SOURCES = "addition, reasoning_gym:TASK, or a .jsonl file"


# ---------------------------------------------------------------------------------------------------------------------
# Items
# ---------------------------------------------------------------------------------------------------------------------


def load_items(settings: Data, seed: int) -> list[Prompt]:
    """The prompts that `settings` name, all different, without tokens as yet.

    A generator's prompts follow from `seed` alone; questions it repeats are left out. A file's prompts are its first
    `size` lines. `text` is the question put into the template. `uid` is the file's own, or a hash of the source's
    name and the content. `task` holds a file's other keys; of reasoning_gym it holds "reasoning_gym" (the task's
    name), "params" and "entry" (what the task's scorer reads).

    Raises UserError for an unknown or empty source, unfit parameters, a bad line, or fewer prompts than `size`.
    """
    _check_template(settings.template)
    if _is_file(settings):
        return _file_items(settings, settings.size)
    return _generated_items(settings, _derived_seed(seed, "training"), settings.size)


def _check_template(template: str) -> None:
    if "{question}" not in template:
        raise UserError(f"data.template = {template!r} has no {{question}}; every prompt would read the same")


def _is_file(settings: Data) -> bool:
    """Whether the source is a file (and not a generator). Raises UserError when it is neither."""
    source = settings.source
    if source is None:
        raise UserError(f"data.source is not set; choose {SOURCES}")
    if source == "addition" or source.startswith(GYM_PREFIX):
        return False
    if not source.endswith(".jsonl"):
        choices = ["addition", f"{GYM_PREFIX}TASK", *map(str, Path().glob("*.jsonl"))]
        hint = did_you_mean(*nearest(source, choices, num=3))
        raise UserError(f"data.source = {source!r} is no source{hint}; choose {SOURCES}")
    if settings.params:
        raise UserError(f"data.params are for task generators, but data.source is the file {source}; leave params out")
    return True


def _generated_items(settings: Data, seed: int, size: int | None) -> list[Prompt]:
    assert settings.source is not None
    if settings.source == "addition":
        return _addition_items(settings, seed, size)
    return _gym_items(settings, settings.source.removeprefix(GYM_PREFIX), seed, size)


def _rendered(settings: Data, question: str) -> str:
    return settings.template.replace("{question}", question)


def _hash(*parts: str | int | None) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _derived_seed(seed: int, purpose: str) -> int:
    """31 bits that differ without a pattern between neighbouring seeds and between purposes.

    Task generators commonly seed prompt `i` with `seed + i`: plain neighbours would share all prompts but one.
    """
    return int(_hash(seed, purpose)[:8], 16) >> 1


# ---------------------------------------------------------------------------------------------------------------------
# Sums
# ---------------------------------------------------------------------------------------------------------------------


def _addition_items(settings: Data, seed: int, size: int | None) -> list[Prompt]:
    low, high = _addition_range(settings.params)
    num_sums = (high - low + 1) ** 2
    if size is not None and size > num_sums:
        raise UserError(
            f"{size} different sums of numbers from {low} to {high} are asked for, but there are {num_sums}"
        )
    pairs = _distinct_pairs(low, high, min(size or DEFAULT_SIZE, num_sums), random.Random(seed))
    return [
        Prompt(uid=f"addition-{_hash('addition', a, b)[:16]}", text=_rendered(settings, f"{a}+{b}="), answer=str(a + b))
        for a, b in pairs
    ]


def _addition_range(params: Mapping[str, Any]) -> tuple[int, int]:
    """The smallest and the largest summand: `min` and `max` (0 to 99 unless given), or all numbers of `digits`."""
    for name, value in params.items():
        if name not in ("min", "max", "digits"):
            hint = did_you_mean(*nearest(name, ["min", "max", "digits"], num=3))
            raise UserError(f"data.params: addition has no parameter {name!r}{hint or '; it has min, max and digits'}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UserError(f"data.params: {name} = {value!r} must be a whole number, 0 or more")
    if "digits" in params:
        if len(params) > 1 or params["digits"] == 0:
            raise UserError("data.params: digits is 1 or more and stands alone; give either digits or min and max")
        digits = params["digits"]
        return (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
    low, high = params.get("min", 0), params.get("max", 99)
    if low > high:
        raise UserError(f"data.params: min = {low} is above max = {high}")
    return low, high


def _distinct_pairs(low: int, high: int, num: int, rng: random.Random) -> list[tuple[int, int]]:
    width = high - low + 1
    cells: dict[int, None] = {}
    if 2 * num > width * width:
        cells = dict.fromkeys(rng.sample(range(width * width), num))
    while len(cells) < num:
        cells[rng.randrange(width * width)] = None
    return [(low + cell // width, low + cell % width) for cell in cells]


# ---------------------------------------------------------------------------------------------------------------------
# reasoning_gym
# ---------------------------------------------------------------------------------------------------------------------


def _gym_items(settings: Data, task: str, seed: int, size: int | None) -> list[Prompt]:
    """`size` different prompts; without a size, what remains of 10,000 drawn ones when repeats are left out."""
    _check_gym_task(task, settings.params)
    wanted = size or DEFAULT_SIZE
    entries: list[dict[str, Any]] = []
    for num_drawn in (wanted, 2 * wanted, 8 * wanted):
        entries = _distinct_entries(_gym_entries(task, settings.params, seed, num_drawn))
        if size is None or len(entries) >= wanted:
            return [_gym_prompt(settings, task, entry) for entry in entries[:wanted]]
    raise UserError(
        f"{settings.source} gave only {len(entries)} different prompts in {8 * wanted} draws, {wanted} are asked for; "
        "ask for fewer, or widen data.params"
    )


def _gym_prompt(settings: Data, task: str, entry: Mapping[str, Any]) -> Prompt:
    question, answer = entry["question"], entry["answer"]
    answer = None if answer is None else str(answer)
    return Prompt(
        uid=f"{task}-{_hash(GYM_PREFIX + task, question, answer)[:16]}",
        text=_rendered(settings, question),
        answer=answer,
        task={"reasoning_gym": task, "params": settings.params, "entry": entry},
    )


def _distinct_entries(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    first: dict[str, dict[str, Any]] = {}
    for entry in entries:
        first.setdefault(entry["question"], entry)
    return list(first.values())


def _check_gym_task(task: str, params: Mapping[str, Any]) -> None:
    tasks = _gym_module("reasoning_gym.factory").DATASETS
    if task not in tasks:
        near = nearest(task, tasks, num=3)
        hint = did_you_mean(*near) or f"; there are {len(tasks)}, from {min(tasks)} to {max(tasks)}"
        raise UserError(f"reasoning_gym has no task {task!r}{hint}")
    own = {"size": "data.size", "seed": "run.seed"}
    known = sorted({field.name for field in dataclasses.fields(tasks[task][1])} - set(own))
    for name in params:
        if name in own:
            raise UserError(f"data.params: {name} is not set here; set {own[name]}")
        if name not in known:
            hint = did_you_mean(*nearest(name, known, num=3)) or f"; it has {', '.join(known)}"
            raise UserError(f"data.params: reasoning_gym:{task} has no parameter {name!r}{hint}")


def _gym_entries(task: str, params: Mapping[str, Any], seed: int, num: int) -> list[dict[str, Any]]:
    gym = _gym_module("reasoning_gym")
    try:
        return list(gym.create_dataset(task, size=num, seed=seed, **params))
    except Exception as error:  # whatever a task raises of parameters it can't work with; they are named here
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"reasoning_gym:{task} made no prompts of data.params = {dict(params)}: {reason}") from error


def _gym_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{GYM_PREFIX}TASK needs {error.name}: pip install 'headway[gym]'") from error


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def _file_items(settings: Data, size: int | None) -> list[Prompt]:
    assert settings.source is not None
    path = Path(settings.source)
    items: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, record in _records(path):
        prompt = _file_prompt(settings, path, number, record)
        if prompt.uid in line_of:
            what = f"uid {prompt.uid!r}" if "uid" in record else "prompt and answer"
            raise UserError(f"{path}:{number}: the same {what} as in line {line_of[prompt.uid]}; leave one of them out")
        line_of[prompt.uid] = number
        items.append(prompt)
        if len(items) == size:
            return items
    if not items:
        raise UserError(f"{path} holds no prompts; write one JSON object a line, as in {_EXAMPLE_LINE}")
    if size is not None:
        raise UserError(f"{path} holds {len(items)} prompts, {size} are asked for; ask for at most {len(items)}")
    return items


_EXAMPLE_LINE = '{"prompt": "1+1=", "answer": "2"}'


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (from 1) and object of every line that is not blank."""
    if not path.is_file():
        folder = path.parent
        beside = sorted(str(other) for other in folder.glob("*.jsonl")) if folder.is_dir() else []
        near = nearest(str(path), beside, num=3)
        hint = did_you_mean(*near) or (f"; {folder}/ has {', '.join(beside[:3])}" if beside else "")
        raise UserError(f"there is no file {path}{hint}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _record(line, f"{path}:{number}")


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {error}; a line is a JSON object, as in {_EXAMPLE_LINE}") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: a {type(record).__name__}; a line is a JSON object, as in {_EXAMPLE_LINE}")
    return record


def _file_prompt(settings: Data, path: Path, number: int, record: dict[str, Any]) -> Prompt:
    where = f"{path}:{number}"
    asked = [key for key in ("prompt", "question") if key in record]
    if len(asked) != 1:
        hint = "both a prompt and a question; leave one of them out" if asked else "no prompt" + _likely_key(record)
        raise UserError(f"{where}: {hint}")
    question = record[asked[0]]
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{where}: {asked[0]} must be a string that is not empty")
    answer = _word(record.get("answer"), "answer", where)
    uid = _word(record.get("uid"), "uid", where)
    return Prompt(
        uid=uid or f"{path.stem}-{_hash(path.name, question, answer)[:16]}",
        text=_rendered(settings, question),
        answer=answer,
        task={key: value for key, value in record.items() if key not in (asked[0], "answer", "uid")},
    )


def _likely_key(record: Mapping[str, Any]) -> str:
    found = f"; it has {', '.join(map(repr, record))}" if record else ""
    return f"{found}; name its text 'prompt' (or 'question')"


def _word(value: Any, key: str, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{where}: {key} must be a string or a number, not {json.dumps(value)[:40]}")
    return str(value)


# ---------------------------------------------------------------------------------------------------------------------
# The held-out split
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Split:
    """Training and held-out prompts; no text stands in both.

    num_left_out: items that are in neither, because their text is that of a held-out prompt.
    """

    training: list[Prompt]
    held_out: list[Prompt]
    num_left_out: int


def split_items(items: Sequence[Prompt], settings: Data, evaluate: Evaluate, seed: int) -> Split:
    """Set `evaluate.size` prompts apart: of `evaluate.source`, or of the training source.

    Of a file they are those with the smallest hash of the uid, whatever the seed, so runs can be compared; of a
    generator they are drawn with a seed of their own. Texts are compared without regard to white space.

    Raises UserError when too few prompts are there to hold out, or none remains to train on.
    """
    if not evaluate.size:
        return Split(list(items), [], 0)
    held_out = _held_out(items, settings, evaluate, seed)
    texts = {_plain(prompt.text) for prompt in held_out}
    uids = {prompt.uid for prompt in held_out}
    training = [prompt for prompt in items if _plain(prompt.text) not in texts]
    if not training:
        raise UserError(
            f"evaluate.size = {evaluate.size} holds out every one of the {len(items)} prompts of {settings.source}; "
            "lower evaluate.size, or give more prompts"
        )
    shared = next((prompt.uid for prompt in training if prompt.uid in uids), None)
    if shared is not None:
        raise UserError(f"uid {shared!r} names a training prompt and another held-out prompt; rename one of them")
    num_taken = len(held_out) if _holds_out_items(settings, evaluate) else 0
    return Split(training, held_out, len(items) - len(training) - num_taken)


def _plain(text: str) -> str:
    return " ".join(text.split())


def _holds_out_items(settings: Data, evaluate: Evaluate) -> bool:
    return evaluate.source is None and _is_file(settings)


def _held_out(items: Sequence[Prompt], settings: Data, evaluate: Evaluate, seed: int) -> list[Prompt]:
    if evaluate.source is not None:
        if not evaluate.source.endswith(".jsonl"):
            raise UserError(f"evaluate.source = {evaluate.source!r} is no .jsonl file; leave it out to use data.source")
        return _file_items(settings.model_copy(update={"source": evaluate.source}), evaluate.size)
    if not _holds_out_items(settings, evaluate):
        return _generated_items(settings, _derived_seed(seed, "held out"), evaluate.size)
    if len(items) <= evaluate.size:
        raise UserError(
            f"{settings.source} gives {len(items)} prompts, too few for evaluate.size = {evaluate.size} held-out ones "
            f"and training; set evaluate.size to at most {len(items) - 1}, or name an evaluate.source"
        )
    chosen = {prompt.uid for prompt in sorted(items, key=lambda prompt: _hash(prompt.uid))[: evaluate.size]}
    return [prompt for prompt in items if prompt.uid in chosen]


# ---------------------------------------------------------------------------------------------------------------------
# The source
# ---------------------------------------------------------------------------------------------------------------------


class PromptSource:
    """Which prompt a group answers: a pure function of the seed and the group's number.

    Epoch `e` is groups `e * len(source)` up to `(e + 1) * len(source)`, in an order keyed by seed and epoch. There is
    no iterator and nothing to save: a cursor is the set of groups that are resolved, kept by whoever resolves them.

    >>> source = PromptSource([Prompt("a", "1+1="), Prompt("b", "1+2=")], seed=0, shuffle=False, epochs=3)
    >>> source.num_groups, source.at(3)[0].uid, source.at(3)[1]
    (6, 'b', 1)
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True, epochs: int | None = None
    ) -> None:
        """`epochs` None: as many as are asked for. Raises UserError when there are no prompts."""
        if not prompts:
            raise UserError("there are no prompts to train on; give a data.source that holds some")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs

    def __len__(self) -> int:
        """Prompts, which is groups of an epoch."""
        return len(self._prompts)

    @property
    def num_groups(self) -> int | None:
        """Groups of all epochs; None when they are not limited."""
        return None if self._epochs is None else len(self._prompts) * self._epochs

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all that `at` depends on: a run may only be resumed over a source with the same one."""
        return _hash(
            self._seed, int(self._shuffle), *(_hash(p.uid, p.text, p.answer, str(p.tokens)) for p in self._prompts)
        )

    def at(self, group: int) -> tuple[Prompt, int]:
        """The prompt of group `group` (from 0) and its epoch (from 0)."""
        assert group >= 0, f"groups are counted from 0: {group}"
        assert self.num_groups is None or group < self.num_groups, f"group {group} of {self.num_groups}"
        epoch, place = divmod(group, len(self._prompts))
        return self._prompts[_order(self._seed, epoch, len(self))[place] if self._shuffle else place], epoch


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num: int) -> tuple[int, ...]:
    order = list(range(num))
    random.Random(f"order of epoch {epoch} under seed {seed}").shuffle(order)
    return tuple(order)
