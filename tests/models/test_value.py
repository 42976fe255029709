"""The value model: what it begins as, what it is made of, and that company leaves no trace."""

from __future__ import annotations

import pytest
import torch

from headway.models.attention import PackedAttention, Segment
from headway.models.value import ValueModel
from tests.tiny import make_policy, packed_hidden, random_ids


def values_of(model: ValueModel, *sequences: torch.Tensor) -> list[torch.Tensor]:
    lengths = [len(ids) for ids in sequences]
    segments = [Segment(sum(lengths[:number]), length) for number, length in enumerate(lengths)]
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    hidden_TD = model.hidden(torch.cat(sequences), positions_T, PackedAttention(segments, model.device))
    return list(model.values(hidden_TD).split(lengths))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_every_value_is_0_at_first(architecture):
    (value_T,) = values_of(ValueModel(make_policy(architecture)), random_ids(7))
    assert value_T.tolist() == [0.0] * 7
    assert value_T.dtype == torch.float32


def test_a_value_is_the_head_on_the_last_hidden_state(policy):
    ids = [random_ids(5, seed=1), random_ids(9, seed=2)]
    expected = [hidden_TD @ torch.arange(32.0) + 2.0 for hidden_TD in packed_hidden(policy, ids)]
    model = ValueModel(make_policy())
    with torch.no_grad():
        model.weight_D.copy_(torch.arange(32.0))
        model.bias.fill_(2.0)
    for ours, theirs in zip(values_of(model, *ids), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for number in (0, 1):
        torch.testing.assert_close(values_of(model, ids[number])[0], expected[number], atol=1e-4, rtol=1e-5)


def test_the_lm_head_is_left_behind():
    """Untied, its weight is no parameter; tied, it is the embedding, once."""
    names = dict(ValueModel(make_policy()).named_parameters())
    assert not any("lm_head" in name for name in names)
    assert {"weight_D", "bias", "base.embed_tokens.weight"} <= names.keys()
    assert {p.dtype for p in names.values()} == {torch.float32}
    tied = dict(ValueModel(make_policy(tie_word_embeddings=True)).named_parameters())
    assert tied.keys() == names.keys()


def test_the_head_is_float32_with_bfloat16_products(policy):
    model = ValueModel(policy)
    with torch.no_grad():
        model.bias.fill_(1.001), model.weight_D.fill_(0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value_N = model.values(torch.ones(2, 32, dtype=torch.bfloat16))
    assert value_N.tolist() == pytest.approx([1.001] * 2, abs=1e-6)
