"""LoRA and TinyLoRA: a few trained numbers inside a model whose own weights stay as they are.

The layers are those of `peft`, put into the model in place: it remains a causal LM of `transformers`, and its forward
pass goes through them. Engine and trainer hold the same adapter: what is random in it is drawn from the run's seed, and
it starts as a change of nothing.

LoRA: W + s B A with A random, B zero and s = alpha / rank, or alpha / sqrt(rank) when rank-stabilised
(arXiv:2106.09685, 2312.03732). TinyLoRA: W + U (sum_i v_i P_i) V, where U and V come from W's truncated SVD, P is
random, both are frozen, and only v is trained, from zero (arXiv:2602.04118).
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, LoraModel, TinyLoraConfig, TinyLoraModel
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import get_peft_model_state_dict
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from headway.config import AdapterSettings
from headway.models.weights import assign_weights
from headway.types import UserError, did_you_mean, nearest

_NAME = "default"
"""What `peft` calls an adapter that needs no name; it stands in no file."""

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_KINDS: dict[str, tuple[Any, Any]] = {"lora": (LoraConfig, LoraModel), "tinylora": (TinyLoraConfig, TinyLoraModel)}


class Adapter:
    """The adapter in one model. Made by `put_into`.

    `parameters`: what is trained, by the names that it has in a saved folder. Nothing else of the model requires
    gradients.
    """

    def __init__(self, tuner: Any) -> None:
        self._tuner = tuner
        names = {tensor.data_ptr(): name for name, tensor in _tensors(tuner).items()}
        trained = [parameter for parameter in tuner.model.parameters() if parameter.requires_grad]
        self.parameters: dict[str, torch.nn.Parameter] = {names[p.data_ptr()]: p for p in trained}
        assert all(parameter.dtype == torch.float32 for parameter in trained), "small updates need float32"
        self._set_aside: dict[str, torch.Tensor] | None = None
        self._starting = {name: tensor.clone() for name, tensor in self.weights().items()}

    def weights(self) -> dict[str, torch.Tensor]:
        """What is trained, detached; within `at_start` too it is what training has made of it."""
        return self._set_aside or {name: parameter.detach() for name, parameter in self.parameters.items()}

    def frame(self) -> dict[str, torch.Tensor]:
        """What the adapter adds and doesn't train: TinyLoRA's U, V and P; nothing of LoRA's.

        It follows from base and seed, but an SVD may choose other signs on another machine, and then the same trained
        numbers mean another model. So whoever makes a policy anew for old numbers takes over the old frame (`adopt`).
        """
        return {name: tensor for name, tensor in _tensors(self._tuner).items() if name not in self.parameters}

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """Within the block (without gradients) the model is what it was when the adapter was put into it.

        That is the base where the adapter was new, and base with adapter where one was gone on from.
        """
        assert self._set_aside is None, "the model is at its start already"
        self._set_aside = trained = self.weights()
        self._point_at(self._starting)
        try:
            with torch.no_grad():
                yield
        finally:
            self._point_at(trained)
            self._set_aside = None

    def _point_at(self, values: Mapping[str, torch.Tensor]) -> None:
        """Nothing is copied, so tensors that were handed out keep their values."""
        torch.clear_autocast_cache()  # which knows parameters, not their values
        for name, parameter in self.parameters.items():
            parameter.data = values[name]

    def fixed_state(self) -> dict[str, Any]:
        """What training does not change and a resumed run needs beside `weights`."""
        return {"scales": self._scales(), "frame": self.frame(), "starting": dict(self._starting)}

    def adopt(self, fixed_state: Mapping[str, Any]) -> None:
        """Become the adapter whose `fixed_state` this is, as far as that is data. Raises UserError if it is not."""
        if fixed_state["scales"] != self._scales():
            raise UserError("adapter.alpha or adapter.scaling is not what it was: resume with the same ones")
        assign_weights(self.frame(), fixed_state["frame"])
        assign_weights(self._starting, fixed_state["starting"])

    def _scales(self) -> list[float]:
        """By which LoRA's products are multiplied, by layer; TinyLoRA has no such factor."""
        layers = (module for module in self._tuner.modules() if isinstance(module, BaseTunerLayer))
        return [scaling[_NAME] for layer in layers if (scaling := getattr(layer, "scaling", None))]

    def save(self, folder: Path, base: str) -> None:
        """A folder that `peft.PeftModel.from_pretrained` loads on top of `base`."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in _tensors(self._tuner).items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        config = copy.copy(self._tuner.peft_config[_NAME])
        config.base_model_name_or_path, config.inference_mode = base or None, True
        if not isinstance(config.target_modules, str):
            config.target_modules = sorted(config.target_modules)
        config.save_pretrained(folder)

    def merged(self) -> Any:
        """A copy of the model with the adapter added to its weights, in their own precision, and gone."""
        return copy.deepcopy(self._tuner).merge_and_unload()


def put_into(model: Any, settings: AdapterSettings, seed: int) -> Adapter:
    """Put the adapter that `settings` describe into a causal LM, in place.

    seed: of A (LoRA) and P (TinyLoRA), which depend on nothing else that was drawn, nor the other way round. Raises
    UserError for layers that are not there, a rank that they don't have, and a starting folder that does not fit.
    """
    folder = None if settings.start is None else Path(settings.start).expanduser()
    config = _config_of(model, folder, settings) if folder else _new_config(model, settings, seed)
    _check_experts(model, config)
    _, tuner_class = _KINDS[settings.kind]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed % 2**32)
            tuner = tuner_class(model, config, _NAME)
    except ValueError as error:
        if folder is None:
            raise
        raise _misfit(folder, model, str(error).strip().split("\n")[0]) from None
    if folder:
        _fill(_tensors(tuner), model, folder)
    model.eval()  # what was added too
    return Adapter(tuner)


def _tensors(tuner: Any) -> dict[str, torch.Tensor]:
    """All that the adapter adds, by the names of a saved folder; the tensors are its own storage."""
    wrapped: Any = torch.nn.Module()  # as much of a PeftModel as gives names
    wrapped.base_model, wrapped.peft_config = tuner, tuner.peft_config
    return get_peft_model_state_dict(wrapped, adapter_name=_NAME, save_embedding_layers=False)


# ---- a new adapter


def _new_config(model: Any, settings: AdapterSettings, seed: int) -> LoraConfig | TinyLoraConfig:
    layers = linear_layers(model)
    if settings.targets is not None:
        words = _checked_words(model, layers, settings.targets)
    elif any(parameter.ndim > 2 for parameter in model.parameters()):
        raise _experts(model)
    else:
        words = _last_words(layers)
    chosen = {name: layer for name, layer in layers.items() if any(_names(word, name) for word in words)}
    assert settings.rank is not None
    _check_rank(settings.rank, chosen)
    plan: dict[str, Any] = {
        "r": settings.rank,
        "target_modules": sorted(words),
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": all(isinstance(layer, Conv1D) for layer in chosen.values()),
    }
    if settings.kind == "lora":
        return LoraConfig(**plan, **{"lora_alpha": settings.alpha, "use_rslora": settings.scaling == "sqrt_rank"})
    sizes = {"u": settings.vector_size, "weight_tying": settings.tying}
    return TinyLoraConfig(**plan, **sizes, projection_seed=seed % 2**32, save_projection=True)


def linear_layers(model: Any) -> dict[str, torch.nn.Module]:
    """The layers that can carry an adapter, by name: all linear ones but the LM head.

    The head is left out because `distribution` reads its weight, and since it may be the embedding too.
    """
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }


def _check_experts(model: Any, config: Any) -> None:
    """Where a model keeps its experts in one tensor, `peft` takes some names to mean them, with another rank."""
    probe = copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(probe, model, None)
    except ValueError:  # some of what is in one tensor, without the rest
        raise _experts(model) from None
    if getattr(probe, "target_parameters", None):
        raise _experts(model)


def _experts(model: Any) -> UserError:
    words = _last_words(name for name in linear_layers(model) if "attn" in name or "attention" in name)
    return UserError(
        f"{type(model).__name__} may have experts, which are no linear layers and carry no adapter; name the layers "
        f"that should, as in --adapter.targets {','.join(words)}"
    )


def _last_words(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _checked_words(model: Any, layers: Mapping[str, torch.nn.Module], words: Sequence[str]) -> Sequence[str]:
    known = _last_words(layers)
    if not words:
        raise UserError(f"adapter.targets is empty; {type(model).__name__} has the linear layers {', '.join(known)}")
    for word in words:
        named = [name for name, _ in model.named_modules() if _names(word, name)]
        if not named or any(name not in layers for name in named):
            why = "has no linear layer of that name but its LM head" if named else "has no layer of that name"
            near = nearest(word, known)
            hint = f"the nearest is {near[0]}" if near else f"it has {', '.join(known)}"
            raise UserError(f"adapter.targets names {word}, and {type(model).__name__} {why}; {hint}")
    return words


def _names(word: str, name: str) -> bool:
    """Whether a target names a layer, by the rule of `peft`."""
    return name == word or name.endswith(f".{word}")


def _check_rank(rank: int, layers: Mapping[str, torch.nn.Module]) -> None:
    name, layer = min(layers.items(), key=lambda item: min(_weight(item[1]).shape))
    largest = min(_weight(layer).shape)
    if rank > largest:
        shape = " x ".join(map(str, _weight(layer).shape))
        raise UserError(f"adapter.rank {rank} is more than {name} ({shape}) has: give at most {largest}")


def _weight(layer: torch.nn.Module) -> torch.Tensor:
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight


# ---- an adapter to go on from

_FREE = {
    *("r", "lora_alpha", "use_rslora", "u", "weight_tying", "projection_seed", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "fan_in_fan_out", "lora_dropout", "tinylora_dropout", "init_v_bound"),
    *("init_weights", "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "megatron_core", "qalora_group_size", "runtime_config"),
}
"""Settings in which a folder's adapter may differ from a plain one: its sizes, and what is only kept for the record."""


