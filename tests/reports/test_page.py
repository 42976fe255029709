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
from headway.reports.document import json_in_html
from headway.reports.page import outcome, page, write_page
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
    "num_rollouts": 2,
    "zero_variance_groups": 1,
    "dropped_rollouts/unscored": 1,
    "reference_kl_k1": 0.01,
    "reference_kl_k3": 0.01,
    "value_loss": 0.2,
    "value_explained_variance": 0.5,
    "critic_grad_norm": 1.0,
    "tokens": 100.0,
    "tokens/numerics": 40.0,
    "tokens/stale_cache": 10.0,
    "tokens/staleness": 50.0,
    "tokens/lag_0": 50.0,
    "tokens/lag_1": 50.0,
    "tokens/position_0_15": 60.0,
    "tokens/position_16_31": 40.0,
    "mismatch_kl_k1": 0.0,
    "mismatch_kl_k3": 1e-4,
    "mismatch_kl_k3/numerics": 0.0,
    "mismatch_kl_k3/stale_cache": 1e-5,
    "mismatch_kl_k3/staleness": 2e-4,
    "mismatch_kl_k3/lag_0": 0.0,
    "mismatch_kl_k3/lag_1": 2e-4,
    "mismatch_kl_k3/position_0_15": 1e-4,
    "mismatch_kl_k3/position_16_31": 1e-4,
    "mismatch_reverse_kl_k1": 0.0,
    "mismatch_reverse_kl_k3": 1e-4,
    "canary_kl_k1": 0.0,
    "canary_kl_k3": 1e-9,
    "ess_share": 0.9,
    "chi2_token": 0.1,
    "chi2_sequence": 0.4,
    "entropy": 0.5,
    "acted_share/tis": 0.1,
    "acted_share/tis/positive": 0.2,
    "acted_share/tis/negative": 0.0,
    "acted_share/tis/lag_1": 0.2,
    "interpolation_error_mean": 0.01,
    "interpolation_error_max": 0.1,
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
        *("reward", "length", "signal", "optimizer", "critic", "reference"),
        *("mismatch", "buckets", "correction", "cost", "entropy", "ratios", "estimates", "interpolation", "lag"),
        *("lengths", "fates"),
        *("timeline", "utilization", "throughput"),
    }


FAMILIES = sorted({re.split("/|_q[0-9]", name)[0] for name in REPORTED})


@pytest.mark.parametrize("missing", [*FAMILIES, "/", ""])
def test_any_metric_may_be_missing(simulated, write_run, missing: str) -> None:
    """With its buckets; or all buckets (as in older runs), or all there are."""
    metrics = {name: value for name, value in REPORTED.items() if not name.startswith(missing)}
    if missing == "/":
        metrics = {name: value for name, value in REPORTED.items() if "/" not in name}
    assert "<h1>a-run</h1>" in page(read_run(write_run(_with_metrics(simulated(), **metrics))))


def test_what_was_not_recorded_is_named(simulated, write_run) -> None:
    text = _Elements(page(read_run(write_run(simulated())))).text
    assert "Nothing to show in this run: reward; response length; what could not teach; optimizer; critic;" in text
    assert "Nothing to show in this run: mismatch: how much, and where it comes from;" in text
    assert "At a glance" not in text
    assert "All of it in numbers" not in text
    assert "no reward was recorded" in text


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
    who = {"rollout": 0, "group": 0, "member": 0, "lane": 0, "version": 0, "evaluation": False}
    events.insert(2, Event("started", 0.5, who))
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


UNSOUND = "the data are older than the weights <b>"


def test_an_unsound_run_says_so_above_all_else_even_when_a_later_part_of_it_was_sound(write_run, make) -> None:
    parts = [[make.began(0, unsound=[UNSOUND]), *make.step(1.0, 2.0, 0, [0, 0])], [make.began(1, unsound=[])]]
    document = page(read_run(write_run([event for part in parts for event in part])))
    elements = _Elements(document)
    assert "<title>unsound: a-run" in document
    assert UNSOUND in elements.text
    assert elements.text.index("Unsound.") < elements.text.index("A Headway run")
    assert "Unsound." not in _Elements(page(read_run(write_run([make.began(0)], name="sound")))).text


def test_the_page_says_what_was_trained(write_run, make) -> None:
    words = "grpo\n    A paper, section 4\nmaximises\n    mean of  <A> log pi\n        where A is\n"
    document = page(read_run(write_run([make.began(0)], objective=words)))
    assert "<summary>What was trained: grpo, its formula and what it needs</summary>" in document
    assert "<p>A paper, section 4</p><h4>maximises</h4>" in document
    assert '<div style="margin-left:0ch">mean of  &lt;A&gt; log pi</div>' in document
    assert '<div style="margin-left:4ch">where A is</div>' in document
    assert "What was trained" not in page(read_run(write_run([make.began(0)], name="older")))


