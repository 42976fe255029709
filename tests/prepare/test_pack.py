"""Packing: rows and targets by hand, cases B11 and B12, budgets, and how a batch is dealt into parts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headway.config import Train
from headway.models.attention import Segment
from headway.models.distribution import Shape
from headway.prepare.pack import Packed, Packing, deal, pack
from headway.train.local import LocalTrainer
from headway.types import Rollout
from tests.batches import asked, many_groups, random_answer
from tests.tiny import make_bigram, rollout


def packed(answers: Sequence[Rollout], budget: int = 4096, **options) -> list[list[Packed]]:
    """Answers to the same prompt that stand together are a group."""
    keys = [(answer.prompt.uid, answer.epoch) for answer in answers]
    names = list(dict.fromkeys(keys))
    groups = [names.index(key) for key in keys]
    return pack(answers, groups, list(range(len(answers))), Packing(budget, **options))


# ---- by hand


def test_two_groups_by_hand():
    """Group a: prompt 1 2 3, answers 4 5 and 6. Group b: prompt 7, answers 8 9 4 and 5 5.

    Rows:     1 2 3 4 | 7 8 9 5
    Position: 0 1 2 3 | 0 1 2 1
    """
    a, b = asked("a", 1, 2, 3), asked("b", 7)
    answers = [
        rollout(a, [4, 5], member=0),
        rollout(a, [6], member=1),
        rollout(b, [8, 9, 4], member=0),
        rollout(b, [5, 5], member=1),
    ]
    ((one,),) = packed(answers)
    rows = one.rows
    assert rows.ids_T.tolist() == [1, 2, 3, 4, 7, 8, 9, 5]
    assert rows.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 1]
    assert rows.segments == (
        Segment(0, 3),
        Segment(3, 1, 0, 3),
        Segment(4, 1),
        Segment(5, 2, 4, 1),
        Segment(7, 1, 4, 1),
    )
    assert rows.row_N.tolist() == [2, 3, 2, 4, 5, 6, 4, 7]
    assert rows.target_N.tolist() == [4, 5, 6, 8, 9, 4, 5, 5]
    assert one.token_N.tolist() == list(range(8))
    assert len(rows.last_row_R) == len(rows.last_rollout_R) == 0


B11_LOGITS = [[0.0, 1.0, 2.0], [2.0, 0.0, 1.0], [1.0, 2.0, 0.0]]
"""Of the next token, by the token before."""


def test_b11_packed_log_probs_are_those_of_the_row_before():
    """Without the shift the first answer's sum would be -7.222818; across the documents -1.407606 would be added."""
    ((one,),) = packed([rollout(asked("1", 0, 1), [2, 2, 0]), rollout(asked("2", 1), [0, 0])])
    trainer = LocalTrainer(make_bigram(B11_LOGITS), Train(learning_rate=0), shape=Shape(), num_steps=1)
    logp_N = trainer.forward(one.rows).logp_N
    expected = [-1.407606, -2.407606, -1.407606, -0.407606, -2.407606]
    assert logp_N.tolist() == pytest.approx(expected, abs=1e-5)
    assert logp_N.sum().item() == pytest.approx(-8.038030, abs=1e-5)


# ---- what is trained


def trained(answers: Sequence[Rollout]) -> list[tuple[int, int]]:
    """(rollout, target) of every trained token."""
    owner_M = [number for number, answer in enumerate(answers) for is_trained in answer.mask if is_trained]
    return [
        (owner_M[token], target)
        for part in packed(answers)
        for one in part
        for token, target in zip(one.token_N.tolist(), one.rows.target_N.tolist(), strict=True)
    ]


def test_b12a_the_sampled_end_token_is_trained_and_nothing_after_it():
    p = asked("p", 1)
    assert trained([rollout(p, [5, 7, 2], member=0), rollout(p, [9], member=1)]) == [(0, 5), (0, 7), (0, 2), (1, 9)]


def test_b12b_an_answer_that_was_cut_off_has_its_own_length():
    p = asked("p", 1)
    answers = [rollout(p, [5, 7, 9], member=0, finish="length"), rollout(p, [0, 0, 0, 0, 0], member=1)]
    assert trained(answers) == [(0, 5), (0, 7), (0, 9), *[(1, 0)] * 5]


