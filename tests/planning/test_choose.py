"""Which schedule is chosen: the laws' short list, the simulations, and the recipe that comes of it."""

import tomllib
from dataclasses import replace

import pytest

from headway.config import resolve
from headway.plan.laws import largest_rate
from headway.planning.candidates import layouts, sync_bytes, times
from headway.planning.choose import plan, recipe, settings_of, short_list, spare_lanes
from headway.planning.request import Options, request
from headway.simulation import simulate

SMALL = ("--batch-size=32", "--group-size=4", "--lanes=32")


def asked(*overrides, model="qwen2.5-7b", num_gpus="4", **options):
    return request(Options(gpu="h100", num_gpus=num_gpus, longest="512", **options), model, None, [*SMALL, *overrides])


@pytest.fixture(scope="module")
def planned():
    return plan(asked(price="3.6"))


def test_every_split_is_looked_at():
    found = layouts(asked())
    assert [(one.sharing, one.generating, one.training) for one in found] == [
        ("colocated", 4, 4),
        ("disaggregated", 3, 1),
        ("disaggregated", 2, 2),
        ("disaggregated", 1, 3),
    ]


def test_splits_are_of_whole_engines_and_whole_trainers():
    found = layouts(asked(num_gpus="16", tensor="4", engine_tensor="2"))
    assert [(one.generating, one.training) for one in found[1:]] == [(12, 4), (8, 8), (4, 12)]


def test_of_very_many_gpus_some_splits_are_looked_at():
    assert len(layouts(asked(num_gpus="1024"))) <= 65


def test_one_gpu_can_only_take_turns():
    assert [one.sharing for one in layouts(asked(num_gpus="1", model="qwen2.5-0.5b"))] == ["colocated"]


def test_more_training_gpus_train_faster_and_more_generating_ones_decode_faster():
    request_, splits = asked(), layouts(asked())[1:]
    took = [times(request_, split) for split in splits]
    assert [one.train_s for one in took] == sorted((one.train_s for one in took), reverse=True)
    assert [one.decode_tokens_per_s for one in took] == sorted((one.decode_tokens_per_s for one in took), reverse=True)


def test_weights_under_way():
    assert sync_bytes(asked()) == 2 * 7_615_616_512
    assert sync_bytes(asked(lora_rank="32")) == 2 * 80_740_352
    assert sync_bytes(asked(nominal="7e9")) == 14e9


def test_the_closed_laws_bound_what_the_scheduler_gives(planned):
    """No simulated schedule is faster than its bound; and those that the lanes or the trainer hold come near it."""
    for candidate in planned.simulated:
        if candidate.run_ahead > 0 and candidate.layout.sharing == "disaggregated":
            took = candidate.times
            bound = largest_rate(32, took.rollout_s, 32, took.train_s)
            assert candidate.figures.rollouts_per_s <= 1.1 * bound  # rollouts speed up where few are in flight
            assert candidate.figures.rollouts_per_s >= 0.5 * candidate.rate


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
            rates[one.layout.training] = max(one.rate, rates.get(one.layout.training, 0.0))
    splits = {one.layout.training for one in listed if one.layout.sharing == "disaggregated"}
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
    assert "nothing fits: the nearest layout (all 4 by turns) needs" in found.reasons[0]
    assert "Adam's moments" in found.reasons[0]
    assert "--offload, --lora-rank" in found.reasons[1]


def test_the_recipe_gives_the_same_simulation_again(planned, tmp_path):
    text = recipe(planned.request, planned.chosen)
    file = tmp_path / "chosen.toml"
    file.write_text(text)
    tables = tomllib.loads(text)
    assert tables["model"]["path"] == "qwen2.5-7b"
    assert tables["schedule"]["run_ahead"] == planned.chosen.run_ahead
    words = [f"--{key}={str(value).lower()}" for key, value in settings_of(planned.request, planned.chosen).items()]
    again, direct = (simulate(resolve(*source).config) for source in ((file, []), (None, words)))
    assert [(event.kind, event.at_s) for event in again] == [(event.kind, event.at_s) for event in direct]


def test_a_colocated_recipe_lets_the_engine_sleep(planned):
    colocated = [one for one in planned.simulated if one.layout.sharing == "colocated"]
    values = settings_of(planned.request, colocated[-1])
    assert (values["generate.sleep"], values["schedule.overlap"]) == ("weights", False)


def test_lanes_for_which_there_is_room(planned):
    """More rollouts than that at their longest would not fit in the caches of all engines."""
    split = next(one for one in planned.candidates if one.layout.training == 2)
    job = split.layout.placed.job
    spare = spare_lanes(planned.request, split)
    each = job.shape.kv_bytes(job.answers.prompt + job.answers.longest)
    room = planned.request.hardware.budget - 2 * job.shape.num_params - 4e9
    assert spare == 2 * (room // each)


def test_a_given_run_ahead_is_the_only_one():
    found = plan(replace(asked(), run_ahead=1), quick=True)
    assert {candidate.run_ahead for candidate in found.candidates} == {1}
