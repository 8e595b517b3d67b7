"""Versions of a draft model or of adapters: what they carry on, the slots they keep, and who may publish them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.weightsync.codes import refused
from tests.weightsync.tensors import model, save_safetensors
from weightsync import Publisher, SlotReader, SyncStore
from weightsync.control.parts import Adapter, check_name, combined, join, slots_of
from weightsync.control.records import ActiveRecord, Keys, PartRecord, SwapRecord, TargetRecord, VersionRecord
from weightsync.control.swap import TOMBSTONES_KEPT
from weightsync.errors import PublishError
from weightsync.format.fingerprint import fingerprint_of
from weightsync.memory.arena import pool_of
from weightsync.peer.shelf import copies_pool
from weightsync.persist.disk import piece_directory
from weightsync.push import main

KEYS = Keys("demo")
CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
Activate = Callable[[int], None]


def adapter(value: float = 0.0, rank: int = 2) -> Adapter:
    return Adapter({"q.lora_A.weight": np.full((rank, 8), value, np.float32)}, CONFIG)


def latest(publisher: Publisher) -> VersionRecord:
    return publisher.versions()[-1]


def part(record: VersionRecord, name: str) -> PartRecord:
    (found,) = [p for p in record.parts if p.name == name]
    return found


def first_value(slot: str) -> float:
    with SlotReader.open(slot) as reader:
        entry = next(iter(reader.manifest.tensors.items()))
        return float(np.frombuffer(bytes(reader.buffer(entry[0])), entry[1].dtype)[0])


@pytest.fixture
def activate(store_sync: SyncStore) -> Activate:
    """The record that a coordinator would leave behind after a swap."""

    def commit(version: int) -> None:
        found = store_sync.get(KEYS.active)
        before = ActiveRecord.from_json(found.value) if found else None
        epoch, previous = (before.epoch + 1, before.version) if before else (1, None)
        store_sync.put(KEYS.active, ActiveRecord(version, epoch, previous, f"swap-{epoch}", 0.0).to_json())

    return commit


def test_a_part_carries_the_base_and_the_other_parts_on(publisher: Publisher, activate: Activate) -> None:
    activate(publisher.publish(model(1), activate=False))
    activate(publisher.publish(model(2, layers=1), part="draft", activate=False))
    activate(publisher.publish(adapter(3), part="lora/x", activate=False))
    base, draft, lora = publisher.versions()
    assert (lora.slot, lora.manifest_digest, lora.base_version) == (base.slot, base.manifest_digest, 1)
    assert part(lora, "draft") == part(draft, "draft")
    assert [p.version for p in lora.parts] == [2, 3]
    assert (first_value(lora.slot), first_value(part(lora, "lora/x").slot)) == (1.0, 3.0)
    activate(publisher.publish(model(4), activate=False))
    newest = latest(publisher)
    assert (newest.base_version, newest.parts) == (None, lora.parts)
    assert (newest.nbytes, newest.tensors) == (base.nbytes, base.tensors)
    with SlotReader.open(part(newest, "lora/x").slot) as reader:
        assert orjson.loads(reader.manifest.metadata["adapter_config"]) == CONFIG


def test_several_parts_become_one_version(publisher: Publisher) -> None:
    version = publisher.publish(
        model(1), parts={"draft": model(2, layers=1), "lora/x": adapter(3), "lora/y": adapter(4)}, activate=False
    )
    (record,) = publisher.versions()
    assert record.base_version is None
    assert [p.name for p in record.parts] == ["draft", "lora/x", "lora/y"]
    assert {p.version for p in record.parts} == {version}
    assert [first_value(p.slot) for p in record.parts] == [2.0, 3.0, 4.0]
    assert len(slots_of(record)) == 4


def test_all_of_a_version_or_nothing(publisher: Publisher) -> None:
    publisher.publish(model(1), parts={"draft": model(1, layers=1)}, activate=False)
    with refused("shape_mismatch"):
        publisher.publish(model(2), parts={"draft": model(2, layers=1, width=16)}, activate=False)
    with refused("bad_part", match="needs PEFT's configuration"):
        publisher.publish(model(2), parts={"lora/x": model(2)}, activate=False)
    assert [v.version for v in publisher.versions()] == [1]


def test_adapters_may_change_their_rank(publisher: Publisher) -> None:
    publisher.publish(model(1), parts={"lora/x": adapter(1, rank=2)}, activate=False)
    publisher.publish(adapter(2, rank=4), part="lora/x", onto=1, activate=False)
    with SlotReader.open(part(latest(publisher), "lora/x").slot) as reader:
        assert next(iter(reader.manifest.tensors.values())).shape == (4, 8)


def test_a_part_needs_a_base(publisher: Publisher) -> None:
    with refused("bad_part", match="no base model yet"):
        publisher.publish(adapter(), part="lora/x", activate=False)
    assert publisher.versions() == []
    publisher.publish(model(), activate=False)
    with pytest.raises(PublishError, match="version 7 cannot be built upon"):
        publisher.publish(adapter(), part="lora/x", onto=7, activate=False)


def test_a_version_asked_for_is_built_upon_unless_it_was_refused(
    publisher: Publisher, activate: Activate, store_sync: SyncStore
) -> None:
    activate(publisher.publish(model(1), activate=False))
    publisher.publish(model(2), activate=False)
    store_sync.put(KEYS.target, TargetRecord(2, "wish", "test", 60.0).to_json())
    publisher.publish(adapter(), part="lora/x", activate=False)
    assert latest(publisher).base_version == 2
    store_sync.put(KEYS.swap, SwapRecord("wish", 2, "aborted", (), 0.0, 0.0, "no").to_json())
    publisher.publish(adapter(), part="lora/x", activate=False)
    assert latest(publisher).base_version == 1


def test_a_swap_that_comes_first_is_carried_on(
    publisher: Publisher, activate: Activate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at what is active and the commit, another version becomes active: that one is carried on."""
    activate(publisher.publish(model(1), activate=False))
    publisher.publish(model(2), activate=False)
    session, looks = publisher._session, []
    look = session._basis

    async def overtaken(asked: int | None) -> object:
        found = await look(asked)
        looks.append(found[0])
        if len(looks) == 1:
            await session.store.put(KEYS.active, ActiveRecord(2, 2, 1, "swap-2", 0.0).to_json())
        return found

    monkeypatch.setattr(session, "_basis", overtaken)
    publisher.publish(adapter(), part="lora/x", activate=False)
    assert [r.version for r in looks if r is not None] == [1, 2]
    assert latest(publisher).base_version == 2


