"""Every named objective as a line of parts, with its source and its authors' values.

Free of torch, so configuration can check it. `compose.py` turns a description into functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any

from headway.objectives.corrections import YAO, corrected
from headway.objectives.overrides import OVERRIDES
from headway.objectives.parts import (
    MISMATCH,
    STALENESS,
    WHOLE,
    Act,
    Advantage,
    Clamped,
    Clipped,
    ClippedValue,
    KLEstimator,
    Loss,
    Objective,
    Overlong,
    Preference,
    Ratio,
    ReductionName,
    ReferenceKL,
    ScoreFunction,
    SquaredLogRatio,
    Term,
    Weight,
    check_name,
)


def _whole_token(
    name: str, act: Act, source: str, *, ratio: Ratio = WHOLE, low: float = 0.0, high: float = inf
) -> Weight:
    return Weight(name=name, ratio=ratio, act=act, low=low, high=high, source=source)


def _policy(loss: Loss, reduction: ReductionName, *weights: Weight) -> Term:
    return Term(loss=loss, weights=weights, reduction=reduction)


def _kl(estimator: KLEstimator, coefficient: float, reduction: ReductionName) -> Term:
    return Term(loss=ReferenceKL(estimator=estimator), coefficient=coefficient, reduction=reduction)


_GRPO_ADVANTAGE = Advantage(name="group_mean_std")
_CENTRED = Advantage(name="group_mean")
_NO_REFILL = "zero-variance groups leave the batch; it is not refilled with other prompts (dynamic sampling)"

PRESETS: dict[str, Objective] = {
    preset.name: preset
    for preset in (
        Objective(
            name="reinforce",
            source="Williams 1992, REINFORCE, with the batch's mean reward as its baseline",
            advantage=Advantage(name="batch_mean"),
            terms=(_policy(ScoreFunction(), "rollout_mean_token_sum"),),
        ),
        Objective(
            name="rloo",
            source="Ahmadian et al. 2024, Back to Basics, arXiv 2402.14740; Kool et al. 2019",
            advantage=Advantage(name="leave_one_out"),
            terms=(_policy(ScoreFunction(), "rollout_mean_token_sum"),),
            reward_kl=0.03,
            notes=("the answer is one action; reward_kl is that of their summarisation runs",),
        ),
        Objective(
            name="reinforce_pp",
            source="Hu et al. 2025, REINFORCE++, arXiv 2501.03262, section 3",
            advantage=Advantage(name="reward", whiten=True),
            terms=(_policy(Clipped(), "token_mean"),),
            reward_kl=0.01,
            notes=("reward_kl is OpenRLHF's default",),
        ),
        Objective(
            name="reinforce_pp_baseline",
            source="Hu et al. 2025, REINFORCE++-baseline, arXiv 2501.03262, section 3",
            advantage=Advantage(name="group_mean", whiten=True),
            terms=(_policy(Clipped(), "token_mean"), _kl("k2", 0.001, "token_mean")),
            notes=("the coefficient of the KL term is Headway's choice",),
        ),
        Objective(
            name="grpo",
            source="Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, section 4.1",
            advantage=_GRPO_ADVANTAGE,
            terms=(
                _policy(Clipped(), "rollout_mean_token_mean"),
                _kl("k3", 0.04, "rollout_mean_token_mean"),
            ),
            notes=("the paper leaves the ddof of the std open; 1 is what its followers use",),
        ),
        Objective(
            name="dr_grpo",
            source="Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2",
            advantage=_CENTRED,
            terms=(_policy(Clipped(), "constant"),),
        ),
        Objective(
            name="dapo",
            source="Yu et al. 2025, DAPO, arXiv 2503.14476, section 3",
            advantage=_GRPO_ADVANTAGE,
            terms=(_policy(Clipped(clip_high=0.28), "token_mean"),),
            overlong=Overlong(),
            filters=("zero_variance",),
            notes=(_NO_REFILL,),
        ),
        Objective(
            name="gspo",
            source="Zheng et al. 2025, GSPO, arXiv 2507.18071, section 4.1",
            advantage=_GRPO_ADVANTAGE,
            terms=(
                _policy(
                    Clipped(ratio=replace(STALENESS, level="geometric"), clip_low=3e-4, clip_high=4e-4),
                    "rollout_mean_token_mean",
                ),
            ),
        ),
        Objective(
            name="gspo_token",
            source="Zheng et al. 2025, GSPO, arXiv 2507.18071, section 4.3",
            advantage=_GRPO_ADVANTAGE,
            terms=(
                _policy(
                    Clipped(ratio=replace(STALENESS, level="geometric_token"), clip_low=3e-4, clip_high=4e-4),
                    "rollout_mean_token_mean",
                ),
            ),
        ),
        Objective(
            name="cispo",
            source="MiniMax-M1, arXiv 2506.13585, section 3.1",
            advantage=_GRPO_ADVANTAGE,
            terms=(
                _policy(
                    ScoreFunction(),
                    "token_mean",
                    _whole_token("cispo", "truncate", "MiniMax-M1", ratio=STALENESS, high=5.0),
                ),
            ),
            notes=("the paper tunes the upper bound and gives no number; 5 is ScaleRL's",),
        ),
        Objective(
            name="ppo",
            source="Schulman et al. 2017, PPO, arXiv 1707.06347; GAE, arXiv 1506.02438",
            advantage=Advantage(name="gae", gamma=1.0, lam=0.95, whiten=True),
            terms=(
                _policy(Clipped(), "token_mean"),
                Term(loss=ClippedValue(), reduction="token_mean"),
            ),
            notes=(
                "gamma 1 is the practice for language models; the value loss has an optimizer of its own",
                "means are over tokens, the time steps of the paper's minibatches",
            ),
        ),
        Objective(
            name="decoupled_ppo",
            source="AReaL, arXiv 2505.24298, section 5.2; Hilton et al. 2021, Batch size-invariance",
            advantage=Advantage(name="reward", whiten=True),
            terms=(
                _policy(Clipped(), "token_mean", _whole_token("is", "truncate", "AReaL: pi_prox / mu", ratio=MISMATCH)),
            ),
            notes=("no critic and gamma = lam = 1, as in their experiments: the advantage is the whitened reward",),
        ),
        Objective(
            name="olmo3",
            source="Olmo 3, arXiv 2512.13961, equation 1; values of open-instruct",
            advantage=_CENTRED,
            terms=(
                _policy(
                    Clipped(clip_high=0.272),
                    "token_mean",
                    _whole_token("tis", "truncate", YAO, ratio=MISMATCH, high=2.0),
                ),
            ),
            filters=("zero_variance",),
            notes=(_NO_REFILL,),
        ),
        Objective(
            name="minirl",
            source="Zheng et al. 2025, Stabilizing RL with LLMs, arXiv 2512.01374",
            advantage=_CENTRED,
            terms=(
                _policy(
                    ScoreFunction(),
                    "rollout_mean_token_sum",
                    _whole_token("staleness", "truncate", "MiniRL", ratio=STALENESS),
                    _whole_token("tis", "truncate", "MiniRL: the mismatch, at most 5", ratio=MISMATCH, high=5.0),
                    _whole_token("clip", "clip_mask", "MiniRL", ratio=STALENESS, low=0.8, high=1.27),
                ),
            ),
            notes=("no division by lengths",),
        ),
        Objective(
            name="icepop",
            source="Ring-1T, arXiv 2510.18855",
            advantage=_GRPO_ADVANTAGE,
            terms=(
                _policy(
                    Clipped(),
                    "rollout_mean_token_mean",
                    _whole_token("icepop", "mask", "Ring-1T", ratio=MISMATCH, low=0.5, high=5.0),
                ),
            ),
        ),
        Objective(
            name="glm5_async",
            source="GLM-5, arXiv 2602.15763, agentic reinforcement learning",
            advantage=_GRPO_ADVANTAGE,
            terms=(
                _policy(
                    ScoreFunction(),
                    "rollout_mean_token_mean",
                    _whole_token("double_sided", "mask", "GLM-5", low=0.8, high=1.28),
                ),
            ),
            notes=(
                "the bounds are those of GLM-5's reasoning runs; here they count as inside",
                "samples that are too old are not dropped, and the optimizer is not reset",
            ),
        ),
        Objective(
            name="kimi_k25",
            source="Kimi K2.5, arXiv 2602.02276",
            advantage=_CENTRED,
            terms=(
                _policy(Clamped(ratio=WHOLE, clip_low=0.2, clip_high=0.28), "token_mean"),
                Term(loss=SquaredLogRatio(ratio=WHOLE), coefficient=0.01, reduction="token_mean"),
            ),
            notes=("the paper gives neither bounds nor tau: 0.8, 1.28 and 0.01 are Headway's choice",),
        ),
        Objective(
            name="scalerl",
            source="Khatri et al. 2025, ScaleRL, arXiv 2510.13786",
            advantage=Advantage(name="group_mean_batch_std"),
            terms=(
                _policy(
                    ScoreFunction(),
                    "prompt_mean",
                    _whole_token("cispo", "truncate", "ScaleRL: 1 + eps_high = 5", high=5.0),
                ),
            ),
            filters=("zero_variance",),
            retire_above=0.9,
            notes=(
                "its run-ahead of 8 with in-flight updates, and forced interruptions, belong to the schedule",
                "the std is over all scored rollouts, those of groups without variance among them",
            ),
        ),
        Objective(
            name="online_dpo",
            source="Guo et al. 2024, arXiv 2402.04792; Noukhovitch et al. 2024, arXiv 2410.18252",
            advantage=Advantage(name="preference"),
            terms=(_policy(Preference(), "pair_mean"),),
            notes=("best against worst of a group; no ratio to the sampling policy, so stale data bias nothing",),
        ),
    )
}
"""Every named objective."""


def objective(name: str, /, *, corrections: Iterable[str] = (), **overrides: Any) -> Objective:
    """A preset by name, with corrections put on its policy terms and some of its values replaced.

    corrections: names in `CORRECTIONS`, with bounds of your own after colons. overrides: see `OVERRIDES`; None keeps
    the preset's value. Raises ValueError, naming the nearest valid choice, for an unknown name or key, an unfit value,
    or a key that nothing in this objective answers to.

    >>> objective("grpo", corrections=["tis:5"], clip_high=0.28, kl_coefficient=0).terms[0].weights[0].formula
    'min(pi_prox/mu, 5)'
    """
    check_name("objective", name, PRESETS)
    chosen = PRESETS[name]
    for key in overrides:
        check_name("setting of an objective", key, OVERRIDES)
    for key, change in OVERRIDES.items():
        if overrides.get(key) is not None:
            chosen = change(chosen, overrides[key])
    for written in corrections:
        chosen = corrected(chosen, written)
    return chosen
