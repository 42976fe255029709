"""Settings: where a value comes from, what is refused and how, and the recipe a configuration turns into."""

import re
import sys
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headway import cli, config, program
from headway.config import KEYS, Config, choices, fields, resolve
from headway.types import UserError


@pytest.fixture
def recipe(tmp_path):
    """The text of a recipe -> its file."""

    def write(text, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(recipe=None, *words):
    """The message of the UserError, which is one line."""
    with pytest.raises(UserError) as caught:
        resolve(recipe, words)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Where a value comes from


def test_without_a_recipe_all_is_default():
    resolved = resolve(None)
    assert resolved.config == Config()
    assert resolved.origins == dict.fromkeys(KEYS, "default")


def test_the_command_line_goes_before_the_recipe_and_the_recipe_before_defaults(recipe):
    path = recipe("[schedule]\nbatch_size = 8\ngroup_size = 4\n")
    resolved = resolve(path, ["--schedule.batch-size", "12"])
    schedule = resolved.config.schedule
    assert (schedule.batch_size, schedule.group_size, schedule.run_ahead) == (12, 4, 1.0)
    origins = [resolved.origins[f"schedule.{name}"] for name in ("batch_size", "group_size", "run_ahead")]
    assert origins == ["command line", "recipe", "default"]


def test_a_value_that_equals_the_default_still_says_who_gave_it():
    assert resolve(None, ["--run.steps", "100"]).origins["run.steps"] == "command line"


@pytest.mark.parametrize(
    "words",
    [
        ["--schedule.run-ahead", "2"],
        ["--schedule.run_ahead", "2"],
        ["--run-ahead", "2"],
        ["--run_ahead", "2"],
        ["--run-ahead=2"],
        ["--run-ahead", "0", "--schedule.run_ahead=2"],
    ],
)
def test_ways_to_write_an_override(words):
    assert resolve(None, words).config.schedule.run_ahead == 2.0


def test_dashes_in_a_recipe(recipe):
    assert resolve(recipe("[schedule]\nrun-ahead = 0.5\n")).config.schedule.run_ahead == 0.5


def test_a_value_may_hold_what_it_likes():
    assert resolve(None, ["--run.name=--a=b"]).config.run.name == "--a=b"
    assert resolve(None, ["--run.seed", "-3"]).config.run.seed == -3


# Values that are more than a word


def test_lists_are_words_with_commas_on_the_command_line(recipe):
    assert resolve(None, ["--stop", "###,Q:"]).config.generate.stop == ("###", "Q:")
    assert resolve(None, ["--end-tokens", "<|end|>"]).config.generate.end_tokens == ("<|end|>",)
    assert resolve(None, ["--stop", ""]).config.generate.stop == ()
    assert resolve(recipe('[generate]\nstop = ["a,b", "c"]\n')).config.generate.stop == ("a,b", "c")


def test_tables_are_json_on_the_command_line(recipe):
    path = recipe("[data]\nparams = { min_terms = 3, kinds = ['a'] }\n")
    assert resolve(path).config.data.params == {"min_terms": 3, "kinds": ["a"]}
    assert resolve(path, ["--data.params", '{"min_terms": 2}']).config.data.params == {"min_terms": 2}


def test_tables_of_a_recipe_in_their_own_section(recipe):
    assert resolve(recipe("[data.params]\nmin = 1\n")).config.data.params == {"min": 1}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{min: 2}", "a table on the command line is JSON"),
        ("[1]", "dictionary"),
        ('{"a": null}', "null has no place in a recipe"),
        ('{"a": {"b": [1, null]}}', "null has no place in a recipe"),
    ],
)
def test_tables_that_are_none(value, words):
    message = refusal(None, "--data.params", value)
    assert message.startswith("--data.params = ")
    assert words in message


@pytest.mark.parametrize(("word", "value"), [("true", True), ("false", False), ("no", False), ("1", True)])
def test_switches(word, value):
    assert resolve(None, ["--data.chat", word]).config.data.chat is value


