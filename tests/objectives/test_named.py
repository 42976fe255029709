"""Objectives as data: presets, what they need, overrides, corrections, values that are refused; and no torch."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from headway.objectives import overrides as overrides_module
from headway.objectives.corrections import CORRECTIONS, correction
from headway.objectives.named import PRESETS, objective
from headway.objectives.overrides import OVERRIDES
from headway.objectives.parts import (
    Advantage,
    Clamped,
    Clipped,
    ClippedValue,
    Objective,
    Overlong,
    PolicyRatio,
    Preference,
    Ratio,
    ReferenceKL,
    ScoreFunction,
    SquaredLogRatio,
    Term,
    Weight,
)

EVERY = tuple(PRESETS)
CLIPPED = (
    "reinforce_pp",
    "reinforce_pp_baseline",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "gspo_token",
    "ppo",
    "decoupled_ppo",
    "olmo3",
    "icepop",
)


def but(*names: str) -> tuple[str, ...]:
    return tuple(name for name in EVERY if name not in names)


# ---- what each needs

TOKEN, ROLLOUT, PAIR, YES, NO = "token", "rollout", "pair", True, False

# From the table of what must be recorded and the definitions of each method. "Old policy" is a forward pass before the
# train step: with one optimizer step per batch pi_prox is pi, and no pass is made, unless a KL goes into the reward.
NEEDS = {
    # name: (level, reference, critic, mu recorded, weighs against mu, old policy for 1 step, for 2)
    "reinforce": (TOKEN, NO, NO, NO, NO, NO, NO),
    "rloo": (TOKEN, YES, NO, NO, NO, YES, YES),  # k1 in the reward
    "reinforce_pp": (TOKEN, YES, NO, NO, NO, YES, YES),  # k1 in the reward
    "reinforce_pp_baseline": (TOKEN, YES, NO, NO, NO, NO, YES),  # k2 in the loss
    "grpo": (TOKEN, YES, NO, NO, NO, NO, YES),  # k3 in the loss
    "dr_grpo": (TOKEN, NO, NO, NO, NO, NO, YES),
    "dapo": (TOKEN, NO, NO, NO, NO, NO, YES),
    "gspo": (ROLLOUT, NO, NO, NO, NO, NO, YES),
    "gspo_token": (ROLLOUT, NO, NO, NO, NO, NO, YES),
    "cispo": (TOKEN, NO, NO, NO, NO, NO, YES),  # mu "as old"
    "ppo": (TOKEN, NO, YES, NO, NO, NO, YES),
    "decoupled_ppo": (TOKEN, NO, NO, YES, YES, NO, YES),
    "olmo3": (TOKEN, NO, NO, YES, YES, NO, YES),
    "minirl": (TOKEN, NO, NO, YES, YES, NO, YES),
    "icepop": (TOKEN, NO, NO, YES, YES, NO, YES),
    "glm5_async": (TOKEN, NO, NO, YES, YES, NO, NO),  # no pi_old at all
    "kimi_k25": (TOKEN, NO, NO, YES, YES, NO, NO),  # its pi_old is the policy that generated
    "scalerl": (TOKEN, NO, NO, YES, YES, NO, NO),
    "online_dpo": (PAIR, YES, NO, NO, YES, NO, NO),  # a contrast of given pairs: needs no weight
}


@pytest.mark.parametrize("name", EVERY)
def test_what_a_preset_needs(name):
    chosen = objective(name)
    assert NEEDS[name] == (
        chosen.level,
        chosen.needs_reference,
        chosen.needs_critic,
        chosen.needs_behaviour,
        chosen.corrects_behaviour,
        chosen.needs_proximal(1),
        chosen.needs_proximal(2),
    )


CORRECTION_NEEDS = {
    # name: (level, weighs against mu): those that only keep or leave out still weigh what they keep wrongly
    "is": (TOKEN, YES),
    "tis": (TOKEN, YES),
    "clamped_is": (TOKEN, YES),
    "sequence_is": (ROLLOUT, YES),
    "sequence_tis": (ROLLOUT, YES),
    "mis": (TOKEN, YES),
    "sequence_mis": (ROLLOUT, YES),
    "icepop": (TOKEN, YES),
    "icepop_glm5": (TOKEN, YES),
    "geometric_rejection": (ROLLOUT, NO),
    "geometric_rejection_is": (ROLLOUT, YES),
    "k3_rejection": (ROLLOUT, NO),
    "veto": (ROLLOUT, NO),
    "off_policy_mask": (ROLLOUT, NO),
}


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("base", ["grpo", "reinforce"])
def test_what_a_correction_adds(base, name):
    chosen = objective(base, corrections=[name])
    assert (chosen.level, chosen.corrects_behaviour) == CORRECTION_NEEDS[name]
    assert chosen.needs_behaviour
    # pi_prox / mu is pi / mu with one optimizer step; the mask of DeepSeek compares pi with mu
    assert not chosen.needs_proximal(1)
    assert chosen.needs_proximal(2) == (base == "grpo" or name != "off_policy_mask")


@pytest.mark.parametrize(
    ("chosen", "key", "value"),
    [
        (lambda: objective("grpo", kl_coefficient=0), "needs_reference", False),
        (lambda: objective("rloo", reward_kl=0), "needs_reference", False),
        (lambda: objective("reinforce", kl_coefficient=0.1), "needs_reference", True),
        (lambda: objective("reinforce", reward_kl=0.1), "needs_reference", True),
        (lambda: objective("grpo", advantage="gae"), "needs_critic", True),
        (lambda: objective("ppo", advantage="group_mean"), "needs_critic", False),
        (lambda: objective("grpo", anchor="behaviour"), "needs_behaviour", True),
        (lambda: objective("grpo", anchor="behaviour"), "corrects_behaviour", True),
        (lambda: objective("grpo", kl_estimator="k3_corrected"), "needs_behaviour", True),
        (lambda: objective("grpo", kl_estimator="k3_corrected"), "corrects_behaviour", False),
        (lambda: objective("grpo", proximal="interpolated"), "needs_behaviour", True),
        (lambda: objective("gspo", corrections=["veto", "tis"]), "corrects_behaviour", True),
    ],
)
def test_what_is_needed_follows_the_parts(chosen, key, value):
    assert getattr(chosen(), key) is value


def test_the_old_policy_follows_the_parts():
    assert not objective("rloo", reward_kl=0).needs_proximal(2)
    assert not objective("grpo", anchor="behaviour").needs_proximal(2)
    assert not objective("grpo", proximal="interpolated").needs_proximal(2)
    assert objective("grpo", proximal="interpolated", reward_kl=0.1).needs_proximal(1)
    assert objective("olmo3", self_normalise=True).needs_proximal(1)


# ---- presets

POLICY = {
    # name: (advantage, reduction, clip bounds or the bounds of each weight)
    "reinforce": ("batch_mean", "rollout_mean_token_sum", []),
    "rloo": ("leave_one_out", "rollout_mean_token_sum", []),
    "reinforce_pp": ("reward", "token_mean", [(0.2, 0.2)]),
    "reinforce_pp_baseline": ("group_mean", "token_mean", [(0.2, 0.2)]),
    "grpo": ("group_mean_std", "rollout_mean_token_mean", [(0.2, 0.2)]),
    "dr_grpo": ("group_mean", "constant", [(0.2, 0.2)]),
    "dapo": ("group_mean_std", "token_mean", [(0.2, 0.28)]),
    "gspo": ("group_mean_std", "rollout_mean_token_mean", [(3e-4, 4e-4)]),
    "gspo_token": ("group_mean_std", "rollout_mean_token_mean", [(3e-4, 4e-4)]),
    "cispo": ("group_mean_std", "token_mean", [(0, 5)]),
    "ppo": ("gae", "token_mean", [(0.2, 0.2)]),
    "decoupled_ppo": ("reward", "token_mean", [(0.2, 0.2), (0, math.inf)]),
    "olmo3": ("group_mean", "token_mean", [(0.2, 0.272), (0, 2)]),
    "minirl": ("group_mean", "rollout_mean_token_sum", [(0, math.inf), (0, 5), (0.8, 1.27)]),
    "icepop": ("group_mean_std", "rollout_mean_token_mean", [(0.2, 0.2), (0.5, 5)]),
    "glm5_async": ("group_mean_std", "rollout_mean_token_mean", [(0.8, 1.28)]),
    "kimi_k25": ("group_mean", "token_mean", [(0.2, 0.28)]),
    "scalerl": ("group_mean_batch_std", "prompt_mean", [(0, 5)]),
    "online_dpo": ("preference", "pair_mean", []),
}


@pytest.mark.parametrize("name", EVERY)
def test_a_preset_has_its_authors_values(name):
    preset = objective(name)
    first = preset.terms[0]
    bounds = [(weight.low, weight.high) for weight in first.weights]
    if isinstance(first.loss, Clipped | Clamped):
        bounds = [(first.loss.clip_low, first.loss.clip_high), *bounds]
    assert (preset.advantage.name, first.reduction, bounds) == POLICY[name]
    assert preset.name == name
    assert preset.source
    assert preset.corrections == ()


def test_what_presets_have_beside_their_policy_term():
    assert objective("grpo").terms[1] == Term(
        loss=ReferenceKL(estimator="k3"), coefficient=0.04, reduction="rollout_mean_token_mean"
    )
    assert objective("reinforce_pp_baseline").terms[1].loss == ReferenceKL(estimator="k2")
    assert objective("kimi_k25").terms[1].loss == SquaredLogRatio(ratio=Ratio(new="current", old="behaviour"))
    assert objective("ppo").value_term == Term(loss=ClippedValue(value_clip=0.2), reduction="token_mean")
    assert objective("ppo").advantage == Advantage(name="gae", gamma=1.0, lam=0.95, whiten=True)
    assert objective("dapo").overlong == Overlong(cache_share=0.2)
    assert {name for name in EVERY if objective(name).filters} == {"dapo", "olmo3", "scalerl"}
    assert {name for name in EVERY if objective(name).advantage.whiten} == {
        "reinforce_pp",
        "reinforce_pp_baseline",
        "ppo",
        "decoupled_ppo",
    }
    assert objective("scalerl").retire_above == 0.9


# ---- overrides


def policy(chosen: Objective) -> Term:
    return chosen.terms[0]


def bounds_of(chosen: Objective, side: str) -> list[float]:
    """Of everything in the policy term that clips the current policy."""
    loss = policy(chosen).loss
    own = [getattr(loss, side)] if isinstance(loss, Clipped | Clamped) else []
    for weight in policy(chosen).weights:
        if weight.ratio.new == "current" and side == "clip_high" and weight.high < math.inf:
            own.append(weight.high - 1)
        if weight.ratio.new == "current" and side == "clip_low" and weight.low > 0:
            own.append(1 - weight.low)
    return own


def term_of(chosen: Objective, loss: type) -> Term:
    return next(term for term in chosen.terms if isinstance(term.loss, loss))


def olds(chosen: Objective) -> set[str]:
    return {ratio.old for term in chosen.terms for ratio in term.ratios if ratio.new == "current"}


# key -> (value, presets that accept it, what it has done there, what the others are told beside the key and their name)
TABLE: dict[str, tuple[Any, Iterable[str], Any, str]] = {
    "advantage": ("leave_one_out", but("online_dpo"), lambda o: o.advantage.name == "leave_one_out", "belong together"),
    "whiten": (True, but("online_dpo"), lambda o: o.advantage.whiten, "leave out reward_kl, overlong_share, whiten"),
    "gamma": (0.9, ["ppo"], lambda o: o.advantage.gamma == 0.9, "gamma does nothing"),
    "lam": (0.5, ["ppo"], lambda o: o.advantage.lam == 0.5, "lam does nothing"),
    "anchor": (
        "behaviour",
        but("reinforce", "rloo", "online_dpo"),
        lambda o: olds(o) == {"behaviour"},
        "anchor does nothing",
    ),
    "reduction": (
        "prompt_mean",
        but("online_dpo"),
        lambda o: {term.reduction for term in o.terms} == {"prompt_mean"},
        "reduction does nothing",
    ),
    "clip_low": (
        0.1,
        but("reinforce", "rloo", "online_dpo", "cispo", "scalerl"),
        lambda o: bounds_of(o, "clip_low") == [pytest.approx(0.1)],
        "clip_low does nothing",
    ),
    "clip_high": (
        0.3,
        but("reinforce", "rloo", "online_dpo"),
        lambda o: bounds_of(o, "clip_high") == [pytest.approx(0.3)],
        "clip_high does nothing",
    ),
    "dual_clip": (3.0, CLIPPED, lambda o: policy(o).loss.dual_clip == 3, "dual_clip does nothing"),
    "kl_coefficient": (
        0.07,
        but("online_dpo"),
        lambda o: term_of(o, ReferenceKL).coefficient == 0.07,
        "kl_coefficient does not belong",
    ),
    "kl_estimator": (
        "k3_corrected",
        ["grpo", "reinforce_pp_baseline"],
        lambda o: term_of(o, ReferenceKL).loss.estimator == "k3_corrected",
        "kl_estimator does nothing",
    ),
    "reward_kl": (0.2, but("online_dpo"), lambda o: o.reward_kl == 0.2, "leave out reward_kl"),
    "quadratic_coefficient": (
        0.5,
        ["kimi_k25"],
        lambda o: term_of(o, SquaredLogRatio).coefficient == 0.5,
        "quadratic_coefficient does nothing",
    ),
    "value_clip": (0.4, ["ppo"], lambda o: term_of(o, ClippedValue).loss.value_clip == 0.4, "value_clip does nothing"),
    "beta": (0.4, ["online_dpo"], lambda o: policy(o).loss.beta == 0.4, "beta does nothing"),
    "overlong_share": (0.3, but("online_dpo"), lambda o: o.overlong == Overlong(cache_share=0.3), "overlong_share"),
    "filters": (("zero_variance",), but("online_dpo"), lambda o: o.filters == ("zero_variance",), "and filters"),
    "retire_above": (0.8, EVERY, lambda o: o.retire_above == 0.8, ""),
    "self_normalise": (True, EVERY, lambda o: o.self_normalise, ""),
    "proximal": ("interpolated", EVERY, lambda o: o.proximal == "interpolated", ""),
    "length": (64, ["dr_grpo"], lambda o: o.length == 64, "length does nothing"),
    "unsound": (True, EVERY, lambda o: o.unsound, ""),
}


def test_every_override_is_in_the_table():
    assert set(TABLE) == set(OVERRIDES)


@pytest.mark.parametrize("key", TABLE)
def test_an_override_does_what_it_says_where_it_applies_and_is_refused_elsewhere(key):
    value, accepted_by, has_done, refusal = TABLE[key]
    for name in EVERY:
        if name in accepted_by:
            assert has_done(objective(name, **{key: value})), name
            assert objective(name, **{key: None}) == objective(name)
            continue
        with pytest.raises(ValueError, match=refusal) as error:
            objective(name, **{key: value})
        assert name in str(error.value) or "belong together" in refusal


def test_overrides_leave_the_rest_as_it_was():
    changed = objective("grpo", clip_high=0.28)
    assert changed == replace(
        objective("grpo"), terms=(replace(policy(objective("grpo")), loss=Clipped(clip_high=0.28)), changed.terms[1])
    )
    assert objective("grpo") == PRESETS["grpo"]


@pytest.mark.parametrize("name", EVERY)
def test_a_presets_own_values_given_back_change_nothing(name):
    values = overrides_module.values(objective(name))
    assert objective(name, **values) == objective(name)


def test_zero_switches_off():
    assert len(objective("grpo", kl_coefficient=0).terms) == 1
    assert objective("rloo", reward_kl=0).reward_kl == 0
    assert objective("dapo", overlong_share=0).overlong is None
    assert objective("scalerl", retire_above=0).retire_above is None
    assert objective("dapo", filters=()).filters == ()


def test_filters_may_be_any_sequence():
    assert objective("grpo", filters=["truncated"]) == objective("grpo", filters=("truncated",))
    assert hash(objective("grpo", filters=["truncated"]))


def test_a_kl_term_that_is_added_has_the_reduction_of_the_policy():
    added = objective("dr_grpo", kl_coefficient=0.1, length=8)
    assert added.terms[1] == Term(loss=ReferenceKL(estimator="k2"), coefficient=0.1, reduction="constant")
    assert objective("dr_grpo", kl_coefficient=0.1, kl_estimator="k3").terms[1].loss == ReferenceKL(estimator="k3")
    with pytest.raises(ValueError, match="kl_estimator does nothing in grpo"):
        objective("grpo", kl_coefficient=0, kl_estimator="k2")


def test_an_advantage_by_a_critic_brings_the_critics_loss():
    by_critic = objective("grpo", advantage="gae", gamma=0.9, lam=0.8, value_clip=0.5)
    assert by_critic.advantage == Advantage(name="gae", gamma=0.9, lam=0.8)
    assert term_of(by_critic, ClippedValue).loss.value_clip == 0.5
    assert objective("ppo", advantage="group_mean").value_term is None
    assert objective("ppo", advantage="gae") == objective("ppo")


def test_clips_act_on_the_current_policy_and_not_on_the_mismatch():
    """IcePop's band and MiniRL's bound of 5 are of pi_prox / mu: they are set by the correction's own syntax."""
    icepop = objective("icepop", clip_low=0.1, clip_high=0.3)
    assert (policy(icepop).weights[0].low, policy(icepop).weights[0].high) == (0.5, 5.0)
    assert policy(objective("minirl", clip_high=0.3)).weights[1].high == 5.0
    with_correction = objective("grpo", clip_high=0.3, corrections=["tis"])
    assert policy(with_correction).weights[0].high == 2.0


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gpro", {}, "unknown objective 'gpro'; the nearest valid name is grpo"),
        ("drgrpo", {}, "the nearest valid name is dr_grpo"),
        ("grpo", {"reduction": "token-mean"}, "unknown reduction 'token-mean'; the nearest valid name is token_mean"),
        ("grpo", {"reduction": "seq_mean_token_mean"}, "nearest valid name is rollout_mean_token_mean"),
        ("grpo", {"reduction": "pair_mean"}, "pair_mean belongs to the preference loss"),
        ("grpo", {"advantage": "group_mean_sd"}, "nearest valid name is group_mean_std"),
        ("grpo", {"advantage": "preference"}, "belong together"),
        ("grpo", {"anchor": "old"}, "unknown anchor 'old'"),
        ("grpo", {"kl_estimator": "k33"}, "unknown KL estimator 'k33'; the nearest valid name is k3"),
        ("grpo", {"proximal": "interpolate"}, "nearest valid name is interpolated"),
        ("grpo", {"filters": ["zero_varianc"]}, "unknown filter 'zero_varianc'; the nearest valid name is zero_vari"),
        ("grpo", {"cliphigh": 0.3}, "nearest valid name is clip_high"),
        ("grpo", {"name": "mine"}, "unknown setting of an objective 'name'"),
        ("grpo", {"clip_low": 1.5}, "clip_low 1.5 must be above 0 and at most 1"),
        ("grpo", {"clip_high": -0.1}, "clip_high -0.1 must be above 0"),
        ("grpo", {"clip_high": math.nan}, "clip_high nan"),
        ("grpo", {"dual_clip": 1.0}, "dual_clip 1 must be above 1"),
        ("grpo", {"kl_coefficient": -0.1}, "coefficient of a term -0.1 must be above 0"),
        ("grpo", {"reward_kl": -0.1}, "reward_kl -0.1 must not be below 0"),
        ("grpo", {"overlong_share": 1.5}, "overlong_share 1.5 must be above 0 and at most 1"),
        ("grpo", {"retire_above": 1.5}, "retire_above 1.5 must be above 0 and at most 1"),
        ("dr_grpo", {"length": 0}, "length 0 must be above 0"),
        ("ppo", {"gamma": 1.5}, "gamma 1.5 must be between 0 and 1"),
        ("ppo", {"lam": -0.5}, "lam -0.5 must be between 0 and 1"),
        ("ppo", {"value_clip": -0.1}, "value_clip -0.1 must be above 0"),
        ("online_dpo", {"beta": 0.0}, "beta 0 must be above 0"),
        ("kimi_k25", {"quadratic_coefficient": 0.0}, "coefficient of a term 0 must be above 0"),
    ],
)
def test_what_is_not_valid_is_refused_with_the_nearest_choice(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        objective(name, **overrides)


# ---- corrections


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_comes_after_the_weights_there_are(name):
    corrected = objective("olmo3", corrections=[name])
    assert policy(corrected).weights == (*policy(objective("olmo3")).weights, *CORRECTIONS[name])
    assert corrected.corrections == (name,)


def test_corrections_act_on_policy_terms_alone_and_in_order():
    chosen = objective("grpo", corrections=["veto", "tis:5"])
    assert [weight.name for weight in policy(chosen).weights] == ["veto", "tis"]
    assert policy(chosen).weights[1].high == 5
    assert chosen.terms[1].weights == ()
    assert chosen.corrections == ("veto", "tis:5")


@pytest.mark.parametrize(
    ("written", "bounds"),
    [
        ("tis", (0.0, 2.0)),
        ("tis:5", (0.0, 5.0)),
        ("mis:3", (0.0, 3.0)),
        ("sequence_tis:1.5", (0.0, 1.5)),
        ("icepop:0.5:4", (0.5, 4.0)),
        ("clamped_is:0.25:8", (0.25, 8.0)),
        ("geometric_rejection:0.99:1.01", (0.99, 1.01)),
        ("geometric_rejection_is:0.99:1.01", (0.99, 1.01)),
        ("k3_rejection:0.001", (0.0, 0.001)),
        ("veto:1e-3", (1e-3, math.inf)),
        ("off_policy_mask:0.1", (0.0, 0.1)),
    ],
)
def test_bounds_after_colons(written, bounds):
    first, *rest = correction(written)
    assert (first.low, first.high) == bounds
    assert tuple(rest) == CORRECTIONS[first.name if written.count("_is") == 0 else written.split(":")[0]][1:]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("tiss", "unknown correction 'tiss'; the nearest valid name is tis"),
        ("", "unknown correction ''"),
        ("TIS:2", "unknown correction 'TIS'"),
        ("tis:two", "correction 'tis:two': the bounds after the colon must be numbers"),
        ("tis:", "must be numbers"),
        ("tis:1:2", r"correction 'tis:1:2': tis takes 1 bound \(high\)"),
        ("veto:1:2", r"veto takes 1 bound \(low\)"),
        ("icepop:4", r"icepop takes 2 bounds \(low, high\)"),
        ("icepop:1:2:3", "icepop takes 2 bounds"),
        ("is:2", "is takes no bound"),
        ("sequence_is:2", "sequence_is takes no bound"),
        ("icepop:5:0.5", "icepop: low 5 must be at least 0 and at most high 0.5"),
        ("icepop:-1:2", "icepop: low -1 must be at least 0"),
        ("tis:nan", "tis: low 0 must be at least 0 and at most high nan"),
        ("k3_rejection:inf", "k3_rejection never acts without a bound"),
        ("tis:0", "tis: with high 0 every weight is 0"),
        ("veto:0", "veto never acts without a bound"),
        ("mis:inf", "mis never acts without a bound"),
        ("geometric_rejection:0:inf", "geometric_rejection never acts without a bound"),
    ],
)
def test_a_correction_that_is_not_well_written_is_refused(written, message):
    with pytest.raises(ValueError, match=message):
        objective("grpo", corrections=[written])


