"""What `benchmarks/engine.py` hands to the program that measures one engine, and what it gets back.

Standard library alone, since such a program may run in another environment. It is called with two files: the job, as
JSON, and the results, to which a line of JSON is added as soon as something is measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Case:
    """Rollouts to generate, at most `in_flight` at once: token ids of each prompt, new tokens of each answer."""

    name: str
    in_flight: int
    prompts: list[list[int]]
    lengths: list[int]

    @property
    def rollouts(self) -> list[tuple[list[int], int]]:
        """Prompt and length of each."""
        return list(zip(self.prompts, self.lengths, strict=True))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def warm_up(self) -> Case:
        """As many rollouts in flight, a few tokens each; other prompts, so that no prefix cache knows those to come."""
        prompts = [prompt[::-1] for prompt in self.prompts[: self.in_flight]]
        return replace(self, prompts=prompts, lengths=[WARM_UP_TOKENS] * len(prompts))


@dataclass(frozen=True)
class Job:
    """model: a Hugging Face folder; setting: what else the program is to know, in a word."""

    model: str
    device: str
    threads: int
    setting: str
    cases: list[Case]

    @property
    def most_in_flight(self) -> int:
        return max(case.in_flight for case in self.cases)

    @property
    def longest(self) -> int:
        """Tokens of the longest rollout, its prompt included."""
        return max(len(prompt) + length for case in self.cases for prompt, length in case.rollouts)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Job:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Job(**{**fields, "cases": [Case(**case) for case in fields["cases"]]})


class Results:
    """The file that results go to, line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, **fields: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


Generate = Callable[[Case], list[int]]
"""Generates a case -> how many tokens each rollout has got."""

Open = Callable[[Case], AbstractContextManager[Generate]]
"""Makes an engine ready for cases like this one, outside the clock."""


def measure(start: Callable[[Job], tuple[Open, str]]) -> None:
    """The main program of one engine. `start` loads the model and says which versions of what it runs on."""
    job, results = Job.read(Path(sys.argv[1])), Results(Path(sys.argv[2]))
    open_for, versions = start(job)
    results.add(versions=versions)
    for case in job.cases:
        with open_for(case) as generate:
            generate(case.warm_up())
            began_s = time.perf_counter()
            lengths = generate(case)
            seconds = time.perf_counter() - began_s
        assert lengths == case.lengths, f"{case.name}: asked for {case.lengths}, got {lengths}"
        results.add(case=case.name, seconds=seconds)
