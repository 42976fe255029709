"""Rewards -> which rollouts are data -> credit of their tokens: B05, B06, and values worked by hand.

Axes: R rollouts, M trained tokens.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.objectives import compose
from headway.objectives.compose import Selection
from headway.objectives.named import objective
from headway.objectives.parts import Objective

NAN = torch.nan


def floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def select(description: Objective, outcomes: list[float], groups: list[int], truncated: list[int] = []) -> Selection:  # noqa: B006
    truncated_R = torch.zeros(len(outcomes), dtype=torch.bool)
    truncated_R[truncated] = True
    return compose.select(description, floats(outcomes), torch.tensor(groups), truncated_R)


# ---- which rollouts are data


def test_what_leaves_a_batch_is_counted_by_reason():
    """Group 0 is fine but for an unscored member, 1 has a single score, 2 none, 3 equal ones."""
    outcomes = [1, 0, NAN, 1, NAN, NAN, 0.5, 0.5]
    groups = [0, 0, 0, 1, 1, 2, 3, 3]
    plain = select(objective("grpo"), outcomes, groups)
    assert plain.usable_R.tolist() == [True, True, False, False, False, False, True, True]
    assert plain.baseline_R.tolist() == [True, True, False, True, False, False, True, True]
    assert plain.dropped == {"unscored": 3, "lone": 1}
    filtered = select(objective("olmo3"), outcomes, groups)
    assert filtered.usable_R.tolist() == [True, True, False, False, False, False, False, False]
    assert filtered.dropped == {"unscored": 3, "lone": 1, "zero_variance": 2}


@pytest.mark.parametrize("name", ["reinforce", "reinforce_pp", "ppo", "decoupled_ppo"])
def test_without_a_group_to_compare_with_nobody_is_lone(name):
    selection = select(objective(name), [1, NAN, 0], [0, 0, 1])
    assert selection.usable_R.tolist() == [True, False, True]
    assert selection.dropped == {"unscored": 1}


def test_each_rollout_is_dropped_for_one_reason():
    """Equal ones that were cut off too are counted as equal, which comes first."""
    description = objective("olmo3", filters=("zero_variance", "truncated"))
    selection = select(description, [1, 1, 1, 0], [0, 0, 1, 1], truncated=[0, 2])
    assert selection.usable_R.tolist() == [False, False, False, True]
    assert selection.dropped == {"zero_variance": 2, "truncated": 1}


def test_a_truncated_rollout_stays_in_the_baseline():
    """1 of the answers that are left, 0 of the one cut off: A = 1 - 2/3, not 1 - 1."""
    description = objective("dr_grpo", filters=("truncated",))
    selection = select(description, [1, 1, 0], [0, 0, 0], truncated=[2])
    assert selection.usable_R.tolist() == [True, True, False]
    assert selection.baseline_R.tolist() == [True, True, True]
    credit = compose.credit(description, selection, floats([1, 1, 0]), torch.zeros(3).long(), torch.tensor([0, 1]))
    assert credit.advantage_M.tolist() == pytest.approx([1 / 3, 1 / 3])


def test_only_best_and_worst_of_a_group_are_data_of_a_preference():
    selection = select(objective("online_dpo"), [0.5, 1, 0, NAN, 2, 2, 9], [0, 0, 0, 0, 1, 1, 2])
    assert selection.usable_R.tolist() == [False, True, True, False, False, False, False]
    assert selection.dropped == {"unscored": 1, "lone": 1, "no_preference": 3}


@pytest.mark.parametrize(
    "overrides", [{"whiten": True}, {"reward_kl": 0.1}, {"overlong_share": 0.2}, {"filters": ("truncated",)}]
)
def test_a_pair_is_chosen_by_outcome_and_stays_whole(overrides):
    """Each of these would pair rollouts that are no data, or leave half a pair: the loss of one answer alone."""
    with pytest.raises(ValueError, match="online_dpo"):
        objective("online_dpo", **overrides)


# ---- B05


def test_b05_all_failed_but_shaped():
    """Outcomes 0, shaped -0.02, -0.05, -0.08, -0.05: dropped by outcome, or a centred +-0.03; never a std's +-1.41."""
    shaped_R, group_R, rollout_M = floats([-0.02, -0.05, -0.08, -0.05]), torch.zeros(4).long(), torch.arange(4)
    for name in ("dapo", "olmo3", "scalerl"):
        selection = select(objective(name), [0, 0, 0, 0], [0, 0, 0, 0])
        assert selection.dropped == {"zero_variance": 4}
        assert not selection.usable_R.any()
    selection = select(objective("dr_grpo"), [0, 0, 0, 0], [0, 0, 0, 0])
    credit = compose.credit(objective("dr_grpo"), selection, shaped_R, group_R, rollout_M)
    assert credit.advantage_M.tolist() == pytest.approx([0.03, 0, -0.03, 0])


