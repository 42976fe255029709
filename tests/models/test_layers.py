"""Exchanged attention blocks and packed weights: the same numbers, and never those of weights that have changed."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.config import AdapterSettings
from headway.models import layers
from headway.models.layers import LlamaLike
from headway.models.parity import bitwise
from headway.models.policy import Policy, add_adapter, as_policy, in_dtype, load_policy
from headway.models.products import USES_ONEDNN, Packed, ProductLinear, product
from headway.types import UserError
from tests.tiny import make_model, make_policy, packed_hidden, random_ids, write_model_folder

needs_onednn = pytest.mark.skipif(not USES_ONEDNN, reason="this build of torch, or this processor, has no oneDNN")

EXCHANGED = ["llama", "qwen2", "qwen3", "mistral", "granite", "gemma", "gemma3", "mixtral", "qwen3_moe"]
KEPT = ["gpt2", "phi3", "cohere", "stablelm", "deepseek_v3", "gpt_oss", "olmo"]
"""A projection of queries, keys and values together, pairs rotated otherwise, part of a head rotated, sinks; queries
that are clipped, which only loud rows show.
"""

SEQUENCES = [random_ids(length, seed=length) for length in (5, 1, 12, 3)]


def blocks_of(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LlamaLike)]


def linear_layers(policy: Policy) -> list[ProductLinear]:
    return [module for module in policy.model.base_model.modules() if isinstance(module, ProductLinear)]


@torch.no_grad()
def hidden(policy: Policy) -> torch.Tensor:
    return torch.cat(packed_hidden(policy, SEQUENCES))


@pytest.mark.parametrize("architecture", EXCHANGED)
def test_blocks_that_are_alike_are_exchanged_and_give_what_the_models_own_give(architecture, monkeypatch):
    exchanged = make_policy(architecture)
    assert len(blocks_of(exchanged.model)) == 2
    monkeypatch.setattr(layers, "install", lambda model: None)
    own = make_policy(architecture)
    assert not blocks_of(own.model)
    torch.testing.assert_close(hidden(exchanged), hidden(own), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", KEPT)
def test_other_blocks_stay_as_they_are(architecture):
    try:
        policy = make_policy(architecture)
    except UserError:  # an architecture that is refused was looked at all the same
        model = make_model(architecture)
        layers.install(model)
    else:
        model = policy.model
    assert not blocks_of(model)


def test_an_exchanged_block_keeps_its_names_and_its_class():
    model, untouched = make_policy("llama").model, make_model("llama")
    assert list(model.state_dict()) == list(untouched.state_dict())
    (block, _), own = blocks_of(model), type(untouched.model.layers[0].self_attn)
    assert isinstance(block, own)
    assert type(block).__name__ == own.__name__


def test_gradients_are_those_of_the_models_own_blocks(monkeypatch):
    gradients = []
    for install in (layers.install, lambda model: None):
        monkeypatch.setattr(layers, "install", install)
        policy = make_policy("qwen3")
        torch.cat(packed_hidden(policy, SEQUENCES)).pow(3).sum().backward()
        gradients.append([parameter.grad for parameter in policy.model.model.layers.parameters()])
    for ours, own in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def test_without_a_plan_an_exchanged_block_is_the_models_own():
    policy, untouched = make_policy("llama"), make_model("llama")
    policy.model.set_attn_implementation("eager")
    untouched.set_attn_implementation("eager")
    ids = SEQUENCES[2][None]
    with torch.no_grad():
        torch.testing.assert_close(policy.model(ids).logits, untouched(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
def test_what_a_block_tells_the_attention_function_is_told_by_the_exchanged_one(architecture):
    policy = make_policy(architecture)
    assert blocks_of(policy.model)[0].its_options["sliding_window"] == 16
    with pytest.raises(UserError, match="sliding window of 16 tokens"), torch.no_grad():
        packed_hidden(policy, [random_ids(17)])


def test_a_block_that_gives_something_else_is_not_exchanged(monkeypatch):
    """One that turns the other way: seen only where the block is tried."""
    model = make_model("llama")
    kind = type(model.model.layers[0].self_attn)

    def forward(self: Any, hidden_states: Any, position_embeddings: Any, **options: Any) -> Any:
        cos, sin = position_embeddings
        return kind.forward(self, hidden_states, position_embeddings=(cos, -sin), **options)

    model.model.layers[0].self_attn.__class__ = type("Backwards", (kind,), {"forward": forward})
    policy = as_policy(model)
    assert [isinstance(layer.self_attn, LlamaLike) for layer in policy.model.model.layers] == [False, True]


def test_a_block_that_learns_something_else_is_not_exchanged():
    """Which may do nothing yet."""
    model = make_model("llama")
    model.model.layers[0].self_attn.loudness = torch.nn.Parameter(torch.ones(()))
    assert [isinstance(layer.self_attn, LlamaLike) for layer in as_policy(model).model.model.layers] == [False, True]


def test_a_block_with_some_biases_is_not_exchanged_and_packed_all_the_same():
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias = torch.nn.Parameter(torch.linspace(-1, 1, 32))
    policy = as_policy(model)
    assert not blocks_of(policy.model)
    expected = hidden(policy)
    assert torch.equal(hidden(policy.packed_up()), expected)


def test_blocks_are_exchanged_once():
    """What a block tells the attention function is still told by a policy made of a policy's model."""
    policy = as_policy(make_policy("mistral").model)
    assert [block.its_options["sliding_window"] for block in blocks_of(policy.model)] == [16, 16]


