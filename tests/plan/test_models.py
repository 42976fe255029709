"""Parameter counts and caches computed from sizes, against published totals and values worked by hand."""

import pytest

from headway.plan.models import find_model, known_models, published_params
from headway.types import UserError

MODELS = known_models()


@pytest.mark.parametrize("name", [name for name in MODELS if published_params(name)])
def test_parameters_counted_from_the_sizes_are_the_published_total(name):
    assert MODELS[name].num_params == published_params(name)


# billions: in all, of a token with both embeddings, of a token without the input embedding; None: not published
MIXTURES = {
    "qwen3-30b-a3b": (30.532122624, 3.35, 3.04),
    "qwen3-235b-a22b": (235.09363456, 22.19, None),
    "deepseek-v3": (671.03, 37.55, None),
    "glm-4.5": (352.8, 33.6, None),
    "glm-4.5-air": (106.85, 13.4, None),
    "gpt-oss-20b": (20.91, None, 3.61),
    "gpt-oss-120b": (116.83, None, 5.13),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_have_the_published_total_and_active_parameters(name):
    shape = MODELS[name]
    counted = shape.num_params, shape.num_active_params, shape.num_matrix_params
    for ours, published in zip(counted, MIXTURES[name], strict=True):
        if published is not None:
            assert ours / 1e9 == pytest.approx(published, abs=0.05 if published in (13.4, 33.6) else 0.006)


KV_BYTES = {
    "qwen2.5-0.5b": 12_288,
    "qwen2.5-7b": 57_344,
    "qwen2.5-14b": 196_608,
    "qwen3-0.6b": 114_688,
    "qwen3-8b": 147_456,
    "llama-3.1-70b": 327_680,
    "smollm2-135m": 23_040,
    "smollm2-1.7b": 196_608,
    "olmo-3-7b": 524_288,
    "qwen3-30b-a3b": 98_304,
    "qwen3-235b-a22b": 192_512,
    "deepseek-v3": 70_272,  # one latent of 512 and one rotary key of 64 a layer, no factor 2
    "glm-4.5": 376_832,
    "glm-4.5-air": 188_416,
    "gpt-oss-20b": 49_152,
    "gpt-oss-120b": 73_728,
}


@pytest.mark.parametrize("name", KV_BYTES)
def test_cache_of_one_token(name):
    assert MODELS[name].kv_bytes_per_token() == KV_BYTES[name]


def test_cache_of_qwen_by_hand():
    """2 (keys and values) x 28 layers x 4 heads x 128 numbers x 2 bytes = 56 KiB."""
    assert MODELS["qwen2.5-7b"].kv_bytes_per_token() == 2 * 28 * 4 * 128 * 2 == 56 * 1024


@pytest.mark.parametrize(
    ("name", "marginal", "window"),
    [("gpt-oss-20b", 24_576, 128), ("gpt-oss-120b", 36_864, 128), ("olmo-3-7b", 131_072, 4096)],
)
def test_layers_with_a_window_keep_no_more_than_that(name, marginal, window):
    shape = MODELS[name]
    full, beyond = shape.kv_bytes(window), shape.kv_bytes(window + 1000)
    assert shape.marginal_kv_bytes() == marginal
    assert full == window * shape.kv_bytes_per_token()
    assert beyond - full == 1000 * marginal


def test_what_olmo_keeps_beyond_its_windows():
    """(524,288 - 131,072) bytes x 4,096 tokens = 1.61 GB, whatever the length."""
    shape = MODELS["olmo-3-7b"]
    constant = shape.kv_bytes(32_768) - 32_768 * shape.marginal_kv_bytes()
    assert constant == 393_216 * 4096
    assert constant / 1e9 == pytest.approx(1.61, abs=0.005)


@pytest.mark.parametrize(("rollouts", "share"), [(1, 0.0625), (8, 0.40), (32, 0.87), (64, 0.98)])
def test_how_many_experts_a_decode_step_touches(rollouts, share):
    """1 - (1 - 8/128)^b."""
    shape = MODELS["qwen3-30b-a3b"]
    routed = shape.num_params - shape.num_active_params + 8 * 48 * 3 * 2048 * 768
    fixed = shape.num_params - routed - shape.vocab * shape.hidden  # the input embedding is only looked up
    assert (shape.num_touched_params(rollouts) - fixed) / routed == pytest.approx(share, abs=0.005)


def test_a_dense_model_is_read_whole_at_any_batch():
    shape = MODELS["qwen2.5-7b"]
    assert shape.num_touched_params(1) == shape.num_touched_params(1000) == shape.num_params - 152_064 * 3584


@pytest.mark.parametrize(
    ("rank", "params"),
    [(1, 2_523_136), (8, 20_185_088), (16, 40_370_176), (32, 80_740_352), (64, 161_480_704), (128, 322_961_408)],
)
def test_adapters_on_every_linear_layer_of_qwen(rank, params):
    """r x 28 x [2 (3584 + 3584) + 2 (3584 + 512) + 3 (3584 + 18944)]."""
    assert MODELS["qwen2.5-7b"].adapter_params(rank) == params


def test_attention_of_one_token():
    """4 operations x 28 layers x 28 heads x 128 for each key."""
    shape = MODELS["qwen2.5-7b"]
    assert shape.attention_flops(1000) == 1000 * 4 * 28 * 28 * 128
    assert shape.attention_flops(1) / shape.kv_bytes_per_token() == 7.0


def test_attention_of_a_whole_sequence_is_that_of_its_tokens():
    for name in ("smollm2-135m", "gpt-oss-20b"):
        shape = MODELS[name]
        by_token = sum(shape.attention_flops(length) for length in range(1, 301))
        assert shape.causal_attention_flops(300) == by_token


@pytest.mark.parametrize("name", ["qwen2.5-7b", "Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", "qwen2.5_7b"])
def test_a_model_is_found_by_the_names_people_use(name):
    assert find_model(name).num_params == 7_615_616_512


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen2.5-8b", "unknown model 'qwen2.5-8b', and there is no such folder; did you mean qwen2.5-"),
        ("zzz", "unknown model 'zzz', and there is no such folder; known are qwen2.5-0.5b, qwen2.5-1.5b"),
        (__file__, "is a file; give the model's folder"),
    ],
)
def test_an_unknown_model_names_the_nearest(name, message):
    with pytest.raises(UserError) as error:
        find_model(name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
