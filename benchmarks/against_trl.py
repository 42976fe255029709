"""Whole runs of a recipe, by default the quickstart, through Headway and through TRL's `GRPOTrainer`, on this CPU in
one run.

The same base model, prompts (token for token, in the same order), batch, group size, lengths, temperature, learning
rate, optimizer and number of optimizer steps, in float32 without a KL divergence; rewards from the same file of
Headway. Headway runs `headway train` as the recipe is, and once more without running ahead, as TRL is made. In all of
them nothing is evaluated or kept on the way. A micro-batch has at most the recipe's `prepare.micro_batch_tokens` rows;
TRL's are counted with their padding.

What can't be the same: which tokens are drawn (TRL draws from torch's generator, Headway by a hash of what is drawn);
what is added to a group's standard deviation (TRL 1e-4, Headway 1e-6); and what running ahead asks for, data that may
be a batch old and a correction of its weight.

A step's seconds are those between two new versions of the weights. Its reward is the mean over its batch.

    python -m venv trl-env && trl-env/bin/pip install trl==1.16.0
    python benchmarks/against_trl.py --trl-python trl-env/bin/python [--trl-threads 1 2] [--repeats 3] [--out PAGE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from measuring import Memory, Parser, check_marks, in_a_process, peer_python, say, spread, table, write_marked

HERE = Path(__file__).resolve()
WARM_UP_STEPS, SMOOTHED_STEPS = 3, 5
GOAL = 0.9
OURS, SYNCHRONOUS, PEER = "Headway", "Headway, run_ahead 0", "TRL"

Run = dict[str, Any]
"""rewards and at_s (when its new weights were there, since the first step began) of every step, seconds (all of the
process), peak_mib."""


# Headway


def words_of(options: argparse.Namespace, seed: int, *more: str) -> list[str]:
    """Overrides of the recipe."""
    settings = {"run.steps": options.steps, "run.threads": options.threads, "run.seed": seed}
    settings |= {"evaluate.size": 0, "checkpoint.every": 0}
    return [*(word for name, value in settings.items() for word in (f"--{name}", str(value))), *more]


def headway(order: dict[str, Any]) -> Run:
    """In a process of its own: the command, and what it has left in its folder."""
    from headway import cli, in_process
    from headway.trace import read_trace

    assert in_process, "what `headway train` imports later is imported before memory is read"
    memory, folder = Memory(), Path(order["folder"])
    sys.argv = ["headway", "train", *order["words"], "--out", str(folder)]
    memory.forget_peak()
    try:
        cli.main()
    except SystemExit as ended:
        if ended.code:
            raise
    events = read_trace(folder / "trace.jsonl")
    began_s = next(event.at_s for event in events if event.kind == "started")
    return {
        "rewards": [event["metrics"]["reward_mean"] for event in events if event.kind == "trained"],
        "at_s": [event.at_s - began_s for event in events if event.kind == "published"],
        "peak_mib": memory.peak_mib(),
    }


# TRL


def trl_order(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The settings of Headway's run in TRL's words, and its prompts: of every group in order of start."""
    from headway.config import resolve
    from headway.in_process import compose
    from headway.models.policy import locate
    from headway.run import chosen_objective

    config = resolve(options.recipe, words_of(options, seed)).config
    parts = compose(config, chosen_objective(config), None, lambda what: None)
    num_groups = options.steps * config.schedule.batch_size // config.schedule.group_size
    prompts = [parts.source.at(group)[0] for group in range(num_groups)]
    assert config.model.path is not None
    settings = _trl_settings(config, max(len(prompt.tokens) for prompt in prompts))
    return {
        "folder": locate(config.model.path),
        "prompts": [
            {"prompt": _asked(prompt.text, config.data), "tokens": list(prompt.tokens), "answer": prompt.answer}
            for prompt in prompts
        ],
        "settings": {**settings, "max_steps": options.steps, "seed": seed},
    }


