import asyncio
import doctest
import time
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headway.score.verifier
from headway.score.verifier import NumberVerifier, last_number, parse_number
from headway.types import Prompt, Score, UserError


def reward(text, answer):
    return score_of(text, answer).reward


def score_of(text, answer):
    return asyncio.run(NumberVerifier().score(Prompt("p1", "q", answer=answer), text))


def test_a_right_number_that_is_not_the_last_is_misplaced():
    assert score_of("7 is 3 + 4", "7") == Score(0.0, misplaced=True)
    assert score_of("3 + 4 = 8", "7") == Score(0.0, misplaced=False)
    assert score_of("3 + 4 = 7", "7") == Score(1.0, misplaced=False)


def test_examples_of_the_documentation():
    assert doctest.testmod(headway.score.verifier).failed == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("12+30=42.", "42"),
        ("so 12, then 7", "7"),
        ("x=-4", "-4"),
        ("−4", "-4"),
        ("+4", "4"),
        ("3-4", "4"),
        ("3 - 4", "4"),
        ("3 -4", "-4"),
        ("3--4", "-4"),
        ("(1+2)-4", "4"),
        ("{-4}", "-4"),
        ("-0", "0"),
        ("-0.00", "0"),
        ("007", "7"),
        ("1,000", "1000"),
        ("-12,345,678.50", "-12345678.5"),
        ("1,00", "0"),
        ("1,2", "2"),
        ("1,0000", "0"),
        ("1234,567", "567"),
        ("1,234,5678", "5678"),
        ("1.2,345", "345"),
        ("0.10", "0.1"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("wait...5", "5"),
        ("v1.2.3", "3"),
        ("5.", "5"),
        ("1e5", "5"),
        ("1/3", "3"),
        ("50%", "50"),
        ("\\boxed{-17}", "-17"),
        ("", None),
        ("no number, - or . or ,", None),
        ("٣", None),
    ],
)
def test_the_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("the answer is 1,000", "1000", 1.0),
        ("1000.0", "1,000", 1.0),
        ("0.3", "0.30000000000000004", 0.0),
        ("9007199254740993", "9007199254740992", 0.0),
        ("10000000000", "10000000001", 0.0),
        ("4 or maybe 5", "4", 0.0),
        ("-4", "4", 0.0),
        ("none", "0", 0.0),
        ("", "0", 0.0),
    ],
)
def test_rewards(text, answer, expected):
    assert reward(text, answer) == expected


@settings(deadline=None)
@given(st.text(), st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_the_last_number_wins_whatever_stands_before(before, number):
    spelled = f"{number:f}"
    assert reward(f"{before} {spelled}", spelled) == 1.0
    assert reward(f"{before} {spelled} then {number + 1:f}", spelled) == 0.0


@settings(deadline=None)
@given(st.integers(-(10**30), 10**30))
def test_signs_and_thousands_do_not_change_the_value(number):
    assert parse_number(f"{number:,}") == parse_number(f"{number:+}") == parse_number(f"{number}.00") == str(number)
    assert reward(f"= {number:,} euros", str(number)) == 1.0
    assert reward(f"= {-number:+,}", str(number)) == float(number == 0)


@settings(deadline=None)
@given(*2 * [st.decimals(allow_nan=False, allow_infinity=False, min_value=-1000, max_value=1000, places=2)])
def test_spellings_are_equal_exactly_when_numbers_are(one, other):
    assert (parse_number(f"{one:f}") == parse_number(f"{other:f}")) == (one == other)
    assert Decimal(parse_number(f"{one:f}") or "") == one


@settings(deadline=None)
@given(st.text(alphabet="0123456789,.-+ x"))
def test_a_number_read_is_a_number(text):
    number = last_number(text)
    assert number is None or parse_number(number) == number


@pytest.mark.parametrize(
    "text", ["9" * 10**6, "1," * 10**6, "1,111" * 10**5, "-" * 10**6, "." * 10**6, ".1" * 10**6, "0" * 10**6 + "5"]
)
def test_long_texts_take_little_time(text):
    start_s = time.perf_counter()
    assert reward(text, "7") == 0.0
    assert time.perf_counter() - start_s < 5


def test_answers_of_any_length_are_compared_digit_by_digit():
    assert reward("9" * 10**5, "9" * 10**5) == 1.0
    assert reward("9" * 10**5 + "8", "9" * 10**5 + "9") == 0.0


@pytest.mark.parametrize("answer", [None, "", "four", "1/3", "3 apples", "nan", "1e5", "1 2"])
def test_an_answer_that_is_no_number_is_refused(answer):
    with pytest.raises(UserError, match="prompt p1 has"):
        reward("4", answer)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('pathlib').Path('touched').touch() or 5",
        "().__class__.__bases__[0].__subclasses__()",
        "\\pi;__import__('os').system('touch touched')",
        "9**9**9**9",
    ],
)
def test_hostile_text_is_only_read(text, tmp_path, monkeypatch):
    """Case B21(c)."""
    monkeypatch.chdir(tmp_path)
    assert reward(text, "4") == 0.0
    assert not Path("touched").exists()
    assert reward("4", "4") == 1.0