def _config_of(model: Any, folder: Path, settings: AdapterSettings) -> LoraConfig | TinyLoraConfig:
    """The configuration in an adapter folder, as far as it is one that is trained and served right here."""
    raw = _read_json(folder)
    kind = str(raw.get("peft_type")).lower()
    if kind not in _KINDS:
        raise UserError(f"adapter.start {folder} is of peft's type {raw.get('peft_type')}; it may be LORA or TINYLORA")
    if kind != settings.kind:
        raise UserError(f"adapter.kind is {settings.kind}, and adapter.start {folder} is {kind}: set it to {kind}")
    config_class, _ = _KINDS[kind]
    fields = {field.name for field in dataclasses.fields(config_class)}
    if raw.get("init_lora_weights") in (False, "gaussian"):  # how it once began is no matter
        raw["init_lora_weights"] = True
    try:
        config = config_class(**{name: value for name, value in raw.items() if name in fields})
    except (TypeError, ValueError) as error:
        raise UserError(f"adapter.start {folder}: {CONFIG_FILE} is not valid: {error}") from None
    plain = config_class()
    own = {name: getattr(config, name) for name in fields if getattr(config, name) != getattr(plain, name)}
    strange = [n for n, value in own.items() if n not in _FREE] + [n for n, v in raw.items() if v and n not in fields]
    if strange:
        raise UserError(
            f"adapter.start {folder} uses {min(strange)}, which Headway does not train: give a plain {kind}"
        )
    _check_agreement(config, folder, settings)
    _check_only_layers(config, model, folder)
    config.inference_mode, config.task_type = False, "CAUSAL_LM"
    setattr(config, f"{kind}_dropout", 0.0)
    return config


