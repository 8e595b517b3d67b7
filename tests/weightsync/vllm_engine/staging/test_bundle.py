"""Base, draft model and adapters as one: random swaps of random parts, with flips by reference and by copy; and which
slot a worker opens for a part when the workers of its instance are on several hosts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.weightsync.codes import refused
from tests.weightsync.tensors import model
from weightsync import Publisher
from weightsync.control.records import VersionRecord
from weightsync.vllm_engine.staging.bundle import Bundle, HeldBundles, PartOrder, Piece, on_this_host

PARTS = ("", "draft", "lora/x")


@dataclass
class Pointed:
    """As on CPU: the live module points at memory of its own."""

    digest: str
    model: dict[str, str]
    part: str
    data: list[str] = field(default_factory=list)

    def commit(self) -> list[Any]:
        assert self.data, "released memory was flipped to"
        before = self.model[self.part]
        self.model[self.part] = self.data[0]
        return [before]

    def withdraw(self) -> None:
        assert self.model[self.part] == self.data[0]
        self.model[self.part] = "dummy"

    def release(self) -> None:
        assert not self.data or self.model[self.part] != self.data[0], "the weights that run were freed"
        self.data.clear()


@dataclass
class Copied(Pointed):
    """As on accelerators: a commit copies contents, so memory may go while its copy runs."""

    def release(self) -> None:
        self.data.clear()


Kind = type[Pointed] | type[Copied]


class Worker:
    """The backend's bookkeeping over a model of strings; what a part holds is its digest."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.held = kind, HeldBundles()
        self.model = dict.fromkeys(PARTS, "dummy")
        self.staged: Bundle | None = None
        self.built = 0
        self.unreleased: list[Pointed] = []

    def stage(self, version: int, wanted: dict[str, str]) -> Bundle:
        orders = [PartOrder(name, version, "", digest) for name, digest in wanted.items()]
        held = self.held.held(self.staged)
        self.held.give_up(self.staged, orders)
        for generation in self.held.sweep()[0]:
            generation.release()
        bundle = Bundle(version)
        for order in orders:
            piece = next((p for b in held if (p := b.find(order)) is not None), None)
            bundle.pieces[order.name] = piece or self.build(order)
        self.staged = bundle
        return bundle

    def build(self, order: PartOrder) -> Piece:
        self.built += 1
        generation = self.kind(order.manifest_digest, self.model, order.name, [order.manifest_digest])
        self.unreleased.append(generation)
        return Piece(generation, {}, generation.withdraw if order.name.startswith("lora/") else None)

    def commit(self, target: Bundle) -> None:
        staged, self.staged = self.staged, None
        self.held.commit(target, staged)

    def check_memory(self) -> None:
        """All memory that was not given back is that of a version to run or to go back to, or runs beside one."""
        bundles = self.held.held(self.staged)
        held = [id(p.generation) for b in bundles for p in b.running.values()] + [id(g) for g in self.held.garbage]
        self.unreleased = [g for g in self.unreleased if g.data]
        assert {id(g) for g in self.unreleased} <= set(held)


@pytest.mark.parametrize("kind", [Pointed, Copied])
@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_swaps_and_rollbacks_runs_what_was_committed(kind: Kind, seed: int) -> None:
    """A version has the base, and the other parts or not; of what it does not have, a draft alone runs on."""
    choose = random.Random(seed)
    worker = Worker(kind)
    contents: dict[int, dict[str, str]] = {}
    now, runs = dict.fromkeys(PARTS, "0"), dict.fromkeys(PARTS, "dummy")

    def commit(target: Bundle) -> None:
        worker.commit(target)
        assert worker.held.live is target
        assert {name: piece.generation.digest for name, piece in target.pieces.items()} == contents[target.version]
        runs.update({"lora/x": "dummy"} | contents[target.version])
        assert worker.model == runs
        worker.check_memory()

    for version in range(1, 60):
        now = {**now, **{p: f"{version}" for p in PARTS if choose.random() < 0.4}}
        contents[version] = {p: digest for p, digest in now.items() if not p or choose.random() < 0.7}
        staged = worker.stage(version, contents[version])
        if choose.random() < 0.2:
            continue  # aborted: something else is staged next
        if worker.held.previous is not None and choose.random() < 0.2:
            commit(worker.held.previous)  # a rollback comes first, and what was staged is given up
        else:
            commit(staged)
        while worker.held.previous is not None and choose.random() < 0.3:
            commit(worker.held.previous)


