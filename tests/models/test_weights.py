"""Handing weights over: case B15 with all its faults, refusals, and the fingerprint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.models.policy import Policy, as_policy, load_policy, load_tokenizer, save_policy
from headway.models.weights import assign_weights, fingerprint, free_storage, named_weights, take_storage
from headway.types import UserError
from tests import tiny


class TwoDimensional(torch.nn.Module):
    """B15: logits(x) = H E[x], with H = E = [[1, 0], [0, 1], [1, 1]]."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        self.embedding = torch.nn.Embedding.from_pretrained(table.clone(), freeze=False)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight if tied else torch.nn.Parameter(table.clone())

    @torch.no_grad()
    def logprob(self, given: int, token: int) -> float:
        logits_V = self.head(self.embedding(torch.tensor(given)))
        return torch.log_softmax(logits_V, -1)[token].item()


def b15_trainer() -> TwoDimensional:
    trainer = TwoDimensional(tied=True)
    with torch.no_grad():
        trainer.embedding.weight[1] = torch.tensor([0.0, 2.0])
    return trainer


# ---- B15


def test_b15_the_whole_update_of_a_tied_model_arrives():
    engine = TwoDimensional(tied=True)
    assign_weights(named_weights(engine), named_weights(b15_trainer()))
    assert engine.logprob(1, 1) == pytest.approx(-0.142932, abs=1e-5)


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [((), -0.861995), (("embedding",), -0.758624), (("head",), -0.407606), (("embedding", "head"), -0.142932)],
    ids=["nothing arrived", "head stale", "embedding stale", "all arrived"],
)
def test_b15_every_fault_has_its_own_value(arrived, expected):
    """The values the case gives are those of this model: a fault in the test above would name itself."""
    engine, trainer = TwoDimensional(tied=False), b15_trainer()
    for name in arrived:
        getattr(engine, name).weight.data.copy_(getattr(trainer, name).weight)
    assert engine.logprob(1, 1) == pytest.approx(expected, abs=1e-5)


def test_b15_a_change_of_an_untied_head_leaves_the_embedding():
    trainer, engine = TwoDimensional(tied=False), TwoDimensional(tied=False)
    with torch.no_grad():
        trainer.head.weight[2] += torch.tensor([0.0, 1.0])
    assign_weights(named_weights(engine), named_weights(trainer))
    assert engine.logprob(2, 2) == pytest.approx(-0.239545, abs=1e-5)


def test_b15_the_wrong_value_of_that_change_is_that_of_a_changed_embedding():
    model = TwoDimensional(tied=True)
    with torch.no_grad():
        model.head.weight[2] += torch.tensor([0.0, 1.0])
    assert model.logprob(2, 2) == pytest.approx(-0.065884, abs=1e-5)


def test_tied_weights_have_one_name():
    assert set(named_weights(TwoDimensional(tied=True))) == {"embedding.weight"}
    assert set(named_weights(TwoDimensional(tied=False))) == {"embedding.weight", "head.weight"}


def test_weights_of_an_untied_model_are_refused_by_a_tied_one():
    with pytest.raises(UserError, match=r"weight head.weight was sent to a model that has none of that name"):
        assign_weights(named_weights(TwoDimensional(tied=True)), named_weights(TwoDimensional(tied=False)))


def test_weights_of_a_tied_model_are_refused_by_an_untied_one():
    with pytest.raises(UserError, match=r"weight head.weight of the receiving model was not sent"):
        assign_weights(named_weights(TwoDimensional(tied=False)), named_weights(TwoDimensional(tied=True)))


def is_tied(policy: Policy) -> bool:
    return policy.model.get_input_embeddings().weight is policy.model.get_output_embeddings().weight


def test_a_tied_model_stays_tied_through_saving(model_folder: Path, tmp_path: Path):
    policy = load_policy(str(model_folder), "cpu")
    assert is_tied(policy)
    save_policy(policy, load_tokenizer(str(model_folder)), tmp_path)
    assert is_tied(load_policy(str(tmp_path), "cpu"))


@pytest.mark.parametrize("told_the_policy", [True, False])
def test_b15_an_untied_model_stays_untied_through_saving(model_folder: Path, tmp_path: Path, told_the_policy: bool):
    policy = load_policy(str(model_folder), "cpu")
    head = policy.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() * 2)
    policy = as_policy(policy.model) if told_the_policy else policy
    save_policy(policy, load_tokenizer(str(model_folder)), tmp_path)
    reloaded = load_policy(str(tmp_path), "cpu")
    assert not is_tied(reloaded)
    assert fingerprint(reloaded.weights()) == fingerprint(policy.weights())


# ---- handing over


