"""What GPUs send each other in a train step and for new weights, by hand."""

from dataclasses import replace

import pytest

from headway.plan.communication import links, routes, tensor_bytes, zero_bytes
from headway.plan.gpus import find_gpu
from headway.plan.models import find_model
from headway.plan.states import PRECISIONS, Sharding
from headway.planning.candidates import train_times
from headway.planning.request import Options, request

MIXED = PRECISIONS["mixed"]
QWEN = find_model("qwen2.5-7b")


@pytest.mark.parametrize(
    ("zero", "num_micro_batches", "expected"),
    [(3, 1, 36.75e9), (3, 4, 147.0e9), (2, 1, 24.5e9), (2, 4, 61.25e9), (1, 4, 24.5e9), (0, 4, 24.5e9)],
)
def test_what_zero_sends(zero, num_micro_batches, expected):
    """14 GB of weights on 8 ranks, 7/8 of which: ZeRO 3: 14 forward, 14 backward and 14 of gradients, each micro-batch;
    ZeRO 2 gradients each, else once, and 14 of new weights once.
    """
    sent = zero_bytes(7.0e9, 7.0e9, MIXED, Sharding(gpus=8, zero=zero), num_micro_batches)
    assert sent == pytest.approx(expected)


def test_an_adapter_sends_its_own_gradients_and_gathers_the_base_with_zero_3():
    """40 million trained: 7/8 of (28 + 0.08) GB; below, 7/8 of 0.16."""
    of_three, of_two = (zero_bytes(7.0e9, 40e6, MIXED, Sharding(gpus=8, zero=zero), 1) for zero in (3, 2))
    assert of_three == pytest.approx(0.875 * (28e9 + 0.08e9))
    assert of_two == pytest.approx(0.875 * 0.16e9)


def test_a_model_that_only_scores_is_gathered_once():
    """7/8 of 14 GB a micro-batch with ZeRO 3; nothing below."""
    of_three, of_two = (zero_bytes(7.0e9, 0.0, MIXED, Sharding(gpus=8, zero=zero), 2) for zero in (3, 2))
    assert (of_three, of_two) == (pytest.approx(2 * 0.875 * 14e9), 0)


def test_ppo_sends_for_all_of_its_models():
    """Policy and critic 3 x 14 GB each a micro-batch, reference and reward model 14 each: 8/3 of GRPO's."""
    took = {
        algorithm: train_times(each, one).hidden_s
        for algorithm in ("grpo", "ppo")
        for each in [request(Options(gpu="h100", num_gpus="16", algorithm=algorithm), "qwen2.5-7b", None)]
        for one in [replace(each.jobs(8, 8)[0], training=replace(each.jobs(8, 8)[0].training, micro_batch_tokens=8192))]
    }
    assert took["ppo"] / took["grpo"] == pytest.approx(8 / 3, rel=0.03)  # the critic has no LM head


def test_one_rank_sends_nothing():
    assert zero_bytes(7.0e9, 7.0e9, MIXED, Sharding(gpus=4, tensor=4), 3) == 0
    assert tensor_bytes(QWEN, 1000, Sharding(gpus=8), num_passes=3, bytes_per_number=2) == 0


def test_what_tensor_parallelism_sends():
    """28 layers x 2 sums x (reduce and gather) x 3/4 of 1,000 tokens x 3,584 numbers x 2 bytes, in each pass."""
    each = 28 * 2 * 2 * 0.75 * 1000 * 3584 * 2
    sent = tensor_bytes(QWEN, 1000, Sharding(gpus=8, tensor=4), num_passes=3, bytes_per_number=2)
    assert sent == pytest.approx(3 * each)


def test_what_is_on_several_machines_sends_over_the_network():
    """360 GB/s of NVLink and 40 of the network are in use: between ranks of 16 GPUs, and of layers over 16."""
    h100 = find_gpu("h100")
    near, far, wide = (
        links(h100, 0.8, num_gpus=num, tensor=tensor, per_machine=8) for num, tensor in ((8, 8), (16, 8), (32, 16))
    )
    assert (near.within, near.between) == (pytest.approx(360e9), pytest.approx(360e9))
    assert (far.within, far.between) == (pytest.approx(360e9), pytest.approx(40e9))
    assert (wide.within, wide.between) == (pytest.approx(40e9), pytest.approx(40e9))


def test_ways_of_new_weights_are_there_the_fastest_first():
    """14 GB over two GPUs' NVLink (360 GB/s each), their network (40), through the host (12.5) and over a disk (1)."""
    h100 = find_gpu("h100")
    ways = routes(14e9, h100, 0.8, num_links=2, one_machine=True, alone=False)
    assert [way.name for way in ways] == ["links", "network", "shared memory", "disk"]
    expected = [14 / 720, 14 / 80, 14 / 12.5, 14.0]
    assert [way.seconds for way in ways] == pytest.approx([0.001 + seconds for seconds in expected])
    far = routes(14e9, h100, 0.8, num_links=2, one_machine=False, alone=False)
    assert [way.name for way in far] == ["network", "disk"]


def test_slow_links_are_passed_by():
    ways = routes(1e9, find_gpu("rtx-4090"), 0.1, num_links=1, one_machine=True, alone=False)
    assert [way.seconds for way in ways] == sorted(way.seconds for way in ways)
    assert ways[0].name == "shared memory"


def test_one_gpu_copies():
    """14 GB read and written at 3.35 TB/s."""
    (way,) = routes(14e9, find_gpu("h100"), 0.8, num_links=1, one_machine=True, alone=True)
    assert way.seconds == pytest.approx(0.001 + 28 / 3350)
