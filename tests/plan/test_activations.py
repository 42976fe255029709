"""Bytes kept for the backward pass, against those that autograd keeps, and by hand."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway.models import distribution
from headway.plan.activations import KEPT_LOGITS, LOGIT_CHUNK, logits_bytes, of_layer, of_model
from headway.plan.configs import shape
from headway.plan.models import find_model

SIZES = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 6, "num_key_value_heads": 2}
SIZES |= {"head_dim": 16, "vocab_size": 99}
TOKENS = 128


def kept_bytes(kind, num_layers):
    """Of one forward pass over TOKENS, parameters left out, each storage once."""
    config = AutoConfig.for_model(kind, **SIZES, num_hidden_layers=num_layers)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").model
    ours = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values()), shape(config.to_dict(), name=kind, source=kind)


@pytest.mark.parametrize(("kind", "tolerance"), [("llama", 0.01), ("qwen2", 0.01), ("mistral", 0.01), ("qwen3", 0.15)])
def test_a_layer_keeps_what_autograd_keeps(kind, tolerance):
    """Of one more layer, in float32. The norms of single heads in Qwen3 aren't counted."""
    two, _ = kept_bytes(kind, 2)
    three, model = kept_bytes(kind, 3)
    ours = of_layer(model.layers[0], model.hidden, 4)
    assert ours.expected == pytest.approx((three - two) / TOKENS, rel=tolerance)
    assert ours.floor < ours.expected


def test_a_layer_of_qwen_by_hand():
    """bf16: 2 norms x 3584 x (4 + 2 + 2); queries and output 3584, keys and values 512, each 2 bytes; 28 heads' sums
    of 4 bytes; and 4 inner vectors of 18,944 x 2 bytes."""
    model = find_model("qwen2.5-7b")
    by_hand = 2 * 3584 * 8 + 2 * (2 * 3584 + 2 * 512) + 4 * 28 + 4 * 18_944 * 2
    assert of_layer(model.layers[0], model.hidden, 2).expected == by_hand


def test_checkpointing_keeps_inputs_and_one_layer():
    model = find_model("qwen2.5-7b")
    whole, checkpointed = (of_model(model, 2, checkpointing=on).expected for on in (False, True))
    layer = of_layer(model.layers[0], model.hidden, 2).expected
    backward = 2 * (3 * 18_944 + 4 * 3584)  # gradients of inner vectors and hidden states of the layer at work
    assert whole == 28 * layer + backward
    assert checkpointed == 28 * 3584 * 2 + layer + backward


def test_a_mixture_keeps_what_its_chosen_experts_make():
    """Eight experts of 768 inner units and one dense block of 6,144 keep alike; routing copies the hidden state."""
    model = find_model("qwen3-30b-a3b")
    kept = of_layer(model.layers[0], model.hidden, 2).expected
    attention = 2 * 2 * (32 + 4) * 128 + 4 * 32
    assert kept == 2 * 2048 * 8 + attention + 2 * 4 * 8 * 768 + 2 * (2 * 8 * 2048 + 128)


def test_logits_whole_and_in_chunks():
    """4,096 tokens x 152,064 ids x 4 bytes = 2.49 GB, three times over; in chunks a constant, as Headway keeps them."""
    whole, chunked = (logits_bytes(4096, 152_064, chunked=chunked) for chunked in (False, True))
    assert whole.floor == 4 * 4096 * 152_064
    assert whole.expected / 1e9 == pytest.approx(7.474, abs=0.001)
    assert (chunked.floor, chunked.expected) == (4 * LOGIT_CHUNK, 12 * KEPT_LOGITS)
    assert (LOGIT_CHUNK, KEPT_LOGITS) == (distribution.CHUNK_ELEMENTS, distribution.KEPT_ELEMENTS)
    assert logits_bytes(10, 99, chunked=True) == logits_bytes(10, 99, chunked=False)
