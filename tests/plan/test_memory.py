"""Memory by line and phase: by hand for one job, and on the safe side for all."""

from dataclasses import replace
from math import inf, log

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.plan.gpus import find_gpu, gpus
from headway.plan.lengths import Answers
from headway.plan.memory import (
    ENGINE_OVERHEAD,
    TRAINER_OVERHEAD,
    Generation,
    Job,
    Training,
    colocated,
    disaggregated,
    lanes_that_fit,
)
from headway.plan.models import find_model, known_models
from headway.plan.placement import Hardware, fits, generations, place, sharding
from headway.plan.states import PRECISIONS, Models, Sharding, models_of
from headway.types import UserError

QWEN = find_model("qwen2.5-7b")
MODELS = known_models()
CONSTANT = Answers.of(0, [16_384.0])


def job(shape=QWEN, models=None, answers=CONSTANT, num_gpus=8, lanes=64, tensor=1, **training):
    usual = {"sharding": Sharding(num_gpus), "precision": PRECISIONS["mixed"], "micro_batch_tokens": 16_384}
    return Job(
        shape,
        models or models_of("grpo"),
        answers,
        Generation(num_gpus // tensor, tensor, lanes),
        Training(**{**usual, **training}),
    )


def lines(pool, phase):
    (found,) = [each for each in pool.phases if each.name == phase]
    return {line.name: line.expected for line in found.lines}


def test_ppo_at_a_nominal_size_is_an_eighth_of_the_textbooks_total_on_each_of_eight():
    """252 / 8 = 31.5 GB, the critic without its LM head a little less."""
    ppo = replace(job(models=models_of("ppo")), nominal_params=7.0e9)
    (pool,) = colocated(ppo, "weights")
    states = lines(pool, "train")
    names = ("weights", "gradients", "master weights", "Adam's moments", "reference", "reward model")
    assert sum(states[name] for name in names) / 1e9 == pytest.approx((112 + 28) / 8)
    critic = states["critic"] + states["critic's optimizer"]
    assert critic / 1e9 == pytest.approx(14 * (1 - QWEN.embedding_params / QWEN.num_params))


def test_each_line_of_a_training_gpu_by_hand():
    states = lines(disaggregated(job())[1], "train")
    share = QWEN.num_params / 8
    assert states["weights"] == states["gradients"] == 2 * share
    assert (states["master weights"], states["Adam's moments"]) == (4 * share, 8 * share)
    layer = QWEN.layers[0].num_params(3584)
    assert states["gathered layers"] == 2 * (2 * layer + 2 * QWEN.embedding_params) + 2 * layer
    assert states["logits"] == 3 * 4 * 64_000_000
    coming = states["activations"] + states["logits"] + states["gathered layers"]
    assert states["fragmentation"] == pytest.approx(0.05 * coming)
    assert states["trainer overhead"] == TRAINER_OVERHEAD[1]


def test_each_line_of_a_generating_gpu_by_hand():
    """64 rollouts of 16,384 tokens on 8 engines: 8 each, 0.94 GB of cache each."""
    generating = lines(disaggregated(job())[0], "generate")
    assert generating == {
        "engine's weights": 2 * QWEN.num_params,
        "keys and values": 8 * 16_384 * 57_344,
        "engine overhead": ENGINE_OVERHEAD[1],
    }


def test_the_peak_is_the_most_of_any_phase_and_not_the_sum():
    (pool,) = colocated(job(), "weights")
    by_phase = {phase.name: phase.expected for phase in pool.phases}
    assert pool.peak.expected == max(by_phase.values()) < sum(by_phase.values())


def test_a_sleeping_engine_gives_back_what_it_says():
    trained = {sleep: lines(colocated(job(), sleep)[0], "train") for sleep in ("none", "cache", "weights")}
    assert {"engine's weights", "keys and values"} <= set(trained["none"])
    assert "keys and values" not in trained["cache"]
    assert "engine's weights" in trained["cache"]
    assert not {"engine's weights", "keys and values"} & set(trained["weights"])


def test_offloaded_optimizer_states_are_there_only_while_training():
    (pool,) = colocated(job(offload=True), "weights")
    assert "Adam's moments" in lines(pool, "train")
    assert not {"Adam's moments", "master weights"} & set(lines(pool, "generate"))
    assert "Adam's moments" in lines(colocated(job(), "weights")[0], "generate")


def test_an_adapter_trains_little_and_needs_no_reference():
    adapter = job(models=models_of("grpo", kl=True, adapter_params=40_370_176))
    states = lines(disaggregated(adapter)[1], "train")
    assert states["base weights"] == 2 * QWEN.num_params / 8
    assert states["adapter"] == 16 * 40_370_176 / 8
    assert "reference" not in states
    assert states["fragmentation"] > 0
    assert lines(disaggregated(adapter)[1], "sync")["weights under way"] == 2 * 2 * 40_370_176


def test_whole_logits_are_most_of_a_long_micro_batch():
    """16,384 tokens x 152,064 ids x 12 bytes: the fault behind many an out-of-memory."""
    whole = lines(disaggregated(job(chunked_logits=False))[1], "train")["logits"]
    assert whole == 12 * 16_384 * 152_064
    assert whole / 1e9 == pytest.approx(29.9, abs=0.05)


def test_a_micro_batch_holds_the_longest_sequence_whole():
    long = job(answers=Answers.of(512, [32_000.0]), micro_batch_tokens=1000)
    assert long.micro_batch_tokens == 32_512


def test_key_value_heads_are_divided_as_far_as_there_are_any():
    """Qwen2.5-7B has four, a latent is one."""
    shared = {tensor: lines(disaggregated(job(tensor=tensor))[0], "generate") for tensor in (1, 4)}
    assert shared[4]["keys and values"] == 4 * shared[1]["keys and values"] / 4  # four times the lanes, a quarter each
    deepseek = job(shape=MODELS["deepseek-v3"], tensor=8)
    cache = lines(disaggregated(deepseek)[0], "generate")["keys and values"]
    assert cache == 64 * 16_384 * 70_272  # a latent is on every one of them


def test_lanes_that_fit_beside_the_weights():
    alone = job(num_gpus=1)
    room = 0.9 * 80e9 - 2 * QWEN.num_params - ENGINE_OVERHEAD[1]
    assert lanes_that_fit(alone, 0.9 * 80e9, others=0) == room // (16_384 * 57_344) == 56
    assert lanes_that_fit(alone, 0.9 * 80e9, others=70e9) == 0


# ---- lengths


def test_constant_answers_hold_all_of_themselves_together_and_half_in_a_steady_state():
    floor, expected = Answers.of(100, [1000.0]).held(64)
    assert (floor, expected) == (64 * 600, 64 * 1100)


def test_exponential_answers_hold_their_mean():
    """E[L^2] / 2 E[L] of exponential lengths is their mean."""
    num = 20_000
    lengths = [-1000 * log((place + 0.5) / num) for place in range(num)]
    mean, deviation = Answers.of(0, lengths).steady
    assert mean == pytest.approx(1000, rel=0.01)
    assert deviation == pytest.approx(1000, rel=0.02)


def test_a_token_budget_cuts_answers():
    assert Answers.of(0, [10.0, 50.0, 900.0], longest=100).lengths == (10.0, 50.0, 100.0)


# ---- on the safe side

NAMES, CARDS = st.sampled_from(list(MODELS)), st.sampled_from(list(gpus()))
SHAPES_OF_LENGTHS = st.sampled_from([[1.0], [0.2, 0.6, 2.2], [0.1] * 9 + [9.1]])


WAYS = [lambda job: colocated(job, "none"), lambda job: colocated(job, "weights"), disaggregated]
GRID = (
    NAMES,
    st.sampled_from([models_of("ppo"), models_of("grpo"), models_of("grpo", kl=True), Models(adapter_params=10**7)]),
    st.integers(0, 3),
    SHAPES_OF_LENGTHS,
    st.fixed_dictionaries(
        {
            "num_gpus": st.integers(0, 6).map(lambda power: 2**power),
            "lanes": st.integers(1, 2048),
            "prompt": st.integers(1, 4096),
            "mean": st.integers(1, 32_768),
            "micro_batch_tokens": st.integers(1, 65_536),
        }
    ),
    st.sampled_from(["num_gpus", "lanes", "prompt", "mean", "micro_batch_tokens"]),
    st.integers(2, 6),
)


def jobs(name, models, zero, relative, *, num_gpus, lanes, prompt, mean, micro_batch_tokens):
    """One for each size of engine."""
    shape, answers = MODELS[name], Answers.of(prompt, [mean * length for length in relative])
    training = Training(sharding(shape, num_gpus, zero=zero), PRECISIONS["mixed"], micro_batch_tokens)
    return [Job(shape, models, answers, each, training) for each in generations(shape, num_gpus, lanes)]


def grow(inputs, what, factor):
    return {**inputs, what: inputs[what] * (2 if what == "num_gpus" else factor)}


SLOW = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=300)


