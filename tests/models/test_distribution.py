"""The one distribution: cases B09 and B17, and every path to a log-prob against the definition.

Truncation and penalty are compared with the logits processors of `transformers`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from headway.models import distribution
from headway.models.distribution import (
    PIECE,
    Conditions,
    Drawn,
    Head,
    Shape,
    Spread,
    Truncation,
    logprobs,
    sample,
    token_logprobs,
)
from headway.models.policy import Policy, in_dtype
from headway.models.products import USES_ONEDNN
from tests import tiny
from tests.tiny import make_policy, random_ids

B09_LOGITS = torch.tensor([2.0, 1.0, 0.0])
B09 = torch.tensor([-0.142932, -2.142932, -4.142932])
"""Log-probs of [2, 1, 0] at temperature 0.5. At temperature 1 they would be -0.407606, -1.407606, -2.407606."""

JUST_BELOW_1 = 1.0 - 2.0**-53


def head_of(logits_V: torch.Tensor, **transform: Any) -> Head:
    """A head that gives these logits for the hidden state [1]."""
    return Head(logits_V[:, None].clone(), **transform)


def identity(logits_NV: torch.Tensor) -> tuple[Head, torch.Tensor]:
    """A head and hidden states that give these logits."""
    return Head(torch.eye(logits_NV.shape[1])), logits_NV


def ones(num_rows: int) -> torch.Tensor:
    return torch.ones(num_rows, 1)


def double(uniforms: Sequence[float]) -> torch.Tensor:
    return torch.tensor(uniforms, dtype=torch.float64)


def drawn(logits_V: torch.Tensor, uniforms: Sequence[float], temperature: float = 1.0, **truncation: Any) -> Drawn:
    num_rows = len(uniforms)
    truncations = [Truncation(**truncation)] * num_rows
    return sample(head_of(logits_V), ones(num_rows), double(uniforms), [Shape(temperature)] * num_rows, truncations)


def middles(num: int) -> list[float]:
    """The middles of `num` equal parts of [0, 1)."""
    return [(part + 0.5) / num for part in range(num)]


def random_case(rows: int = 7, size: int = 5, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random_numbers = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(rows, size, generator=random_numbers)
    weight_VD = torch.randn(vocabulary, size, generator=random_numbers)
    return hidden_ND, weight_VD, torch.randint(vocabulary, (rows,), generator=random_numbers)


# ---- B09: one temperature on every path


def test_b09_the_whole_distribution():
    torch.testing.assert_close(logprobs(head_of(B09_LOGITS), ones(1), 0.5)[0], B09, atol=1e-5, rtol=0)


def test_b09_the_trainers_path():
    logp_N, _ = token_logprobs(head_of(B09_LOGITS), ones(3), torch.arange(3), Shape(0.5))
    torch.testing.assert_close(logp_N, B09, atol=1e-5, rtol=0)


def test_b09_the_samplers_path():
    answer = drawn(B09_LOGITS, [0.0, 0.9, 0.99], temperature=0.5)
    assert answer.tokens == [0, 1, 2]
    assert answer.logprobs == pytest.approx(B09.tolist(), abs=1e-5)


def test_b09_the_entropy_is_of_the_same_temperature():
    _, entropy_N = token_logprobs(head_of(B09_LOGITS), ones(1), torch.tensor([0]), Shape(0.5))
    assert entropy_N.item() == pytest.approx(-(B09.exp() * B09).sum().item(), abs=1e-5)


def test_b09_ratios_are_1():
    answer = drawn(B09_LOGITS, middles(64), temperature=0.5)
    assert set(answer.tokens) == {0, 1, 2}
    trained_N, _ = token_logprobs(head_of(B09_LOGITS), ones(64), torch.tensor(answer.tokens), Shape(0.5))
    assert trained_N.tolist() == answer.logprobs


def test_temperature_0_is_greedy_and_divides_by_nothing():
    answer = drawn(torch.tensor([0.0, 3.0, 2.9]), [0.0, 0.5, JUST_BELOW_1], temperature=0.0)
    assert answer == Drawn([1, 1, 1], [0.0, 0.0, 0.0], [None, None, None])


def test_greedy_and_sampled_rows_stand_side_by_side():
    shapes = [Shape(temperature) for temperature in (0.0, 0.5, 0.0, 1.0)]
    answer = sample(head_of(B09_LOGITS), ones(4), double([0.999] * 4), shapes)
    assert answer.tokens == [0, 2, 0, 2]
    assert answer.logprobs == pytest.approx([0.0, -4.142932, 0.0, -2.407606], abs=1e-5)


# ---- B17: precision


def test_b17b_logits_are_float32_under_autocast():
    """In bfloat16 both logits would be 20 and the log-prob -0.693147."""
    head, hidden_ND = head_of(torch.tensor([20.0, 19.95])), torch.ones(1, 1, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head.logits(hidden_ND).dtype == torch.float32
        logp_N, _ = token_logprobs(head, hidden_ND, torch.tensor([0]), Shape())
        answer = sample(head, hidden_ND, double([0.0]), [Shape()])
    assert logp_N.item() == pytest.approx(-0.668460, abs=1e-5)
    assert answer.logprobs == pytest.approx([-0.668460], abs=1e-5)


@torch.no_grad()
def test_b17_logits_of_a_bfloat16_policy_are_float32_products(policy: Policy):
    half = in_dtype(policy, torch.bfloat16)
    hidden_ND = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert half.head.weight_VD.dtype == torch.bfloat16
    exact_NV = hidden_ND.double() @ half.head.weight_VD.double().T
    torch.testing.assert_close(half.head.logits(hidden_ND), exact_NV.float(), atol=1e-5, rtol=1e-5)


def test_b17d_an_update_in_place_changes_the_next_logits(policy: Policy):
    hidden_ND = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    before = policy.head.logits(hidden_ND)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(2.0)
    torch.testing.assert_close(policy.head.logits(hidden_ND), 2 * before)


# ---- the architecture's own transform


@pytest.mark.parametrize(
    ("architecture", "settings", "head"),
    [
        ("llama", {}, {"scale": 1.0, "softcap": None}),
        ("cohere", {}, {"scale": 0.0625, "softcap": None}),
        ("granite", {}, {"scale": 0.125, "softcap": None}),
        ("gemma2", {"attn_logit_softcapping": None}, {"scale": 1.0, "softcap": 3.0}),
    ],
)
@torch.no_grad()
def test_logits_are_the_models_own(architecture, settings, head):
    policy = make_policy(architecture, **settings)
    assert {"scale": policy.head.scale, "softcap": policy.head.softcap} == head
    ids_T = random_ids(12)
    (hidden_TD,) = tiny.packed_hidden(policy, [ids_T])
    own_TV = tiny.plain(policy)(input_ids=ids_T[None]).logits[0]
    torch.testing.assert_close(policy.head.logits(hidden_TD), own_TV, atol=1e-5, rtol=1e-5)


def test_scale_comes_before_softcap():
    head = head_of(torch.tensor([8.0, -4.0]), bias_V=torch.tensor([0.0, 2.0]), scale=0.5, softcap=3.0)
    expected = [3 * torch.tanh(torch.tensor(value / 3)).item() for value in (4.0, -1.0)]
    assert head.logits(ones(1))[0].tolist() == pytest.approx(expected)


# ---- chunks


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    """Values, and the gradients of hidden states, weight and bias, whether rows go at once or two by two.

    Each row keeps its own conditions.
    """
    hidden_ND, weight_VD, targets_N = random_case()
    weights_N = torch.arange(1.0, 8.0)
    kept = [sorted({target, row, 10}) if row % 3 else None for row, target in enumerate(targets_N.tolist())]
    conditions = Conditions([torch.tensor([row, target]) for row, target in enumerate(targets_N.tolist())], kept)

    def run() -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden_ND, weight_VD, torch.arange(11.0) / 10)]
        head = Head(leaves[1], leaves[2], scale=0.7, softcap=5.0)
        logp_N, entropy_N = token_logprobs(head, leaves[0], targets_N, Shape(0.8, 1.3), conditions)
        (logp_N * weights_N).sum().backward()
        return [logp_N.detach(), entropy_N, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    at_once = run()
    monkeypatch.setattr(distribution, "CHUNK_ELEMENTS", 22)
    in_chunks = run()
    assert len(at_once) == 5
    for one, other in zip(at_once, in_chunks, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_gradients_are_those_of_the_definition():
    hidden_ND, weight_VD, targets_N = random_case()
    leaves = [hidden_ND.requires_grad_(), weight_VD.requires_grad_()]
    ours, _ = token_logprobs(Head(weight_VD), hidden_ND, targets_N, Shape(0.5))
    plain = torch.log_softmax(hidden_ND @ weight_VD.T / 0.5, -1).gather(1, targets_N[:, None])[:, 0]
    for one, other in zip(
        torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(plain.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_no_rows_give_no_log_probs():
    logp_N, entropy_N = token_logprobs(head_of(B09_LOGITS), ones(0), torch.zeros(0, dtype=torch.long), Shape())
    assert logp_N.shape == entropy_N.shape == (0,)


# ---- entropy


def test_entropy_is_the_definition_and_has_no_gradient():
    hidden_ND, weight_VD, targets_N = random_case()
    _, entropy_N = token_logprobs(Head(weight_VD.requires_grad_()), hidden_ND, targets_N, Shape(0.6))
    p_NV = torch.softmax(hidden_ND @ weight_VD.detach().T / 0.6, -1)
    torch.testing.assert_close(entropy_N, -(p_NV * p_NV.log()).sum(-1), atol=1e-5, rtol=1e-5)
    assert not entropy_N.requires_grad


@pytest.mark.parametrize(("logits", "expected"), [([0.0] * 4, 1.386294), ([0.0, -torch.inf], 0.0), ([900.0, 0.0], 0.0)])
def test_entropy_at_the_edges(logits, expected):
    _, entropy_N = token_logprobs(head_of(torch.tensor(logits)), ones(1), torch.tensor([0]), Shape())
    assert entropy_N.item() == pytest.approx(expected, abs=1e-5)


# ---- sampling by a uniform


@pytest.mark.parametrize(
    ("temperature", "counts"),
    [(1.0, [100, 0, 200, 300, 400]), (0.5, [100, 0, 400, 900, 1600])],
)
def test_a_grid_of_uniforms_gives_every_token_its_probability(temperature, counts):
    """At temperature 1/2 probabilities are squared and shared out anew."""
    logits_V = torch.tensor([0.1, 0.0, 0.2, 0.3, 0.4]).log()
    tokens = drawn(logits_V, middles(sum(counts)), temperature).tokens
    assert [tokens.count(token) for token in range(5)] == counts
    assert tokens == sorted(tokens)


def spread_of(*weights: dict[int, float], vocabulary: int) -> Spread:
    """Rows of unnormalised probabilities, exactly these, by id."""
    unnormalised_NV = torch.zeros(len(weights), vocabulary)
    for row, by_id in enumerate(weights):
        unnormalised_NV[row, list(by_id)] = torch.tensor(list(by_id.values()))
    return Spread.summed(torch.zeros(len(weights), 1), unnormalised_NV)


@pytest.mark.parametrize("vocabulary", [40, PIECE, PIECE + 1, 3 * PIECE, 5 * PIECE - 3])
@pytest.mark.parametrize("offset", [0.0, 0.5, 1.0 - 2.0**-20], ids=["at the edge", "in the middle", "at the far edge"])
def test_every_id_is_drawn_as_often_as_it_weighs(vocabulary, offset):
    """Of 1,024 uniforms, one in each of as many equal parts. Many ids weigh nothing, whole pieces among them."""
    random_numbers = torch.Generator().manual_seed(vocabulary)
    ids = torch.randint(vocabulary, (1024,), generator=random_numbers)
    ids = torch.where(ids // PIECE == 1, 0, ids)
    counts_V = torch.bincount(ids, minlength=vocabulary)
    row = {number: float(count) for number, count in enumerate(counts_V.tolist()) if count}
    spread = spread_of(*[row] * 1024, vocabulary=vocabulary)
    tokens_N = spread.draw((torch.arange(1024).double() + offset) / 1024)
    assert torch.equal(torch.bincount(tokens_N, minlength=vocabulary), counts_V)
    assert torch.equal(tokens_N, ids.sort().values)


def test_rows_are_drawn_each_in_its_own_distribution():
    spread = spread_of({3: 1.0}, {700: 1.0, 2: 1.0}, {700: 1.0, 2: 1.0}, {300: 3.0, 301: 1.0}, vocabulary=701)
    assert spread.draw(double([0.99, 0.49, 0.5, 0.75])).tolist() == [3, 2, 700, 301]


def test_an_id_of_probability_0_is_not_drawn_where_sums_round():
    """1 + 2^-52 + 2^-53 is rounded up, so what lies before the last piece seems to be more than the threshold."""
    spread = spread_of({0: 1.0, PIECE: 2.0**-52, 2 * PIECE + 3: 2.0**-53}, vocabulary=3 * PIECE)
    assert spread.draw(double([JUST_BELOW_1])).tolist() == [2 * PIECE + 3]


@pytest.mark.parametrize("seed", range(5))
def test_ids_of_probability_0_are_never_drawn_at_the_edges_of_others(seed):
    """Uniforms that fall upon sums of the distribution, as nearly as numbers can, under weights of all magnitudes."""
    random_numbers = torch.Generator().manual_seed(seed)
    logits_V = torch.randn(3 * PIECE, generator=random_numbers) * 12
    logits_V[torch.rand(3 * PIECE, generator=random_numbers) < 0.5] = -torch.inf
    spread = Spread.of(logits_V.expand(3 * PIECE, -1))
    cumulative_V = spread.unnormalised_NV[0].double().cumsum(0)
    for nudge in (-1, 0, 1):
        uniform_N = (cumulative_V / cumulative_V[-1] + nudge * 2.0**-53).clamp(0, JUST_BELOW_1)
        assert logits_V[spread.draw(uniform_N)].isfinite().all()


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, JUST_BELOW_1])
@pytest.mark.parametrize("impossible", [(0,), (4,), (0, 1, 3, 4), (2,), (1, 2, 3)])
def test_a_token_of_probability_0_is_never_drawn(uniform, impossible):
    logits_V = torch.tensor([0.3, -1.0, 0.0, 2.0, 0.7])
    logits_V[list(impossible)] = -torch.inf
    answer = drawn(logits_V, [uniform])
    assert answer.tokens[0] not in impossible
    assert answer.logprobs[0] > -torch.inf


def test_the_last_possible_token_is_drawn_just_below_1_whatever_the_sum_rounds_to():
    for seed in range(50):
        logits_V = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
        logits_V[-10:] = -torch.inf
        assert drawn(logits_V, [0.0, JUST_BELOW_1]).tokens == [0, 989]


def test_the_recorded_log_prob_is_that_of_the_drawn_token():
    hidden_ND, weight_VD, _ = random_case(rows=64)
    temperature_N = torch.linspace(0.3, 2.0, 64)
    answer = sample(Head(weight_VD), hidden_ND, double(middles(64)), [Shape(t) for t in temperature_N.tolist()])
    for row, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        expected = torch.log_softmax(hidden_ND[row] @ weight_VD.T / temperature_N[row], -1)[token]
        assert logprob == pytest.approx(expected.item(), abs=1e-5)


TRUNCATIONS = [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}]


@pytest.mark.parametrize("logits", [[0.0, torch.nan], [torch.nan] * 4, [torch.nan, 1.0, 2.0, 3.0]], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_logits_that_are_no_numbers_are_not_hidden(logits, temperature, truncation):
    """Broken weights under top-k would else look like some other distribution."""
    (logprob,) = drawn(torch.tensor(logits), [0.5], temperature, **truncation).logprobs
    assert logprob != logprob


# ---- what is kept


PROBABILITIES = torch.tensor([0.3, 0.1, 0.4, 0.2])


@pytest.mark.parametrize(
    ("truncation", "temperature", "kept"),
    [
        ({"top_k": 1}, 1.0, [2]),
        ({"top_k": 3}, 1.0, [0, 2, 3]),
        ({"top_k": 4}, 1.0, [0, 1, 2, 3]),
        ({"top_k": 99}, 1.0, [0, 1, 2, 3]),
        ({"top_p": 0.39}, 1.0, [2]),
        ({"top_p": 0.41}, 1.0, [0, 2]),
        ({"top_p": 0.69}, 1.0, [0, 2]),
        ({"top_p": 0.71}, 1.0, [0, 2, 3]),
        ({"top_p": 0.91}, 1.0, [0, 1, 2, 3]),
        ({"top_p": 0.0}, 1.0, [2]),
        ({"min_p": 0.76}, 1.0, [2]),
        ({"min_p": 0.74}, 1.0, [0, 2]),
        ({"min_p": 0.26}, 1.0, [0, 2, 3]),
        ({"min_p": 0.24}, 1.0, [0, 1, 2, 3]),
        ({"min_p": 1.0}, 1.0, [2]),
        # of what top-k leaves, 4/9, 3/9 and 2/9, the first two are 0.777 (of all they would be 0.7)
        ({"top_k": 3, "top_p": 0.75}, 1.0, [0, 2]),
        ({"top_p": 0.75}, 1.0, [0, 2, 3]),
        # at temperature 1/2 they are 16, 9, 4 and 1 of 30: the first two 0.833
        ({"top_p": 0.8}, 0.5, [0, 2]),
        ({"top_p": 0.8}, 1.0, [0, 2, 3]),
        ({"min_p": 0.5}, 0.5, [0, 2]),
        ({"min_p": 0.6}, 0.5, [2]),
        ({"top_k": 3, "min_p": 0.6}, 1.0, [0, 2]),
        ({"top_p": 0.95, "min_p": 0.3}, 1.0, [0, 2, 3]),
    ],
    ids=str,
)
def test_kept_sets_and_their_probabilities(truncation, temperature, kept):
    answer = drawn(PROBABILITIES.log(), middles(40), temperature, **truncation)
    assert {tuple(ids.tolist()) for ids in answer.kept if ids is not None} == {tuple(kept)}
    assert None not in answer.kept
    powers_V = PROBABILITIES ** (1 / temperature)
    expected_V = (powers_V / powers_V[kept].sum()).log()
    assert set(answer.tokens) <= set(kept)
    assert answer.logprobs == pytest.approx(expected_V[answer.tokens].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("truncation", "kept", "theirs"),
    [
        ({"top_k": 2}, [0, 2, 3], [0, 2, 3]),
        ({"min_p": 1.0}, [0, 2, 3], [0, 2, 3]),
        ({"top_p": 0.5}, [0, 2], [2, 3]),
        ({"top_p": 0.2}, [0], [3]),
    ],
    ids=str,
)
def test_of_equally_likely_ids(truncation, kept, theirs):
    """All or none are kept by top-k and min-p; by top-p the first ones, where `transformers` keeps the last ones."""
    logits_V = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert (~Truncation(**truncation).dropped(logits_V)).nonzero()[:, 0].tolist() == kept
    assert processed(logits_V[None], Shape(), Truncation(**truncation)).isfinite().nonzero()[:, 1].tolist() == theirs


def test_nothing_is_kept_of_greedy_rows_and_of_rows_that_keep_all():
    shapes, truncations = [Shape(0.0), Shape(), Shape()], [Truncation(top_k=1), Truncation(), Truncation(top_k=1)]
    answer = sample(head_of(B09_LOGITS), ones(3), double([0.999] * 3), shapes, truncations)
    assert answer.tokens == [0, 2, 0]
    assert answer.logprobs == pytest.approx([0.0, -2.407606, 0.0], abs=1e-5)
    assert answer.kept[:2] == [None, None]
    assert answer.kept[2] is not None
    assert answer.kept[2].tolist() == [0]


# ---- the repetition penalty


def test_a_penalty_divides_what_is_positive_and_multiplies_what_is_negative():
    """[2, 1, -1, -2] become [1, 1, -2, -2], and at temperature 1/2 [2, 2, -4, -4]; 0 stays 0."""
    conditions = Conditions([torch.tensor([0, 2])])
    logp_N, _ = token_logprobs(
        head_of(torch.tensor([2.0, 1.0, -1.0, -2.0])), ones(1), torch.tensor([2]), Shape(0.5, 2.0), conditions
    )
    assert logp_N.item() == pytest.approx(torch.log_softmax(torch.tensor([2.0, 2.0, -4.0, -4.0]), -1)[2].item())
    conditions = Conditions([torch.tensor([0])])
    logp_N, _ = token_logprobs(head_of(torch.zeros(2)), ones(1), torch.tensor([0]), Shape(1.0, 5.0), conditions)
    assert logp_N.item() == pytest.approx(-0.693147, abs=1e-6)


def test_a_penalty_can_change_the_greedy_token():
    shapes, seen = [Shape(0.0, 3.0), Shape(0.0), Shape(0.0, 3.0)], [torch.tensor([0]), None, torch.tensor([1, 2])]
    assert sample(head_of(B09_LOGITS), ones(3), double([0.5] * 3), shapes, seen=seen).tokens == [1, 0, 0]


def test_a_penalty_without_the_ids_of_the_context_is_our_mistake():
    with pytest.raises(AssertionError, match="needs the ids of each row's context"):
        token_logprobs(head_of(B09_LOGITS), ones(1), torch.tensor([0]), Shape(1.0, 2.0))
    with pytest.raises(AssertionError, match="needs the ids of the context"):
        sample(head_of(B09_LOGITS), ones(1), double([0.5]), [Shape(1.0, 2.0)], seen=[None])


# ---- the same as the processors of transformers


def processed(
    logits_NV: torch.Tensor, shape: Shape, truncation: Truncation, seen_NS: torch.Tensor | None = None
) -> torch.Tensor:
    """The scores that `transformers` would sample from: it applies the processors in this order."""
    ids_NS = torch.zeros(len(logits_NV), 0, dtype=torch.long) if seen_NS is None else seen_NS
    processors: list[Any] = []
    if shape.repetition_penalty != 1.0:
        processors.append(logits_process.RepetitionPenaltyLogitsProcessor(shape.repetition_penalty))
    if shape.temperature != 1.0:
        processors.append(logits_process.TemperatureLogitsWarper(shape.temperature))
    if truncation.top_k:
        processors.append(logits_process.TopKLogitsWarper(truncation.top_k))
    if truncation.top_p < 1.0:
        processors.append(logits_process.TopPLogitsWarper(truncation.top_p))
    if truncation.min_p:
        processors.append(logits_process.MinPLogitsWarper(truncation.min_p))
    apply: Any = LogitsProcessorList(processors)
    return apply(ids_NS, logits_NV.clone())


@pytest.mark.parametrize(
    "truncation",
    [
        Truncation(),
        Truncation(top_k=7),
        Truncation(top_k=1),
        Truncation(top_p=0.6),
        Truncation(top_p=0.05),
        Truncation(top_p=0.99),
        Truncation(min_p=0.1),
        Truncation(min_p=0.7),
        Truncation(top_k=20, top_p=0.8),
        Truncation(top_k=20, min_p=0.05),
        Truncation(top_p=0.9, min_p=0.05),
        Truncation(top_k=30, top_p=0.95, min_p=0.02),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [Shape(), Shape(0.6), Shape(1.7, 1.3), Shape(1.0, 0.8)], ids=str)
def test_the_distribution_is_that_of_transformers(shape, truncation):
    """Kept sets, log-probs of what is drawn, and of what is scored later; logits here are all different."""
    random_numbers = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(60, 300, generator=random_numbers) * 2
    seen_NS = torch.randint(300, (60, 25), generator=random_numbers)
    seen = list(seen_NS)
    scores_NV = processed(logits_NV, shape, truncation, seen_NS)
    head, hidden_ND = identity(logits_NV)
    answer = sample(head, hidden_ND, double(middles(60)), [shape] * 60, [truncation] * 60, seen)
    expected = [row.isfinite().nonzero()[:, 0].tolist() for row in scores_NV]
    if truncation.keeps_all:
        assert answer.kept == [None] * 60
    else:
        assert [ids.tolist() for ids in answer.kept if ids is not None] == expected
    tokens_N = torch.tensor(answer.tokens)
    theirs_N = torch.log_softmax(scores_NV, -1).gather(1, tokens_N[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), theirs_N, atol=1e-5, rtol=1e-5)


# ---- scored again as it was drawn


ANY_ROWS = [
    (Shape(), Truncation()),
    (Shape(0.7), Truncation(top_k=3)),
    (Shape(1.3, 1.2), Truncation(top_p=0.8)),
    (Shape(1.0, 0.7), Truncation(min_p=0.2)),
    (Shape(0.7, 2.0), Truncation(top_k=9, top_p=0.9, min_p=0.01)),
]


@pytest.mark.parametrize("transform", [{}, {"scale": 0.3, "softcap": 4.0}, {"row_tile": 16}], ids=str)
@pytest.mark.parametrize(("shape", "truncation"), ANY_ROWS, ids=str)
def test_scored_under_what_was_kept_it_is_what_was_recorded_bit_for_bit(shape, truncation, transform):
    hidden_ND, weight_VD, _ = random_case(rows=50, vocabulary=700)
    head = Head(weight_VD, torch.arange(700.0) / 700, **transform)
    seen = [torch.randint(700, (30,), generator=torch.Generator().manual_seed(row)) for row in range(50)]
    answer = sample(head, hidden_ND, double(middles(50)), [shape] * 50, [truncation] * 50, seen)
    kept = [None if ids is None else array("i", ids.tolist()) for ids in answer.kept]
    tokens_N = torch.tensor(answer.tokens)
    logp_N, _ = token_logprobs(head, hidden_ND, tokens_N, shape, Conditions(seen, kept))
    assert logp_N.tolist() == answer.logprobs
    assert (-logp_N).mean() > 0.1


def test_a_token_outside_of_what_was_kept_has_no_probability_and_no_nan():
    conditions = Conditions(kept=[[0, 2], [0, 2], None])
    logp_N, entropy_N = token_logprobs(
        head_of(PROBABILITIES.log()), ones(3), torch.tensor([2, 1, 1]), Shape(), conditions
    )
    assert logp_N[0].item() == pytest.approx(-0.559616, abs=1e-5)  # ln 4/7
    assert -torch.inf < logp_N[1].item() < -1e29
    assert logp_N[2].item() == pytest.approx(-2.302585, abs=1e-5)
    assert entropy_N.tolist() == pytest.approx([0.682908, 0.682908, 1.279854], abs=1e-5)


@pytest.mark.parametrize("shape", [Shape(), Shape(0.7), Shape(1.0, 1.5), Shape(1.4, 0.6)], ids=str)
def test_gradients_under_kept_sets_are_finite_differences(shape):
    """Also of a row that kept one id, whose log-prob is 0 whatever happens, and none from ids that were not kept."""
    hidden_ND, weight_VD, targets_N = random_case()
    targets = targets_N.tolist()
    kept = [
        [target] if row == 0 else sorted({target, row, 7}) if row % 2 else None for row, target in enumerate(targets)
    ]
    conditions = Conditions([torch.tensor([3, target, 7]) for target in targets], kept)
    direction_N = torch.arange(1.0, 8.0)

    def loss(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        logp_N, _ = token_logprobs(Head(weight_VD, scale=0.7, softcap=5.0), hidden_ND, targets_N, shape, conditions)
        return (logp_N * direction_N).sum()

    leaves = [hidden_ND.requires_grad_(), weight_VD.requires_grad_()]
    gradients = torch.autograd.grad(loss(*leaves), leaves)
    step = 1e-2
    with torch.no_grad():
        for number, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
            for place in range(leaf.numel()):
                moved = [
                    [
                        tensor + (number == other) * sign * step * unit(place, tensor)
                        for other, tensor in enumerate(leaves)
                    ]
                    for sign in (1, -1)
                ]
                difference = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
                assert gradient.flatten()[place].item() == pytest.approx(difference.item(), abs=1e-2, rel=1e-3)
    assert not gradients[0][0].any()
    only_kept = torch.autograd.grad(
        token_logprobs(Head(weight_VD), hidden_ND[1:2], targets_N[1:2], shape, conditions.of_rows(slice(1, 2)))[
            0
        ].sum(),
        weight_VD,
    )[0]
    assert only_kept.any(1).nonzero()[:, 0].tolist() == kept[1]


def unit(place: int, like: torch.Tensor) -> torch.Tensor:
    """All zeros but for a 1 there; of the shape of `like`, if it has such a place."""
    return torch.eye(like.numel())[place].view(like.shape) if place < like.numel() else torch.zeros_like(like)


# ---- rows in company


MIXED = [
    (Shape(), Truncation()),
    (Shape(0.0), Truncation()),
    (Shape(0.6), Truncation(top_k=4)),
    (Shape(0.0, 1.8), Truncation(top_p=0.5)),
    (Shape(1.2), Truncation(top_p=0.9)),
    (Shape(1.0, 1.4), Truncation()),
    (Shape(0.8, 0.6), Truncation(min_p=0.1)),
    (Shape(), Truncation(top_k=1)),
    (Shape(2.0), Truncation()),
]


@pytest.mark.parametrize("row_tile", [1, 16])
def test_rows_of_every_kind_stand_side_by_side(row_tile):
    """Each gets what it would get alone, whatever its neighbours ask for."""
    hidden_ND, weight_VD, _ = random_case(rows=90, vocabulary=600)
    head, uniform_N = Head(weight_VD, row_tile=row_tile), double(middles(90))
    rows = [MIXED[row % len(MIXED)] for row in range(90)]
    seen = [torch.randint(600, (40,), generator=torch.Generator().manual_seed(row)) for row in range(90)]
    shapes, truncations = zip(*rows, strict=True)
    together = sample(head, hidden_ND, uniform_N, shapes, truncations, seen)
    for row in range(90):
        alone = sample(
            head, hidden_ND[row : row + 1], uniform_N[row : row + 1], [shapes[row]], [truncations[row]], [seen[row]]
        )
        assert together.tokens[row] == alone.tokens[0]
        assert together.logprobs[row] == pytest.approx(alone.logprobs[0], abs=1e-5)
        one, other = together.kept[row], alone.kept[0]
        assert (one is None and other is None) or torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.skipif(not USES_ONEDNN, reason="other products may give other bits to fewer rows")
def test_in_whole_tiles_a_row_has_its_own_bits_alone_and_in_company():
    hidden_ND, weight_VD, targets_N = random_case(rows=37, vocabulary=600)
    head = Head(weight_VD, row_tile=16)
    together_N, entropy_N = token_logprobs(head, hidden_ND, targets_N, Shape(0.9))
    for row in range(37):
        rows = slice(row, row + 1)
        alone = token_logprobs(head, hidden_ND[rows], targets_N[rows], Shape(0.9))
        assert (alone[0].item(), alone[1].item()) == (together_N[row].item(), entropy_N[row].item())


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17])
def test_what_fills_up_a_tile_is_not_handed_out(num_rows):
    hidden_ND, weight_VD, targets_N = random_case(rows=num_rows)
    head = Head(weight_VD, row_tile=16)
    assert len(head.logits(hidden_ND)) % 16 == 0
    assert logprobs(head, hidden_ND, 1.0).shape == (num_rows, 11)
    assert token_logprobs(head, hidden_ND, targets_N, Shape())[0].shape == (num_rows,)
    answer = sample(head, hidden_ND, double(middles(num_rows)), [Shape()] * num_rows)
    assert len(answer.tokens) == len(answer.logprobs) == len(answer.kept) == num_rows


# ---- no work that nobody asked for


class Operations(TorchDispatchMode):
    """Names of the operations of torch within the block, each with the elements of its largest input."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        size = max((one.numel() for one in args if isinstance(one, torch.Tensor)), default=0)
        name = func._schema.name.removeprefix("aten::")
        self.sizes[name] = max(size, self.sizes.get(name, 0))
        return func(*args, **(kwargs or {}))


