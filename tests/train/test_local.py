"""The trainer of one process: schedule, clipping, what is not finite, precision, the frozen reference, saving."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import AdapterSettings, Train
from headway.models.cores import FixedCores
from headway.models.distribution import Shape
from headway.models.policy import Policy, add_adapter, with_parity
from headway.models.rows import Rows
from headway.models.weights import fingerprint
from headway.prepare.pack import Packing, pack
from headway.train.local import LocalTrainer
from headway.types import UserError
from tests.batches import make_critic
from tests.tiny import make_bigram, make_policy, own_logprobs, plain, prompt, random_ids, rollout


def make_trainer(policy: Policy, *, temperature: float = 1.0, num_steps: int = 10, **settings: Any) -> LocalTrainer:
    return LocalTrainer(
        policy, Train(**{"learning_rate": 1e-2, **settings}), shape=Shape(temperature), num_steps=num_steps
    )


def two_answers() -> Rows:
    """To one prompt."""
    answers = [rollout(prompt("1+2="), [3, 27], member=0), rollout(prompt("1+2="), [4, 5, 6], member=1)]
    ((one,),) = pack(answers, [0, 0], [0, 1], Packing(99))
    return one.rows


def raise_logprobs(logp_N: torch.Tensor) -> torch.Tensor:
    return -logp_N.sum()


def step(trainer: LocalTrainer, scale: float = 1.0) -> dict[str, Any]:
    trainer.forward_backward(two_answers(), lambda logp_N: scale * raise_logprobs(logp_N))
    return trainer.optim_step()


def state_of(trainer: LocalTrainer, folder: Path) -> dict[str, Any]:
    """What the trainer saves."""
    folder.mkdir(exist_ok=True)
    trainer.save(folder)
    return torch.load(folder / "trainer.pt", weights_only=True)


def logprobs_and_entropy(trainer: LocalTrainer) -> tuple[torch.Tensor, torch.Tensor]:
    result = trainer.forward(two_answers())
    return result.logp_N, result.entropy_N


def equal(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


# ---- the learning rate


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"learning_rate_schedule": "constant"}, [0.1] * 8),
        ({"learning_rate_schedule": "constant", "warmup_steps": 4}, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1, 0.1]),
        ({"learning_rate_schedule": "linear"}, [0.1, 0.1 * 5 / 6, 0.1 * 4 / 6, 0.05, 0.1 * 2 / 6, 0.1 / 6, 0, 0]),
        ({"learning_rate_schedule": "linear", "warmup_steps": 2}, [0.05, 0.1, 0.1, 0.075, 0.05, 0.025, 0, 0]),
        ({"learning_rate_schedule": "cosine", "warmup_steps": 2}, [0.05, 0.1, 0.1, 0.0853553, 0.05, 0.0146447, 0, 0]),
        ({"learning_rate_schedule": "linear", "warmup_steps": 6}, [0.1 * n / 6 for n in (1, 2, 3, 4, 5, 6)] + [0.1, 0]),
    ],
)
def test_the_learning_rate_of_every_step_of_six_and_two_beyond(settings, rates):
    trainer = make_trainer(make_bigram([[0.0, 1.0], [1.0, 0.0]]), num_steps=6, learning_rate=0.1, **settings)
    assert [trainer.optim_step()["learning_rate"] for _ in range(8)] == pytest.approx(rates, abs=1e-6)


def test_the_learning_rate_is_the_one_that_is_applied():
    """Adam's first step moves every weight that has a gradient by the learning rate, whatever the gradient's size."""
    policy = make_bigram([[0.0, 0.0], [0.0, 0.0]])
    trainer = make_trainer(policy, learning_rate=0.1, warmup_steps=4)
    policy.model.table_VD.grad = torch.tensor([[3.0, -2.0], [0.0, 1e-3]])
    trainer.optim_step()
    assert policy.model.table_VD.flatten().tolist() == pytest.approx([-0.025, 0.025, 0.0, -0.025], abs=1e-5)


# ---- gradients


def test_gradients_accumulate_until_the_step(policy):
    trainer = make_trainer(policy)
    trainer.forward_backward(two_answers(), raise_logprobs)
    once = policy.head.weight_VD.grad.clone()
    trainer.forward_backward(two_answers(), raise_logprobs)
    torch.testing.assert_close(policy.head.weight_VD.grad, 2 * once)
    trainer.optim_step()
    assert all(parameter.grad is None for parameter in policy.model.parameters())


@pytest.mark.parametrize(("max_norm", "applied"), [(2.5, 2.5), (5.0, 5.0), (6.0, 5.0)])
def test_a_gradient_is_scaled_down_to_the_largest_norm(tmp_path, max_norm, applied):
    """Norm of (3, 4) is 5. Adam's first moment is (1 - beta1) times the gradient it was given."""
    policy = make_bigram([[0.0, 0.0], [0.0, 0.0]])
    trainer = make_trainer(policy, max_grad_norm=max_norm, beta1=0.9)
    policy.model.table_VD.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert trainer.optim_step()["grad_norm"] == pytest.approx(5.0)
    (moments,) = state_of(trainer, tmp_path)["optimizer"]["state"].values()
    expected = [0.1 * 0.6 * applied, 0.0, 0.0, 0.1 * 0.8 * applied]
    assert moments["exp_avg"].flatten().tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("scale", [math.inf, math.nan, 1e38])
