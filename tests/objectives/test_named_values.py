"""Values worked by hand, through the loss of named objectives: the test vectors, B05, B06 and B07.

Axis: N tokens. A token is given by w = pi_prox / mu and rho = pi / pi_prox; mu is 1, so that log w and log rho are all.
Reductions are a weight of 1 on every token unless said, so that the slope in log pi is the token's own.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.objectives import compose
from headway.objectives.compose import TokenAux
from headway.objectives.diagnostics import MismatchDiagnostics
from headway.objectives.named import objective
from headway.objectives.parts import Clipped, Objective
from headway.objectives.tokens import Tokens
from tests.objectives.batches import SUBJECTS

INF, NAN = torch.inf, torch.nan
W = [0.3, 0.5, 0.9, 1, 1.5, 2, 3, 6]
RHO = [0.6, 0.79, 0.81, 1, 1.2, 1.27, 1.29, 1.6]
ONES = [1.0] * 8


def floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens_at(description: Objective, behaviour_N: Tensor, proximal_N: Tensor, advantage_N: Tensor) -> Tokens:
    """Tokens of one rollout, all trained, each with the weight 1; the reference is the proximal policy."""
    zero_N = torch.zeros(len(behaviour_N), dtype=torch.long)
    return Tokens(
        mask_N=torch.ones(len(behaviour_N), dtype=torch.bool),
        rollout_N=zero_N,
        group_N=zero_N,
        behaviour_N=behaviour_N,
        lag_N=zero_N,
        advantage_N=advantage_N,
        weights=tuple(torch.ones_like(behaviour_N) for _ in description.terms),
        proximal_N=proximal_N,
        reference_N=proximal_N,
    )


def at_ratios(
    description: Objective, w: list[float], rho: list[float], advantage: float
) -> tuple[list[float], list[float], TokenAux]:
    """The objective (minus the loss) of each token, its slope in the token's log pi, and what was done."""
    proximal_N = floats(w).log()
    logp_N = (proximal_N + floats(rho).log()).requires_grad_()
    tokens = tokens_at(description, torch.zeros_like(proximal_N), proximal_N, torch.full_like(proximal_N, advantage))
    loss, aux = compose.loss(description, logp_N, tokens)
    (slope_N,) = torch.autograd.grad(loss, logp_N)
    return (-aux.loss_N).tolist(), (-slope_N).tolist(), aux


# ---- weights


@pytest.mark.parametrize(
    ("written", "weights"),
    [
        ("is", W),
        ("tis", [0.3, 0.5, 0.9, 1, 1.5, 2, 2, 2]),
        ("mis", [0.3, 0.5, 0.9, 1, 1.5, 2, 0, 0]),
        ("icepop", [0, 0.5, 0.9, 1, 1.5, 2, 3, 0]),
        ("icepop_glm5", [0, 0.5, 0.9, 1, 1.5, 2, 0, 0]),
        ("clamped_is", [0.5, 0.5, 0.9, 1, 1.5, 2, 3, 5]),
        ("tis:1.5", [0.3, 0.5, 0.9, 1, 1.5, 1.5, 1.5, 1.5]),
        ("icepop:0.4:4", [0, 0.5, 0.9, 1, 1.5, 2, 3, 0]),
    ],
)
@pytest.mark.parametrize("name", ["dr_grpo", "reinforce"])
def test_golden_vector_of_token_weights(name, written, weights):
    """At rho = 1 both the clipped loss and the score function have the slope weight * A."""
    description = objective(name, corrections=[written])
    bounds = [(low, high) for low, high in [(weight.low, weight.high) for weight in description.terms[0].weights]]
    _, slopes, aux = at_ratios(description, W, ONES, advantage=1.0)
    assert aux.importance_N.tolist() == pytest.approx(weights, abs=1e-12)
    assert slopes == pytest.approx(weights, abs=1e-12)
    assert aux.ratio_N.tolist() == pytest.approx(W)
    (acted,) = aux.acted.values() if name == "reinforce" else [aux.acted[written.split(":")[0]]]
    assert acted.tolist() == [not low <= w <= high for (low, high) in bounds for w in W]


