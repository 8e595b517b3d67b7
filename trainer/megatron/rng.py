"""The random generators of one rank: Python's, NumPy's, torch's, and Megatron's tracker."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import random as tp_random


def rng_state() -> dict[str, Any]:
    """Every generator's state on this rank, as JSON."""
    tracker = tp_random.get_cuda_rng_tracker().get_states()
    numpy = np.random.get_state(legacy=False)
    return {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()),
        "tracker": {name: _encode(state) for name, state in tracker.items()},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = state["numpy"]
    numpy["state"]["key"] = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy)
    tracker = {name: _decode(value) for name, value in state["tracker"].items()}
    tp_random.get_cuda_rng_tracker().set_states(tracker)
    torch.cuda.set_rng_state(_decode(state["cuda"]))
    torch.set_rng_state(_decode(state["torch"]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