def test_a_model_with_exchanged_blocks_goes_through_a_file():
    policy, file = make_policy("llama").packed_up(), io.BytesIO()
    torch.save(policy.model, file)
    file.seek(0)
    read = replace(policy, model=torch.load(file, weights_only=False))
    assert [type(block) for block in blocks_of(read.model)] == [type(block) for block in blocks_of(policy.model)]
    assert all(block.joined is None for block in blocks_of(read.model))
    assert all(layer.packed is None for layer in linear_layers(read))
    assert torch.equal(hidden(read), hidden(policy))


def test_a_rotation_of_a_part_of_a_head_goes_to_the_models_own_block():
    policy = make_policy("llama")
    block = blocks_of(policy.model)[0]
    part = torch.zeros(1, 3, 4)
    with pytest.raises(RuntimeError, match="size"):  # its own complains; the exchanged one would have taken it
        block(torch.zeros(1, 3, 32), position_embeddings=(part, part), attention_mask=None, attention_plan=None)


# ---- packed weights


@pytest.mark.parametrize("architecture", [*EXCHANGED, "gpt2", "phi3", "cohere"])
def test_packed_weights_give_the_same_bits(architecture):
    plain = make_policy(architecture)
    expected, logits = hidden(plain), plain.head.logits(torch.ones(3, plain.head.weight_VD.shape[1]))
    packed = plain.packed_up()
    assert torch.equal(hidden(packed), expected)
    assert torch.equal(packed.head.logits(torch.ones(3, packed.head.weight_VD.shape[1])), logits)


@needs_onednn
def test_one_product_gives_queries_keys_and_values():
    policy = make_policy("qwen2").packed_up()
    for block in blocks_of(policy.model):
        layers_of_it = [block.q_proj, block.k_proj, block.v_proj]
        assert all(layer.packed is None for layer in layers_of_it)
        assert block.o_proj.packed is not None
        x_TE = torch.linspace(-1, 1, 96).view(3, 32)
        with torch.no_grad():
            expected = torch.cat([layer(x_TE) for layer in layers_of_it], -1)
            assert torch.equal(block.joined.product(x_TE), expected)


@needs_onednn
def test_nothing_is_served_of_weights_that_have_changed():
    policy = make_policy("llama").packed_up()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    changed = make_policy("llama")
    with torch.no_grad():
        for parameter in changed.model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(hidden(policy), hidden(changed))
    assert torch.equal(hidden(policy.packed_up()), hidden(changed))