def test_golden_vector_of_cispo():
    """Clipped to (0, 5]; the weight is cut, the gradient of log pi stays: 5 at 6, not 0."""
    weights = [0.3, 0.5, 0.9, 1, 1.5, 2, 3, 5]
    _, slopes, aux = at_ratios(objective("cispo"), ONES, W, advantage=1.0)
    assert slopes == pytest.approx(weights)
    assert aux.acted["cispo"].tolist() == [False] * 7 + [True]
    _, slopes, _ = at_ratios(objective("cispo"), ONES, W, advantage=-0.5)
    assert slopes == pytest.approx([-0.5 * weight for weight in weights])


def test_golden_vector_of_cispo_in_scalerl_is_of_the_whole_ratio():
    """w rho = pi / mu: 2 rho here."""
    _, slopes, _ = at_ratios(objective("scalerl"), [2.0] * 8, [w / 2 for w in W], advantage=1.0)
    assert slopes == pytest.approx([0.3, 0.5, 0.9, 1, 1.5, 2, 3, 5])


def test_golden_vector_of_geometric_rejection():
    """Four tokens, log w 0.02, -0.01, 0.03, -0.02: the mean is 0.005, e^0.005 = 1.00501 is above 1.001."""
    w = [math.exp(log_w) for log_w in (0.02, -0.01, 0.03, -0.02)]
    for written, kept in (("geometric_rejection", 0.0), ("geometric_rejection:0.999:1.006", 1.0)):
        _, _, aux = at_ratios(objective("dr_grpo", corrections=[written]), w, [1.0] * 4, advantage=1.0)
        assert aux.importance_N.tolist() == [kept] * 4
        assert aux.acted["geometric_rejection"].tolist() == [not kept] * 4


def test_geometric_rejection_with_token_weights():
    """What is kept has its own w, without a bound: 9 and 1/9, whose geometric mean is 1."""
    description = objective("dr_grpo", corrections=["geometric_rejection_is"])
    _, slopes, aux = at_ratios(description, [9.0, 1 / 9], [1.0, 1.0], advantage=1.0)
    assert slopes == pytest.approx([9, 1 / 9])
    assert not aux.acted["is"].any()


@pytest.mark.parametrize(
    ("written", "w", "weights"),
    [
        ("sequence_is", [2.0, 3.0], [6.0, 6.0]),
        ("sequence_tis", [2.0, 3.0], [2.0, 2.0]),
        ("sequence_tis", [2.0, 0.25], [0.5, 0.5]),
        ("sequence_mis", [2.0, 3.0], [0.0, 0.0]),
        ("sequence_mis", [2.0, 0.75], [1.5, 1.5]),
        # w - 1 - log w of 1.1 is 0.00469, of 1.3 is 0.0376: means 0.00469 and 0.0212
        ("k3_rejection", [1.1, 1.1], [1.0, 1.0]),
        ("k3_rejection", [1.1, 1.3], [0.0, 0.0]),
        ("k3_rejection:0.03", [1.1, 1.3], [1.0, 1.0]),
        ("veto", [5e-5, 3.0], [0.0, 0.0]),
        ("veto", [2e-4, 3.0], [1.0, 1.0]),
    ],
)
def test_weights_of_whole_rollouts(written, w, weights):
    _, slopes, _ = at_ratios(objective("reinforce", corrections=[written]), w, [1.0, 1.0], advantage=1.0)
    assert slopes == pytest.approx(weights)


