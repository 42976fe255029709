"""TRL's part of the benchmarks of training, run by the python of an environment that has it.

`loss`: forward and backward of `GRPOTrainer`'s own loss on given prompts and answers, for `training.py`. `train`: a
whole run of `GRPOTrainer`, for `against_trl.py`. Both take their order as JSON on standard input, and answer with a
line of it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from measuring import Memory
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ROOT = Path(__file__).resolve().parents[1]
ALWAYS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,  # TRL's default is True
    "beta": 0.0,
    "loss_type": "grpo",
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def trainer_of(folder: str, rows: Sequence[dict[str, Any]], reward: Any, settings: dict[str, Any]) -> GRPOTrainer:
    """On the CPU, in float32, without a KL divergence."""
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(**ALWAYS, **settings),
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )


def versions() -> str:
    return f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"


# The loss alone


def loss(order: dict[str, Any], scratch: str) -> dict[str, Any]:
    memory = Memory()
    groups = order["groups"]
    size = len(groups[0]["answers"])
    settings = {
        "output_dir": scratch,
        "per_device_train_batch_size": size,
        "num_generations": size,
        "gradient_accumulation_steps": len(groups),
        "gradient_checkpointing": order["checkpointing"],
    }
    trainer = trainer_of(order["folder"], [{"prompt": "0"}] * size * len(groups), never_asked, settings)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = len(groups)
    if order["checkpointing"]:  # `train` would do it
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    short = [padded({**group, "prompt": [0] * 8, "answers": [[0] * 8] * size}) for group in groups]
    batches = [padded(group) for group in groups]
    forward_backward(trainer, short)
    trainer.model.zero_grad(set_to_none=True)
    memory.forget_peak()
    began_s = time.perf_counter()
    forward_backward(trainer, batches)
    return {
        "seconds": time.perf_counter() - began_s,
        "peak_mib": memory.peak_mib(),
        "rows": sum(batch["prompt_ids"].numel() + batch["completion_ids"].numel() for batch in batches),
        "gradient": torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]).item(),
        "versions": versions(),
    }


def never_asked(completions: list[str], **columns: Any) -> list[float]:
    raise AssertionError("the rewards are given")


def padded(group: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As TRL hands a batch to its loss: answers padded on the right, prompts here all of one length."""
    rewards = torch.tensor(group["rewards"])
    lengths = torch.tensor([len(answer) for answer in group["answers"]])
    longest = int(lengths.max())
    prompt_ids = torch.tensor([group["prompt"]] * len(lengths))
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": torch.tensor([answer + [0] * (longest - len(answer)) for answer in group["answers"]]),
        "completion_mask": mask,
        "advantages": (rewards - rewards.mean()) / (rewards.std() + 1e-6),
        "num_items_in_batch": mask.sum(),
    }


def forward_backward(trainer: GRPOTrainer, batches: Sequence[dict[str, torch.Tensor]]) -> None:
    for batch in batches:
        trainer.accelerator.backward(trainer.compute_loss(trainer.model, batch))


# A whole run


class Steps(TrainerCallback):
    """When each optimizer step ended, in seconds since training began."""

    def __init__(self) -> None:
        self.began_s, self.at_s = 0.0, []

    def on_train_begin(self, *anything: Any, **more: Any) -> None:
        self.began_s = time.perf_counter()

    def on_step_end(self, *anything: Any, **more: Any) -> None:
        self.at_s.append(time.perf_counter() - self.began_s)


def train(order: dict[str, Any], scratch: str) -> dict[str, Any]:
    memory = Memory()
    check_tokens(order)
    verifier, rewards = number_verifier(), []

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        right = [verifier.last_number(text) == verifier.parse_number(a) for text, a in zip(texts, answer, strict=True)]
        rewards.append(sum(right) / len(right))
        return [float(one) for one in right]

    rows = [{"prompt": prompt["prompt"], "answer": prompt["answer"]} for prompt in order["prompts"]]
    trainer = trainer_of(order["folder"], rows, reward, {"output_dir": scratch, **order["settings"]})
    steps = Steps()
    trainer.add_callback(steps)
    memory.forget_peak()
    trainer.train()
    assert len(rewards) == len(steps.at_s), "one batch of answers for each step"
    return {"rewards": rewards, "at_s": steps.at_s, "peak_mib": memory.peak_mib(), "versions": versions()}


def check_tokens(order: dict[str, Any]) -> None:
    """Whether TRL gives the model the tokens that Headway gives it."""
    tokenizer = AutoTokenizer.from_pretrained(order["folder"])
    for prompt in order["prompts"]:
        if isinstance(asked := prompt["prompt"], str):
            ids = tokenizer(asked)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        if ids != prompt["tokens"]:
            sys.exit(f"the prompt {asked!r} has other tokens here")


def number_verifier() -> ModuleType:
    """Headway's own scorer `number`, by its file: of its package TRL's environment has no more need."""
    sys.path.insert(0, str(ROOT))
    spec = importlib.util.spec_from_file_location("verifier", ROOT / "headway" / "score" / "verifier.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"loss": loss, "train": train}[sys.argv[1]](json.load(sys.stdin), folder)))
