"""`transformers`, measured for `benchmarks/engine.py`. The job's setting is `generate` or `continuous`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from engine_job import Case, Generate, Job, Open, measure
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
NO_END = -1
PAGE_TOKENS = 32
MAX_BATCH_TOKENS = 2048


def generate_static(model: Any, case: Case) -> list[int]:
    """In batches of as many as may be in flight, each until its longest rollout is done; what is wanted counts."""
    lengths: list[int] = []
    for first in range(0, len(case.prompts), case.in_flight):
        batch = slice(first, first + case.in_flight)
        wanted = case.lengths[batch]
        ids_BT, mask_BT = padded_on_the_left(case.prompts[batch], model.device)
        longest = max(wanted)
        output_BT = model.generate(
            ids_BT, attention_mask=mask_BT, **SAMPLING, min_new_tokens=longest, max_new_tokens=longest, pad_token_id=0
        )
        got = output_BT.shape[1] - ids_BT.shape[1]
        lengths += [min(got, length) for length in wanted]
    return lengths


def padded_on_the_left(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@contextmanager
def continuous_batching(model: Any, case: Case) -> Iterator[Generate]:
    """Its manager, as `generate_batch` uses it; asked one by one, since each rollout has a length of its own.

    Its cache holds the longest rollouts that may be in flight together; on a CPU it would not find a size by itself.
    """
    longest = max(len(prompt) + length for prompt, length in case.rollouts)
    settings = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=case.in_flight * math.ceil(longest / PAGE_TOKENS) + 1,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_requests_per_batch=case.in_flight,
        return_logprobs=True,
        seed=0,
    )
    sampling = GenerationConfig(**SAMPLING, eos_token_id=NO_END, pad_token_id=0)
    with model.continuous_batching_context_manager(
        sampling, continuous_batching_config=settings, timeout=60
    ) as manager:
        yield lambda asked: generate_continuously(manager, asked)


def generate_continuously(manager: Any, case: Case) -> list[int]:
    names = [
        manager.add_request(prompt, max_new_tokens=length, eos_token_id=NO_END) for prompt, length in case.rollouts
    ]
    lengths: dict[str, int] = {}
    while len(lengths) < len(names):
        result = manager.get_result(timeout=1)
        if result is None:
            assert manager.is_running(), "continuous batching has stopped"
            continue
        assert result.error is None, result.error
        if result.is_finished():
            assert len(result.logprobs) == len(result.generated_tokens)
            lengths[result.request_id] = len(result.generated_tokens)
    return [lengths[name] for name in names]


def start(job: Job) -> tuple[Open, str]:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(job.threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    model = loaded.to(job.device).eval()
    model.generation_config.eos_token_id = None

    @contextmanager
    def open_static(case: Case) -> Iterator[Generate]:
        yield lambda asked: generate_static(model, asked)

    @contextmanager
    def open_continuous(case: Case) -> Iterator[Generate]:
        with continuous_batching(model, case) as generate:
            yield generate

    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return (open_static if job.setting == "generate" else open_continuous), versions


if __name__ == "__main__":
    measure(start)
