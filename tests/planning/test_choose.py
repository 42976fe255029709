"""Which schedule is chosen: the laws' short list, the simulations, and the recipe that comes of it."""

import tomllib
from dataclasses import replace

import pytest

from headway.config import resolve
from headway.planning.candidates import layouts, sync_bytes, times, train_times
from headway.planning.choose import plan, settings_of, short_list
from headway.planning.recipe import of_candidate
from headway.planning.request import Options, request
from headway.reports.summary import summarise, timeline
from headway.simulation import simulate

SMALL = ("--batch-size=32", "--group-size=4", "--lanes=32")


def asked(*overrides, model="qwen2.5-7b", num_gpus="4", **options):
    return request(Options(gpu="h100", num_gpus=num_gpus, longest="512", **options), model, None, [*SMALL, *overrides])


@pytest.fixture(scope="module")
def planned():
    return plan(asked(price="3.6"))


def names(request_):
    return [one.name for one in layouts(request_)]


def test_every_split_is_looked_at_with_every_size_of_engine():
    """A colocated engine sleeps, for schedules with nothing in flight while they train; or it does not."""
    turns = [f"all 4 by turns{engines}" for engines in ("", ", engines of 2", ", engines of 4")]
    assert names(asked()) == [
        *turns,
        *turns,
        "3 generate, 1 train",
        "2 generate, 2 train",
        "2 generate, 2 train, engines of 2",
        "1 generate, 3 train",
    ]


def test_splits_are_of_whole_engines_and_whole_trainers():
    found = names(asked(num_gpus="16", tensor="4", engine_tensor="2"))[2:]
    assert found == [f"{16 - train} generate, {train} train, engines of 2" for train in (4, 8, 12)]


def test_of_very_many_gpus_some_splits_are_looked_at():
    splits = {one.training for one in layouts(asked(num_gpus="1024")) if one.sharing == "disaggregated"}
    assert 10 < len(splits) <= 63


def test_one_gpu_can_only_take_turns():
    assert {one.sharing for one in layouts(asked(num_gpus="1", model="qwen2.5-0.5b"))} == {"colocated"}


def test_more_training_gpus_train_faster_and_more_generating_ones_decode_faster():
    request_ = asked(engine_tensor="1")
    splits = [one for one in layouts(request_) if one.sharing == "disaggregated"]
    took = [times(request_, split) for split in splits]
    assert [one.train_s for one in took] == sorted((one.train_s for one in took), reverse=True)
    assert [one.decode_tokens_per_s for one in took] == sorted((one.decode_tokens_per_s for one in took), reverse=True)


def test_weights_under_way():
    assert sync_bytes(asked()) == 2 * 7_615_616_512
    assert sync_bytes(asked(lora_rank="32")) == 2 * 80_740_352
    assert sync_bytes(asked(nominal="7e9")) == 14e9


def test_the_closed_laws_are_near_what_the_scheduler_gives(planned):
    """Rollouts speed up where few are in flight, and wait for more than their own group."""
    for candidate in planned.simulated:
        assert 0.6 * candidate.rate <= candidate.figures.rollouts_per_s <= 1.35 * candidate.rate


def test_a_share_of_a_large_batch_goes_at_the_pace_of_the_whole():
    """512 of 1,024 rollouts with half of lanes and engines, against all of them."""
    large = asked("--batch-size=1024", "--lanes=1024", "--run-ahead=1", num_gpus="8", engine_tensor="1")
    candidate = next(one for one in plan(large).simulated if one.layout.name == "4 generate, 4 train")
    words = {**settings_of(large, candidate), "run.steps": 10, "simulate.skip_steps": 4}
    events = simulate(resolve(None, [f"--{key}={str(value).lower()}" for key, value in words.items()]).config)
    whole = summarise(timeline(events), events, 4)
    assert candidate.figures.rollouts_per_s == pytest.approx(whole["throughput"], rel=0.08)


def test_none_that_is_as_fast_has_less_lag_than_the_chosen_one(planned):
    chosen = planned.chosen.figures
    fastest = max(one.figures.tokens_per_s for one in planned.simulated)
    assert chosen.tokens_per_s >= 0.98 * fastest
    for other in planned.simulated:
        if other.figures.tokens_per_s >= 0.98 * fastest:
            assert other.figures.token_lag >= chosen.token_lag


