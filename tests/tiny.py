"""Policies so small that a test of the real thing takes milliseconds, and what tests of several folders ask of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from headway.models.attention import Segment
from headway.models.distribution import Head
from headway.models.paged import LayerShape
from headway.models.policy import Policy, as_policy
from headway.models.products import ProductLinear
from headway.types import Prompt, Rollout, Score, ScoredRollout

CHARACTERS = "0123456789+-=? abcdefghijklm"
END_TOKEN = "<end>"
END = len(CHARACTERS)
VOCABULARY = {character: number for number, character in enumerate(CHARACTERS)} | {END_TOKEN: END, "<unknown>": END + 1}

_SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # so large that attention is far from uniform, and the answers far from certain
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
}
_GPT2_SIZES = {
    **{name: _SIZES[name] for name in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")},
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SIZES, "head_dim": 8}),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 16}),
    "qwen2": ("Qwen2Config", _SIZES),
    "gpt2": ("GPT2Config", _GPT2_SIZES),
    "mistral": ("MistralConfig", {**_SIZES, "sliding_window": 16}),
    "cohere": ("CohereConfig", _SIZES),
    "granite": ("GraniteConfig", {**_SIZES, "logits_scaling": 8.0}),
    "gemma2": ("Gemma2Config", {**_SIZES, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}),
    "gemma": ("GemmaConfig", {**_SIZES, "head_dim": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_SIZES,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gpt_oss": ("GptOssConfig", {**_SIZES, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_SIZES,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "moe_intermediate_size": 8,
        },
    ),
    "phi3": ("Phi3Config", _SIZES),
    "olmo": ("OlmoConfig", {**_SIZES, "clip_qkv": 8.0}),
    "bloom": ("BloomConfig", {"vocab_size": len(VOCABULARY), "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": (
        "FalconConfig",
        {name: _SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    ),
    "lfm2": ("Lfm2Config", {**_SIZES, "layer_types": ["conv", "full_attention"]}),
    "qwen3_next": ("Qwen3NextConfig", {**_SIZES, "head_dim": 8}),
    "stablelm": ("StableLmConfig", _SIZES),
    "mamba": ("MambaConfig", {"vocab_size": len(VOCABULARY), "hidden_size": 32, "num_hidden_layers": 2}),
}


def make_model(architecture: str = "llama", *, seed: int = 0, **settings: Any) -> Any:
    """A random causal LM of `transformers`, the same for the same seed."""
    config_class, sizes = _CONFIGS[architecture]
    config = getattr(transformers, config_class)(**{**sizes, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).eval()


def make_policy(architecture: str = "llama", *, seed: int = 0, **settings: Any) -> Policy:
    return as_policy(make_model(architecture, seed=seed, **settings))


class Bigram(torch.nn.Module):
    """A causal LM without attention: the next token depends on the newest one alone."""

    def __init__(self, logits_by_previous: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self.table_VD = torch.nn.Parameter(torch.tensor(logits_by_previous).T.contiguous())
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=64))

    @property
    def base_model(self) -> torch.nn.Module:
        return self

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        hidden_TD = torch.nn.functional.one_hot(input_ids, self.table_VD.shape[1]).to(self.table_VD.dtype)
        return SimpleNamespace(last_hidden_state=hidden_TD)


def make_bigram(logits_by_previous: Sequence[Sequence[float]]) -> Policy:
    model = Bigram(logits_by_previous)
    return Policy(model, Head(model.table_VD), (LayerShape(1, 1, 1),))


def make_chain(*tokens: int, vocabulary: int = 10) -> Policy:
    """After the first of `tokens` comes the second, and so on, all but surely."""
    logits = [[0.0] * vocabulary for _ in range(vocabulary)]
    for previous, following in itertools.pairwise(tokens):
        logits[previous][following] = 20.0
    return make_bigram(logits)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and an end token."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()  # without one, a word-level tokenizer joins its tokens with spaces
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, unk_token="<unknown>")


def write_model_folder(folder: Path, **settings: Any) -> Path:
    make_model(tie_word_embeddings=True, **settings).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def decode(ids: Sequence[int]) -> str:
    return "".join(CHARACTERS[token] for token in ids if token < END)


def encode(text: str) -> tuple[int, ...]:
    return tuple(CHARACTERS.index(character) for character in text)


def prompt(text: str, uid: str | None = None) -> Prompt:
    return Prompt(uid or text, text, encode(text))


def random_ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(END, (length,), generator=torch.Generator().manual_seed(seed))


def plain(policy: Policy) -> Any:
    """A copy of the policy's model as `transformers` runs it, without Headway's attention and matrix products."""
    model = copy.deepcopy(policy.model)
    model.set_attn_implementation("eager")
    ours: list[Any] = [module for module in model.modules() if type(module) is ProductLinear]
    for module in ours:
        module.__class__ = torch.nn.Linear
    return model


def packed_hidden(policy: Policy, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Last hidden states of whole sequences in one packed forward pass."""
    lengths = [len(ids) for ids in sequences]
    segments = [Segment(sum(lengths[:number]), length) for number, length in enumerate(lengths)]
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    hidden_TD = policy.hidden(torch.cat(list(sequences)), positions_T, policy.packed(segments))
    return list(hidden_TD.split(lengths))


def own_logprobs(
    policy: Policy, prompt_tokens: Sequence[int], answer_tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of an answer by the model's own forward pass and a plain softmax: what everything else must equal."""
    ids = torch.tensor([[*prompt_tokens, *answer_tokens]])
    logits_TV = plain(policy)(input_ids=ids, use_cache=False).logits[0].float()
    logp_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    rows = range(len(prompt_tokens) - 1, len(prompt_tokens) + len(answer_tokens) - 1)
    return torch.stack([logp_TV[row, token] for row, token in zip(rows, answer_tokens, strict=True)])


def rollout(
    asked: Prompt,
    tokens: Sequence[int],
    *,
    member: int = 0,
    epoch: int = 0,
    logprobs: Sequence[float] | None = None,
    versions: Sequence[int] | None = None,
    mask: Sequence[bool] | None = None,
    finish: Any = "stop",
    kept: Sequence[Sequence[int] | None] | None = None,
) -> Rollout:
    length = len(tokens)
    return Rollout(
        prompt=asked,
        epoch=epoch,
        member=member,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs) if logprobs is not None else (-1.0,) * length,
        versions=tuple(versions) if versions is not None else (0,) * length,
        mask=tuple(mask) if mask is not None else (True,) * length,
        finish=finish,
        text=decode(tokens),
        kept=None if kept is None else tuple(kept),
    )


def scored(answer: Rollout, reward: float) -> ScoredRollout:
    return ScoredRollout(answer, Score(reward))