def test_alarms_stand_on_the_page(write_run, make) -> None:
    steps = [event for n in range(4) for event in make.step(n + 0.5, n + 1.0, n, [0, 0], truncated_share=0.97)]
    text = _Elements(page(read_run(write_run([make.began(0), *steps])))).text
    assert "Warning: the token budget cut off 97.0\N{NO-BREAK SPACE}% of the answers" in text
    assert "(4 of 4 train steps, the last in steps 1 to 4)" in text


def test_the_mismatch_at_a_glance_and_in_numbers(simulated, write_run) -> None:
    text = _Elements(page(read_run(write_run(_with_metrics(simulated(), **REPORTED))))).text
    assert "mismatch KL (k3) 1.0e-4" in text
    assert "numerics, by canaries 1.0e-9numerics, newest version alone 0stale cache 1.0e-5" in text
    assert "tis 10.0 %" in text
    assert "effective sample size 90.0 %" in text
    assert "of whole answers × 1.4" in text
    assert "position 16–3140.0 %" in text


def test_retired_prompts_are_counted(simulated, write_run) -> None:
    retired = Event("retired", 4.0, {"group": 0, "prompt": "p"})
    events = simulated()
    text = _Elements(page(read_run(write_run([*events[:-1], retired, retired, events[-1]])))).text
    assert "2 prompts came to be answered right so often that asking ended." in text


def test_tokens_without_a_finite_log_ratio_are_said(simulated, write_run) -> None:
    text = _Elements(page(read_run(write_run(_with_metrics(simulated(), nonfinite_tokens=3.0))))).text
    assert "The log-ratio of 6 trained tokens was not finite" in text


def test_hostile_text_stays_text(simulated, write_run) -> None:
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&lt;\u2028"
    rollout = {"version": 1, "prompt": attack, "text": attack, "pieces": [attack, "\ud800"], "outcome": attack}
    words = ("--run.name", attack, "--model.path", attack, "--data.source", attack)
    folder = write_run(simulated(), rollouts=[rollout], words=words)
    (folder / "run.json").write_text(json.dumps({attack: attack}))
    document = write_page(read_run(folder)).read_text(encoding="utf-8")
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
    document = write_page(read_run(write_run(simulated()))).read_text(encoding="utf-8")
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
    assert len(document) < 4_000_000
    assert "Each point joins 2 neighbouring steps." in document
    assert "12 of 50 kept rollouts are shown." in document


def test_reports_import_nothing_heavy() -> None:
    modules = "page, progress, figures, trust_figures, trust_table, gantt, summary, metrics, text_timeline"
    heavy = "{'torch', 'transformers', 'numpy', 'pandas'}"
    code = f"import sys; from headway.reports import {modules}; print({heavy} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "set()"


def test_every_policy_has_a_page_with_its_goodput(hard_times, write_run) -> None:
    document = page(read_run(write_run(hard_times)))
    text = _Elements(document).text
    assert "Who was trained?" in text
    assert "Where every sampled token and every second of every lane went" in text
    assert {"figure-lengths", "figure-fates", "figure-timeline"} <= _figures(document).keys()


def test_what_befell_groups_and_rollouts_is_a_note(simulated, write_run) -> None:
    words = "--lanes 2 --batch-size 2 --steps 2 --run-ahead 1 --lengths 1,9,1"
    for policy, note in [
        ("--max-lag 0 --stragglers drop", "2 groups were dropped: their lag was above max_lag."),
        ("--max-lag 1 --stragglers interrupt", "1 rollout was interrupted and counts as it was."),
        ("--max-lag 1 --stragglers restart", "1 group began again under newer weights."),
    ]:
        folder = write_run(simulated(*words.split(), *policy.split()), name=policy.split()[-1])
        assert note in _Elements(page(read_run(folder))).text


def test_the_page_names_the_order_the_policy_and_the_bound(simulated, write_run) -> None:
    words = "--lanes 2 --batch-size 2 --steps 2 --order window --window 3 --max-lag 2 --stragglers drop,interrupt"
    text = _Elements(page(read_run(write_run(simulated(*words.split()))))).text
    assert "order window of 3 groups" in text
    assert "max_lag 2: drop, interrupt" in text
    assert "no trained lag above 2" in text