# What is refused


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--run-ahed", "schedule.run_ahead"),
        ("--schedule.runahead", "schedule.run_ahead"),
        ("--group-siez", "schedule.group_size"),
        ("--train.lr-rate", "train.learning_rate"),
        ("--lenghts", "simulate.lengths"),
        ("--shedule.max-lag", "schedule.max_lag"),
    ],
)
def test_an_unknown_key_names_the_nearest(word, nearest):
    assert refusal(None, word, "2") == f"unknown key {word}; the nearest valid key is {nearest}"


def test_an_unknown_key_of_a_recipe_names_file_and_nearest(recipe):
    path = recipe("[schedule]\nrun_ahed = 1\n")
    assert refusal(path) == f"{path}: unknown key schedule.run_ahed; the nearest valid key is schedule.run_ahead"


def test_an_unknown_section_names_the_nearest(recipe):
    path = recipe("[shedule]\nrun_ahead = 1\n")
    assert refusal(path) == f"{path}: unknown key shedule.run_ahead; the nearest valid key is schedule.run_ahead"
    path = recipe("[shedule]\n")
    assert refusal(path) == f"{path}: unknown section [shedule]; the nearest valid section is [schedule]"


def test_a_key_outside_a_section(recipe):
    path = recipe("run_ahead = 1\n")
    assert refusal(path) == f"{path}: 'run_ahead' stands outside a section; the nearest valid key is schedule.run_ahead"


def test_a_key_that_is_given_twice(recipe):
    path = recipe("[schedule]\nrun_ahead = 1\nrun-ahead = 2\n")
    assert refusal(path) == f"{path}: schedule.run_ahead is given twice, with a dash and with an underscore"


def test_an_ambiguous_short_name_names_the_keys_it_may_be():
    message = refusal(None, "--every", "3")
    assert message == "--every is ambiguous: write one of --evaluate.every, --checkpoint.every"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps"], "--steps needs a value, as in --steps VALUE"),
        (["--steps", "--run-ahead", "2"], "--steps needs a value, as in --steps VALUE"),
        (["steps", "3"], "unexpected word 'steps': an override is --section.key value"),
        (["--steps", "3", "4"], "unexpected word '4': an override is --section.key value"),
        (["-s", "3"], "unexpected word '-s': an override is --section.key value"),
    ],
)
def test_words_that_are_no_overrides(words, message):
    assert refusal(None, *words) == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "-1"], "--run.steps = '-1': input should be greater than or equal to 0"),
        (["--steps", "many"], "--run.steps = 'many': input should be a valid integer"),
        (["--run-ahead", "-1"], "--schedule.run-ahead = '-1': input should be greater than or equal to 0"),
        (["--run-ahead", "inf"], "--schedule.run-ahead = 'inf': input should be a finite number"),
        (["--train.learning-rate", "nan"], "--train.learning-rate = 'nan': input should be"),
        (
            ["--train.learning-rate-schedule", "linea"],
            "--train.learning-rate-schedule = 'linea': input should be 'constant', 'linear' or 'cosine'",
        ),
        (
            ["--in-flight", "pin"],
            "--schedule.in-flight = 'pin': input should be 'keep', 'recompute', 'drain', 'restart' or 'pinned'",
        ),
        (["--beta1", "1"], "--train.beta1 = '1': input should be less than 1"),
    ],
)
def test_unfit_values_of_the_command_line(words, message):
    assert refusal(None, *words).startswith(message)


def test_an_unfit_value_of_a_recipe_names_the_file(recipe):
    path = recipe("[run]\nsteps = -1\n")
    assert refusal(path) == f"{path}: run.steps = -1: input should be greater than or equal to 0"


def test_settings_that_do_not_go_together_are_looked_for_where_they_stand(recipe):
    path = recipe('[generate]\nforce_phrase = "Answer:"\n[run]\nsteps = 3\n')
    reason = "generate.force_after and generate.force_phrase go together: give both, or leave both out"
    assert refusal(path) == f"{path}: {reason}"
    assert refusal(path, "--top-k", "3") == f"{path} and command line: {reason}"
    path = recipe("[run]\nsteps = 3\n")
    assert refusal(path, "--force-after", "3") == f"command line: {reason}", "nothing of the section is in the recipe"


