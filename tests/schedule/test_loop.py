"""The loop on virtual time: worked schedules, an independent simulator, groups, failures, evaluations, errors."""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest

from headway import clock
from headway.config import resolve
from headway.program import drive
from headway.schedule import loop
from headway.trace import Trace
from tests.schedule.doubles import Awkward, Plain, history_of, play, rules_of, settings_of
from tests.schedule.reference_simulator import Case, random_case, random_policies, simulate

KINDS_OF_STAGES = pytest.mark.parametrize("stages", [Plain, Awkward])

HAND_SIZED = Case(lanes=2, groups_per_batch=2, steps=2, lengths=(1, 3, 1))


# The hand-sized example


@KINDS_OF_STAGES
def test_the_hand_sized_example_event_by_event(stages):
    case = replace(HAND_SIZED, run_ahead=1)
    history = history_of(play(case, stages(case)))
    assert history.batches == [(2.0, [0, 2], [0, 0]), (3.0, [1, 3], [1, 1])]
    assert history.published == [3.0, 4.0]
    assert history.starts == [
        (0.0, 0, 0, 0, 0, 0),
        (0.0, 1, 1, 0, 1, 0),
        (1.0, 2, 2, 0, 0, 0),
        (2.0, 3, 3, 0, 0, 0),
        (3.0, 4, 4, 0, 0, 1),
        (3.0, 5, 5, 0, 1, 1),
    ]


@KINDS_OF_STAGES
def test_the_hand_sized_example_without_run_ahead(stages):
    case = replace(HAND_SIZED, run_ahead=0)
    history = history_of(play(case, stages(case)))
    assert history.batches == [(3.0, [0, 1], [0, 0]), (5.0, [2, 3], [0, 0])]
    assert history.published == [4.0, 6.0]


@KINDS_OF_STAGES
def test_a_rollout_that_starts_as_a_step_ends_has_the_new_version(stages):
    """At 3 a step ends, its sync takes no time, and both lanes are free and admitted: they start under version 1."""
    case = replace(HAND_SIZED, run_ahead=2)
    history = history_of(play(case, stages(case)))
    assert [(start[1], start[5]) for start in history.starts if start[0] == 3.0] == [(4, 1), (5, 1)]


@KINDS_OF_STAGES
def test_while_new_weights_travel_lanes_go_on_with_the_old_ones(stages):
    """Trained at 2, published at 5; r1 begins in between, under version 0, and is one behind when it is taken."""
    case = Case(lanes=1, groups_per_batch=1, run_ahead=1, steps=2, lengths=(1, 2, 1), train_time=1, sync_time=3)
    history = history_of(play(case, stages(case)))
    assert history.starts == [(0.0, 0, 0, 0, 0, 0), (1.0, 1, 1, 0, 0, 0), (5.0, 2, 2, 0, 0, 1)]
    assert history.batches == [(1.0, [0], [0]), (5.0, [1], [1])]


# Against the independent simulator


@KINDS_OF_STAGES
@pytest.mark.parametrize("seeds", [range(100), range(100, 200)], ids=str)
def test_random_schedules_are_those_of_the_independent_simulator(stages, seeds):
    for seed in seeds:
        case = random_case(seed)
        assert history_of(play(case, stages(case))) == simulate(case), case


@KINDS_OF_STAGES
@pytest.mark.parametrize("seeds", [range(100), range(100, 200)], ids=str)
def test_random_policies_are_those_of_the_independent_simulator(stages, seeds):
    for seed in seeds:
        case = random_policies(seed)
        assert history_of(play(case, stages(case))) == simulate(case), case


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 1000) for first in range(1000, 4000, 1000)], ids=str)
def test_thousands_of_random_policies_are_those_of_the_independent_simulator(seeds):
    for seed in seeds:
        case = random_policies(seed)
        assert history_of(play(case, (Plain, Awkward)[seed % 2](case))) == simulate(case), case


def test_the_random_policies_meet_what_they_are_for():
    """Each policy acts in many of them, alone and beside every other."""
    acted = Counter()
    for seed in range(300):
        played = play(case := random_policies(seed))
        reasons = {event["reason"] for event in played.of("aborted", "paused", "restarted")}
        reasons |= {event.fields.get("why") for event in played.of("generated")}
        kinds = {event.kind for event in played.events}
        acts = {*reasons, *kinds} & set(EXPECTED_ACTS)
        acted.update([*acts, *combinations(sorted(acts), 2)])
        acted[case.order, "with a lag"] += any(played.lags)
        acted["drain waits"] += case.in_flight == "drain" and any_publishing_waited(played)
    assert all(acted[act] > 10 for act in EXPECTED_ACTS), acted
    assert all(acted[order, "with a lag"] > 20 for order in ("finished", "started", "window")), acted
    assert acted["drain waits"] > 10
    assert acted["dropped", "redundant"] > 2
    assert acted["iteration_tokens", "max_lag"] > 2
    assert acted["filtered", "training"] > 2


