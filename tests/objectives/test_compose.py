"""Properties of whole objectives: the split of a batch, its mask and its garbage change nothing.

What this does not cover: float32 rounding, which a split may change in the last bits (all here is float64), and ranks,
which are micro-batches as far as the arithmetic goes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.objectives import compose
from headway.objectives.diagnostics import MismatchDiagnostics
from headway.objectives.named import ADVANTAGES, REDUCTIONS, SURROGATES, WEIGHTS, Objective, objective

NUM_PARAMETERS = 5
QUICK = settings(max_examples=40, deadline=None)


@dataclass
class Batch:
    """Tokens of a batch with a linear policy: the log-prob of a token is `logsigmoid(feature_NP @ theta_P)`."""

    feature_NP: Tensor
    noise_N: Tensor
    mask_N: Tensor
    rollout_N: Tensor
    group_R: Tensor
    reward_R: Tensor
    multi_step: bool

    def logp_N(self, theta_P: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(self.feature_NP @ theta_P)


@dataclass
class Tokens:
    """What the loss is given, per token."""

    feature_NP: Tensor
    behaviour_N: Tensor
    proximal_N: Tensor
    advantage_N: Tensor
    mask_N: Tensor
    weight_N: Tensor

    def __getitem__(self, index) -> Tokens:
        return Tokens(*(getattr(self, field.name)[index] for field in fields(self)))


@st.composite
def batches(draw) -> Batch:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_tokens, num_rollouts = sum(lengths), len(lengths)
    reward_R = torch.randint(-2, 3, (num_rollouts,), generator=generator).double()
    unscored_R = torch.rand(num_rollouts, generator=generator) < 0.2
    return Batch(
        feature_NP=torch.randn(num_tokens, NUM_PARAMETERS, generator=generator, dtype=torch.float64),
        noise_N=0.7 * torch.randn(num_tokens, generator=generator, dtype=torch.float64),
        mask_N=torch.rand(num_tokens, generator=generator) < draw(st.sampled_from([0.0, 0.7, 1.0])),
        rollout_N=torch.repeat_interleave(torch.arange(num_rollouts), torch.tensor(lengths)),
        group_R=torch.arange(num_rollouts) // 3,
        reward_R=reward_R.masked_fill(unscored_R, float("nan")),
        multi_step=draw(st.booleans()),
    )


objectives = st.builds(
    lambda **parts: objective("grpo", length=8, **parts),
    advantage=st.sampled_from(ADVANTAGES),
    weight=st.sampled_from(WEIGHTS),
    surrogate=st.sampled_from(SURROGATES),
    reduction=st.sampled_from(REDUCTIONS),
    dual_clip=st.sampled_from([None, 3.0]),
)
theta_P = torch.linspace(-0.5, 0.5, NUM_PARAMETERS, dtype=torch.float64)


def prepared(description: Objective, batch: Batch) -> Tokens:
    given = compose.advantages(description, batch.reward_R, batch.group_R)
    weights = compose.token_weights(
        description, batch.mask_N, batch.rollout_N, batch.group_R, given.usable_R, dtype=torch.float64
    )
    logp_N = batch.logp_N(theta_P)
    return Tokens(
        batch.feature_NP,
        behaviour_N=logp_N + batch.noise_N,
        proximal_N=logp_N - 0.3 * batch.noise_N.flip(0),
        advantage_N=given.advantage_R[batch.rollout_N],
        mask_N=batch.mask_N,
        weight_N=weights.weight_N,
    )


def loss_and_gradient(description: Objective, batch: Batch, micro_batches: list[Tokens]) -> tuple[float, Tensor]:
    parameter_P = theta_P.clone().requires_grad_()
    total = 0.0
    for tokens in micro_batches:
        loss, _ = compose.loss(
            description,
            torch.nn.functional.logsigmoid(tokens.feature_NP @ parameter_P),
            tokens.behaviour_N,
            tokens.proximal_N if batch.multi_step else None,
            tokens.advantage_N,
            tokens.mask_N,
            tokens.weight_N,
        )
        loss.backward()
        total += loss.item()
    assert parameter_P.grad is not None
    return total, parameter_P.grad


@given(batches(), objectives, st.data())
@QUICK
def test_any_partition_into_micro_batches_gives_the_same_gradient(batch, description, data):
    """B01: ranks, micro-batches and packing order only say which tokens are summed together first."""
    tokens = prepared(description, batch)
    num_tokens = len(batch.rollout_N)
    parts = data.draw(st.lists(st.integers(0, 3), min_size=num_tokens, max_size=num_tokens))
    part_N = torch.tensor(parts, dtype=torch.long)
    order_N = torch.tensor(data.draw(st.permutations(range(num_tokens))), dtype=torch.long)
    split = [tokens[order_N][part_N[order_N] == part] for part in range(4)]
    whole_loss, whole_P = loss_and_gradient(description, batch, [tokens])
    split_loss, split_P = loss_and_gradient(description, batch, split)
    assert split_loss == pytest.approx(whole_loss, rel=1e-9, abs=1e-12)
    assert float((split_P - whole_P).norm()) <= 1e-9 * float(whole_P.norm()) + 1e-12


@given(batches(), objectives)
@QUICK
def test_masking_a_token_is_the_same_as_leaving_it_out(batch, description):
    masked_loss, masked_P = loss_and_gradient(description, batch, [prepared(description, batch)])
    keep_N = batch.mask_N
    sliced = prepared(description, batch)[keep_N]
    weights = compose.token_weights(
        description,
        torch.ones(int(keep_N.sum()), dtype=torch.bool),
        batch.rollout_N[keep_N],
        batch.group_R,
        compose.advantages(description, batch.reward_R, batch.group_R).usable_R,
        dtype=torch.float64,
    )
    sliced = replace(sliced, weight_N=weights.weight_N)
    sliced_loss, sliced_P = loss_and_gradient(description, batch, [sliced])
    assert sliced_loss == pytest.approx(masked_loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(sliced_P, masked_P, rtol=1e-9, atol=1e-12)


@given(batches(), objectives, st.sampled_from([float("inf"), -float("inf"), float("nan")]))
@QUICK
def test_inf_and_nan_under_the_mask_change_nothing(batch, description, garbage):
    clean = prepared(description, batch)
    dirty = prepared(description, batch)
    no_data_N = clean.weight_N == 0
    for name in ("behaviour_N", "proximal_N", "advantage_N"):
        getattr(dirty, name)[no_data_N] = garbage

    def gradient(tokens: Tokens, logp_N: Tensor) -> tuple[Tensor, Tensor]:
        logp_N = logp_N.requires_grad_()
        proximal_N = tokens.proximal_N if batch.multi_step else None
        loss, _ = compose.loss(
            description, logp_N, tokens.behaviour_N, proximal_N, tokens.advantage_N, tokens.mask_N, tokens.weight_N
        )
        return loss.detach(), torch.autograd.grad(loss, logp_N)[0]

    clean_logp_N = batch.logp_N(theta_P)
    clean_loss, clean_slope_N = gradient(clean, clean_logp_N.clone())
    dirty_loss, dirty_slope_N = gradient(dirty, clean_logp_N.masked_fill(no_data_N, garbage))
    assert torch.equal(dirty_loss, clean_loss)
    assert torch.equal(dirty_slope_N, clean_slope_N)
    assert not dirty_slope_N[no_data_N].any()


@given(batches(), objectives, st.integers(-100, 100))
@QUICK
def test_a_constant_added_to_the_rewards_of_a_group_changes_nothing(batch, description, shift):
    shifted = replace(batch, reward_R=batch.reward_R + shift * (batch.group_R == 0))
    loss, gradient_P = loss_and_gradient(description, batch, [prepared(description, batch)])
    shifted_loss, shifted_P = loss_and_gradient(description, shifted, [prepared(description, shifted)])
    assert shifted_loss == pytest.approx(loss, rel=1e-9, abs=1e-10)
    torch.testing.assert_close(shifted_P, gradient_P, rtol=1e-9, atol=1e-10)


@given(batches(), st.data())
@QUICK
def test_diagnostics_do_not_depend_on_the_split_or_the_order(batch, data):
    num_tokens = len(batch.rollout_N)
    order_N = torch.tensor(data.draw(st.permutations(range(num_tokens))), dtype=torch.long)
    cut = data.draw(st.integers(0, num_tokens))
    logp_N = batch.logp_N(theta_P)
    columns = (
        logp_N,
        logp_N + batch.noise_N,
        batch.mask_N,
        batch.rollout_N % 3,
        7 * torch.arange(num_tokens),
        torch.where(batch.noise_N > 0.2, 1.0, -1.0),
        -logp_N,
    )
    whole, split = MismatchDiagnostics(cap=2.0), MismatchDiagnostics(cap=2.0)
    whole.add(*columns)
    for part in (order_N[:cut], order_N[cut:]):
        split.add(*(column[part] for column in columns))
    assert split.result() == whole.result()
    assert whole.result()["tokens"] == int(batch.mask_N.sum())


def test_every_name_of_a_part_has_its_part_and_no_other():
    assert (set(compose.ADVANTAGES), set(compose.WEIGHTS)) == (set(ADVANTAGES), set(WEIGHTS))
    assert set(compose.SURROGATES) == set(SURROGATES)
    tokens = {"mask_N": torch.ones(2, dtype=torch.bool), "rollout_N": torch.tensor([0, 1])}
    for name in REDUCTIONS:
        assert compose.token_weights(objective("grpo", reduction=name, length=4), group_R=torch.zeros(2), **tokens)
