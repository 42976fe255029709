"""Named denominators: cases B01, B02 and B06, and values worked by hand."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.objectives.parts import ReductionName
from headway.objectives.reduce import token_weights, weighted_sum

REDUCTIONS = tuple(name for name in get_args(ReductionName) if name != "pair_mean")
"""Those that reduce tokens; a pair's loss is not a sum over its tokens."""


def batch(losses: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Token losses by rollout -> (loss_N, rollout_N)."""
    loss_N = torch.tensor([loss for rollout in losses for loss in rollout], dtype=torch.float64)
    rollout_N = torch.tensor([index for index, rollout in enumerate(losses) for _ in rollout], dtype=torch.long)
    return loss_N, rollout_N


def weights_of(reduction: str, rollout_N: Tensor, num_rollouts: int, mask_N: Tensor | None = None, **options) -> Tensor:
    mask_N = torch.ones(len(rollout_N), dtype=torch.bool) if mask_N is None else mask_N
    group_R = options.pop("group_R", torch.zeros(num_rollouts, dtype=torch.long))
    return token_weights(reduction, mask_N, rollout_N, group_R, dtype=torch.float64, **options)


def reduced(reduction: str, losses: list[list[float]], **options) -> float:
    loss_N, rollout_N = batch(losses)
    return weighted_sum(loss_N, weights_of(reduction, rollout_N, len(losses), **options)).item()


B02 = [[0.5, -0.2, 0.1], [1.0], [-0.4, -0.4, 0.2, 0.2, -0.1, 0.5]]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", 0.14),
        ("rollout_mean_token_mean", 0.377778),
        ("rollout_mean_token_sum", 0.466667),
        ("constant", 0.058333),
    ],
)
def test_b02_named_denominators(reduction, expected):
    assert reduced(reduction, B02, length=8) == pytest.approx(expected, abs=1e-6)


GOLDEN = [[1.0] * 2, [2.0] * 4, [3.0] * 6]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", 28 / 12),
        ("rollout_mean_token_mean", 2),
        ("rollout_mean_token_sum", 28 / 3),
        ("constant", 28 / 30),
        ("prompt_mean", 1.8),
    ],
)
def test_golden_vector(reduction, expected):
    value = reduced(reduction, GOLDEN, length=10, group_R=torch.tensor([5, 2, 2]))
    assert value == pytest.approx(expected, abs=1e-12)


def test_b01a_unbalanced_micro_batches():
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    advantage_N = torch.tensor([1.0] * 2 + [-0.5] * 8, dtype=torch.float64)
    rollout_N = torch.tensor([0] * 2 + [1] * 8)
    weight_N = weights_of("token_mean", rollout_N, 2)
    total = 0.0
    for micro_batch in (slice(0, 2), slice(2, 10)):
        logp_N = torch.nn.functional.logsigmoid(theta).expand(10)[micro_batch]
        loss_N = -(logp_N - logp_N.detach()).exp() * advantage_N[micro_batch]
        loss = weighted_sum(loss_N, weight_N[micro_batch])
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(0.2, abs=1e-12)
    assert theta.grad is not None
    assert theta.grad.item() == pytest.approx(0.1, abs=1e-12)


def test_b01b_unbalanced_ranks():
    loss_N = torch.tensor([0.5] * 7 + [-1.0] * 3, dtype=torch.float64)
    weight_N = weights_of("token_mean", torch.tensor([0] * 7 + [1] * 3), 2)
    of_rank = [weighted_sum(loss_N[rank], weight_N[rank]).item() for rank in (slice(0, 7), slice(7, 10))]
    assert sum(of_rank) == pytest.approx(0.05, abs=1e-12)
    # Under a reduction that averages the ranks, each multiplies by their number.
    averaged = [2 * loss for loss in of_rank]
    assert averaged == pytest.approx([0.7, -0.6], abs=1e-12)
    assert sum(averaged) / 2 == pytest.approx(0.05, abs=1e-12)


B06 = [[0.6] * 3, [0.6] * 5]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", 0.6),
        ("rollout_mean_token_mean", 0.6),
        ("rollout_mean_token_sum", 1.8),
        ("constant", 0.18),
        ("prompt_mean", 0.6),
    ],
)
def test_b06_a_masked_rollout_leaves_numerator_and_denominator(reduction, expected):
    mask_N = torch.tensor([True] * 3 + [False] * 5)
    by_mask = reduced(reduction, B06, mask_N=mask_N, length=10)
    by_rollout = reduced(reduction, B06, usable_R=torch.tensor([True, False]), length=10)
    assert by_mask == by_rollout == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_b06_everything_masked_gives_zero(reduction):
    loss_N, rollout_N = batch(B06)
    loss_N.requires_grad_()
    weight_N = weights_of(reduction, rollout_N, 2, mask_N=torch.zeros(8, dtype=torch.bool), length=10)
    loss = weighted_sum(loss_N, weight_N)
    loss.backward()
    assert weight_N.tolist() == [0.0] * 8
    assert loss.item() == 0.0
    assert loss_N.grad is not None
    assert loss_N.grad.tolist() == [0.0] * 8


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_b06_an_empty_answer_contributes_to_neither_sums_nor_counts(reduction):
    group_R = torch.tensor([0, 1, 2, 2])
    with_empty = reduced(reduction, [B02[0], [], B02[1], B02[2]], length=8, group_R=group_R)
    without = reduced(reduction, B02, length=8, group_R=group_R[[0, 2, 3]])
    assert with_empty == without


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_batch_without_tokens(reduction):
    weight_N = weights_of(reduction, torch.zeros(0, dtype=torch.long), 2, length=8)
    assert weighted_sum(torch.zeros(0), weight_N).item() == 0.0


@pytest.mark.parametrize("reduction", ["token_mean", "rollout_mean_token_mean", "prompt_mean"])
def test_a_mean_of_equal_losses_is_that_loss(reduction):
    mask_N = torch.tensor([True, False, True, True, True, True, True, False, True, True])
    _, rollout_N = batch(B02)
    weight_N = weights_of(reduction, rollout_N, 3, mask_N=mask_N, group_R=torch.tensor([1, 0, 1]))
    assert weight_N.sum().item() == pytest.approx(1, abs=1e-12)
    assert (weight_N > 0).tolist() == mask_N.tolist()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_masking_a_token_is_the_same_as_leaving_it_out(reduction):
    loss_N, rollout_N = batch(B02)
    mask_N = torch.tensor([True, False, True, False, True, True, False, True, True, True])
    group_R = torch.tensor([0, 0, 1])
    masked = weights_of(reduction, rollout_N, 3, mask_N=mask_N, group_R=group_R, length=8)
    sliced = weights_of(reduction, rollout_N[mask_N], 3, group_R=group_R, length=8)
    assert torch.equal(masked[mask_N], sliced)
    assert weighted_sum(loss_N, masked).item() == pytest.approx(weighted_sum(loss_N[mask_N], sliced).item(), abs=1e-15)


@pytest.mark.parametrize("length", [None, 0])
def test_constant_needs_a_length(length):
    with pytest.raises(ValueError, match="length"):
        reduced("constant", B02, length=length)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="mean_of_means"):
        reduced("mean_of_means", B02)


def test_every_named_reduction_exists():
    for reduction in get_args(ReductionName):
        assert reduced(reduction, B02, length=8) != 0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_b02_a_longer_answer_elsewhere_moves_no_width(reduction):
    """A divisor that is the padded width would change when a longer answer joins the batch: here all are masked."""
    joined = [*B02, [9.0] * 50]
    mask_N = torch.tensor([True] * 10 + [False] * 50)
    group_R = torch.tensor([0, 0, 1, 1])
    alone = reduced(reduction, B02, length=8, group_R=group_R[:3])
    assert reduced(reduction, joined, length=8, group_R=group_R, mask_N=mask_N) == pytest.approx(alone, abs=1e-15)


def test_pair_mean_by_hand():
    """Three groups: a pair, a pair whose answers are masked, and rollouts in no pair. One pair is left: 1 each."""
    rollout_N = torch.tensor([0, 0, 1, 2, 3, 4])
    weight_N = weights_of(
        "pair_mean",
        rollout_N,
        5,
        mask_N=torch.tensor([True, False, True, False, False, True]),
        group_R=torch.tensor([0, 0, 1, 1, 2]),
        usable_R=torch.tensor([True, True, True, True, False]),
    )
    assert weight_N.tolist() == [1, 0, 1, 0, 0, 0]
    both = weights_of("pair_mean", rollout_N[:5], 4, group_R=torch.tensor([7, 7, 3, 3]))
    assert both.tolist() == [0.5] * 5


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(0, 2**31), st.sampled_from(REDUCTIONS))
@settings(max_examples=60, deadline=None)
def test_denominators_are_counted_over_what_is_data(lengths, seed, reduction):
    """Each reduction as its formula says it, written out with loops."""
    generator = torch.Generator().manual_seed(seed)
    num_rollouts = len(lengths)
    rollout_N = torch.repeat_interleave(torch.arange(num_rollouts), torch.tensor(lengths))
    mask_N = torch.rand(len(rollout_N), generator=generator) < 0.6
    group_R = torch.randint(0, 3, (num_rollouts,), generator=generator)
    usable_R = torch.rand(num_rollouts, generator=generator) < 0.8
    loss_N = torch.randn(len(rollout_N), generator=generator, dtype=torch.float64)
    data = [n for n in range(len(rollout_N)) if mask_N[n] and usable_R[rollout_N[n]]]
    weight_N = weights_of(
        reduction, rollout_N, num_rollouts, mask_N=mask_N, group_R=group_R, usable_R=usable_R, length=5
    )
    rollout_of, group_of = rollout_N.tolist(), group_R[rollout_N].tolist()
    by_rollout = [[float(loss_N[n]) for n in data if rollout_of[n] == rollout] for rollout in range(num_rollouts)]
    by_group = [[float(loss_N[n]) for n in data if group_of[n] == group] for group in range(3)]
    written_out = {
        "token_mean": lambda: mean([loss for rollout in by_rollout for loss in rollout]),
        "rollout_mean_token_mean": lambda: mean([mean(rollout) for rollout in by_rollout if rollout]),
        "rollout_mean_token_sum": lambda: mean([sum(rollout) for rollout in by_rollout if rollout]),
        "constant": lambda: mean([sum(rollout) / 5 for rollout in by_rollout if rollout]),
        "prompt_mean": lambda: mean([mean(group) for group in by_group if group]),
    }
    assert weighted_sum(loss_N, weight_N).item() == pytest.approx(written_out[reduction](), abs=1e-12)


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def test_weights_are_float32_unless_asked():
    weight_N = token_weights(
        "token_mean", torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long), torch.zeros(1)
    )
    assert weight_N.dtype == torch.float32
