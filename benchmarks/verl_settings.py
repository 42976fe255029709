"""What verl's functions are called with: (name, inputs, settings) of losses, and settings of the others."""

from __future__ import annotations

from typing import Any

# Advantages

OUTCOME_ADVANTAGES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"norm_adv_by_std_in_grpo": True, "epsilon": 1e-6}),
    ("grpo", {"norm_adv_by_std_in_grpo": False}),
    ("grpo_vectorized", {"norm_adv_by_std_in_grpo": True, "epsilon": 1e-6}),
    ("grpo_vectorized", {"norm_adv_by_std_in_grpo": False}),
    ("rloo", {}),
    ("rloo_vectorized", {}),
    ("opo", {}),
    ("gpg", {}),
    ("reinforce_plus_plus_baseline", {}),
]
GAMMA_AND_LAMBDA = [(1.0, 1.0), (1.0, 0.95), (1.0, 0.0), (0.99, 0.95), (0.9, 0.5)]

# Aggregations

AGGREGATIONS: list[dict[str, Any]] = [
    {"loss_agg_mode": "token-mean"},
    {"loss_agg_mode": "token-sum"},
    {"loss_agg_mode": "seq-mean-token-mean"},
    {"loss_agg_mode": "seq-mean-token-sum"},
    {"loss_agg_mode": "seq-mean-token-sum-norm"},
    {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 20},
]
OF_A_LARGER_BATCH = {"dp_size": 2, "batch_num_tokens": 100, "global_batch_size": 30}

# Policy losses

SYMMETRIC = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
ASYMMETRIC = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
NO_DUAL_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9}
LOW_DUAL_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}
GSPO = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
WIDE_GSPO = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
CISPO = {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}
GEOMETRIC = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
ROLLOUT_MEAN = {"loss_agg_mode": "seq-mean-token-mean"}

TOKEN_TIS = {"rollout_is": "token", "rollout_is_threshold": 1.2}
SEQUENCE_TIS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.8_1.25"}
SEQUENCE_REJECTION = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
GEOMETRIC_REJECTION = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"}

# What verl's default trainer hands to a loss when tokens of `plain` were rejected: the counts from before.
COUNTED_BEFORE_REJECTION = {"dp_size": 1, "batch_num_tokens": 48, "global_batch_size": 12}

EVERYWHERE = ("plain", "masked", "extreme")
WORKED_CLIP = ("worked_clip_positive", "worked_clip_negative")