def _asked(text: str, data: Any) -> str | list[dict[str, str]]:
    """As TRL takes a prompt: a text, or messages for the model's chat template."""
    if not data.chat:
        return text
    system = [] if data.system is None else [{"role": "system", "content": data.system}]
    return [*system, {"role": "user", "content": text}]


def _trl_settings(config: Any, longest_prompt: int) -> dict[str, Any]:
    schedule, train, new_tokens = config.schedule, config.train, config.generate.max_new_tokens
    fitting = config.prepare.micro_batch_tokens // (longest_prompt + new_tokens)
    sizes = range(schedule.group_size, schedule.batch_size + 1, schedule.group_size)
    size = max(n for n in sizes if schedule.batch_size % n == 0 and n <= max(fitting, schedule.group_size))
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": schedule.batch_size // size,
        "gradient_checkpointing": False,
        "num_generations": schedule.group_size,
        "max_completion_length": new_tokens,
        "temperature": config.generate.temperature,
        "scale_rewards": "group",
        "epsilon": 0.2,
        "shuffle_dataset": False,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.learning_rate_schedule,
        "warmup_steps": train.warmup_steps,
        "adam_beta1": train.beta1,
        "adam_beta2": train.beta2,
        "adam_epsilon": train.epsilon,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
    }


# Both


def measure(options: argparse.Namespace, trl_python: Path | None) -> dict[str, list[Run]]:
    """The runs of each case, by repeat (a seed each); none of TRL where it is not installed."""
    found: dict[str, list[Run]] = {}
    for seed in range(options.repeats):
        for case, run in _runs(options, seed, trl_python).items():
            say(f"repeat {seed + 1} of {options.repeats}: {case} ...")
            began_s = time.perf_counter()
            measured = found.setdefault(case, [])
            if run is not None:
                measured.append({**run(), "seconds": time.perf_counter() - began_s})
    return found


def _runs(options: argparse.Namespace, seed: int, trl_python: Path | None) -> dict[str, Callable[[], Run] | None]:
    """A run of every case; None for what can't be run."""
    runs: dict[str, Callable[[], Run] | None] = {
        OURS: partial(_headway, options, words_of(options, seed)),
        SYNCHRONOUS: partial(_headway, options, words_of(options, seed, "--schedule.run-ahead", "0")),
    }
    if trl_python is None:
        return {**runs, PEER: None}
    command, order = [trl_python, HERE.with_name("trl_run.py"), "train"], trl_order(options, seed)
    return runs | {
        PEER if threads == options.threads else f"{PEER}, threads: {threads}": partial(
            in_a_process, command, order, threads
        )
        for threads in options.trl_threads or [options.threads]
    }


def _headway(options: argparse.Namespace, words: list[str]) -> Run:
    with tempfile.TemporaryDirectory() as scratch:
        order = {"words": [str(options.recipe), *words], "folder": str(Path(scratch) / "run")}
        return in_a_process([sys.executable, HERE, "--one"], order, options.threads)


def step_s(run: Run) -> float:
    """The median over the steps after the first few."""
    at_s = run["at_s"][WARM_UP_STEPS:]
    return median(end - start for start, end in pairwise(at_s))


def smoothed(rewards: Sequence[float], step: int) -> float:
    """The mean over `step` (from 1) and the few before it."""
    return fmean(rewards[max(0, step - SMOOTHED_STEPS) : step])


def goal_s(run: Run) -> float | None:
    """When the smoothed reward first came to the goal."""
    steps = range(SMOOTHED_STEPS, len(run["rewards"]) + 1)
    return next((run["at_s"][step - 1] for step in steps if smoothed(run["rewards"], step) >= GOAL), None)


# The tables


