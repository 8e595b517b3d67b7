"""One version in a worker: the base model and its parts (draft model, LoRA adapters), flipped all or none.

A part whose published bytes a version shares with one that is still held is the same piece: it is neither staged nor
flipped again. A part that a version does not name is no piece of it. An adapter that it does not name is withdrawn
with the commit. A draft model runs on beside the version, as speculation has no other then.

The workers of an instance may be on several hosts. The leader has waited until every host has a copy
(`server/instance/hosts.py`) and says where each was. The digest of the manifest decides: a copy that has moved
meanwhile is found in the arena of this host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from weightsync.control.hosts import HOST_ENV, this_host
from weightsync.errors import ManifestError, SlotBusy, copy_unavailable
from weightsync.memory.receiver import SlotReader

BASE = ""


class Flippable(Protocol):
    """The weights of one part of one version (`Generation`, `LoraGeneration`)."""

    @property
    def digest(self) -> str:
        """Of the manifest it was built from."""

    def commit(self) -> list[Any]:
        """Make it what runs; returns what was replaced."""

    def release(self) -> None:
        """The weights are not run any more."""


@dataclass(frozen=True)
class PartOrder:
    """One part to stage: BASE, "draft" or "lora/NAME"; `version` published it. `lora_id` is vLLM's for an adapter.

    `places`: the path of the slot on each host, if the instance has workers on several; `slot` is then the leader's,
    and `unread` the tensors that none of them reads.
    """

    name: str
    version: int
    slot: str
    manifest_digest: str
    lora_id: int = 0
    places: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part, ready to run, and the report of its staging. `withdraw`: stops it, if a version can do without it."""

    generation: Flippable
    report: dict[str, Any]
    withdraw: Callable[[], None] | None = None


@dataclass
class Bundle:
    """The pieces of one version by part name. `kept`, while it is live: the draft that runs on, if it names none."""

    version: int
    pieces: dict[str, Piece] = field(default_factory=dict)
    kept: dict[str, Piece] = field(default_factory=dict)

    @property
    def running(self) -> dict[str, Piece]:
        """All that runs while this is live."""
        return {**self.kept, **self.pieces}

    def find(self, order: PartOrder) -> Piece | None:
        """The piece that was built from the very bytes `order` names."""
        piece = self.running.get(order.name)
        return piece if piece is not None and piece.generation.digest == order.manifest_digest else None

    def commit(self, before: Mapping[str, Piece]) -> list[Any]:
        """Flip what differs from `before`, which runs, and withdraw the rest. Returns what was replaced.

        If a flip raises, those before it are undone, an adapter that is new is withdrawn, and the error goes on.
        """
        changed = [name for name, piece in self.pieces.items() if before.get(name) is not piece]
        replaced: list[Any] = []
        for count, name in enumerate(changed, 1):
            try:
                replaced += self.pieces[name].generation.commit()
            except BaseException:
                self._undo(changed[:count], before)
                raise
        left = {name: piece for name, piece in before.items() if name not in self.pieces}
        self.kept = {name: piece for name, piece in left.items() if piece.withdraw is None}
        for piece in left.values():
            if piece.withdraw is not None:
                piece.withdraw()
        return replaced

    def _undo(self, names: list[str], before: Mapping[str, Piece]) -> None:
        for name in reversed(names):
            if (former := before.get(name)) is not None:
                former.generation.commit()
            elif (withdraw := self.pieces[name].withdraw) is not None:
                withdraw()


class HeldBundles:
    """The bundles a worker runs and goes back to, and what none of them needs any more (freed off the decode path)."""

    def __init__(self) -> None:
        self.live: Bundle | None = None
        self.previous: Bundle | None = None
        self.garbage: list[Flippable] = []
        self.replaced: list[Any] = []

    @property
    def running(self) -> dict[str, Piece]:
        """All that runs, by part name."""
        return self.live.running if self.live is not None else {}

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each part that runs."""
        return {name: piece.generation.digest for name, piece in self.running.items()}

    def held(self, staged: Bundle | None) -> list[Bundle]:
        return [b for b in (self.live, self.previous, staged) if b is not None]

    def commit(self, target: Bundle, staged: Bundle | None) -> None:
        """Flip to `target`, which is `previous` or `staged`; what was staged besides is given up.

        A rollback flips to the version that ran before. Parts that ran beside it are garbage, unless they still run.
        If the flip raises, what was staged is garbage, and what ran is live.
        """
        try:
            self.replaced += target.commit(self.running)
        except BaseException:
            self.give_up(staged, ())
            raise
        dropped, former = [self.previous, staged], self.live
        if former is not None:
            dropped.append(Bundle(former.version, former.kept))
            former.kept = {}
        for bundle in dropped:
            self.garbage += only_in(bundle, (target, former))
        self.live, self.previous = target, former

    def give_up(self, staged: Bundle | None, orders: Iterable[PartOrder]) -> None:
        """`staged` was never committed; pieces of it that `orders` want again stay."""
        if staged is not None:
            wanted = Bundle(0, {o.name: piece for o in orders if (piece := staged.find(o)) is not None})
            self.garbage += only_in(staged, (self.live, self.previous, wanted))

    def forget(self, version: int, staged: Bundle | None) -> None:
        """The bundle to go back to is given up if it is of `version`; pieces that others need stay."""
        if self.previous is not None and self.previous.version == version:
            self.garbage += only_in(self.previous, (self.live, staged))
            self.previous = None

    def sweep(self) -> tuple[list[Flippable], list[Any]]:
        """(generations to release, references to drop), handed over once."""
        swept = self.garbage, self.replaced
        self.garbage, self.replaced = [], []
        return swept


def only_in(dropped: Bundle | None, kept: Iterable[Bundle | None]) -> list[Flippable]:
    """Generations of `dropped` that none of `kept` runs or goes back to."""
    held = {id(p.generation) for b in kept if b is not None for p in b.running.values()}
    pieces = dropped.pieces.values() if dropped is not None else ()
    return [p.generation for p in pieces if id(p.generation) not in held]


def on_this_host(order: PartOrder) -> PartOrder:
    """`order` with the path of its slot here; itself on the one host. Raises PeerError."""
    if not order.places:
        return order
    host = this_host()
    place = order.places.get(host)
    if place is None:
        known = ", ".join(sorted(order.places))
        raise copy_unavailable(order.version, host, f"its leader knows {known} alone: set {HOST_ENV} before the start")
    return replace(order, slot=str(_found(Path(place), order, host)))


def _found(place: Path, order: PartOrder, host: str) -> Path:
    """`place`, or the slot beside it that holds what was asked for. Raises PeerError."""
    for path in [place, *sorted(place.parent.glob("slot-*"))]:
        if _holds(path, order.manifest_digest):
            return path
    raise copy_unavailable(
        order.version,
        host,
        f"no slot in {place.parent} has the manifest {order.manifest_digest} any more; see the log of `hotswap peer` "
        "there, and activate the version again",
    )


def _holds(path: Path, digest: str) -> bool:
    try:
        SlotReader.open(path, manifest_digest=digest, populate=False, part=True).close()
    except (ManifestError, SlotBusy, OSError):
        return False
    return True
