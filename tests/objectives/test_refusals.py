"""What is refused, why, and that everything else is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.objectives.corrections import CORRECTIONS
from headway.objectives.named import PRESETS, objective
from headway.objectives.parts import Clipped, Objective, PolicyRatio, Ratio, Term
from headway.objectives.refusals import Situation, refusals

SYNCHRONOUS = Situation(group_size=8)
STALE = Situation(stale=True, group_size=8)

OWN_WEIGHT = ("decoupled_ppo", "olmo3", "minirl", "icepop", "glm5_async", "kimi_k25", "scalerl")
"""Objectives that weigh tokens against the policy that sampled them."""


def named(name: str, **overrides) -> Objective:
    return replace(objective(name, **overrides), length=64)


def reasons(chosen: Objective, situation: Situation) -> list[str]:
    return [refusal.reason for refusal in refusals(chosen, situation)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_objective_is_right_on_policy(name):
    assert reasons(named(name), SYNCHRONOUS) == []


@pytest.mark.parametrize("name", PRESETS)
def test_stale_data_need_a_weight_against_the_policy_that_sampled(name):
    """Or, for a preference, none at all. With a KL to the reference the estimator must be a corrected one, too."""
    (*_, last) = [None, *reasons(named(name, kl_coefficient=0 if name != "online_dpo" else None), STALE)]
    if name in (*OWN_WEIGHT, "online_dpo"):
        assert last is None
    else:
        assert "no weight against the policy that sampled them" in last


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in (*OWN_WEIGHT, "online_dpo")])
@pytest.mark.parametrize("correction", ["tis", "mis", "icepop", "sequence_tis", "geometric_rejection_is"])
def test_a_correction_mends_stale_data(name, correction):
    assert reasons(named(name, corrections=[correction], kl_coefficient=0), STALE) == []


@pytest.mark.parametrize("correction", ["geometric_rejection", "k3_rejection", "veto", "off_policy_mask"])
def test_a_filter_alone_does_not_mend_stale_data(correction):
    """What it keeps is still weighted as if the current policy had sampled it."""
    assert "no weight against" in reasons(named("dapo", corrections=[correction]), STALE)[0]
    assert reasons(named("dapo", corrections=[correction, "tis"]), STALE) == []


@pytest.mark.parametrize("name", OWN_WEIGHT)
def test_a_second_weight_on_the_same_ratio_is_refused(name):
    assert "weighted twice" in reasons(named(name, corrections=["tis"]), STALE)[0]
    assert "weighted twice" in reasons(named(name, corrections=["tis"]), SYNCHRONOUS)[0]
    assert reasons(named(name, corrections=["geometric_rejection"]), STALE) == []


def test_an_anchor_on_the_sampling_policy_is_itself_the_weight():
    assert reasons(named("grpo", anchor="behaviour", kl_coefficient=0), STALE) == []
    assert (
        "weighted twice" in reasons(named("grpo", anchor="behaviour", corrections=["tis"], kl_coefficient=0), STALE)[0]
    )


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_of_the_corrections_only_the_unbounded_product_is_refused(correction):
    found = reasons(named("dapo", corrections=[correction]), SYNCHRONOUS)
    assert found == [] if correction != "sequence_is" else "grows exponentially" in found[0]


def test_an_unbounded_product_as_the_ratio_with_the_gradient_is_refused():
    term = Term(loss=PolicyRatio(ratio=Ratio(level="sequence")), reduction="rollout_mean_token_mean")
    chosen = replace(named("dapo"), terms=(term,))
    assert "grows exponentially" in reasons(chosen, SYNCHRONOUS)[0]


def test_k1_in_the_loss_holds_nothing():
    assert "gradient of mean 0" in reasons(named("grpo", kl_estimator="k1"), SYNCHRONOUS)[0]


@pytest.mark.parametrize(
    ("estimator", "refused"),
    [("k2", True), ("k3", True), ("k3_value_k2_gradient", True), ("k2_corrected", False), ("k3_corrected", False)],
)
def test_stale_data_need_a_corrected_kl(estimator, refused):
    chosen = named("grpo", corrections=["tis"], kl_estimator=estimator)
    assert bool(reasons(chosen, STALE)) == refused
    assert reasons(chosen, SYNCHRONOUS) == []


def test_groups_of_one_can_not_be_compared():
    for name, preset in PRESETS.items():
        (*_, found) = [None, *refusals(named(name), Situation(group_size=1))]
        if preset.advantage.compares_group:
            assert found.impossible
            assert "group_size is 1" in found.reason
        else:
            assert found is None


def test_greedy_rollouts_teach_nothing():
    (found,) = refusals(named("dapo"), Situation(group_size=8, temperature=0))
    assert found.impossible
    kept = {"truncated_sampling": True, "kept_set_recorded": True}
    (found,) = refusals(named("dapo"), Situation(group_size=8, top_k=1, **kept))
    assert found.impossible
    assert str(found) == (
        "generate.top_k is 1, and rollouts that take the likeliest token are all the same: set it to 0, or to 2 or more"
    )
    assert refusals(named("dapo"), Situation(group_size=8, top_k=2, **kept)) == []


def test_a_constant_without_a_length():
    (found,) = refusals(objective("dr_grpo"), SYNCHRONOUS)
    assert found.impossible
    assert "length" in found.mend


def test_interpolation_and_self_normalisation_need_something_to_act_on():
    several = replace(SYNCHRONOUS, optimizer_steps=2)
    assert reasons(named("dapo", proximal="interpolated"), several) == []
    assert "gains nothing" in reasons(named("dapo", proximal="interpolated"), SYNCHRONOUS)[0]
    assert reasons(named("olmo3", self_normalise=True), SYNCHRONOUS) == []
    assert "has no weight" in reasons(named("dapo", self_normalise=True), SYNCHRONOUS)[0]


def test_truncated_sampling_needs_the_kept_set():
    truncated = replace(SYNCHRONOUS, truncated_sampling=True)
    assert "of another distribution" in reasons(named("dapo"), truncated)[0]
    assert reasons(named("dapo"), replace(truncated, kept_set_recorded=True)) == []


def test_what_is_impossible_comes_first():
    found = refusals(named("dapo"), Situation(stale=True, group_size=1))
    assert [refusal.impossible for refusal in found] == [True, False]


@pytest.mark.parametrize("loss", [PolicyRatio, Clipped])
def test_a_product_is_bounded_by_a_dual_clip_alone(loss):
    whole = Ratio(level="sequence")
    chosen = replace(named("dapo"), terms=(Term(loss=loss(ratio=whole), reduction="rollout_mean_token_mean"),))
    assert "grows exponentially" in reasons(chosen, SYNCHRONOUS)[0]
    bounded = Term(loss=Clipped(ratio=whole, dual_clip=3.0), reduction="rollout_mean_token_mean")
    assert reasons(replace(chosen, terms=(bounded,)), SYNCHRONOUS) == []


@pytest.mark.parametrize("reduction", ["token_mean", "rollout_mean_token_sum", "constant", "prompt_mean"])
def test_the_ratio_of_a_whole_answer_counts_once(reduction):
    loss = Clipped(ratio=Ratio(level="sequence"), dual_clip=3.0)
    chosen = replace(named("dapo"), terms=(Term(loss=loss, reduction=reduction),))
    assert "once per token" in reasons(chosen, SYNCHRONOUS)[0]


SEVERAL = replace(SYNCHRONOUS, optimizer_steps=2)


@pytest.mark.parametrize("name", PRESETS)
def test_several_optimizer_steps_need_a_ratio_that_follows_the_current_policy(name):
    found = reasons(named(name, kl_coefficient=0 if name != "online_dpo" else None), SEVERAL)
    if name in ("reinforce", "rloo"):
        assert "all steps but the first would be biased" in found[0]
    else:
        assert found == []


def test_several_optimizer_steps_need_a_corrected_kl():
    assert "several optimizer steps" in reasons(named("grpo"), SEVERAL)[0]
    assert reasons(named("grpo", kl_estimator="k3_corrected"), SEVERAL) == []


def test_a_geometric_mean_at_the_sampling_policy_is_no_weight():
    assert "a geometric mean over an answer is none" in reasons(named("gspo", anchor="behaviour"), STALE)[0]
    assert reasons(named("gspo", corrections=["tis"]), STALE) == []


def test_interpolation_needs_a_ratio_to_the_proximal_policy():
    assert "has no ratio to the proximal policy" in reasons(named("kimi_k25", proximal="interpolated"), SEVERAL)[0]