@pytest.mark.parametrize(
    ("advantage", "w", "rho", "kept"),
    [
        (-1.0, [0.5, 1.0], [1.0, 1.0], 0.0),  # mean of log mu/pi: log 2 / 2, far above 1e-4
        (1.0, [0.5, 1.0], [1.0, 1.0], 1.0),  # good answers are never masked
        (-1.0, [2.0, 1.0], [1.0, 1.0], 1.0),  # more likely than when it was sampled
        (-1.0, [0.5, 1.0], [2.0, 1.0], 1.0),  # pi = mu: its ratio is the whole one
        (-1.0, [1.0, 1.0], [0.5, 1.0], 0.0),
    ],
)
def test_off_policy_mask(advantage, w, rho, kept):
    _, slopes, _ = at_ratios(objective("reinforce", corrections=["off_policy_mask"]), w, rho, advantage)
    assert slopes == pytest.approx([kept * advantage] * 2)


# ---- clips


@pytest.mark.parametrize(
    ("advantage", "objectives", "slopes"),
    [
        (1.0, [0.6, 0.79, 0.81, 1, 1.2, 1.27, 1.28, 1.28], [0.6, 0.79, 0.81, 1, 1.2, 1.27, 0, 0]),
        (-1.0, [-0.8, -0.8, -0.81, -1, -1.2, -1.27, -1.29, -1.6], [0, 0, -0.81, -1, -1.2, -1.27, -1.29, -1.6]),
    ],
)
def test_golden_vector_of_the_clip(advantage, objectives, slopes):
    values, got_slopes, aux = at_ratios(objective("dapo"), ONES, RHO, advantage)
    assert values == pytest.approx(objectives)
    assert got_slopes == pytest.approx(slopes)
    assert aux.rho_N.tolist() == pytest.approx(RHO)
    assert aux.acted["clip"].tolist() == [slope == 0 for slope in slopes]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_golden_vector_of_the_double_sided_mask(advantage):
    """GLM-5, asynchronous: outside of [0.8, 1.28] there is no gradient, whatever the sign of A."""
    inside = [0, 0, 0.81, 1, 1.2, 1.27, 0, 0]
    _, slopes, aux = at_ratios(objective("glm5_async"), ONES, RHO, advantage)
    assert slopes == pytest.approx([advantage * weight for weight in inside])
    assert aux.acted["double_sided"].tolist() == [weight == 0 for weight in inside]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_kimi_k25_clamps_whatever_the_sign_and_pulls_back(advantage):
    """clip(rho) A - 0.01 (log rho)^2: outside only the pull is left, its slope -0.02 log rho. One ratio: pi / mu."""
    clamped = [0.8, 0.8, 0.81, 1, 1.2, 1.27, 1.28, 1.28]
    slope_of_clamp = [0, 0, 0.81, 1, 1.2, 1.27, 0, 0]
    values, slopes, aux = at_ratios(objective("kimi_k25"), RHO, ONES, advantage)
    logs = [math.log(rho) for rho in RHO]
    assert values == pytest.approx([advantage * c - 0.01 * x * x for c, x in zip(clamped, logs, strict=True)])
    assert slopes == pytest.approx([advantage * s - 0.02 * x for s, x in zip(slope_of_clamp, logs, strict=True)])
    assert aux.acted["clip"].tolist() == [slope == 0 for slope in slope_of_clamp]


@pytest.mark.parametrize(("advantage", "value", "slope"), [(1.0, 1.28, 0.0), (-1.0, -3.0, 0.0)])
def test_golden_vector_of_the_dual_clip(advantage, value, slope):
    values, slopes, aux = at_ratios(objective("dapo", dual_clip=3.0), [1.0], [5.0], advantage)
    assert (values, slopes) == (pytest.approx([value]), pytest.approx([slope]))
    assert aux.acted["clip"].all()


@pytest.mark.parametrize("rho", [0.6, 0.81, 1.2, 1.3])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_minirl_masks_where_the_clip_would_act(rho, advantage):
    """The slope is w rho A, w at most 5, and 0 where PPO's clip to [0.8, 1.27] would stop it."""
    stopped = (advantage > 0 and rho > 1.27) or (advantage < 0 and rho < 0.8)
    _, slopes, aux = at_ratios(objective("minirl"), [2.0, 9.0], [rho, rho], advantage)
    assert slopes == pytest.approx([0.0, 0.0] if stopped else [2 * rho * advantage, 5 * rho * advantage])
    assert aux.acted["clip"].tolist() == [stopped] * 2
    assert aux.acted["tis"].tolist() == [False, True]
    assert not aux.acted["staleness"].any()


