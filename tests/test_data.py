import doctest
import json
import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import headway.data
from headway.config import Data, Evaluate
from headway.data import PromptSource, load_items, split_items
from headway.types import Prompt, UserError


def items_of(seed=0, **settings):
    return load_items(Data(**settings), seed)


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_examples_of_the_documentation():
    assert doctest.testmod(headway.data).failed == 0


# Sums


def test_a_sum_is_spelled_and_answered():
    (prompt,) = items_of(source="addition", params={"min": 7, "max": 7})
    assert (prompt.text, prompt.answer, prompt.tokens) == ("7+7=", "14", ())


def test_without_a_size_a_small_range_gives_every_sum_once():
    prompts = items_of(source="addition", params={"min": 3, "max": 12})
    assert {prompt.text for prompt in prompts} == {f"{a}+{b}=" for a in range(3, 13) for b in range(3, 13)}
    assert len(prompts) == 100
    assert len({prompt.uid for prompt in prompts}) == 100


@pytest.mark.parametrize(("digits", "low", "high"), [(1, 0, 9), (2, 10, 99), (12, 10**11, 10**12 - 1)])
def test_digits_are_those_of_both_summands(digits, low, high):
    for prompt in items_of(source="addition", params={"digits": digits}, size=50):
        a, b = map(int, prompt.text.rstrip("=").split("+"))
        assert low <= a <= high
        assert low <= b <= high
        assert prompt.answer == str(a + b)


def test_the_seed_and_nothing_else_decides_the_sums():
    settings = {"source": "addition", "size": 40}
    assert items_of(seed=1, **settings) == items_of(seed=1, **settings)
    assert items_of(seed=1, **settings) != items_of(seed=2, **settings)


def test_a_sum_has_the_same_uid_under_every_seed_and_template():
    one = {prompt.answer: prompt.uid for prompt in items_of(seed=1, source="addition", params={"max": 0})}
    other = items_of(seed=2, source="addition", params={"max": 0}, template="What is {question}")
    assert one == {prompt.answer: prompt.uid for prompt in other}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mx": 9}, "no parameter 'mx'; did you mean max"),
        ({"max": "9"}, "max = '9' must be a whole number"),
        ({"min": 5, "max": 4}, "min = 5 is above max = 4"),
        ({"digits": 2, "max": 4}, "digits is 1 or more and stands alone"),
        ({"digits": 0}, "digits is 1 or more"),
    ],
)
def test_unfit_parameters_of_addition(params, message):
    with pytest.raises(UserError, match=message):
        items_of(source="addition", params=params)


def test_more_sums_than_there_are():
    with pytest.raises(UserError, match="5 different sums of numbers from 0 to 1 are asked for, but there are 4"):
        items_of(source="addition", params={"max": 1}, size=5)


# Sources and templates


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "data.source is not set; choose addition, reasoning_gym:TASK, or a .jsonl file"),
        ({"source": "additoin"}, "no source; did you mean addition"),
        ({"source": "prompts.csv"}, "no source; choose"),
        ({"source": "addition", "template": "Q:"}, "no {question}"),
    ],
)
def test_unfit_sources(settings, message):
    with pytest.raises(UserError, match=message):
        items_of(**settings)


def test_a_template_takes_the_question_and_leaves_other_braces():
    prompts = items_of(source="addition", params={"min": 1, "max": 1}, template="{x} {question} Say {}:")
    assert prompts[0].text == "{x} 1+1= Say {}:"


# Files


def test_a_file_gives_its_lines_in_order(tmp_path):
    path = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "2+2=", "answer": "4", "level": 3},
        {"question": "capital of France?", "answer": "Paris", "uid": "fr"},
        {"prompt": "1+1=", "answer": 2, "uid": 17},
        {"prompt": "say anything"},
    )
    prompts = items_of(source=path)
    assert [prompt.text for prompt in prompts] == ["2+2=", "capital of France?", "1+1=", "say anything"]
    assert [prompt.answer for prompt in prompts] == ["4", "Paris", "2", None]
    assert [prompt.uid for prompt in prompts[1:3]] == ["fr", "17"]
    assert prompts[0].task == {"level": 3}
    assert pickle.loads(pickle.dumps(prompts)) == prompts


