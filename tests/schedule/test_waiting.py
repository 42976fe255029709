"""Who wants a lane: the oldest group's first, each once."""

import random

import pytest

from headway.schedule.waiting import Waiting


def all_of(waiting):
    return [waiting.pop() for _ in range(len(waiting))]


def test_the_oldest_group_is_first_and_in_it_the_first_member():
    waiting = Waiting()
    for key in [(3, 0), (1, 2), (2, 0), (1, 0)]:
        waiting.add(key)
    assert all_of(waiting) == [(1, 0), (1, 2), (2, 0), (3, 0)]
    assert not waiting


def test_who_is_added_twice_is_there_once():
    waiting = Waiting()
    waiting.add((1, 0))
    waiting.add((1, 0))
    assert len(waiting) == 1
    assert waiting.pop() == (1, 0)
    assert not waiting


def test_who_is_discarded_is_passed_over_and_may_come_again():
    waiting = Waiting()
    for key in [(1, 0), (2, 0), (3, 0)]:
        waiting.add(key)
    waiting.discard((1, 0))
    waiting.discard((9, 9))
    assert (len(waiting), (1, 0) in waiting, (2, 0) in waiting) == (2, False, True)
    assert waiting.pop() == (2, 0)
    waiting.discard((3, 0))
    waiting.add((3, 0))
    waiting.add((1, 0))
    assert all_of(waiting) == [(1, 0), (3, 0)]


@pytest.mark.parametrize("seed", range(100))
def test_it_is_a_sorted_set(seed):
    pick, waiting, expected = random.Random(seed), Waiting(), set()
    for _ in range(200):
        key = (pick.randrange(6), pick.randrange(3))
        what = pick.choice(["add", "add", "discard", "pop"])
        if what == "pop" and expected:
            assert waiting.pop() == min(expected)
            expected.remove(min(expected))
        elif what != "pop":
            getattr(waiting, what)(key)
            getattr(expected, what)(key)
        assert len(waiting) == len(expected)
        assert all((key in waiting) == (key in expected) for key in [(group, 0) for group in range(6)])
