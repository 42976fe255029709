"""What GPUs send each other in a train step and for new weights, by hand."""

import pytest

from headway.plan.communication import links, routes, tensor_bytes, zero_bytes
from headway.plan.gpus import find_gpu
from headway.plan.models import find_model
from headway.plan.states import PRECISIONS, PerGpu, Sharding

MIXED = PRECISIONS["mixed"]
SEVEN = PerGpu(fixed=7.0e9, routed=0.0)
QWEN = find_model("qwen2.5-7b")


@pytest.mark.parametrize(
    ("zero", "num_micro_batches", "expected"),
    [(3, 1, 36.75e9), (3, 4, 147.0e9), (2, 4, 24.5e9), (1, 4, 24.5e9), (0, 4, 24.5e9)],
)
def test_what_zero_sends(zero, num_micro_batches, expected):
    """14 GB of weights on 8 ranks. ZeRO 3: 7/8 of 14 forward, 14 backward and 14 of gradients, each micro-batch; else
    7/8 of 14 of gradients and 14 of new weights, once.
    """
    sent = zero_bytes(SEVEN, 7.0e9, MIXED, Sharding(gpus=8, zero=zero), num_micro_batches)
    assert sent == pytest.approx(expected)


def test_an_adapter_sends_its_own_gradients_and_gathers_the_base_with_zero_3():
    """40 million trained: 7/8 of (28 + 0.08) GB; below, 7/8 of 0.16."""
    of_three, of_two = (zero_bytes(SEVEN, 40e6, MIXED, Sharding(gpus=8, zero=zero), 1) for zero in (3, 2))
    assert of_three == pytest.approx(0.875 * (28e9 + 0.08e9))
    assert of_two == pytest.approx(0.875 * 0.16e9)


def test_one_rank_sends_nothing():
    assert zero_bytes(SEVEN, 7.0e9, MIXED, Sharding(gpus=4, tensor=4), 3) == 0
    assert tensor_bytes(QWEN, 1000, Sharding(gpus=8), checkpointing=True) == 0


def test_what_tensor_parallelism_sends():
    """28 layers x 2 sums x (reduce and gather) x 3/4 of 1,000 tokens x 3,584 numbers x 2 bytes, in three passes."""
    each = 28 * 2 * 2 * 0.75 * 1000 * 3584 * 2
    sharding = Sharding(gpus=8, tensor=4)
    assert tensor_bytes(QWEN, 1000, sharding, checkpointing=True) == pytest.approx(3 * each)
    assert tensor_bytes(QWEN, 1000, sharding, checkpointing=False) == pytest.approx(2 * each)


def test_ranks_on_several_machines_send_over_the_network():
    h100 = find_gpu("h100")
    near, far = (links(h100, 0.8, num_gpus=num, per_machine=8) for num in (8, 16))
    assert near.between == near.within == far.within == pytest.approx(0.8 * 450e9)
    assert far.between == pytest.approx(0.8 * 50e9)


def test_ways_of_new_weights_are_there_the_fastest_first():
    """14 GB over two GPUs' NVLink (360 GB/s each), their network (40), through the host (12.5) and over a disk (1)."""
    h100 = find_gpu("h100")
    ways = routes(14e9, h100, 0.8, num_links=2, one_machine=True)
    assert [way.name for way in ways] == ["links", "network", "shared memory", "disk"]
    expected = [14 / 720, 14 / 80, 14 / 12.5, 14.0]
    assert [way.seconds for way in ways] == pytest.approx([0.001 + seconds for seconds in expected])
    assert [way.name for way in routes(14e9, h100, 0.8, num_links=2, one_machine=False)] == ["network", "disk"]
