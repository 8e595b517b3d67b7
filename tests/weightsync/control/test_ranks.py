"""Several processes write one version, each its share, straight into the slot."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import weightsync
from tests.weightsync.codes import refused
from tests.weightsync.tensors import read_back
from weightsync import Publisher, SlotReader
from weightsync.errors import ManifestError, PublishError, SlotBusy

SCHEMA = [("column", "float32", (8, 4)), ("row", "float32", (4, 8)), ("whole", "int8", (3,)), ("other", "int8", (5,))]
FULL = {
    "column": np.arange(32, dtype=np.float32).reshape(8, 4),
    "row": np.arange(32, dtype=np.float32).reshape(4, 8),
    "whole": np.array([1, 2, 3], np.int8),
    "other": np.arange(5, dtype=np.int8),
}

RANK_1 = """
import json, sys
import numpy as np
import weightsync
part = weightsync.join(json.loads(sys.argv[1]), rank=1)
full = np.arange(32, dtype=np.float32)
part.write("other", np.arange(5, dtype=np.int8))
part.write_slice("column", full.reshape(8, 4)[4:], start=4)
part.write_slice("row", full.reshape(4, 8)[:, 4:], start=4, dim=1)
print(json.dumps(part.seal()))
"""


def test_two_processes_write_one_version(publisher: Publisher) -> None:
    draft = publisher.begin(SCHEMA, step=3)
    draft.write("whole", FULL["whole"])
    draft.write_slice("column", FULL["column"][:4], start=0)
    draft.write_slice("row", FULL["row"][:, :4], start=0, dim=1)
    rank_1 = [sys.executable, "-c", RANK_1, json.dumps(draft.ticket)]
    run = subprocess.run(rank_1, capture_output=True, check=True, timeout=240)
    version = draft.commit([json.loads(run.stdout)])
    (record,) = publisher.versions()
    assert record.version == version
    found = read_back(record)
    assert all(np.array_equal(found[name], FULL[name]) for name in FULL)
    with SlotReader.open(record.slot) as reader:
        column = reader.entry("column")
        assert column.slices == ((0, column.offset, 64), (1, column.offset + 64, 64))
        assert reader.entry("whole").slices == ()


@pytest.mark.parametrize(
    ("shape", "dim", "cuts"),
    [
        ((8, 4), 0, [(0, 4)]),
        ((8, 4), 0, [(0, 4), (0, 4)]),
        ((6, 4), 0, [(0, 4), (2, 4)]),
        ((4, 6), 1, [(0, 4), (2, 4)]),
        ((2, 6, 2), 1, [(0, 1), (2, 6), (3, 4)]),
        ((6,), 0, [(0, 3), (1, 4)]),
    ],
)
def test_a_gap_between_shares_is_noticed(
    publisher: Publisher, shape: tuple[int, ...], dim: int, cuts: list[tuple[int, int]]
) -> None:
    """Also where others overlap and there are as many bytes as there must be: a gap has those of an older version."""
    full = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    draft = publisher.begin([("cut", "float32", shape)])
    for start, stop in cuts:
        draft.write_slice("cut", full.take(range(start, stop), dim), start, dim)
    with refused("missing_tensor", match="cut"):
        draft.commit()


@pytest.mark.parametrize(("shape", "dim"), [((3, 4), 0), ((4, 3), 1), ((0, 4), 0), ((4, 0), 1)])
def test_shares_of_nothing_change_nothing(publisher: Publisher, shape: tuple[int, ...], dim: int) -> None:
    """Of a tensor with fewer rows than there are ranks, several ranks have none; they all begin where it ends."""
    full = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    draft = publisher.begin([("cut", "float32", shape)])
    for rank in range(6):
        start = min(rank, shape[dim])
        draft.write_slice("cut", full.take(range(start, min(rank + 1, shape[dim])), dim), start, dim)
    draft.commit()
    assert np.array_equal(read_back(publisher.versions()[-1])["cut"], full)


@pytest.mark.parametrize(
    ("rows", "start", "dim"),
    [(slice(0, 4), 5, 0), (slice(0, 4), -1, 0), (slice(0, 4), 0, 1), (slice(0, 4), 0, 2), (slice(0, 4), 0, -1)],
)
def test_a_share_that_does_not_fit_is_refused(publisher: Publisher, rows: slice, start: int, dim: int) -> None:
    with publisher.begin(SCHEMA) as draft, refused("shape_mismatch", match="column"):
        draft.write_slice("column", FULL["column"][rows], start=start, dim=dim)


def test_a_scalar_has_no_shares(publisher: Publisher) -> None:
    with publisher.begin([("scalar", "float32", ())]) as draft, refused("shape_mismatch", match="scalar"):
        draft.write_slice("scalar", np.array(1, np.float32), start=0)


def test_many_ranks_write_all_tensors_in_slices(publisher: Publisher) -> None:
    """More slices than the header of the slot has room for: the version is whole without them."""
    names, ranks = [f"t{n}" for n in range(64)], 64
    draft = publisher.begin([(name, "int8", (ranks,)) for name in names])
    full = np.arange(ranks, dtype=np.int8)
    for rank in range(ranks):
        for name in names:
            draft.write_slice(name, full[rank : rank + 1], rank)
    draft.commit()
    (record,) = publisher.versions()
    assert all(np.array_equal(tensor, full) for tensor in read_back(record).values())
    with SlotReader.open(record.slot, manifest_digest=record.manifest_digest) as reader:
        assert {reader.entry(name).slices for name in names} == {()}


def test_ranks_that_disagree_are_noticed(publisher: Publisher) -> None:
    draft = publisher.begin(SCHEMA)
    part = weightsync.join(draft.ticket, rank=1)
    for name, tensor in FULL.items():
        draft.write(name, tensor)
    part.write("whole", FULL["whole"] + 1)
    with pytest.raises(PublishError, match="'whole'"):
        draft.commit(part.seal())
    assert publisher.versions() == []


def test_nothing_can_be_written_after_the_seal(publisher: Publisher) -> None:
    with publisher.begin(SCHEMA) as draft:
        part = weightsync.join(draft.ticket, rank=1)
        part.seal()
        with refused("draft_closed"):
            part.write("whole", FULL["whole"])


def test_the_slot_stays_taken_while_any_rank_may_still_write(publisher: Publisher) -> None:
    draft = publisher.begin(SCHEMA)
    straggler = weightsync.join(draft.ticket, rank=1)
    draft.abort()
    version = publisher.publish(FULL, activate=False)
    straggler.write("whole", FULL["whole"] * 0)
    record = publisher.versions()[-1]
    assert record.version == version
    assert np.array_equal(read_back(record)["whole"], FULL["whole"])


def test_a_ticket_of_a_draft_that_is_gone(publisher: Publisher) -> None:
    draft = publisher.begin(SCHEMA)
    ticket = draft.ticket
    draft.abort()
    publisher.publish(FULL, activate=False)
    with pytest.raises(ManifestError, match="begin it again"):
        weightsync.join(ticket, rank=1)
    with pytest.raises(SlotBusy):
        weightsync.join(ticket | {"slot": ticket["slot"] + "x"}, rank=1)