@pytest.mark.parametrize(
    ("log_rho", "advantage", "dual_clip", "loss", "has_gradient"),
    [
        (0.1, 1, None, -1.105171, True),
        (0.5, 1, None, -1.2, False),
        (-0.5, 1, None, -0.606531, True),
        (0.5, -1, None, 1.648721, True),
        (-0.5, -1, None, 0.8, False),
        (2, -1, None, 7.389056, True),
        (2, -1, 3.0, 3.0, False),
    ],
)
@pytest.mark.parametrize("name", ["dr_grpo", "reinforce_pp", "decoupled_ppo", "icepop"])
def test_b07_clip_table(name, log_rho, advantage, dual_clip, loss, has_gradient):
    values, slopes, _ = at_ratios(objective(name, dual_clip=dual_clip), [1.0], [math.exp(log_rho)], float(advantage))
    assert values == pytest.approx([-loss], abs=1e-6)
    assert slopes == pytest.approx([-loss if has_gradient else 0], abs=1e-6)


# ---- both factors

MU, PI_PROX, PI = [0.38, 0.3, 0.8], [0.4, 0.25, 0.85], [0.5, 0.2, 0.9]


def at_probabilities(description: Objective, advantage: float = 0.5, lag: int = 0) -> TokenAux:
    mu_N, prox_N, pi_N = (floats(probabilities).log() for probabilities in (MU, PI_PROX, PI))
    tokens = tokens_at(description, mu_N, prox_N, torch.full((3,), advantage, dtype=torch.float64))
    return compose.loss(description, pi_N, replace(tokens, lag_N=torch.full((3,), lag)))[1]


def test_golden_vector_of_the_factorisation():
    """pi/mu = [1.31579, 0.666667, 1.125] = w [1.05263, 0.833333, 1.0625] * rho [1.25, 0.8, 1.05882]."""
    aux = at_probabilities(objective("dr_grpo"))
    assert aux.ratio_N.tolist() == pytest.approx([1.05263, 0.833333, 1.0625], abs=5e-6)
    assert aux.rho_N.tolist() == pytest.approx([1.25, 0.8, 1.05882], abs=5e-6)
    assert (aux.ratio_N * aux.rho_N).tolist() == pytest.approx([1.31579, 0.666667, 1.125], abs=5e-6)
    whole = at_probabilities(objective("dr_grpo", anchor="behaviour"))
    assert whole.rho_N.tolist() == pytest.approx([1.31579, 0.666667, 1.125], abs=5e-6)


@pytest.mark.parametrize(
    ("name", "terms", "clipped"),
    [
        ("olmo3", [0.657895, 0.333333, 0.5625], [False, False, False]),
        ("decoupled_ppo", [0.631579, 0.333333, 0.5625], [True, False, False]),
    ],
)
def test_golden_vector_of_olmo3_and_decoupled_ppo(name, terms, clipped):
    aux = at_probabilities(objective(name))
    assert (-aux.loss_N).tolist() == pytest.approx(terms, abs=1e-6)
    assert aux.acted["clip"].tolist() == clipped


def test_golden_vector_of_the_interpolated_policy():
    """Sampled by version 2, pi_prox is version 4, pi becomes 5: alpha = 2/3, whatever the true pi_prox is."""
    guess = at_probabilities(objective("decoupled_ppo", proximal="interpolated"), lag=2)
    mu_N, pi_N = floats(MU).log(), floats(PI).log()
    assert (guess.ratio_N.log() + mu_N).tolist() == pytest.approx([-0.784626, -1.47428, -0.144622], abs=5e-6)
    assert guess.interpolation_error_N is not None
    assert (guess.interpolation_error_N + pi_N).tolist() == pytest.approx([-0.784626, -1.47428, -0.144622], abs=5e-6)
    assert (guess.ratio_N * guess.rho_N).log().tolist() == pytest.approx((pi_N - mu_N).tolist())
    assert guess.importance_N.tolist() == pytest.approx(guess.ratio_N.tolist())