def operations(work: Callable[[], object]) -> dict[str, int]:
    with Operations() as seen:
        work()
    return seen.sizes


EXTRAS = {"sort", "topk", "argmax", "masked_fill_", "masked_fill", "nonzero", "where", "div_", "div"}


def large(sizes: dict[str, int]) -> set[str]:
    """Of the extras, those that touched a whole row of the vocabulary, or more."""
    return {name for name in EXTRAS & sizes.keys() if sizes[name] >= 8000}


@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "truncation", "expected"),
    [
        (Shape(), Truncation(), set()),
        (Shape(0.5), Truncation(), {"div_"}),
        (Shape(0.0), Truncation(), {"argmax"}),
        (Shape(), Truncation(top_k=5), {"topk", "nonzero", "masked_fill_"}),
        (Shape(), Truncation(min_p=0.5), {"nonzero", "masked_fill_"}),
    ],
    ids=["plain", "temperature", "greedy", "top-k", "min-p"],
)
def test_a_sampler_does_what_its_rows_ask_for_and_no_more(shape, truncation, expected):
    hidden_ND, weight_VD, _ = random_case(rows=20, vocabulary=8000)
    sizes = operations(lambda: sample(Head(weight_VD), hidden_ND, double(middles(20)), [shape] * 20, [truncation] * 20))
    assert large(sizes) == expected


