"""Editions of adapters: what a publisher leaves in the store and in the slots, and which of them goes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.weightsync.codes import refused
from tests.weightsync.tensors import model, save_safetensors
from weightsync import Adapter, Publisher, SlotReader
from weightsync.control.editions import EditionRecord, drawn, outdated, split_name
from weightsync.control.parts import ADAPTER_CONFIG
from weightsync.errors import PublishError, StalePublisher
from weightsync.publish.publisher import as_schema
from weightsync.push import push_edition


def adapter(value: float) -> Adapter:
    return Adapter({"a.lora_A.weight": np.full((2, 4), value, np.float32)}, {"r": 2})


def numbers(publisher: Publisher, name: str | None = None) -> list[int]:
    return [edition.number for edition in publisher.editions(name)]


def test_editions_lie_side_by_side_and_leave_the_versions_as_they_were(publisher: Publisher) -> None:
    base = publisher.publish(model(), activate=False)
    before = publisher.versions()
    first = publisher.publish_edition("math", adapter(1.0), step=7, percent=25)
    second = publisher.publish_edition("math", adapter(2.0))
    other = publisher.publish_edition("org/prose", adapter(3.0))
    assert publisher.versions() == before
    assert base < first < second < other
    editions = {edition.number: edition for edition in publisher.editions()}
    assert [editions[n].full_name for n in (first, second, other)] == [
        f"math@{first}", f"math@{second}", f"org/prose@{other}",
    ]  # fmt: skip
    assert (editions[first].step, editions[first].percent, editions[second].percent) == (7, 25.0, 100.0)
    for number, value in ((first, 1.0), (second, 2.0), (other, 3.0)):
        with SlotReader.open(editions[number].slot, manifest_digest=editions[number].manifest_digest) as reader:
            assert np.frombuffer(reader.buffer("a.lora_A.weight"), np.float32)[0] == value
            assert reader.manifest.fingerprint == editions[number].fingerprint


def test_an_edition_of_a_directory_has_the_bytes_of_its_files(
    publisher: Publisher, store_url: str, tmp_path: Path
) -> None:
    """Several tensors in several files: each is read while its file is open."""
    publisher.publish(model(), activate=False)
    tensors = {f"layer{i}.lora_A.weight": np.full((2, 4), float(i), np.float32) for i in range(4)}
    for i in range(2):
        held = {name: tensor for name, tensor in tensors.items() if int(name[5]) % 2 == i}
        save_safetensors(tmp_path / f"adapter_model-{i}.safetensors", held)
    (tmp_path / "adapter_config.json").write_text('{"r": 2}')
    number = push_edition(tmp_path, "math", store=store_url, model="demo", lineage="other")
    (edition,) = publisher.editions("math")
    assert edition.number == number
    with SlotReader.open(edition.slot, manifest_digest=edition.manifest_digest) as reader:
        assert {name: bytes(reader.buffer(name)) for name in tensors} == {n: t.tobytes() for n, t in tensors.items()}
        assert reader.manifest.metadata[ADAPTER_CONFIG] == '{"r":2}'


def test_the_newest_stay_and_slots_of_those_that_went_are_used_again(publisher: Publisher) -> None:
    publisher.publish(model(), activate=False)
    made = [publisher.publish_edition("math", adapter(float(i)), keep=2) for i in range(8)]
    assert numbers(publisher) == made[-2:]
    slots = list(publisher.arena.directory.rglob("slot-*"))
    assert len(slots) <= 1 + 4, "the base's, two editions, one that is written, and one that was free"
    publisher.publish_edition("prose", adapter(0.0), keep=1)
    assert numbers(publisher, "math") == made[-2:]


def test_an_edition_is_withdrawn(publisher: Publisher) -> None:
    publisher.publish(model(), activate=False)
    first, second, third = (publisher.publish_edition("math", adapter(float(i))) for i in range(3))
    assert publisher.withdraw_edition("math", second) == [second]
    assert publisher.withdraw_edition("math", second) == []
    assert publisher.withdraw_edition("math") == [first, third]
    assert publisher.withdraw_edition("nothing") == []
    assert numbers(publisher) == []


def test_a_publisher_that_lost_its_lineage_makes_and_takes_none(publisher: Publisher, store_url: str) -> None:
    publisher.publish(model(), activate=False)
    number = publisher.publish_edition("math", adapter(1.0))
    with Publisher(store_url, model="demo") as second:
        second.hold()
        with pytest.raises(StalePublisher):
            publisher.publish_edition("math", adapter(2.0))
        with pytest.raises(StalePublisher):
            publisher.withdraw_edition("math", number)
        assert numbers(second) == [number]
        assert len(second.versions()) == 1, "no claim is left"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"name": "a@1"}, "leave out the @"),
        ({"name": 7}, "leave out the @"),
        ({"name": ""}, "no part can be called"),
        ({"name": "demo"}, "give the adapter another name"),
        ({"percent": -1}, "percent cannot be -1"),
        ({"percent": "9"}, "percent cannot be '9'"),
        ({"keep": 0}, "keep cannot be 0"),
        ({"max_age_s": -1}, "max_age_s cannot be -1"),
        ({"adapter": {"a": np.zeros(1, np.float32)}}, "needs PEFT's configuration"),
    ],
)
def test_an_edition_that_cannot_be_is_refused(publisher: Publisher, given: dict[str, Any], says: str) -> None:
    publisher.publish(model(), activate=False)
    with pytest.raises(PublishError, match=says):
        publisher.publish_edition(**{"name": "math", "adapter": adapter(1.0), **given})
    assert numbers(publisher) == []
    assert len(publisher.versions()) == 1


def test_a_draft_is_committed_as_it_was_begun(publisher: Publisher) -> None:
    publisher.publish(model(), activate=False)
    schema = as_schema([("a.lora_A.weight", np.dtype(np.float32), (2, 4))])
    (version,) = publisher.begin_all({"lora/math": (schema, adapter(1.0).metadata)})
    with version, pytest.raises(PublishError, match="call `commit`"):
        version.commit_edition()
    with publisher.begin_edition("math", schema, adapter(1.0).metadata) as draft:
        with pytest.raises(PublishError, match="call `commit_edition`"):
            draft.commit()
        draft.write("a.lora_A.weight", np.ones((2, 4), np.float32))
        assert draft.commit_edition() == draft.version
    assert numbers(publisher) == [draft.version]
    assert len(publisher.versions()) == 1


def test_there_is_a_step_of_the_right_type_only(publisher: Publisher) -> None:
    publisher.publish(model(), activate=False)
    with refused("record_refused", match="Nothing was written"):
        publisher.publish_edition("math", adapter(1.0), step="8")  # type: ignore[arg-type]
    assert numbers(publisher) == []


@pytest.mark.parametrize(
    ("name", "found"),
    [("math@7", ("math", 7)), ("math", ("math", None)), ("a@b", ("a@b", None)), ("@7", ("@7", None)),
     ("a@7@8", ("a@7", 8)), ("math@", ("math@", None)), ("math@-1", ("math@-1", None))],
)  # fmt: skip
def test_a_name_may_pin_an_edition(name: str, found: tuple[str, int | None]) -> None:
    assert split_name(name) == found


def test_shares_are_drawn_as_they_were_asked_for() -> None:
    draw = random.Random(5)
    percents = [(9, 10.0), (7, 50.0), (3, 20.0)]
    counts = dict.fromkeys((9, 7, 3), 0)
    for _ in range(20_000):
        counts[drawn(percents, draw.random())] += 1
    shares = {number: count / 20_000 for number, count in counts.items()}
    assert shares == pytest.approx({9: 0.10, 7: 0.45, 3: 0.45}, abs=0.02)
    assert {drawn([(9, 100.0), (7, 50.0)], x) for x in (0.0, 0.5, 0.999999)} == {9}
    assert drawn([(3, 1.0)], 0.9) == 3
    assert {drawn([(9, 0.0), (7, 50.0), (3, 20.0), (1, 0.0)], x) for x in (0.0, 0.49, 0.5, 0.99)} == {7, 3}
    assert drawn([(9, 0.0)], 0.5) is None, "it is on trial"


def test_the_old_go_but_for_the_newest_of_each_name() -> None:
    def edition(name: str, number: int, age: float) -> EditionRecord:
        return EditionRecord(name, number, "", "", 0, "", 1000.0 - age)

    known = [edition("a", 1, 90), edition("a", 2, 50), edition("b", 3, 80), edition("b", 4, 70), edition("c", 5, 99)]

    def gone(name: str, keep: int, max_age_s: float | None, percent: float = 100.0) -> list[int]:
        new = replace(edition(name, 9, 0), percent=percent)
        return sorted(record.number for record in outdated(known, new, keep, max_age_s))

    assert gone("a", 3, None) == []
    assert gone("a", 2, None) == [1]
    assert gone("a", 1, None) == [1, 2]
    assert gone("a", 1, None, percent=0.0) == [1], "the newest that serves stays beside one that is on trial"
    assert gone("a", 3, 60.0) == [1, 3]
    assert gone("d", 1, 10.0) == [1, 3]
    left = replace(edition("a", 8, 5), percent=0.0)
    known.append(left)
    assert gone("a", 1, None, percent=0.0) == [1], "a trial that its gateway did not end takes nothing away"
    assert gone("a", 1, None) == [1, 2, 8]
    assert gone("d", 1, 1.0) == [1, 3], "nor does age: the newest of a name stays, and the newest that serves"


def test_a_name_within_another_is_apart(publisher: Publisher) -> None:
    publisher.publish(model(), activate=False)
    outer, inner = publisher.publish_edition("org", adapter(1.0)), publisher.publish_edition("org/prose", adapter(2.0))
    assert (numbers(publisher, "org"), numbers(publisher, "org/prose")) == ([outer], [inner])
    assert publisher.withdraw_edition("org") == [outer]
    assert numbers(publisher) == [inner]
