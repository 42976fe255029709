"""Advantages: B04 and B05, the test vectors, values worked by hand, and what a baseline must not notice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.objectives import advantages
from headway.objectives.advantages import (
    Advantages,
    batch_mean,
    gae,
    group_mean,
    group_mean_batch_std,
    group_mean_std,
    leave_one_out,
    overlong_penalty,
    preference,
    reward,
    rewards_to_go,
    token_rewards,
    whiten,
)

NAN = torch.nan
OF_GROUPS = (group_mean, group_mean_std, leave_one_out, group_mean_batch_std, preference)
CENTRED = (group_mean, group_mean_std, leave_one_out, group_mean_batch_std)
EVERY = (*OF_GROUPS, batch_mean, reward)


def floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_group(estimator, rewards: list[float | None], **options) -> Advantages:
    reward_R = floats([NAN if given is None else given for given in rewards])
    return estimator(reward_R, torch.zeros(len(rewards), dtype=torch.long), **options)


# ---- test vectors

VECTOR = [1, 0, 0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("estimator", "right", "wrong"),
    [
        (group_mean_std, 1.20761, -0.724567),
        (group_mean, 0.625, -0.375),
        (leave_one_out, 0.714286, -0.428571),
        (group_mean_batch_std, 1.20761, -0.724567),  # the group is the batch
        (batch_mean, 0.625, -0.375),
        (reward, 1, 0),
    ],
)
def test_golden_vector(estimator, right, wrong):
    expected = [right if earned else wrong for earned in VECTOR]
    assert one_group(estimator, VECTOR).advantage_R.tolist() == pytest.approx(expected, abs=5e-6)


def test_leaving_one_out_is_the_centred_reward_scaled():
    """r - mean of the others = G / (G - 1) (r - mean)."""
    scaled_R = 8 / 7 * one_group(group_mean, VECTOR).advantage_R
    assert one_group(leave_one_out, VECTOR).advantage_R.tolist() == pytest.approx(scaled_R.tolist())


def test_group_mean_batch_std_has_one_std_for_all_groups():
    """Centred: +-0.5 and +-2. Their std: sqrt((0.25 + 0.25 + 4 + 4) / 3) = 1.683251."""
    result = group_mean_batch_std(floats([1, 0, 4, 0]), torch.tensor([0, 0, 1, 1]))
    assert result.advantage_R.tolist() == pytest.approx([0.297044, -0.297044, 1.188177, -1.188177], abs=1e-5)


def test_group_mean_batch_std_is_over_rollouts_that_are_data():
    """+-0.5 over their std of 0.707107: neither the unscored rollout nor the lone one of group 1 is a 0 among them."""
    result = group_mean_batch_std(floats([1, 0, NAN, 5]), torch.tensor([0, 0, 0, 1]))
    assert result.advantage_R.tolist() == pytest.approx([0.707107, -0.707107, 0, 0], abs=1e-5)


def test_batch_mean_looks_at_no_group():
    result = batch_mean(floats([1, 0, 4, NAN]), torch.tensor([0, 0, 1, 1]))
    assert result.advantage_R.tolist() == pytest.approx([-2 / 3, -5 / 3, 7 / 3, 0])
    assert not result.lone_R.any()
    assert result.usable_R.tolist() == [True, True, True, False]


def test_preference_is_the_best_against_the_worst():
    result = preference(floats([0.5, 1, NAN, 0, 3, 3, 7]), torch.tensor([0, 0, 0, 0, 1, 1, 2]))
    assert result.advantage_R.tolist() == [0, 1, 0, -1, 0, 0, 0]


# ---- B04


@pytest.mark.parametrize(
    ("estimator", "right", "wrong"),
    [(group_mean_std, 1.5, -0.5), (group_mean, 0.75, -0.25), (leave_one_out, 1, -1 / 3)],
)
def test_b04_sample_std_centred_and_leave_one_out(estimator, right, wrong):
    """The population's std would give 1.732051 and -0.577350."""
    expected = [right, wrong, wrong, wrong]
    assert one_group(estimator, [1, 0, 0, 0]).advantage_R.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("estimator", "size"), [(group_mean_std, 0.707107), (group_mean, 0.5), (leave_one_out, 1), (preference, 1)]
)
def test_b04_unscored_members_leave_the_baseline(estimator, size):
    result = one_group(estimator, [1, None, 0, NAN])
    assert result.advantage_R.tolist() == pytest.approx([size, 0, -size, 0], abs=1e-5)
    assert result.advantage_R[[1, 3]].tolist() == [0, 0]
    assert result.scored_R.tolist() == result.usable_R.tolist() == [True, False, True, False]
    assert not result.lone_R.any()


