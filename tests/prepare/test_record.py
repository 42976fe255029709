"""Forward passes before the first update: exactly those that the objective needs, and what they record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from headway.objectives.named import PRESETS, objective
from headway.objectives.parts import Objective
from headway.types import Rollout
from tests.batches import Counted, asked, make_critic, make_trainer, many_groups, prepared
from tests.tiny import make_policy, own_logprobs, rollout, scored

GRPO = objective("grpo", kl_coefficient=0, corrections=["tis"])


@pytest.mark.parametrize(
    ("by", "optimizer_steps", "passes", "needed"),
    [
        (GRPO, 1, 1, set()),
        (GRPO, 2, 1, {"forward"}),
        (GRPO, 1, 2, {"forward"}),
        (objective("grpo"), 1, 1, {"reference"}),
        (objective("grpo"), 2, 1, {"forward", "reference"}),
        (objective("grpo", kl_coefficient=0, reward_kl=0.1), 1, 1, {"forward", "reference"}),
        (objective("olmo3", self_normalise=True), 1, 1, {"forward"}),
        (objective("glm5_async"), 4, 2, set()),  # its only ratio is against the policy that sampled
        (objective("decoupled_ppo", proximal="interpolated"), 4, 1, set()),
        (objective("online_dpo"), 1, 1, {"reference"}),
        (objective("ppo"), 1, 1, {"values"}),
        (objective("ppo"), 2, 1, {"forward", "values"}),
    ],
    ids=lambda value: value.name if isinstance(value, Objective) else None,
)
def test_the_passes_that_are_needed_are_made_once_per_micro_batch_and_no_others(by, optimizer_steps, passes, needed):
    policy = make_policy()
    trainer = Counted(make_trainer(policy, with_reference=True))
    critic = Counted(make_critic(policy))
    batch = prepared(
        by,
        many_groups(),
        budget=30,
        optimizer_steps=optimizer_steps,
        passes=passes,
        trainer=trainer,
        critic=critic,
    )
    num = len(batch.micro_batches)
    assert num > 1
    assert trainer.calls == dict.fromkeys(needed - {"values"}, num)
    assert critic.calls == ({"forward": num} if "values" in needed else {})
    for micro in batch.micro_batches:
        found = {
            "forward": micro.tokens.proximal_N,
            "reference": micro.tokens.reference_N,
            "values": micro.tokens.value_N,
        }
        assert {name for name, value_N in found.items() if value_N is not None} == set(needed)


@pytest.mark.parametrize("name", [name for name in PRESETS if not PRESETS[name].needs_critic])
def test_one_optimizer_step_needs_log_probs_before_it_only_for_rewards(name):
    trainer = Counted(make_trainer(make_policy(), with_reference=True))
    by = replace(objective(name), length=9)
    prepared(by, many_groups(), trainer=trainer)
    assert (trainer.calls["forward"] > 0) == (by.reward_kl > 0)
    assert (trainer.calls["reference"] > 0) == by.needs_reference


def test_a_micro_batch_without_a_trained_token_costs_no_pass():
    masked = rollout(asked("p", 1, 2), [3, 4, 5], member=0, mask=[False] * 3)
    trained = rollout(asked("p", 1, 2), [6, 7], member=1)
    trainer = Counted(make_trainer(make_policy(), with_reference=True))
    prepared(objective("grpo"), [[scored(masked, 0.0), scored(trained, 1.0)]], budget=1, trainer=trainer)
    assert trainer.calls == {"reference": 1}


def by_token(answers: Sequence[Rollout], policy) -> list[float]:
    with torch.no_grad():
        logp = [own_logprobs(policy, a.prompt.tokens, a.tokens) if a.tokens else torch.zeros(0) for a in answers]
    return [
        value
        for answer, logp_T in zip(answers, logp, strict=True)
        for value, trained in zip(logp_T.tolist(), answer.mask, strict=True)
        if trained
    ]


@pytest.mark.parametrize("optimizer_steps", [1, 3])
def test_what_is_recorded_stands_beside_its_token(optimizer_steps):
    """Log-probs under the policy and its reference, by the model's own forward pass, whatever part a token is in."""
    policy = make_policy()
    trainer = make_trainer(policy, with_reference=True)
    with torch.no_grad():
        policy.head.weight_VD.mul_(1.1)
    by = objective("grpo", reward_kl=0.1)
    batch = prepared(by, many_groups(), budget=25, optimizer_steps=optimizer_steps, trainer=trainer)
    proximal, reference = by_token(batch.rollouts, policy), by_token(batch.rollouts, make_policy())
    found: dict[str, list[tuple[tuple[int, int], float]]] = {"proximal_N": [], "reference_N": []}
    for micro in batch.micro_batches:
        places = zip(micro.tokens.rollout_N.tolist(), micro.tokens.position_N.tolist(), strict=True)
        for place, *values in zip(places, *(getattr(micro.tokens, name).tolist() for name in found), strict=True):
            for name, value in zip(found, values, strict=True):
                found[name].append((place, value))
    for name, expected in (("proximal_N", proximal), ("reference_N", reference)):
        assert [value for _, value in sorted(found[name])] == pytest.approx(expected, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(proximal, reference, strict=True)) > 0.01


