"""A model's weights by name: handing them over, comparing them, and their hash.

Tied weights (an embedding that is also the head) have one name and one storage here; whether a model ties them is
the model's own structure and never changes in a hand-over.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Mapping

import torch

from headway.types import UserError, nearest


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and saved buffer once, by name; the tensors are the model's own storage, detached."""
    saved = model.state_dict()
    parameters = dict(model.named_parameters())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {name: tensor.detach() for name, tensor in (parameters | buffers).items()}


@torch.no_grad()
def assign_weights(own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Copy `weights` into `own`, a receiver's own storage by name. Names and shapes must match exactly, both ways.

    Everything is checked before anything is copied, so a refused hand-over leaves the model as it was. Raises UserError
    for the first name or shape that doesn't match.
    """
    for name in weights:
        if name not in own:
            near = nearest(name, own)
            hint = f"; the nearest name it has is {near[0]}" if near else ""
            raise UserError(f"weight {name} was sent to a model that has none of that name{hint}")
    for name, tensor in own.items():
        if name not in weights:
            raise UserError(f"weight {name} of the receiving model was not sent; its old values would stay")
        if weights[name].shape != tensor.shape:
            raise UserError(
                f"weight {name} was sent as {list(weights[name].shape)}, the model has {list(tensor.shape)}"
            )
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def fingerprint(weights: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype] | None = None) -> str:
    """A SHA-256 over names, shapes, dtypes and every bit, independent of the order of the mapping.

    dtypes: in which a receiver keeps weights, by name, where that is another one; the hash is then that of its own.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous().cpu()
        tensor = tensor.to(dtypes.get(name, tensor.dtype)) if dtypes else tensor
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        bits = tensor.view(-1).view(torch.uint8)
        digest.update(bits.clone().numpy().data)  # of a copy: no storage that numpy has seen can be given back
    return digest.hexdigest()


def own_storage(model: torch.nn.Module) -> None:
    """Weights that lie in a mapped file get memory of their own, which can be given back."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


def free_storage(weights: Mapping[str, torch.Tensor]) -> None:
    """Give back the memory of these tensors and of whatever shares it; until `take_storage` nobody may look at them."""
    for tensor in weights.values():
        tensor.untyped_storage().resize_(0)
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)  # or the C library would keep it for later


def take_storage(weights: Mapping[str, torch.Tensor]) -> None:
    """Memory again for tensors that had to give theirs back; what is in it is arbitrary."""
    for tensor in weights.values():
        assert tensor.is_contiguous()
        end = int(tensor.storage_offset()) + tensor.numel()
        storage = tensor.untyped_storage()
        storage.resize_(max(storage.nbytes(), end * tensor.dtype.itemsize))
