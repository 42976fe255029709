"""FSDP2 on one and two ranks (gloo) is the local trainer: losses, gradients, weights and metrics; and what it keeps."""

from __future__ import annotations

import math

import pytest
import torch

from headway.types import UserError
from tests.train import ranked
from tests.train.ranked import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own, in the processes' parents


def check_equal(found, *, within=2e-5):
    """Every metric of every step, on every rank."""
    for rank in found:
        for alone, together in rank["metrics"]:
            assert together.keys() == alone.keys()
            for name, value in alone.items():
                assert together[name] == pytest.approx(value, rel=1e-4, abs=within), name
        assert rank["apart"] < within
        assert rank["names"]


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("micro_batch_tokens", [12, 20, 10_000])
def test_ten_steps_are_those_of_the_local_trainer(num, micro_batch_tokens, tmp_path):
    """With 10,000 tokens there is one micro-batch, and the second rank passes over a filler."""
    check_equal(on_ranks(ranked.ten_steps, num, tmp_path, micro_batch_tokens=micro_batch_tokens))


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_other_architectures(architecture, tmp_path):
    check_equal(on_ranks(ranked.ten_steps, 2, tmp_path, architecture=architecture), within=1e-4)


@pytest.mark.parametrize("option", ["checkpointing", "offload", "reference"])
def test_what_saves_memory_changes_nothing(option, tmp_path):
    check_equal(on_ranks(ranked.ten_steps, 2, tmp_path, **{option: True}))


def test_products_in_bf16_are_near(tmp_path):
    found = on_ranks(ranked.ten_steps, 2, tmp_path, compute_dtype="bfloat16")
    first_alone, first_together = found[0]["metrics"][0]
    assert first_together["loss"] == pytest.approx(first_alone["loss"], abs=0.05)
    assert first_together["grad_norm"] == pytest.approx(first_alone["grad_norm"], rel=0.1)
    assert all(math.isfinite(metrics["loss"]) for _, metrics in found[0]["metrics"])


@pytest.mark.parametrize("num_after", [1, 2])
def test_a_checkpoint_of_two_ranks_is_gone_on_from_by_one_or_two(num_after, tmp_path):
    """Weights, moments and the learning rate's schedule are as if nothing had come between."""
    before = on_ranks(ranked.saved, 2, tmp_path)[0]["after"]
    for rank in on_ranks(ranked.resumed, num_after, tmp_path):
        assert rank["after"]["rates"] == before["rates"]
        for name, tensor in before["weights"].items():
            torch.testing.assert_close(rank["after"]["weights"][name], tensor, rtol=1e-5, atol=2e-6)


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(Exception, match="checkpoint") as refused:
        on_ranks(ranked.resumed, 1, tmp_path)
    assert UserError.__name__ in str(refused.value)


def test_gradients_are_added_up_once_a_step(tmp_path):
    """Once for each layer and once for the rest, whatever the number of passes."""
    for rank in on_ranks(ranked.communicated, 2, tmp_path):
        assert rank["passes"] > 1
        assert rank["reduced"] == rank["layers"] + 1