def test_a_preference_has_nothing_to_correct():
    with pytest.raises(ValueError, match="online_dpo has no importance ratio that tis could correct"):
        objective("online_dpo", corrections=["tis"])


# ---- parts


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ratio(new="behaviour"), "unknown policy 'behaviour'"),
        (lambda: Ratio(old="current"), "unknown policy 'current'"),
        (lambda: Ratio(new="proximal", old="proximal"), "ratio of proximal to itself is always 1"),
        (lambda: Ratio(level="rollout"), "unknown level of a ratio 'rollout'"),
        (lambda: Weight(name="w", ratio=Ratio(), act="clip"), "unknown act of a weight 'clip'"),
        (lambda: Weight(name="w", ratio=Ratio(), act="mask", low=2, high=1), "w: low 2 must be at least 0 and at most"),
        (lambda: Weight(name="w", ratio=Ratio(), act="mask", low=-1), "w: low -1"),
        (lambda: Weight(name="w", ratio=Ratio(), act="keep_k3"), "w never acts without a bound"),
        (lambda: Weight(name="w", ratio=Ratio(), act="off_policy_mask"), "w never acts without a bound"),
        (lambda: Clipped(clip_low=0), "clip_low 0 must be above 0"),
        (lambda: Clamped(clip_high=0), "clip_high 0 must be above 0"),
        (lambda: Clamped(clip_low=2), "clip_low 2 must be above 0 and at most 1"),
        (lambda: Preference(beta=-1), "beta -1"),
        (lambda: ReferenceKL(estimator="k4"), "unknown KL estimator 'k4'"),
        (lambda: Term(loss=ScoreFunction(), reduction="mean"), "unknown reduction 'mean'"),
        (lambda: Term(loss=ScoreFunction(), reduction="pair_mean"), "pair_mean belongs to the preference loss"),
        (lambda: Term(loss=Preference()), "pair_mean belongs to the preference loss"),
        (lambda: Term(loss=ScoreFunction(), coefficient=0), "coefficient of a term 0 must be above 0"),
        (lambda: Advantage(name="mean"), "unknown advantage 'mean'"),
        (lambda: Advantage(name="gae", lam=2), "lam 2 must be between 0 and 1"),
        (lambda: Overlong(cache_share=0), "overlong_share 0 must be above 0"),
        (lambda: replace(PRESETS["grpo"], advantage=Advantage(name="preference")), "belong together"),
        (lambda: replace(PRESETS["online_dpo"], advantage=Advantage(name="reward")), "belong together"),
        (lambda: replace(PRESETS["grpo"], filters=("odd",)), "unknown filter 'odd'"),
    ],
)
def test_parts_that_can_not_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


