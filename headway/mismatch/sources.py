"""The sources of mismatch: what each does otherwise than the trainer, how it is tried, and what cures it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from headway.mismatch.figures import measure
from headway.mismatch.laboratory import Laboratory, Sampled, Scored
from headway.mismatch.policies import in_bfloat16, own_copy, quantised, with_bfloat16_head
from headway.mismatch.setting import Setting
from headway.mismatch.states import compare, compare_logprobs
from headway.models.policy import Policy
from headway.reports.mismatch_table import ALL_GIVEN, CONTROL, Figures, Stage
from headway.types import UserError

Outcome = tuple[Figures, list[Stage]]


@dataclass(frozen=True)
class Attempt:
    """detail: how it is tried. In everything else engine and trainer are alike, down to the order of their sums."""

    name: str
    title: str
    cure: str
    run: Callable[[Laboratory], Outcome]
    detail: Callable[[Setting], str] = lambda setting: ""


def attempts(setting: Setting) -> list[Attempt]:
    """Those that are made, in their order."""
    chosen = [attempt for attempt in ATTEMPTS if attempt.name != "products" or "products" in setting.given]
    if len(setting.given - {"kernels", "batch", "stale"}) > 1:
        chosen.insert(1, EVERYTHING)
    return chosen


# ---- what is compared


def _outcome(sampled: Sampled, scored: Scored, *, same_support: bool = True) -> Outcome:
    """Of all tokens, and of all the first rollout's states but that of its last token, which predicts nothing."""
    figures = measure(sampled.logprobs, scored.logprobs, same_support=same_support)
    first = sampled.rollouts[0]
    stages = compare(sampled.states, scored.states, range(len(first.prompt.tokens) + len(first.tokens) - 1))
    return figures, [*stages, compare_logprobs(torch.tensor(first.logprobs), scored.logprobs[0])]


def _control(lab: Laboratory) -> Outcome:
    return _outcome(lab.control, lab.score(lab.fixed, lab.control.rollouts))


def _kernels(lab: Laboratory) -> Outcome:
    return _outcome(lab.together, lab.score(lab.close, lab.together.rollouts))


def _batch(lab: Laboratory) -> Outcome:
    """One at a time against all together: engine against engine, up to where their answers part."""
    alone = lab.sample_alone()
    pairs = list(zip(alone.rollouts, lab.together.rollouts, strict=False))
    alike = [_num_alike(ours.tokens, theirs.tokens) for ours, theirs in pairs]
    together = [theirs.logprobs[:num] for (_, theirs), num in zip(pairs, alike, strict=True)]
    again = [torch.tensor(ours.logprobs[:num]) for (ours, _), num in zip(pairs, alike, strict=True)]
    if not any(alike):
        raise UserError("the answers part at their first token")
    positions = range(len(pairs[0][0].prompt.tokens) + alike[0] - 1 if alike[0] else 0)
    stages = compare(lab.together.states, alone.states, positions)
    if alike[0]:
        stages.append(compare_logprobs(torch.tensor(together[0]), again[0]))
    return measure(together, again), stages


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    parted = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(parted, min(len(one), len(other)))


def _engine_with(change: Callable[[Policy], Policy]) -> Callable[[Laboratory], Outcome]:
    def run(lab: Laboratory) -> Outcome:
        sampled = lab.sample(change(lab.fixed))
        return _outcome(sampled, lab.score(lab.fixed, sampled.rollouts))

    return run


def _products(lab: Laboratory) -> Outcome:
    return _outcome(lab.control, lab.score(lab.fixed, lab.control.rollouts, as_configured=True))


def _quantised(lab: Laboratory) -> Outcome:
    return _engine_with(lambda policy: quantised(policy, lab.setting.quantize))(lab)


def _truncation(lab: Laboratory) -> Outcome:
    return _outcome(lab.truncated, lab.score(lab.fixed, lab.truncated.rollouts), same_support=False)


def _kept(lab: Laboratory) -> Outcome:
    return _outcome(lab.truncated, lab.score(lab.fixed, lab.truncated.rollouts, with_kept=True))


def _lag(lab: Laboratory) -> Outcome:
    sampled = lab.measured(lab.control)
    return _outcome(sampled, lab.score(lab.trained, sampled.rollouts))


