"""The field map, against the models that transformers builds of the same configuration."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway.plan.configs import read_shape, shape
from headway.plan.shapes import Attention, Experts
from headway.types import UserError

TINY = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 99}
GROUPED = {**TINY, "num_key_value_heads": 2}
ROUTED = {**GROUPED, "num_experts_per_tok": 2}
DENSE_FIRST = {**ROUTED, "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 24} | {
    "first_k_dense_replace": 1
}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}

CONFIGURATIONS = {
    "llama": ("llama", {**GROUPED, "head_dim": 16}),
    "llama with biases": ("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {**TINY, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 16}),
    "phi3": ("phi3", {**GROUPED, "pad_token_id": 0}),
    "smollm3": ("smollm3", {**GROUPED, "pad_token_id": 0}),
    "qwen2": ("qwen2", GROUPED),
    "qwen2 sliding": ("qwen2", {**GROUPED, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 16}),
    "qwen3 with biases": ("qwen3", {**GROUPED, "attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {**ROUTED, "num_experts": 8, "moe_intermediate_size": 24, "mlp_only_layers": [1]}),
    "qwen3_moe every other": (
        "qwen3_moe",
        {**ROUTED, "num_experts": 8, "moe_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    "mixtral": ("mixtral", {**ROUTED, "num_local_experts": 4}),
    "gemma": ("gemma", {**GROUPED, "head_dim": 16}),
    "gemma2": ("gemma2", {**GROUPED, "head_dim": 16, "sliding_window": 16}),
    "gemma3_text": ("gemma3_text", {**GROUPED, "head_dim": 16, "sliding_window": 16, "num_hidden_layers": 7}),
    "olmo2": ("olmo2", GROUPED),
    "olmo3": ("olmo3", {**GROUPED, "sliding_window": 16}),
    "gpt_oss": ("gpt_oss", {**ROUTED, "num_local_experts": 4, "head_dim": 16, "sliding_window": 16}),
    "deepseek_v3": ("deepseek_v3", {**DENSE_FIRST, **LATENT, "num_key_value_heads": 4, "n_group": 2}),
    "deepseek_v3 without query rank": ("deepseek_v3", {**DENSE_FIRST, **LATENT, "q_lora_rank": None, "n_group": 2}),
    "glm4_moe": ("glm4_moe", {**DENSE_FIRST, "head_dim": 16, "attention_bias": True, "use_qk_norm": True}),
}


def built(kind, sizes):
    """Configuration and model of transformers, without memory for its weights."""
    config = AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config)


def extra(kind, model):
    """Numbers that a model holds as buffers, which its file holds too: corrections of the router's scores."""
    return sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_parameters_are_those_of_the_model_that_transformers_builds(case):
    kind, sizes = CONFIGURATIONS[case]
    config, model = built(kind, sizes)
    ours = shape(config.to_dict(), name=case, source=case)
    assert ours.num_params == sum(parameter.numel() for parameter in model.parameters()) + extra(kind, model)


@pytest.mark.parametrize("case", [case for case, (_, sizes) in CONFIGURATIONS.items() if "sliding_window" in sizes])
def test_windows_are_those_of_the_layers_that_transformers_builds(case):
    kind, sizes = CONFIGURATIONS[case]
    config, _ = built(kind, sizes)
    windows = [layer.attention.window for layer in shape(config.to_dict(), name=case, source=case).layers]
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    assert windows == [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


@pytest.mark.parametrize("case", ["gemma2", "gemma3_text", "gpt_oss", "olmo3", "qwen2 sliding"])
def test_windows_of_a_file_without_layer_types(case):
    """Older files leave them to the architecture."""
    kind, sizes = CONFIGURATIONS[case]
    config = built(kind, sizes)[0].to_dict()
    bare = {key: value for key, value in config.items() if key not in ("layer_types", "_sliding_window_pattern")}
    assert shape(bare, name=case, source=case).layers == shape(config, name=case, source=case).layers


def write(folder, config):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_a_folder_is_read_without_transformers(tmp_path):
    AutoConfig.for_model("qwen3", **GROUPED, head_dim=16).save_pretrained(tmp_path)
    read = read_shape(tmp_path)
    assert (read.name, read.num_layers, read.hidden) == (tmp_path.name, 4, 48)
    assert read.layers[0].attention == Attention(4, 2, 16, norm="head")


def test_the_language_part_of_a_model_that_sees(tmp_path):
    inner = {**GROUPED, "model_type": "gemma3_text", "head_dim": 16}
    assert read_shape(write(tmp_path, {"model_type": "gemma3", "text_config": inner})).num_layers == 4


def test_experts_of_either_name(tmp_path):
    """`num_experts` of a file is `num_local_experts` of a configuration written by transformers 5."""
    config = {**ROUTED, "model_type": "qwen3_moe", "moe_intermediate_size": 24}
    for name in ("num_experts", "num_local_experts"):
        block = read_shape(write(tmp_path, {**config, name: 16})).layers[0].feedforward
        assert isinstance(block, Experts)
        assert block.num == 16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "holds no JSON object"),
        (
            {**TINY, "model_type": "lama"},
            "'lama' is not one that can be planned; did you mean llama?; these can: deeps",
        ),
        (TINY, "model_type '' is not one that can be planned; these can"),
        ({**TINY, "model_type": "llama", "hidden_size": 0}, "hidden_size is 0; a whole number of at least 1"),
        ({**TINY, "model_type": "llama", "vocab_size": None}, "vocab_size is not given"),
        ({**TINY, "model_type": "llama", "num_attention_heads": 5}, "48 is no multiple of num_attention_heads 5"),
        ({**TINY, "model_type": "olmo3", "layer_types": ["full_attention"]}, "layer_types names 1 layers"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_said_in_one_line(tmp_path, config, message):
    with pytest.raises(UserError) as error:
        read_shape(write(tmp_path, config))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_configuration(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.json"):
        read_shape(tmp_path)
