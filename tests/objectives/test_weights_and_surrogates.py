"""Ratios, weights, surrogates and KL estimators as functions: the test vectors, B07, B17, and values worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headway.objectives import kl, surrogates, weights
from headway.objectives.surrogates import clamp_acts, clamped, clip_acts, clipped, clipped_value, policy_gradient
from headway.objectives.weights import MAX_LOG_RATIO, log_ratio, log_ratio_at, masked, truncated

INF, NAN = torch.inf, torch.nan
W = [0.3, 0.5, 0.9, 1, 1.5, 2, 3, 6]
RHO = [0.6, 0.79, 0.81, 1, 1.2, 1.27, 1.29, 1.6]


def floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def trained(number: int) -> tuple[Tensor, Tensor]:
    """The mask and the rollout of tokens of one rollout that are all trained."""
    return torch.ones(number, dtype=torch.bool), torch.zeros(number, dtype=torch.long)


# ---- truncated and masked


def test_golden_vector_truncated():
    assert truncated(floats(W), 2.0).tolist() == [0.3, 0.5, 0.9, 1, 1.5, 2, 2, 2]
    assert truncated(floats(W), 5.0, low=0.5).tolist() == [0.5, 0.5, 0.9, 1, 1.5, 2, 3, 5]
    assert torch.equal(truncated(floats(W), INF), floats(W))


def test_golden_vector_masked():
    assert masked(floats(W), 0.0, 2.0).tolist() == [0.3, 0.5, 0.9, 1, 1.5, 2, 0, 0]
    assert masked(floats(W), 0.5, 5.0).tolist() == [0, 0.5, 0.9, 1, 1.5, 2, 3, 0]
    assert masked(floats(W), 0.5, 2.0).tolist() == [0, 0.5, 0.9, 1, 1.5, 2, 0, 0]


def test_weights_stop_the_gradient():
    ratio_N = torch.tensor([0.5, 3.0], requires_grad=True)
    assert not truncated(ratio_N, 2.0).requires_grad
    assert not masked(ratio_N, 0.0, 2.0).requires_grad


# ---- log-ratios


def test_log_ratio_is_clamped_before_exp_and_flat_beyond():
    new_N = torch.tensor([300.0, -300.0, 1.0], requires_grad=True)
    ratio_N = log_ratio(new_N, torch.zeros(3), torch.ones(3, dtype=torch.bool))
    assert ratio_N.tolist() == [MAX_LOG_RATIO, -MAX_LOG_RATIO, 1.0]
    ratio_N.exp().sum().backward()
    assert new_N.grad is not None
    assert new_N.grad.tolist() == pytest.approx([0.0, 0.0, math.e])


@pytest.mark.parametrize(("new", "old"), [(200.0, 0.0), (-INF, -INF), (NAN, 0.0), (0.0, NAN), (INF, -INF)])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "geometric_token"])
def test_b07_what_stands_under_the_mask_reaches_no_ratio_of_its_rollout(level, new, old):
    new_N = torch.tensor([0.1, new, 0.3], requires_grad=True)
    old_N, mask_N = torch.tensor([0.0, old, 0.0]), torch.tensor([True, False, True])
    log_N = log_ratio_at(level, new_N, old_N, mask_N, torch.zeros(3, dtype=torch.long))
    first, last = {"token": (0.1, 0.3), "sequence": (0.4, 0.4)}.get(level, (0.2, 0.2))
    assert log_N.tolist() == pytest.approx([first, 0.0, last])
    (slope_N,) = torch.autograd.grad(log_N.sum(), new_N)
    # two trained tokens, each with the log of a product of two (or half of it), or with its own
    slope = 2.0 if level == "sequence" else 1.0
    assert slope_N.tolist() == [slope, 0.0, slope]


def test_log_ratio_does_not_hide_a_nan_of_a_trained_token():
    assert log_ratio(torch.tensor([NAN]), torch.tensor([0.0]), torch.tensor([True])).isnan().all()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_log_ratio_subtracts_in_float32(half):
    """-10.0625 and -0.0009765625 are exact in both half precisions, their difference is in neither."""
    new_N, old_N = torch.tensor([-0.0009765625], dtype=half), torch.tensor([-10.0625], dtype=half)
    ratio_N = log_ratio(new_N, old_N, torch.tensor([True]))
    assert ratio_N.dtype == torch.float32
    assert ratio_N.item() == 10.0625 - 0.0009765625


def test_b17b_small_differences_add_up_over_an_answer():
    """-0.668460 in float32 against -0.693147 of a bfloat16 head, 200 tokens: 4.94 nats, not lost in a bfloat16 sum."""
    float_N = torch.tensor([20.0, 19.95]).log_softmax(-1)[0].repeat(200)
    half_N = torch.tensor([20.0, 19.95]).bfloat16().float().log_softmax(-1)[0].repeat(200)
    assert (float_N[0].item(), half_N[0].item()) == (pytest.approx(-0.668460), pytest.approx(-0.693147))
    assert log_ratio_at("sequence", float_N, half_N, *trained(200))[0].item() == pytest.approx(4.937, abs=1e-3)
    # Stored in bfloat16 too (the sum of 200 has 8 bits there, and would stop growing): -0.668460 is -0.66796875.
    stored = log_ratio_at("sequence", float_N.bfloat16(), half_N.bfloat16(), *trained(200))[0].item()
    assert stored == pytest.approx(200 * (-0.66796875 + 0.69140625), rel=1e-5)


def test_log_ratio_is_constant_in_the_old_log_prob():
    old_N = torch.tensor([-1.0], requires_grad=True)
    assert not log_ratio(torch.tensor([-1.0]), old_N, torch.tensor([True])).requires_grad
    assert not log_ratio_at("geometric", torch.tensor([-1.0]), old_N, *trained(1)).requires_grad


def test_golden_vector_of_whole_rollouts():
    """GSPO's vector: s = exp(mean) = 1.00501, the product is 1.0202. A second rollout does not mix in."""
    new_N = floats([0.02, -0.01, 0.03, -0.02, 5.0])
    rollout_N, mask_N = torch.tensor([0, 0, 0, 0, 1]), torch.ones(5, dtype=torch.bool)

    def ratios(level: str) -> list[float]:
        return log_ratio_at(level, new_N, torch.zeros_like(new_N), mask_N, rollout_N).exp().tolist()

    assert ratios("geometric")[:4] == pytest.approx([1.00501] * 4, abs=5e-6)
    assert ratios("geometric_token")[:4] == pytest.approx([1.00501] * 4, abs=5e-6)
    assert ratios("sequence")[:4] == pytest.approx([1.0202] * 4, abs=5e-5)
    assert ratios("sequence")[4] == ratios("geometric")[4] == pytest.approx(math.exp(5))


