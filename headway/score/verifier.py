"""A verifier for answers that are numbers. It reads digits and never evaluates anything."""

from __future__ import annotations

import re

from headway.types import Prompt, Score, UserError

_NUMBER = re.compile(
    r"""
    (?P<sign> (?<![\w)\]}]) [-+−] )?                                                      # not the minus of "3-4"
    (?: (?P<whole> (?:[1-9][0-9]{0,2} (?:,[0-9]{3})+ (?![0-9])) | [0-9]+ ) (?:\.(?P<part>[0-9]+))?    # 1,000  12  1.50
      | (?<![\w.]) \. (?P<bare_part>[0-9]+)                                               # .5, but not the end of "..5"
    )
    """,
    re.VERBOSE,
)


def last_number(text: str) -> str | None:
    """The last number written in `text`, in the one spelling of its value; None when there is none.

    Numbers are whole or decimal, with an optional sign and commas between thousands (`1,000`; `1,00` is two numbers).
    A sign stands directly before its number and not directly after a letter, digit or closing bracket: the minus of
    `3-4` and of `3 - 4` is a subtraction, that of `3 -4` and `x=-4` a sign. Powers (`1e5`) and fractions (`1/3`) are
    read as two numbers.

    >>> last_number("first 12, so the answer is -1,000.50."), last_number("3-4"), last_number("none")
    ('-1000.5', '4', None)
    """
    numbers = all_numbers(text)
    return numbers[-1] if numbers else None


def all_numbers(text: str) -> list[str]:
    """Every number written in `text`, in order, each in the one spelling of its value: see `last_number`."""
    return [_spelling(match) for match in _NUMBER.finditer(text)]


def parse_number(text: str) -> str | None:
    """The one spelling of the number that `text` is, white space aside; None when it is not exactly one number."""
    match = _NUMBER.fullmatch(text.strip())
    return None if match is None else _spelling(match)


def _spelling(match: re.Match[str]) -> str:
    """Two numbers are equal exactly when these are: no leading or trailing zeros, no plus, no minus zero.

    Comparing digits is exact at any length and takes linear time, where converting a long string of them to an
    integer does not: an answer of a million digits costs nothing and needs no limit.
    """
    whole = (match["whole"] or "").replace(",", "").lstrip("0") or "0"
    part = (match["part"] or match["bare_part"] or "").rstrip("0")
    value = f"{whole}.{part}" if part else whole
    return f"-{value}" if match["sign"] in ("-", "−") and value != "0" else value


class NumberVerifier:
    """Reward 1.0 exactly when the last number of the answer equals the prompt's reference answer, 0.0 otherwise.

    Equal means equal as numbers (`7`, `+7`, `07` and `7.00` are one), without a tolerance.
    """

    def check(self, prompt: Prompt) -> None:
        """Raises UserError when the prompt's answer is not a number."""
        if prompt.answer is None:
            raise UserError(f"prompt {prompt.uid} has no answer to compare with; give one, or set another score.scorer")
        if parse_number(prompt.answer) is None:
            raise UserError(
                f"prompt {prompt.uid} has the answer {prompt.answer[:40]!r}, which is not a number; "
                "mend it, or set score.scorer to reasoning_gym or module:function"
            )

    async def score(self, prompt: Prompt, text: str) -> Score:
        self.check(prompt)
        assert prompt.answer is not None
        right = parse_number(prompt.answer)
        numbers = all_numbers(text)
        if numbers and numbers[-1] == right:
            return Score(1.0, misplaced=False)
        return Score(0.0, misplaced=right in numbers)

    async def close(self) -> None:
        pass
