"""Times of decoding, prefill, training and transfer: the textbook's figures, and laws that hold for every model."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.plan.gpus import find_gpu, gpus
from headway.plan.models import find_model, known_models
from headway.plan.roofline import (
    NOMINAL,
    Decode,
    Efficiency,
    TrainPasses,
    cache_tokens,
    decode,
    prefill_flops,
    prefill_s,
    train_flops,
    train_s,
    transfer_s,
)

H100, QWEN = find_gpu("h100"), find_model("qwen2.5-7b")
MODELS = known_models()


def textbook(params, kv_bytes=0.0, attention=0.0, gpu=H100):
    """As textbooks reckon: all parameters are read and multiplied, the input embedding too."""
    return Decode(2 * params, 2 * params, kv_bytes, attention, gpu.bandwidth, gpu.bf16_flops)


def test_decoding_one_rollout_waits_for_the_memory():
    """14e9 B / 3.35e12 B/s = 4.18 ms; 1.4e10 operations / 989e12 = 0.0142 ms."""
    one = textbook(7.0e9)
    assert one.step_s(1, 0) * 1e3 == pytest.approx(4.1791, abs=5e-5)
    assert one.tokens_per_s(1, 0) == pytest.approx(239.3, abs=0.05)
    assert one.flops == 1.4e10
    assert one.arithmetic_s(1, 0) * 1e3 == pytest.approx(0.01416, abs=5e-6)
    assert 1 - one.arithmetic_s(1, 0) / one.memory_s(1, 0) == pytest.approx(0.9966, abs=5e-5)


def test_sixty_four_rollouts_still_do():
    many = textbook(7.0e9)
    assert many.arithmetic_s(64, 0) * 1e3 == pytest.approx(0.906, abs=5e-4)
    assert many.tokens_per_s(64, 0) == pytest.approx(15_314, abs=0.5)


MILLISECONDS = {
    "a100-40-sxm": 9.00,
    "a100-80-sxm": 6.87,
    "a100-80-pcie": 7.24,
    "h100-sxm": 4.18,
    "h100-pcie": 7.00,
    "h200-sxm": 2.92,
    "b200": 1.75,
    "gb200": 1.75,
    "mi300x": 2.64,
    "l40s": 16.20,
    "l4": 46.67,
    "rtx-4090": 13.89,
    "rtx-5090": 7.81,
    "t4": 43.75,
}


@pytest.mark.parametrize("name", MILLISECONDS)
def test_decoding_one_rollout_on_every_card(name):
    assert textbook(7.0e9, gpu=gpus()[name]).step_s(1, 0) * 1e3 == pytest.approx(MILLISECONDS[name], abs=0.0051)


REAL = textbook(7_615_616_512, 57_344, 4 * 28 * 28 * 128)


@pytest.mark.parametrize(
    ("context", "batch"),
    [(0, 295), (256, 409), (512, 664), (800, 2238), (880, 6548), (1000, math.inf), (4096, math.inf)],
)
def test_where_arithmetic_becomes_the_bound_depends_on_the_context(context, batch):
    assert REAL.crossover(context) == pytest.approx(batch, abs=0.5)


def test_without_a_cache_it_is_operations_per_byte():
    assert textbook(7.0e9).crossover(0) == pytest.approx(295.2, abs=0.05)


def test_beyond_nine_hundred_tokens_it_never_does():
    """Reading a token's keys and values takes longer than multiplying it with all weights; 7 operations a byte."""
    assert REAL.never_from == pytest.approx(917, abs=20)
    assert REAL.crossover(REAL.never_from * 0.999) > 1e5
    assert REAL.crossover(REAL.never_from * 1.001) == math.inf
    assert REAL.attention_flops / REAL.kv_bytes == 7.0


def test_the_end_of_long_answers_is_four_times_as_slow_as_three_of_them():
    """(15.231 + 60.130) GB / 3.35 TB/s = 22.50 ms, 2,845 tokens/s; of three 5.4 ms."""
    assert REAL.step_s(64, 16_384) * 1e3 == pytest.approx(22.50, abs=0.005)
    assert REAL.tokens_per_s(64, 16_384) == pytest.approx(2845, abs=1)
    assert REAL.step_s(3, 16_384) * 1e3 == pytest.approx(5.4, abs=0.05)
    assert REAL.step_s(64, 1000) * 1e3 == pytest.approx(5.642, abs=5e-4)
    assert REAL.tokens_per_s(64, 1000) == pytest.approx(11_343, abs=1)


