"""The page as a whole: one file that stays right whatever is missing, hostile or long."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from headway.reports import figures
from headway.reports.page import json_in_html, outcome, page, write_page
from headway.reports.record import read_run
from headway.trace import Event

REPORTED = {
    "reward_mean": 0.5,
    "reward_std": 0.2,
    "response_tokens_mean": 12.0,
    "response_tokens_max": 30,
    "truncated_share": 0.1,
    "trained_tokens": 100,
    "loss": 0.1,
    "grad_norm": 1.0,
    "learning_rate": 1e-5,
    "mismatch_kl_k1": 0.0,
    "mismatch_kl_k3": 0.0,
    "mismatch_kl_k3/lag_0": 0.0,
    "mismatch_kl_k3/lag_1": 1e-4,
    "ess_share": 0.9,
    "weight_capped_share": 0.0,
    **{f"ratio_q{q}": 1.0 for q in ("01", "05", "25", "50", "75", "95", "99")},
    "ratio_min": 0.5,
    "ratio_max": 2.0,
}


class _Elements(HTMLParser):
    """Tags with their attributes, the plain text, and what stands in each script."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data


@pytest.fixture(autouse=True)
def small_library(monkeypatch) -> None:
    """The drawing library is 5 MB that no test here needs to parse."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* library */")


def _with_metrics(events: list[Event], **metrics: float) -> list[Event]:
    return [
        Event(event.kind, event.at_s, {**event.fields, "metrics": metrics}) if event.kind == "trained" else event
        for event in events
    ]


def _figures(document: str) -> dict:
    return json.loads(_Elements(document).scripts[0])


def test_a_whole_run_has_every_figure(simulated, write_run) -> None:
    run = read_run(write_run(_with_metrics(simulated(), **REPORTED)))
    names = {name.removeprefix("figure-") for name in _figures(page(run))}
    assert names == {
        *("reward", "length", "optimizer", "lag", "mismatch", "ratios", "correction"),
        *("timeline", "utilization", "throughput"),
    }


@pytest.mark.parametrize("missing", [*REPORTED, None])
def test_any_metric_may_be_missing(simulated, write_run, missing: str | None) -> None:
    metrics = {name: value for name, value in REPORTED.items() if name != missing and missing is not None}
    assert "<h1>a-run</h1>" in page(read_run(write_run(_with_metrics(simulated(), **metrics))))


def test_what_was_not_recorded_is_named(simulated, write_run) -> None:
    text = _Elements(page(read_run(write_run(simulated())))).text
    assert "Not recorded in this run: sampler-trainer mismatch, probability ratios, importance weights." in text
    assert "no reward was recorded" in text


def test_exact_zeros_are_drawn_on_the_log_axis_as_marks(simulated, write_run) -> None:
    drawn = _figures(page(read_run(write_run(_with_metrics(simulated(), **REPORTED)))))["figure-mismatch"]
    traces = {trace["name"]: trace["y"] for trace in drawn["data"]}
    assert traces["k3, lag 1"] == [1e-4, 1e-4]
    assert traces["k3: exactly 0"] == pytest.approx([1e-5, 1e-5])
    assert "k3" not in traces


def test_utilisation_of_the_hand_sized_example(simulated, write_run) -> None:
    drawn = figures.utilization(read_run(write_run(simulated())))
    assert drawn is not None
    lanes, trainer = drawn.data
    assert list(lanes.y) == [1.0, 1.0]
    assert list(trainer.y) == pytest.approx([1 / 3, 1.0], abs=1e-6)


def test_the_std_band_ends_at_the_rewards_that_were_given(write_run, make) -> None:
    scored = [Event("scored", 0.5, {"rollout": n, "group": n, "outcome": "scored", "reward": float(n)}) for n in (0, 1)]
    events = [make.began(0), *scored, *make.step(1.0, 2.0, 0, [0, 0], reward_mean=0.2, reward_std=0.4)]
    drawn = figures.reward(read_run(write_run(events)))
    assert drawn is not None
    assert list(drawn.data[0].y) == pytest.approx([0.6, 0.0])


def test_the_outcome_in_words(write_run, make) -> None:
    events = [
        make.began(0),
        make.evaluated(0.5, 0, 8, 10),
        Event("generated", 1.0, {"rollout": 0, "lane": 0, "tokens": 90}),
        *make.step(1.0, 2.0, 0, [0, 0], reward_mean=0.25),
        *make.step(3.0, 4.0, 1, [0, 0], reward_mean=0.75),
        make.evaluated(4.5, 2, 10, 10),
        Event("ended", 4.5, {"reason": "steps done"}),
    ]
    events.insert(2, Event("started", 0.5, {"rollout": 0, "group": 0, "lane": 0, "version": 0, "evaluation": False}))
    assert outcome(read_run(write_run(events))) == (
        "In 2 train steps and 4.5 s (20 tokens per second), the sampled reward went from 0.25 to 0.75, and greedy "
        "accuracy on held-out prompts went from 80.0 % to 100.0 % (95 % intervals 49.0–94.3 % and 72.2–100.0 %)."
    )


def test_a_killed_run_says_so(simulated, write_run) -> None:
    text = _Elements(page(read_run(write_run(simulated()[:-1])))).text
    assert "This run has not ended" in text
    assert "This run has not ended" not in _Elements(page(read_run(write_run(simulated(), name="whole")))).text


def test_a_run_without_a_train_step_has_a_page(write_run, make) -> None:
    text = _Elements(page(read_run(write_run([make.began(0)])))).text
    assert "No train step has ended yet" in text
    assert "0 of 2" in text


def test_a_resumed_run_says_so_and_counts_its_steps_once(resumed, write_run) -> None:
    text = _Elements(page(read_run(write_run(resumed)))).text
    assert "The run was resumed once, from version 1." in text
    assert "In 2 train steps and 8 s" in text
    assert "from 0.1 to 0.3" in text


def test_hostile_text_stays_text(simulated, write_run) -> None:
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&lt;\u2028"
    rollout = {"version": 1, "prompt": attack, "text": attack, "pieces": [attack, "\ud800"], "outcome": attack}
    words = ("--run.name", attack, "--model.path", attack, "--data.source", attack)
    folder = write_run(simulated(), rollouts=[rollout], words=words)
    (folder / "run.json").write_text(json.dumps({attack: attack}))
    document = write_page(folder).read_text(encoding="utf-8")
    elements = _Elements(document)
    assert [tag for tag, _ in elements.tags].count("script") == 3
    assert "img" not in [tag for tag, _ in elements.tags]
    assert not [name for _, attributes in elements.tags for name in attributes if name.startswith("on")]
    assert attack in elements.text


def test_json_in_html_cannot_end_its_script() -> None:
    attack = {"</script>": "<!-- <script> ]]> &amp;"}
    text = json_in_html(attack)
    assert not set("<>&") & set(text)
    assert json.loads(text) == attack


def test_only_the_page_s_own_scripts_may_run_and_nothing_is_fetched(simulated, write_run) -> None:
    document = write_page(write_run(simulated())).read_text(encoding="utf-8")
    elements = _Elements(document)
    policy = next(str(attributes["content"]) for tag, attributes in elements.tags if "http-equiv" in attributes)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in elements.scripts[1:]]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert policy.startswith("default-src 'none'")
    assert not [tag for tag, attributes in elements.tags if {"src", "href"} & attributes.keys()]


def test_a_long_run_makes_a_bounded_page(simulated, write_run) -> None:
    words = ("--lanes", "48", "--batch-size", "8", "--steps", "1200", "--sync-time", "0.1")
    rollouts = [{"version": 1 + n, "pieces": ["word "] * 3000, "log_ratios": [0.1] * 3000} for n in range(50)]
    run = read_run(write_run(_with_metrics(simulated(*words), **REPORTED), words=words, rollouts=rollouts))
    document = page(run)
    assert len(document) < 3_000_000
    assert "Each point joins 2 neighbouring steps." in document
    assert "12 of 50 kept rollouts are shown." in document


def test_reports_import_nothing_heavy() -> None:
    modules = "page, progress, figures, gantt, summary, metrics, text_timeline"
    heavy = "{'torch', 'transformers', 'numpy', 'pandas'}"
    code = f"import sys; from headway.reports import {modules}; print({heavy} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "set()"