def test_weights_are_copied_and_not_shared(policy: Policy):
    other = tiny.make_policy(seed=1)
    assign_weights(other.weights(), policy.weights())
    assert fingerprint(other.weights()) == fingerprint(policy.weights())
    sent = fingerprint(other.weights())
    with torch.no_grad():
        policy.head.weight_VD.add_(1.0)
    assert fingerprint(other.weights()) == sent


def test_the_head_sees_what_was_handed_over(policy: Policy):
    other = tiny.make_policy(seed=1)
    assign_weights(other.weights(), policy.weights())
    assert torch.equal(other.head.weight_VD, policy.head.weight_VD)


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("norm.weight", "norm.weigth"): tensor for name, tensor in weights.items()}


def without_one(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}


def misshaped(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**weights, "model.norm.weight": torch.zeros(31)}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (renamed, r"norm.weigth was sent to a model that has none .* the nearest name it has is model\..*norm.weight$"),
        (without_one, "weight model.norm.weight of the receiving model was not sent; its old values would stay"),
        (misshaped, r"weight model.norm.weight was sent as \[31\], the model has \[32\]"),
    ],
)
def test_a_refused_hand_over_changes_nothing_and_says_why_in_a_line(policy: Policy, spoil, message):
    receiver = tiny.make_policy(seed=1)
    before = fingerprint(receiver.weights())
    with pytest.raises(UserError, match=message) as caught:
        assign_weights(receiver.weights(), spoil(policy.weights()))
    assert "\n" not in str(caught.value)
    assert fingerprint(receiver.weights()) == before


# ---- the fingerprint


def test_the_fingerprint_does_not_depend_on_order(policy: Policy):
    weights = policy.weights()
    assert fingerprint(dict(reversed(weights.items()))) == fingerprint(weights)


WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])}


@pytest.mark.parametrize(
    "changed",
    [
        {"a": WEIGHTS["a"], "c": WEIGHTS["b"]},
        {**WEIGHTS, "a": torch.nextafter(WEIGHTS["a"], torch.tensor([9.0, 2.0]))},
        {**WEIGHTS, "a": torch.tensor([2.0, 1.0])},
        {**WEIGHTS, "a": WEIGHTS["a"].double()},
        {**WEIGHTS, "a": WEIGHTS["a"].view(torch.int32)},
        {**WEIGHTS, "b": torch.tensor([3.0])},
        {"a": WEIGHTS["a"]},
    ],
    ids=["a name", "a bit", "an order", "a precision", "a meaning of the same bits", "a shape", "one missing"],
)
def test_the_fingerprint_changes_with(changed):
    assert fingerprint(changed) != fingerprint(WEIGHTS)


def test_minus_zero_is_another_bit():
    assert fingerprint({"a": torch.tensor([0.0])}) != fingerprint({"a": torch.tensor([-0.0])})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.bool, torch.int64])
def test_every_dtype_and_layout_has_a_fingerprint(dtype):
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    assert fingerprint({"a": tensor.t()}) == fingerprint({"a": tensor.t().contiguous()})
    assert fingerprint({"a": tensor[0, 0]}) != fingerprint({"a": tensor[0, 1]})
    assert fingerprint({"a": tensor[:0]})


# ---- memory that is given back for a while


def storage_bytes(weights: dict[str, torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in weights.values())


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_freed_weights_take_no_memory_and_can_be_filled_again(settings):
    """The model's own parameters are the ones that come back, tied as they were."""
    receiver, sender = tiny.make_policy(**settings), tiny.make_policy(seed=1, **settings)
    weights, tensors = receiver.weights(), list(receiver.model.parameters())
    size = storage_bytes(weights)
    free_storage(weights)
    assert storage_bytes(weights) == 0
    take_storage(weights)
    assert storage_bytes(weights) == size
    assign_weights(weights, sender.weights())
    assert fingerprint(receiver.weights()) == fingerprint(sender.weights())
    assert all(one is other for one, other in zip(receiver.model.parameters(), tensors, strict=True))
    for ours, theirs in zip(*(tiny.packed_hidden(of, [tiny.random_ids(9)]) for of in (receiver, sender)), strict=True):
        assert torch.equal(ours, theirs)
    assert (receiver.head.weight_VD is receiver.model.get_input_embeddings().weight) == bool(settings)


def test_tensors_that_are_parts_of_one_storage_come_back_whole():
    storage = torch.arange(6.0)
    weights = {"head": storage[:2], "tail": storage[2:].view(2, 2)}
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    free_storage(weights)
    take_storage(weights)
    assert storage.untyped_storage().nbytes() == 24
    assign_weights(weights, expected)
    assert storage.tolist() == [0, 1, 2, 3, 4, 5]


def test_taking_twice_keeps_what_is_there():
    weights = {"a": torch.arange(3.0)}
    take_storage(weights)
    assert weights["a"].tolist() == [0, 1, 2]
