"""What the planner is asked: from options, settings and a recipe, with where each value is from; and bad input."""

import pytest

from headway.planning.request import Options, request
from headway.types import UserError

H100 = {"gpu": "h100", "num_gpus": "8"}


def asked(*overrides, model="qwen2.5-7b", recipe=None, **options):
    return request(Options(**{**H100, **options}), model, recipe, overrides)


def origins(found):
    return {item.name: (item.value, item.origin) for item in found.assumptions}


def test_what_nobody_says_is_assumed_and_listed():
    found = origins(asked())
    assert found["schedule.batch_size"] == (256, "assumed")
    assert found["generate.lanes"] == (256, "assumed")  # as many as a batch has rollouts
    assert found["simulate.mean_length"] == (1024.0, "assumed")  # a quarter of the longest
    assert (found["algorithm"], found["precision"], found["sleep"]) == (
        *(("grpo", "assumed"), ("mixed", "assumed")),
        ("weights", "assumed"),
    )
    assert found["prepare.micro_batch_tokens"] == ("chosen", "planned")
    assert {origin for _, origin in found.values()} == {"assumed", "planned"}


def test_what_is_said_is_taken():
    found = asked("--batch-size=512", "--lanes", "128", prompt_tokens="100", mean_tokens="50", longest="1000")
    values = origins(found)
    assert values["schedule.batch_size"] == (512, "command line")
    assert values["generate.lanes"] == (128, "command line")
    assert (values["prompt-tokens"], values["longest"]) == ((100.0, "command line"), (1000.0, "command line"))
    assert (found.batch, found.lanes, found.answers.prompt, found.longest, found.mean) == (512, 128, 100, 1000, 50)
    assert found.answers.longest <= 1000


def test_a_recipe_is_taken(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[model]\npath = "smollm2-135m"\n[generate]\nlanes = 64\nmax_new_tokens = 16\n'
        "[schedule]\nbatch_size = 128\ngroup_size = 8\nrun_ahead = 2\n[objective]\nkl_coefficient = 0.1\n"
        '[adapter]\nkind = "lora"\nrank = 4\n'
    )
    found = asked(model=None, recipe=recipe)
    assert (found.shape.name, found.lanes, found.batch, found.run_ahead, found.longest) == (
        *("SmolLM2-135M", 64, 128),
        *(2, 16),
    )
    assert found.models.reference
    assert found.models.adapter_params == found.shape.adapter_params(4)
    assert origins(found)["generate.lanes"] == (64, "recipe")


def test_every_recipe_of_ours_can_be_planned(pytestconfig):
    for recipe in sorted((pytestconfig.rootpath / "recipes").glob("*.toml")):
        found = request(Options(gpu="rtx-4090"), None, recipe)
        assert found.hardware.num == 1
        assert found.shape.num_params > 0


def test_adapters_of_either_kind():
    assert asked(lora_rank="16").models.adapter_params == 40_370_176
    assert asked("--adapter.kind=tinylora", "--adapter.vector_size=13").models.adapter_params == 13 * 28 * 7


def test_the_tinylora_recipe_trains_840_numbers(pytestconfig):
    """Four for each of 210 linear layers."""
    recipe = pytestconfig.rootpath / "recipes" / "smollm2-tinylora.toml"
    assert request(Options(gpu="l4"), None, recipe).models.adapter_params == 840


def test_an_adapter_keeps_the_engines_weights_while_training():
    """A sync brings the adapter alone, so the base can't be given back."""
    assert (asked().sleep, asked(lora_rank="8").sleep, asked(sleep="cache").sleep) == ("weights", "cache", "cache")
    with pytest.raises(UserError, match="is the adapter alone; take cache"):
        asked(lora_rank="8", sleep="weights")


def test_without_an_adapter_all_weights_are_trained():
    assert asked().models.adapter_params is None


def test_models_of_each_algorithm():
    assert (asked(algorithm="PPO").models.critic, asked().models.critic) == (True, False)
    assert (asked(kl=True).models.reference, asked().models.reference) == (True, False)


def test_efficiencies_are_settable():
    found = asked(efficiency={"bandwidth": "0.9", "step_overhead_s": "0"})
    assert (found.efficiency.bandwidth, found.efficiency.step_overhead_s, found.efficiency.prefill) == (0.9, 0.0, 0.5)


@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        ({"gpu": None}, [], "which GPU? headway plan --model MODEL --gpu GPU"),
        ({"model": None}, [], "which model? headway plan --model MODEL"),
        ({"gpu": "h10"}, [], "unknown GPU 'h10'; did you mean h100-sxm"),
        ({"model": "qwen2.5-8b"}, [], "unknown model 'qwen2.5-8b'"),
        ({"num_gpus": "0"}, [], "--num-gpus = '0': a whole number, at least 1"),
        ({"num_gpus": "99999999999"}, [], "at least 1 and at most 100,000"),
        ({"longest": "1e308"}, [], "--longest = '1e308': a whole number, at least 1 and at most 10,000,000"),
        ({"sleep": "deep"}, [], "--sleep 'deep' is not known; it may be none, cache, weights"),
        ({"num_gpus": "many"}, [], "--num-gpus = 'many': a whole number, at least 1"),
        ({"num_gpus": "6", "tensor": "4"}, [], "6 GPUs that train are not divided by tensor 4"),
        ({"tensor": "8"}, [], "28 heads, which tensor parallelism of 8 does not divide"),
        ({"algorithm": "pp"}, [], "--algorithm 'pp' is not known; it may be grpo or ppo"),
        ({"precision": "mixd"}, [], "--precision 'mixd' is not known; did you mean mixed?"),
        ({"longest": "0"}, [], "--longest = '0': a whole number, at least 1"),
        ({"prompt_tokens": "-3"}, [], "--prompt-tokens = '-3': a whole number, at least 1"),
        ({"mean_tokens": "nan"}, [], "--mean-tokens = 'nan': a whole number, at least 1"),
        ({"lora_rank": "0"}, [], "--lora-rank = '0': a whole number, at least 1"),
        ({"nominal": "seven"}, [], "--nominal = 'seven': a number above 0"),
        ({"usable": "1.5"}, [], "--usable = '1.5': a number above 0 and at most 1"),
        ({"price": "-1"}, [], "--price = '-1': a number above 0"),
        ({"efficiency": {"training": "2"}}, [], "--training-efficiency = '2': a number above 0 and at most 1"),
        ({"efficiency": {"step_overhead_s": "-1"}}, [], "--step-overhead = '-1': a number 0 or more"),
        ({}, ["--batch-size=30"], "a batch of 30 rollouts is no multiple of groups of 8"),
        ({}, ["--temperature=0.5"], "--generate.temperature does nothing in headway plan"),
        ({}, ["--lengths=normal"], "simulate.lengths 'normal' is not understood"),
    ],
)
def test_bad_input_is_one_line(options, overrides, message):
    with pytest.raises(UserError) as error:
        asked(*overrides, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
