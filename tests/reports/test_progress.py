"""The progress line: what the run waits for, plain lines, and a terminal that is left as it was found."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from headway.reports.progress import ProgressLine
from headway.reports.status import Status
from headway.trace import Event


class _Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


RUN = Event("run", 0.0, {"batch_size": 8, "group_size": 4, "steps": 5, "version": 0, "max_lag": None})


def _started(rollout: int, group: int, evaluation: bool = False) -> Event:
    return Event("started", 0.0, {"rollout": rollout, "group": group, "evaluation": evaluation})


def _generated(rollout: int) -> Event:
    return Event("generated", 1.0, {"rollout": rollout, "tokens": 100})


def _scored(rollout: int, group: int) -> Event:
    return Event("scored", 1.0, {"rollout": rollout, "group": group, "reward": 1.0})


def _answered(rollout: int, group: int) -> list[Event]:
    return [_started(rollout, group), _generated(rollout), _scored(rollout, group)]


def _taken(version: int, groups: list[int]) -> Event:
    return Event("taken", 2.0, {"version": version, "groups": groups, "lags": [0, 2], "token_lag": 1.0})


def _trained(version: int, **metrics: float) -> Event:
    return Event("trained", 4.0, {"version": version, "metrics": metrics})


def _fed(*events: Event, **options) -> Status:
    status = Status(**options)
    for event in events:
        status(event)
    return status


FIRST_GROUP = [event for rollout in range(4) for event in _answered(rollout, 0)]


def test_waiting_for_groups_names_the_nearest() -> None:
    status = _fed(RUN, *FIRST_GROUP, *_answered(4, 1), _started(5, 1), _started(8, 2), _generated(8))
    assert status.waiting() == (
        "waiting for 1 of 2 groups (group 1 has 1 of 4 answers); 1 rollout in flight, 1 being scored"
    )


def test_many_missing_groups_are_only_counted() -> None:
    large = Event("run", 0.0, {**RUN.fields, "batch_size": 32})
    assert _fed(large, *FIRST_GROUP, _started(4, 1)).waiting() == "waiting for 7 of 8 groups; 1 rollout in flight"


def test_groups_of_one_are_rollouts() -> None:
    ones = Event("run", 0.0, {**RUN.fields, "group_size": 1})
    assert _fed(ones, *_answered(0, 0), _started(1, 1)).waiting() == "waiting for 7 of 8 rollouts; 1 rollout in flight"


def test_a_failed_group_is_waited_for_again() -> None:
    failed = Event("failed", 1.0, {"group": 0, "prompt": "p", "reason": "none was scored"})
    assert _fed(RUN, *FIRST_GROUP, failed).waiting() == "waiting for 2 of 2 groups"


def test_the_trainer_s_stages() -> None:
    clock = _Clock()
    status = _fed(RUN, *FIRST_GROUP, _started(9, 3), now=clock)
    status(_taken(0, [0]))
    clock.now_s += 3.75
    assert status.waiting() == "training step 1 for 0:03; 1 rollout in flight"
    status(_trained(1))
    status(Event("publishing", 4.0, {"version": 1}))
    clock.now_s += 61.5
    assert status.waiting() == "publishing version 1 for 1:01; 1 rollout in flight"
    status(Event("published", 4.0, {"version": 1}))
    assert status.waiting() == "waiting for 2 of 2 groups (group 3 has 0 of 4 answers); 1 rollout in flight"
    status(Event("ended", 5.0, {"reason": "steps done"}))
    assert status.waiting() == "ended: steps done"


def test_an_evaluation_counts_its_answers() -> None:
    answers = [_started(-1 - n, n, evaluation=True) for n in range(3)]
    status = _fed(RUN, *answers, _generated(-1), _scored(-1, 0), evaluation_size=3)
    assert status.waiting() == "evaluation: 1 of 3 answers; waiting for 2 of 2 groups"
    status(_started(0, 0))
    status(_taken(0, []))
    status(_trained(1))
    assert status.waiting() == "version 1 waits for the evaluation: 1 of 3 answers; 1 rollout in flight"
    for n in (1, 2):
        status(_generated(-1 - n))
        status(_scored(-1 - n, n))
    status(Event("evaluated", 5.0, {"version": 0, "num": 3, "num_correct": 1, "num_unscored": 0, "mean_reward": 0.3}))
    assert "evaluation" not in status.waiting()


def test_figures_leave_out_what_was_not_reported() -> None:
    status = _fed(RUN, *FIRST_GROUP, _taken(0, [0]), _trained(1, reward_mean=0.53, mismatch_kl_k3=3.1e-7))
    assert status.figures() == "step 1/5  reward 0.53  100 tok/s  lag 1 (max 2)  mismatch KL 3.1e-07"
    assert _fed(RUN, _taken(0, []), _trained(1)).figures() == "step 1/5  lag 1 (max 2)"
    assert _fed(RUN).figures() == "step 0/5"


def test_a_resumed_run_begins_anew() -> None:
    again = Event("run", 0.0, {**RUN.fields, "version": 3})
    status = _fed(RUN, *FIRST_GROUP, _started(4, 1), _taken(0, [0]), again)
    assert status.figures() == "step 3/5"
    assert status.waiting() == "waiting for 2 of 2 groups"


def test_plain_lines(simulated) -> None:
    stream, clock = io.StringIO(), _Clock()
    with ProgressLine(stream=stream, now=clock, evaluation_size=1) as progress:
        progress.phase("loading the model ...")
        for event in simulated("--lanes", "2", "--batch-size", "2", "--steps", "2", "--evaluate.size", "1"):
            clock.now_s = 200.0 + event.at_s
            progress(event)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading the model ..."
    assert lines[1] == "evaluation of version 0: 0 of 1 correct, 0.0 % (95 % interval 0.0–79.3 %)"
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "step 1/2",
        "step 2/2",
        "evaluation of version 2: 0 of 1 correct, 0.0 % (95 % interval 0.0–79.3 %)",
        "ended: steps done",
    ]
    assert re.fullmatch(r"step 1/2  \d+ tok/s  lag 0 \(max 0\)  0:0\d", lines[2])


def test_a_stream_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    with ProgressLine(stream=io.TextIOWrapper(raw, encoding="ascii")) as progress:
        progress(
            Event("evaluated", 1.0, {"version": 0, "num": 10, "num_correct": 8, "num_unscored": 2, "mean_reward": 0.8})
        )
    assert (
        raw.getvalue() == b"evaluation of version 0: 8 of 10 correct, 80.0 % (95 % interval 49.0-94.3 %), 2 unscored\n"
    )


@pytest.fixture
def terminal(monkeypatch) -> _Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return _Terminal()


def test_a_terminal_gets_one_line_and_its_cursor_back(terminal: _Terminal) -> None:
    def run() -> None:
        with ProgressLine(stream=terminal) as progress:
            progress.phase("loading [/x] the model ...")
            progress(RUN)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    said = terminal.getvalue()
    assert said.count("\x1b[?25l") == said.count("\x1b[?25h") == 1
    assert "step 0/5  | waiting for 2 of 2 groups | 0:00" in said.split("\x1b[?25h")[0]


def test_evaluations_stay_above_the_line(terminal: _Terminal) -> None:
    with ProgressLine(stream=terminal) as progress:
        progress(RUN)
        progress(
            Event("evaluated", 1.0, {"version": 0, "num": 10, "num_correct": 8, "num_unscored": 0, "mean_reward": 0.8})
        )
    assert "evaluation of version 0: 8 of 10 correct" in terminal.getvalue()


@pytest.mark.parametrize("columns", ["0", "1", "19", "20", "21"])
def test_no_width_is_too_small(terminal: _Terminal, monkeypatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", "0")
    with ProgressLine(stream=terminal) as progress:
        progress.phase("loading the model ...")
        progress(RUN)
        progress(_taken(0, []))
        progress(_trained(1))
    assert terminal.getvalue()


@pytest.mark.parametrize("columns", range(6))
def test_a_line_survives_a_terminal_that_shrinks(columns: int) -> None:
    console = Console(file=io.StringIO(), width=columns, height=1, force_terminal=True)
    console.print(Text("step 1/5  | waiting", no_wrap=True, overflow="ellipsis"))


def test_a_dumb_terminal_gets_plain_lines(terminal: _Terminal, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with ProgressLine(stream=terminal) as progress:
        progress.phase("loading the model ...")
    assert terminal.getvalue() == "loading the model ...\n"


def test_a_warning_of_a_train_step_is_said_loudly() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream=stream)
    for event in run_of_one_step(warning="the gradient is not finite (nan): this step was skipped"):
        progress(event)
    assert "warning: train step 1: the gradient is not finite (nan): this step was skipped\n" in stream.getvalue()


def run_of_one_step(warning: str) -> list[Event]:
    header = {"lanes": 1, "batch_size": 1, "group_size": 1, "run_ahead": 0, "steps": 1, "max_lag": None, "seed": 0}
    taken = {"version": 0, "groups": [0], "rollouts": [0], "lags": [0], "token_lag": 0.0}
    return [
        Event("run", 0.0, {**header, "version": 0, "clock": "wall"}),
        Event("taken", 1.0, taken),
        Event("trained", 2.0, {"version": 1, "metrics": {"warning": warning}}),
    ]


def test_an_alarm_is_said_once_when_it_has_stood_for_some_steps() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream=stream)
    progress(RUN)
    shares = [0.95, 0.1, 0.95, 0.96, 0.97, 0.98, 0.1, 0.95, 0.95, 0.95]
    for version, share in enumerate(shares):
        progress(_taken(version, [0]))
        progress(_trained(version + 1, truncated_share=share))
    said = [line for line in stream.getvalue().splitlines() if line.startswith("warning")]
    assert said == [
        "warning: train step 5: the token budget cut off 97.0 % of the answers, so nearly none ends by itself: raise "
        "generate.max_new_tokens (3 steps in a row)"
    ]


def test_an_unsound_run_is_said_at_its_beginning() -> None:
    stream = io.StringIO()
    ProgressLine(stream=stream)(Event("run", 0.0, {**RUN.fields, "unsound": ["the update would be biased"]}))
    assert stream.getvalue() == "warning: unsound, and trained all the same: the update would be biased\n"


def test_plain_lines_have_room_for_more_figures() -> None:
    metrics = {"mismatch_kl_k3": 2e-3, "canary_kl_k3": 1.5e-12, "ess_share": 0.987, "entropy": 0.21}
    status = _fed(RUN, _taken(0, [0]), _trained(1, **metrics))
    assert status.details() == "numerics 1.5e-12  ESS 99 %  entropy 0.21"
    assert _fed(RUN, _taken(0, [0]), _trained(1)).details() == ""


def test_groups_that_fail_are_said_one_by_one_and_then_at_every_doubling() -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream=stream)
    for group in range(20):
        progress(Event("failed", 0.0, {"group": group, "prompt": "p", "reason": "0 of its 2 rollouts were scored"}))
    said = stream.getvalue().splitlines()
    assert said[0] == "group 0 can't be trained (1 so far): 0 of its 2 rollouts were scored"
    assert [line.split()[1] for line in said] == ["0", "1", "2", "3", "7", "15"]


def _fate(kind: str, rollout: int, **fields: object) -> Event:
    return Event(kind, 1.0, {"rollout": rollout, "lane": 0, "group": 0, "tokens": 1, "reason": "r", **fields})


def test_paused_rollouts_are_said_beside_those_in_flight() -> None:
    paused = _fed(RUN, *(_started(rollout, 0) for rollout in range(4)), _fate("paused", 1), _fate("paused", 2))
    assert paused.waiting().endswith("; 2 rollouts in flight, 2 paused")
    paused(Event("resumed", 2.0, _started(1, 0).fields))
    assert paused.waiting().endswith("; 3 rollouts in flight, 1 paused")


def test_what_is_thrown_away_or_lost_is_no_longer_in_flight() -> None:
    started = [_started(rollout, 0) for rollout in range(4)]
    gone = [_fate("aborted", 0), _fate("lost", 1), _generated(2), _fate("aborted", 2, lane=None)]
    assert _fed(RUN, *started, *gone).waiting().endswith("; 1 rollout in flight")


@pytest.mark.parametrize("kind", ["dropped", "filtered"])
def test_a_group_that_gives_its_slots_back_is_waited_for_again(kind: str) -> None:
    assert _fed(RUN, *FIRST_GROUP, _fate(kind, 0)).waiting() == "waiting for 2 of 2 groups"


def test_a_group_that_begins_again_has_no_answers() -> None:
    status = _fed(RUN, *FIRST_GROUP[:-3], _fate("restarted", 0, num=1))
    assert status.waiting() == "waiting for 2 of 2 groups (group 0 has 0 of 4 answers)"


def test_in_order_of_start_only_the_oldest_groups_are_waited_for() -> None:
    ordered = Event("run", 0.0, {**RUN.fields, "order": "started"})
    answers = [event for rollout in range(8, 12) for event in _answered(rollout, 2)]
    status = _fed(ordered, _started(0, 0), _started(4, 1), *answers)
    assert status.waiting() == (
        "waiting for 2 of 2 oldest groups (group 0 has 0 of 4 answers, group 1 has 0 of 4 answers); "
        "2 rollouts in flight"
    )


def test_what_a_checkpoint_held_is_waited_for_no_more() -> None:
    def restored(rollout: int, outcome: str | None) -> Event:
        return _fate("restored", rollout, outcome=outcome, finish=None)

    status = _fed(RUN, *(restored(rollout, "scored") for rollout in range(3)), restored(3, None))
    assert status.waiting() == "waiting for 2 of 2 groups (group 0 has 3 of 4 answers); 1 paused"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("dropped", "group 0 was dropped (1 so far): r"),
        ("filtered", "group 0 was replaced (1 so far): r"),
        ("restarted", "group 0 begins again (1 so far): r"),
        ("lost", "rollout 7 was lost (1 so far): r"),
    ],
)
def test_what_befalls_groups_and_rollouts_is_said_as_sparsely(kind: str, said: str) -> None:
    stream = io.StringIO()
    progress = ProgressLine(stream=stream)
    for _ in range(9):
        progress(_fate(kind, 7))
    assert stream.getvalue().splitlines()[0] == said
    assert len(stream.getvalue().splitlines()) == 5  # the first, the second, the third, the fourth and the eighth
