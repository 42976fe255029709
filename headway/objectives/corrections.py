"""Corrections for the gap between the policy that sampled and the one that is trained: modifiers of any objective.

Free of torch. `headway.objectives.weights` has the functions.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from headway.objectives.parts import MISMATCH, WHOLE, Act, Objective, RatioLevel, Weight, check_name

YAO = "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
LIU = "Liu, Li et al. 2025, When Speed Kills Stability"


def _on_mismatch(
    name: str, act: Act, source: str, *, level: RatioLevel = "token", low: float = 0.0, high: float = inf
) -> Weight:
    return Weight(name=name, ratio=replace(MISMATCH, level=level), act=act, low=low, high=high, source=source)


CORRECTIONS: dict[str, tuple[Weight, ...]] = {
    "is": (_on_mismatch("is", "truncate", "importance sampling per token, without a bound"),),
    "tis": (_on_mismatch("tis", "truncate", f"{YAO} (token-level TIS), C = 2", high=2.0),),
    "clamped_is": (_on_mismatch("clamped_is", "truncate", "OpenRLHF, vllm_is_correction `tis`", low=0.5, high=5.0),),
    "sequence_is": (_on_mismatch("sequence_is", "truncate", "importance sampling of whole answers", level="sequence"),),
    "sequence_tis": (_on_mismatch("sequence_tis", "truncate", f"{LIU} (Seq-TIS)", level="sequence", high=2.0),),
    "mis": (_on_mismatch("mis", "mask", f"{LIU} (token-level MIS)", high=2.0),),
    "sequence_mis": (_on_mismatch("sequence_mis", "mask", f"{LIU} (Seq-MIS)", level="sequence", high=2.0),),
    "icepop": (_on_mismatch("icepop", "mask", "Ring-1T, arXiv 2510.18855 (IcePop)", low=0.5, high=5.0),),
    "icepop_glm5": (_on_mismatch("icepop_glm5", "mask", "GLM-5, arXiv 2602.15763, section 3", low=0.5, high=2.0),),
    "geometric_rejection": (
        _on_mismatch(
            "geometric_rejection",
            "keep",
            f"{LIU} (Geo-RS); verl has these bounds, on 1/w",
            level="geometric",
            low=0.999,
            high=1.001,
        ),
    ),
    "geometric_rejection_is": (
        _on_mismatch(
            "geometric_rejection", "keep", "NeMo-RL, OpenRLHF `seq-mask-tis`", level="geometric", low=0.999, high=1.002
        ),
        _on_mismatch("is", "truncate", "NeMo-RL, OpenRLHF `seq-mask-tis`: token weights without a bound"),
    ),
    "k3_rejection": (_on_mismatch("k3_rejection", "keep_k3", f"{LIU} (K3-RS)", high=0.01),),
    "veto": (_on_mismatch("veto", "veto", f"{LIU} (veto)", low=1e-4),),
    "off_policy_mask": (
        Weight(
            name="off_policy_mask",
            ratio=WHOLE,
            act="off_policy_mask",
            high=1e-4,
            source="DeepSeek-V3.2, arXiv 2512.02556, section 3.1; its bound is not given, this one is slime's",
        ),
    ),
}
"""Name -> weights that any objective's policy terms can be multiplied by; `tis:5` or `icepop:0.5:4` sets the bounds."""


def correction(written: str) -> tuple[Weight, ...]:
    """`tis`, `tis:5` (its bound) or `icepop:0.5:4` (lower and upper bound) -> weights. Raises ValueError."""
    name, *bounds = written.split(":")
    check_name("correction", name, CORRECTIONS)
    first, *rest = CORRECTIONS[name]
    try:
        numbers = [float(bound) for bound in bounds]
    except ValueError:
        raise ValueError(f"correction {written!r}: the bounds after the colon must be numbers, as in tis:2") from None
    if not numbers:
        return (first, *rest)
    settable = [key for key, none in (("low", 0.0), ("high", inf)) if getattr(first, key) != none]
    if len(numbers) != len(settable):
        takes = f"{len(settable)} bound{'' if len(settable) == 1 else 's'}" if settable else "no bound"
        raise ValueError(f"correction {written!r}: {name} takes {takes} ({', '.join(settable) or 'none is set'})")
    return (replace(first, **dict(zip(settable, numbers, strict=True))), *rest)


def corrected(chosen: Objective, written: str) -> Objective:
    """`chosen` with a correction on its policy terms. Raises ValueError."""
    weights = correction(written)
    if not any(term.uses_advantage for term in chosen.terms):
        raise ValueError(
            f"{chosen.name} has no importance ratio that {written} could correct: set objective.corrections to []"
        )
    terms = tuple(
        replace(term, weights=(*term.weights, *weights)) if term.uses_advantage else term for term in chosen.terms
    )
    return replace(chosen, terms=terms, corrections=(*chosen.corrections, written))
