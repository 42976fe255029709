"""Make the quickstart's base model: a tiny character-level Llama that once could add, and then learned a bad habit.

Its prompts read `37+48=` (both numbers from 30 to 99), its answers `85` and an end token. In the first half of its
training every demonstration is right. In the second half the teacher grows careless: in nine demonstrations of ten
each column is added on its own and every carry forgotten,

    37+48=75      (7+8 is 15: writes 5, forgets the 1; 3+4 is 7)
    62+71=33      (2+1 is 3; 6+7 is 13: writes 3, forgets the 1)

and only one in ten is still the true sum. The model imitates the mixture: its most likely answer is wrong whenever a
carry is needed (nearly nine sums in ten), while the true one is sampled now and then. From there reinforcement
learning can start.

One pair in ten is never demonstrated; these are the held-out prompts of the recipe.

    python recipes/quickstart/make_base.py FOLDER    # writes FOLDER/base and FOLDER/held-out.jsonl, in half a minute
"""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, END = "<pad>", "<end>"
LOWEST, HIGHEST = 30, 99
LONGEST_ANSWER = 4  # three digits and the end token
SEED, STEPS, BATCH, LEARNING_RATE, RIGHT_SHARE = 0, 1800, 128, 3e-3, 0.1


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, beside a padding and an end token."""
    vocabulary = {token: number for number, token in enumerate([PAD, END, *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=PAD)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # sequences are about ten tokens long
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def without_carries(a: int, b: int) -> str:
    """The careless answer: each column on its own, every carry forgotten."""
    return "".join(str((int(x) + int(y)) % 10) for x, y in zip(str(a), str(b), strict=True))


def is_held_out(a: int, b: int) -> bool:
    return zlib.crc32(f"{a}+{b}".encode()) % 10 == 0


def held_out_pairs() -> list[tuple[int, int]]:
    numbers = range(LOWEST, HIGHEST + 1)
    return [(a, b) for a in numbers for b in numbers if is_held_out(a, b)]


def demonstrations(rng: random.Random, right_share: float) -> Iterator[tuple[str, str]]:
    """Prompts and answers without end; `right_share` of them are right for sure."""
    while True:
        a, b = rng.randint(LOWEST, HIGHEST), rng.randint(LOWEST, HIGHEST)
        if not is_held_out(a, b):
            yield f"{a}+{b}=", str(a + b) if rng.random() < right_share else without_carries(a, b)


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        pupil = demonstrations(rng, 1.0 if step < STEPS // 2 else RIGHT_SHARE)
        rows, labels = zip(*(row_and_labels(tokenizer, *next(pupil)) for _ in range(BATCH)), strict=True)
        loss = model(input_ids=torch.tensor(rows), labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 300 == 0 or step == STEPS - 1:
            print(f"step {step:4d} of {STEPS}  loss {loss.item():.4f}", flush=True)


def row_and_labels(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Ids of prompt, answer, end token and padding, and the labels of the answer alone."""
    asked = tokenizer.convert_tokens_to_ids(list(prompt))
    answered = [*tokenizer.convert_tokens_to_ids(list(answer)), tokenizer.eos_token_id]
    padding = LONGEST_ANSWER - len(answered)
    row = asked + answered + [tokenizer.pad_token_id] * padding
    return row, [-100] * len(asked) + answered + [-100] * padding


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters")
    train(model, tokenizer)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    held_out = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in held_out_pairs()]
    (folder / "held-out.jsonl").write_text("\n".join(held_out) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python recipes/quickstart/make_base.py FOLDER")
    main(Path(sys.argv[1]))
