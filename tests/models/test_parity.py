"""Bitwise parity is promised where it was seen on this machine, and refused by name elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import AdapterSettings
from headway.models import parity, products
from headway.models.distribution import Shape, token_logprobs
from headway.models.parity import TILES, bitwise
from headway.models.policy import Policy, add_adapter, in_dtype, load_policy, with_parity
from headway.types import UserError
from tests.tiny import make_policy, packed_hidden, random_ids

REFUSED = "a row's bits depend on what it is computed with; use model.parity close"


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def refusal(action: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        action(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def scored(policy: Policy, lengths: list[int]) -> dict[int, list[float]]:
    """Log-probs of a sequence of each length, all in one pass; the same ids for the same length."""
    sequences = [random_ids(length, seed=length) for length in lengths]
    with torch.no_grad():
        hidden_TD = torch.cat(packed_hidden(policy, sequences))
        logp_T, _ = token_logprobs(policy.head, hidden_TD, torch.cat(sequences), Shape(0.7))
    return {len(part): part.tolist() for part in logp_T.split(lengths)}


# ---- where it can be had


@pytest.mark.parametrize(
    "architecture",
    ["llama", "qwen3", "qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gemma", "cohere"))],
)
def test_rows_have_the_same_bits_in_any_company(architecture):
    """In passes that the trial on loading does not know, with one thread and with two."""
    policy = bitwise(make_policy(architecture))
    assert policy.parity == "bitwise"
    assert policy.fixed_order
    assert policy.head.row_tile in TILES
    expected = {length: scored(policy, [length])[length] for length in (1, 2, 13, 33, 50, 64)}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for lengths in ([1, 2, 13], [64, 50, 33, 13, 2, 1], [3, 1, 7, 64, 9, 2, 40, 33], [13, *range(3, 13)]):
            for length, logp in scored(policy, lengths).items():
                assert logp == expected.get(length, logp), (threads, lengths, length)


def test_the_policy_computes_the_same_up_to_rounding(policy):
    exact, close = scored(bitwise(policy), [7, 40, 1]), scored(policy, [7, 40, 1])
    for length, logp in close.items():
        assert exact[length] == pytest.approx(logp, abs=1e-4)


def test_it_is_a_grade_of_the_same_policy_and_can_be_left_again(policy):
    exact = with_parity(policy, "bitwise")
    assert exact.model is policy.model
    assert exact.head.weight_VD is policy.head.weight_VD
    assert (policy.parity, policy.head.row_tile, policy.fixed_order) == ("close", 1, False)
    assert with_parity(exact, "close") == policy
    assert with_parity(policy, "close") == policy


@pytest.mark.parametrize("parity", ["close", "bitwise"])
def test_a_policy_is_loaded_in_the_grade_that_is_asked_for(parity, model_folder: Path):
    policy = load_policy(str(model_folder), "cpu", parity=parity)
    assert policy.parity == parity
    assert (policy.head.row_tile > 1) == (parity == "bitwise")


@pytest.mark.parametrize("settings", [{"kind": "lora", "rank": 3}, {"kind": "tinylora", "vector_size": 3}], ids=str)
def test_rows_keep_their_bits_when_an_adapter_has_been_trained(settings):
    """At load its products are with zeros."""
    adapted = bitwise(add_adapter(make_policy(), AdapterSettings(**settings), 0))
    with torch.no_grad():
        for number, tensor in enumerate(adapted.weights().values()):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
    expected = scored(adapted, [1, 13, 50, 64])
    for lengths in ([1], [13], [50, 1], [64, 3, 9, 13, 5]):
        for length, logp in scored(adapted, lengths).items():
            assert logp == expected.get(length, logp), (lengths, length)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_trial_leaves_the_number_of_threads_as_it_was(threads, policy):
    torch.set_num_threads(threads)
    bitwise(policy)
    assert torch.get_num_threads() == threads


# ---- where it can't


@pytest.mark.parametrize(
    ("architecture", "name"), [("mixtral", "MixtralForCausalLM"), ("qwen3_moe", "Qwen3MoeForCausalLM")]
)
def test_a_mixture_of_experts_is_refused(architecture, name):
    message = refusal(with_parity, make_policy(architecture), "bitwise")
    assert message.startswith(f"model.parity bitwise can't be had for {name}: it keeps experts in one tensor")
    assert message.endswith("use model.parity close")


def test_a_policy_in_bfloat16_is_refused(policy):
    assert refusal(bitwise, in_dtype(policy, torch.bfloat16)) == (
        "model.parity bitwise needs float32, and LlamaForCausalLM is in torch.bfloat16: use model.parity close"
    )


def depends_on_company(
    real: Callable[..., torch.Tensor], differs: Callable[[int], bool]
) -> Callable[..., torch.Tensor]:
    """A product that is another by a bit, where the number of its rows says so."""

    def product(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        result = real(x, weight_OI, bias_O)
        return torch.nextafter(result, result + 1) if differs(x.numel() // x.shape[-1]) else result

    return product


def test_products_that_depend_on_their_company_are_refused(monkeypatch: pytest.MonkeyPatch, policy):
    torch.set_num_threads(2)
    monkeypatch.setattr(products, "product", depends_on_company(products.product, lambda num_rows: num_rows > 64))
    assert refusal(bitwise, policy) == (
        f"model.parity bitwise can't be had for LlamaForCausalLM on this machine: {REFUSED}"
    )
    assert policy.parity == "close"
    assert torch.get_num_threads() == 2


def test_products_that_depend_on_the_number_of_threads_are_refused(monkeypatch: pytest.MonkeyPatch, policy):
    torch.set_num_threads(2)
    differs = depends_on_company(products.product, lambda num_rows: torch.get_num_threads() == 2)
    monkeypatch.setattr(products, "product", differs)
    assert REFUSED in refusal(bitwise, policy)
    assert torch.get_num_threads() == 2


def test_a_head_that_depends_on_its_company_is_refused(monkeypatch: pytest.MonkeyPatch, policy):
    """The layers' products are not touched by this."""
    monkeypatch.setattr(
        "headway.models.distribution.product", depends_on_company(products.product, lambda num_rows: num_rows > 64)
    )
    assert REFUSED in refusal(bitwise, policy)