def test_b12d_a_prompt_that_holds_the_end_id_keeps_all_its_rows():
    p = asked("p", 2, 5, 2)
    ((one,),) = packed([rollout(p, [6], member=member) for member in range(2)])
    assert one.rows.ids_T.tolist() == [2, 5, 2]
    assert one.rows.segments == (Segment(0, 3),)


def test_b12e_masked_tokens_are_rows_and_are_not_trained():
    """Token 8 stands for what the environment wrote: the model sees it, and is not taught it."""
    p = asked("p", 1)
    answers = [
        rollout(p, [5, 8, 6, 2], member=0, mask=[True, False, True, False]),
        rollout(p, [7, 3], member=1, mask=[False, True]),
    ]
    assert trained(answers) == [(0, 5), (0, 6), (1, 3)]
    ((one,),) = packed(answers)
    assert one.rows.ids_T.tolist() == [1, 5, 8, 6, 7]
    assert one.rows.row_N.tolist() == [0, 2, 4]


def test_the_kept_set_of_every_trained_token_goes_with_it():
    """And of no other: tokens that were put in have none, and an answer drawn from the whole vocabulary has None."""
    p = asked("p", 1)
    truncated = rollout(p, [5, 8, 6], member=0, mask=[True, False, True], kept=[[4, 5], None, [6, 7, 9]])
    ((one,),) = packed([truncated, rollout(p, [7, 3], member=1)])
    assert one.rows.target_N.tolist() == [5, 6, 7, 3]
    assert one.rows.kept == ([4, 5], [6, 7, 9], None, None)
    ((one,),) = packed([rollout(p, [7, 3], kept=[None, None])])
    assert one.rows.kept is None


def test_what_a_trained_token_follows_is_its_prompt_and_its_own_answer():
    """For a repetition penalty. Prompts 1 2 and 3; answers 4 5, 6 (of the first) and 7 4 7."""
    one_prompt, other = asked("p", 1, 2), asked("q", 3)
    answers = [rollout(one_prompt, [4, 5]), rollout(one_prompt, [6], member=1), rollout(other, [7, 4, 7])]
    ((one,),) = packed(answers)
    assert [ids.tolist() for ids in one.rows.seen()] == [[1, 2], [1, 2, 4], [1, 2], [3], [3, 7], [3, 4, 7]]


def test_an_answer_without_tokens_adds_no_row():
    p = asked("p", 1, 2)
    ((one,),) = packed([rollout(p, [], member=0), rollout(p, [5, 6], member=1)], bootstrap=True)
    assert one.rows.ids_T.tolist() == [1, 2, 5]
    assert one.rows.row_N.tolist() == [1, 2]


# ---- where a critic says what the rest would have brought


def test_the_row_after_the_last_token_is_there_only_for_answers_that_were_cut_off():
    """Prompt 1; answers 5 6 7 (over its budget), 8 9 (ended), 4 (interrupted).

    Rows:  1 | 5 6 7 | 8 | 4
    """
    p = asked("p", 1)
    answers = [
        rollout(p, [5, 6, 7], member=0, finish="length"),
        rollout(p, [8, 9], member=1),
        rollout(p, [4], member=2, finish="interrupted"),
    ]
    ((one,),) = packed(answers, bootstrap=True)
    assert one.rows.ids_T.tolist() == [1, 5, 6, 7, 8, 4]
    assert one.rows.positions_T.tolist() == [0, 1, 2, 3, 1, 1]
    assert one.rows.row_N.tolist() == [0, 1, 2, 0, 4, 0]
    assert one.rows.last_row_R.tolist() == [3, 5]
    assert one.rows.last_rollout_R.tolist() == [0, 2]
    assert len(packed(answers)[0][0].rows.last_row_R) == 0


# ---- micro-batches


def answers_of(groups) -> list[Rollout]:
    return [scored.rollout for members in groups for scored in members]


@pytest.mark.parametrize("budget", [1, 8, 13, 20, 50, 4096])
@pytest.mark.parametrize("options", [{}, {"bootstrap": True}, {"optimizer_steps": 2}])
def test_the_budget_is_kept_and_every_token_is_there_once(budget, options):
    answers = answers_of(many_groups())
    parts = packed(answers, budget, **options)
    for one in (one for part in parts for one in part):
        num_rollouts = sum(segment.prefix_length > 0 for segment in one.rows.segments)
        assert len(one.rows.ids_T) <= budget or num_rollouts <= 1
    tokens = [
        token for answer in answers for token, is_trained in zip(answer.tokens, answer.mask, strict=True) if is_trained
    ]
    found = [
        pair
        for part in parts
        for one in part
        for pair in zip(one.token_N.tolist(), one.rows.target_N.tolist(), strict=True)
    ]
    assert sorted(found) == list(enumerate(tokens))
    if len(parts) == 1:
        assert found == sorted(found)


