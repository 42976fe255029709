"""What a model's forward pass takes: flat rows without padding, and which of them say something of which token.

Axes: T rows, N trained tokens, R rollouts that the token budget cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from headway.models.attention import Segment


@dataclass(frozen=True)
class Rows:
    """What one forward pass takes, and nothing more.

    ids_T, positions_T: the rows; segments: which rows see which. row_N: the row that predicts each trained token, which
    is the state before that token; target_N: the token's id. last_row_R: the row after a cut-off rollout's last token,
    where a critic says what the rest would have brought; last_rollout_R: the rollout's number in its batch. Both are
    empty where no critic asks. kept: the ids among which each trained token was drawn, None for one that could have
    been any; None where that holds for all.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    segments: tuple[Segment, ...]
    row_N: torch.Tensor
    target_N: torch.Tensor
    last_row_R: torch.Tensor
    last_rollout_R: torch.Tensor
    kept: tuple[Sequence[int] | None, ...] | None = None

    def to(self, device: torch.device) -> Rows:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{n: value.to(device) for n, value in values.items() if isinstance(value, torch.Tensor)})

    @property
    def num_pairs(self) -> int:
        """Of a row and a row that it sees: what attention computes."""
        return sum(
            segment.length * segment.prefix_length + segment.length * (segment.length + 1) // 2
            for segment in self.segments
        )

    def seen(self) -> list[torch.Tensor]:
        """The different ids of the rows that each trained token follows: those its own row sees, and itself."""
        segment_of = {
            row: segment for segment in self.segments for row in range(segment.start, segment.start + segment.length)
        }
        return [self._context(row, segment_of[row]) for row in self.row_N.tolist()]

    def _context(self, row: int, segment: Segment) -> torch.Tensor:
        prefix = self.ids_T[segment.prefix_start : segment.prefix_start + segment.prefix_length]
        return torch.cat([prefix, self.ids_T[segment.start : row + 1]]).unique()