def test_slots_stay_as_long_as_any_version_lies_in_them(publisher: Publisher, activate: Activate) -> None:
    """Twenty adapters on one base: its slot is in use by all of them, long after the version that wrote it is gone."""
    activate(publisher.publish(model(1), activate=False))
    base = latest(publisher).slot
    for value in range(2, 22):
        activate(publisher.publish(adapter(value), part="lora/x", activate=False))
    records = {v.version: v for v in publisher.versions()}
    assert records[1].state == "retired"
    held = [v for v in records.values() if v.state == "ready"]
    assert {v.slot for v in held} == {base}
    assert first_value(base) == 1.0
    assert [first_value(part(v, "lora/x").slot) for v in held] == [float(v.version) for v in held]
    assert len(publisher.arena.slots("demo")) == 1
    assert len(publisher.arena.slots(pool_of("demo", "lora/x"))) <= 6
    publisher.publish(model(30), activate=False)
    assert latest(publisher).slot != base


def test_parts_are_taken_away(publisher: Publisher, activate: Activate) -> None:
    parts = {"draft": model(2, layers=1), "lora/x": adapter(3), "lora/y": adapter(4)}
    activate(publisher.publish(model(1), parts=parts, activate=False))
    activate(publisher.publish(None, without=["lora/x"], activate=False))
    before, alone = publisher.versions()
    assert ([p.name for p in alone.parts], alone.slot, alone.tensors) == (
        ["draft", "lora/y"],
        before.slot,
        before.tensors,
    )
    fingerprints = {"": before.base_fingerprint} | {p.name: p.fingerprint for p in alone.parts}
    assert alone.fingerprint == join(fingerprints) != before.fingerprint
    activate(publisher.publish(model(5), without=["draft"], activate=False))
    assert [p.name for p in latest(publisher).parts] == ["lora/y"]
    publisher.publish(None, parts={"lora/x": adapter(6)}, without=["lora/y"], onto=1, activate=False)
    assert [(p.name, p.version) for p in latest(publisher).parts] == [("draft", 1), ("lora/x", 4)]