def test_running_ahead_pays_and_costs_lag(planned):
    by_split = {}
    for one in planned.simulated:
        if one.layout.sharing == "disaggregated":
            by_split.setdefault(one.layout.name, []).append(one)
    for split in by_split.values():
        rates = [one.figures.rollouts_per_s for one in split]
        assert rates == sorted(rates), "more run_ahead, more rollouts a second"
        assert [one.figures.mean_lag for one in split] == sorted(one.figures.mean_lag for one in split)


def test_price_of_a_million_tokens(planned):
    """4 GPUs at 3.6 an hour are 0.004 a second."""
    figures = planned.chosen.figures
    assert figures.price == pytest.approx(1e6 * 0.004 / figures.tokens_per_s)


def test_the_short_list_has_only_what_fits_and_the_fastest_splits(planned):
    listed = short_list(planned.candidates)
    assert all(candidate.fits for candidate in listed)
    rates = {}
    for one in planned.candidates:
        if one.fits and one.layout.sharing == "disaggregated":
            rates[one.layout.name] = max(one.rate, rates.get(one.layout.name, 0.0))
    splits = {one.layout.name for one in listed if one.layout.sharing == "disaggregated"}
    assert splits == set(sorted(rates, key=rates.__getitem__, reverse=True)[:3])


def test_quick_asks_the_laws_alone():
    found = plan(asked(), quick=True)
    assert found.simulated == []
    assert found.chosen.rate == max(one.rate for one in short_list(found.candidates))
    assert "by closed laws" in found.reasons[0]


def test_what_does_not_fit_is_said_with_the_largest_lines():
    found = plan(asked(model="llama-3.1-70b"))
    assert found.chosen is None
    assert found.simulated == []
    assert "nothing fits: the nearest layout (" in found.reasons[0]
    assert "Adam's moments" in found.reasons[0]
    assert "--lora-rank" in found.reasons[1]


def test_the_recipe_gives_the_same_simulation_again(planned, tmp_path):
    text = of_candidate(planned.request, planned.chosen)
    file = tmp_path / "chosen.toml"
    file.write_text(text)
    tables = tomllib.loads(text)
    assert tables["model"]["path"] == "qwen2.5-7b"
    assert tables["schedule"]["run_ahead"] == planned.chosen.run_ahead
    values = {**settings_of(planned.request, planned.chosen), "run.steps": 30}
    words = [f"--{key}={str(value).lower()}" for key, value in values.items()]
    again, direct = (simulate(resolve(*source).config) for source in ((file, []), (None, words)))
    assert [(event.kind, event.at_s) for event in again] == [(event.kind, event.at_s) for event in direct]


@pytest.mark.parametrize(
    ("options", "overrides", "expected"),
    [
        ({}, [], {"objective": {"name": "grpo", "kl_coefficient": 0}}),
        ({"kl": True}, [], {"objective": {"name": "grpo"}}),
        ({"algorithm": "ppo"}, [], {"objective": {"name": "ppo"}}),
        ({"lora_rank": "16"}, [], {"adapter": {"kind": "lora", "rank": 16}}),
        ({}, ["--adapter.kind=tinylora", "--adapter.rank=2"], {"adapter": {"kind": "tinylora", "rank": 2}}),
    ],
    ids=["grpo", "with KL", "ppo", "lora", "tinylora"],
)
def test_a_recipe_from_nothing_says_what_was_asked_for(options, overrides, expected):
    wanted = asked(*overrides, **options)
    text = of_candidate(wanted, plan(wanted, quick=True).candidates[0])
    tables = tomllib.loads(text)
    for section, values in expected.items():
        assert tables[section] == values
    assert "say what on" in text


def test_other_batches_have_the_same_layout_and_their_own_lanes(planned):
    """Half and twice 32; lanes were said, so they stay."""
    assert [(other.batch, other.lanes) for other in planned.batches] == [(16, 32), (64, 32)]
    for other in planned.batches:
        assert other.candidate.layout.name == planned.chosen.layout.name
        assert other.candidate.run_ahead == planned.chosen.run_ahead
        assert other.candidate.figures.step_s > 0
    small, large = (other.candidate.figures.step_s for other in planned.batches)
    assert small < planned.chosen.figures.step_s < large


def test_the_smallest_micro_batch_that_hides_what_zero_sends_is_chosen():
    """On one machine arithmetic hides it soon; on two, with the network between them, a larger one is needed."""
    near, far = (asked(num_gpus=num) for num in ("8", "16"))
    chosen = {
        each.hardware.num: {one.training: one.placed.job.training.micro_batch_tokens for one in layouts(each)}
        for each in (near, replace(far, batch=2048))
    }
    assert chosen[8][4] < chosen[16][12]
    for each in (near, replace(far, batch=2048)):
        for layout in layouts(each):
            took = train_times(each, layout.placed.job)
            largest = replace(
                layout.placed.job, training=replace(layout.placed.job.training, micro_batch_tokens=65_536.0)
            )
            assert took.seconds <= 1.02 * train_times(each, largest).seconds or not layout.placed.fits