# Of the settings, `advantage` is the input field that is handed over (else `advantage`), `weights` and `rejection` are
# what verl's correction functions were called with to make the weights and the mask that the loss is given.
POLICY_LOSSES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("vanilla", ("plain", *WORKED_CLIP), SYMMETRIC),
    ("vanilla", (*EVERYWHERE, *WORKED_CLIP), NO_DUAL_CLIP),
    ("vanilla", ("plain", "extreme", *WORKED_CLIP), ASYMMETRIC),
    ("vanilla", ("plain",), LOW_DUAL_CLIP),
    ("vanilla", ("plain", "masked"), {**ASYMMETRIC, "advantage": "token_advantage"}),
    *(("vanilla", ("plain", "masked"), {**NO_DUAL_CLIP, **aggregation}) for aggregation in AGGREGATIONS[1:]),
    ("vanilla", ("masked",), {**NO_DUAL_CLIP, **OF_A_LARGER_BATCH}),
    ("vanilla", ("masked",), {**NO_DUAL_CLIP, **ROLLOUT_MEAN, **OF_A_LARGER_BATCH}),
    ("vanilla", ("plain", "masked", "worked_three_policies"), {**NO_DUAL_CLIP, "weights": TOKEN_TIS}),
    ("vanilla", ("plain",), {**NO_DUAL_CLIP, "weights": SEQUENCE_TIS}),
    ("vanilla", ("plain",), {**NO_DUAL_CLIP, **ROLLOUT_MEAN, "weights": ICEPOP}),
    ("vanilla", ("plain", "masked"), {**NO_DUAL_CLIP, "rejection": SEQUENCE_REJECTION}),
    ("vanilla", ("plain", "masked"), {**NO_DUAL_CLIP, **ROLLOUT_MEAN, "rejection": GEOMETRIC_REJECTION}),
    ("vanilla", ("plain",), {**NO_DUAL_CLIP, "rejection": SEQUENCE_REJECTION, **COUNTED_BEFORE_REJECTION}),
    (
        "vanilla",
        ("plain",),
        {**NO_DUAL_CLIP, **ROLLOUT_MEAN, "rejection": GEOMETRIC_REJECTION, **COUNTED_BEFORE_REJECTION},
    ),
    ("vanilla", ("plain",), {**NO_DUAL_CLIP, "weights": TOKEN_TIS, "rejection": GEOMETRIC_REJECTION}),
    ("gspo", ("plain", "masked", "worked_gspo"), {**GSPO, **ROLLOUT_MEAN}),
    ("gspo", EVERYWHERE, {**WIDE_GSPO, **ROLLOUT_MEAN}),
    ("gspo", ("plain",), WIDE_GSPO),
    ("cispo", (*EVERYWHERE, *WORKED_CLIP), CISPO),
    ("cispo", ("plain",), {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
    ("cispo", ("plain",), {**CISPO, "weights": TOKEN_TIS}),
    ("sapo", EVERYWHERE, {"tau_pos": 1.0, "tau_neg": 1.05}),
    ("sapo", ("plain",), {"tau_pos": 1.0, "tau_neg": 2.0}),
    ("gpg", ("plain", "masked"), {}),
    ("gpg", ("plain",), {"weights": SEQUENCE_TIS}),
    ("geo_mean", EVERYWHERE, GEOMETRIC),
    ("geo_mean", ("plain",), {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}),
    ("geo_mean", ("plain",), {**GEOMETRIC, "weights": TOKEN_TIS}),
    # A clip_cov_ratio of 1 takes every candidate; below it verl draws at random among them.
    ("clip_cov", ("plain", "masked"), {**ASYMMETRIC, "policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2}}),
    ("kl_cov", ("plain", "masked"), {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}}),
    ("dro", EVERYWHERE, {"policy_loss": {"dro_beta": 0.5}}),
    ("dppo_tv", EVERYWHERE, {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0}),
    ("dppo_kl", EVERYWHERE, {"clip_ratio_low": 0.01, "clip_ratio_high": 0.01, "clip_ratio_c": 20.0}),
]

BYPASSES: list[dict[str, Any]] = [
    {"loss_type": "ppo_clip", "rollout_is": None},
    {"loss_type": "ppo_clip", **GEOMETRIC_REJECTION, "rollout_is": None},
    {"loss_type": "reinforce", **TOKEN_TIS},
    {"loss_type": "reinforce", **SEQUENCE_TIS},
    {"loss_type": "reinforce", **TOKEN_TIS, **GEOMETRIC_REJECTION},
]

# Corrections of the mismatch between trainer and engine

WEIGHTS: list[dict[str, Any]] = [
    {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalise}
    for level, threshold, normalise in [
        ("token", 2.0, False),
        ("token", 1.2, False),
        ("token", 5.0, False),
        ("token", 1.2, True),
        ("token", "0.5_5.0", False),
        ("token", "0.5_2.0", False),
        ("token", "0.8_1.2", True),
        ("sequence", 2.0, False),
        ("sequence", 1.1, False),
        ("sequence", 1.1, True),
        ("sequence", "0.5_2.0", False),
        ("sequence", "0.5_2.0", True),
    ]
]
WEIGHTS_PER_TOKEN = [settings for settings in WEIGHTS if settings["rollout_is"] == "token"]
REJECTIONS: list[dict[str, Any]] = [
    {"rollout_rs": option, "rollout_rs_threshold": threshold}
    for option, threshold in [
        ("token_k1", "0.5_2.0"),
        ("token_k1", "0.8_2.0"),
        ("token_k1", 1.2),
        ("token_k2", 0.02),
        ("token_k3", 0.02),
        ("seq_sum_k1", "0.5_2.0"),
        ("seq_sum_k1", "0.5_4.0"),
        ("seq_sum_k2", 0.1),
        ("seq_sum_k3", 0.1),
        ("seq_mean_k1", "0.999_1.001"),
        ("seq_mean_k1", "0.9_1.1"),
        ("seq_mean_k1", "0.99_1.5"),
        ("seq_mean_k2", 0.01),
        ("seq_mean_k3", 0.001),
        ("seq_mean_k3", 0.01),
        ("seq_max_k2", 0.05),
        ("seq_max_k3", 0.05),
        ("token_k1,seq_mean_k3", "0.8_1.25,0.02"),
    ]
]
MISMATCHED = ("plain", "masked", "extreme", "worked_weights")
