"""The part of a trainer in a fleet: it publishes versions and has them swapped in, over and over.

`python -m loadtest.chaos.publisher STORE MODEL SEED CHECKPOINT...`, one for each model. Small versions differ in one
matrix, so they travel as differences; large ones in most of them, though not in what they answer. Some bring an
adapter, some take it away, some have a configuration that must be refused. Some are rolled out, some rolled back. After
the signal CONFIGURE the next one has another `rope_theta`, which changes no answer and takes other engines. One in
eight is bad: with a NaN or an infinity, which staging must refuse, or finite and overflowing, which is rolled back
as soon as it runs. Beside the versions come editions of fifty adapters, one in twelve of which is not finite and is
withdrawn at the next turn. The program prints a JSON line for each. After an error of the store a new publisher tries
again.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import load_file

from loadtest.chaos.models import (
    ADAPTERS,
    CHECKPOINTS,
    CONFIGURE,
    KEPT,
    MISFIT,
    REFUSED,
    Bad,
    badness,
    editions_of,
    flawed,
    one_of,
)
from weightsync import Adapter, Publisher
from weightsync.control.parts import BASE, LORA
from weightsync.control.records import OnLost, SwapMode
from weightsync.errors import PublishError, SwapError, WeightSyncError
from weightsync.format.manifest import Schema
from weightsync.publish.draft import commit_all
from weightsync.publish.publisher import as_schema

PAUSE_S = (1.0, 4.0)
AGAIN_S = 1.0
BAD_S = (0.0, 2.0)
ROLLED_BACK, ROLLING, ABORTING = 0.2, 0.4, 0.5
BRINGS, TAKES_AWAY, MISFITS = 0.2, 0.15, 0.05
WITHIN_S, DRAIN_S = 20.0, 2.0
MOST_EDITIONS = 4  # between two swaps
PERCENTS, WEIGHTS = (100.0, 30.0, 0.0), (6, 2, 1)
IDLE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # what follows them is zero: they change no answer
Weights = dict[str, torch.Tensor]
ENDED = ("swap_aborted", "swap_timeout", "config_mismatch")
POISONED = "v_proj"
POISON: dict[Bad, float] = {"nan": float("nan"), "inf": float("inf"), "overflow": 3e38}


@dataclass(frozen=True)
class Given:
    """The model of a publisher: the weights of each checkpoint, their configuration, and its adapter."""

    weights: list[Weights]
    config: dict[str, Any]
    adapter: Weights
    metadata: Mapping[str, str]
    part: str


class Asked:
    """Whether the next version is to have another configuration."""

    def __init__(self) -> None:
        self.configure = False

    def take(self) -> bool:
        asked, self.configure = self.configure, False
        return asked

    def hear(self, *_: object) -> None:
        self.configure = True


def read(model: str, checkpoints: list[Path]) -> Given:
    """The adapter changes attention scores alone, which change no answer."""
    weights, adapter, rank = [load_file(path / "model.safetensors") for path in checkpoints], Weights(), 4
    for name, tensor in weights[0].items():
        if name.endswith("q_proj.weight"):
            stem, (rows, columns) = f"base_model.model.{name.removesuffix('.weight')}", tensor.shape
            adapter[f"{stem}.lora_A.weight"] = torch.randn(rank, columns)
            adapter[f"{stem}.lora_B.weight"] = torch.randn(rows, rank)
    peft = Adapter(adapter, {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]})
    (part,) = (LORA + name for name, base in ADAPTERS.items() if base == model)
    config = orjson.loads((checkpoints[0] / "config.json").read_bytes())
    return Given(weights, config, adapter, peft.metadata, part)


def main(url: str, model: str, seed: int, checkpoints: list[Path]) -> None:
    given, asked = read(model, checkpoints), Asked()
    signal.signal(CONFIGURE, asked.hear)
    chance = random.Random(f"{seed} {time.time_ns()}")  # it is killed and started again: not the same again
    while True:
        try:
            with Publisher(url, model=model) as publisher:
                while True:
                    swap(publisher, given, chance, configure=asked.take())
                    editions(publisher, given, chance)
                    time.sleep(chance.uniform(*PAUSE_S))
        except WeightSyncError as error:
            say("publisher", "failed", error)
            time.sleep(AGAIN_S)


def swap(publisher: Publisher, given: Given, chance: random.Random, *, configure: bool) -> None:
    """One swap, whatever it comes to. Raises WeightSyncError when this publisher is of no more use."""
    active = publisher.active()
    can_go_back = active is not None and active.previous is not None and not configure
    back = can_go_back and chance.random() < ROLLED_BACK
    what = "rollback" if back else chance.choices(("small", "large"), (5, 3))[0]
    mode: SwapMode = "rolling" if chance.random() < ROLLING else "together"
    misfit = not back and not configure and chance.random() < MISFITS
    config = another(given.config, chance, misfit=misfit) if misfit or configure else None
    config = given.config if config is None and active is None else config
    kind = MISFIT if misfit else "configure" if configure else what
    name, bad = f"{kind} {mode}", None
    try:
        if back:
            publisher.rollback(mode=mode, drain_s=DRAIN_S, timeout_s=WITHIN_S)
        else:
            version, brought = publish(publisher, given, what == "large", config=config, chance=chance)
            bad = badness(version)
            name = f"{MISFIT if misfit else bad or kind}{brought} {mode}"
            on_lost: OnLost = "abort" if chance.random() < ABORTING else "continue"
            publisher.activate(version, mode=mode, drain_s=DRAIN_S, timeout_s=WITHIN_S, on_lost=on_lost)
    except PublishError as error:
        if error.code not in ENDED:
            raise
        say(name, "refused", error)
    else:
        say(name, "done")
        if bad is not None and bad not in REFUSED:
            swap_back(publisher, chance)


def swap_back(publisher: Publisher, chance: random.Random) -> None:
    """An operator's rollback when users see nonsense. Raises WeightSyncError."""
    time.sleep(chance.uniform(*BAD_S))
    try:
        publisher.rollback(timeout_s=WITHIN_S)
    except SwapError as error:
        if error.code not in ENDED:
            raise
        say("rollback of overflow", "refused", error)
    else:
        say("rollback of overflow", "done")