def _read_json(folder: Path) -> dict[str, Any]:
    """Raises UserError for what is no adapter folder, with the one that was probably meant."""
    if not (folder / CONFIG_FILE).is_file():
        if (folder / "config.json").is_file():
            raise UserError(f"adapter.start {folder} is a whole model, not an adapter: give it as model.path instead")
        raise UserError(
            f"adapter.start {folder} is no adapter folder: it has no {CONFIG_FILE}{_nearest_adapter(folder)}"
        )
    try:
        raw = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"adapter.start {folder}: {CONFIG_FILE} is no JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"adapter.start {folder}: {CONFIG_FILE} holds no JSON object")
    return raw


def _nearest_adapter(folder: Path) -> str:
    """A hint at an adapter folder inside this one (a run's), or beside it."""
    if (folder / "model" / CONFIG_FILE).is_file():
        return did_you_mean(folder / "model")
    beside = [path.parent.name for path in folder.parent.glob(f"*/{CONFIG_FILE}")]
    return did_you_mean(*(folder.parent / name for name in nearest(folder.name, sorted(beside))))


def _check_agreement(config: Any, folder: Path, settings: AdapterSettings) -> None:
    """A key that is given beside `start` must say what the folder says."""
    words = config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules or ())
    has: dict[str, Any] = {"rank": config.r, "targets": words}
    if settings.kind == "lora":
        has |= {"alpha": config.lora_alpha, "scaling": "sqrt_rank" if config.use_rslora else "rank"}
    else:
        has |= {"vector_size": config.u, "tying": config.weight_tying}
    for name, theirs in has.items():
        ours = getattr(settings, name)
        ours = sorted(ours) if name == "targets" and ours is not None else ours
        if ours is not None and ours != theirs:
            shown = ",".join(theirs) if isinstance(theirs, list) else theirs
            raise UserError(f"adapter.{name} is not that of adapter.start {folder}: leave it out, or set it to {shown}")


def _check_only_layers(config: Any, model: Any, folder: Path) -> None:
    if config.target_modules is None:
        raise UserError(f"adapter.start {folder} names no target_modules in its {CONFIG_FILE}")
    kept = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(module in kept and check_target_module_exists(config, name) for name, module in model.named_modules()):
        raise UserError(f"adapter.start {folder} changes the embedding or the LM head, which Headway keeps as it is")


def _fill(tensors: Mapping[str, torch.Tensor], model: Any, folder: Path) -> None:
    """Read the folder's weights into the adapter's storage. Names and shapes must match exactly, both ways."""
    try:
        saved = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise UserError(f"adapter.start {folder}: {WEIGHTS_FILE} can't be read: {error}") from None
    try:
        assign_weights(tensors, saved)
    except UserError as error:
        raise _misfit(folder, model, str(error)) from None


def _misfit(folder: Path, model: Any, why: str) -> UserError:
    base = _read_json(folder).get("base_model_name_or_path")
    made_on = f"; it was made on {base}" if base else ""
    return UserError(f"adapter.start {folder} does not fit {type(model).__name__}: {why}{made_on}")
