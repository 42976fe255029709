"""Properties of whole objectives: how a batch is split, masked, packed, ordered and polluted changes nothing.

Every property is tried on every named objective, every correction and every part (`batches.SUBJECTS`), from the rewards
on. Ranks are micro-batches as far as the arithmetic goes: their sums are added.

What this does not cover: float32 rounding, which a split may change in the last bits (all but the test of dtypes is
float64), and the forward pass, so that packing is a layout of tokens here and not of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.objectives import compose
from headway.objectives.named import PRESETS
from headway.objectives.parts import Objective, PolicyRatio, Preference, ReferenceKL, Term
from headway.objectives.tokens import Tokens
from headway.objectives.weights import rollout_sum
from tests.objectives.batches import (
    MAX_ROLLOUTS,
    POLICIES,
    SUBJECTS,
    Batch,
    Outcome,
    at_tokens,
    aux_columns,
    batches,
    credited,
    data_of,
    outcome,
    outcome_of,
    permuted,
    preset,
    random_batch,
    selected,
    take,
    tokens_of,
)

QUICK = settings(max_examples=5, deadline=None)
garbage_values = st.sampled_from([torch.inf, -torch.inf, torch.nan, 1e30])


def on_every_subject(check: Callable[..., None]) -> Callable[..., None]:
    """A check of one description -> of all of them on one batch, with the name of the one that fails."""

    def run(**drawn) -> None:
        for name, description in SUBJECTS.items():
            try:
                check(description, **drawn)
            except Exception as error:
                error.add_note(f"objective: {name}")
                raise

    run.__name__, run.__doc__ = check.__name__, check.__doc__
    return run


def assert_same(got: Outcome, wanted: Outcome, from_N: Tensor | None = None) -> None:
    """got's token n is wanted's token from_N[n]; loss, slopes and all that is told of tokens agree to rounding."""
    place_N = torch.arange(len(wanted.slope_N)) if from_N is None else from_N
    assert float(got.loss) == pytest.approx(float(wanted.loss), rel=1e-9, abs=1e-12)
    assert _close(got.slope_N, wanted.slope_N[place_N])
    assert _close(got.value_slope_N, wanted.value_slope_N[place_N])
    told = aux_columns(wanted.aux)
    for name, column_N in aux_columns(got.aux).items():
        assert _close(column_N, told[name][place_N]), name


def _close(got_N: Tensor, wanted_N: Tensor) -> bool:
    return torch.allclose(got_N, wanted_N, rtol=1e-9, atol=1e-12)


# ---- what is no data


@given(batch=batches(noise=30.0))
@QUICK
@on_every_subject
def test_loss_and_gradient_are_finite_and_zero_where_nothing_is_data(description, batch):
    """Ratios up to e^20 both ways, answers without tokens, groups of one, missing rewards, batches without data."""
    tokens = tokens_of(description, batch)
    result = outcome(description, tokens, batch.current_N, batch.new_value_N)
    no_data_N = ~data_of(tokens)
    assert result.loss.isfinite()
    for slope_N in (result.slope_N, result.value_slope_N):
        assert slope_N.isfinite().all()
        assert not slope_N[no_data_N].any()
    if no_data_N.all():
        assert result.loss == 0


@given(batch=batches(), garbage=garbage_values)
@QUICK
@on_every_subject
def test_garbage_where_nothing_is_data_changes_nothing(description, batch, garbage):
    no_data_N = ~data_of(tokens_of(description, batch))
    dirty = replace(batch, **{name: getattr(batch, name).masked_fill(no_data_N, garbage) for name in POLICIES})
    clean_result, result = outcome_of(description, batch), outcome_of(description, dirty)
    assert torch.equal(result.loss, clean_result.loss)
    assert torch.equal(result.slope_N, clean_result.slope_N)
    assert torch.equal(result.value_slope_N, clean_result.value_slope_N)
    for name, column_N in aux_columns(result.aux).items():
        assert torch.equal(column_N, aux_columns(clean_result.aux)[name]), name


@given(batch=batches())
@QUICK
@on_every_subject
def test_what_is_told_of_tokens_that_are_no_data_is_neutral(description, batch):
    tokens = tokens_of(description, batch)
    aux = outcome(description, tokens, batch.current_N, batch.new_value_N).aux
    no_data_N = ~data_of(tokens)
    for ratio_N in (aux.ratio_N, aux.importance_N, aux.rho_N):
        assert (ratio_N[no_data_N] == 1).all()
    assert not aux.loss_N[no_data_N].any()
    assert not any(acts_N[no_data_N].any() for acts_N in aux.acted.values())
    assert not any(column_N.requires_grad for column_N in aux_columns(aux).values())


@given(batch=batches(), garbage=garbage_values)
@QUICK
def test_garbage_where_nothing_is_data_does_not_reach_the_metrics(batch, garbage):
    description = preset("rloo")
    no_data_N = ~data_of(tokens_of(description, batch))
    dirty = replace(batch, **{name: getattr(batch, name).masked_fill(no_data_N, garbage) for name in POLICIES})
    selection = selected(description, batch)
    assert credited(description, dirty, selection).metrics == credited(description, batch, selection).metrics


# ---- what is data


def _read_by(description: Objective) -> set[str]:
    """The log-probs (and values) that a loss is a function of."""
    ratios = [ratio for term in description.terms for ratio in term.ratios]
    corrected = any(isinstance(t.loss, ReferenceKL) and "corrected" in t.loss.estimator for t in description.terms)
    interpolated = description.proximal == "interpolated"
    recomputed = description.reward_kl > 0 or description.self_normalise or not interpolated
    uses = {
        "current_N": True,
        "proximal_N": recomputed and (description.reward_kl > 0 or any("proximal" in (r.new, r.old) for r in ratios)),
        "behaviour_N": corrected or interpolated or any(ratio.old == "behaviour" for ratio in ratios),
        "reference_N": description.needs_reference,
        "value_N": description.needs_critic,
    }
    return {name for name, is_used in uses.items() if is_used}


@given(batch=batches(), pick=st.integers(0, 100))
@QUICK
@on_every_subject
def test_a_nan_of_a_token_that_is_data_is_passed_on(description, batch, pick):
    """Not by a comparison that is false for nan, nor by a baseline that takes it for a missing reward."""
    places = torch.nonzero(data_of(tokens_of(description, batch)))[:, 0].tolist()
    place = places[pick % len(places)] if places else 0
    for name in sorted(_read_by(description)) if places else ():
        spoilt_N = getattr(batch, name).clone()
        spoilt_N[place] = torch.nan
        assert outcome_of(description, replace(batch, **{name: spoilt_N})).loss.isnan(), name


@given(
    batch=batches(noise=0.5),
    garbage=garbage_values,
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
@QUICK
@on_every_subject
def test_log_probs_of_any_dtype_are_subtracted_in_float32_or_better(description, dtype, batch, garbage):
    """The same numbers, exactly, in float64 give the same loss but for float32's rounding; slopes have the input's."""
    data_N = data_of(tokens_of(description, batch))
    log_probs = [name for name in POLICIES if "value" not in name]
    dirty = {name: getattr(batch, name).masked_fill(~data_N, garbage) for name in log_probs}
    rounded = {name: value.to(dtype) for name, value in dirty.items()}
    batch = replace(batch, **{name: value.double() for name, value in rounded.items()})
    tokens = tokens_of(description, batch)
    exact = outcome(description, tokens, batch.current_N, batch.new_value_N)
    stored = {"behaviour_N": tokens.behaviour_N.float(), "advantage_N": tokens.advantage_N.float()}
    stored |= {name: rounded[name] for name in ("proximal_N", "reference_N")}
    mixed = replace(tokens, **stored, weights=tuple(weight_N.float() for weight_N in tokens.weights))
    result = outcome(description, mixed, rounded["current_N"], batch.new_value_N)
    assert result.slope_N.dtype == dtype
    assert not result.slope_N[~data_N].any()
    torch.testing.assert_close(result.loss.double(), exact.loss, rtol=1e-5, atol=1e-5 * _size(exact, tokens))
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    largest = float(exact.slope_N.abs().max()) if len(data_N) else 0.0
    torch.testing.assert_close(result.slope_N.double(), exact.slope_N, rtol=tolerance, atol=tolerance * largest + 1e-9)


def _size(result: Outcome, tokens: Tokens) -> float:
    """Of the terms of the loss, which may cancel each other."""
    return float(1 + sum((result.aux.loss_N * weight_N).abs().sum() for weight_N in tokens.weights))


# ---- layouts


@given(batch=batches())
@QUICK
@on_every_subject
def test_masking_tokens_is_the_same_as_leaving_them_out(description, batch):
    kept_N = torch.nonzero(batch.mask_N)[:, 0]
    assert_same(outcome_of(description, at_tokens(batch, kept_N)), outcome_of(description, batch), kept_N)


@given(batches_padded=st.tuples(batches(), garbage_values).map(lambda drawn: (drawn[0], *_padded(*drawn))))
@QUICK
@on_every_subject
def test_a_padded_layout_is_the_same_as_a_packed_one(description, batches_padded):
    """[R, L], flattened row by row: the padding is masked, its rollout is that of its row."""
    batch, padded, from_N = batches_padded
    packed_result, result = outcome_of(description, batch), outcome_of(description, padded)
    real_N = torch.nonzero(from_N >= 0)[:, 0]
    assert not result.slope_N[from_N < 0].any()
    cut = replace(
        result,
        slope_N=result.slope_N[real_N],
        value_slope_N=result.value_slope_N[real_N],
        aux=_aux_at(result, real_N),
    )
    assert_same(cut, packed_result, from_N[real_N])


def _padded(batch: Batch, garbage: float) -> tuple[Batch, Tensor]:
    """The batch as [R, L], flattened, and from where each of its tokens has come (-1: it is padding)."""
    longest = int(batch.num_tokens_R.max())
    starts_R = batch.num_tokens_R.cumsum(0) - batch.num_tokens_R
    place_RL = torch.arange(longest).expand(batch.num_rollouts, longest)
    real_N = (place_RL < batch.num_tokens_R[:, None]).flatten()
    from_N = torch.where(real_N, (starts_R[:, None] + place_RL).flatten(), -1)
    if not len(batch.rollout_N):
        return batch, from_N
    padded = at_tokens(batch, from_N.clamp(min=0))
    policies = {name: getattr(padded, name).masked_fill(~real_N, garbage) for name in POLICIES}
    rollout_N = torch.arange(batch.num_rollouts).repeat_interleave(longest)
    return replace(padded, **policies, mask_N=padded.mask_N & real_N, rollout_N=rollout_N), from_N


def _aux_at(result: Outcome, index_N: Tensor):
    columns = {name: value[index_N] for name, value in vars(result.aux).items() if isinstance(value, Tensor)}
    return replace(result.aux, **columns, acted={name: acts_N[index_N] for name, acts_N in result.aux.acted.items()})


@given(
    batch=batches(),
    part_of_unit=st.lists(st.integers(0, 3), min_size=MAX_ROLLOUTS, max_size=MAX_ROLLOUTS),
    order=st.permutations(range(4)),
)
@QUICK
@on_every_subject
def test_any_split_gives_the_same_loss_and_gradient(description, batch, part_of_unit, order):
    """B01: ranks, micro-batches and their order only say which tokens are summed together first."""
    tokens = tokens_of(description, batch)
    whole = outcome(description, tokens, batch.current_N, batch.new_value_N)
    unit_N = tokens.group_N if description.level == "pair" else tokens.rollout_N
    part_N = torch.tensor(part_of_unit)[unit_N]
    splits = [torch.nonzero(part_N == part)[:, 0] for part in order]
    normaliser = compose.normaliser(description, [take(tokens, index_N) for index_N in splits])
    assert normaliser == (None if tokens.normaliser is None else pytest.approx(tokens.normaliser, rel=1e-12))
    loss = torch.zeros((), dtype=torch.float64)
    for index_N in splits:
        own = outcome(
            description,
            replace(take(tokens, index_N), normaliser=normaliser),
            batch.current_N[index_N],
            batch.new_value_N[index_N],
        )
        loss += own.loss
        assert_same(replace(own, loss=whole.loss), whole, index_N)
    torch.testing.assert_close(loss, whole.loss, rtol=1e-9, atol=1e-12)


@given(batches_moved=st.tuples(batches(), st.randoms(use_true_random=False)).map(lambda drawn: _moved(*drawn)))
@QUICK
@on_every_subject
def test_the_order_of_rollouts_changes_nothing(description, batches_moved):
    batch, moved, from_N = batches_moved
    assert_same(outcome_of(description, moved), outcome_of(description, batch), from_N)


def _moved(batch: Batch, random: Random) -> tuple[Batch, Batch, Tensor]:
    """The batch, the same in another order, and from where each token has come.

    Rewards are set apart, since of equally good answers the first is taken for a pair.
    """
    batch = replace(batch, outcome_R=batch.outcome_R + 1e-3 * torch.arange(batch.num_rollouts))
    order_R = torch.tensor(random.sample(range(batch.num_rollouts), batch.num_rollouts))
    return batch, *permuted(batch, order_R)


def test_a_split_by_token_would_change_an_objective_whose_level_is_the_rollout():
    """The property above is not empty: GSPO's ratio is one of whole answers."""
    batch = _plain_batch()
    description = preset("gspo", clip_low=0.9, clip_high=9.0)
    tokens = tokens_of(description, batch)
    assert description.level == "rollout"
    whole = outcome(description, tokens, batch.current_N, batch.new_value_N).loss
    by_token = [torch.tensor([place]) for place in range(len(batch.rollout_N))]
    total = sum(outcome(description, take(tokens, n), batch.current_N[n], batch.new_value_N[n]).loss for n in by_token)
    assert abs(float(total - whole)) > 1e-3


