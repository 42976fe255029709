"""Advantages: cases B04 and B05, values worked by hand, and what a baseline must not notice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.objectives.advantages import Advantages, group_mean, group_mean_std

NAN = float("nan")
ESTIMATORS = (group_mean, group_mean_std)


def one_group(estimator, rewards: list[float | None], **options) -> Advantages:
    reward_R = torch.tensor([NAN if reward is None else reward for reward in rewards], dtype=torch.float64)
    return estimator(reward_R, torch.zeros(len(rewards), dtype=torch.long), **options)


def test_golden_vector_group_mean_std():
    result = one_group(group_mean_std, [1, 0, 0, 1, 1, 0, 0, 0])
    assert result.advantage_R.tolist() == pytest.approx(
        [1.20761, -0.724567, -0.724567, 1.20761, 1.20761, -0.724567, -0.724567, -0.724567], abs=5e-6
    )


def test_golden_vector_group_mean():
    result = one_group(group_mean, [1, 0, 0, 1, 1, 0, 0, 0])
    assert result.advantage_R.tolist() == [0.625, -0.375, -0.375, 0.625, 0.625, -0.375, -0.375, -0.375]


def test_b04_sample_std_and_centred():
    assert one_group(group_mean_std, [1, 0, 0, 0]).advantage_R.tolist() == pytest.approx(
        [1.5, -0.5, -0.5, -0.5], abs=1e-5
    )
    assert one_group(group_mean, [1, 0, 0, 0]).advantage_R.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_b04_unscored_members_leave_the_baseline():
    result = one_group(group_mean_std, [1, None, 0, NAN])
    assert result.advantage_R.tolist() == pytest.approx([0.707107, 0, -0.707107, 0], abs=1e-5)
    assert result.advantage_R[[1, 3]].tolist() == [0, 0]
    assert result.scored_R.tolist() == [True, False, True, False]
    assert result.usable_R.tolist() == [True, False, True, False]
    assert not result.lone_R.any()


def test_b04_unscored_by_mask_is_the_same_as_nan():
    scored_R = torch.tensor([True, False, True, False])
    by_mask = one_group(group_mean_std, [1, float("inf"), 0, -7], scored_R=scored_R)
    by_nan = one_group(group_mean_std, [1, None, 0, None])
    assert torch.equal(by_mask.advantage_R, by_nan.advantage_R)
    assert torch.equal(by_mask.scored_R, by_nan.scored_R)


def test_a_nan_reward_is_unscored_whatever_the_mask_says():
    marked = one_group(group_mean_std, [1, None, 0], scored_R=torch.ones(3, dtype=torch.bool))
    assert marked.scored_R.tolist() == [True, False, True]
    assert torch.equal(marked.advantage_R, one_group(group_mean_std, [1, None, 0]).advantage_R)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[1.0], [None, 1.0, None]])
def test_b04_the_only_scored_member_of_a_group_is_flagged(estimator, rewards):
    result = one_group(estimator, rewards)
    assert result.advantage_R.tolist() == [0.0] * len(rewards)
    assert result.lone_R.tolist() == [reward is not None for reward in rewards]
    assert not result.usable_R.any()
    assert not result.equal_R.any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_without_any_score_is_zero_and_unscored(estimator):
    result = one_group(estimator, [None, None])
    assert result.advantage_R.tolist() == [0.0, 0.0]
    assert not (result.scored_R | result.lone_R | result.equal_R).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.05, 1e-8, 0.7])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_b05_equal_rewards_give_exactly_zero(estimator, reward, size, dtype):
    """Summing 0.1 three times and dividing by 3 is not 0.1: std > 0 would let rounding noise through as a signal."""
    result = estimator(torch.full((size,), reward, dtype=dtype), torch.zeros(size, dtype=torch.long))
    assert result.advantage_R.tolist() == [0.0] * size
    assert result.equal_R.all()
    assert result.usable_R.all()


def test_equal_rewards_beside_an_unscored_member():
    result = one_group(group_mean_std, [0.1, None, 0.1, 0.1])
    assert result.advantage_R.tolist() == [0.0] * 4
    assert result.equal_R.tolist() == [True, False, True, True]


def test_groups_are_apart_whatever_their_names_and_order():
    reward_R = torch.tensor([1.0, 5.0, 0.0, 5.0, 3.0])
    group_R = torch.tensor([40, -1, 40, -1, 7])
    result = group_mean(reward_R, group_R)
    assert result.advantage_R.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0]
    assert result.equal_R.tolist() == [False, True, False, True, False]
    assert result.lone_R.tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_infinite_reward_is_refused(estimator):
    with pytest.raises(ValueError, match="infinite"):
        one_group(estimator, [1.0, float("inf")])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_empty_batch(estimator):
    assert one_group(estimator, []).advantage_R.shape == (0,)


quarters = st.integers(-20, 20).map(lambda quarter: quarter / 4)
rewards_and_groups = st.lists(st.tuples(st.one_of(st.none(), quarters), st.integers(0, 3)), min_size=1, max_size=12)


@given(rewards_and_groups, st.integers(-1000, 1000))
@settings(max_examples=50, deadline=None)
def test_a_constant_added_to_a_group_changes_nothing(members, shift):
    reward_R = torch.tensor([NAN if reward is None else reward for reward, _ in members], dtype=torch.float64)
    group_R = torch.tensor([group for _, group in members])
    shifted_R = reward_R + shift * (group_R == group_R[0])
    for estimator in ESTIMATORS:
        before, after = estimator(reward_R, group_R), estimator(shifted_R, group_R)
        torch.testing.assert_close(after.advantage_R, before.advantage_R, rtol=0, atol=1e-9)
        assert torch.equal(after.usable_R, before.usable_R)


@given(rewards_and_groups, st.randoms())
@settings(max_examples=50, deadline=None)
def test_advantages_sum_to_zero_in_a_group_and_follow_their_rollout(members, random):
    reward_R = torch.tensor([NAN if reward is None else reward for reward, _ in members], dtype=torch.float64)
    group_R = torch.tensor([group for _, group in members])
    order_R = torch.tensor(random.sample(range(len(members)), len(members)))
    for estimator in ESTIMATORS:
        result = estimator(reward_R, group_R)
        for group in group_R.unique():
            assert float(result.advantage_R[group_R == group].sum()) == pytest.approx(0, abs=1e-9)
        permuted = estimator(reward_R[order_R], group_R[order_R])
        torch.testing.assert_close(permuted.advantage_R, result.advantage_R[order_R], rtol=1e-12, atol=1e-12)