EXPECTED_ACTS = (
    *("deadline", "dropped", "failed", "filtered", "iteration_tokens", "max_lag", "new weights"),
    *("redundant", "restarted", "resumed", "training"),
)


def any_publishing_waited(played):
    trained = [event.at_s for event in played.of("trained")]
    return any(event.at_s > at_s for event, at_s in zip(played.of("publishing"), trained, strict=False))


def test_the_random_schedules_meet_what_they_are_for():
    cases = [random_case(seed) for seed in range(400)]
    histories = [simulate(case) for case in cases]
    assert sum(len(history.failed) > 0 for history in histories) > 50
    assert sum(case.run_ahead % 1 > 0 and case.groups_per_batch > 1 for case in cases) > 50
    assert sum(len(history.published) < case.steps for case, history in zip(cases, histories, strict=True)) > 50
    assert sum(any(lag for _, _, lags in history.batches for lag in lags) for history in histories) > 100


# Groups


def test_a_group_takes_its_slots_when_its_first_member_starts():
    """Three lanes, groups of two, one batch of two groups admitted: the third lane holds half a group."""
    played = play(Case(lanes=3, group_size=2, groups_per_batch=2, run_ahead=0, steps=1, lengths=(1, 2, 3)))
    starts = [(event.at_s, event["group"], event["member"]) for event in played.of("started")]
    assert starts == [(0.0, 0, 0), (0.0, 0, 1), (0.0, 1, 0), (1.0, 1, 1)]
    assert played.ledger.groups_started == 2


def test_a_group_is_ready_when_its_last_member_is_scored():
    """Group 0 has lengths 1 and 5, group 1 has 2 and 2; scoring takes 1: group 1 is ready at 3, group 0 at 6."""
    case = Case(lanes=4, group_size=2, groups_per_batch=1, run_ahead=1, steps=2, lengths=(1, 5, 2, 2), score_times=(1,))
    assert history_of(play(case)).batches == [(3.0, [2, 3], [0, 0]), (6.0, [0, 1], [1, 1])]


