"""What a trainer does to a fleet: it publishes versions and has them swapped in, over and over.

`python -m loadtest.chaos.publisher STORE MODEL SEED CHECKPOINT...`, one for each model. Small versions differ in one
matrix, so they travel as differences; large ones in most of them, though not in what they answer. Some are rolled out,
some rolled back. One in eight is bad: with a NaN or an infinity, which staging must refuse, or finite and overflowing,
which is rolled back as soon as it runs. Says a JSON line for each. What the store refuses, or cannot answer, is tried
again with a new publisher.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import load_file

from loadtest.chaos.models import CHECKPOINTS, REFUSED, Bad, badness
from weightsync import Publisher
from weightsync.control.records import OnLost, SwapMode
from weightsync.errors import SwapAborted, SwapTimeout, WeightSyncError

PAUSE_S = (1.0, 4.0)
AGAIN_S = 1.0
BAD_S = (0.0, 2.0)
ROLLED_BACK, ROLLING, ABORTING = 0.2, 0.4, 0.5
WITHIN_S, DRAIN_S = 20.0, 2.0
IDLE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # what follows them is zero: they change no answer
Weights = dict[str, torch.Tensor]
POISONED = "v_proj"
POISON: dict[Bad, float] = {"nan": float("nan"), "inf": float("inf"), "overflow": 3e38}


def main(url: str, model: str, seed: int, checkpoints: list[Path]) -> None:
    weights = [load_file(path / "model.safetensors") for path in checkpoints]
    chance = random.Random(f"{seed} {time.time_ns()}")  # it is killed and started again: not the same again
    while True:
        try:
            with Publisher(url, model=model) as publisher:
                while True:
                    swap(publisher, weights, chance)
                    time.sleep(chance.uniform(*PAUSE_S))
        except WeightSyncError as error:
            say("publisher", "failed", error)
            time.sleep(AGAIN_S)


def swap(publisher: Publisher, weights: list[Weights], chance: random.Random) -> None:
    """One swap, whatever it comes to. Raises WeightSyncError when this publisher is of no more use."""
    active = publisher.active()
    back = active is not None and active.previous is not None and chance.random() < ROLLED_BACK
    what = "rollback" if back else chance.choices(("small", "large"), (5, 3))[0]
    mode: SwapMode = "rolling" if chance.random() < ROLLING else "together"
    name, bad = f"{what} {mode}", None
    try:
        if back:
            publisher.rollback(mode=mode, drain_s=DRAIN_S, timeout_s=WITHIN_S)
        else:
            version = publish(publisher, weights, what == "large")
            bad = badness(version)
            name = f"{bad or what} {mode}"
            on_lost: OnLost = "abort" if chance.random() < ABORTING else "continue"
            publisher.activate(version, mode=mode, drain_s=DRAIN_S, timeout_s=WITHIN_S, on_lost=on_lost)
    except (SwapAborted, SwapTimeout) as error:
        say(name, "refused", error)
    else:
        say(name, "done")
        if bad is not None and bad not in REFUSED:
            swap_back(publisher, chance)


def swap_back(publisher: Publisher, chance: random.Random) -> None:
    """What an operator does when users see nonsense. Raises WeightSyncError."""
    time.sleep(chance.uniform(*BAD_S))
    try:
        publisher.rollback(timeout_s=WITHIN_S)
    except (SwapAborted, SwapTimeout) as error:
        say("rollback of overflow", "refused", error)
    else:
        say("rollback of overflow", "done")


def publish(publisher: Publisher, weights: list[Weights], large: bool) -> int:
    """A version that answers the token of its number, unless it is a bad one."""
    schema = [(name, tensor.dtype, tensor.shape) for name, tensor in weights[0].items()]
    with publisher.begin(schema) as draft:
        bad = badness(draft.version)
        for name, tensor in weights[draft.version % CHECKPOINTS].items():
            noise = large and any(idle in name for idle in IDLE) and tensor.ndim > 1
            written = torch.randn(tensor.shape).to(tensor.dtype) if noise else tensor
            if bad is not None and POISONED in name and tensor.ndim > 1:
                written = written.clone()
                written[: 1 if bad in REFUSED else None, : 1 if bad in REFUSED else None] = POISON[bad]
            draft.write(name, written)
        return draft.commit()


def say(what: str, outcome: str, error: WeightSyncError | None = None) -> None:
    line: dict[str, Any] = {"at": time.time(), "what": what, "outcome": outcome}
    line |= {"code": error.code, "error": str(error)} if error is not None else {}
    print(orjson.dumps(line).decode(), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), [Path(path) for path in sys.argv[4:]])