@pytest.mark.parametrize("estimator", EVERY)
def test_b04_unscored_by_mask_is_the_same_as_nan(estimator):
    scored_R = torch.tensor([True, False, True, False])
    by_mask = one_group(estimator, [1, float("inf"), 0, -7], scored_R=scored_R)
    by_nan = one_group(estimator, [1, None, 0, None])
    assert torch.equal(by_mask.advantage_R, by_nan.advantage_R)
    assert torch.equal(by_mask.scored_R, by_nan.scored_R)


def test_a_nan_reward_is_unscored_whatever_the_mask_says():
    marked = one_group(group_mean_std, [1, None, 0], scored_R=torch.ones(3, dtype=torch.bool))
    assert marked.scored_R.tolist() == [True, False, True]
    assert torch.equal(marked.advantage_R, one_group(group_mean_std, [1, None, 0]).advantage_R)


@pytest.mark.parametrize("estimator", OF_GROUPS)
@pytest.mark.parametrize("rewards", [[1.0], [None, 1.0, None]])
def test_b04_the_only_scored_member_of_a_group_is_flagged(estimator, rewards):
    result = one_group(estimator, rewards)
    assert result.advantage_R.tolist() == [0.0] * len(rewards)
    assert result.lone_R.tolist() == [given is not None for given in rewards]
    assert not result.usable_R.any()
    assert not result.equal_R.any()


@pytest.mark.parametrize("estimator", EVERY)
def test_a_group_without_any_score_is_zero_and_unscored(estimator):
    result = one_group(estimator, [None, None])
    assert result.advantage_R.tolist() == [0.0, 0.0]
    assert not (result.scored_R | result.lone_R | result.equal_R).any()


# ---- B05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", [*OF_GROUPS, batch_mean])
@pytest.mark.parametrize("given_reward", [0.1, 1 / 3, -0.05, 1e-8, 0.7])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_b05_equal_rewards_give_exactly_zero(estimator, given_reward, size, dtype):
    """Summing 0.1 three times and dividing by 3 is not 0.1: std > 0 would let rounding noise through as a signal."""
    result = estimator(torch.full((size,), given_reward, dtype=dtype), torch.zeros(size, dtype=torch.long))
    assert result.advantage_R.tolist() == [0.0] * size
    assert result.equal_R.all()
    assert result.usable_R.all()


def test_b05_shaped_failures_are_what_a_std_would_blow_up():
    """-0.02, -0.05, -0.08, -0.05: centred +-0.03, but over their std of 0.0245 as large as a real success."""
    shaped = [-0.02, -0.05, -0.08, -0.05]
    assert one_group(group_mean, shaped).advantage_R.tolist() == pytest.approx([0.03, 0, -0.03, 0])
    assert one_group(group_mean_std, shaped).advantage_R.tolist() == pytest.approx([1.22469, 0, -1.22469, 0], abs=1e-4)


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


@pytest.mark.parametrize("estimator", EVERY)
def test_an_infinite_reward_is_refused(estimator):
    with pytest.raises(ValueError, match="infinite"):
        one_group(estimator, [1.0, float("inf")])


@pytest.mark.parametrize("estimator", EVERY)
def test_an_empty_batch(estimator):
    assert one_group(estimator, []).advantage_R.shape == (0,)


# ---- what a baseline must not notice