def test_a_product_is_clamped_after_summing():
    """15 + 15 - 25 = 5: its parts may be beyond the clamp, only the sum may not."""
    new_N = floats([15.0, 15.0, -25.0])
    assert log_ratio_at("sequence", new_N, 0 * new_N, *trained(3)).tolist() == [5.0] * 3
    assert log_ratio_at("sequence", new_N.abs(), 0 * new_N, *trained(3)).tolist() == [MAX_LOG_RATIO] * 3


def test_the_slope_of_a_geometric_mean_is_shared_out_by_geometric_token_it_is_each_tokens_own():
    """With weights c_t on the tokens' ratios: s sum(c) / len everywhere, or s c_t."""
    logp_N, share_N = floats([0.1, 0.3]).requires_grad_(), floats([1.0, 5.0])
    for level, slopes in (("geometric", [3.0, 3.0]), ("geometric_token", [1.0, 5.0])):
        rho_N = log_ratio_at(level, logp_N, floats([0.0, 0.0]), *trained(2)).exp()
        (slope_N,) = torch.autograd.grad((share_N * rho_N).sum(), logp_N)
        assert slope_N.tolist() == pytest.approx([math.exp(0.2) * slope for slope in slopes])


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="'answer'"):
        log_ratio_at("answer", torch.zeros(1), torch.zeros(1), *trained(1))


