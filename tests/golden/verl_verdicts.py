"""Which recorded cases of verl agree with Headway, which differ and why, and which have no counterpart in Headway.

Every case falls under exactly one verdict; `test_verl_values.py` holds that, and that each verdict is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch

from tests.golden.verl import Case, Outputs
from tests.golden.verl_headway import HEADWAY, Conventions

TOLERANCE = 1e-8
TOLERANCE_FLOAT32 = 1e-6
"""Relative to the largest number of an output; the second where one of the two computes in float32 whatever it gets."""


@dataclass(frozen=True)
class Reason:
    """Why values differ: in a few words, in a sentence, and what has to be done otherwise in Headway to get verl's."""

    short: str
    words: str
    conventions: Mapping[str, Any]


REASONS: dict[str, Reason] = {
    "lone": Reason(
        "group of one",
        "A rollout without another to compare it with: verl takes 0 for the mean of its group and trains on the bare "
        "reward (`rloo_vectorized` does not); Headway gives it the advantage 0, leaves it out of whitening and counts "
        "it as `lone`.",
        {"lone_keeps_reward": True},
    ),
    "root": Reason(
        "eps in the root",
        "Whitening divides by `sqrt(variance + 1e-8)` in verl, whose means are over a count + 1e-8; by `std + 1e-8` in "
        "Headway. Seen where the standard deviation is small (0.1 here); elsewhere both are the same to 1e-8.",
        {"whitens_by_root": True},
    ),
    "masked_kl": Reason(
        "KL of masked tokens",
        "`compute_rewards` takes the KL off masked tokens too, and puts the reward of a rollout that has no other on "
        "its last one; in Headway a token that the model did not write earns and pays nothing.",
        {"masked_kl": True},
    ),
    "sum": Reason(
        "no sum",
        "Headway has no plain sum over tokens, whose size is the batch's: `token-sum` is its `token_mean` times the "
        "number of tokens.",
        {"sums": True},
    ),
    "count": Reason(
        "eps on a count",
        "verl adds 1e-8 to a rollout's number of tokens. That is 1e-8 of the loss of a rollout of one token, more of a "
        "sum that nearly cancels, and below 1e-8 everywhere else.",
        {"count_epsilon": 1e-8},
    ),
    "denominators": Reason(
        "rejected tokens leave the denominators",
        "verl takes what a correction rejects out of the mask, so that the mean is over the rest and each kept token "
        "counts more; in Headway a rejected token has weight 0 and stays counted. Where verl is handed the counts from "
        "before the rejection (`batch_num_tokens`, `global_batch_size`), both are equal.",
        {"rejected_leave_denominators": True},
    ),
    "bounds": Reason(
        "bounds of 1/w",
        "The k1 statistic is `-log w`, so verl's `low_high` keeps `low <= 1/w <= high`; Headway's bounds are of w. "
        "Equal with `1/high, 1/low`. Both are the same for bounds like 0.5 and 2.",
        {"inverse_bounds": True},
    ),
    "clamp": Reason(
        "no clamp",
        "Headway clamps every log-ratio to ±20 before anything is made of it, and there its gradient ends; in this "
        "function verl does not. Equal without the clamp.",
        {"max_log_ratio": inf},
    ),
    "clamp_10": Reason(
        "clamp at 10",
        "verl clamps the log of GSPO's ratio at +10 (and not below), Headway at ±20. Equal with a clamp at ±10.",
        {"max_log_ratio": 10.0},
    ),
    "k3_limit": Reason(
        "k3 cut at 10",
        "verl cuts the k3 estimate at 10, which it reaches where log ref/pi is 2.61 or -11; its gradient is 0 beyond.",
        {"k3_limit": 10.0},
    ),
    "empty": Reason(
        "empty rollouts count",
        "A rollout without a trained token is a rollout in verl's mean for `chi2_seq`, and none in Headway's.",
        {"empty_rollouts_count": True},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """names, inputs: separated by spaces, none for any; where: setting -> its values; differs: keys of `REASONS`.

    only_there: what it is that Headway has no counterpart of; then there are no differences.
    """

    kind: str
    names: str = ""
    inputs: str = ""
    where: Mapping[str, tuple] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    only_there: str = ""
    note: str = ""

    def covers(self, case: Case) -> bool:
        return (
            self.kind == case["kind"]
            and (not self.names or case["name"] in self.names.split())
            and (not self.inputs or case.get("inputs") in self.inputs.split())
            and all(setting(case, key) in values for key, values in self.where.items())
        )

    @property
    def conventions(self) -> Conventions:
        """Under which Headway gives what verl does."""
        changes: dict[str, Any] = {}
        for reason in self.differs:
            changes |= REASONS[reason].conventions
        return replace(HEADWAY, **changes)


def setting(case: Case, key: str) -> Any:
    """A setting, "" where it is not given; `a.b` is b of a."""
    value: Any = case["settings"]
    for part in key.split("."):
        value = value.get(part, "") if isinstance(value, dict) else ""
    return value


SAME_KEPT = "bounds of w and of 1/w keep the same here"

NO_COUNTERPART = (
    Verdict(kind="advantage", names="opo", only_there="a baseline weighted by lengths (OPO)"),
    Verdict(
        kind="advantage", names="gpg", only_there="group means scaled by the share of rewards that are not 0 (GPG)"
    ),
    Verdict(kind="advantage", names="remax", only_there="the reward of a greedy answer as baseline (ReMax)"),
    Verdict(kind="advantage", names="gdpo", only_there="several rewards, each normalised in its group (GDPO)"),
    Verdict(kind="advantage", names="grpo_passk", only_there="best minus second best of a group (pass@k)"),
    Verdict(
        kind="advantage",
        names="optimal_token_baseline tir_optimal_token_baseline",
        only_there="a baseline per position, from the variance so far",
    ),
    Verdict(kind="statistics", names="variance", only_there="a helper; whitening has its own, ddof 1 in both"),
    Verdict(kind="statistics", names="whiten", where={"shift_mean": (False,)}, only_there="scaling without centring"),
    Verdict(kind="policy_loss", names="sapo", only_there="a soft gate in place of the clip (SAPO)"),
    Verdict(kind="policy_loss", names="geo_mean", only_there="a geometric mean of clipped ratios (GMPO)"),
    Verdict(kind="policy_loss", names="clip_cov kl_cov", only_there="clip or KL on tokens of the largest covariance"),
    Verdict(kind="policy_loss", names="dppo_tv dppo_kl", only_there="a mask by how far probabilities moved (DPPO)"),
    Verdict(kind="kl", names="abs abs+", only_there="the absolute log-ratio"),
    Verdict(kind="kl", names="k1+", only_there="the value of k1 with the gradient of k2; Headway has k3's with k2's"),
    Verdict(
        kind="rejection",
        names="token_k3 seq_sum_k2 seq_sum_k3 seq_mean_k2 seq_max_k2 seq_max_k3",
        only_there="other statistics to reject by; Headway has w and its product or geometric mean, and the mean of k3",
    ),
)

ADVANTAGES = (
    Verdict(kind="reward", inputs="plain"),
    Verdict(kind="reward", inputs="masked", differs=("masked_kl",)),
    Verdict(
        kind="advantage",
        names="grpo grpo_vectorized rloo reinforce_plus_plus_baseline",
        inputs="plain worked_rewards",
    ),
    Verdict(
        kind="advantage",
        names="grpo grpo_vectorized rloo reinforce_plus_plus_baseline",
        inputs="masked",
        differs=("lone",),
    ),
    Verdict(kind="advantage", names="rloo_vectorized"),
    Verdict(kind="advantage", names="gae", inputs="plain masked"),
    Verdict(kind="advantage", names="gae", inputs="worked_gae", differs=("root",)),
    Verdict(kind="advantage", names="reinforce_plus_plus"),
    Verdict(kind="statistics", names="whiten", where={"shift_mean": (True,)}),
    Verdict(kind="statistics", names="mean entropy"),
)

AGGREGATIONS = (
    Verdict(kind="aggregation", names="token-mean seq-mean-token-sum"),
    Verdict(kind="aggregation", names="seq-mean-token-sum-norm", where={"loss_scale_factor": (20,)}),
    Verdict(
        kind="aggregation",
        names="seq-mean-token-sum-norm",
        where={"loss_scale_factor": ("",)},
        note="verl's default length is the padded width",
    ),
    Verdict(kind="aggregation", names="token-sum", differs=("sum",)),
    Verdict(kind="aggregation", names="seq-mean-token-mean", inputs="masked worked_aggregation"),
    Verdict(kind="aggregation", names="seq-mean-token-mean", inputs="plain", differs=("count",)),
)

NOT_REJECTED = {"rejection": ("",), "loss_agg_mode": ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")}
MEAN_OF_MEANS = {"rejection": ("",), "loss_agg_mode": ("seq-mean-token-mean",)}
BY_PRODUCT, BY_MEAN = ("seq_sum_k1",), ("seq_mean_k1",)
IN_BYPASS = "policy_loss.rollout_correction.rollout_rs"

LOSSES = (
    Verdict(kind="policy_loss", names="vanilla", where=NOT_REJECTED),
    Verdict(kind="policy_loss", names="vanilla", where={**MEAN_OF_MEANS, "weights": ("",)}),
    Verdict(
        kind="policy_loss",
        names="vanilla",
        where={**MEAN_OF_MEANS, "weights.rollout_is": ("token",)},
        differs=("count",),
    ),
    Verdict(
        kind="policy_loss",
        names="vanilla",
        where={"rejection": ("",), "loss_agg_mode": ("token-sum",)},
        differs=("sum",),
    ),
    Verdict(
        kind="policy_loss",
        names="vanilla",
        where={"rejection.rollout_rs": BY_PRODUCT, "batch_num_tokens": ("",)},
        differs=("denominators",),
    ),
    Verdict(kind="policy_loss", names="vanilla", where={"rejection.rollout_rs": BY_PRODUCT, "batch_num_tokens": (48,)}),
    Verdict(
        kind="policy_loss",
        names="vanilla",
        inputs="masked",
        where={"rejection.rollout_rs": BY_MEAN},
        differs=("denominators",),
        note=SAME_KEPT,
    ),
    Verdict(
        kind="policy_loss",
        names="vanilla",
        inputs="plain",
        where={"rejection.rollout_rs": BY_MEAN, "batch_num_tokens": ("",)},
        differs=("denominators", "bounds"),
    ),
    Verdict(
        kind="policy_loss",
        names="vanilla",
        where={"rejection.rollout_rs": BY_MEAN, "batch_num_tokens": (48,)},
        differs=("bounds",),
    ),
    Verdict(kind="policy_loss", names="gspo", inputs="plain masked worked_gspo"),
    Verdict(kind="policy_loss", names="gspo", inputs="extreme", differs=("clamp_10",)),
    Verdict(kind="policy_loss", names="cispo gpg"),
    Verdict(kind="policy_loss", names="dro", inputs="plain masked", note="no preset: two parts of Headway"),
    Verdict(kind="policy_loss", names="dro", inputs="extreme", differs=("clamp",)),
    Verdict(kind="policy_loss", names="bypass_mode", where={IN_BYPASS: ("",)}),
    Verdict(
        kind="policy_loss",
        names="bypass_mode",
        where={IN_BYPASS: BY_MEAN},
        differs=("denominators",),
        note=SAME_KEPT,
    ),
    Verdict(kind="value_loss"),
)

KL = (
    Verdict(kind="kl", names="k1 k2 k3 k3+", inputs="plain worked_kl"),
    Verdict(kind="kl", names="k1 k2", inputs="extreme", differs=("clamp",)),
    Verdict(kind="kl", names="k3", inputs="extreme", differs=("k3_limit",)),
    Verdict(kind="kl", names="k3+", inputs="extreme", differs=("k3_limit", "clamp")),
)

CORRECTIONS = (
    Verdict(kind="weights"),
    Verdict(kind="rejection", names="token_k1", where={"rollout_rs_threshold": ("0.5_2.0", 1.2)}),
    Verdict(kind="rejection", names="token_k2", note="as bounds of w: exp(±sqrt(2 * threshold))"),
    Verdict(kind="rejection", names="seq_mean_k3 token_k1,seq_mean_k3"),
    Verdict(kind="rejection", names="seq_sum_k1", where={"rollout_rs_threshold": ("0.5_2.0",)}),
    Verdict(kind="rejection", names="seq_mean_k1", where={"rollout_rs_threshold": ("0.999_1.001",)}, note=SAME_KEPT),
    Verdict(
        kind="rejection",
        names="token_k1",
        inputs="plain masked worked_weights",
        where={"rollout_rs_threshold": ("0.8_2.0",)},
        differs=("bounds",),
    ),
    Verdict(
        kind="rejection",
        names="token_k1",
        inputs="extreme",
        where={"rollout_rs_threshold": ("0.8_2.0",)},
        note=SAME_KEPT,
    ),
    Verdict(
        kind="rejection",
        names="seq_sum_k1",
        inputs="plain masked",
        where={"rollout_rs_threshold": ("0.5_4.0",)},
        differs=("bounds",),
    ),
    Verdict(
        kind="rejection",
        names="seq_sum_k1",
        inputs="extreme worked_weights",
        where={"rollout_rs_threshold": ("0.5_4.0",)},
        note=SAME_KEPT,
    ),
    Verdict(
        kind="rejection",
        names="seq_mean_k1",
        inputs="plain",
        where={"rollout_rs_threshold": ("0.9_1.1",)},
        differs=("bounds",),
    ),
    Verdict(
        kind="rejection",
        names="seq_mean_k1",
        inputs="masked extreme worked_weights",
        where={"rollout_rs_threshold": ("0.9_1.1",)},
        note=SAME_KEPT,
    ),
    Verdict(
        kind="rejection",
        names="seq_mean_k1",
        where={"rollout_rs_threshold": ("0.99_1.5",)},
        differs=("bounds",),
    ),
    Verdict(kind="diagnostics", inputs="plain worked_weights"),
    Verdict(kind="diagnostics", inputs="masked", differs=("empty",)),
    Verdict(kind="diagnostics", inputs="extreme", differs=("clamp",)),
)

VERDICTS = (*ADVANTAGES, *AGGREGATIONS, *LOSSES, *KL, *CORRECTIONS, *NO_COUNTERPART)


def verdicts_of(case: Case) -> list[Verdict]:
    """All that cover it: one, if the table is right."""
    return [verdict for verdict in VERDICTS if verdict.covers(case)]


def disagreements(case: Case, ours: Outputs, theirs: Outputs) -> list[str]:
    """Outputs that are not equal: all of verl's, but of its metrics those that Headway has."""
    float32 = case.get("float32") or case["name"] == "entropy"
    tolerance = TOLERANCE_FLOAT32 if float32 else TOLERANCE
    names = [name for name in theirs if name in ours or not name.startswith("metrics/")]
    return [name for name in names if not _equal(ours[name], theirs[name], tolerance)]


def _equal(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(ours, theirs, rtol=0.0, atol=tolerance * float(theirs.abs().max()))
