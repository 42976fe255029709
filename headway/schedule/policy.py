"""Pure rules: what may happen now. They read the ledger and change nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.schedule.ledger import Group, Ledger


@dataclass(frozen=True)
class Rules:
    """Bounded run-ahead, batches in order of completion, stragglers accepted.

    run_ahead: how many batches generation may run ahead of training; may be fractional.
    """

    run_ahead: float

    def batch(self, ledger: Ledger) -> list[Group] | None:
        """The first groups that finished, once they are enough for the idle trainer; the rest when the data end."""
        if ledger.trainer_busy or ledger.steps_done or ledger.save_due:
            return None
        size = ledger.settings.groups_per_batch
        data_ended = ledger.exhausted and len(ledger.active) == len(ledger.ready)
        if len(ledger.ready) < size and not (data_ended and ledger.ready):
            return None
        return [ledger.active[index] for _, index in ledger.ready[:size]]

    def may_publish(self, ledger: Ledger) -> bool:
        """New weights are there, and nobody is being evaluated under the old ones."""
        return ledger.trained > ledger.published and not ledger.publishing and ledger.evaluation is None

    def may_save(self, ledger: Ledger) -> bool:
        """A checkpoint is due, and the trainer holds what was published."""
        return ledger.save_due and not ledger.trainer_busy

    def may_evaluate(self, ledger: Ledger) -> bool:
        """A lane is free and the open evaluation has an unasked prompt."""
        evaluation = ledger.evaluation
        return bool(ledger.idle_lanes) and evaluation is not None and evaluation.num_started < evaluation.size

    def may_start(self, ledger: Ledger) -> bool:
        """A lane is free, and a group is open or the admission rule lets a new one start."""
        if not ledger.idle_lanes or ledger.steps_done or ledger.exhausted:
            return False
        return ledger.group_open or ledger.groups_started - ledger.groups_released < self.num_admitted(ledger)

    def num_admitted(self, ledger: Ledger) -> int:
        """(published + run_ahead + 1) batches, in whole groups, rounded down (AReaL, arXiv 2505.24298, section 5.1)."""
        size = ledger.settings.groups_per_batch
        ahead = round(self.run_ahead * size, 6)  # 0.29 x 100 is 29 groups, and 28.999... in binary fractions
        return (ledger.published + 1) * size + math.floor(ahead)
