"""`config.json` of a model folder -> `ModelShape`, by a field map of our own: transformers' classes would import torch.

An architecture that isn't known is refused by name, since a guess would be silently wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.plan.shapes import Attention, Experts, Feedforward, LatentAttention, Layer, ModelShape
from headway.types import UserError, did_you_mean, nearest

Config = Mapping[str, Any]


def read_shape(folder: Path) -> ModelShape:
    """Of the model in a folder. Raises UserError where there is no config.json, or none that is understood."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no config.json, so there is no model in it")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object")
    return shape(config, name=folder.name or str(folder), source=str(path))


def shape(config: Config, *, name: str, source: str) -> ModelShape:
    """Of one configuration. Raises UserError that names `source` for an unknown architecture or a missing size."""
    config = _of_text(config)
    kind = str(config.get("model_type", ""))
    if kind not in _ARCHITECTURES:
        hint = did_you_mean(*nearest(kind, _ARCHITECTURES))
        raise UserError(
            f"{source}: model_type {kind!r} is not one that can be planned{hint}; these can: "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    try:
        return _shape(_Sizes(config, source), _ARCHITECTURES[kind], name, source)
    except _Missing as missing:
        raise UserError(f"{source}: {missing.args[0]}") from None


def _of_text(config: Config) -> Config:
    """The language model's part of a model that also sees."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


class _Missing(Exception):
    """A size that the configuration doesn't give, in words."""


class _Sizes:
    """Sizes of a configuration: whole numbers above nought, or a complaint."""

    def __init__(self, config: Config, source: str) -> None:
        self.config, self.source = config, source

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these that is given."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise _Missing(f"{name} is {value!r}; a whole number of at least 1 is needed")
                return value
        if default is None:
            raise _Missing(f"{names[0]} is not given")
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)

    # ---- sizes of attention that all architectures name alike

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.size("num_key_value_heads", default=self.heads)

    @property
    def head_size(self) -> int:
        if self.config.get("head_dim") is None and self.hidden % self.heads:
            raise _Missing(f"hidden_size {self.hidden} is no multiple of num_attention_heads {self.heads}")
        return self.size("head_dim", default=self.hidden // self.heads)

    @property
    def num_layers(self) -> int:
        return self.size("num_hidden_layers")

    def attention(self, **special: Any) -> Attention:
        return Attention(self.heads, self.kv_heads, self.head_size, **special)

    def windows(self) -> list[int | None]:
        """Of every layer, by `layer_types` where they are given."""
        window = self.config.get("sliding_window")
        window = window if isinstance(window, int) and window > 0 else None
        kinds = self.config.get("layer_types")
        if isinstance(kinds, list):
            if len(kinds) != self.num_layers:
                raise _Missing(f"layer_types names {len(kinds)} layers, and num_hidden_layers is {self.num_layers}")
            return [window if kind == "sliding_attention" else None for kind in kinds]
        return [window if self._slides(layer) else None for layer in range(self.num_layers)]

    def _slides(self, layer: int) -> bool:
        """Where there are no layer_types, which older files lack."""
        kind = self.config["model_type"]
        if kind in ("qwen2", "qwen3", "qwen3_moe", "smollm3"):
            return self.flag("use_sliding_window") and layer >= self.size("max_window_layers", default=0)
        every = {"gemma2": 2, "gpt_oss": 2, "olmo3": 4, "gemma3_text": 6, "gemma3": 6}.get(kind, 0)
        pattern = self.size("sliding_window_pattern", "_sliding_window_pattern", default=every) if every else 0
        return not pattern or bool((layer + 1) % pattern)


LayerOf = Callable[[_Sizes, int], Layer]


def _shape(sizes: _Sizes, architecture: _Architecture, name: str, source: str) -> ModelShape:
    windows = sizes.windows()
    layers = tuple(architecture.layer(sizes, number, windows[number]) for number in range(sizes.num_layers))
    return ModelShape(
        name=name,
        hidden=sizes.hidden,
        vocab=sizes.size("vocab_size"),
        tied=sizes.flag("tie_word_embeddings", architecture.tied),
        layers=layers,
        source=source,
    )


class _Architecture:
    """How one family builds its layers; `tied`: whether its head is the embedding where its file doesn't say."""

    tied = False
    norms = 2

    def layer(self, sizes: _Sizes, number: int, window: int | None) -> Layer:
        return Layer(self.attention(sizes, window), self.feedforward(sizes, number), self.norms)

    def attention(self, sizes: _Sizes, window: int | None) -> Attention | LatentAttention:
        bias = sizes.flag("attention_bias")
        return sizes.attention(window=window, qkv_bias=bias, output_bias=bias)

    def feedforward(self, sizes: _Sizes, number: int) -> Feedforward | Experts:
        return Feedforward(sizes.size("intermediate_size"), bias=sizes.flag("mlp_bias"))


class _Plain(_Architecture):
    """Never a bias, whatever the file holds."""

    def attention(self, sizes: _Sizes, window: int | None) -> Attention:
        return sizes.attention(window=window)

    def feedforward(self, sizes: _Sizes, number: int) -> Feedforward | Experts:
        return Feedforward(sizes.size("intermediate_size"))


class _SmolLm3(_Architecture):
    tied = True


class _Qwen2(_Plain):
    def attention(self, sizes: _Sizes, window: int | None) -> Attention:
        return sizes.attention(window=window, qkv_bias=True)


class _Qwen3(_Plain):
    def attention(self, sizes: _Sizes, window: int | None) -> Attention:
        bias = sizes.flag("attention_bias")
        return sizes.attention(window=window, qkv_bias=bias, output_bias=bias, norm="head")


class _Qwen3Moe(_Qwen3):
    def feedforward(self, sizes: _Sizes, number: int) -> Feedforward | Experts:
        step = sizes.size("decoder_sparse_step", default=1)
        if number in sizes.config.get("mlp_only_layers", ()) or (number + 1) % step:
            return super().feedforward(sizes, number)
        each = Feedforward(sizes.size("moe_intermediate_size"))
        return Experts(sizes.size("num_experts", "num_local_experts"), sizes.size("num_experts_per_tok"), each)


class _Mixtral(_Plain):
    def feedforward(self, sizes: _Sizes, number: int) -> Experts:
        each = Feedforward(sizes.size("intermediate_size"))
        return Experts(sizes.size("num_local_experts"), sizes.size("num_experts_per_tok"), each)


class _Gemma(_Plain):
    tied = True


class _Gemma2(_Gemma):
    norms = 4  # before and after both blocks


class _Gemma3(_Gemma2):
    def attention(self, sizes: _Sizes, window: int | None) -> Attention:
        return sizes.attention(window=window, norm="head")


class _Olmo(_Plain):
    """OLMo 2 and 3: norms behind the blocks, and over whole projections."""

    def attention(self, sizes: _Sizes, window: int | None) -> Attention:
        return sizes.attention(window=window, norm="whole")


class _GptOss(_Architecture):
    def attention(self, sizes: _Sizes, window: int | None) -> Attention:
        bias = sizes.flag("attention_bias", True)
        return sizes.attention(window=window, qkv_bias=bias, output_bias=bias, sinks=True)

    def feedforward(self, sizes: _Sizes, number: int) -> Experts:
        each = Feedforward(sizes.size("intermediate_size"), bias=True)
        num = sizes.size("num_local_experts", "num_experts")
        return Experts(num, sizes.size("num_experts_per_tok", "experts_per_token"), each, router_bias=True)


class _DenseFirst(_Architecture):
    """Some dense layers, then mixtures with shared experts: DeepSeek-V3 and GLM-4.5."""

    def feedforward(self, sizes: _Sizes, number: int) -> Feedforward | Experts:
        if number < (sizes.config.get("first_k_dense_replace") or 0):
            return Feedforward(sizes.size("intermediate_size"))
        inner = sizes.size("moe_intermediate_size")
        num_shared = sizes.config.get("n_shared_experts") or 0
        return Experts(
            sizes.size("n_routed_experts"),
            sizes.size("num_experts_per_tok"),
            Feedforward(inner),
            Feedforward(inner * num_shared) if num_shared else None,
            router_bias=True,
        )


class _DeepSeek(_DenseFirst):
    def attention(self, sizes: _Sizes, window: int | None) -> LatentAttention:
        return LatentAttention(
            heads=sizes.heads,
            query_rank=sizes.size("q_lora_rank") if sizes.config.get("q_lora_rank") else None,
            kv_rank=sizes.size("kv_lora_rank"),
            nope=sizes.size("qk_nope_head_dim"),
            rope=sizes.size("qk_rope_head_dim"),
            value=sizes.size("v_head_dim"),
            window=window,
        )


class _Glm4Moe(_DenseFirst):
    def attention(self, sizes: _Sizes, window: int | None) -> Attention:
        norm = "head" if sizes.flag("use_qk_norm") else "none"
        return sizes.attention(window=window, qkv_bias=sizes.flag("attention_bias"), norm=norm)


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(),
    "mistral": _Plain(),
    "phi3": _Plain(),
    "smollm3": _SmolLm3(),
    "qwen2": _Qwen2(),
    "qwen3": _Qwen3(),
    "qwen3_moe": _Qwen3Moe(),
    "mixtral": _Mixtral(),
    "gemma": _Gemma(),
    "gemma2": _Gemma2(),
    "gemma3_text": _Gemma3(),
    "olmo2": _Olmo(),
    "olmo3": _Olmo(),
    "gpt_oss": _GptOss(),
    "deepseek_v3": _DeepSeek(),
    "glm4_moe": _Glm4Moe(),
}
"""By `model_type`."""
