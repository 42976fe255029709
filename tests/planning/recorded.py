"""Folders of runs that went at a known pace: simulated, with the work that goes with it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from headway.config import resolve
from headway.plan.models import find_model
from headway.planning.pace import passes_of, train_flops
from headway.reports.record import WORK
from headway.simulation import simulate
from headway.trace import TraceFile

MODEL = "smollm2-135m"
SHAPE = find_model(MODEL)

PASS_S, ROW_S, PREFILL_S, RATE, UPDATE_S, REST_S = 0.02, 0.001, 0.001, 2e11, 0.3, 1e-4
"""The pace of all of them."""

CACHED_S = PASS_S * SHAPE.kv_bytes_per_token(1) / SHAPE.num_touched_params(1)
"""What a cached token costs where nothing but its bytes tells."""


def recorded(
    folder: Path,
    *words: str,
    steps: int = 12,
    device: str = "cpu",
    slowdown: float | None = None,
    cached_s: float = CACHED_S,
    context: tuple[int, int] = (50, 60),
) -> Path:
    """words: settings of its configuration. slowdown: of work beside the other's, None where there was none; context:
    tokens of a rollout in the cache, from and to.
    """
    folder.mkdir(parents=True)
    given = [f"--model.path={MODEL}", f"--run.steps={steps}", "--train.learning-rate=1e-5", *words]
    train_s = UPDATE_S + _trained(1.0, None, "lora" if "lora" in words else "none")["seconds"] + REST_S * 32 * 12
    resolved = resolve(None, [*given, "--simulate.train-time", str(train_s), "--simulate.mean-length", "12"])
    (folder / "config.toml").write_text(resolved.to_toml())
    trace = TraceFile(folder / "trace.jsonl")
    for event in simulate(resolved.config):
        trace(event)
    trace.close()
    rng = random.Random(0)
    adapter = resolved.config.adapter.kind
    shares = [1.0] if slowdown is None else [1.0, 0.5]
    with (folder / WORK).open("w") as file:
        for version in range(1, steps + 1):
            work = [_pass(rng, share, slowdown, cached_s, context) for _ in range(20) for share in shares]
            work += [_trained(share, slowdown, adapter) for share in shares]
            work.append({"kind": "update", "share": 1.0, "num": 1, "seconds": UPDATE_S})
            if version == 1:
                for each in work:
                    each["seconds"] *= 50  # kernels are made
            spent = sum(each["seconds"] for each in work if each["kind"] != "pass")
            row = {"version": version, "device": device, "cores": 2, "peak_memory_bytes": 6_400_000_000, "work": work}
            row["trainer_s"] = spent + REST_S * 32 * 12 * len(shares)
            file.write(json.dumps(row) + "\n")
    return folder


def _pass(
    rng: random.Random, share: float, slowdown: float | None, cached_s: float, context: tuple[int, int]
) -> dict[str, Any]:
    num, rows, prefill = rng.randint(1, 5), rng.randint(1, 64), rng.choice([0, 0, 40, 300])
    cached = rows * rng.randint(*context)
    seconds = num * (PASS_S + rows * ROW_S + cached * cached_s + prefill * PREFILL_S)
    seconds *= 1.0 if share == 1.0 or slowdown is None else slowdown
    sums = {"rows": num * rows, "prefill": num * prefill, "cached": num * cached}
    return {"kind": "pass", "share": share, "num": num, "seconds": seconds, **sums}


def _trained(share: float, slowdown: float | None, adapter: str) -> dict[str, Any]:
    """Of a batch of 32 rollouts of 12 tokens without a prompt, as they are simulated."""
    tokens, pairs = 32 * 12, 32 * 72
    seconds = train_flops(SHAPE, tokens, pairs, passes_of("train", adapter)) / RATE
    seconds *= 1.0 if share == 1.0 or slowdown is None else slowdown
    return {"kind": "train", "share": share, "num": 1, "seconds": seconds, "tokens": tokens, "pairs": pairs}
