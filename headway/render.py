"""Prompts as token ids. The tokenizer is handed in; ids that are made here are never decoded and encoded again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headway.types import Prompt, UserError, nearest


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of `transformers` have it."""

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Called as `encode(text, add_special_tokens=...)`: a list of ids."""
        ...

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        """Called with messages, `add_generation_prompt=True, tokenize=True`: ids, or a mapping with `input_ids`."""
        ...

    def get_vocab(self) -> Any:
        """Token -> id, special tokens included."""
        ...

    def __getattr__(self, name: str, /) -> Any:
        """chat_template, bos_token_id, eos_token_id, unk_token_id (None: there is none), all_special_tokens."""
        ...


def render_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    *,
    chat: bool,
    system: str | None,
    context_tokens: int | None,
    max_new_tokens: int,
) -> list[Prompt]:
    """The prompts with their tokens: as plain text, or as one user message in the model's chat template.

    A prompt begins with at most one begin token. context_tokens: positions the model has for prompt and answer; None
    when it has no limit.

    Raises UserError when there is no chat template, for a prompt without tokens or with too many, and for a tokenizer
    that ends every prompt with its end token.
    """
    if chat and not tokenizer.chat_template:
        raise UserError("data.chat is on, but the model has no chat template; turn data.chat off, or use a chat model")
    if system is not None and not chat:
        raise UserError("data.system is set, but data.chat is off; turn data.chat on, or write it into data.template")
    rendered = []
    for prompt in prompts:
        tokens = _chat_tokens(prompt.text, tokenizer, system) if chat else _text_tokens(prompt, tokenizer)
        tokens = _one_begin_token(tokens, tokenizer.bos_token_id)
        _check_length(prompt, len(tokens), context_tokens, max_new_tokens)
        rendered.append(dataclasses.replace(prompt, tokens=tokens))
    return rendered


def _text_tokens(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    tokens = tuple(tokenizer.encode(prompt.text, add_special_tokens=True))
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens:
        raise UserError(
            f"prompt {prompt.uid} holds characters that the model's tokenizer doesn't know: {prompt.text[:40]!r}; "
            "give prompts that it can spell, or another model"
        )
    end = tokenizer.eos_token_id
    if len(tokens) > 1 and tokens[-1] == end and tokenizer.encode(prompt.text, add_special_tokens=False)[-1:] != [end]:
        raise UserError(
            f"the tokenizer ends prompt {prompt.uid} with its end token, after which there is nothing to say; "
            "set add_eos_token to false in its tokenizer_config.json"
        )
    return tokens


def _chat_tokens(text: str, tokenizer: Tokenizer, system: str | None) -> tuple[int, ...]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    except Exception as error:  # a template's own complaint, of a library that is not imported here; told as one line
        if not type(error).__module__.startswith("jinja2"):
            raise
        raise UserError(f"the model's chat template refuses the messages: {error}; try without data.system") from error
    ids = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
    return tuple(ids[0] if len(ids) and not isinstance(ids[0], int) else ids)


def _one_begin_token(tokens: tuple[int, ...], begin: int | None) -> tuple[int, ...]:
    """Template and tokenizer may each write the begin token; the model has only seen texts with one."""
    while begin is not None and tokens[:2] == (begin, begin):
        tokens = tokens[1:]
    return tokens


def _check_length(prompt: Prompt, num_tokens: int, context_tokens: int | None, max_new_tokens: int) -> None:
    if not num_tokens:
        raise UserError(f"prompt {prompt.uid} has no tokens (text {prompt.text[:40]!r}); leave it out")
    if context_tokens is None or num_tokens + max_new_tokens <= context_tokens:
        return
    room = context_tokens - num_tokens
    mend = f"set generate.max_new_tokens to at most {room}" if room > 0 else "shorten it or leave it out"
    raise UserError(
        f"prompt {prompt.uid} has {num_tokens} tokens; with generate.max_new_tokens = {max_new_tokens} that exceeds "
        f"the model's context of {context_tokens}; {mend}"
    )


def end_ids(tokenizer: Tokenizer, end_tokens: Sequence[str] | None) -> frozenset[int]:
    """The ids that end a rollout: of the given tokens, or of the tokenizer's own end token when None is given.

    Raises UserError when the tokenizer has no end token, and for a word that is not exactly one token.
    """
    if end_tokens is not None:
        vocabulary = tokenizer.get_vocab()
        return frozenset(_token_id(word, tokenizer, vocabulary) for word in end_tokens)
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer has no end token; set generate.end_tokens{_nearest_tokens('', tokenizer)}")
    return frozenset({tokenizer.eos_token_id})


def _token_id(word: str, tokenizer: Tokenizer, vocabulary: Mapping[str, int]) -> int:
    """A vocabulary may spell a token in its own way (a line break as Ċ), so a word is also looked up by encoding it."""
    if word in vocabulary:
        return vocabulary[word]
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        what = "no token of the model" if len(ids) == 1 else f"{len(ids)} tokens, not one"
        raise UserError(f"generate.end_tokens: {word!r} is {what}{_nearest_tokens(word, tokenizer)}")
    return ids[0]


def _nearest_tokens(word: str, tokenizer: Tokenizer) -> str:
    special = [str(token) for token in tokenizer.all_special_tokens]
    near = nearest(word, special, num=3, cutoff=0.4) or special[:8]
    return f"; special tokens are {', '.join(near)}" if near else ""
