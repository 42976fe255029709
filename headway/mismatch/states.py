"""Hidden states of one sequence, layer by layer, as a model computes them; and where two models part.

Axes: T positions of the sequence, D hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from headway.models.policy import Policy
from headway.reports.mismatch_table import Stage

EMBEDDING, NORM, LOGPROBS = "embedding", "final norm", "log-probs"

USUAL_LOGIT = 16.0

Rows = Callable[[Sequence[int], int], int]
"""Positions of a pass's rows, and how many of the sequence are known -> how many rows, from the first, are its next."""


class States:
    """Stage -> its output at the positions of the watched sequence, in their order; empty before it was seen."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self.num_known = self._num_now = 0

    def begin(self, num_rows: int) -> None:
        self._num_now = num_rows

    def add(self, stage: str, output_TD: torch.Tensor) -> None:
        if self._num_now:
            self._parts[stage].append(output_TD[: self._num_now].detach().float().cpu().clone())

    def end(self) -> None:
        self.num_known += self._num_now
        self._num_now = 0

    def stages(self) -> dict[str, torch.Tensor]:
        return {stage: torch.cat(parts) for stage, parts in self._parts.items()}


def first_in_engine(prompt_tokens: int) -> Rows:
    """The rows of the rollout that an engine admitted first: they are the first of each of its passes."""

    def num_rows(positions: Sequence[int], num_known: int) -> int:
        if positions[0] != num_known:  # it has ended, and this is another one
            return 0
        return 1 if num_known >= prompt_tokens else min(prompt_tokens - num_known, len(positions))

    return num_rows


def first_packed(num_tokens: int) -> Rows:
    """The first `num_tokens` rows of the first pass: a prompt and its first answer."""
    return lambda positions, num_known: 0 if num_known else min(num_tokens, len(positions))


@contextmanager
def watch(policy: Policy, rows: Rows) -> Iterator[States]:
    """Within the block, what the policy's model computes of the sequence that `rows` picks."""
    states = States()
    base: Any = policy.model.base_model

    def before(module: Any, args: Any, given: dict[str, Any]) -> None:
        num_rows = given["attention_plan"].num_rows  # without those that fill up a tile
        states.begin(rows(given["position_ids"][0, :num_rows].tolist(), states.num_known))

    def after(module: Any, args: Any, output: Any) -> None:
        states.add(NORM, output.last_hidden_state[0])
        states.end()

    def keeps(stage: str) -> Callable[..., None]:
        def keep(module: Any, args: Any, output: Any) -> None:
            states.add(stage, (output[0] if isinstance(output, tuple) else output)[0])

        return keep

    handles = [base.register_forward_pre_hook(before, with_kwargs=True)]
    for stage, module in (
        (EMBEDDING, policy.model.get_input_embeddings()),
        *((f"layer {number}", layer) for number, layer in enumerate(_layers(policy))),
    ):
        handles.append(module.register_forward_hook(keeps(stage)))
    handles.append(base.register_forward_hook(after))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _layers(policy: Policy) -> Sequence[torch.nn.Module]:
    """The model's layers, whatever their list is called; none, where there is no such list."""
    num_layers = policy.model.config.get_text_config().num_hidden_layers
    lists = [module for module in policy.model.base_model.modules() if isinstance(module, torch.nn.ModuleList)]
    return next((list(one) for one in lists if len(one) == num_layers), [])


def compare(engine: States, trainer: States, positions: Sequence[int]) -> list[Stage]:
    """Stage by stage at the given positions, which both know."""
    theirs, ours = engine.stages(), trainer.stages()
    index_T = torch.tensor(positions)
    return [_stage(name, theirs[name][index_T], ours[name][index_T]) for name in ours if len(index_T)]


def _stage(name: str, engine_TD: torch.Tensor, trainer_TD: torch.Tensor) -> Stage:
    """relative: of the position where it is largest, the length of the difference over the trainer's."""
    difference_TD = engine_TD - trainer_TD
    length_T = trainer_TD.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    relative_T = difference_TD.norm(dim=-1) / length_T
    return Stage(name, difference_TD.abs().max().item(), relative_T.max().item())


def compare_logprobs(engine_N: torch.Tensor, trainer_N: torch.Tensor) -> Stage:
    """The last stage, of the tokens of the watched answer. relative: to a log-prob, or to a logit's usual size, where
    that is larger: log-probs are differences of logits, and no more exact.
    """
    difference_N = (engine_N - trainer_N).abs()
    relative_N = difference_N / trainer_N.abs().clamp_min(USUAL_LOGIT)
    return Stage(LOGPROBS, difference_N.max().item(), relative_N.max().item())
