"""The rows that each rank trains of a batch that rank 0 holds, and what rank 0 hears of them.

Ranks that are replicas of each other (data parallelism) have one share each; those that cut a model or a sequence have
the same one. All functions are collective.

Shapes: B rows, T label positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from megatron.core import parallel_state as ps
from torch import Tensor

from trainer.batch import MASK, Fields, share
from trainer.megatron.parallel import broadcast_json, gather_json, scatter_tensors, to_rank_zero


class Whole(NamedTuple):
    """A batch, of which a forward pass takes `micro_batch` rows at most. `unit` rows that follow each other stay
    together."""

    fields: Fields
    micro_batch: int
    unit: int = 1


class Shares:
    """Built after `parallel.split`, on every rank."""

    def __init__(self) -> None:
        speaks = ps.is_pipeline_last_stage() and not (
            ps.get_tensor_model_parallel_rank() or ps.get_context_parallel_rank()
        )
        places = gather_json([ps.get_data_parallel_rank(), speaks])
        self._of_ranks: list[int] = [number for number, _ in places]
        # The ranks that tell rank 0 what the models said, by share.
        self._speakers = [places.index([number, True]) for number in range(ps.get_data_parallel_world_size())]

    def __len__(self) -> int:
        return len(self._speakers)

    def hand_out(self, wholes: Sequence[Whole] | None, group: int) -> list[list[Fields]]:
        """This rank's micro-batches of each of rank 0's batches, a multiple of `group`; what other ranks give is not
        looked at."""
        cuts = [self._cut(whole, group) for whole in wholes or []]
        mine = []
        for number, size in enumerate(broadcast_json([by_share[0][0] for by_share in cuts])):
            fields = scatter_tensors([cuts[number][share][1] for share in self._of_ranks] if cuts else None)
            count = len(fields[MASK]) // size
            mine.append([{n: t[i * size : (i + 1) * size] for n, t in fields.items()} for i in range(count)])
        return mine

    def to_rank_zero(self, said: list[Tensor], like: list[Tensor], rows: int) -> Tensor | None:
        """On rank 0 what the models said about the `rows` of its batch, in order; None elsewhere. `said` are the
        outputs for this rank's micro-batches, on the last pipeline stage; `like` has their shapes, on every rank."""
        everyone = to_rank_zero(torch.cat(said or like), self._speakers)
        return torch.cat(everyone)[:rows] if everyone else None

    def _cut(self, whole: Whole, group: int) -> list[tuple[int, Fields]]:
        """For each share the rows of one of its micro-batches, and all of its rows."""
        fields, micro_batch, unit = whole
        cut = [share(fields, number, len(self), micro_batch, unit, group) for number in range(len(self))]
        return [(len(m[0][MASK]), {name: torch.cat([part[name] for part in m]) for name in fields}) for m in cut]
