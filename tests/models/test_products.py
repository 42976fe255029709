"""The one matrix product: it is torch's `linear`, forward and backward, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from headway.models import products
from headway.models.products import USES_ONEDNN, ProductLinear, install, product
from tests import tiny

needs_onednn = pytest.mark.skipif(not USES_ONEDNN, reason="this build of torch, or this processor, has no oneDNN")

SHAPES = [(8, 16), (32, 30), (33, 70), (5, 3), (576, 192), (1536, 576)]
"""Inputs and outputs: whole vectors of a processor, and odd ones."""


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def calls_of_onednn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that holds the number of rows of every product that oneDNN makes from now on."""
    rows: list[int] = []
    real = products._onednn

    def counted(x_TI: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(x_TI.numel() // x_TI.shape[-1])
        return real(x_TI, *others)

    monkeypatch.setattr(products, "_onednn", counted)
    return rows


# ---- it is torch's linear


def test_worked_by_hand():
    x_TI, weight_OI = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
    assert product(x_TI, weight_OI).tolist() == [[1, 2, -1], [3, 4, -1]]
    assert product(x_TI, weight_OI, torch.tensor([10.0, 20.0, 30.0])).tolist() == [[11, 22, 29], [13, 24, 29]]


@pytest.mark.parametrize("shape", [(7,), (1, 7), (6, 7), (2, 3, 7), (2, 1, 4, 7), (0, 7), (3, 0, 7)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_any_number_of_axes(shape, with_bias):
    x, weight_OI, bias_O = random_numbers(*shape), random_numbers(5, 7, seed=1), random_numbers(5, seed=2)
    ours, expected = (of(x, weight_OI, bias_O if with_bias else None) for of in (product, linear))
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strides", ["rows", "columns", "every second row", "weight"])
def test_operands_that_are_not_contiguous(strides):
    x_TI, weight_OI = random_numbers(6, 8), random_numbers(4, 8, seed=1)
    match strides:
        case "rows":
            x_TI = random_numbers(8, 6).t()
        case "columns":
            x_TI = random_numbers(6, 20)[:, 3:11]
        case "every second row":
            x_TI = random_numbers(12, 8)[::2]
        case "weight":
            weight_OI = random_numbers(8, 4).t()
    torch.testing.assert_close(product(x_TI, weight_OI), linear(x_TI, weight_OI), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(6, 7), (1, 7), (7,), (2, 3, 7)], ids=str)
@pytest.mark.parametrize("wanting", ["x", "weight", "bias", "x weight", "x weight bias", "weight bias"])
def test_gradients_of_whatever_wants_one(shape, wanting):
    """A frozen layer with a trained bias among them, whose input needs no gradient."""
    given = {"x": random_numbers(*shape), "weight": random_numbers(5, 7, seed=1), "bias": random_numbers(5, seed=2)}
    leaves = [given[name].requires_grad_() for name in wanting.split()]
    direction = random_numbers(*shape[:-1], 5, seed=3)
    ours, expected = (torch.autograd.grad((of(*given.values()) * direction).sum(), leaves) for of in (product, linear))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_gradients_that_come_expanded_or_transposed():
    """`sum` sends back one number for all places, and `t` a transposed view."""
    x_TI, weight_OI = random_numbers(6, 7).requires_grad_(), random_numbers(5, 7, seed=1).requires_grad_()
    for loss_of in (torch.sum, lambda y: (y.t() * random_numbers(5, 6, seed=2)).sum()):
        ours, expected = (
            torch.autograd.grad(loss_of(of(x_TI, weight_OI)), (x_TI, weight_OI)) for of in (product, linear)
        )
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_no_graph_is_kept_without_gradients():
    weight_OI = random_numbers(5, 7).requires_grad_()
    with torch.no_grad():
        assert product(random_numbers(3, 7), weight_OI).grad_fn is None
    assert product(random_numbers(3, 7), weight_OI).grad_fn is not None
    assert product(random_numbers(3, 7), weight_OI.detach()).grad_fn is None


@pytest.mark.parametrize("shape", [(7,), (6, 7), (1, 6, 7)], ids=str)
def test_what_comes_out_may_be_changed_in_place(shape):
    """As models do that clip their queries."""
    x, weight_OI = random_numbers(*shape).requires_grad_(), random_numbers(5, 7, seed=1)
    ours, expected = (torch.autograd.grad(of(x, weight_OI).clamp_(-1, 1).sum(), x) for of in (product, linear))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


# ---- a row's bits are its own


@needs_onednn
@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_has_the_same_bits_in_any_company_of_two_and_more(shape, with_bias):
    """Whatever its place, whatever the number of rows, whatever the number of threads."""
    num_inputs, num_outputs = shape
    x_TI, weight_OI = random_numbers(150, num_inputs), random_numbers(num_outputs, num_inputs, seed=1)
    bias_O = random_numbers(num_outputs, seed=2) if with_bias else None
    expected_TO = product(x_TI, weight_OI, bias_O)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for num in (2, 3, 5, 16, 17, 64, 149, 150):
            for first in {0, (150 - num) // 2, 150 - num}:
                rows = slice(first, first + num)
                assert torch.equal(product(x_TI[rows], weight_OI, bias_O), expected_TO[rows]), (threads, num, first)


@needs_onednn
def test_a_row_has_the_same_bits_beside_rows_that_are_no_numbers():
    x_TI, weight_OI = random_numbers(4, 32), random_numbers(48, 32, seed=1)
    expected_O = product(x_TI, weight_OI)[1]
    x_TI[[0, 2, 3]] = torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None]
    assert torch.equal(product(x_TI, weight_OI)[1], expected_O)


@needs_onednn
def test_bits_are_the_same_with_gradients_and_without():
    x_TI, weight_OI = random_numbers(9, 32), random_numbers(48, 32, seed=1)
    assert torch.equal(product(x_TI, weight_OI.clone().requires_grad_()), product(x_TI, weight_OI))


# ---- where it is torch's own


@needs_onednn
def test_oneDNN_makes_forward_and_backward_in_float32(monkeypatch: pytest.MonkeyPatch):
    rows = calls_of_onednn(monkeypatch)
    x_TI, weight_OI = random_numbers(6, 7).requires_grad_(), random_numbers(5, 7).requires_grad_()
    product(x_TI, weight_OI).sum().backward()
    assert rows == [6, 6, 5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_torchs_own(dtype, monkeypatch: pytest.MonkeyPatch):
    rows = calls_of_onednn(monkeypatch)
    x_TI, weight_OI = random_numbers(6, 7).to(dtype), random_numbers(5, 7, seed=1).to(dtype)
    assert torch.equal(product(x_TI, weight_OI), linear(x_TI, weight_OI))
    assert rows == []


def test_autocast_still_casts(monkeypatch: pytest.MonkeyPatch):
    rows = calls_of_onednn(monkeypatch)
    x_TI, weight_OI = random_numbers(6, 7), random_numbers(5, 7, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product(x_TI, weight_OI).dtype == torch.bfloat16
        assert rows == []
        with torch.autocast("cpu", enabled=False):
            assert product(x_TI, weight_OI).dtype == torch.float32
    assert rows == ([6] if USES_ONEDNN else [])


def test_without_onednn_it_is_torchs_own(monkeypatch: pytest.MonkeyPatch):
    rows = calls_of_onednn(monkeypatch)
    monkeypatch.setattr(products, "USES_ONEDNN", False)
    x_TI, weight_OI = random_numbers(6, 7), random_numbers(5, 7, seed=1)
    assert torch.equal(product(x_TI, weight_OI), linear(x_TI, weight_OI))
    assert rows == []


@pytest.mark.parametrize("failure", [RuntimeError, AttributeError])
def test_an_operator_that_does_not_work_here_is_not_used(failure, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: torch.Tensor) -> torch.Tensor:
        raise failure

    monkeypatch.setattr(products, "_onednn", fails)
    assert not products._onednn_is_usable()


# ---- put into a model


def test_it_takes_the_place_of_plain_linear_layers_only():
    class Own(torch.nn.Linear):
        """Some library's own."""

    model = torch.nn.ModuleDict({"plain": torch.nn.Linear(2, 3), "own": Own(2, 3), "table": torch.nn.Embedding(2, 3)})
    names, tensors = list(model.state_dict()), list(model.parameters())
    install(model)
    install(model)
    assert [type(layer) for layer in model.values()] == [ProductLinear, Own, torch.nn.Embedding]
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), tensors, strict=True))


@torch.no_grad()
def test_every_linear_layer_of_a_policy_goes_through_it(monkeypatch: pytest.MonkeyPatch, policy):
    """Seven of each of two layers; the head is `distribution`'s business."""
    used: list[torch.Tensor] = []
    monkeypatch.setattr(
        products, "product", lambda x, weight, bias=None: used.append(weight) or linear(x, weight, bias)
    )
    tiny.packed_hidden(policy, [tiny.random_ids(5)])
    assert len(used) == 14
    assert {weight.data_ptr() for weight in used} == {
        parameter.data_ptr() for name, parameter in policy.model.named_parameters() if "_proj" in name
    }
