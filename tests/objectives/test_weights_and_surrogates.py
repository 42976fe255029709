"""Ratios, truncation and clips: case B07 and values worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from headway.objectives import compose, surrogates
from headway.objectives.named import objective
from headway.objectives.surrogates import clip_acts, clipped, policy_gradient
from headway.objectives.weights import MAX_LOG_RATIO, log_ratio, truncated

INF, NAN = float("inf"), float("nan")


def test_golden_vector_truncated():
    ratio_N = torch.tensor([0.3, 0.5, 0.9, 1, 1.5, 2, 3, 6], dtype=torch.float64)
    assert truncated(ratio_N, 2.0).tolist() == [0.3, 0.5, 0.9, 1, 1.5, 2, 2, 2]
    assert torch.equal(truncated(ratio_N, INF), ratio_N)


def test_truncated_stops_the_gradient():
    ratio_N = torch.tensor([0.5, 3.0], requires_grad=True)
    assert not truncated(ratio_N, 2.0).requires_grad


@pytest.mark.parametrize(
    ("advantage", "objectives", "slopes"),
    [
        (1.0, [0.6, 0.79, 0.81, 1, 1.2, 1.27, 1.28, 1.28], [0.6, 0.79, 0.81, 1, 1.2, 1.27, 0, 0]),
        (-1.0, [-0.8, -0.8, -0.81, -1, -1.2, -1.27, -1.29, -1.6], [0, 0, -0.81, -1, -1.2, -1.27, -1.29, -1.6]),
    ],
)
def test_golden_vector_clip(advantage, objectives, slopes):
    rho = torch.tensor([0.6, 0.79, 0.81, 1, 1.2, 1.27, 1.29, 1.6], dtype=torch.float64)
    logp_N = rho.log().requires_grad_()
    advantage_N = torch.full_like(rho, advantage)
    loss_N = clipped(logp_N.exp(), advantage_N, 0.2, 0.28)
    (slope_N,) = torch.autograd.grad(loss_N.sum(), logp_N)
    assert loss_N.tolist() == pytest.approx([-value for value in objectives], abs=1e-12)
    assert slope_N.tolist() == pytest.approx([-value for value in slopes], abs=1e-12)
    assert clip_acts(rho, advantage_N, 0.2, 0.28).tolist() == [slope == 0 for slope in slopes]


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, 1.28), (-1.0, -3.0)])
def test_golden_vector_dual_clip(advantage, expected):
    loss_N = clipped(torch.tensor([5.0]), torch.tensor([advantage]), 0.2, 0.28, dual_clip=3.0)
    assert loss_N.tolist() == pytest.approx([-expected])


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
    logp_N = torch.tensor([float(log_rho)], dtype=torch.float64, requires_grad=True)
    advantage_N = torch.tensor([float(advantage)], dtype=torch.float64)
    loss_N = clipped(logp_N.exp(), advantage_N, 0.2, 0.2, dual_clip)
    (slope_N,) = torch.autograd.grad(loss_N.sum(), logp_N)
    assert loss_N.item() == pytest.approx(loss, abs=1e-6)
    assert slope_N.item() == pytest.approx(loss if has_gradient else 0, abs=1e-6)
    assert clip_acts(logp_N.detach().exp(), advantage_N, 0.2, 0.2, dual_clip).item() is not has_gradient


@pytest.mark.parametrize(("new", "old"), [(200.0, 0.0), (-INF, -INF), (NAN, 0.0), (0.0, NAN), (INF, -INF)])
def test_b07_overflow_under_the_mask(new, old):
    logp_N = torch.tensor([0.1, new], requires_grad=True)
    zero_N, mask_N = torch.tensor([0.0, old]), torch.tensor([True, False])
    loss, _ = compose.loss(
        objective("grpo", weight="none", reduction="token_mean"),
        logp_N,
        zero_N,
        zero_N,
        advantage_N=torch.tensor([1.0, NAN]),
        mask_N=mask_N,
        weight_N=mask_N.float(),
    )
    loss.backward()
    assert loss.item() == pytest.approx(-1.105171, abs=1e-6)
    assert logp_N.grad is not None
    assert logp_N.grad.tolist() == pytest.approx([-1.105171, 0], abs=1e-6)


@pytest.mark.parametrize("weight", ["none", "truncated"])
@pytest.mark.parametrize("surrogate", ["clipped", "policy_gradient"])
@pytest.mark.parametrize("proximal", [None, -INF])
def test_b07_a_whole_masked_answer(weight, surrogate, proximal):
    logp_N = torch.full((3,), -INF, requires_grad=True)
    other_N = torch.full((3,), -INF)
    loss, aux = compose.loss(
        objective("grpo", weight=weight, surrogate=surrogate),
        logp_N,
        other_N,
        None if proximal is None else other_N,
        advantage_N=torch.full((3,), INF),
        mask_N=torch.zeros(3, dtype=torch.bool),
        weight_N=torch.zeros(3),
    )
    loss.backward()
    assert loss.item() == 0
    assert logp_N.grad is not None
    assert logp_N.grad.tolist() == [0, 0, 0]
    assert aux.ratio_N.tolist() == aux.rho_N.tolist() == aux.importance_N.tolist() == [1, 1, 1]
    assert not (aux.truncated_N | aux.clipped_N).any()


def test_log_ratio_is_clamped_before_exp_and_flat_beyond():
    new_N = torch.tensor([300.0, -300.0, 1.0], requires_grad=True)
    ratio_N = log_ratio(new_N, torch.zeros(3), torch.ones(3, dtype=torch.bool))
    assert ratio_N.tolist() == [MAX_LOG_RATIO, -MAX_LOG_RATIO, 1.0]
    ratio_N.exp().sum().backward()
    assert new_N.grad is not None
    assert new_N.grad.tolist() == pytest.approx([0.0, 0.0, math.e])


def test_log_ratio_does_not_hide_a_nan_of_a_trained_token():
    assert log_ratio(torch.tensor([NAN]), torch.tensor([0.0]), torch.tensor([True])).isnan().all()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_log_ratio_subtracts_in_float32(half):
    """-10.0625 and -0.0009765625 are exact in both half precisions, their difference is in neither."""
    new_N, old_N = torch.tensor([-0.0009765625], dtype=half), torch.tensor([-10.0625], dtype=half)
    ratio_N = log_ratio(new_N, old_N, torch.tensor([True]))
    assert ratio_N.dtype == torch.float32
    assert ratio_N.item() == 10.0625 - 0.0009765625


def test_log_ratio_is_constant_in_the_old_log_prob():
    old_N = torch.tensor([-1.0], requires_grad=True)
    assert not log_ratio(torch.tensor([-1.0]), old_N, torch.tensor([True])).requires_grad


def test_factorisation_and_the_terms_of_olmo3_and_decoupled_ppo():
    """The golden vector: pi/mu = [1.31579, 0.666667, 1.125] splits into w = pi_prox/mu and rho = pi/pi_prox."""
    w_N = torch.tensor([1.05263158, 0.83333333, 1.0625], dtype=torch.float64)
    rho_N = torch.tensor([1.25, 0.8, 1.05882353], dtype=torch.float64)
    behaviour_N = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    proximal_N = behaviour_N + w_N.log()
    logp_N = (proximal_N + rho_N.log()).requires_grad_()
    assert (w_N * rho_N).tolist() == pytest.approx([1.31579, 0.666667, 1.125], abs=5e-6)
    terms = {0.272: [0.657895, 0.333333, 0.5625], 0.2: [0.631579, 0.333333, 0.5625]}
    for clip_high, expected in terms.items():
        _, aux = compose.loss(
            objective("grpo", clip_high=clip_high, weight_cap=2.0),
            logp_N,
            behaviour_N,
            proximal_N,
            advantage_N=torch.full((3,), 0.5, dtype=torch.float64),
            mask_N=torch.ones(3, dtype=torch.bool),
            weight_N=torch.ones(3, dtype=torch.float64),
        )
        assert (-aux.loss_N).tolist() == pytest.approx(expected, abs=1e-6)
        assert aux.ratio_N.tolist() == pytest.approx(w_N.tolist())
        assert aux.rho_N.tolist() == pytest.approx(rho_N.tolist())
        assert aux.clipped_N.tolist() == [clip_high == 0.2, False, False]


def test_at_ratio_one_both_surrogates_have_the_gradient_of_reinforce():
    advantage_N = torch.tensor([0.3, -2.0, 0.0])
    for surrogate in (policy_gradient, lambda rho, advantage: surrogates.clipped(rho, advantage, 0.2, 0.2, 3.0)):
        logp_N = torch.tensor([-0.7, -5.0, -1e-3], requires_grad=True)
        loss = surrogate((logp_N - logp_N.detach()).exp(), advantage_N).sum()
        (slope_N,) = torch.autograd.grad(loss, logp_N)
        assert torch.equal(slope_N, -advantage_N)


def test_aux_tells_where_the_cap_acted():
    logp_N = torch.tensor([0.0, 1.0, 0.0], requires_grad=True)
    _, aux = compose.loss(
        objective("grpo", weight_cap=2.0),
        logp_N,
        torch.zeros(3),
        None,
        advantage_N=torch.ones(3),
        mask_N=torch.ones(3, dtype=torch.bool),
        weight_N=torch.ones(3),
    )
    assert aux.truncated_N.tolist() == [False, True, False]
    assert aux.ratio_N.tolist() == pytest.approx([1, math.e, 1])
    assert aux.importance_N.tolist() == [1, 2, 1]
    assert aux.rho_N.tolist() == [1, 1, 1]
    assert not any(item.requires_grad for item in vars(aux).values())