def test_a_norm_that_depends_on_its_company_is_refused(policy):
    policy.model.model.norm.register_forward_hook(
        lambda module, arguments, output: output * (1 + 1e-6 * output.shape[1])
    )
    assert REFUSED in refusal(bitwise, policy)


def test_attention_that_depends_on_its_company_is_refused(monkeypatch: pytest.MonkeyPatch, policy):
    real = parity.PackedAttention.attend

    def attend(self, layer, *tensors):
        return real(self, layer, *tensors) * (1 + 1e-6 * len(self._blocks))

    monkeypatch.setattr(parity.PackedAttention, "attend", attend)
    assert REFUSED in refusal(bitwise, policy)


@pytest.mark.parametrize("tile", TILES)
def test_the_smallest_tile_that_will_do_is_taken(tile, monkeypatch: pytest.MonkeyPatch, policy):
    """Products whose last rows, of an incomplete tile, take another path."""
    real = products.product

    def product(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        result = real(x, weight_OI, bias_O)
        whole = x.numel() // x.shape[-1] // tile * tile
        rows = result.view(-1, result.shape[-1])
        return torch.cat([rows[:whole], torch.nextafter(rows[whole:], rows[whole:] + 1)]).view(result.shape)

    monkeypatch.setattr(products, "product", product)
    monkeypatch.setattr("headway.models.distribution.product", product)
    assert bitwise(policy).head.row_tile == tile


def test_what_is_tried_fits_a_short_context():
    """Sequences longer than the model's context are left out of the trial."""
    policy = make_policy(max_position_embeddings=40)
    assert bitwise(policy).parity == "bitwise"
