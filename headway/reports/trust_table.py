"""The mismatch in numbers on a run's page: what can be read at a glance, and all buckets in a table."""

from __future__ import annotations

import html
from collections.abc import Sequence

from headway.reports.outcome import last_steps
from headway.reports.record import Row, RunRecord
from headway.reports.trust_figures import acted_reasons
from headway.reports.trust_numbers import SOURCE_NAMES, Bucket, lag_buckets, mean_over_tokens, position_buckets
from headway.reports.wording import percent

COLUMNS = (
    ("tokens", "share of tokens"),
    ("mismatch_kl_k1", "KL(mu, pi), k1"),
    ("mismatch_kl_k3", "KL(mu, pi), k3"),
    ("mismatch_reverse_kl_k3", "KL(pi, mu), k3"),
    ("ess_share", "effective size"),
    ("chi2_token", "chi^2"),
    ("entropy", "entropy"),
)


def glance(run: RunRecord) -> str:
    """The newest figures, a line for each question; "" where nothing was measured."""
    last = run.steps[-last_steps(run) :]
    answers = [
        ("How much", [("mismatch KL (k3)", _figure_or_none(mean_over_tokens(last, "mismatch_kl_k3")))]),
        ("Where from", _sources(last)),
        ("Cut or masked", _corrections(last)),
        ("What it costs", _cost(last)),
        ("Entropy", _entropy(run, last)),
    ]
    lines = "".join(_line(question, [pair for pair in pairs if pair[1]]) for question, pairs in answers)
    if not lines:
        return ""
    over = f"the last {len(last)} train steps" if len(last) > 1 else "the last train step"
    return (
        f'<p class="over">At a glance: means over the trained tokens of {over} (of canaries and whole answers, over '
        "those).</p>"
        f'<table class="glance">{lines}</table>'
    )


def _line(question: str, pairs: Sequence[Pair]) -> str:
    if not pairs:
        return ""
    shown = "".join(f"<span>{html.escape(label)} <b>{html.escape(value)}</b></span>" for label, value in pairs)
    return f"<tr><td>{html.escape(question)}</td><td>{shown}</td></tr>"


Pair = tuple[str, str]
"""What was measured, and its figure; "" where it was not."""


def _sources(last: Sequence[Row]) -> list[Pair]:
    measured = [("numerics, by canaries", _plain_mean(last, "canary_kl_k3"))]
    measured += [(label, mean_over_tokens(last, "mismatch_kl_k3", name)) for name, label in SOURCE_NAMES.items()]
    return [(label, _figure_or_none(value)) for label, value in measured]


def _corrections(last: Sequence[Row]) -> list[Pair]:
    shares = [(reason, mean_over_tokens(last, f"acted_share/{reason}")) for reason in acted_reasons(last)]
    return [(reason, percent(share)) for reason, share in shares if share is not None]


def _cost(last: Sequence[Row]) -> list[Pair]:
    size, token = mean_over_tokens(last, "ess_share"), mean_over_tokens(last, "chi2_token")
    answer = _plain_mean(last, "chi2_sequence")
    return [
        ("effective sample size", "" if size is None else percent(size)),
        ("variance, by weights of tokens", "" if token is None else f"× {1 + token:.3g}"),
        ("of whole answers", "" if answer is None else f"× {1 + answer:.3g}"),
    ]


def _entropy(run: RunRecord, last: Sequence[Row]) -> list[Pair]:
    first, now = mean_over_tokens(run.steps[:1], "entropy"), mean_over_tokens(last, "entropy")
    return [
        ("first step", "" if first is None else f"{first:.2g}"),
        ("now", "" if now is None else f"{now:.2g} nats"),
    ]


def _plain_mean(steps: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in steps if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def _figure_or_none(value: float | None) -> str:
    return "" if value is None else figure(value)


def figure(value: float) -> str:
    """A divergence as people read it.

    >>> figure(0.00234), figure(3.2e-13), figure(0.0)
    ('0.0023', '3.2e-13', '0')
    """
    return "0" if value == 0 else f"{value:.2g}" if abs(value) >= 1e-3 else f"{value:.1e}".replace("e-0", "e-")


# ---- the table


def table(run: RunRecord) -> str:
    """Every bucket of tokens with its metrics over the whole run, to be unfolded; "" where nothing was measured."""
    if mean_over_tokens(run.steps, "mismatch_kl_k3") is None:
        return ""
    reasons = [(f"acted_share/{reason}", f"cut or masked: {reason}") for reason in acted_reasons(run.steps)]
    columns = [
        column
        for column in (*COLUMNS, *reasons)
        if column[0] == "tokens" or mean_over_tokens(run.steps, column[0]) is not None
    ]
    head = "".join(f"<th>{html.escape(label)}</th>" for _, label in columns)
    body = "".join(_table_row(run.steps, label, bucket, columns) for label, bucket in _buckets(run.steps))
    return (
        "<details><summary>All of it in numbers, by source, lag and position</summary>"
        "<p>Means over the tokens of each row in all train steps.</p>"
        f'<div class="wide"><table class="numbers"><tr><th></th>{head}</tr>{body}</table></div></details>'
    )


def _buckets(steps: Sequence[Row]) -> list[tuple[str, str]]:
    """Label and suffix of each row of the table."""

    def named(buckets: Sequence[Bucket], kind: str) -> list[tuple[str, str]]:
        return [(f"{kind} {bucket.label}", bucket.name) for bucket in buckets]

    sources = [(label, name) for name, label in SOURCE_NAMES.items() if any(row.get(f"tokens/{name}") for row in steps)]
    return [
        ("all trained tokens", ""),
        *sources,
        *named(lag_buckets(steps), "lag"),
        *named(position_buckets(steps), "position"),
    ]


def _table_row(steps: Sequence[Row], label: str, bucket: str, columns: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<td>{html.escape(_cell(steps, metric, bucket))}</td>" for metric, _ in columns)
    return f"<tr><td>{html.escape(label)}</td>{cells}</tr>"


def _cell(steps: Sequence[Row], metric: str, bucket: str) -> str:
    if metric == "tokens":
        total = sum(row.get("tokens") or 0.0 for row in steps)
        own = sum(row.get(f"tokens/{bucket}" if bucket else "tokens") or 0.0 for row in steps)
        return percent(own / total) if total else ""
    value = mean_over_tokens(steps, metric, bucket)
    if value is None:
        return ""
    return percent(value) if metric.startswith(("ess_share", "acted_share")) else figure(value)