quarters = st.integers(-20, 20).map(lambda quarter: quarter / 4)
rewards_and_groups = st.lists(st.tuples(st.one_of(st.none(), quarters), st.integers(0, 3)), min_size=1, max_size=12)


def members_of(members: list[tuple[float | None, int]]) -> tuple[Tensor, Tensor]:
    return (
        floats([NAN if given is None else given for given, _ in members]),
        torch.tensor([group for _, group in members]),
    )


@given(rewards_and_groups, st.integers(-1000, 1000))
@settings(max_examples=40, deadline=None)
def test_a_constant_added_to_a_group_changes_nothing(members, shift):
    reward_R, group_R = members_of(members)
    shifted_R = reward_R + shift * (group_R == group_R[0])
    for estimator in OF_GROUPS:
        before, after = estimator(reward_R, group_R), estimator(shifted_R, group_R)
        torch.testing.assert_close(after.advantage_R, before.advantage_R, rtol=0, atol=1e-9)
        assert torch.equal(after.usable_R, before.usable_R)
    before, after = batch_mean(reward_R, group_R), batch_mean(reward_R + shift, group_R)
    torch.testing.assert_close(after.advantage_R, before.advantage_R, rtol=0, atol=1e-9)


@given(rewards_and_groups, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_advantages_sum_to_zero_in_a_group_and_follow_their_rollout(members, random):
    reward_R, group_R = members_of(members)
    order_R = torch.tensor(random.sample(range(len(members)), len(members)))
    for estimator in (*CENTRED, batch_mean, reward):
        result = estimator(reward_R, group_R)
        permuted = estimator(reward_R[order_R], group_R[order_R])
        torch.testing.assert_close(permuted.advantage_R, result.advantage_R[order_R], rtol=1e-12, atol=1e-12)
        if estimator in CENTRED:
            for group in group_R.unique():
                assert float(result.advantage_R[group_R == group].sum()) == pytest.approx(0, abs=1e-9)
    signs = preference(reward_R, group_R).advantage_R
    assert signs.sum() == 0
    assert signs.abs().sum() == 2 * len(group_R[signs > 0].unique())


@given(rewards_and_groups)
@settings(max_examples=40, deadline=None)
def test_leave_one_out_is_what_its_name_says(members):
    reward_R, group_R = members_of(members)
    result = leave_one_out(reward_R, group_R)
    for place, own in enumerate(result.advantage_R.tolist()):
        others_R = reward_R[(group_R == group_R[place]) & ~reward_R.isnan() & (torch.arange(len(members)) != place)]
        expected = float(reward_R[place] - others_R.mean()) if result.usable_R[place] else 0.0
        assert own == pytest.approx(expected, abs=1e-12)


# ---- of tokens

ONE = torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("gamma", "lam", "advantage", "returned"),
    [
        # delta: 0.6 - 0.5 = 0.1, 0.7 - 0.6 = 0.1, 1 - 0.7 = 0.3
        (1.0, 0.95, [0.46575, 0.385, 0.3], [0.96575, 0.985, 1]),
        (1.0, 1.0, [0.5, 0.4, 0.3], [1, 1, 1]),
        (1.0, 0.0, [0.1, 0.1, 0.3], [0.6, 0.7, 1]),
        # delta: 0.3 - 0.5 = -0.2, 0.35 - 0.6 = -0.25, 0.3; times (0.5 0.8)^l
        (0.5, 0.8, [-0.252, -0.13, 0.3], [0.248, 0.47, 1]),
    ],
)
def test_golden_vector_of_gae(gamma, lam, advantage, returned):
    advantage_M, return_M = gae(floats([0, 0, 1]), floats([0.5, 0.6, 0.7]), ONE, gamma=gamma, lam=lam)
    assert advantage_M.tolist() == pytest.approx(advantage, abs=1e-12)
    assert return_M.tolist() == pytest.approx(returned, abs=1e-12)