def test_size_takes_the_first_prompts_of_a_file_and_says_when_there_are_fewer(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", *({"prompt": str(n)} for n in range(5)))
    assert [prompt.text for prompt in items_of(source=path, size=2)] == ["0", "1"]
    with pytest.raises(UserError, match="holds 5 prompts, 6 are asked for"):
        items_of(source=path, size=6)


def test_uids_do_not_depend_on_the_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [write_lines(tmp_path / folder / "p.jsonl", {"prompt": "x"}) for folder in "ab"]
    assert items_of(source=paths[0]) == items_of(source=paths[1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"p.jsonl:3: Expecting"),
        (b'["a"]', r"p.jsonl:3: a list; a line is a JSON object"),
        (b'{"text": "a"}', r"p.jsonl:3: no prompt; it has 'text'; name its text 'prompt'"),
        (b'{"prompt": "a", "question": "b"}', r"p.jsonl:3: both a prompt and a question"),
        (b'{"prompt": " "}', r"p.jsonl:3: prompt must be a string that is not empty"),
        (b'{"prompt": [1]}', r"p.jsonl:3: prompt must be a string"),
        (b'{"prompt": "a", "answer": [1]}', r"p.jsonl:3: answer must be a string or a number, not \[1\]"),
        (b'{"prompt": "caf\xe9"}', r"p.jsonl:3: 'utf-8' codec can't decode"),
        (b"[" * 100_000, r"p.jsonl:3: "),
        (b'{"prompt": "first"}', r"p.jsonl:3: the same prompt and answer as in line 1"),
        (b'{"prompt": "other", "uid": "one"}', r"p.jsonl:3: the same uid 'one' as in line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "first"}\n{"prompt": "second", "uid": "one"}\n' + line)
    with pytest.raises(UserError, match=message) as caught:
        items_of(source=str(path))
    assert "\n" not in str(caught.value)


def test_blank_lines_and_a_byte_order_mark_are_no_prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}')
    assert [prompt.text for prompt in items_of(source=str(path))] == ["a", "b"]


def test_a_missing_file_names_the_nearest(tmp_path):
    write_lines(tmp_path / "train.jsonl", {"prompt": "a"})
    with pytest.raises(UserError, match=r"there is no file .*trian.jsonl; did you mean .*train.jsonl"):
        items_of(source=str(tmp_path / "trian.jsonl"))
    with pytest.raises(UserError, match="there is no file"):
        items_of(source=str(tmp_path / "nowhere" / "trian.jsonl"))


def test_an_empty_file_and_parameters_of_a_file(tmp_path):
    path = write_lines(tmp_path / "p.jsonl")
    with pytest.raises(UserError, match="holds no prompts"):
        items_of(source=path)
    with pytest.raises(UserError, match="params are for task generators"):
        items_of(source=path, params={"max": 3})


# The held-out split


def split_of(settings, evaluate, seed=0):
    return split_items(load_items(settings, seed), settings, evaluate, seed)


def test_nothing_is_held_out_by_default():
    settings = Data(source="addition", size=4)
    split = split_of(settings, Evaluate())
    assert (len(split.training), split.held_out, split.num_left_out) == (4, [], 0)


def test_held_out_sums_are_not_trained():
    settings = Data(source="addition", params={"max": 9})
    split = split_of(settings, Evaluate(size=30))
    assert (len(split.training), len(split.held_out), split.num_left_out) == (70, 30, 30)
    assert not {prompt.text for prompt in split.training} & {prompt.text for prompt in split.held_out}


def test_holding_out_everything_is_refused():
    with pytest.raises(UserError, match="holds out every one of the 4 prompts"):
        split_of(Data(source="addition", params={"max": 1}), Evaluate(size=4))


def test_prompts_of_the_file_are_held_out_whatever_the_seed(tmp_path):
    settings = Data(source=write_lines(tmp_path / "p.jsonl", *({"prompt": str(n)} for n in range(10))))
    splits = [split_of(settings, Evaluate(size=3), seed) for seed in (0, 1)]
    assert splits[0] == splits[1]
    assert (len(splits[0].training), len(splits[0].held_out), splits[0].num_left_out) == (7, 3, 0)


def test_a_file_with_too_few_prompts_to_hold_out(tmp_path):
    settings = Data(source=write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}))
    assert len(split_of(settings, Evaluate(size=1)).training) == 1
    with pytest.raises(UserError, match=r"gives 2 prompts, too few for evaluate.size = 2.*at most 1"):
        split_of(settings, Evaluate(size=2))


def test_training_prompts_that_stand_in_the_evaluation_file_are_left_out(tmp_path):
    training = write_lines(tmp_path / "train.jsonl", *({"prompt": f"q {n}"} for n in range(4)))
    held_out = write_lines(tmp_path / "test.jsonl", {"prompt": "q  2 "}, {"prompt": "new"}, {"prompt": "unused"})
    split = split_of(Data(source=training), Evaluate(size=2, source=held_out))
    assert [prompt.text for prompt in split.training] == ["q 0", "q 1", "q 3"]
    assert [prompt.text for prompt in split.held_out] == ["q  2 ", "new"]
    assert split.num_left_out == 1


def test_unfit_evaluation_files(tmp_path):
    training = Data(source=write_lines(tmp_path / "train.jsonl", {"prompt": "a", "uid": "x"}))
    held_out = write_lines(tmp_path / "test.jsonl", {"prompt": "b", "uid": "x"})
    with pytest.raises(UserError, match="holds 1 prompts, 2 are asked for"):
        split_of(training, Evaluate(size=2, source=held_out))
    with pytest.raises(UserError, match="uid 'x' names a training prompt and another held-out prompt"):
        split_of(training, Evaluate(size=1, source=held_out))
    with pytest.raises(UserError, match=r"no .jsonl file"):
        split_of(training, Evaluate(size=1, source="addition"))