def test_gae_reads_values_before_each_token_and_after_the_last_one_of_an_answer_that_was_cut_off():
    """Prompt 1 2; answers 3 4 (ended), 5 6 7 (cut off; 6 is text of a tool). gamma 1, lambda 0.9, reward 1 and 0.

    V_t is the value after the rows before token t. The tool's text ends nothing: after 5 comes the state before 7.
    """
    policy = make_policy()
    critic = make_critic(policy)
    p = asked("p", 1, 2)
    answers = [
        rollout(p, [3, 4], member=0),
        rollout(p, [5, 6, 7], member=1, mask=[True, False, True], finish="length"),
    ]
    by = objective("ppo", lam=0.9, whiten=False)
    for budget in (1, 99):
        batch = prepared(by, [[scored(answers[0], 1.0), scored(answers[1], 0.0)]], budget=budget, critic=critic)
        value = {ids: value_after(critic, [1, 2, *ids]) for ids in [(), (3,), (5,), (5, 6), (5, 6, 7)]}
        v0, v3, v56, v567 = value[()], value[3,], value[5, 6], value[5, 6, 7]
        ended = [None, 1 - v3]
        ended[0] = (v3 - v0) + 0.9 * ended[1]
        cut = [None, 0 + v567 - v56]
        cut[0] = (v56 - v0) + 0.9 * cut[1]
        tokens = [micro.tokens for micro in batch.micro_batches]
        found = torch.cat([part.advantage_N for part in tokens])
        assert found.tolist() == pytest.approx([*ended, *cut], abs=1e-5)
        values = [v0, v3, v0, v56]
        assert torch.cat([part.value_N for part in tokens]).tolist() == pytest.approx(values, abs=1e-5)
        returns = [advantage + before for advantage, before in zip([*ended, *cut], values, strict=True)]
        assert torch.cat([part.return_N for part in tokens]).tolist() == pytest.approx(returns, abs=1e-5)
        assert len({round(v, 4) for v in value.values()}) == 5
        assert batch.metrics["value_mean"] == pytest.approx(sum(values) / 4, abs=1e-5)
        assert batch.metrics["return_mean"] == pytest.approx(sum(returns) / 4, abs=1e-5)


def value_after(critic, ids: Sequence[int]) -> float:
    """By the transformer's own forward pass of one sequence."""
    model = critic._model
    model.base.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            hidden_TD = model.base(input_ids=torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
            return (hidden_TD[-1] @ model.weight_D + model.bias).item()
    finally:
        model.base.config._attn_implementation = "headway"