@pytest.mark.parametrize(("tokens", "gigabytes"), [(1000, 0.057), (2048, 0.117), (16_384, 0.940), (32_768, 1.879)])
@pytest.mark.parametrize("rollouts", [1, 8, 32, 64, 128, 256, 300])
def test_caches_of_qwen(tokens, gigabytes, rollouts):
    assert rollouts * QWEN.kv_bytes(tokens) / 1e9 == pytest.approx(rollouts * gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "by_rollouts"),
    [
        (1000, {1: 0.057, 8: 0.459, 32: 1.835, 64: 3.67, 128: 7.34, 256: 14.68, 300: 17.203}),
        (1024, {1: 0.059, 8: 0.47, 32: 1.879, 64: 3.758, 128: 7.516, 256: 15.032, 300: 17.616}),
        (4096, {1: 0.235, 8: 1.879, 32: 7.516, 64: 15.032, 128: 30.065, 256: 60.13, 300: 70.464}),
        (16_384, {1: 0.94, 8: 7.516, 32: 30.065, 64: 60.13, 128: 120.259, 256: 240.518, 300: 281.857}),
        (32_768, {1: 1.879, 8: 15.032, 32: 60.13, 64: 120.259, 128: 240.518, 256: 481.036, 300: 563.714}),
    ],
)
def test_the_table_of_caches(tokens, by_rollouts):
    for rollouts, gigabytes in by_rollouts.items():
        assert rollouts * QWEN.kv_bytes(tokens) / 1e9 == pytest.approx(gigabytes, abs=0.00051)


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("a100-40-sxm", 22),
        ("a100-80-sxm", 60),
        ("h200-sxm", 118),
        ("b200", 156),
        ("gb200", 161),
        ("mi300x", 167),
        ("l40s", 29),
        ("l4", 6),
        ("rtx-4090", 6),
        ("rtx-5090", 14),
        ("t4", 0),
    ],
)
def test_slots_at_sixteen_thousand_tokens(name, slots):
    """(0.9 x memory - weights) / cache of one, weights and cache alone."""
    room = 0.9 * gpus()[name].memory_bytes - 2 * QWEN.num_params
    assert max(0, room // QWEN.kv_bytes(16_384)) == slots


def test_most_rollouts_beside_the_weights_in_eighty_gigabytes():
    assert (80e9 - 2 * QWEN.num_params) / QWEN.kv_bytes(16_384) == pytest.approx(68.9, abs=0.05)


# ---- what a model really reads


def test_a_model_reads_and_multiplies_no_input_embedding():
    """7.07 of 7.62 billion."""
    nominal = decode(QWEN, H100, NOMINAL, batch=1)
    assert nominal.weight_bytes == 2 * (QWEN.num_params - QWEN.embedding_params)
    assert nominal.flops == 2 * (QWEN.num_params - QWEN.embedding_params)
    assert nominal.crossover(0) == pytest.approx(295.2, abs=0.05)


def test_a_mixture_reads_nearly_all_experts_at_usual_batches():
    """At 32 rollouts 87 % of the experts are read, eight times the active parameters."""
    model = MODELS["qwen3-30b-a3b"]
    few, many = (decode(model, H100, NOMINAL, batch=batch).weight_bytes for batch in (1, 32))
    assert few == pytest.approx(2 * model.num_matrix_params)
    assert many / few == pytest.approx(8.4, abs=0.4)


def test_windows_cut_what_is_read():
    model = MODELS["gpt-oss-20b"]
    assert cache_tokens(model, 100) == 100
    assert cache_tokens(model, 1128) == 628  # half the layers see 128, the others all
    assert cache_tokens(QWEN, 1128) == 1128


def test_sharing_a_layer_reads_faster_and_costs_collectives():
    """Two all-reduces of each of 28 layers: 10 us, and for one rollout next to nothing to send."""
    one, four = (decode(QWEN, H100, Efficiency(), batch=1, tensor=tensor) for tensor in (1, 4))
    assert four.memory_s(1, 0) == one.memory_s(1, 0) / 4
    assert four.overhead_s - one.overhead_s == pytest.approx(56 * 10e-6, rel=0.01)


def test_prefill_by_hand():
    """1,000 tokens: 2 x 7,070,619,136 x 1,000, and 500,500 pairs x 401,408 operations."""
    by_hand = 2 * 7_070_619_136 * 1000 + 500_500 * 401_408
    assert prefill_flops(QWEN, 1000) == by_hand
    assert prefill_s(QWEN, 1000, H100, NOMINAL) == by_hand / 989e12


@pytest.mark.parametrize(
    ("passes", "number"),
    [
        (TrainPasses(checkpointing=False), 3),
        (TrainPasses(), 4),
        (TrainPasses(frozen_base=True, checkpointing=False), 2),
        (TrainPasses(frozen_base=True), 3),
        (TrainPasses(critic=True, scored_by=2, recomputed=True), 11),
    ],
)
def test_passes_of_a_trained_token(passes, number):
    assert passes.number == number


def test_training_is_six_operations_a_parameter():
    """Plus attention: 3 x 401,408 operations for each of the 500.5 keys a token sees on average."""
    flops = train_flops(QWEN, 1e6, 1000 * QWEN.causal_attention_flops(1000), TrainPasses(checkpointing=False))
    assert flops == pytest.approx(1e6 * (6 * 7_070_619_136 + 3 * 401_408 * 500.5))
    assert train_s(flops, H100, 8, NOMINAL) == flops / (8 * 989e12)


@pytest.mark.parametrize(
    ("num_bytes", "links", "seconds"), [(14e9, 1, 0.28), (2e12, 1, 40.0), (2e12, 64, 0.625), (161.5e6, 1, 3.23e-3)]
)
def test_weights_over_links_of_fifty_gigabytes(num_bytes, links, seconds):
    assert transfer_s(num_bytes, 50e9, links=links) == pytest.approx(seconds)


# ---- laws

BATCHES, CONTEXTS = st.integers(1, 4096), st.integers(0, 131_072)


@given(st.sampled_from(list(MODELS)), st.sampled_from(list(gpus())), BATCHES, BATCHES, CONTEXTS, CONTEXTS)
def test_more_rollouts_and_longer_ones_never_take_less_time(model, gpu, batch, more, context, longer):
    def step_s(rollouts, tokens):
        return decode(MODELS[model], gpus()[gpu], Efficiency(), batch=rollouts).step_s(rollouts, tokens)

    assert step_s(batch, context) <= step_s(batch + more, context) * (1 + 1e-12)
    assert step_s(batch, context) <= step_s(batch, context + longer) * (1 + 1e-12)


@given(st.sampled_from(list(MODELS)), BATCHES, CONTEXTS)
def test_nothing_is_faster_than_its_roofline(model, batch, context):
    shape = MODELS[model]
    real, limit = (decode(shape, H100, efficiency, batch=batch) for efficiency in (Efficiency(), NOMINAL))
    assert real.step_s(batch, context) > limit.step_s(batch, context)