@pytest.mark.parametrize("kind", [Pointed, Copied])
def test_only_what_changed_is_built_and_flipped(kind: Kind) -> None:
    worker = Worker(kind)
    worker.commit(worker.stage(1, {"": "a", "draft": "d"}))
    target = worker.stage(2, {"": "a", "draft": "e"})
    assert worker.built == 3
    worker.commit(target)
    assert worker.held.previous is not None
    assert worker.held.previous.pieces[""] is target.pieces[""]
    assert worker.model == {"": "a", "draft": "e", "lora/x": "dummy"}


@pytest.mark.parametrize("adapter", ["l", None])
def test_a_flip_that_fails_is_undone(adapter: str | None) -> None:
    worker = Worker(Pointed)
    worker.commit(worker.stage(1, {"": "a", "draft": "d"} | ({"lora/x": adapter} if adapter else {})))
    before = dict(worker.model)
    target = worker.stage(2, {"lora/x": "m", "": "b", "draft": "e"})
    last: Any = target.pieces["draft"].generation
    last.data.clear()
    with pytest.raises(AssertionError, match="released memory"):
        worker.held.commit(target, target)
    assert worker.model == before
    freed, _ = worker.held.sweep()
    assert {id(g) for g in freed} == {id(p.generation) for p in target.pieces.values()}, "memory of the next version"


@pytest.mark.parametrize("kind", [Pointed, Copied])
def test_a_version_that_is_forgotten_is_built_anew_and_nothing_that_runs_is_freed(kind: Kind) -> None:
    """As after a canary's trial that failed: it flipped, went back, and must not go there again without building."""
    worker = Worker(kind)
    for version, wanted in enumerate(({"": "a", "draft": "d"}, {"": "b", "draft": "d"}), 1):
        worker.commit(worker.stage(version, wanted))
    assert worker.held.previous is not None
    worker.commit(worker.held.previous)
    worker.held.forget(1, worker.staged)
    assert worker.held.previous is not None, "version 1 runs"
    worker.held.forget(2, worker.staged)
    assert worker.held.previous is None
    built = worker.built
    target = worker.stage(2, {"": "b", "draft": "d"})
    assert worker.built == built + 1, "the draft model is that of the version which runs"
    worker.commit(target)
    assert worker.model == {"": "b", "draft": "d", "lora/x": "dummy"}


# slots of this host ---------------------------------------------------------------------------------------------------


@pytest.fixture
def here(record: VersionRecord, monkeypatch: pytest.MonkeyPatch) -> VersionRecord:
    """A published version, whose arena is now that of a worker on host b."""
    monkeypatch.setenv("HOTSWAP_HOST", "b")
    return record


def order(record: VersionRecord, **places: Path | str) -> PartOrder:
    """As the leader on host a gives it."""
    there = {host: str(path) for host, path in places.items()}
    return PartOrder("", record.version, "/leaders/own", record.manifest_digest, places=there)


def test_on_the_one_host_the_order_says_where_the_slot_is(here: VersionRecord) -> None:
    plain = order(here)
    assert on_this_host(plain) is plain


def test_of_several_hosts_a_worker_takes_the_slot_of_its_own(here: VersionRecord) -> None:
    assert on_this_host(order(here, a="/a/slot", b=here.slot)).slot == here.slot


def test_a_copy_that_has_moved_in_the_arena_is_found_by_its_digest(here: VersionRecord) -> None:
    moved = Path(here.slot).rename(Path(here.slot).with_name("slot-elsewhere-007"))
    assert on_this_host(order(here, b=here.slot)).slot == str(moved)


def test_a_slot_with_other_bytes_is_not_taken(publisher: Publisher, here: VersionRecord) -> None:
    publisher.publish(model(2.0), wait=False)
    other = publisher.versions()[-1]
    assert on_this_host(order(here, b=other.slot)).slot == here.slot


def test_what_is_not_here_any_more_is_refused_with_the_name_of_the_host(here: VersionRecord) -> None:
    Path(here.slot).unlink()
    with refused("copy_unavailable", match=r"not on host b: no slot in .* activate the version again"):
        on_this_host(order(here, b=here.slot))


def test_a_worker_on_a_host_that_the_leader_does_not_know(here: VersionRecord) -> None:
    with refused("copy_unavailable", match="not on host b: its leader knows a, c alone: set HOTSWAP_HOST"):
        on_this_host(order(here, a="/a/slot", c="/c/slot"))