def editions(publisher: Publisher, given: Given, chance: random.Random) -> None:
    """Some more, and those that are missing. Flawed ones of the turn before are withdrawn. Raises WeightSyncError."""
    model, found = publisher.model, publisher.editions()
    for record in found:
        if flawed(record.number):
            publisher.withdraw_edition(record.name, record.number)
            say("edition withdrawn", "done")
    there = {record.name for record in found if record.percent and not flawed(record.number)}
    for name in (name for name in editions_of(model) if name not in there):
        publish_edition(publisher, given, name, 100.0)
    for _ in range(chance.randint(1, MOST_EDITIONS)):
        publish_edition(publisher, given, one_of(model, chance), chance.choices(PERCENTS, WEIGHTS)[0])


def publish_edition(publisher: Publisher, given: Given, name: str, percent: float) -> None:
    """One that answers as the base does, unless its number makes it a flawed one. Raises WeightSyncError."""
    schema = as_schema([(n, t.dtype, t.shape) for n, t in given.adapter.items()])
    with publisher.begin_edition(name, schema, given.metadata, percent=percent, keep=KEPT) as draft:
        bad = badness(draft.version) if flawed(draft.version) else None
        for each, tensor in given.adapter.items():
            draft.write(each, torch.randn_like(tensor) if bad is None else torch.full_like(tensor, POISON[bad]))
        draft.commit_edition()
    say(f"edition {bad}" if bad is not None else "edition", "done")


def another(config: dict[str, Any], chance: random.Random, *, misfit: bool) -> dict[str, Any]:
    """A configuration that takes other engines; as a `misfit`, one that cannot be served."""
    if misfit:
        return config | {"max_position_embeddings": 4096}
    return config | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0 * chance.randint(2, 99)}}


def publish(
    publisher: Publisher, given: Given, large: bool, *, config: dict[str, Any] | None, chance: random.Random
) -> tuple[int, str]:
    """A version that answers the token of its number, unless it is a bad one, and what becomes of the adapter.

    `config`: None for that of the version before. Raises WeightSyncError.
    """
    drawn, base = chance.random(), as_schema([(n, t.dtype, t.shape) for n, t in given.weights[0].items()])
    pieces: dict[str, tuple[Schema, Mapping[str, str]]] = {BASE: (base, {})}
    if drawn < BRINGS:
        tensors = [(n, t.dtype, t.shape) for n, t in given.adapter.items()]
        pieces[given.part] = (as_schema(tensors), given.metadata)
    about: dict[str, Any] = {"config": orjson.dumps(config).decode()} if config is not None else {}
    begun, brought = None, " with adapter" if drawn < BRINGS else ""
    if BRINGS <= drawn < BRINGS + TAKES_AWAY:
        with contextlib.suppress(PublishError):  # the version before has none
            begun, brought = publisher.begin_all(pieces, without=[given.part], **about), " without adapter"
    with contextlib.ExitStack() as stack:
        drafts = [stack.enter_context(draft) for draft in begun or publisher.begin_all(pieces, **about)]
        draft, adapters = drafts[0], drafts[1:]
        for adapter in adapters:
            for name, tensor in given.adapter.items():
                adapter.write(name, tensor)
        bad = badness(draft.version)
        for name, tensor in given.weights[draft.version % CHECKPOINTS].items():
            noise = large and any(idle in name for idle in IDLE) and tensor.ndim > 1
            written = torch.randn(tensor.shape).to(tensor.dtype) if noise else tensor
            if bad is not None and POISONED in name and tensor.ndim > 1:
                written = written.clone()
                written[: 1 if bad in REFUSED else None, : 1 if bad in REFUSED else None] = POISON[bad]
            draft.write(name, written)
        return commit_all(drafts, [], within_s=None), brought


def say(what: str, outcome: str, error: WeightSyncError | None = None) -> None:
    line: dict[str, Any] = {"at": time.time(), "what": what, "outcome": outcome}
    line |= {"code": error.code, "error": str(error)} if error is not None else {}
    print(orjson.dumps(line).decode(), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), [Path(path) for path in sys.argv[4:]])