# ---- ratios of whole answers


def test_golden_vector_of_gspo():
    """log rho 0.02, -0.01, 0.03, -0.02: s = e^0.005 = 1.00501, where the product is 1.0202."""
    rho = [math.exp(log_rho) for log_rho in (0.02, -0.01, 0.03, -0.02)]
    open_wide = {"clip_low": 0.5, "clip_high": 0.5}
    values, slopes, aux = at_ratios(objective("gspo", **open_wide), [1.0] * 4, rho, advantage=2.0)
    assert aux.rho_N.tolist() == pytest.approx([1.00501] * 4, abs=5e-6)
    assert values == pytest.approx([2.01003] * 4, abs=5e-6)
    assert slopes == pytest.approx([2.01003] * 4, abs=5e-6)  # s A mean_t grad log pi, on each of the four tokens
    _, slopes, aux = at_ratios(objective("gspo_token", **open_wide), [1.0] * 4, rho, advantage=2.0)
    assert aux.rho_N.tolist() == pytest.approx([1.00501] * 4, abs=5e-6)
    assert slopes == pytest.approx([2.01003] * 4, abs=5e-6)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_clips_the_whole_answer(name):
    """1.00501 is above 1.0004: no token keeps its gradient, though two of them are below 1."""
    rho = [math.exp(log_rho) for log_rho in (0.02, -0.01, 0.03, -0.02)]
    values, slopes, aux = at_ratios(objective(name), [1.0] * 4, rho, advantage=1.0)
    assert values == pytest.approx([1.0004] * 4)
    assert slopes == [0.0] * 4
    assert aux.acted["clip"].all()


# ---- the reference


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k1", [0.5, 0.1, 0, -0.1, -0.5], [1] * 5),
        ("k2", [0.125, 0.005, 0, 0.005, 0.125], [0.5, 0.1, 0, -0.1, -0.5]),
        # d(e^d - 1 - d)/d log pi = 1 - e^d
        ("k3", [0.106531, 0.00483742, 0, 0.00517092, 0.148721], [0.393469, 0.0951626, 0, -0.105171, -0.648721]),
        ("k3_value_k2_gradient", [0.106531, 0.00483742, 0, 0.00517092, 0.148721], [0.5, 0.1, 0, -0.1, -0.5]),
    ],
)
def test_golden_vector_of_kl_estimators(estimator, values, slopes):
    """d = log ref/pi = -0.5, -0.1, 0, 0.1, 0.5. With A = 0 the KL term, times 0.1, is all of the loss."""
    description = objective("reinforce", kl_coefficient=0.1, kl_estimator=estimator)
    rho = [math.exp(-d) for d in (-0.5, -0.1, 0, 0.1, 0.5)]  # the reference is pi_prox here
    objectives, got_slopes, _ = at_ratios(description, [1.0] * 5, rho, advantage=0.0)
    assert objectives == pytest.approx([-0.1 * value for value in values], abs=1e-7)
    assert got_slopes == pytest.approx([-0.1 * slope for slope in slopes], abs=1e-7)


def test_corrected_estimators_are_weighed_by_pi_over_mu():
    """w = 2: k3_corrected is 2 k3(d = 0.1), and its slope 2 (k3 + 1 - e^d); of k2 the weight is a constant."""
    for estimator, value, slope in (
        ("k1_corrected", 2 * -0.1, 2 * (-0.1 + 1)),
        ("k2_corrected", 2 * 0.005, 2 * -0.1),
        ("k3_corrected", 2 * 0.00517092, 2 * (0.00517092 - 0.105171)),
    ):
        description = objective("reinforce", kl_coefficient=1.0, kl_estimator=estimator)
        rho = math.exp(-0.1)
        values, slopes, _ = at_ratios(description, [2 / rho], [rho], advantage=0.0)
        assert values == pytest.approx([-value], abs=1e-6)
        assert slopes == pytest.approx([-slope], abs=1e-6)


