"""Wilson's interval at values worked by hand."""

from __future__ import annotations

import pytest

from headway.reports.interval import wilson


def test_eight_of_ten() -> None:
    # z² = 3.841459; (.8 + .1920729 ± 1.959964 sqrt(.016 + .0096036)) / 1.3841459
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.490162, abs=1e-6)
    assert high == pytest.approx(0.943318, abs=1e-6)


def test_it_has_a_width_at_either_end() -> None:
    assert wilson(0, 10) == (0.0, pytest.approx(3.841459 / 13.841459, abs=1e-6))
    assert wilson(10, 10) == (pytest.approx(10 / 13.841459, abs=1e-6), 1.0)
    assert wilson(0, 0) == (0.0, 1.0)


def test_more_correct_than_asked_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        wilson(3, 2)