def test_a_gradient_that_is_not_finite_is_skipped_counted_and_said(policy, tmp_path, scale):
    trainer = make_trainer(policy)
    step(trainer)
    before = state_of(trainer, tmp_path)
    metrics = step(trainer, scale)
    after = state_of(trainer, tmp_path)
    assert equal(after["weights"], before["weights"])
    assert equal(after["optimizer"]["state"], before["optimizer"]["state"])
    assert (metrics["skipped_steps"], metrics["grad_norm"]) == (1, None)
    assert "this step was skipped and the weights are unchanged" in metrics["warning"]
    assert step(trainer)["skipped_steps"] == 1
    assert step(trainer, scale)["skipped_steps"] == 2
    assert not equal(state_of(trainer, tmp_path)["weights"], before["weights"])


def test_a_good_step_carries_no_warning(policy):
    assert set(step(make_trainer(policy))) == {"grad_norm", "learning_rate", "skipped_steps"}


def test_learning_rate_0_moves_nothing(policy):
    before = fingerprint(policy.weights())
    trainer = make_trainer(policy, learning_rate=0.0, weight_decay=0.1, warmup_steps=2)
    assert [step(trainer)["learning_rate"] for _ in range(4)] == [0.0] * 4
    assert fingerprint(policy.weights()) == before


def test_weight_decay_is_decoupled_from_the_gradient():
    policy = make_bigram([[2.0, 0.0], [0.0, 2.0]])
    trainer = make_trainer(policy, learning_rate=0.1, weight_decay=0.5)
    policy.model.table_VD.grad = torch.zeros(2, 2)
    trainer.optim_step()
    assert policy.model.table_VD.flatten().tolist() == pytest.approx([1.9, 0.0, 0.0, 1.9])


# ---- log-probs


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_log_probs_are_the_models_own_at_the_sampling_temperature(policy, temperature):
    trainer = make_trainer(policy, temperature=temperature)
    logp_N, entropy_N = logprobs_and_entropy(trainer)
    prompt_tokens = prompt("1+2=").tokens
    expected = [own_logprobs(policy, prompt_tokens, answer, temperature) for answer in ([3, 27], [4, 5, 6])]
    torch.testing.assert_close(logp_N, torch.cat(expected), atol=1e-5, rtol=0)
    assert not logp_N.requires_grad
    assert (entropy_N > 0).all()


def test_log_probs_are_those_among_the_kept_ids(policy):
    """log p(token) - log p(kept), with entropies of the same distribution, for trainer and reference alike."""
    whole = two_answers()
    kept = ([3, 5], None, [0, 4, 7, 9], [5], [6, 8])
    trainer = with_reference(policy, temperature=0.7)
    full_NV = _own_distributions(policy, temperature=0.7)
    expected = [
        full_N[target] - (full_N[list(ids)].logsumexp(0) if ids else 0.0)
        for full_N, target, ids in zip(full_NV, whole.target_N.tolist(), kept, strict=True)
    ]
    for reference in (False, True):
        result = trainer.forward(replace(whole, kept=kept), reference=reference)
        torch.testing.assert_close(result.logp_N, torch.stack(expected), atol=1e-5, rtol=0)
        assert result.logp_N[3] == result.entropy_N[3] == 0.0, "one id was left to choose from"
        p = (full_NV[0][3] - full_NV[0][[3, 5]].logsumexp(0)).exp()
        by_hand = -(p * p.log() + (1 - p) * (1 - p).log())
        assert result.entropy_N[0] == pytest.approx(by_hand.item(), abs=1e-5)