@pytest.mark.parametrize(
    ("brought", "without", "problem"),
    [
        (None, [], "needs tensors, or a part to take away"),
        (None, ["lora/z"], "has no part 'lora/z' to take away: it has lora/x"),
        (None, [""], "without cannot be"),
        (None, "lora/x", "without cannot be"),
        (None, ["base"], "no part can be called 'base'"),
        ({"lora/x": adapter()}, ["lora/x"], "brought and taken away"),
    ],
)
def test_what_cannot_be_taken_away(publisher: Publisher, brought: object, without: object, problem: str) -> None:
    with refused("bad_part", match=r"has no part 'lora/x' to take away: it has none"):
        publisher.publish(None, without=["lora/x"], activate=False)
    publisher.publish(model(1), parts={"lora/x": adapter()}, activate=False)
    with refused("bad_part", match=problem):
        publisher.publish(None, parts=brought, without=without, onto=1, activate=False)  # type: ignore[arg-type]
    assert [v.version for v in publisher.versions()] == [1]


def test_parts_that_come_and_go_leave_nothing(
    publisher: Publisher, activate: Activate, store_sync: SyncStore, arena_directory: Path
) -> None:
    """A hundred adapters, each taken away by the version with the next one: records and slots stay as many and as
    large as after the first ones."""
    activate(publisher.publish(model(1), parts={"lora/0": adapter(0)}, activate=False))

    def found() -> tuple[int, int, int]:
        slots = [path for path in arena_directory.rglob("slot-*") if path.is_file()]
        return len(slots), sum(path.stat().st_size for path in slots), len(latest(publisher).to_json()) // 16

    seen = []
    for number in range(1, 101):
        part = f"lora/{number}"
        activate(publisher.publish(adapter(number), part=part, without=[f"lora/{number - 1}"], activate=False))
        seen.append(found())
    assert [p.name for p in latest(publisher).parts] == ["lora/100"]
    assert max(seen[90:]) <= max(seen[5:15])
    records = store_sync.run(store_sync.store.list(KEYS.root))[0]
    assert len(records) < TOMBSTONES_KEPT + 16
    assert first_value(latest(publisher).parts[0].slot) == 100.0
    activate(publisher.publish(None, without=["lora/100"], activate=False))
    for value in range(5):
        activate(publisher.publish(model(value), activate=False))
    publisher.publish(model(9), activate=False)
    left = {part.name for v in publisher.versions() if v.state == "ready" for part in v.parts}
    assert len(left) + sum(bool(publisher.arena.slots(pool_of("demo", f"lora/{n}"))) for n in range(101)) == 0


def test_a_draft_given_up_frees_every_slot(publisher: Publisher, activate: Activate) -> None:
    activate(publisher.publish(model(1), activate=False))
    draft = publisher.begin([("w", "float32", (4,))], part="draft")
    (open_record,) = [v for v in publisher.versions() if v.state == "publishing"]
    assert open_record.slot == ""
    slot = part(open_record, "draft").slot
    draft.abort()
    assert publisher.begin([("w", "float32", (4,))], part="draft").ticket["slot"] == slot


OUTWARD = ["lora/../x", "lora/a/..", "lora/a/./b", "lora/a//b", "lora/a/", "lora//a", "lora/a\n", "lora/a\\..\\b"]


@pytest.mark.parametrize("name", ["lora/", "lora/a b", "drafts", "base", "lora/" + "x" * 200, *OUTWARD])
def test_other_part_names_are_refused(publisher: Publisher, name: str) -> None:
    assert check_name("lora/a-b_c.d:1") == "lora/a-b_c.d:1"
    with refused("bad_part", match="no part can be called"):
        publisher.begin([("w", "float32", (4,))], part=name)


SEGMENT = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,40}", fullmatch=True)
WORDS = st.sampled_from(["a", "lora", "draft", "copies", "deltas", "model.safetensors", "adapter_model.safetensors"])
PATHS = st.lists(WORDS | SEGMENT, min_size=1, max_size=8).map("/".join).filter(lambda name: len(name) <= 128)
PARTS = st.sampled_from(["", "draft"]) | PATHS.map("lora/".__add__)


@given(name=PATHS, directory=st.just(Path("/of/a/version")))
def test_adapters_are_named_as_models_are(name: str, directory: Path) -> None:
    assert check_name(f"lora/{name}") == f"lora/{name}"
    place = piece_directory(directory, f"lora/{name}")
    assert place.parent == directory / "lora", "and none lies in another's directory"
    assert len(os.fsencode(place.name)) <= 255


