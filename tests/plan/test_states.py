"""States by parameter: ZeRO's arithmetic and the textbook's totals."""

import pytest

from headway.plan.models import find_model
from headway.plan.states import (
    PRECISIONS,
    PerGpu,
    Sharding,
    adapter_states,
    divided,
    held,
    models_of,
    state_bytes,
    trained_states,
)

MIXED = PRECISIONS["mixed"]


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("mixed", 16), ("mixed-fp32-gradients", 18), ("mixed-adam8bit", 10), ("float32", 16)]
)
def test_bytes_of_a_trained_parameter(name, num_bytes):
    assert PRECISIONS[name].trained == num_bytes


@pytest.mark.parametrize(
    ("algorithm", "kl", "adapter", "total"),
    [
        ("ppo", False, None, 252),
        ("grpo", True, None, 126),
        ("grpo", False, None, 112),
        ("grpo", False, 40_370_176, 14 + 0.646),
        ("grpo", True, 40_370_176, 14 + 0.646),  # the reference is the base with the adapter off
    ],
)
def test_the_textbooks_totals_at_seven_billion_parameters(algorithm, kl, adapter, total):
    models = models_of(algorithm, kl=kl, adapter_params=adapter)
    assert sum(state_bytes(7.0e9, models, MIXED).values()) / 1e9 == pytest.approx(total, abs=0.001)


def test_each_model_of_ppo():
    by_model = state_bytes(7.0e9, models_of("ppo"), MIXED)
    assert by_model == {"policy": 112e9, "critic": 112e9, "reference": 14e9, "reward model": 14e9}


@pytest.mark.parametrize(
    ("rank", "state", "nominal", "real"),
    [
        (1, 0.040, 14.04, 15.27),
        (4, 0.161, 14.16, 15.39),
        (8, 0.323, 14.32, 15.55),
        (16, 0.646, 14.65, 15.88),
        (32, 1.292, 15.29, 16.52),
        (64, 2.584, 16.58, 17.81),
        (128, 5.167, 19.17, 20.40),
    ],
)
def test_adapters_of_every_rank(rank, state, nominal, real):
    model = find_model("qwen2.5-7b")
    num = model.adapter_params(rank)
    assert MIXED.trained * num / 1e9 == pytest.approx(state, abs=0.0006)
    for params, total in ((7.0e9, nominal), (model.num_params, real)):
        models = models_of("grpo", adapter_params=num)
        assert sum(state_bytes(params, models, MIXED).values()) / 1e9 == pytest.approx(total, abs=0.006)


def test_an_adapter_that_makes_fifteen_gigabytes():
    """1 GB of states is 62.5 M parameters, 0.89 % of 7.0e9."""
    models = models_of("grpo", adapter_params=62_500_000)
    assert state_bytes(7.0e9, models, MIXED)["policy"] == 15e9


@pytest.mark.parametrize(("zero", "num_bytes"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_zero_over_eight_gpus(zero, num_bytes):
    states = trained_states(PerGpu(1.0, 0.0), MIXED, Sharding(gpus=8, zero=zero))
    assert states.total == num_bytes


def test_every_way_of_dividing_ends_at_an_equal_share():
    """With ZeRO 3, 8 GPUs hold an eighth each, however tensor and pipeline divide them; norms are a little more."""
    model = find_model("qwen2.5-7b")
    for tensor, pipeline in [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]:
        sharding = Sharding(gpus=8, tensor=tensor, pipeline=pipeline)
        share = divided(held(model, sharding), sharding, 3)
        assert model.num_params / 8 <= share <= 1.02 * model.num_params / 8


def test_a_pipelines_fullest_stage_has_an_embedding():
    """Of two stages of 14 layers, each has one of the two embeddings."""
    model = find_model("qwen2.5-7b")
    per_gpu = held(model, Sharding(gpus=2, pipeline=2))
    layer = model.layers[0].num_params(model.hidden)
    assert per_gpu.all == 14 * layer + model.embedding_params + model.hidden


def test_a_tied_head_at_the_other_end_of_a_pipeline_is_a_second_copy():
    model = find_model("qwen2.5-1.5b")
    one, two = (held(model, Sharding(gpus=2, pipeline=stages)) for stages in (1, 2))
    layer = model.layers[0].num_params(model.hidden)
    assert one.all == model.num_params
    assert two.all == 14 * layer + model.embedding_params + model.hidden


def test_experts_are_divided_among_data_ranks():
    """128 experts over 8 ranks: each holds 16 of every layer; with ZeRO 3 nobody else holds the same ones."""
    model = find_model("qwen3-30b-a3b")
    sharding = Sharding(gpus=8, expert=8)
    per_gpu = held(model, sharding)
    assert per_gpu.routed == 48 * 16 * 3 * 2048 * 768
    assert divided(per_gpu, sharding, 3) == per_gpu.fixed / 8 + per_gpu.routed


def test_adapters_are_divided_like_what_they_add_to():
    assert adapter_states(8e6, MIXED, Sharding(gpus=8, tensor=2, zero=0)).total == 16 * 4e6
    assert adapter_states(8e6, MIXED, Sharding(gpus=8, tensor=2, zero=3)).total == 16 * 1e6