@SLOW
@given(*GRID)
def test_more_gpus_never_need_more_and_more_of_anything_else_never_less(
    name, models, zero, relative, inputs, what, factor
):
    """On the fullest GPU, with engines of a given size."""
    grown = grow(inputs, what, factor)
    for before, after in zip(
        jobs(name, models, zero, relative, **inputs), jobs(name, models, zero, relative, **grown), strict=False
    ):
        for way in WAYS:
            less, more = (max(pool.peak.expected for pool in way(each)) for each in (before, after))
            if what == "num_gpus":
                less, more = more, less
            assert less <= more * (1 + 1e-9)


@SLOW
@given(*GRID, CARDS)
def test_what_fits_still_fits_on_more_gpus_and_with_less_of_anything_else(
    name, models, zero, relative, inputs, what, factor, card
):
    grown = grow(inputs, what, factor)
    for way in WAYS:
        before, after = (
            place(jobs(name, models, zero, relative, **these), way, Hardware(gpus()[card], these["num_gpus"])).fits
            for these in (inputs, grown)
        )
        assert (before <= after) if what == "num_gpus" else (after <= before)


@given(NAMES, CARDS, st.integers(0, 6))
def test_a_floor_is_never_above_what_is_expected(name, card, power):
    shape, hardware = MODELS[name], Hardware(gpus()[card], 2**power)
    generation = generations(shape, hardware.num, 256)[-1]
    training = Training(Sharding(2**power), PRECISIONS["mixed"], 4096)
    whole = Job(shape, models_of("ppo"), CONSTANT, generation, training)
    for pool in [*colocated(whole, "none"), *disaggregated(whole)]:
        for phase in pool.phases:
            assert all(0 <= line.floor <= line.expected < inf for line in phase.lines), phase