@pytest.mark.parametrize(
    ("batch_size", "group_size", "nearest"), [(30, 8, "24 or 32"), (3, 8, "8"), (9, 8, "8 or 16"), (31, 2, "30 or 32")]
)
def test_a_batch_of_broken_groups_names_sizes_that_are_whole(batch_size, group_size, nearest):
    words = ["--batch-size", str(batch_size), "--group-size", str(group_size)]
    expected = f"batch_size {batch_size} is no multiple of group_size {group_size}; try batch_size {nearest}"
    assert refusal(None, *words) == f"command line: {expected}"


@pytest.mark.parametrize("group_size", [1, 2, 3, 8])
def test_the_sizes_that_are_named_are_valid(group_size):
    for batch_size in range(1, 40):
        if batch_size % group_size:
            message = refusal(None, "--batch-size", str(batch_size), "--group-size", str(group_size))
            for size in re.findall(r"\d+", message.split("try batch_size")[1]):
                resolve(None, ["--batch-size", size, "--group-size", str(group_size)])


# Schedules that make no sense

OUTLIVES = "iteration_tokens pauses rollouts until there are new weights, and in_flight {} lets none outlive them; "


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "--stragglers dorp --max-lag 1",
            "stragglers dorp is none of accept, drop, interrupt, restart; did you mean drop?",
        ),
        ("--stragglers 1 --max-lag 1", "stragglers 1 is none of accept, drop, interrupt, restart"),
        ("--stragglers accept,drop --max-lag 1", "stragglers accept goes with no other policy"),
        (
            "--stragglers interrupt,restart --max-lag 1",
            "stragglers interrupt and restart can't both act on one group; restart interrupts after max_restarts",
        ),
        (
            "--stragglers drop,interrupt",
            "stragglers drop,interrupt acts at max_lag, which is not set; set schedule.max_lag",
        ),
        (
            "--stragglers interrupt --max-lag 1 --max-restarts 2",
            "max_restarts does nothing without stragglers restart; leave it out, or say --max-restarts none",
        ),
        ("--order window", "order window needs a number of groups; set schedule.window"),
        (
            "--order started --window 3",
            "window does nothing with order started; leave it out, or say --window none",
        ),
        ("--window 3", "window does nothing with order finished; leave it out, or say --window none"),
        *(
            (
                f"--in-flight drain --max-lag 1 --stragglers {word}",
                "with in_flight drain no rollout in flight is older than the weights, so stragglers have nothing to "
                "interrupt or restart",
            )
            for word in ("interrupt", "restart", "drop,interrupt")
        ),
        (
            "--in-flight drain --overlap false",
            "in_flight drain waits for rollouts that overlap = false has paused until after; take in_flight keep",
        ),
        ("--in-flight drain --iteration-tokens 9", OUTLIVES.format("drain") + "take in_flight keep or recompute"),
        ("--in-flight restart --iteration-tokens 9", OUTLIVES.format("restart") + "take in_flight keep or recompute"),
        (
            "--surplus keep --group-size 2",
            "surplus does nothing without redundant rollouts; leave it out, or say --surplus none",
        ),
        (
            "--surplus abort",
            "surplus does nothing without redundant rollouts; leave it out, or say --surplus none",
        ),
        (
            "--dynamic-sampling true",
            "dynamic_sampling compares the answers of a group that are trained, and group_size is 1",
        ),
        (
            "--dynamic-sampling true --redundant 3",
            "dynamic_sampling compares the answers of a group that are trained, and group_size is 1",
        ),
        (
            "--group-size 2 --max-filtered 3",
            "max_filtered does nothing without dynamic_sampling; leave it out, or say --max-filtered none",
        ),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_with_its_reason(words, reason):
    assert refusal(None, *words.split()) == f"command line: {reason}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "--parity bitwise --generate.dtype bfloat16",
            "model.parity bitwise can't be had with generate.dtype bfloat16, since the trainer's weights are float32; "
            "take generate.dtype float32, or model.parity close",
        ),
        (
            "--parity bitwise --compute-dtype bfloat16",
            "model.parity bitwise can't be had with train.compute_dtype bfloat16, since the engine's products are "
            "float32; take train.compute_dtype float32, or model.parity close",
        ),
        *(
            (
                f"--sleep {sleep} --run-ahead 0.5{in_flight}",
                f"generate.sleep {sleep} stops generation while a batch is trained, and schedule.overlap lets rollouts "
                "go on; set schedule.overlap to false, so that they pause, or schedule.run_ahead to 0",
            )
            for sleep, in_flight in (("cache", ""), ("cache", " --in-flight drain"), ("weights", ""))
        ),
        *(
            (
                f"--sleep weights --run-ahead 0 --adapter.kind {kind}",
                f"generate.sleep weights gives back what a sync brings, which with adapter.kind {kind} is the adapter "
                "alone; take cache",
            )
            for kind in ("lora", "tinylora")
        ),
    ],
)
def test_sections_that_make_no_sense_together_are_refused_with_the_reason(words, reason):
    assert refusal(None, *words.split()) == f"command line: {reason}"


