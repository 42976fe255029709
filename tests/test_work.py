"""What is noted of work: sums stay exact, like sizes go together, and what was taken is gone."""

import sys

import pytest

from headway.work import WorkLog, peak_resident_bytes


def test_work_of_like_size_goes_together():
    log = WorkLog()
    for rows, seconds in ((5, 0.1), (7, 0.2), (8, 0.4)):
        log.add("pass", share=1.0, seconds=seconds, rows=rows, cached=0)
    log.add("pass", share=0.5, seconds=1.0, rows=5, cached=0)
    log.add("update", share=1.0, seconds=2.0)
    few, many, shared, update = log.take()
    assert few == {"kind": "pass", "share": 1.0, "num": 2, "seconds": pytest.approx(0.3), "rows": 12, "cached": 0}
    assert (many["num"], many["rows"]) == (1, 8)
    assert (shared["share"], shared["seconds"]) == (0.5, 1.0)
    assert update == {"kind": "update", "share": 1.0, "num": 1, "seconds": 2.0}
    assert log.take() == []


def test_what_fails_is_no_work_that_was_done():
    log = WorkLog()
    with pytest.raises(ValueError, match="broken"), log.timed("update", 1.0):
        raise ValueError("broken")
    assert log.take() == []


def test_memory_at_its_peak_is_counted_in_bytes():
    before = peak_resident_bytes()
    held = bytearray(300_000_000)
    after = peak_resident_bytes()
    assert len(held) == 300_000_000
    assert 10e6 < before < 100e9, sys.platform
    assert after >= max(before, 250e6)