def _plain_batch() -> Batch:
    """Two groups of two, three tokens each, all scored and trained."""
    batch = random_batch([3, 3, 3, 3], torch.tensor([0, 0, 1, 1]), seed=1, share_masked=0.0)
    return replace(batch, outcome_R=torch.tensor([1.0, 0.0, 0.25, 0.75], dtype=torch.float64))


# ---- rewards

GROUP, BATCH, NO = "group", "batch", "no"

# What does not notice a constant added to the rewards of one group, or of the whole batch; and whether rewards may be
# multiplied by a positive number. A baseline of the group takes out what a group has in common, one of the batch (or
# whitening over it, where gamma = 1 gives the constant to every token) what all have; a critic's values stay behind.
# The std of a group or batch, whitening and "best against worst" have no scale; a KL in the reward gives it one.
INVARIANT = {
    "reinforce": (BATCH, False),
    "rloo": (GROUP, False),
    "reinforce_pp": (BATCH, False),
    "reinforce_pp_baseline": (GROUP, True),
    "grpo": (GROUP, True),
    "dr_grpo": (GROUP, False),
    "dapo": (GROUP, False),  # the penalty of long answers is in the reward's units
    "gspo": (GROUP, True),
    "gspo_token": (GROUP, True),
    "cispo": (GROUP, True),
    "ppo": (NO, False),
    "decoupled_ppo": (BATCH, True),
    "olmo3": (GROUP, False),
    "minirl": (GROUP, False),
    "icepop": (GROUP, True),
    "glm5_async": (GROUP, True),
    "kimi_k25": (GROUP, False),
    "scalerl": (GROUP, True),
    "online_dpo": (GROUP, True),
}


