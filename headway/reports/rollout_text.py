"""Rollouts as coloured text: each token on a background that says how far the trainer and the sampler disagree.

What a model wrote is hostile: nothing of a rollout reaches the page unescaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from headway.reports.metrics import is_number

MAX_TOKENS = 800
"""Tokens of one rollout that are shown."""

MAX_PROMPT_CHARACTERS = 1500
NUM_SHOWN = 6
"""Rollouts shown of the beginning of the run, and of its end."""

SATURATED = 0.5
"""|log ratio| of the strongest colour: a ratio of 1.65 or 0.61."""

NUM_SHADES = 20
ABOVE, BELOW = (214, 96, 77), (67, 126, 196)


def shade(log_ratio: float) -> int:
    """-NUM_SHADES ... NUM_SHADES, by the square root of the log-ratio, so that small disagreements are seen.

    >>> shade(0.0), shade(0.125), shade(-0.5), shade(3.0)
    (0, 10, -20, 20)
    """
    strength = math.sqrt(min(abs(log_ratio) / SATURATED, 1.0))
    return round(math.copysign(strength * NUM_SHADES, log_ratio))


def color_of(step: int) -> str:
    """The background of a shade: white at 0, red where the trainer finds the token likelier, blue where less likely."""
    target = ABOVE if step > 0 else BELOW
    weight = abs(step) / NUM_SHADES * 0.85
    return "#" + "".join(f"{round(255 + (end - 255) * weight):02x}" for end in target)


def shade_css() -> str:
    """One class per shade: .p1 ... above, .m1 ... below."""
    return "\n".join(
        f".{sign}{step}{{background:{color_of(number * step)}}}"
        for sign, number in (("p", 1), ("m", -1))
        for step in range(1, NUM_SHADES + 1)
    )


def legend() -> str:
    """The scale, as a bar with its values."""
    ticks = (-0.5, -0.1, -0.01, 0.0, 0.01, 0.1, 0.5)
    boxes = "".join(f'<span class="swatch {_class(value)}">{value:+g}</span>' for value in ticks if value)
    first, last = boxes[: len(boxes) // 2], boxes[len(boxes) // 2 :]
    return (
        '<div class="scale"><span>less likely for the trainer</span>'
        f'{first}<span class="swatch">0</span>{last}<span>more likely for the trainer</span></div>'
    )


def _class(log_ratio: float) -> str:
    """The CSS class of a log-ratio's shade; none for white."""
    step = shade(log_ratio)
    return f"p{step}" if step > 0 else f"m{-step}" if step < 0 else ""


def early_and_late(rollouts: Sequence[dict[str, Any]], num: int = NUM_SHOWN) -> tuple[list[Any], list[Any]]:
    """Up to `num` of the first and `num` of the last rollouts, none in both."""
    if len(rollouts) <= num:
        return list(rollouts), []
    return list(rollouts[:num]), list(rollouts[max(num, len(rollouts) - num) :])


def article(rollout: dict[str, Any]) -> str:
    """One rollout: what is known of it, its prompt, and its tokens."""
    prompt = _text(rollout.get("prompt"))
    cut = f" … ({len(prompt):,} characters)" if len(prompt) > MAX_PROMPT_CHARACTERS else ""
    return (
        f'<article class="rollout"><header>{_facts(rollout)}</header>'
        f'<div class="prompt">{html.escape(prompt[:MAX_PROMPT_CHARACTERS])}{cut}</div>'
        f'<div class="answer">{_tokens(rollout)}</div></article>'
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _facts(rollout: dict[str, Any]) -> str:
    reward, outcome = rollout.get("reward"), _text(rollout.get("outcome"))
    facts = [f"step {_number(rollout.get('version'))}"]
    if is_number(reward):
        tone = "good" if reward > 0 else "bad"
        facts.append(f'<b class="{tone}">reward {reward:g}</b>')
    else:
        facts.append(f'<b class="unscored">no reward: {html.escape(outcome or "unscored")}</b>')
    facts.append(f"finish {html.escape(_text(rollout.get('finish')) or 'unknown')}")
    facts.append(f"lag {_number(rollout.get('lag'))}")
    facts.append(f"{len(_list(rollout.get('pieces')))} tokens")
    return " · ".join(facts)


def _number(value: Any) -> str:
    return f"{value:g}" if is_number(value) else "unknown"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _tokens(rollout: dict[str, Any]) -> str:
    pieces = _list(rollout.get("pieces"))
    if not pieces:
        return html.escape(_text(rollout.get("text")))
    shown = pieces[:MAX_TOKENS]
    log_ratios = _list(rollout.get("log_ratios"))[: len(shown)]
    versions = _list(rollout.get("versions"))[: len(shown)]
    spans = [_token(*token) for token in zip_longest(shown, log_ratios, versions)]
    if len(pieces) > MAX_TOKENS:
        spans.append(f'<i class="cut"> … the first {MAX_TOKENS} of {len(pieces):,} tokens</i>')
    return "".join(spans)


def _token(piece: Any, log_ratio: Any, version: Any) -> str:
    css, said = (_class(log_ratio), f"log-ratio {log_ratio:+.3g}") if is_number(log_ratio) else ("u", "no log-ratio")
    text = html.escape(_text(piece)).replace("\n", "⏎\n")
    return f'<span class="{css}" title="{said}, version {_number(version)}">{text}</span>'