def test_no_tokens():
    nothing, mask_N, rollout_N = torch.zeros(0), *trained(0)
    for level in ("token", "sequence", "geometric", "geometric_token"):
        assert log_ratio_at(level, nothing, nothing, mask_N, rollout_N).shape == (0,)
    assert weights.keep_k3(nothing, nothing, mask_N, rollout_N, 0.1).shape == (0,)
    assert weights.without_veto(nothing, nothing, mask_N, rollout_N, 0.1).shape == (0,)
    assert weights.on_policy_enough(nothing, nothing, nothing, mask_N, rollout_N, 0.1).shape == (0,)


# ---- whole rollouts, kept or not

TWO_ROLLOUTS = torch.tensor([0, 0, 1, 1])


def test_keep_k3_is_of_the_mean_over_trained_tokens():
    """w - 1 - log w of 1.3 is 0.0376: over the limit 0.03 alone, under it beside a token with w = 1."""
    log_w_N = floats([1.3, 1.0, 1.3, 9.0]).log()
    mask_N = torch.tensor([True, True, True, False])
    assert weights.keep_k3(log_w_N, 0 * log_w_N, mask_N, TWO_ROLLOUTS, 0.03).tolist() == [True, True, False, False]


def test_veto_is_of_any_trained_token():
    log_w_N = floats([1e-5, 1.0, 1.0, 1e-5]).log()
    mask_N = torch.tensor([True, True, True, False])
    assert weights.without_veto(log_w_N, 0 * log_w_N, mask_N, TWO_ROLLOUTS, 1e-4).tolist() == [False, False, True, True]


def test_on_policy_enough_is_of_bad_answers_alone():
    """mean of log mu/pi: 0.1 in the first rollout, 0.3 in the second (its masked token is not in the mean)."""
    new_N, old_N = floats([0.0, -0.2, -0.3, 0.0]), floats([0.0] * 4)
    mask_N = torch.tensor([True, True, True, False])

    def kept(advantages: list[float], limit: float) -> list[bool]:
        return weights.on_policy_enough(new_N, old_N, floats(advantages), mask_N, TWO_ROLLOUTS, limit).tolist()

    assert kept([-1, -1, -1, -1], 0.2) == [True, True, False, False]
    assert kept([-1, -1, 1, 1], 0.0) == [False, False, True, True]


# ---- the interpolated proximal policy


def test_golden_vector_of_the_interpolated_policy():
    """mu = .38, .3, .8 and pi = .5, .2, .9, lag 2: alpha = 2/3."""
    mu_N, pi_N = floats([0.38, 0.3, 0.8]).log(), floats([0.5, 0.2, 0.9]).log()
    guess_N = weights.interpolated_proximal(pi_N.requires_grad_(), mu_N, torch.tensor([2, 2, 2]))
    assert guess_N.tolist() == pytest.approx([-0.784626, -1.47428, -0.144622], abs=5e-6)
    assert not guess_N.requires_grad


def test_the_newest_tokens_are_from_the_proximal_policy_itself():
    """Lag 0: alpha 0, pi_prox = mu. Lag 9: nine tenths of the way."""
    guess_N = weights.interpolated_proximal(floats([1.0, 1.0]), floats([0.0, 0.0]), torch.tensor([0, 9]))
    assert guess_N.tolist() == pytest.approx([0.0, 0.9], abs=1e-15)