def test_every_preset_says_what_it_does_not_notice():
    assert set(INVARIANT) == set(PRESETS)


def _changes(description: Objective, batch: Batch, change: Callable[[Tensor], Tensor]) -> bool:
    before, after = (outcome_of(description, one) for one in (batch, replace(batch, outcome_R=change(batch.outcome_R))))
    return not torch.allclose(before.slope_N, after.slope_N, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", INVARIANT)
@given(batch=batches(), shift=st.integers(-20, 20))
@QUICK
def test_a_constant_added_to_rewards_is_not_noticed(name, batch, shift):
    centred, _ = INVARIANT[name]
    group_R = batch.group_R == 0
    if centred == GROUP:
        assert not _changes(preset(name), batch, lambda reward_R: reward_R + shift * group_R)
    if centred in (GROUP, BATCH):
        assert not _changes(preset(name), batch, lambda reward_R: reward_R + shift)


@pytest.mark.parametrize("name", [name for name, (_, free_of_scale) in INVARIANT.items() if free_of_scale])
@given(batch=batches(), factor=st.floats(0.5, 100))
@QUICK
def test_a_scale_of_rewards_is_not_noticed(name, batch, factor):
    assert not _changes(preset(name), batch, lambda reward_R: factor * reward_R)


@pytest.mark.parametrize("name", INVARIANT)
def test_what_is_said_to_be_noticed_is_noticed(name):
    centred, free_of_scale = INVARIANT[name]
    batch, description = _plain_batch(), preset(name)
    if name == "dapo":
        batch = replace(batch, num_tokens_R=torch.tensor([6, 3, 3, 6]))
    assert _changes(description, batch, lambda reward_R: reward_R + 3 * (batch.group_R == 0)) == (centred != GROUP)
    assert _changes(description, batch, lambda reward_R: reward_R + 3) == (centred == NO)
    assert _changes(description, batch, lambda reward_R: 3 * reward_R) == (not free_of_scale)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.05, 0.7])