def test_preference_by_hand():
    """log pi/ref 0.3 + 0.2 of the best, -0.5 of the worst: margin 1, loss -log sigmoid(0.1) = 0.644397.

    The slope of each token is -+0.1 sigmoid(-0.1) = -+0.0475021; the third answer is in no pair.
    """
    description = objective("online_dpo")
    logp_N = floats([0.3, 0.2, -0.5, 7.0]).requires_grad_()
    tokens = replace(
        tokens_at(description, floats([NAN] * 4), floats([NAN] * 4), floats([1.0, 1.0, -1.0, 0.0])),
        rollout_N=torch.tensor([0, 0, 1, 2]),
        reference_N=floats([0.0] * 4),
    )
    weights = compose.token_weights(
        description,
        tokens.mask_N,
        tokens.rollout_N,
        torch.zeros(3, dtype=torch.long),
        torch.tensor([True, True, False]),
        torch.float64,
    )
    loss, _ = compose.loss(description, logp_N, replace(tokens, weights=weights))
    (slope_N,) = torch.autograd.grad(loss, logp_N)
    assert loss.item() == pytest.approx(0.644397, abs=1e-6)
    assert slope_N.tolist() == pytest.approx([-0.0475021, -0.0475021, 0.0475021, 0], abs=1e-6)


def test_value_loss_by_hand():
    """V = 1, V_old = 0, R = 2, clip 0.2: half the larger of (1 - 2)^2 and (0.2 - 2)^2, which is flat in V: 1.62.

    V = 0.1 is inside: half of (0.1 - 2)^2 = 1.805, slope V - R.
    """
    description = objective("ppo")
    tokens = tokens_at(description, floats([0.0] * 2), floats([0.0] * 2), floats([0.0] * 2))
    tokens = replace(tokens, value_N=floats([0.0] * 2), return_N=floats([2.0] * 2))
    value_N = floats([1.0, 0.1]).requires_grad_()
    loss = compose.value_loss(description, value_N, tokens)
    (slope_N,) = torch.autograd.grad(loss, value_N)
    assert loss.item() == pytest.approx(1.62 + 1.805)
    assert slope_N.tolist() == pytest.approx([0.0, -1.9])
    policy, critic = description.terms
    halved = replace(description, terms=(policy, replace(critic, coefficient=0.5)))
    assert compose.value_loss(halved, value_N, tokens).item() == pytest.approx((1.62 + 1.805) / 2)


# ---- denominators