def _stale(lab: Laboratory) -> Outcome:
    """Tokens that the new weights have sampled, on keys and values of the old ones."""
    num_before = max(1, len(lab.control.rollouts[0].tokens) // 2)
    sampled = lab.sample_across_an_update(own_copy(lab.fixed), lab.trained, num_before)
    scored = lab.score(lab.trained, sampled.rollouts)
    new = [[place for place, version in enumerate(one.versions) if version] for one in sampled.rollouts]
    new = [places if places and places[0] else [] for places in new]  # all of it is new: nothing in its cache is not
    if not any(new):
        raise UserError("the answers are too short to meet new weights")
    engine = [[one.logprobs[place] for place in places] for one, places in zip(sampled.rollouts, new, strict=True)]
    trainer = [logp_N[places] for logp_N, places in zip(scored.logprobs, new, strict=True)]
    stages = []
    if new[0]:
        last_of_prompt = len(sampled.rollouts[0].prompt.tokens) - 1
        stages = compare(sampled.states, scored.states, [last_of_prompt + place for place in new[0]])
        stages.append(compare_logprobs(torch.tensor(engine[0]), trainer[0]))
    return measure(engine, trainer), stages


def _everything(lab: Laboratory) -> Outcome:
    """All that the user's engine does at once, without updates in flight."""
    given = lab.setting.given
    engine = own_copy(lab.close if "kernels" in given else lab.fixed)
    trainer = lab.trained if "lag" in given else lab.fixed
    if "kernels" in given:
        trainer = replace(trainer, parity="close", head=replace(trainer.head, row_tile=1))
    if "quantize" in given:
        engine = quantised(engine, lab.setting.quantize)
    if "dtype" in given:
        engine = in_bfloat16(engine)
    if "head" in given:
        engine = with_bfloat16_head(engine)
    sampled = lab.sample(engine, truncated=lab.truncates)
    if "lag" in given:
        sampled = lab.measured(sampled)
    scored = lab.score(
        trainer, sampled.rollouts, with_kept="truncation" not in given, as_configured="products" in given
    )
    return _outcome(sampled, scored, same_support="truncation" not in given)


CORRECT = 'or weigh what is left: objective.corrections = ["tis"]'

EVERYTHING = Attempt(ALL_GIVEN, "all that your engine does", "", _everything)

ATTEMPTS = (
    Attempt(CONTROL, "nothing (control)", "", _control),
    Attempt("kernels", "kernel and tile shapes", 'model.parity = "bitwise"', _kernels),
    Attempt("batch", "batch composition", 'model.parity = "bitwise"', _batch, lambda _: "one at a time"),
    Attempt(
        "products",
        "trainer's products in bfloat16",
        f'train.compute_dtype = "float32", {CORRECT}',
        _products,
    ),
    Attempt(
        "dtype",
        "engine's weights",
        f'generate.dtype = "float32", {CORRECT}',
        _engine_with(in_bfloat16),
        lambda setting: setting.dtype,
    ),
    Attempt(
        "head",
        "engine's LM head",
        "multiply the LM head in float32 on both sides, as Headway's engine does",
        _engine_with(with_bfloat16_head),
        lambda setting: setting.head,
    ),
    Attempt(
        "quantize",
        "quantised weights",
        f"sample from weights that are not quantised, {CORRECT}",
        _quantised,
        lambda setting: setting.quantize,
    ),
    Attempt(
        "truncation",
        "truncated sampling",
        "record which tokens were kept and score under them, as Headway's engine does, or sample from all: top_p = 1",
        _truncation,
        lambda setting: setting.truncation,
    ),
    Attempt("kept", "the same, kept set recorded", "", _kept),
    Attempt(
        "lag",
        "version lag",
        f"a lower schedule.run_ahead or train.learning_rate, {CORRECT}",
        _lag,
        lambda setting: f"{setting.version_lag} train step{'s' if setting.version_lag > 1 else ''}",
    ),
    Attempt("stale", "stale cache after an update", 'schedule.in_flight = "recompute"', _stale),
)


def describe(attempt: Attempt, setting: Setting) -> str:
    detail = attempt.detail(setting)
    return f"{attempt.title} ({detail})" if detail else attempt.title