WHOLE_ANSWER = Ratio(level="geometric")


@pytest.mark.parametrize(
    ("term", "level"),
    [
        (Term(loss=ScoreFunction()), TOKEN),
        (Term(loss=PolicyRatio()), TOKEN),
        (Term(loss=ReferenceKL(), reduction="rollout_mean_token_mean"), TOKEN),  # denominators are known before
        (Term(loss=PolicyRatio(ratio=WHOLE_ANSWER)), ROLLOUT),
        (Term(loss=SquaredLogRatio(ratio=Ratio(level="sequence"))), ROLLOUT),
        (Term(loss=Clipped(ratio=Ratio(level="geometric_token"))), ROLLOUT),
        (Term(loss=ScoreFunction(), weights=CORRECTIONS["tis"]), TOKEN),
        (Term(loss=ScoreFunction(), weights=CORRECTIONS["veto"]), ROLLOUT),
        (Term(loss=Preference(), reduction="pair_mean"), PAIR),
    ],
)
def test_the_level_of_a_term_is_what_must_stay_together(term, level):
    assert term.level == level


def test_a_description_is_frozen_compares_by_value_and_has_a_hash():
    assert objective("olmo3", clip_high=0.272) == objective("olmo3")
    assert len({objective("olmo3"), objective("olmo3"), objective("grpo")}) == 2
    for part, key in ((objective("grpo"), "name"), (objective("grpo").terms[0], "loss"), (Ratio(), "level")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, key, "mine")