# reasoning_gym


def test_a_task_gives_different_prompts_with_what_its_scorer_needs():
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    settings = Data(source="reasoning_gym:chain_sum", params=params, size=120)
    prompts = load_items(settings, 3)
    assert len({prompt.text for prompt in prompts}) == 120
    assert load_items(settings, 3) == prompts
    task = prompts[0].task
    assert (task["reasoning_gym"], task["params"]) == ("chain_sum", params)
    assert (task["entry"]["question"], task["entry"]["answer"]) == (prompts[0].text, prompts[0].answer)
    held_out = split_items(prompts, settings, Evaluate(size=50), 3)
    assert not {prompt.text for prompt in held_out.training} & {prompt.text for prompt in held_out.held_out}


def test_neighbouring_seeds_of_a_task_share_few_prompts():
    settings = {"source": "reasoning_gym:chain_sum", "size": 30, "params": {"min_digits": 4, "min_terms": 5}}
    one, other = ({prompt.text for prompt in items_of(seed=seed, **settings)} for seed in (0, 1))
    assert not one & other


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "reasoning_gym:chain_sums"}, "no task 'chain_sums'; did you mean chain_sum"),
        ({"source": "reasoning_gym:"}, "no task ''; there are"),
        ({"params": {"max_term": 3}}, "no parameter 'max_term'; did you mean max_terms"),
        ({"params": {"seed": 3}}, "seed is not set here; set run.seed"),
        ({"params": {"size": 3}}, "size is not set here; set data.size"),
        ({"params": {"min_terms": 9}}, "made no prompts of data.params = {'min_terms': 9}: AssertionError: max_terms"),
        ({"params": {"max_terms": 2, "max_digits": 1}, "size": 201}, "gave only 200 different prompts in 1608 draws"),
    ],
)
def test_unfit_tasks(settings, message):
    with pytest.raises(UserError, match=message):
        items_of(**{"source": "reasoning_gym:chain_sum", "size": 5, **settings})


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match=r"pip install 'headway\[gym\]'"):
        items_of(source="reasoning_gym:chain_sum")


# The source


def prompts_named(num):
    return [Prompt(uid=str(n), text=f"question {n}") for n in range(num)]


@hypothesis_settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**40), st.integers(0, 50))
def test_every_epoch_is_a_permutation(num, seed, epoch):
    source = PromptSource(prompts_named(num), seed=seed)
    answered = [source.at(group) for group in range(epoch * num, (epoch + 1) * num)]
    assert Counter(prompt.uid for prompt, _ in answered) == Counter(map(str, range(num)))
    assert {of for _, of in answered} == {epoch}


@hypothesis_settings(deadline=None)
@given(st.integers(1, 12), st.integers(), st.permutations(range(30)))
def test_a_groups_prompt_does_not_depend_on_what_was_asked_before(num, seed, groups):
    in_order = [PromptSource(prompts_named(num), seed=seed).at(group) for group in range(30)]
    source = PromptSource(prompts_named(num), seed=seed)
    assert {group: source.at(group) for group in groups} == dict(enumerate(in_order))


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed, epoch):
        source = PromptSource(prompts_named(20), seed=seed)
        return tuple(source.at(epoch * 20 + place)[0].uid for place in range(20))

    assert len({order(0, 0), order(0, 1), order(1, 0), order(1, 1)}) == 4


def test_without_shuffling_every_epoch_is_in_the_order_of_the_source():
    source = PromptSource(prompts_named(3), seed=0, shuffle=False)
    assert [source.at(group)[0].uid for group in range(7)] == ["0", "1", "2", "0", "1", "2", "0"]


def test_the_number_of_groups():
    assert PromptSource(prompts_named(3), seed=0).num_groups is None
    source = PromptSource(prompts_named(3), seed=0, epochs=2)
    assert source.num_groups == 6
    with pytest.raises(AssertionError, match="group 6 of 6"):
        source.at(6)
    with pytest.raises(UserError, match="no prompts"):
        PromptSource([], seed=0)


def test_the_fingerprint_tells_sources_apart():
    prompts = prompts_named(3)
    fingerprint = PromptSource(prompts, seed=0).fingerprint
    assert PromptSource(list(prompts), seed=0, epochs=4).fingerprint == fingerprint
    others = [
        PromptSource(prompts, seed=1),
        PromptSource(prompts, seed=0, shuffle=False),
        PromptSource(prompts[::-1], seed=0),
        PromptSource([*prompts[:2], Prompt("2", "question 2", answer="1")], seed=0),
    ]
    assert fingerprint not in {source.fingerprint for source in others}
