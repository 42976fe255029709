"""A group's prompt is computed once in the trainer, too, and nothing comes out differently.

`test_prepare.py` compares packed rows with one rollout at a time through the model of `transformers`, for a whole
train step; here nothing differs but the sharing.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from headway.models.policy import Policy
from headway.prepare.pack import Packing, pack
from headway.types import Rollout
from tests.batches import make_trainer, many_groups
from tests.tiny import make_policy


def gradients_of(
    policy: Policy, rollouts: Sequence[Rollout], groups: Sequence[int]
) -> tuple[int, torch.Tensor, dict[str, torch.Tensor]]:
    """(rows, the log-prob of every trained token, gradients) of all rollouts in one pass, each token with a weight."""
    ((one,),) = pack(rollouts, groups, range(len(rollouts)), Packing(4096))
    weight_N = torch.linspace(-1, 2, len(one.token_N))[one.token_N]
    policy.model.zero_grad()
    result = make_trainer(policy).forward_backward(one.rows, lambda logp_N: (weight_N * logp_N).sum())
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    return len(one.rows.ids_T), result.logp_N[one.token_N.argsort()], found


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_computed_once_gives_the_gradients_of_one_computed_for_every_answer(architecture, seed):
    members = many_groups(num=4, size=5, seed=seed)
    rollouts = [s.rollout for group in members for s in group]
    group_of = [number for number, group in enumerate(members) for _ in group]
    policy = make_policy(architecture)
    once_rows, once_logp, once = gradients_of(policy, rollouts, group_of)
    each_rows, each_logp, each = gradients_of(policy, rollouts, range(len(rollouts)))
    assert each_rows - once_rows == sum((len(group) - 1) * len(group[0].rollout.prompt.tokens) for group in members)
    torch.testing.assert_close(once_logp, each_logp, atol=1e-5, rtol=0)
    assert once.keys() == each.keys()
    assert len(once) > 10
    for name in once:
        assert (once[name] - each[name]).abs().max() <= 2e-5 * each[name].abs().max(), name
