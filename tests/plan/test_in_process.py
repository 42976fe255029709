"""What one process holds, line by line, by hand; and that nothing takes less when there is more of it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.generate import torch_engine
from headway.models import attention
from headway.plan import in_process as planned
from headway.plan.in_process import InProcessJob, in_process
from headway.plan.lengths import Answers
from headway.plan.models import find_model
from headway.plan.states import Models

SMOL = find_model("smollm2-135m")
PARAMS, VOCAB = 134_515_008, 49_152


def job(**changes):
    answers = Answers.of(46, [12.0] * 10, 16)
    usual = InProcessJob(SMOL, Models(), answers, 64, 128, 8, 1280, memory=20e9)
    return replace(usual, **changes)


def lines(some):
    return {line.name: line.expected for line in in_process(some).peak.lines}


def test_constants_are_those_of_the_engine():
    assert attention.BLOCK == planned.CACHE_BLOCK
    assert torch_engine.PREFILL_TOKENS == planned.PREFILL_TOKENS


def test_weights_and_states_by_hand():
    found = lines(job())
    for name in ("weights", "gradients", "engine's weights", "engine's weights, laid out"):
        assert found[name] == 4 * PARAMS, name
    assert found["Adam's moments"] == 8 * PARAMS
    assert found["logits"] == 3 * 4 * 1280 * VOCAB


def test_the_cache_by_hand():
    """Blocks of 32 tokens of 46,080 bytes: one of each of 64 rollouts, two of 8 prompts and of 64 answered ones."""
    assert lines(job())["keys and values"] == 32 * 46_080 * (64 + 2 * (8 + 64))
    assert lines(job(cache_bytes=1e6))["keys and values"] == 1e6


def test_an_adapter_has_states_of_its_own_alone():
    found = lines(job(models=Models(adapter_params=1_000_000, reference=True)))
    assert (found["adapter"], found["gradients"], found["Adam's moments"]) == (4e6, 4e6, 8e6)
    assert "reference" not in found


def test_a_reference_and_a_critic():
    found = lines(job(models=Models(reference=True, critic=True)))
    assert found["reference"] == 4 * PARAMS
    assert found["critic"] == 16 * PARAMS


def test_an_engine_in_bf16_has_half_the_bytes_and_nothing_laid_out():
    found = lines(job(engine_bytes=2.0, packs=False))
    assert found["engine's weights"] == 2 * PARAMS
    assert "engine's weights, laid out" not in found
    assert "products" not in found


def test_a_micro_batch_is_no_larger_than_a_batch_and_no_smaller_than_a_sequence():
    assert job(micro_batch_tokens=1e9).pass_tokens == 128 * 16 + 16 * 46
    assert job(micro_batch_tokens=1).pass_tokens == 62


SIZES = {
    "lanes": st.integers(1, 512),
    "batch": st.integers(1, 512),
    "micro_batch_tokens": st.floats(64, 20_000),
    "longest": st.integers(1, 4000),
    "prompt": st.integers(1, 2000),
}


def sized(lanes, batch, micro_batch_tokens, longest, prompt):
    answers = Answers.of(prompt, [longest / 2, longest], longest)
    return job(lanes=lanes, batch=8 * batch, micro_batch_tokens=micro_batch_tokens, answers=answers, memory=1e12)


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries(SIZES), st.sampled_from(sorted(SIZES)), st.floats(1, 8))
def test_more_never_needs_less(sizes, which, factor):
    larger = {**sizes, which: type(sizes[which])(sizes[which] * factor)}
    before, after = in_process(sized(**sizes)), in_process(sized(**larger))
    assert after.peak.expected >= before.peak.expected * (1 - 1e-12)
    assert after.floor >= before.floor * (1 - 1e-12)
    assert before.floor <= before.peak.expected


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-30b-a3b"])
def test_any_model_can_be_planned(name):
    pool = in_process(job(shape=find_model(name)))
    assert pool.floor < pool.peak.expected
