"""Recorded routing in trajectories: the experts that the engine's routers sent tokens to, as /generate writes them
(docs/api.md): base64 of an array in NumPy's .npy format, [tokens, layers, experts per token].

It stays text until it is trained on: trajectories are compared, and written into checkpoints. A turn has the rows that
follow those of the turns before it, so those of a trajectory stand end to end from the prompt's first token on. A token
keeps the row of the pass that sampled the token after it, whatever computed it again for a later turn.
"""

from __future__ import annotations

import base64
import io

import numpy as np
import torch

from trainer.trajectory import Trajectory


def tokens(text: str | None) -> int:
    """How many tokens it is of. Raises ValueError for what is no such array."""
    return 0 if text is None else len(_decoded(text))


def joined(first: str | None, more: str | None) -> str | None:
    """The rows of both. Raises ValueError for what is no such array, or of another model than `first`."""
    if more is None:
        return first
    rows = _decoded(more)
    if first is None:
        return more
    with io.BytesIO() as file:
        np.save(file, np.concatenate([_decoded(first), rows]), allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode()


def of_trajectory(prompt: int, trajectory: Trajectory) -> torch.Tensor | None:
    """As `Sequence.routing` has it, of a trajectory after so many tokens of a prompt: int32 [tokens - 1, layers, k], -1
    where nothing was recorded. None if that is everywhere."""
    recorded = [_decoded(turn.routing) for turn in trajectory.turns if turn.routing is not None]
    if not recorded:
        return None
    rows = torch.from_numpy(np.concatenate(recorded).astype(np.int32))
    experts = torch.full((prompt + len(trajectory.token_ids) - 1, *rows.shape[1:]), -1, dtype=torch.int32)
    experts[: len(rows)] = rows[: len(experts)]
    return experts


def _decoded(text: str) -> np.ndarray:
    try:
        rows: np.ndarray = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"routing that is no array: {error}") from None
    if rows.ndim != 3 or rows.dtype.kind != "u":
        raise ValueError(f"routing of shape {rows.shape} and type {rows.dtype} is not [tokens, layers, experts]")
    return rows