@pytest.mark.parametrize("name", [name for name, (centred, _) in INVARIANT.items() if centred != NO])
def test_equal_rewards_say_nothing_at_all(name, reward):
    """Exactly 0, not rounding noise divided by a std of rounding noise."""
    description = preset(name, reward_kl=0) if name in ("rloo", "reinforce_pp") else preset(name)
    batch = replace(_plain_batch(), outcome_R=torch.full((4,), reward, dtype=torch.float64))
    credit = credited(description, batch, selected(description, batch))
    assert credit.advantage_M.tolist() == [0.0] * 12


# ---- ratio 1


@given(batch=batches())
@QUICK
@on_every_subject
def test_at_equal_policies_every_ratio_is_one_and_nothing_acts(description, batch):
    """pi = pi_prox = mu, as in every round of a run with learning rate 0."""
    same = replace(batch, proximal_N=batch.current_N, behaviour_N=batch.current_N)
    tokens = tokens_of(description, same)
    result = outcome(description, tokens, same.current_N, same.new_value_N)
    aux = result.aux
    for name, ratio_N in (("ratio", aux.ratio_N), ("importance", aux.importance_N), ("rho", aux.rho_N)):
        assert (ratio_N == 1).all(), name
    assert not any(acts_N.any() for acts_N in aux.acted.values())
    assert tokens.normaliser is None or tokens.normaliser == pytest.approx((1.0,) * len(description.terms))
    torch.testing.assert_close(result.slope_N, _reinforce_slope(description, tokens, same), rtol=1e-9, atol=1e-12)