@given(one=st.tuples(PATHS, PARTS), other=st.tuples(PATHS, PARTS))
@example(one=("a/lora/b", "lora/c"), other=("a", "lora/b/lora/c"))
def test_no_two_parts_share_slots_or_directories(one: tuple[str, str], other: tuple[str, str]) -> None:
    assume(one != other)
    assert pool_of(*one) != pool_of(*other)
    assert copies_pool(*one) != copies_pool(*other)
    assert one[0] != other[0] or piece_directory(Path("v"), one[1]) != piece_directory(Path("v"), other[1])


def test_fingerprints_are_over_base_and_parts(publisher: Publisher) -> None:
    publisher.publish(model(1), activate=False)
    publisher.publish(adapter(1), part="lora/x", onto=1, activate=False)
    publisher.publish(adapter(2), part="lora/x", onto=1, activate=False)
    base, one, two = publisher.versions()
    assert base.fingerprint == one.base_fingerprint
    assert len({base.fingerprint, one.fingerprint, two.fingerprint}) == 3
    assert one.fingerprint == join({"lora/x": part(one, "lora/x").fingerprint, "": base.fingerprint})
    assert join({"": "a", "draft": ""}) == ""
    assert join({"": "a"}) == "a"


def test_what_workers_report_gives_the_published_fingerprint() -> None:
    whole, half = [1, 4, 0, 1, 0, 4, 7], ([1, 4, 0, 1, 0, 2, 3], [1, 4, 0, 1, 2, 4, 4])
    ranks = [{"sums": {"w": [side]}, "parts": {"draft": {"sums": {"v": [whole]}}}} for side in half]
    alone = fingerprint_of({"w": 7})
    assert combined([{"sums": {"w": [whole]}}]) == alone
    assert combined(ranks) == join({"": alone, "draft": fingerprint_of({"v": 7})})
    assert combined([{"parts": {"draft": {}}}]) == ""


def test_the_command_publishes_parts(publisher: Publisher, store_url: str, tmp_path: Path) -> None:
    for name in ("base", "draft", "x"):
        (tmp_path / name).mkdir()
        save_safetensors(tmp_path / name / "model.safetensors", model(2 if name == "draft" else 1))
    common = ["--store", store_url, "--model", "demo", "--no-activate"]
    assert main([*common, "--with", f"draft={tmp_path / 'draft'}", str(tmp_path / "base")]) == 0
    assert main([*common, "--part", "lora/x", str(tmp_path / "x")]) == 1  # no adapter_config.json
    (tmp_path / "x" / "adapter_config.json").write_text('{"r": 2}')
    assert main([*common, "--with", f"lora/x={tmp_path / 'x'}", str(tmp_path / "base")]) == 0
    first, second = publisher.versions()
    assert [p.name for p in first.parts] == ["draft"]
    assert [p.name for p in second.parts] == ["lora/x"]
    assert first_value(part(first, "draft").slot) == 2.0


def test_the_command_takes_parts_away(publisher: Publisher, store_url: str, activate: Activate) -> None:
    activate(publisher.publish(model(1), parts={"lora/x": adapter(), "lora/y": adapter()}, activate=False))
    common = ["--store", store_url, "--model", "demo", "--no-activate"]
    assert main([*common, "--without", "lora/x", "--without", "lora/y", "--upload-id", "once-only"]) == 0
    assert latest(publisher).parts == ()
    assert main([*common, "--without", "lora/x", "--upload-id", "once-only"]) == 0
    assert main([*common, "--without", "lora/z"]) == 1
    assert main(common) == 1
    assert [v.version for v in publisher.versions()] == [1, 2]


def test_parts_whose_memory_is_gone_are_left_behind(publisher: Publisher, activate: Activate) -> None:
    """After a restart of the host the store may still name slots that no longer exist."""
    activate(publisher.publish(model(1), parts={"draft": model(1), "lora/x": adapter(1)}, activate=False))
    Path(part(latest(publisher), "lora/x").slot).unlink()
    activate(publisher.publish(model(2), activate=False))
    assert [p.name for p in latest(publisher).parts] == ["draft"]
    Path(latest(publisher).slot).unlink()
    with refused("bad_part", match="no base model"):
        publisher.publish(adapter(3), part="lora/x", activate=False)
    activate(publisher.publish(model(4), activate=False))
    assert [p.name for p in latest(publisher).parts] == ["draft"]
