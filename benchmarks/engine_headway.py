"""Headway's embedded engine, measured for `benchmarks/engine.py`. The job's setting is the grade of parity."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from engine_job import Case, Generate, Job, Open, measure

from headway.generate.torch_engine import TorchEngine
from headway.models.cores import FixedCores
from headway.models.policy import load_policy, load_tokenizer
from headway.stages import Sample, SampleRequest
from headway.types import Prompt


def requests(case: Case) -> list[SampleRequest]:
    return [
        SampleRequest(Prompt(f"{number}", "", tuple(tokens)), (case.name, number), max_new_tokens=length)
        for number, (tokens, length) in enumerate(case.rollouts)
    ]


async def sample_all(engine: TorchEngine, case: Case) -> list[Sample]:
    return await asyncio.gather(*map(engine.sample, requests(case)))


def checked_length(sample: Sample) -> int:
    assert len(sample.logprobs) == len(sample.tokens)
    assert all(math.isfinite(logprob) for logprob in sample.logprobs)
    return len(sample.tokens)


def start(job: Job) -> tuple[Open, str]:
    grade: Any = job.setting
    policy, tokenizer = load_policy(job.model, job.device, parity=grade), load_tokenizer(job.model)

    @contextmanager
    def open_for(case: Case) -> Iterator[Generate]:
        with asyncio.Runner() as runner:
            engine = TorchEngine(policy, lanes=case.in_flight, decode=tokenizer.decode, cores=FixedCores(job.threads))
            yield lambda asked: [checked_length(sample) for sample in runner.run(sample_all(engine, asked))]
            runner.run(engine.close())

    return open_for, f"torch {torch.__version__}"


if __name__ == "__main__":
    measure(start)
