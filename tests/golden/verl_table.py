"""`docs/verl.md`: verl's values beside Headway's. `python -m tests.golden.verl_table` writes it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.golden.verl import Case, Outputs, cases, recorded, recording
from tests.golden.verl_headway import headway
from tests.golden.verl_verdicts import NO_COUNTERPART, REASONS, Verdict, disagreements, verdicts_of

PAGE = Path(__file__).parents[2] / "docs" / "verl.md"

INTRODUCTION = """\
# Headway's values beside verl's

verl {version} from PyPI computes losses, advantages and corrections of its own. This page puts what it gives on small
inputs beside what Headway gives on the same: of {cases} cases {agree} agree, {differ} differ for the reasons below, and
{only_there} are of functions that Headway has no counterpart of. The tests hold every case to its place
(`tests/golden/test_verl_values.py`): what agrees is equal to 1e-8 of its largest number (1e-6 where one of the two
computes in float32), gradients included; what differs really does, and is equal once Headway's functions are given
verl's convention. No difference turned out to be an error of Headway.

verl is no dependency. `benchmarks/against_verl.py` called its functions in an environment of its own and wrote
`tests/golden/verl.json`; how to make that environment and record again stands at its top. This page is written
anew by `python -m tests.golden.verl_table`.

The inputs are in that file too. `plain` has three groups of four; `masked` has masked tokens, a rollout with nothing
else and a group of one; `extreme` has log-ratios beyond every clamp; `worked_...` can be worked by hand. Everything is
in float64. Figures are of the first inputs named, advantages are compared on trained tokens. Of verl's metrics those
are compared that Headway has too: the shares that were clipped, cut or rejected, the mean that weights are divided by,
and the measures of mismatch.
"""

SECTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "Rewards, advantages, statistics": (
        ("reward", "advantage", "statistics"),
        "Figures: the sum of absolute values over tokens; with returns, theirs second. In Headway: the advantages "
        "`group_mean_std` (`grpo`), `group_mean`, `leave_one_out` (`rloo`), `gae` and `reward`, and `whiten`.",
    ),
    "Reductions and losses": (
        ("aggregation", "policy_loss", "value_loss"),
        "Figures: the loss, and the norm of its gradient. In Headway: the reductions `token_mean`, "
        "`rollout_mean_token_mean`, `rollout_mean_token_sum` and `constant`; the objectives `grpo` (`vanilla`; with "
        "`anchor = behaviour` also `bypass_mode`), `gspo_token`, `cispo`, `reinforce` (`gpg`) and `ppo`. c is the dual "
        "clip: always on in verl, 3 by default, and 1e9 where none is named here; off in Headway unless set.",
    ),
    "KL, weights, rejections, measures": (
        ("kl", "weights", "rejection", "diagnostics"),
        "Figures: for a KL the norm of its values, and of the gradient of their sum; for weights their norm; for a "
        "rejection the tokens kept; for the measures KL(mu, pi) by k1 and by k3, chi^2 of tokens and of rollouts. In "
        "Headway: the estimators of the same name (`k3+` is `k3_value_k2_gradient`), the corrections `tis`, `icepop`, "
        "`sequence_tis`, `geometric_rejection`, `k3_rejection`, weights "
        "of other bounds and levels, and `MismatchDiagnostics`.",
    ),
}

SHORT = {
    "loss_agg_mode": "",
    "clip_ratio_low": "low",
    "clip_ratio_high": "high",
    "clip_ratio_c": "c",
    "cliprange_value": "clip",
    "norm_adv_by_std_in_grpo": "by std",
    "rollout_is": "",
    "rollout_is_threshold": "",
    "rollout_is_batch_normalize": "normalised",
    "rollout_rs": "",
    "rollout_rs_threshold": "",
    "loss_scale_factor": "length",
    "batch_num_tokens": "tokens",
    "global_batch_size": "rollouts",
    "loss_type": "",
    "policy_loss": "",
    "rollout_correction": "",
}
LEFT_OUT = ("epsilon", "kl_penalty", "logits")


def page() -> str:
    introduction = INTRODUCTION.format(version=recording()["verl"], **numbers())
    parts = ["\n\n".join(wrapped(text) for text in introduction.split("\n\n")) + "\n", what_differs()]
    parts += [section(title, *of) for title, of in SECTIONS.items()]
    return "\n".join([*parts, what_is_only_there()])


def numbers() -> dict[str, int]:
    verdicts = [verdicts_of(case)[0] for case in cases()]
    differ, only_there = (sum(bool(getattr(v, name)) for v in verdicts) for name in ("differs", "only_there"))
    return {
        "cases": len(verdicts),
        "agree": len(verdicts) - differ - only_there,
        "differ": differ,
        "only_there": only_there,
    }


def what_differs() -> str:
    rows = ([reason.short, reason.words] for reason in REASONS.values())
    return "## What differs\n\n" + table(["in short", "reason"], rows)


def what_is_only_there() -> str:
    kinds = dict.fromkeys(verdict.kind for verdict in NO_COUNTERPART)
    rows = ([kind.replace("_", " "), "; ".join(only_there(kind))] for kind in kinds)
    return "## Only in verl\n\n" + table(["kind", "what Headway has no counterpart of"], rows)


def only_there(kind: str) -> Iterator[str]:
    for verdict in NO_COUNTERPART:
        names = dict.fromkeys(case["name"] for case in cases() if verdict.kind == kind and verdict.covers(case))
        if names:
            yield f"{', '.join(f'`{name}`' for name in names)}: {verdict.only_there}"


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def section(title: str, kinds: tuple[str, ...], legend: str) -> str:
    head = ["function", "settings", "inputs", "verl", "Headway", ""]
    return f"## {title}\n\n{wrapped(legend)}\n\n" + table(head, (row(*group) for group in groups(kinds)))


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def groups(kinds: tuple[str, ...]) -> Iterator[tuple[list[Case], Verdict]]:
    """Cases with one function, setting and verdict, for inputs of several names; verdicts of one setting together."""
    found: dict[str, dict[str, tuple[list[Case], Verdict]]] = {}
    for case in cases():
        verdict = verdicts_of(case)[0]
        if case["kind"] in kinds and not verdict.only_there:
            of_setting = found.setdefault(json.dumps([case["kind"], case["name"], case["settings"]]), {})
            of_setting.setdefault(repr((verdict.differs, verdict.note)), ([], verdict))[0].append(case)
    for of_setting in found.values():
        yield from of_setting.values()


def row(of: list[Case], verdict: Verdict) -> list[str]:
    case = of[0]
    theirs, ours = recorded(case), headway(case)
    inputs = ", ".join(case["inputs"] for case in of if "inputs" in case)
    figures = FIGURES[case["kind"]]
    result = [differing(case, ours, theirs, verdict) if verdict.differs else "agrees"]
    result += [verdict.note] if verdict.note else []
    return [
        name_of(case),
        settings_of(case),
        inputs,
        figures(theirs),
        figures(ours),
        "; ".join(result),
    ]


def name_of(case: Case) -> str:
    if case["kind"] in ("reward", "statistics", "aggregation", "value_loss", "diagnostics"):
        return f"`{case['function']}`"
    kind = {"kl": "KL ", "weights": "weights ", "rejection": "rejection "}.get(case["kind"], "")
    return f"{kind}`{case['name'].removesuffix('_band')}`"


def settings_of(case: Case) -> str:
    in_name = ("rollout_is", "rollout_rs")  # at the top they are the case's name
    return ", ".join(written({key: value for key, value in case["settings"].items() if key not in in_name}))


def written(settings: dict[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield f"{SHORT.get(key, key)} {' '.join(written(value))}".strip()
        elif key not in LEFT_OUT and value is not None and value is not False and value != 1e9:
            short = SHORT.get(key, key)
            yield short if value is True else f"{short} {value}".strip()


def differing(case: Case, ours: Outputs, theirs: Outputs, verdict: Verdict) -> str:
    """The largest difference, relative to the largest number of its output."""
    names = disagreements(case, ours, theirs)
    largest = max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-300)) for name in names
    )
    by = f" by {largest:.0e}" if largest < 1e-4 else ""
    return f"differs{by}: " + ", ".join(REASONS[reason].short for reason in verdict.differs)


# ---- figures


def number(value: torch.Tensor) -> str:
    """Six digits of nine, so that two numbers equal to 1e-9 are written the same."""
    return f"{float(f'{float(value) + 0.0:.9g}'):.6g}"


def norms(*names: str, power: int = 2) -> Callable[[Outputs], str]:
    return lambda outputs: ", ".join(number(outputs[name].norm(power)) for name in names if name in outputs)


def loss_figures(outputs: Outputs) -> str:
    return f"{number(outputs['loss'])}, {number(outputs['gradient'].norm())}"


def measures(outputs: Outputs) -> str:
    return ", ".join(number(outputs[f"metrics/{name}"]) for name in ("kl", "k3_kl", "chi2_token", "chi2_seq"))


FIGURES: dict[str, Callable[[Outputs], str]] = {
    "reward": norms("rewards", power=1),
    "advantage": norms("advantages", "returns", power=1),
    "statistics": norms("value", power=1),
    "aggregation": loss_figures,
    "policy_loss": loss_figures,
    "value_loss": loss_figures,
    "kl": norms("value", "gradient"),
    "weights": norms("weights"),
    "rejection": lambda outputs: number(outputs["mask"].sum()),
    "diagnostics": measures,
}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len(page().splitlines())} lines")