def test_what_does_not_fit_is_not_said_to():
    """None of the full fine-tuning rows fits on one GPU of 80 GB; with eight, GRPO does."""
    for algorithm, kl in [("ppo", False), ("grpo", True), ("grpo", False)]:
        one = job(models=models_of(algorithm, kl=kl), num_gpus=1, lanes=1, answers=Answers.of(64, [64.0]))
        assert not fits(colocated(one, "weights"), Hardware(find_gpu("h100"), 1))
    assert fits(colocated(job(offload=True), "weights"), Hardware(find_gpu("h100"), 8))


def test_the_smallest_engine_that_fits_is_taken_and_the_nearest_where_none_does():
    whole = [replace(job(), generation=each) for each in generations(QWEN, 8, 64)]
    chosen = place(whole, disaggregated, Hardware(find_gpu("h100"), 16))
    assert (chosen.fits, chosen.job.generation.tensor, chosen.job.generation.replicas) == (True, 1, 8)
    small = place(whole, disaggregated, Hardware(find_gpu("l4"), 16))
    each = [max(pool.peak.expected for pool in disaggregated(one)) for one in whole]
    assert (small.fits, small.fullest) == (False, min(each))


@pytest.mark.parametrize(
    ("num_gpus", "ways", "message"),
    [
        (8, {"tensor": 3}, "8 GPUs that train are not divided by tensor 3 x pipeline 1; 8 is divided by 1, 2, 4, 8"),
        (6, {"tensor": 6}, "has 28 heads, which tensor parallelism of 6 does not divide"),
        (64, {"pipeline": 32}, "has 28 layers, too few for a pipeline of 32"),
        (8, {"expert": 2}, "expert parallelism of 2: Qwen2.5-7B has no experts; leave it out"),
        (8, {"tensor": 0}, "tensor parallelism of 0: give at least 1"),
        (8, {"zero": 4}, "ZeRO level 4 does not exist; give 0, 1, 2 or 3"),
    ],
)
def test_gpus_that_the_parallelism_does_not_divide(num_gpus, ways, message):
    with pytest.raises(UserError, match=message):
        sharding(QWEN, num_gpus, **ways)


def test_experts_that_data_ranks_do_not_divide():
    with pytest.raises(UserError, match="8 data ranks are not divided by expert parallelism of 3"):
        sharding(MODELS["qwen3-30b-a3b"], 8, expert=3)


def test_zero_two_reduces_gradients_in_buckets():
    """Two of 1 GiB, or all gradients that other ranks keep where those are fewer."""
    large = lines(disaggregated(job(sharding=Sharding(8, zero=2)))[1], "train")
    small = lines(disaggregated(job(shape=MODELS["smollm2-135m"], sharding=Sharding(8, zero=2)))[1], "train")
    assert large["gradient buckets"] == 2 * 2**30
    assert small["gradient buckets"] == 2 * 134_515_008 * 7 / 8


def test_a_pipelines_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    activations = [
        lines(disaggregated(job(sharding=Sharding(8, pipeline=stages), checkpointing=False))[1], "train")["activations"]
        for stages in (1, 4)
    ]
    assert activations[0] == activations[1]


def test_the_longest_answer_is_the_token_budget_whatever_was_drawn():
    assert Answers.of(10, [5.0, 7.0], longest=100).longest == 100
    assert Answers.of(10, [5.0, 7.0]).longest == 7


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(1, 64), st.floats(0.1, 5), st.floats(1, 3))
def test_longer_prompts_and_longer_answers_hold_no_less(relative, num, prompt, factor):
    """Each answer by itself too, and the budget."""
    before = Answers.of(prompt, relative).held(num)
    longer = [
        Answers.of(prompt * factor, relative),
        Answers.of(prompt, [factor * length for length in relative]),
    ]
    for after in longer:
        assert after.held(num)[0] >= before[0] * (1 - 1e-9)
        assert after.held(num)[1] >= before[1] * (1 - 1e-9)