@pytest.mark.parametrize(
    "words",
    [
        "--sleep cache --run-ahead 0",
        "--sleep weights --run-ahead 0",
        "--sleep weights --run-ahead 2 --overlap false",
        "--sleep cache --run-ahead 0 --adapter.kind lora",
        "--generate.dtype bfloat16 --compute-dtype bfloat16",
        "--parity bitwise --run-ahead 2",
    ],
)
def test_sections_that_go_together_are_not_refused(words):
    config.resolve(None, words.split())


@pytest.mark.parametrize(
    "words",
    [
        "--stragglers accept",
        "--stragglers accept --max-lag 0",
        "--stragglers drop --max-lag 0 --in-flight drain",
        "--stragglers drop,restart --max-lag 3 --max-restarts 2 --in-flight restart",
        "--order window --window 1 --overlap false",
        "--iteration-tokens 9 --overlap false --in-flight recompute",
        "--dynamic-sampling true --group-size 2 --redundant 1 --surplus keep --max-filtered 3",
        "--deadline-s 0.5 --in-flight drain",
    ],
)
def test_a_schedule_that_makes_sense_is_taken(words):
    resolve(None, words.split())


def test_none_takes_back_what_a_recipe_has_set(tmp_path):
    """So a run that was recorded with a window can be replayed, or go on, in another order."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[schedule]\norder = "window"\nwindow = 9\nmax_lag = 2\n')
    with pytest.raises(UserError, match=r"window does nothing with order started; .*say --window none"):
        resolve(recipe, ["--order", "started"])
    resolved = resolve(recipe, ["--order", "started", "--window", "none"])
    assert (resolved.config.schedule.window, resolved.config.schedule.max_lag) == (None, 2)
    assert resolved.origins["schedule.window"] == "command line"
    assert "# window is not set (command line)" in resolved.to_toml()


def test_none_is_a_word_like_others_where_it_may_be_one():
    assert resolve(None, ["--run.out", "none"]).config.run.out == "none"
    with pytest.raises(UserError, match=r"--run.steps = 'none': input should be a valid integer"):
        resolve(None, ["--steps", "none"])


@pytest.mark.parametrize(
    ("words", "bound"),
    [
        ("--run-ahead 2", None),
        ("--run-ahead 0", 0),
        ("--run-ahead 1.5 --order started", 2),
        ("--run-ahead 2 --order window --window 9 --batch-size 8 --group-size 2", 4),
        ("--run-ahead 2 --order window --window 9 --batch-size 8", 3),
        ("--run-ahead 2 --stragglers drop,interrupt --max-lag 5", 5),
        ("--run-ahead 2 --max-lag 5", None),
    ],
)
def test_a_configuration_has_the_bound_of_its_schedule(words, bound):
    assert program.bound(resolve(None, words.split()).config).lag == bound


# What depends on another key


@pytest.mark.parametrize(
    ("words", "learning_rate"),
    [([], 1e-5), (["--kind", "lora"], 1e-4), (["--kind", "tinylora"], 1e-4), (["--kind", "lora", "--rank", "1"], 1e-4)],
)
def test_the_learning_rate_is_ten_times_as_high_with_an_adapter(words, learning_rate):
    resolved = resolve(None, words)
    assert resolved.config.train.learning_rate == learning_rate
    assert f"learning_rate = {learning_rate!r} # default" in resolved.to_toml()
    assert resolve(None, [*words, "--train.learning-rate", "0"]).config.train.learning_rate == 0.0


def test_an_adapter_shows_what_its_kind_takes_and_nothing_else():
    shown = resolve(None, ["--kind", "lora", "--rank", "4"]).to_toml().split("[adapter]")[1].split("[data]")[0]
    assert shown.strip().splitlines() == [
        'kind = "lora" # command line',
        "rank = 4 # command line",
        "alpha = 32.0 # default",
        'scaling = "rank" # default',
        "# vector_size is not set (default)",
        "# tying is not set (default)",
        "# targets is not set (default)",
        "# start is not set (default)",
        "merge = false # default",
    ]


def test_sizes_of_an_adapter_to_go_on_from_are_its_own():
    adapter = resolve(None, ["--kind", "lora", "--start", "some/model", "--alpha", "16"]).config.adapter
    assert (adapter.rank, adapter.alpha, adapter.scaling, adapter.merge) == (None, 16.0, None, False)


@pytest.mark.parametrize(
    ("words", "name", "kind", "kinds"),
    [
        (["--rank", "8"], "rank", "none", "lora or tinylora"),
        (["--kind", "none", "--merge", "true"], "merge", "none", "lora or tinylora"),
        (["--adapter.start", "some/model"], "start", "none", "lora or tinylora"),
        (["--kind", "lora", "--tying", "1"], "tying", "lora", "tinylora"),
        (["--kind", "tinylora", "--alpha", "32"], "alpha", "tinylora", "lora"),
        (["--kind", "tinylora", "--scaling", "rank"], "scaling", "tinylora", "lora"),
    ],
)
def test_a_key_that_the_kind_of_adapter_would_ignore(words, name, kind, kinds):
    expected = f"adapter.{name} does nothing with adapter.kind {kind}; leave it out, or set adapter.kind to {kinds}"
    assert refusal(None, *words) == f"command line: {expected}"


@pytest.mark.parametrize("kind", ["lora", "tinylora", "none"])
def test_the_recipe_of_an_adapter_gives_it_again(recipe, kind):
    resolved = resolve(None, ["--kind", kind])
    assert resolve(recipe(resolved.to_toml())).config == resolved.config


def test_a_kind_of_adapter_that_is_none(recipe):
    assert refusal(None, "--kind", "lorra").startswith("--adapter.kind = 'lorra': input should be 'none', 'lora' or")
    path = recipe('[adapter]\nkind = ["lora"]\n')
    assert refusal(path).startswith(f"{path}: adapter.kind = ['lora']: input should be 'none'")


# Recipe files


def test_a_missing_recipe_names_the_nearest(recipe, tmp_path):
    recipe("", "arithmetic.toml")
    missing = tmp_path / "aritmetic.toml"
    assert refusal(missing) == f"there is no recipe {missing}; did you mean {tmp_path / 'arithmetic.toml'}?"
    nowhere = tmp_path / "nowhere" / "x.toml"
    assert refusal(nowhere) == f"there is no recipe {nowhere}"
    assert refusal(tmp_path) == f"there is no recipe {tmp_path}"


def test_malformed_toml_names_file_and_line(recipe):
    path = recipe("[run]\nsteps = = 3\n")
    message = refusal(path)
    assert message.startswith(f"{path} is not valid TOML: ")
    assert "line 2" in message


def test_a_recipe_that_is_no_text(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe[run]")
    assert refusal(path).startswith(f"{path} is not valid TOML: ")


# A configuration as a recipe


def test_the_recipe_of_a_configuration_says_where_values_come_from(recipe):
    lines = resolve(recipe("[run]\nseed = 7\n"), ["--steps", "3"]).to_toml().splitlines()
    assert "seed = 7 # recipe" in lines
    assert "steps = 3 # command line" in lines
    assert 'name = "run" # default' in lines
    assert "# out is not set (default)" in lines


def test_every_key_is_in_the_recipe():
    text = resolve(None).to_toml()
    for key in KEYS:
        assert re.search(rf"^(# )?{key.split('.')[1]} ", text, re.MULTILINE), key


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from('\n\t"\\#[]='), max_size=20)
PLAIN = st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
TABLES = st.dictionaries(
    TEXT, PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(TEXT, PLAIN, max_size=2), max_size=3
)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    template=TEXT,
    system=st.none() | TEXT,
    params=TABLES,
    stop=st.lists(TEXT.filter(bool), max_size=3),
    end_tokens=st.none() | st.lists(TEXT, max_size=2),
    learning_rate=st.floats(0, 10),
    group_size=st.integers(1, 9),
    groups=st.integers(1, 9),
)
def test_a_configuration_and_its_recipe_are_the_same(
    tmp_path_factory, template, system, params, stop, end_tokens, learning_rate, group_size, groups
):
    given_config = Config(
        data={"template": template, "system": system, "params": params},
        generate={"stop": stop, "end_tokens": end_tokens},
        train={"learning_rate": learning_rate},
        schedule={"batch_size": group_size * groups, "group_size": group_size},
    )
    path = tmp_path_factory.mktemp("recipe") / "again.toml"
    path.write_text(config.Resolved(given_config, resolve(None).origins).to_toml(), encoding="utf-8")
    assert resolve(path).config == given_config


# The settings themselves


def test_settings_are_frozen():
    settings = resolve(None).config
    with pytest.raises(ValidationError, match="frozen"):
        settings.run.steps = 5
    with pytest.raises(ValidationError, match="frozen"):
        settings.run = config.Run()
    assert settings == Config()


def test_every_key_has_a_description():
    assert [key for key, info in fields() if not info.description] == []


def test_a_short_name_is_ambiguous_or_finds_its_key():
    names = [key.split(".")[1] for key in KEYS]
    for key, name in zip(KEYS, names, strict=True):
        if names.count(name) == 1:
            assert config.full_key(name) == key
        else:
            assert "is ambiguous" in refusal(None, f"--{name}", "1")


@pytest.mark.parametrize(
    ("annotation", "shown"),
    [
        (int, "int"),
        (float | None, "float"),
        (Literal["pinned", "keep"], "pinned|keep"),
        (config.Strings, "words"),
        (config.Strings | None, "words"),
        (config.Parameters, "table"),
        (int | str, "int or str"),
    ],
)
def test_types_in_help_texts(annotation, shown):
    assert choices(annotation) == shown


def test_every_type_has_a_short_name():
    assert all(re.fullmatch(r"[a-z0-9|_]+( or [a-z]+)*", choices(info.annotation)) for _, info in fields())


def test_an_empty_stop_string_is_refused(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[generate]\nstop = ["\\n", ""]\n')
    with pytest.raises(UserError, match="an empty stop string would end every rollout"):
        resolve(recipe)


def test_numbers_that_no_clock_can_count_are_refused():
    for words in (["--run-ahead", "1e308"], ["--train-time", "1e308"], ["--mean-length", "1e308"]):
        with pytest.raises(UserError, match="input should be less than or equal to"):
            resolve(None, words)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("objectives grpo --run-ahead 0", "--schedule.run-ahead does nothing in headway objectives"),
        ("simulate --objective.name grpo", "--objective.name does nothing in headway simulate"),
        ("objectives --clip-high 0.3", "which objective"),
    ],
)
def test_a_command_refuses_settings_that_it_would_not_look_at(command: str, said: str, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["headway", *command.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