def report(options: argparse.Namespace, found: dict[str, list[Run]]) -> str:
    versions = next((run["versions"] for runs in found.values() for run in runs if "versions" in run), "No TRL")
    setting = f"`{options.recipe}`, {options.steps} optimizer steps, {options.threads} threads, a seed for each of "
    setting += f"{options.repeats} "
    setting += f"repeats: median (least-largest). {versions}."
    head = [
        "",
        "seconds per step",
        "a step's time / Headway's",
        f"seconds to reward {GOAL}",
        "whole process, s",
        "peak MiB",
    ]
    rows = [_row(case, runs, found[OURS]) for case, runs in found.items()]
    return "\n".join([setting, "", table(head, rows), "", _curves_setting(), "", _curves(options, found)])


def _row(case: str, runs: Sequence[Run], ours: Sequence[Run]) -> list[str]:
    if not runs:
        return [case, "not installed", "", "", "", ""]
    ratios = [step_s(theirs) / step_s(own) for own, theirs in zip(ours, runs, strict=True)]
    reached = [seconds for run in runs if (seconds := goal_s(run)) is not None]
    of_all = f", {len(reached)} of {len(runs)} runs" if len(reached) < len(runs) else ""
    return [
        case,
        spread([step_s(run) for run in runs], 3),
        "1" if case == OURS else spread(ratios, 2),
        f"{spread(reached, 1)}{of_all}" if reached else "never",
        spread([run["seconds"] for run in runs], 1),
        spread([run["peak_mib"] for run in runs]),
    ]


def _curves_setting() -> str:
    return (
        f"Reward of the batch, mean over {SMOOTHED_STEPS} steps and the repeats, and the seconds from the first step's "
        "beginning to that step's end (median of the repeats):"
    )


def _curves(options: argparse.Namespace, found: dict[str, list[Run]]) -> str:
    cases = [case for case, runs in found.items() if runs]
    shown = range(max(1, options.steps // 10), options.steps + 1, max(1, options.steps // 10))
    rows = [[f"{step}", *(_curve_cell(found[case], step) for case in cases)] for step in shown]
    return table(["after step", *cases], rows)


def _curve_cell(runs: Sequence[Run], step: int) -> str:
    reward = fmean(smoothed(run["rewards"], step) for run in runs)
    return f"{reward:.2f} ({median(run['at_s'][step - 1] for run in runs):.1f} s)"


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", type=Path, help="python of an environment that has TRL")
    parser.add_argument("--trl-threads", type=int, nargs="+", help="as many runs of TRL, each with so many threads")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.toml"), help="with the scorer number")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="a page with marks, between which the tables are written")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(headway(json.load(sys.stdin))))
        return
    _check(parser, options)
    check_marks(parser, options.out, _mark(options))
    text = report(options, measure(options, peer_python(parser, options.trl_python, "trl")))
    print(text)
    if options.out:
        write_marked(options.out, _mark(options), text)


def _mark(options: argparse.Namespace) -> str:
    """A page has a part for each recipe."""
    return f"against_trl.py {options.recipe.stem}"


def _check(parser: Parser, options: argparse.Namespace) -> None:
    from headway.config import resolve
    from headway.types import UserError

    for name, least in {"steps": WARM_UP_STEPS + 2, "repeats": 1, "threads": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}; it must be {least} or more")
    if min(options.trl_threads or [1]) < 1:
        parser.error(f"--trl-threads has {min(options.trl_threads)}; they must be 1 or more")
    try:
        config = resolve(options.recipe, words_of(options, 0)).config
    except UserError as error:
        parser.error(str(error))
    if config.score.scorer != "number":
        parser.error(f"{options.recipe} has the scorer {config.score.scorer}; TRL is given only the scorer number")
    updates = config.train.optimizer_steps * config.train.passes
    chosen = (config.objective.name, config.objective.kl_coefficient, updates, config.adapter.kind)
    if chosen != ("grpo", 0, 1, "none"):
        parser.error(
            f"{options.recipe} must have objective grpo, kl_coefficient 0, one optimizer step per batch and no adapter"
        )


if __name__ == "__main__":
    main()
