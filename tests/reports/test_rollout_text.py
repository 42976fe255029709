"""Coloured text: shades, titles, and nothing unescaped."""

from __future__ import annotations

import math

from headway.reports import rollout_text as text


def _rollout(**changes) -> dict:
    rollout = {
        "version": 3,
        "prompt": "1+1=",
        "text": "2",
        "reward": 1.0,
        "outcome": "scored",
        "finish": "stop",
        "pieces": ["2", "\n"],
        "log_ratios": [0.125, 0.0],
        "versions": [1, 2],
        "lag": 1,
    }
    return {**rollout, **changes}


def test_a_token_is_a_span_with_its_number_and_version() -> None:
    article = text.article(_rollout())
    assert '<span class="p10" title="log-ratio +0.125, version 1">2</span>' in article
    assert '<span class="" title="log-ratio +0, version 2">⏎\n</span>' in article
    assert "step 3 · " in article
    assert "reward 1</b> · finish stop · lag 1 · 2 tokens" in article


def test_shades_are_symmetric_and_saturate() -> None:
    assert [text.shade(value) for value in (0.5, -0.5, 9.0, -0.005, math.inf)] == [20, -20, 20, -2, 20]
    assert text.color_of(20) != text.color_of(-20)
    assert ".p20{" in text.shade_css()
    assert ".m1{" in text.shade_css()


def test_what_a_model_wrote_cannot_become_markup() -> None:
    attack = "</span></article><script>alert(1)</script><img src=x onerror=alert(1)>\" onmouseover='x"
    article = text.article(_rollout(prompt=attack, pieces=[attack], finish=attack, outcome=attack, reward=None))
    assert "<script" not in article
    assert "<img" not in article
    assert "onmouseover='x" not in article
    assert text.article(_rollout(pieces=[], text=attack)).count("<script") == 0
    assert "<b>" not in text.article(_rollout(version="<b>", lag="<b>", log_ratios=["<b>"], versions=["<b>"], reward=1))


def test_unscored_is_no_zero() -> None:
    assert "no reward: grader_error" in text.article(_rollout(reward=None, outcome="grader_error"))
    assert "reward 0</b>" in text.article(_rollout(reward=0.0))


def test_numbers_that_are_missing_leave_a_token_uncoloured() -> None:
    article = text.article(_rollout(pieces=["a", "b", "c"], log_ratios=[None, math.nan], versions=[1]))
    assert article.count('class="u"') == 3
    assert '<span class="u" title="no log-ratio, version unknown">c</span>' in article


def test_long_rollouts_and_prompts_are_cut_and_say_so() -> None:
    article = text.article(
        _rollout(pieces=["x"] * 5000, log_ratios=[0.1] * 5000, versions=[0] * 5000, prompt="p" * 9000)
    )
    assert article.count("<span") == text.MAX_TOKENS
    assert "the first 800 of 5,000 tokens" in article
    assert "(9,000 characters)" in article


def test_early_and_late_never_overlap() -> None:
    numbered = [{"version": number} for number in range(8)]
    early, late = text.early_and_late(numbered, 6)
    assert [row["version"] for row in early + late] == list(range(8))
    assert text.early_and_late(numbered[:3], 6) == (numbered[:3], [])