def _reinforce_slope(description: Objective, tokens: Tokens, batch: Batch) -> Tensor:
    """Every policy term is REINFORCE at ratio 1, -A grad log pi; terms of the reference keep their own slope."""
    slope_N = torch.zeros_like(batch.current_N)
    for place, term in enumerate(description.terms):
        reduction_N = tokens.weights[place]
        if term.uses_advantage:
            plain_N = torch.where(data_of(tokens), -tokens.advantage_N * reduction_N, 0.0)
            # A product of ratios stands in the loss of each of its tokens: its slope comes once from every one of them.
            whole_N = torch.where(data_of(tokens), rollout_sum(plain_N, tokens.rollout_N), 0.0)
            slope_N += whole_N if _is_product(term) else plain_N
        elif isinstance(term.loss, ReferenceKL | Preference):
            one = replace(tokens, weights=(reduction_N,), normaliser=None)
            slope_N += outcome(replace(description, terms=(term,)), one, batch.current_N, batch.new_value_N).slope_N
    return slope_N


def _is_product(term: Term) -> bool:
    return isinstance(term.loss, PolicyRatio) and term.loss.ratio.level == "sequence"


# ---- self-normalisation


@pytest.mark.parametrize("name", ["olmo3", "minirl", "icepop", "glm5_async", "scalerl"])
@given(batch=batches(noise=0.5))
@QUICK
def test_self_normalised_weights_have_the_mean_one(name, batch):
    """In the sense of the objective's own reduction: by rollouts where it is a mean over rollouts, and so on."""
    batch = replace(batch, current_N=batch.proximal_N)  # as it is at the first optimizer step
    description = preset(name, self_normalise=True)
    tokens = tokens_of(description, batch)
    plain = outcome(preset(name), replace(tokens, normaliser=None), batch.current_N, batch.new_value_N)
    result = outcome(description, tokens, batch.current_N, batch.new_value_N)
    (weight_N,), (normaliser,) = tokens.weights, tokens.normaliser
    total = float(weight_N.sum())
    assume(float((plain.aux.importance_N * weight_N).sum()) > 0)
    assert normaliser == pytest.approx(float((plain.aux.importance_N * weight_N).sum()) / total)
    assert float((result.aux.importance_N * weight_N).sum()) / total == pytest.approx(1)
    torch.testing.assert_close(result.slope_N, plain.slope_N / normaliser)