def test_log_probs_are_those_after_a_repetition_penalty(policy):
    """Logits of the ids of prompt and answer so far, divided by 2 where positive and multiplied where negative."""
    trainer = LocalTrainer(policy, Train(learning_rate=0.0), shape=Shape(0.7, 2.0), num_steps=9)
    expected = []
    for answer in ([3, 27], [4, 5, 6]):
        context = list(prompt("1+2=").tokens)
        for target in answer:
            logits_V = plain(policy)(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1].detach()
            penalised_V = torch.where(logits_V > 0, logits_V / 2, logits_V * 2)
            is_seen_V = torch.isin(torch.arange(len(logits_V)), torch.tensor(context))
            shaped_V = torch.where(is_seen_V, penalised_V, logits_V) / 0.7
            expected.append(shaped_V[target] - shaped_V.logsumexp(0))
            context.append(target)
    torch.testing.assert_close(trainer.forward(two_answers()).logp_N, torch.stack(expected), atol=1e-5, rtol=0)


def _own_distributions(policy: Policy, temperature: float) -> torch.Tensor:
    """Log-probs [N, V] before each token of `two_answers`, by the model's own forward pass."""
    contexts = [
        prompt("1+2=").tokens + answer[:length] for answer in ((3,), (4, 5)) for length in range(len(answer) + 1)
    ]
    logits_NV = [plain(policy)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in contexts]
    return torch.log_softmax(torch.stack(logits_NV).detach() / temperature, -1)


def test_forward_and_forward_backward_agree(policy):
    trainer = make_trainer(policy)
    logp_N, entropy_N = logprobs_and_entropy(trainer)
    result = trainer.forward_backward(two_answers(), raise_logprobs)
    assert torch.equal(result.logp_N, logp_N)
    assert torch.equal(result.entropy_N, entropy_N)
    assert result.loss == pytest.approx(-logp_N.sum().item())
    assert not result.logp_N.requires_grad


