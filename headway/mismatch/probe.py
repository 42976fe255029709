"""`headway mismatch`: all sources one after the other."""

from __future__ import annotations

from collections.abc import Callable

from headway.mismatch.laboratory import Laboratory, load
from headway.mismatch.setting import Request
from headway.mismatch.sources import Attempt, attempts, describe
from headway.reports.mismatch_table import CONTROL, Probe, Source
from headway.types import UserError


def probe(request: Request, say: Callable[[str, int, int], object]) -> Probe:
    """say: told what is done next, how much was done before it, and how much there is. Raises UserError for what the
    user can mend.
    """
    tried = attempts(request.setting)
    say("loading the model", 0, len(tried))
    laboratory = Laboratory(load(request))
    sources = []
    for attempt in tried:
        say(describe(attempt, request.setting), len(sources), len(tried))
        sources.append(_tried(attempt, laboratory))
    return Probe(_asked(request, laboratory), sources)


def _tried(attempt: Attempt, laboratory: Laboratory) -> Source:
    setting = laboratory.setting
    facts = {
        "name": attempt.name,
        "title": attempt.title,
        "detail": attempt.detail(setting),
        "given": attempt.name in setting.given,
        "cure": attempt.cure,
    }
    try:
        figures, stages = attempt.run(laboratory)
    except UserError as error:
        if attempt.name == CONTROL:  # nothing can be measured
            raise
        return Source(**facts, why_not=str(error))
    return Source(**facts, figures=figures, stages=stages)


def _asked(request: Request, laboratory: Laboratory) -> str:
    generate, train = request.config.generate, request.config.train
    whose = request.path
    if request.run:
        version = request.checkpoint.progress["version"] if request.checkpoint else 0
        whose = f"{request.run}, version {version}"
    return (
        f"{whose}: {laboratory.num_answers} answers of at most {generate.max_new_tokens} tokens to "
        f"{laboratory.num_prompts} prompts, temperature {generate.temperature:g}; learning rate {train.learning_rate:g}"
    )