def test_self_normalisation_by_hand():
    """Two answers, w = 1 and 2 of the first's tokens, 3 of the second's only one.

    By tokens the mean is (1 + 2 + 3) / 3 = 2; by rollouts it is (1.5 + 3) / 2 = 2.25.
    """
    batch = random_batch([2, 1], torch.tensor([0, 0]), seed=0, share_masked=0.0)
    w_N = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    batch = replace(
        batch,
        outcome_R=torch.tensor([1.0, 0.0], dtype=torch.float64),
        current_N=batch.proximal_N,
        behaviour_N=batch.proximal_N - w_N.log(),
    )
    for reduction, mean in (("token_mean", 2.0), ("rollout_mean_token_mean", 2.25)):
        description = preset("olmo3", self_normalise=True, reduction=reduction)
        description = replace(description, terms=preset("dr_grpo", reduction=reduction, corrections=["is"]).terms)
        assert tokens_of(description, batch).normaliser == (pytest.approx(mean),)


def test_self_normalisation_sees_the_interpolated_policy():
    """mu = 0, pi_prox = 1 and a lag of 1: halfway, w = e^(1/2), not e."""
    batch = random_batch([2, 2], torch.tensor([0, 0]), seed=0, share_masked=0.0)
    batch = replace(
        batch,
        outcome_R=torch.tensor([1.0, 0.0], dtype=torch.float64),
        proximal_N=torch.ones(4, dtype=torch.float64),
        behaviour_N=torch.zeros(4, dtype=torch.float64),
        lag_N=torch.ones(4, dtype=torch.long),
    )
    guessed = preset("decoupled_ppo", self_normalise=True, proximal="interpolated")
    assert tokens_of(guessed, batch).normaliser == (pytest.approx(math.exp(0.5)),)
    assert tokens_of(replace(guessed, proximal="recomputed"), batch).normaliser == (pytest.approx(math.e),)


def test_weights_that_are_all_masked_are_not_divided_by_their_mean():
    batch = replace(_plain_batch(), behaviour_N=_plain_batch().current_N - 9, proximal_N=_plain_batch().current_N)
    description = preset("icepop", self_normalise=True)
    assert tokens_of(description, batch).normaliser == (1.0,)
    result = outcome_of(description, batch)
    assert result.loss == 0
    assert not result.slope_N.any()