@torch.no_grad()
def test_only_rows_that_are_truncated_are_sorted():
    """And of those no more than top-k left."""
    hidden_ND, weight_VD, _ = random_case(rows=20, vocabulary=8000)

    def sampled(truncation: Truncation) -> dict[str, int]:
        truncations = [truncation, *[Truncation()] * 19]
        head, uniform_N = Head(weight_VD), double(middles(20))
        return operations(lambda: sample(head, hidden_ND, uniform_N, [Shape()] * 20, truncations))

    assert sampled(Truncation(top_p=0.5))["sort"] == 8000
    assert sampled(Truncation(top_k=5, top_p=0.5))["sort"] == 5


@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "kept", "expected"),
    [
        (Shape(), None, set()),
        (Shape(), [None] * 20, set()),
        (Shape(0.5), None, {"div"}),
        (Shape(), [None] * 19 + [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], {"masked_fill"}),
    ],
    ids=["plain", "nothing kept", "temperature", "one kept set"],
)
def test_a_trainer_does_what_its_rows_ask_for_and_no_more(shape, kept, expected):
    hidden_ND, weight_VD, targets_N = random_case(rows=20, vocabulary=8000)
    targets_N = targets_N % 11
    sizes = operations(lambda: token_logprobs(Head(weight_VD), hidden_ND, targets_N, shape, Conditions(kept=kept)))
    assert large(sizes) == expected


def test_a_conditions_slice_is_that_of_its_rows():
    conditions = Conditions([torch.tensor([row]) for row in range(4)], [None, [1], None, [3]])
    part = conditions.of_rows(slice(1, 3))
    assert part.seen is not None
    assert [ids.tolist() for ids in part.seen] == [[1], [2]]
    assert part.kept == [[1], None]
    assert replace(conditions, seen=None).of_rows(slice(0, 1)) == Conditions(None, [None])