def test_a_rollout_that_is_longer_than_the_budget_is_alone():
    """Rows: prompt 2, and answers of 1, 9, 1 rows; the budget is 5."""
    p = asked("p", 1, 2)
    (part,) = packed([rollout(p, [3] * length, member=member) for member, length in enumerate((2, 10, 2))], 5)
    assert [len(one.rows.ids_T) for one in part] == [3, 11, 3]
    assert [one.token_N.tolist() for one in part] == [[0, 1], list(range(2, 12)), [12, 13]]


def test_a_prompt_is_counted_once_per_micro_batch():
    """Prompt of 4 rows, answers of 2 rows each: three of them fit into 10 rows."""
    p = asked("p", 1, 2, 3, 4)
    (part,) = packed([rollout(p, [5, 6, 7], member=member) for member in range(4)], 10)
    assert [len(one.rows.ids_T) for one in part] == [10, 6]


def test_whole_groups_stay_together_whatever_the_budget():
    """Three groups of 3 + 2 x 2 rows. 7 rows hold one, 14 two; at 1 each is a micro-batch of its own."""
    answers = [
        rollout(asked(f"p{number}", 1, 2, 3), [4, 5, 6], member=member) for number in range(3) for member in range(2)
    ]
    for budget, sizes in ((1, [7, 7, 7]), (13, [7, 7, 7]), (14, [14, 7]), (21, [21])):
        (part,) = packed(answers, budget, whole_groups=True)
        assert [len(one.rows.ids_T) for one in part] == sizes


# ---- parts of a batch


@given(num=st.integers(0, 12), num_parts=st.integers(1, 5), seed=st.integers(0, 99))
@hypothesis_settings(max_examples=60, deadline=None)
def test_parts_hold_whole_groups_and_nearly_as_many_each(num, num_parts, seed):
    rng = random.Random(seed)
    answers = [random_answer(rng, asked(f"p{number}", 1), member) for number in range(num) for member in range(3)]
    groups = [number for number in range(num) for _ in range(3)]
    wanted = [number for number in range(3 * num) if rng.random() < 0.7]
    parts = deal(answers, groups, wanted, num_parts)
    assert sorted(number for part in parts for number in part) == wanted
    assert all(part == sorted(part) for part in parts)
    sizes = [len({groups[number] for number in part}) for part in parts]
    assert all(sizes)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    whose = Counter(group for part in parts for group in {groups[number] for number in part})
    assert set(whose.values()) <= {1}
    assert len(parts) == min(num_parts, len({groups[number] for number in wanted}))


def test_parts_are_not_those_of_the_names():
    """40 prompts of one kind and 40 of another: neither half is all of one kind, and their order is no matter."""
    uids = [f"{kind}-{number}" for kind in ("easy", "hard") for number in range(40)]
    answers = [rollout(asked(uid, 1), [4]) for uid in uids]
    halves = deal(answers, range(80), range(80), 2)
    for half in halves:
        kinds = Counter(uids[number].split("-")[0] for number in half)
        assert min(kinds.values()) >= 10
    backwards = deal(answers[::-1], range(80), range(80), 2)
    assert [{uids[79 - number] for number in half} for half in backwards] == [
        {uids[n] for n in half} for half in halves
    ]


def test_the_same_prompt_of_another_epoch_is_dealt_anew():
    places = set()
    for epoch in range(8):
        answers = [rollout(asked(f"p{number}", 1), [4], epoch=epoch) for number in range(6)]
        places.add(next(place for place, part in enumerate(deal(answers, range(6), range(6), 2)) if 0 in part))
    assert places == {0, 1}


def test_a_group_s_rollouts_are_neighbours_in_every_micro_batch():
    answers = answers_of(many_groups(num=7))
    for part in packed(answers, 30, optimizer_steps=3):
        for one in part:
            prompts = [s for s in one.rows.segments if not s.prefix_length]
            starts = [start for start, _ in groupby(s.prefix_start for s in one.rows.segments if s.prefix_length)]
            assert starts == sorted(starts)
            assert len(prompts) >= len(starts)
