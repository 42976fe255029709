"""The one distribution: cases B09 and B17, and every path to a log-prob against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.models import distribution
from headway.models.distribution import Head, logprobs, sample, token_logprobs
from headway.models.policy import Policy
from tests import tiny
from tests.tiny import make_policy, random_ids

B09_LOGITS = torch.tensor([2.0, 1.0, 0.0])
B09 = torch.tensor([-0.142932, -2.142932, -4.142932])
"""Log-probs of [2, 1, 0] at temperature 0.5. At temperature 1 they would be -0.407606, -1.407606, -2.407606."""

JUST_BELOW_1 = 1.0 - 2.0**-53


def head_of(logits_V: torch.Tensor, **transform: Any) -> Head:
    """A head that gives these logits for the hidden state [1]."""
    return Head(logits_V[:, None].clone(), **transform)


def ones(num_rows: int) -> torch.Tensor:
    return torch.ones(num_rows, 1)


def drawn(logits_V: torch.Tensor, uniforms: list[float], temperature: float = 1.0) -> tuple[list[int], torch.Tensor]:
    uniform_N = torch.tensor(uniforms, dtype=torch.float64)
    temperature_N = torch.full((len(uniforms),), temperature)
    tokens_N, logp_N = sample(head_of(logits_V), ones(len(uniforms)), temperature_N, uniform_N)
    return tokens_N.tolist(), logp_N


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
    logp_N, _ = token_logprobs(head_of(B09_LOGITS), ones(3), torch.arange(3), 0.5)
    torch.testing.assert_close(logp_N, B09, atol=1e-5, rtol=0)


def test_b09_the_samplers_path():
    tokens, logp_N = drawn(B09_LOGITS, [0.0, 0.9, 0.99], temperature=0.5)
    assert tokens == [0, 1, 2]
    torch.testing.assert_close(logp_N, B09, atol=1e-5, rtol=0)


def test_b09_the_entropy_is_of_the_same_temperature():
    _, entropy_N = token_logprobs(head_of(B09_LOGITS), ones(1), torch.tensor([0]), 0.5)
    assert entropy_N.item() == pytest.approx(-(B09.exp() * B09).sum().item(), abs=1e-5)


def test_b09_ratios_are_1():
    head, temperature = head_of(B09_LOGITS), 0.5
    tokens_N, sampled_N = sample(head, ones(64), torch.full((64,), temperature), torch.tensor(middles(64)).double())
    trained_N, _ = token_logprobs(head, ones(64), tokens_N, temperature)
    assert (trained_N - sampled_N).exp().tolist() == pytest.approx([1.0] * 64, abs=1e-6)


def test_temperature_0_is_greedy_and_divides_by_nothing():
    tokens, logp_N = drawn(torch.tensor([0.0, 3.0, 2.9]), [0.0, 0.5, JUST_BELOW_1], temperature=0.0)
    assert tokens == [1, 1, 1]
    assert logp_N.tolist() == [0.0, 0.0, 0.0]


def test_greedy_and_sampled_rows_stand_side_by_side():
    temperature_N = torch.tensor([0.0, 0.5, 0.0, 1.0])
    tokens_N, logp_N = sample(head_of(B09_LOGITS), ones(4), temperature_N, torch.full((4,), 0.999).double())
    assert tokens_N.tolist() == [0, 2, 0, 2]
    assert logp_N.tolist() == pytest.approx([0.0, -4.142932, 0.0, -2.407606], abs=1e-5)


# ---- B17: precision


def test_b17b_logits_are_float32_under_autocast():
    """In bfloat16 both logits would be 20 and the log-prob -0.693147."""
    head, hidden_ND = head_of(torch.tensor([20.0, 19.95])), torch.ones(1, 1, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head.logits(hidden_ND).dtype == torch.float32
        logp_N, _ = token_logprobs(head, hidden_ND, torch.tensor([0]), 1.0)
        _, sampled_N = sample(head, hidden_ND, torch.ones(1), torch.zeros(1).double())
    assert logp_N.item() == pytest.approx(-0.668460, abs=1e-5)
    assert sampled_N.item() == pytest.approx(-0.668460, abs=1e-5)


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
    """Values, and the gradients of hidden states, weight and bias, whether rows go at once or two by two."""
    hidden_ND, weight_VD, targets_N = random_case()
    weights_N = torch.arange(1.0, 8.0)

    def run() -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden_ND, weight_VD, torch.arange(11.0) / 10)]
        head = Head(leaves[1], leaves[2], scale=0.7, softcap=5.0)
        logp_N, entropy_N = token_logprobs(head, leaves[0], targets_N, 0.8)
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
    ours, _ = token_logprobs(Head(weight_VD), hidden_ND, targets_N, 0.5)
    plain = torch.log_softmax(hidden_ND @ weight_VD.T / 0.5, -1).gather(1, targets_N[:, None])[:, 0]
    for one, other in zip(
        torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(plain.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_no_rows_give_no_log_probs():
    logp_N, entropy_N = token_logprobs(head_of(B09_LOGITS), ones(0), torch.zeros(0, dtype=torch.long), 1.0)
    assert logp_N.shape == entropy_N.shape == (0,)


# ---- entropy


def test_entropy_is_the_definition_and_has_no_gradient():
    hidden_ND, weight_VD, targets_N = random_case()
    _, entropy_N = token_logprobs(Head(weight_VD.requires_grad_()), hidden_ND, targets_N, 0.6)
    p_NV = torch.softmax(hidden_ND @ weight_VD.detach().T / 0.6, -1)
    torch.testing.assert_close(entropy_N, -(p_NV * p_NV.log()).sum(-1), atol=1e-5, rtol=1e-5)
    assert not entropy_N.requires_grad


@pytest.mark.parametrize(("logits", "expected"), [([0.0] * 4, 1.386294), ([0.0, -torch.inf], 0.0), ([900.0, 0.0], 0.0)])
def test_entropy_at_the_edges(logits, expected):
    _, entropy_N = token_logprobs(head_of(torch.tensor(logits)), ones(1), torch.tensor([0]), 1.0)
    assert entropy_N.item() == pytest.approx(expected, abs=1e-5)


# ---- sampling by a uniform


@pytest.mark.parametrize(
    ("temperature", "counts"),
    [(1.0, [100, 0, 200, 300, 400]), (0.5, [100, 0, 400, 900, 1600])],
)
def test_a_grid_of_uniforms_gives_every_token_its_probability(temperature, counts):
    """At temperature 1/2 probabilities are squared and shared out anew."""
    logits_V = torch.tensor([0.1, 0.0, 0.2, 0.3, 0.4]).log()
    tokens, _ = drawn(logits_V, middles(sum(counts)), temperature)
    assert [tokens.count(token) for token in range(5)] == counts
    assert tokens == sorted(tokens)


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, JUST_BELOW_1])
@pytest.mark.parametrize("impossible", [(0,), (4,), (0, 1, 3, 4), (2,), (1, 2, 3)])
def test_a_token_of_probability_0_is_never_drawn(uniform, impossible):
    logits_V = torch.tensor([0.3, -1.0, 0.0, 2.0, 0.7])
    logits_V[list(impossible)] = -torch.inf
    (token,), logp_N = drawn(logits_V, [uniform])
    assert token not in impossible
    assert logp_N.isfinite().all()


def test_the_last_possible_token_is_drawn_just_below_1_whatever_the_sum_rounds_to():
    for seed in range(50):
        logits_V = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
        logits_V[-10:] = -torch.inf
        assert drawn(logits_V, [0.0, JUST_BELOW_1])[0] == [0, 989]


def test_the_recorded_log_prob_is_that_of_the_drawn_token():
    hidden_ND, weight_VD, _ = random_case(rows=64)
    temperature_N = torch.linspace(0.3, 2.0, 64)
    tokens_N, logp_N = sample(Head(weight_VD), hidden_ND, temperature_N, torch.tensor(middles(64)).double())
    for row in range(64):
        expected = torch.log_softmax(hidden_ND[row] @ weight_VD.T / temperature_N[row], -1)[tokens_N[row]]
        assert logp_N[row].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_not_hidden(temperature):
    _, logp_N = drawn(torch.tensor([0.0, torch.nan]), [0.5], temperature)
    assert logp_N.isnan().all()