def test_b05_through_an_objective_that_shapes():
    """DAPO with a budget of 10, the last 2 penalised: failures of 8, 9, 10 tokens get 0, -0.5, -1, and are dropped."""
    description = objective("dapo")
    shaped_R = compose.shaped_rewards(description, floats([0, 0, 0, NAN]), torch.tensor([8, 9, 10, 10]), 10)
    assert shaped_R[:3].tolist() == [0, -0.5, -1]
    assert shaped_R[3].isnan()
    selection = select(description, [0, 0, 0, NAN], [0, 0, 0, 0])
    assert selection.dropped == {"unscored": 1, "zero_variance": 3}


def test_rewards_are_as_scored_where_nothing_shapes_them():
    reward_R = floats([1, NAN])
    assert compose.shaped_rewards(objective("grpo"), reward_R, torch.tensor([99, 99]), 10) is reward_R


# ---- a KL divergence in the reward


def test_the_kl_of_a_whole_answer_is_taken_off_its_reward_before_a_baseline():
    """log pi_prox/ref: 0.1 + 0.2 = 0.3, and 0.5. With a tenth of it rewards are 0.97, -0.05: each minus the other."""
    description = objective("rloo", reward_kl=0.1)
    credit = compose.credit(
        description,
        select(description, [1, 0], [0, 0]),
        floats([1, 0]),
        torch.tensor([0, 0]),
        torch.tensor([0, 0, 1]),
        proximal_M=floats([-1.0, -1.0, -1.0]),
        reference_M=floats([-1.1, -1.2, -1.5]),
    )
    assert credit.advantage_M.tolist() == pytest.approx([1.02, 1.02, -1.02])
    assert credit.metrics["reward_kl"] == pytest.approx(0.8 / 3)
    assert credit.return_M is None


def test_without_a_baseline_the_kl_is_credited_token_by_token():
    """Rewards of tokens -0.01, 1 - 0.02 | -0.05: to go 0.97, 0.98 | -0.05."""
    description = objective("reinforce_pp", reward_kl=0.1, whiten=False)
    given = {"proximal_M": floats([-1.0, -1.0, -1.0]), "reference_M": floats([-1.1, -1.2, -1.5])}
    selection, rollout_M = select(description, [1, 0], [0, 1]), torch.tensor([0, 0, 1])
    plain = compose.credit(description, selection, floats([1, 0]), torch.tensor([0, 1]), rollout_M, **given)
    assert plain.advantage_M.tolist() == pytest.approx([0.97, 0.98, -0.05])
    whitened = objective("reinforce_pp", reward_kl=0.1)
    credit = compose.credit(whitened, selection, floats([1, 0]), torch.tensor([0, 1]), rollout_M, **given)
    # mean 0.633333, std 0.591805
    assert credit.advantage_M.tolist() == pytest.approx([0.568881, 0.585779, -1.154660], abs=1e-5)


def test_a_critic_sees_the_kl_token_by_token_too():
    """delta: -0.01 + 0.6 - 0.5 = 0.09, 1 - 0.02 - 0.6 = 0.38; with lambda 1 the sums 0.47, 0.38."""
    description = objective("ppo", reward_kl=0.1, lam=1.0, whiten=False)
    credit = compose.credit(
        description,
        select(description, [1], [0]),
        floats([1]),
        torch.tensor([0]),
        torch.tensor([0, 0]),
        proximal_M=floats([-1.0, -1.0]),
        reference_M=floats([-1.1, -1.2]),
        value_M=floats([0.5, 0.6]),
    )
    assert credit.advantage_M.tolist() == pytest.approx([0.47, 0.38])
    assert credit.return_M.tolist() == pytest.approx([0.97, 0.98])


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp"])
def test_a_nan_of_the_kl_is_no_missing_reward(name):
    """A rollout with a nan reward is unscored and gets 0; one with a nan log-prob has been scored."""
    description = objective(name)
    credit = compose.credit(
        description,
        select(description, [1, 0], [0, 0]),
        floats([1, 0]),
        torch.tensor([0, 0]),
        torch.tensor([0, 1]),
        proximal_M=floats([NAN, -1.0]),
        reference_M=floats([-1.0, -1.0]),
    )
    assert credit.advantage_M[0].isnan()