def test_a_colocated_recipe_lets_the_engine_sleep(planned):
    colocated = [one for one in planned.simulated if one.layout.sharing == "colocated"]
    sleeping, awake = (settings_of(planned.request, one) for one in colocated)
    assert (sleeping["generate.sleep"], sleeping["schedule.run_ahead"]) == ("weights", 0)
    assert (awake["generate.sleep"], awake["schedule.run_ahead"]) == ("none", 1)
    assert not awake["schedule.overlap"]


def test_what_is_in_flight_while_training_keeps_its_cache(planned):
    """A batch ahead, the cache of rollouts that go on is there while a colocated trainer trains."""
    sleeping, awake = (one for one in planned.simulated if one.layout.sharing == "colocated")
    for candidate, there in ((sleeping, False), (awake, True)):
        (train,) = [phase for phase in candidate.layout.placed.pools[0].phases if phase.name == "train"]
        assert ("keys and values" in {line.name for line in train.lines}) == there


def test_offload_takes_time_and_few_sequences_no_more_gpus_than_they_are():
    plain, offloaded = (layouts(asked(offload=on, engine_tensor="1"))[0] for on in (False, True))
    moved = 2 * 12 * 7_615_616_512 / 4 / 25e9
    assert times(asked(offload=True), offloaded).train_s == pytest.approx(times(asked(), plain).train_s + moved)
    few = asked("--batch-size=4", "--lanes=4", num_gpus="16")
    split = [one for one in layouts(few) if one.sharing == "disaggregated"]
    by_training = {one.training: times(few, one).train_arithmetic_s for one in split}
    assert by_training[15] == by_training[4] < by_training[2]


def test_a_nominal_size_is_that_of_times_too():
    real, nominal = (times(asked(nominal=size), layouts(asked(nominal=size))[0]) for size in (None, "70e9"))
    assert nominal.weight_bytes == pytest.approx(real.weight_bytes * 70e9 / 7_615_616_512)
    assert nominal.train_s > 9 * real.train_s


def test_float32_is_float32_on_both_sides():
    single = times(asked(precision="float32"), layouts(asked(precision="float32"))[0])
    assert single.weight_bytes == 2 * times(asked(), layouts(asked())[0]).weight_bytes
    assert sync_bytes(asked(precision="float32")) == 4 * 7_615_616_512


def test_weights_reach_an_engine_over_its_own_links():
    """Between machines: 15.2 GB at 0.8 x 50 GB/s into engines of one GPU, however many send."""
    request_ = asked("--lanes=512", num_gpus="64", engine_tensor="1")
    for layout in layouts(request_):
        assert times(request_, layout).sync_s == pytest.approx(1e-3 + 2 * 7_615_616_512 / 40e9)


def test_rollouts_for_which_there_is_room(planned):
    """At their longest, in the caches of all engines."""
    split = next(one for one in planned.candidates if one.layout.name == "2 generate, 2 train")
    job = split.layout.placed.job
    each = job.shape.kv_bytes(job.answers.prompt + 512)
    room = planned.request.hardware.budget - 2 * job.shape.num_params - 4e9
    assert split.times.room == 2 * (room // each)


def test_a_given_run_ahead_is_the_only_one():
    found = plan(replace(asked(), run_ahead=1), quick=True)
    assert {candidate.run_ahead for candidate in found.candidates} == {1}


def test_a_recipe_that_was_planned_keeps_what_the_plan_does_not_speak_of(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(
        '[run]\nsteps = 77\n[model]\npath = "qwen2.5-0.5b"\n[data]\nsource = "addition"\n'
        "[schedule]\nbatch_size = 32\ngroup_size = 4\nrun_ahead = 1\n[train]\nlearning_rate = 3e-6  # tried\n"
    )
    found = plan(request(Options(gpu="h100", num_gpus="2", lora_rank="4"), None, file), quick=True)
    written = tmp_path / "planned.toml"
    written.write_text(of_candidate(found.request, found.chosen))
    config = resolve(written).config
    assert (config.run.steps, config.data.source, config.train.learning_rate) == (77, "addition", 3e-6)
    assert (config.adapter.kind, config.adapter.rank, config.schedule.batch_size) == ("lora", 4, 32)