@pytest.mark.parametrize("trainer_of", [make_trainer, make_critic])
def test_gradients_are_the_same_bits_every_time_on_two_threads(trainer_of):
    """A long prompt that many answers share: its keys, and its last row, get a gradient from each of them. Sums large
    enough for torch to share them out.
    """
    policy = make_policy(hidden_size=128, num_attention_heads=4, head_dim=32, max_position_embeddings=512)
    policy = with_parity(policy, "bitwise")
    question = replace(prompt("1+2="), tokens=tuple(random_ids(200).tolist()))
    answers = [rollout(question, random_ids(9, seed).tolist(), member=seed) for seed in range(32)]
    ((one,),) = pack(answers, [0] * 32, range(32), Packing(9999))
    trainer = trainer_of(policy)
    model = policy.model if trainer_of is make_trainer else trainer._model
    seen = set()
    try:
        trainer._cores = FixedCores(2)
        for _ in range(5):
            trainer.forward_backward(one.rows, lambda x_N: (x_N * torch.linspace(-1, 1, len(x_N))).sum())
            seen.add(fingerprint({name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
            model.zero_grad()
    finally:
        torch.set_num_threads(1)
    assert len(seen) == 1


# ---- the frozen reference


def with_reference(policy: Policy, *, temperature: float = 1.0, **settings: Any) -> LocalTrainer:
    return LocalTrainer(
        policy,
        Train(**{"learning_rate": 0.01, **settings}),
        shape=Shape(temperature),
        num_steps=9,
        reference=copy.deepcopy(policy),
    )


def test_the_reference_keeps_its_bits_while_the_policy_learns(policy):
    trainer = with_reference(policy)
    before = fingerprint(trainer._reference.weights())
    first = trainer.forward(two_answers(), reference=True).logp_N
    assert torch.equal(first, trainer.forward(two_answers()).logp_N)
    for _ in range(3):
        step(trainer)
        assert torch.equal(trainer.forward(two_answers(), reference=True).logp_N, first)
    assert (trainer.forward(two_answers()).logp_N - first).abs().max() > 0.01
    assert fingerprint(trainer._reference.weights()) == before


def test_the_reference_computes_as_the_trainer_does(policy):
    """In bfloat16 products too: what differs between the two is learning, and no rounding."""
    trainer = with_reference(policy, compute_dtype="bfloat16")
    ours, theirs = (trainer.forward(two_answers(), reference=reference).logp_N for reference in (False, True))
    assert torch.equal(ours, theirs)


def test_an_adapters_base_is_its_own_reference():
    """No second copy: the policy is switched back, and forwards again afterwards."""
    policy = add_adapter(make_policy(), AdapterSettings(kind="lora"), seed=0)
    trainer = make_trainer(policy, learning_rate=0.05)
    first = trainer.forward(two_answers()).logp_N
    for _ in range(3):
        step(trainer)
    learned = trainer.forward(two_answers()).logp_N
    assert (learned - first).abs().max() > 0.01
    assert torch.equal(trainer.forward(two_answers(), reference=True).logp_N, first)
    assert torch.equal(trainer.forward(two_answers()).logp_N, learned)


def test_without_a_reference_nobody_is_given_the_policy_instead(policy):
    with pytest.raises(AssertionError, match="there is none"):
        make_trainer(policy).forward(two_answers(), reference=True)


# ---- precision


def test_bfloat16_products_leave_masters_and_moments_in_float32(policy, tmp_path):
    trainer = make_trainer(policy, compute_dtype="bfloat16")
    step(trainer)
    state = state_of(trainer, tmp_path)
    assert {tensor.dtype for tensor in state["weights"].values()} == {torch.float32}
    moments = [moment for entry in state["optimizer"]["state"].values() for moment in entry.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}


def test_bfloat16_products_are_near_the_float32_ones_and_not_the_same(policy):
    exact = make_trainer(policy).forward(two_answers()).logp_N
    rough = make_trainer(policy, compute_dtype="bfloat16").forward(two_answers()).logp_N
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max() < 0.3


def test_b17a_small_updates_are_not_lost_with_bfloat16_products():
    """1000 updates of -1e-6: bfloat16 masters would stay at 1, and at 0.010009766."""
    policy = make_bigram([[1.0, 0.01], [1.0, 0.01]])
    trainer = make_trainer(policy, compute_dtype="bfloat16", learning_rate=1e-6)
    for _ in range(1000):
        policy.model.table_VD.grad = torch.ones(2, 2)
        trainer.optim_step()
    assert policy.model.table_VD.T[0].tolist() == pytest.approx([0.999, 0.009], abs=2e-5)


def test_b17b_the_head_is_float32_with_bfloat16_products():
    """Logits 20 and 19.95: in bfloat16 both are 20, and the log-prob is -0.693147."""
    policy = make_bigram([[20.0, 19.95]] * 2)
    answers = [rollout(prompt("0"), [0], member=member) for member in range(2)]
    ((one,),) = pack(answers, [0, 0], [0, 1], Packing(9))
    logp_N = make_trainer(policy, compute_dtype="bfloat16").forward(one.rows).logp_N
    assert logp_N.tolist() == pytest.approx([-0.668460] * 2, abs=1e-5)


# ---- saving


def test_a_loaded_trainer_goes_on_bit_for_bit(tmp_path):
    settings = {"learning_rate_schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.01, "num_steps": 8}
    trainer = make_trainer(make_policy(seed=0), **settings)
    for scale in (1.0, 3.0, math.inf, 1.0):
        step(trainer, scale)
    trainer.save(tmp_path)
    resumed = make_trainer(make_policy(seed=1), **settings)
    resumed.load(tmp_path)
    for scale in (1.0, math.nan, 2.0):
        assert equal(step(resumed, scale), step(trainer, scale))
    assert equal(state_of(resumed, tmp_path / "resumed"), state_of(trainer, tmp_path / "trainer"))
    assert fingerprint(resumed.weights()) == fingerprint(trainer.weights())


def test_a_trainer_of_another_model_is_not_loaded(policy, tmp_path):
    make_trainer(make_policy("qwen3")).save(tmp_path)
    before = fingerprint(policy.weights())
    with pytest.raises(UserError, match="was sent to a model that has none of that name"):
        make_trainer(policy).load(tmp_path)
    assert fingerprint(policy.weights()) == before


def test_settings_of_a_resumed_run_hold_over_saved_ones(tmp_path):
    """Moments are restored; how they are used is for the configuration to say."""
    trainer = make_trainer(make_policy(), weight_decay=0.0)
    step(trainer)
    trainer.save(tmp_path)
    policy = make_policy()
    resumed = make_trainer(policy, weight_decay=0.5, learning_rate=0.1)
    resumed.load(tmp_path)
    before = policy.head.weight_VD.detach().clone()
    untouched = make_trainer(make_policy(), weight_decay=0.0, learning_rate=0.1)
    untouched.load(tmp_path)
    step(resumed)
    step(untouched)
    difference = untouched.weights()["lm_head.weight"] - policy.head.weight_VD.detach()
    torch.testing.assert_close(difference, 0.05 * before, atol=1e-5, rtol=1e-4)


def test_a_checkpoint_that_cant_be_written_whole_is_an_error_of_the_disk(policy, tmp_path, monkeypatch):
    def full(state: Any, path: Path) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 919168 vs 919060")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="is the disk full") as caught:
        make_trainer(policy).save(tmp_path)
    assert caught.value.filename == str(tmp_path / "trainer.pt")