def rolled(description: Objective, losses: list[list[float]], group_R: Tensor, usable_R: Tensor | None = None):
    """Rollouts at ratio 1 whose tokens have the losses given -> (their sum, slope_N, the reduction's weights).

    At ratio 1 a token's slope in log pi is its loss, for a score function too, whose own value says nothing.
    """
    loss_N = floats([loss for rollout in losses for loss in rollout])
    rollout_N = torch.tensor([number for number, rollout in enumerate(losses) for _ in rollout], dtype=torch.long)
    zero_N = torch.zeros_like(loss_N)
    weights = compose.token_weights(
        description, torch.ones_like(rollout_N, dtype=torch.bool), rollout_N, group_R, usable_R, torch.float64
    )
    tokens = replace(
        tokens_at(description, zero_N, zero_N, -loss_N),
        rollout_N=rollout_N,
        group_N=group_R[rollout_N],
        weights=weights,
    )
    logp_N = zero_N.clone().requires_grad_()
    loss, _ = compose.loss(description, logp_N, tokens)
    loss.backward()
    value = float(logp_N.grad.sum())
    if isinstance(description.terms[0].loss, Clipped) and len(description.terms) == 1:
        assert loss.item() == pytest.approx(value)
    return value, logp_N.grad, weights[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dapo", 28 / 12),
        ("olmo3", 28 / 12),
        ("cispo", 28 / 12),
        ("grpo", 2),
        ("icepop", 2),
        ("minirl", 28 / 3),
        ("dr_grpo", 0.933333),
        ("scalerl", 1.8),
    ],
)
def test_golden_vector_of_aggregations(name, expected):
    """Lengths 2, 4, 6 with losses 1, 2, 3; L_max = 10; groups {0}, {1, 2}: (1 + 26 / 10) / 2 = 1.8."""
    length = 10 if name == "dr_grpo" else None
    description = objective(name, length=length, kl_coefficient=0)
    value, _, _ = rolled(description, [[1.0] * 2, [2.0] * 4, [3.0] * 6], torch.tensor([0, 1, 1]))
    assert value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"), [("dapo", 0.14), ("grpo", 0.377778), ("minirl", 0.466667), ("dr_grpo", 0.058333)]
)
def test_b02_named_denominators(name, expected):
    description = objective(name, length=8 if name == "dr_grpo" else None, kl_coefficient=0)
    answers = [[0.5, -0.2, 0.1], [1.0], [-0.4, -0.4, 0.2, 0.2, -0.1, 0.5]]
    assert rolled(description, answers, torch.tensor([0, 0, 0]))[0] == pytest.approx(expected, abs=1e-6)


FINISHED, CUT_OFF = [0.6] * 3, [0.6] * 5


@pytest.mark.parametrize(("name", "expected"), [("dapo", 0.6), ("grpo", 0.6), ("minirl", 1.8), ("dr_grpo", 0.18)])
def test_b06_a_truncated_answer_leaves_numerator_and_denominator(name, expected):
    """0.6, not 0.225 (its tokens in the denominator) and not 0.3 (its rollout in it). Its gradient is exactly 0."""
    description = objective(name, length=10 if name == "dr_grpo" else None, kl_coefficient=0, filters=("truncated",))
    group_R = torch.tensor([0, 0])
    selection = compose.select(description, floats([1.0, 0.0]), group_R, torch.tensor([False, True]))
    assert selection.dropped == {"truncated": 1}
    assert selection.baseline_R.tolist() == [True, True]
    value, slope_N, weight_N = rolled(description, [FINISHED, CUT_OFF], group_R, selection.usable_R)
    assert value == pytest.approx(expected)
    assert slope_N[:3].all()
    assert slope_N[3:].tolist() == [0.0] * 5
    assert weight_N[3:].tolist() == [0.0] * 5


@pytest.mark.parametrize("description", SUBJECTS.values(), ids=SUBJECTS.keys())
def test_b06_all_truncated_is_a_loss_of_zero(description):
    group_R = torch.tensor([0, 0])
    value, slope_N, weight_N = rolled(description, [FINISHED, CUT_OFF], group_R, torch.tensor([False, False]))
    assert value == 0.0
    assert slope_N.tolist() == [0.0] * 8
    assert weight_N.tolist() == [0.0] * 8


@pytest.mark.parametrize("description", SUBJECTS.values(), ids=SUBJECTS.keys())
def test_b06_an_empty_answer_is_in_no_sum_and_no_count(description):
    with_empty = rolled(description, [FINISHED, [], CUT_OFF], torch.tensor([0, 1, 2]))
    without = rolled(description, [FINISHED, CUT_OFF], torch.tensor([0, 2]))
    assert with_empty[0] == without[0]
    assert torch.equal(with_empty[1], without[1])


# ---- overflow