@pytest.mark.parametrize("seed", range(40))
def test_members_of_a_group_start_one_after_the_other(seed):
    case = replace(random_case(seed), group_size=3)
    played = play(case)
    places = [(event["rollout"], event["group"], event["member"]) for event in played.of("started")]
    assert places == [(number, number // 3, number % 3) for number in range(len(places))]


def test_members_that_are_not_scored_are_left_out_of_the_batch():
    """Seed 4 leaves member 1 of group 0 unscored; the three others are enough of a group."""
    case = Case(lanes=4, group_size=4, groups_per_batch=1, steps=1, unscored=0.25, seed=4, lengths=(1,))
    assert [case.is_scored(0, member) for member in range(4)] == [True, False, True, True]
    (batch,) = play(case).of("taken")
    assert (batch["rollouts"], batch["groups"]) == ([0, 2, 3], [0])


def test_two_scored_members_are_a_group_and_one_is_not():
    case = Case(lanes=3, group_size=3, groups_per_batch=1, steps=6, unscored=0.5, seed=1)
    played = play(case)
    num_scored = {g: sum(case.is_scored(g, m) for m in range(3)) for g in range(played.ledger.groups_started)}
    failed = {event["group"]: event["reason"] for event in played.of("failed")}
    assert failed
    assert all(reason == f"{num_scored[group]} of its 3 rollouts were scored" for group, reason in failed.items())
    assert all(num_scored[group] < 2 for group in failed)
    assert all(num_scored[group] >= 2 for group in played.trained_groups)
    assert 2 in {num_scored[group] for group in played.trained_groups}


# Failed groups give their slots back


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("group_size", [1, 4])
def test_throughput_does_not_decay_when_groups_fail(run_ahead, group_size):
    unscored = 0.3 if group_size == 1 else 0.65
    case = Case(
        lanes=8, group_size=group_size, groups_per_batch=4, run_ahead=run_ahead, steps=120, unscored=unscored, seed=4
    )
    played = play(case)
    assert played.ledger.groups_released == len(played.of("failed")) > 100
    published = [event.at_s for event in played.of("published")]
    first, last = published[39] - published[0], published[119] - published[80]
    assert last < 1.2 * first


def places_left_empty(played):
    """Of the last batch: they count as started, since its version admits as many groups as any other."""
    size = played.ledger.settings.groups_per_batch
    return sum(size - len(event["groups"]) for event in played.of("taken"))


@pytest.mark.parametrize("seed", range(60))
def test_released_groups_are_the_failed_ones_and_admission_holds_at_every_start(seed):
    case = replace(random_case(seed), unscored=0.3)
    played = play(case)
    started = trained = failed = published = 0
    for event in played.events:
        started += event.kind == "started" and event["member"] == 0
        trained += len(event["groups"]) if event.kind == "taken" else 0
        failed += event.kind == "failed"
        published += event.kind == "published"
        assert started - failed <= (published + case.run_ahead + 1) * case.groups_per_batch
    assert played.ledger.groups_released == failed
    assert started == trained + failed + len(played.ledger.active)
    assert played.ledger.groups_started == started + places_left_empty(played)


# Run-ahead 0


@pytest.mark.parametrize("seed", range(60))
def test_without_run_ahead_nothing_is_in_flight_while_the_trainer_works(seed):
    case = replace(random_case(seed), run_ahead=0)
    in_flight, is_training = 0, False
    for event in play(case).events:
        if event.kind in ("started", "scored"):
            in_flight += 1 if event.kind == "started" else -1
        if event.kind in ("taken", "published"):
            is_training = event.kind == "taken"
        assert not (is_training and in_flight), event


# The end of the data


@KINDS_OF_STAGES
def test_the_rest_of_the_data_is_a_short_batch(stages):
    case = Case(lanes=2, groups_per_batch=2, steps=10, num_groups=3, lengths=(1,))
    played = play(case, stages(case))
    assert [event["groups"] for event in played.of("taken")] == [[0, 1], [2]]
    assert played.ledger.published == 2


@pytest.mark.parametrize("seed", range(80))
def test_at_the_end_of_the_data_every_group_is_trained_once_or_failed(seed):
    case = replace(random_case(seed), num_groups=seed % 13, steps=1000)
    played = play(case)
    failed = [event["group"] for event in played.of("failed")]
    assert sorted(played.trained_groups + failed) == list(range(seed % 13))
    assert failed == [event["group"] for event in played.of("failed") if case.fails(event["group"])]
    sizes = [len(event["groups"]) for event in played.of("taken")]
    assert all(size == case.groups_per_batch for size in sizes[:-1])


def test_a_run_whose_groups_all_fail_ends():
    played = play(Case(num_groups=5, steps=10, unscored=1.0, run_ahead=0))
    assert len(played.of("failed")) == 5
    assert played.ledger.published == 0


def test_a_run_whose_last_group_is_dropped_ends_then():
    """Version 1 is out and saved when group 1 ends at 5, one version old: nobody reports anything after that."""
    case = Case(lanes=2, groups_per_batch=1, steps=9, num_groups=2, lengths=(1, 5), max_lag=0, stragglers=("drop",))
    played = play(case, save_every=1)
    assert [(event.at_s, event["group"]) for event in played.of("dropped")] == [(5.0, 1)]
    assert played.ended_s == 5.0
    assert evaluated(play(case, save_every=1, evaluation_size=1)) == [0, 1]


@KINDS_OF_STAGES
def test_a_surplus_rollout_does_not_hold_the_last_batch_back(stages):
    """Two of three are done at 1, and the trainer is idle; the third has paused there, and would go on at 2."""
    case = Case(
        lanes=3,
        group_size=2,
        groups_per_batch=2,
        num_groups=1,
        steps=9,
        lengths=(1, 2, 9),
        redundant=1,
        keep_redundant=True,
        iteration_tokens=1,
    )
    (taken,) = play(case, stages(case)).of("taken")
    assert (taken.at_s, taken["rollouts"]) == (2.0, [0, 1])


def test_why_a_run_ended_is_told():
    case = Case(num_groups=3, steps=2)
    config = resolve(None, ["--lanes", "2", "--batch-size", "2", "--steps", "2"]).config

    def last_event(steps):
        events = []
        settings = replace(settings_of(case), steps=steps)
        trace = Trace(events.append)
        program = drive(config, Plain(case), settings, rules_of(case), trace, clock_name="virtual")
        clock.run(program, virtual=True)
        return events[-1]

    assert (last_event(1).kind, last_event(1)["reason"]) == ("ended", "steps done")
    assert last_event(2)["reason"] == "steps done"
    assert last_event(3)["reason"] == "data ended"


# In flight at the end


@KINDS_OF_STAGES
def test_rollouts_in_flight_are_given_up_when_the_last_version_is_out(stages):
    """r1 is ten units long; steps end at 2 and 4 without it. (`play` sees that no task is left.)"""
    case = Case(lanes=3, groups_per_batch=1, run_ahead=1, steps=2, lengths=(1, 10, 1))
    playing = stages(case)
    played = play(case, playing)
    assert played.ended_s == 4.0
    assert list(played.ledger.running) == [1]
    assert stages is Awkward or playing.num_cancelled == 1


# Evaluations


def evaluated(played):
    return [event["version"] for event in played.of("evaluated")]


@pytest.mark.parametrize(
    ("steps", "every", "versions"),
    [(4, 0, [0, 4]), (4, 2, [0, 2, 4]), (5, 2, [0, 2, 4, 5]), (3, 1, [0, 1, 2, 3]), (1, 0, [0, 1])],
)
@KINDS_OF_STAGES
def test_evaluations_are_before_the_first_step_after_the_last_and_every_so_often(stages, steps, every, versions):
    case = Case(steps=steps)
    assert evaluated(play(case, stages(case), evaluation_size=3, evaluate_every=every)) == versions


def test_without_held_out_prompts_there_is_no_evaluation():
    assert evaluated(play(Case(), evaluation_size=0, evaluate_every=1)) == []


def test_the_last_evaluation_is_held_when_the_data_end():
    assert evaluated(play(Case(num_groups=3, steps=10), evaluation_size=1)) == [0, 2]


def test_what_an_evaluation_says():
    """Answers of even prompts get 0, of odd ones 1."""
    first, _ = play(Case(), evaluation_size=5).of("evaluated")
    assert first.fields == {"version": 0, "num": 5, "num_unscored": 0, "mean_reward": 0.4, "num_correct": 2}


def test_unscored_answers_of_an_evaluation_are_counted_apart():
    class LosesTheFirst(Plain):
        async def score(self, ticket, rollout):
            scored = await super().score(ticket, rollout)
            lost = ticket.evaluation and ticket.group == 0
            return replace(scored, outcome="grader_timeout", reward=None) if lost else scored

    case = Case()
    first, _ = play(case, LosesTheFirst(case), evaluation_size=4).of("evaluated")
    assert first.fields == {"version": 0, "num": 3, "num_unscored": 1, "mean_reward": 2 / 3, "num_correct": 2}


def test_an_evaluation_comes_first_to_the_free_lanes():
    played = play(Case(lanes=2, run_ahead=1, lengths=(2, 1)), evaluation_size=3)
    order = [(event.at_s, event["evaluation"], event["group"]) for event in played.of("started")]
    assert order[:4] == [(0.0, True, 0), (0.0, True, 1), (1.0, True, 2), (2.0, False, 0)]


@KINDS_OF_STAGES
def test_publishing_waits_for_an_open_evaluation(stages):
    """The evaluation of version 0 ends at 9; the step that was over at 3 is published then, at once."""
    case = Case(lanes=3, groups_per_batch=1, run_ahead=1, steps=1, lengths=(2, 9))
    played = play(case, stages(case), evaluation_size=2)
    times = {}
    for event in played.of("trained", "evaluated", "publishing", "published"):
        times.setdefault(event.kind, event.at_s)
    assert times == {"trained": 3.0, "evaluated": 9.0, "publishing": 9.0, "published": 9.0}


@pytest.mark.parametrize("seed", range(60))
def test_every_answer_of_an_evaluation_is_under_its_version(seed):
    case = random_case(seed)
    played = play(case, Awkward(case), evaluation_size=1 + seed % 5, evaluate_every=1 + seed % 3)
    version, waiting, num_evaluations = 0, None, 0
    for event in played.events:
        if event.kind == "started" and event["evaluation"]:
            waiting = event["version"]
            assert waiting == version
        if event.kind == "evaluated":
            assert event["version"] == waiting == version
            waiting, num_evaluations = None, num_evaluations + 1
        if event.kind == "publishing":
            assert waiting is None
        if event.kind == "published":
            version = event["version"]
    assert num_evaluations >= 1
    assert evaluated(played)[0] == 0


def test_with_lanes_to_spare_an_evaluation_changes_nothing_else():
    case = Case(lanes=12, group_size=2, groups_per_batch=2, run_ahead=1, steps=6, lengths=(1, 1, 2), train_time=3)
    with_one, without = play(case, evaluation_size=4, evaluate_every=1), play(case)
    assert history_of(with_one).batches == history_of(without).batches
    assert history_of(with_one).published == history_of(without).published
    counts = ("groups_started", "groups_released", "rollouts_started", "trained")
    assert all(getattr(with_one.ledger, count) == getattr(without.ledger, count) for count in counts)


# What goes wrong ends the run


class Boom(Exception):
    pass


def failing(verb):
    class Failing(Plain):
        async def fail(self, *_):
            await asyncio.sleep(0.5)
            raise Boom(verb)

    setattr(Failing, verb, Failing.fail)
    return Failing


@pytest.mark.parametrize(
    ("verb", "place"),
    [
        ("generate", "in rollout 0"),
        ("score", "in rollout 0"),
        ("prepare", "in train step 1"),
        ("train", "in train step 1"),
        ("sync", "in publishing version 1"),
        ("save", "in saving version 1"),
    ],
)
def test_a_stage_that_raises_ends_the_run_and_a_note_says_where(verb, place):
    case = Case(lengths=(1,))
    with pytest.raises(ExceptionGroup) as caught:
        play(case, failing(verb)(case), save_every=1)
    first = caught.value.exceptions[0]
    assert isinstance(first, Boom)
    assert first.__notes__ == [place]


def test_a_failure_in_an_evaluation_says_so():
    case = Case()
    with pytest.raises(ExceptionGroup) as caught:
        play(case, failing("score")(case), evaluation_size=1)
    assert caught.value.exceptions[0].__notes__ == ["in evaluation answer 0"]


def test_the_composition_root_raises_the_first_cause_by_itself():
    case = Case()
    config = resolve(None, ["--lanes", "2", "--batch-size", "2", "--steps", "2"]).config
    stages = failing("train")(case)
    program = drive(config, stages, settings_of(case), rules_of(case), Trace(), clock_name="virtual")
    with pytest.raises(Boom, match="train"):
        clock.run(program, virtual=True)


@pytest.mark.parametrize("verb", ["generate", "score", "train", "sync"])
def test_a_stage_that_cancels_its_own_future_is_an_error_and_no_lost_lane(verb):
    class GivesUp(Plain):
        async def give_up(self, *_):
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    setattr(GivesUp, verb, GivesUp.give_up)
    case = Case()
    with pytest.raises(ExceptionGroup) as caught:
        play(case, GivesUp(case))
    assert isinstance(caught.value.exceptions[0], RuntimeError)
    assert "was given up by its stage without a result" in str(caught.value.exceptions[0])


def test_a_run_that_is_cancelled_is_cancelled():
    async def program():
        case, bell = Case(lengths=(100,)), clock.Bell()
        ledger = loop.Ledger(settings_of(case), now=asyncio.get_running_loop().time, changed=bell.ring, trace=Trace())
        running = asyncio.create_task(loop.run(Plain(case), ledger, loop.Rules(1), bell))
        await asyncio.sleep(5)
        running.cancel()
        await asyncio.wait([running])
        return running.cancelled(), asyncio.all_tasks() == {asyncio.current_task()}

    assert clock.run(program(), virtual=True) == (True, True)


def test_a_stage_that_never_answers_is_a_deadlock_and_no_hang():
    class Silent(Plain):
        async def train(self, batch):
            await asyncio.get_running_loop().create_future()

    case = Case(lengths=(1,))
    with pytest.raises(clock.Deadlock, match="train step"):
        play(case, Silent(case))


# On the wall clock


def test_the_same_program_runs_on_the_wall_clock():
    """A few milliseconds of real time; what is trained is what the virtual clock says, for lengths far apart."""
    case = Case(lanes=2, groups_per_batch=2, run_ahead=0, steps=2, lengths=(0.002, 0.02, 0.002, 0.02), train_time=0.001)
    taken = []

    def note(event):
        if event.kind == "taken":
            taken.append((event["rollouts"], event["lags"]))

    settings = settings_of(case)
    config = resolve(None, ["--lanes", "2", "--batch-size", "2", "--steps", "2", "--run-ahead", "0"]).config
    ledger = clock.run(drive(config, Plain(case), settings, rules_of(case), Trace(note), clock_name="wall"))
    assert taken == [([0, 1], [0, 0]), ([2, 3], [0, 0])]
    assert ledger.published == 2