def test_gae_goes_on_from_the_bootstrap_where_an_answer_was_cut_off():
    """Rollout 1 has no token; 2 was cut off where its value was 2: delta 1 + 2 - 0.5 = 2.5."""
    rollout_M, bootstrap_R = torch.tensor([0, 0, 2]), floats([0, 9, 2])
    advantage_M, return_M = gae(floats([0, 1, 1]), floats([0.5, 0.5, 0.5]), rollout_M, bootstrap_R, 1.0, 1.0)
    assert advantage_M.tolist() == [0.5, 0.5, 2.5]
    assert return_M.tolist() == [1, 1, 3]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_gae_is_its_sum_written_out_for_each_rollout_alone(lengths, seed, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    rollout_M = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    reward_M, value_M = torch.randn(2, len(rollout_M), generator=generator, dtype=torch.float64)
    bootstrap_R = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    advantage_M, return_M = gae(reward_M, value_M, rollout_M, bootstrap_R, gamma, lam)
    for rollout, length in enumerate(lengths):
        own_M = rollout_M == rollout
        values = [*value_M[own_M].tolist(), float(bootstrap_R[rollout])]
        rewards = reward_M[own_M].tolist()
        deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(length)]
        expected = [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, length)) for t in range(length)]
        assert advantage_M[own_M].tolist() == pytest.approx(expected, abs=1e-9)
        assert return_M[own_M].tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=False)])


def test_a_rollouts_reward_comes_with_its_last_trained_token():
    rollout_M = torch.tensor([0, 0, 2, 2, 2])
    reward_M = token_rewards(floats([1, 9, -1]), rollout_M)
    assert reward_M.tolist() == [0, 1, 0, 0, -1]
    with_penalty = token_rewards(floats([1, 9, -1]), rollout_M, floats([0.1, 0.2, 0.3, 0.4, 0.5]))
    assert with_penalty.tolist() == pytest.approx([0.1, 1.2, 0.3, 0.4, -0.5])
    assert rewards_to_go(with_penalty, rollout_M).tolist() == pytest.approx([1.3, 1.2, 0.2, -0.1, -0.5])


def test_no_tokens_no_credit():
    nothing = torch.zeros(0, dtype=torch.long)
    assert token_rewards(floats([1]), nothing).shape == (0,)
    assert gae(floats([]), floats([]), nothing)[0].shape == (0,)
    assert whiten(floats([]), nothing.bool()).shape == (0,)


# ---- whitening and shaping


def test_whiten_by_hand():
    """1, 2, 3 of the data: mean 2, std 1 (ddof 1). What is no data has no say and gets 0."""
    data_M = torch.tensor([True, True, False, True])
    assert whiten(floats([1, 2, NAN, 3]), data_M).tolist() == pytest.approx([-1, 0, 0, 1])


@pytest.mark.parametrize("equal", [[0.1] * 3, [0.7] * 7, [5.0], []])
def test_whitened_equal_advantages_are_exactly_zero(equal):
    assert whiten(floats(equal), torch.ones(len(equal), dtype=torch.bool)).tolist() == [0.0] * len(equal)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(10000, 0.0), (16384, 0.0), (16385, -0.000244), (18432, -0.5), (20480, -1.0), (20481, -1.0), (99999, -1.0)],
)
def test_golden_vector_of_overlong(num_tokens, penalty):
    penalty_R = overlong_penalty(torch.tensor([num_tokens]), budget_tokens=20480, cache_share=0.2)
    assert penalty_R.item() == pytest.approx(penalty, abs=5e-7)


def test_overlong_over_the_whole_budget():
    """cache_share 1: from the first token on."""
    assert overlong_penalty(torch.tensor([0, 5, 10]), 10, 1.0).tolist() == [0.0, -0.5, -1.0]


def test_every_estimator_is_tried_here():
    from headway.objectives.compose import BASELINES

    assert {estimator.__name__ for estimator in EVERY} == {function.__name__ for function in BASELINES.values()}
    assert all(getattr(advantages, estimator.__name__) is estimator for estimator in EVERY)
