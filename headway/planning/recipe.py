"""A plan as a recipe: for `headway simulate` at the predicted times, and as a start for a run of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit

from headway.plan.here import HerePlan, Schedule
from headway.plan.proposal import Candidate, Request
from headway.planning.candidates import sync_bytes
from headway.planning.choose import STEPS, settings_of

TO_TRAIN_IT = "To train it, say what on: [data] source, [score] scorer, [train] learning_rate."


def of_candidate(request: Request, candidate: Candidate) -> str:
    """Settings that the plan does not speak of stay as its recipe has them."""
    values = {"model.path": request.model, **settings_of(request, candidate)}
    values |= {"generate.max_new_tokens": int(request.longest)}
    values |= {"prepare.micro_batch_tokens": int(candidate.layout.placed.job.micro_batch_tokens)}
    if request.lora_rank is not None:
        values |= {"adapter.kind": "lora", "adapter.rank": request.lora_rank}
    if request.recipe is None:
        values = {"run.steps": STEPS, **_objective(request), **values}
    said = [
        f"Planned for {request.hardware.num} x {request.hardware.gpu.title}:",
        f"{candidate.layout.name}; {sync_bytes(request) / 1e9:.3g} GB of new weights a step.",
        "The times in [simulate] are predicted, in seconds.",
        *([] if request.recipe else [TO_TRAIN_IT]),
    ]
    return _written(request.recipe, {**request.settings, **values}, said)


def of_process(plan: HerePlan, schedule: Schedule) -> str:
    """With one of the schedules of a plan in one process."""
    pace = plan.pace
    assert pace is not None, "without a pace no schedule was simulated"
    values = {**plan.settings, **plan.simulation, "schedule.run_ahead": schedule.run_ahead}
    said = [f"Planned at the pace of {pace.source}: the times in [simulate] are predicted, in seconds."]
    return _written(plan.recipe, values, said)


def _objective(request: Request) -> dict[str, Any]:
    """As the algorithm was asked for; without a KL term unless that was too."""
    if request.algorithm == "ppo":
        return {"objective.name": "ppo"}
    return {"objective.name": "grpo", **({} if request.models.reference else {"objective.kl_coefficient": 0})}


def _written(recipe: Path | None, values: Mapping[str, Any], said: Sequence[str]) -> str:
    document = tomlkit.parse(recipe.read_text(encoding="utf-8")) if recipe else tomlkit.document()
    document.get("run", {}).pop("out", None)  # the folder of a run that is there already
    for key, value in values.items():
        section, name = key.split(".")
        document.setdefault(section, tomlkit.table())[name] = value
    for line in said:
        document.add(tomlkit.comment(line))
    return tomlkit.dumps(document)