@pytest.mark.parametrize(("new", "old"), [(200.0, 0.0), (-INF, -INF), (NAN, 0.0), (0.0, NAN), (INF, -INF)])
@pytest.mark.parametrize("name", ["dapo", "olmo3", "icepop", "ppo", "dr_grpo"])
def test_b07_overflow_under_the_mask(name, new, old):
    """Log-ratios 0.1 and 200, the second masked: loss -e^0.1 = -1.105171, gradient [-1.105171, 0], not nan."""
    description = objective(name, length=1 if name == "dr_grpo" else None)
    logp_N, old_N = torch.tensor([0.1, new], requires_grad=True), torch.tensor([0.0, old])
    mask_N = torch.tensor([True, False])
    tokens = tokens_at(description, old_N, old_N, torch.tensor([1.0, NAN]))
    weights = tuple(mask_N.float() for _ in description.terms)
    loss, _ = compose.loss(description, logp_N, replace(tokens, mask_N=mask_N, weights=weights))
    loss.backward()
    assert loss.item() == pytest.approx(-1.105171, abs=1e-6)
    assert logp_N.grad.tolist() == pytest.approx([-1.105171, 0], abs=1e-6)


@pytest.mark.parametrize("garbage", [200.0, INF, -INF, NAN])
@pytest.mark.parametrize("description", SUBJECTS.values(), ids=SUBJECTS.keys())
def test_b07_a_whole_masked_answer(description, garbage):
    logp_N = torch.full((3,), garbage, requires_grad=True)
    other_N = torch.full((3,), -INF)
    tokens = tokens_at(description, other_N, other_N, torch.full((3,), INF))
    nothing = {"mask_N": torch.zeros(3, dtype=torch.bool), "weights": tuple(torch.zeros(3) for _ in description.terms)}
    loss, aux = compose.loss(description, logp_N, replace(tokens, **nothing))
    loss.backward()
    assert loss.item() == 0
    assert logp_N.grad.tolist() == [0, 0, 0]
    assert aux.ratio_N.tolist() == aux.rho_N.tolist() == aux.importance_N.tolist() == [1, 1, 1]
    assert not any(acts_N.any() for acts_N in aux.acted.values())


# ---- micro-batches


def test_b01a_unbalanced_micro_batches():
    """p = sigmoid(0) of each token; 2 tokens with A = 1, 8 with A = -0.5: loss +0.2, slope in theta +0.1.

    The mean of the micro-batches' means would be -0.25 and -0.125: the opposite sign.
    """
    description = objective("dapo")
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    advantage_N, rollout_N = floats([1.0] * 2 + [-0.5] * 8), torch.tensor([0] * 2 + [1] * 8)
    logp_N = torch.nn.functional.logsigmoid(theta).expand(10).detach()
    tokens = replace(tokens_at(description, logp_N, logp_N, advantage_N), rollout_N=rollout_N)
    (weight_N,) = compose.token_weights(
        description, tokens.mask_N, rollout_N, torch.tensor([0, 0]), dtype=torch.float64
    )
    total = 0.0
    for size, start in ((2, 0), (8, 2)):
        part = slice(start, start + size)
        own = replace(tokens_at(description, logp_N[part], logp_N[part], advantage_N[part]), weights=(weight_N[part],))
        loss, _ = compose.loss(description, torch.nn.functional.logsigmoid(theta).expand(size), own)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(0.2)
    assert theta.grad is not None
    assert theta.grad.item() == pytest.approx(0.1)


# ---- how much of a batch is left


def test_golden_vector_of_the_effective_sample_size():
    """(1 + 1 + 1 + 5)^2 / (1 + 1 + 1 + 25) = 2.28571 of 4 tokens."""
    description = objective("olmo3")
    behaviour_N = -floats([1.0, 1.0, 1.0, 5.0]).log()
    zero_N = torch.zeros_like(behaviour_N)
    diagnostics = MismatchDiagnostics()
    diagnostics.add(zero_N, tokens_at(description, behaviour_N, zero_N, zero_N))
    assert 4 * diagnostics.result()["ess_share"] == pytest.approx(2.28571, abs=5e-6)