@needs_onednn
def test_packed_weights_step_aside():
    layer = ProductLinear(8, 8)
    packed = Packed([layer.weight], [layer.bias])
    x = torch.ones(4, 8)
    assert packed.product(x) is None, "with gradients"
    with torch.no_grad():
        assert torch.equal(packed.product(x), product(x, layer.weight, layer.bias))
        assert packed.product(x.double()) is None
        assert packed.product(x[:0]) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert packed.product(x) is None
        for parameter in layer.parameters():
            packed = Packed([layer.weight], [layer.bias])
            assert packed.product(x) is not None
            parameter.add_(1)
            assert packed.product(x) is None
            packed, before = Packed([layer.weight], [layer.bias]), parameter.data
            parameter.data = parameter.data.clone()
            assert packed.product(x) is None
            parameter.data = before
            assert packed.product(x) is not None


def test_in_another_dtype_nothing_is_packed():
    policy = in_dtype(make_policy("llama"), torch.bfloat16)
    expected = hidden(policy)
    assert torch.equal(hidden(policy.packed_up()), expected)


def test_unpacked_is_without_the_copy():
    policy = make_policy("llama").packed_up().unpacked()
    assert policy.head.packed is None
    assert all(layer.packed is None for layer in linear_layers(policy))
    assert all(block.joined is None for block in blocks_of(policy.model))


def test_a_copy_of_a_packed_model_has_its_own_weights():
    policy = make_policy("llama").packed_up()
    copied = replace(policy, model=copy.deepcopy(policy.model)).unpacked()
    assert torch.equal(hidden(copied), hidden(policy))
    with torch.no_grad():
        copied.model.model.layers[0].self_attn.q_proj.weight.zero_()
    assert not torch.equal(hidden(copied), hidden(policy))


@pytest.mark.parametrize("kind", ["lora", "tinylora"])
def test_adapters_are_not_lost_in_packed_weights(kind, tmp_path):
    policy = load_policy(str(write_model_folder(tmp_path / "base")))
    adapted = add_adapter(policy, AdapterSettings(kind=kind, rank=2), seed=0)
    with torch.no_grad():
        for number, parameter in enumerate(adapted.adapter.parameters.values()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.3)
    expected = hidden(adapted)
    assert torch.equal(hidden(adapted.packed_up()), expected)
    with torch.no_grad():
        for parameter in adapted.adapter.parameters.values():
            parameter.mul_(2)
    assert not torch.equal(hidden(adapted), expected)


def test_the_policy_a_run_began_with_can_be_had_of_packed_weights(tmp_path):
    adapted = load_policy(str(write_model_folder(tmp_path / "base")), adapter=AdapterSettings(kind="lora", rank=2))
    expected = hidden(adapted)
    with torch.no_grad():
        for parameter in adapted.adapter.parameters.values():
            parameter.fill_(0.3)
    packed = adapted.packed_up()
    with packed.as_reference():
        assert torch.equal(hidden(packed), expected)
    assert not torch.equal(hidden(packed), expected)


def test_an_adapter_is_not_lost_in_weights_that_were_packed_before_it_came():
    policy = add_adapter(make_policy("llama").packed_up(), AdapterSettings(kind="lora", rank=2), seed=0)
    expected = hidden(policy)
    with torch.no_grad():
        for parameter in policy.adapter.parameters.values():
            parameter.fill_(0.3)
    assert not torch.equal(hidden(policy), expected)
    assert all(block.joined is None for block in blocks_of(policy.model))


@pytest.mark.parametrize("num_outputs", [None, 30], ids=["all", "the head"])
def test_where_packed_weights_have_other_bits_bitwise_parity_does_without(num_outputs, monkeypatch):
    """Also if it had done without before."""
    real = Packed.product

    def slightly_off(self: Packed, x: torch.Tensor) -> torch.Tensor | None:
        result = real(self, x)
        is_meant = result is not None and num_outputs in (None, result.shape[-1])
        return result * (1 + 2**-20) if is_meant else result

    if USES_ONEDNN:
        monkeypatch.setattr(Packed, "product", slightly_off)
        once = bitwise(make_policy("llama"))
        assert not once.may_pack
        assert not bitwise(once).may_pack
        monkeypatch.undo()
    policy = bitwise(make_policy("llama"))
    assert policy.may_pack
    refused = replace(policy, may_pack=False).packed_up()
    assert refused.head.packed is None
    assert all(layer.packed is None for layer in linear_layers(refused))