@pytest.mark.parametrize("current", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("behaviour", [torch.float32, torch.bfloat16])
def test_the_interpolated_policy_of_any_dtype(current, behaviour):
    guess_N = weights.interpolated_proximal(
        torch.tensor([-0.5], dtype=current), torch.tensor([-1.0], dtype=behaviour), torch.tensor([3])
    )
    assert guess_N.dtype == torch.promote_types(current, torch.float32)
    assert guess_N.item() == -0.625


# ---- surrogates


@pytest.mark.parametrize(
    ("advantage", "objectives", "slopes"),
    [
        (1.0, [0.6, 0.79, 0.81, 1, 1.2, 1.27, 1.28, 1.28], [0.6, 0.79, 0.81, 1, 1.2, 1.27, 0, 0]),
        (-1.0, [-0.8, -0.8, -0.81, -1, -1.2, -1.27, -1.29, -1.6], [0, 0, -0.81, -1, -1.2, -1.27, -1.29, -1.6]),
    ],
)
def test_golden_vector_clip(advantage, objectives, slopes):
    rho_N = floats(RHO)
    logp_N = rho_N.log().requires_grad_()
    advantage_N = torch.full_like(rho_N, advantage)
    loss_N = clipped(logp_N.exp(), advantage_N, 0.2, 0.28)
    (slope_N,) = torch.autograd.grad(loss_N.sum(), logp_N)
    assert loss_N.tolist() == pytest.approx([-value for value in objectives], abs=1e-12)
    assert slope_N.tolist() == pytest.approx([-value for value in slopes], abs=1e-12)
    assert clip_acts(rho_N, advantage_N, 0.2, 0.28).tolist() == [slope == 0 for slope in slopes]


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, 1.28), (-1.0, -3.0)])
def test_golden_vector_dual_clip(advantage, expected):
    loss_N = clipped(torch.tensor([5.0]), torch.tensor([advantage]), 0.2, 0.28, dual_clip=3.0)
    assert loss_N.tolist() == pytest.approx([-expected])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_clamped_stops_the_gradient_on_both_sides(advantage):
    logp_N = floats(RHO).log().requires_grad_()
    loss_N = clamped(logp_N.exp(), torch.full((8,), advantage, dtype=torch.float64), 0.2, 0.28)
    (slope_N,) = torch.autograd.grad(loss_N.sum(), logp_N)
    inside = [0, 0, 0.81, 1, 1.2, 1.27, 0, 0]
    assert loss_N.tolist() == pytest.approx([-advantage * c for c in (0.8, 0.8, 0.81, 1, 1.2, 1.27, 1.28, 1.28)])
    assert slope_N.tolist() == pytest.approx([-advantage * value for value in inside])
    assert clamp_acts(floats(RHO), 0.2, 0.28).tolist() == [value == 0 for value in inside]


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
def test_b07_clip_table(log_rho, advantage, dual_clip, loss, has_gradient):
    logp_N = floats([float(log_rho)]).requires_grad_()
    advantage_N = floats([float(advantage)])
    loss_N = clipped(logp_N.exp(), advantage_N, 0.2, 0.2, dual_clip)
    (slope_N,) = torch.autograd.grad(loss_N.sum(), logp_N)
    assert loss_N.item() == pytest.approx(loss, abs=1e-6)
    assert slope_N.item() == pytest.approx(loss if has_gradient else 0, abs=1e-6)
    assert clip_acts(logp_N.detach().exp(), advantage_N, 0.2, 0.2, dual_clip).item() is not has_gradient


def test_at_ratio_one_every_surrogate_has_the_gradient_of_reinforce():
    advantage_N, mask_N = torch.tensor([0.3, -2.0, 0.0]), torch.ones(3, dtype=torch.bool)
    for surrogate in (
        lambda logp_N: policy_gradient((logp_N - logp_N.detach()).exp(), advantage_N),
        lambda logp_N: clipped((logp_N - logp_N.detach()).exp(), advantage_N, 0.2, 0.2, 3.0),
        lambda logp_N: clamped((logp_N - logp_N.detach()).exp(), advantage_N, 0.2, 0.2),
        lambda logp_N: surrogates.score_function(logp_N, advantage_N, mask_N),
    ):
        logp_N = torch.tensor([-0.7, -5.0, -1e-3], requires_grad=True)
        (slope_N,) = torch.autograd.grad(surrogate(logp_N).sum(), logp_N)
        assert torch.equal(slope_N, -advantage_N)