@pytest.mark.parametrize(
    ("formula", "written"),
    [
        (lambda: CORRECTIONS["icepop"][0].formula, "pi_prox/mu 1[0.5 <= pi_prox/mu <= 5]"),
        (lambda: CORRECTIONS["tis"][0].formula, "min(pi_prox/mu, 2)"),
        (lambda: CORRECTIONS["is"][0].formula, "pi_prox/mu"),
        (lambda: CORRECTIONS["sequence_mis"][0].formula, "prod_t pi_prox/mu 1[prod_t pi_prox/mu <= 2]"),
        (lambda: objective("gspo").terms[0].loss.formula.split(", rho = ")[1], "(prod_t pi/pi_prox)^(1/len)"),
        (lambda: objective("kimi_k25").terms[0].loss.formula, "clip(pi/mu, 0.8, 1.28) A"),
    ],
)
def test_formulas_are_as_the_papers_have_them(formula, written):
    assert formula() == written


def test_every_part_has_its_formula():
    for chosen in [*PRESETS.values(), *(objective("grpo", corrections=[name]) for name in CORRECTIONS)]:
        assert chosen.advantage.formula
        for term in chosen.terms:
            assert term.loss.formula
            assert all(weight.formula and weight.source for weight in term.weights)


@pytest.mark.parametrize("module", ["named", "parts", "corrections", "overrides", "refusals", "describe"])
def test_reading_objectives_imports_no_torch(module):
    program = f"import sys, headway.objectives.{module}; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_clip_can_be_switched_off():
    assert objective("ppo", value_clip=0).value_term.loss.value_clip is None
    assert objective("dapo", dual_clip=0).terms[0].loss.dual_clip is None