def test_the_kl_that_is_reported_is_of_rollouts_that_are_data():
    """The second group has one score: 0.1 is the mean of the first's tokens, 5 does not count."""
    description = objective("rloo")
    credit = compose.credit(
        description,
        select(description, [1, 0, 1], [0, 0, 1]),
        floats([1, 0, 1]),
        torch.tensor([0, 0, 1]),
        torch.tensor([0, 1, 2]),
        proximal_M=floats([-1.0, -1.0, -1.0]),
        reference_M=floats([-1.1, -1.1, -6.0]),
    )
    assert credit.metrics["reward_kl"] == pytest.approx(0.1)


# ---- a critic


def credit_by_critic(rollout_M: Tensor, value_M: Tensor, rewards: list[float], **options):
    description = objective("ppo", lam=0.95, whiten=False)
    groups = [0] * len(rewards)
    return compose.credit(
        description,
        select(description, rewards, groups),
        floats(rewards),
        torch.tensor(groups),
        rollout_M,
        value_M=value_M,
        **options,
    )


def test_golden_vector_of_gae():
    credit = credit_by_critic(torch.zeros(3).long(), floats([0.5, 0.6, 0.7]), [1])
    assert credit.advantage_M.tolist() == pytest.approx([0.46575, 0.385, 0.3])
    assert credit.return_M.tolist() == pytest.approx([0.96575, 0.985, 1])


def test_credit_goes_through_the_text_of_tools():
    """Tokens 0, 1 | tool text | 4: what others wrote is not among the trained tokens, and ends nothing."""
    mask_N = torch.tensor([True, True, False, False, True])
    value_N = floats([0.5, 0.6, NAN, NAN, 0.7])
    rollout_N = torch.zeros(5).long()
    credit = credit_by_critic(rollout_N[mask_N], value_N[mask_N], [1])
    assert credit.advantage_M.tolist() == pytest.approx([0.46575, 0.385, 0.3])
    to_go = objective("decoupled_ppo", whiten=False)
    selection = select(to_go, [1], [0])
    credit = compose.credit(to_go, selection, floats([1]), torch.tensor([0]), rollout_N[mask_N])
    assert credit.advantage_M.tolist() == [1, 1, 1]


def test_a_rollout_that_was_cut_off_goes_on_from_its_bootstrap():
    """delta of the last token: 0 + 0.9 - 0.7 = 0.2 instead of -0.7."""
    values = floats([0.5, 0.6, 0.7])
    credit = credit_by_critic(torch.zeros(3).long(), values, [0], bootstrap_R=floats([0.9]))
    assert credit.advantage_M.tolist() == pytest.approx([0.1 + 0.95 * 0.29, 0.1 + 0.95 * 0.2, 0.2])
    assert credit_by_critic(torch.zeros(3).long(), values, [0]).advantage_M[2].item() == pytest.approx(-0.7)


def test_an_unscored_rollout_has_no_say_in_the_credit_of_others():
    one = credit_by_critic(torch.zeros(3).long(), floats([0.5, 0.6, 0.7]), [1])
    two = credit_by_critic(torch.tensor([0, 0, 0, 1]), floats([0.5, 0.6, 0.7, NAN]), [1, NAN])
    assert torch.equal(two.advantage_M[:3], one.advantage_M)


def test_an_unscored_rollout_has_a_credit_of_zero():
    description = objective("decoupled_ppo", whiten=False)
    selection = select(description, [1, NAN], [0, 1])
    credit = compose.credit(description, selection, floats([1, NAN]), torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert credit.advantage_M.tolist() == [1, 0]


def test_whitening_is_over_the_tokens_of_usable_rollouts():
    """Rewards 1, 0 of 2 + 1 tokens; the unscored rollout's two tokens would pull the mean down, and get 0.

    Over 1, 1, 0: mean 2/3, std sqrt(1/3) = 0.577350.
    """
    description = objective("decoupled_ppo")
    credit = compose.credit(
        description,
        select(description, [1, 0, NAN], [0, 0, 0]),
        floats([1, 0, NAN]),
        torch.zeros(3).long(),
        torch.tensor([0, 0, 1, 2, 2]),
    )
    assert credit.advantage_M.tolist() == pytest.approx([0.577350, 0.577350, -1.154701, 0, 0], abs=1e-5)


def test_no_trained_token():
    for name in ("grpo", "rloo", "reinforce_pp", "ppo", "online_dpo"):
        description = objective(name)
        nothing, no_token = floats([]), torch.zeros(0).long()
        credit = compose.credit(
            description,
            select(description, [1, 0], [0, 0]),
            floats([1, 0]),
            torch.tensor([0, 0]),
            no_token,
            proximal_M=nothing,
            reference_M=nothing,
            value_M=nothing,
        )
        assert credit.advantage_M.shape == (0,)
        assert credit.metrics.get("reward_kl", 0.0) == 0.0