@pytest.mark.parametrize(
    ("value", "old", "loss", "slope"),
    [
        # R = 2, clip 0.2: half of the larger square of V - R and V_old -+ 0.2 - R; flat where the second is larger
        (1.0, 0.0, 1.62, 0.0),
        (0.1, 0.0, 1.805, -1.9),
        (0.5, 1.0, 1.125, -1.5),  # (0.8 - 2)^2 is smaller than (0.5 - 2)^2
        (3.0, 4.0, 1.62, 0.0),  # 3.8
    ],
)
def test_clipped_value_by_hand(value, old, loss, slope):
    value_N = floats([value]).requires_grad_()
    loss_N = clipped_value(value_N, floats([old]), floats([2.0]), 0.2)
    (slope_N,) = torch.autograd.grad(loss_N.sum(), value_N)
    assert (loss_N.item(), slope_N.item()) == (pytest.approx(loss), pytest.approx(slope))
    assert clipped_value(value_N, floats([old]), floats([2.0]), None).item() == pytest.approx((value - 2) ** 2 / 2)


def test_squared_log_ratio_and_preference_by_hand():
    assert surrogates.squared_log_ratio(floats([0.5, -2.0])).tolist() == [0.25, 4.0]
    # -log sigmoid(0.1 * 10) = log(1 + e^-1); a margin of -1000 is no overflow
    losses = surrogates.preference(floats([0.0, 10.0, -1000.0]), 0.1).tolist()
    assert losses == pytest.approx([math.log(2), math.log1p(math.exp(-1)), 100.0])


# ---- KL estimators

D = [-0.5, -0.1, 0, 0.1, 0.5]


def test_golden_vector_of_kl_estimators():
    """d = log ref - log pi."""
    logp_N, reference_N, mask_N = floats([-1.0] * 5), floats([-1 + d for d in D]), torch.ones(5, dtype=torch.bool)
    k1, k2, k3 = (estimator(logp_N, reference_N, mask_N).tolist() for estimator in (kl.k1, kl.k2, kl.k3))
    assert k1 == pytest.approx([0.5, 0.1, 0, -0.1, -0.5], abs=1e-12)
    assert k2 == pytest.approx([0.125, 0.005, 0, 0.005, 0.125], abs=1e-12)
    assert k3 == pytest.approx([0.106531, 0.00483742, 0, 0.00517092, 0.148721], abs=5e-7)
    straight = kl.estimate("k3_value_k2_gradient", logp_N.requires_grad_(), reference_N, mask_N)
    assert straight.tolist() == pytest.approx(k3)
    assert torch.autograd.grad(straight.sum(), logp_N)[0].tolist() == pytest.approx(k1)  # k2's slope is -d


@pytest.mark.parametrize("garbage", [INF, -INF, NAN])
@pytest.mark.parametrize("estimator", kl.KL_ESTIMATORS)
def test_kl_estimators_are_zero_under_the_mask(estimator, garbage):
    logp_N = torch.tensor([-1.0, garbage], requires_grad=True)
    mask_N = torch.tensor([True, False])
    given_N = torch.tensor([-1.5, garbage])
    estimate_N = kl.estimate(estimator, logp_N, given_N, mask_N, given_N)
    estimate_N.sum().backward()
    assert estimate_N[1] == 0
    assert logp_N.grad[1] == 0
    assert logp_N.grad.isfinite().all()


def test_the_kl_in_the_reward_is_k1_and_a_constant():
    logp_N = torch.tensor([-1.0, -1.0, NAN], requires_grad=True)
    penalty_N = kl.token_reward(logp_N, torch.tensor([-1.5, -0.5, 0.0]), torch.tensor([True, True, False]), 0.1)
    assert penalty_N.tolist() == pytest.approx([-0.05, 0.05, 0.0])
    assert not penalty_N.requires_grad
