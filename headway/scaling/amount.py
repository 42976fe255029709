"""Amounts of compute on the command line: a number, or a share of what a learning curve has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.types import UserError


@dataclass(frozen=True)
class Amount:
    """In the unit of a curve's x, or (`is_share`) a share of its largest compute."""

    number: float
    is_share: bool

    def of(self, largest: float) -> float:
        return self.number * largest if self.is_share else self.number


def parse_amount(option: str, text: str) -> Amount:
    """
    >>> parse_amount("--skip", "1500"), parse_amount("--at", "200%").of(1000)
    (Amount(number=1500.0, is_share=False), 2000.0)

    Raises UserError that names the option.
    """
    word = text.strip()
    is_share = word.endswith("%")
    number = parse_number(option, word.removesuffix("%"), "an amount of compute, or a share of it as in 10%")
    if number <= 0:
        raise UserError(f"{option} {text} is no amount of compute: give one above 0")
    return Amount(number / 100 if is_share else number, is_share)


def parse_number(option: str, text: str, meaning: str) -> float:
    """Raises UserError that names the option and says what it is."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{option} {text} is no number; it is {meaning}")
    return number


def figure(compute: float) -> str:
    """Four figures of an amount of compute.

    >>> figure(123456.0), figure(0.00123456), figure(2542.4)
    ('123,500', '0.001235', '2,542')
    """
    return f"{float(f'{compute:.4g}'):,.0f}" if abs(compute) >= 1000 else f"{compute:.4g}"
