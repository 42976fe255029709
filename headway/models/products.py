"""The one matrix product of linear layers, y = x W^T + b, forward and backward, the same for engine and trainer.

On a CPU in float32 it is oneDNN's: on processors where the BLAS library that torch is built with keeps to narrow
vectors it is two to three times as fast, and a row of it has the same bits whatever other rows come with it, as long as
it does not come alone. Everywhere else, and for other dtypes, it is torch's own.

Axes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

# oneDNN makes a kernel for every shape, about half a megabyte apiece; it and torch each keep the last 1024 of them.
# Both ask for this number once, before their first product.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "128")


def _onednn_is_usable() -> bool:
    """Whether torch was built with oneDNN, and the operator that gives its plain product works on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that were started at an import would be missed by processes that are forked
    try:
        x_TI, weight_OI = torch.ones(2, 3), torch.ones(4, 3)
        return bool((_onednn(x_TI, weight_OI) == 3).all() and (_onednn(weight_OI[:, :2], x_TI[:, :2]) == 2).all())
    except (RuntimeError, AttributeError):
        return False
    finally:
        torch.set_num_threads(num_threads)


def _onednn(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """The weights as they are, or as `_reorder_linear_weight` lays them out."""
    return torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")


USES_ONEDNN = _onednn_is_usable()


def filled(num_rows: int, tile: int = 1) -> int:
    """How many rows a pass over so many is filled up to, a multiple of `tile`, which is a power of two.

    At most a sixteenth more, and only sixteen numbers between one power of two and the next: a kernel is made for each.
    """
    step = max(tile, 1 << max(0, num_rows.bit_length() - 5))
    return -(-num_rows // step) * step


def product(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """[..., I] -> [..., O]."""
    if not (USES_ONEDNN and _is_plain(x) and _is_plain(weight_OI) and x.numel()):
        return linear(x, weight_OI, bias_O)
    given = (x, weight_OI) if bias_O is None else (x, weight_OI, bias_O)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        output_TO = _Product.apply(x.reshape(-1, x.shape[-1]), weight_OI, bias_O)
        return output_TO.view(*x.shape[:-1], -1)  # out here, since a layer may change what it gets in place
    return _onednn(x, weight_OI, bias_O)


def _is_plain(tensor: torch.Tensor) -> bool:
    """On a CPU in float32, and not about to be cast to another dtype."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return _onednn(x_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_TO,) = grads
        x_TI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = _onednn(grad_TO, weight_OI.t()) if wants_x else None
        grad_weight = _onednn(grad_TO.t(), x_TI.t()) if wants_weight else None
        return grad_x, grad_weight, grad_TO.sum(0) if wants_bias else None


class Packed:
    """A copy of the weights of linear layers with the same inputs, laid out as a processor reads them fastest.

    For weights that many products read before they change. What comes out has the bits of `product`, layer after layer;
    with weights or biases that have changed since, with gradients, and wherever else it would not, nothing comes out.
    Changes are those that torch counts, and other storage; what is written past it, through numpy, `.data` or by a
    fused optimizer, is not seen.
    """

    def __init__(self, weights_OI: Sequence[torch.Tensor], biases_O: Sequence[torch.Tensor | None]) -> None:
        biases = [bias for bias in biases_O if bias is not None]
        assert len(biases) in (0, len(weights_OI)), "of layers that are packed together all have a bias, or none"
        self._read = [(tensor, tensor._version, tensor.data_ptr()) for tensor in (*weights_OI, *biases)]
        self._usable = USES_ONEDNN and all(map(_is_plain, weights_OI))
        if self._usable:
            self._bias_O = torch.cat(biases).detach() if biases else None
            self._packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(list(weights_OI)).detach())

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None: a layer that is copied, or read from a file, has weights of its own, which nobody has packed."""
        return type(None), ()

    def product(self, x: torch.Tensor) -> torch.Tensor | None:
        """[..., I] -> [..., O of all the layers]."""
        if not self._usable or torch.is_grad_enabled() or not (_is_plain(x) and x.numel()):
            return None
        if any(tensor._version != version or tensor.data_ptr() != place for tensor, version, place in self._read):
            return None
        return _onednn(x, self._packed, self._bias_O)


class ProductLinear(torch.nn.Linear):
    """A linear layer whose product is `product`; its weights, their names and the rest are as they were."""

    packed: Packed | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.packed is not None and (output := self.packed.product(input)) is not None:
            return output
        return product(input, self.weight, self.bias)


def install(model: torch.nn.Module) -> None:
    """Every plain linear layer of the model uses `product`, in place. Those of other classes are left as they are."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = ProductLinear
