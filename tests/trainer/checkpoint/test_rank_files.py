"""Shares of ranks, the memory of their copies, the thread that writes, and the other parts of a run's state."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from trainer.checkpoint import parts, shards
from trainer.checkpoint.directory import CheckpointDir
from trainer.checkpoint.rank_files import Background, RankFiles, collect, put
from trainer.checkpoint.shards import Buffers
from trainer.errors import CheckpointError, ResumeError


def test_shares_come_back_in_rank_order_and_leave_no_file(tmp_path: Path) -> None:
    shares = [
        RankFiles({f"{rank}.bin": (rank, "abc")}, {"actor": [["w", [0, 4], None, "f", 0, 9]]}) for rank in range(3)
    ]
    late = threading.Timer(0.1, lambda: put(tmp_path, 1, shares[1]))
    late.start()
    for rank in (2, 0):
        put(tmp_path, rank, shares[rank])
    assert collect(tmp_path, 3, 20, threading.Event()) == shares
    assert not list(tmp_path.iterdir())


def test_a_rank_that_could_not_write_is_named(tmp_path: Path) -> None:
    put(tmp_path, 0, RankFiles())
    put(tmp_path, 1, RankFiles(problem="no space left"))
    with pytest.raises(CheckpointError, match="rank 1: no space left"):
        collect(tmp_path, 2, 20, threading.Event())


def test_ranks_that_say_nothing_are_named(tmp_path: Path) -> None:
    put(tmp_path, 1, RankFiles())
    with pytest.raises(CheckpointError, match=r"no share from ranks \[0, 2\]"):
        collect(tmp_path, 3, 0.05, threading.Event())
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(CheckpointError, match=r"no share from ranks \[0, 2\]"):
        collect(tmp_path, 3, 3600, given_up)


def test_the_thread_hands_over_its_result_once() -> None:
    background: Background[int] = Background("test")
    gate = threading.Event()
    background.start(lambda: int(gate.wait(20)) + 6)
    assert background.busy
    assert background.take(wait=False) is None
    gate.set()
    assert background.take(wait=True) == 7
    assert background.take(wait=True) is None
    background.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        background.take(wait=True)


def test_a_file_that_was_reported_but_is_gone_makes_the_checkpoint_torn(tmp_path: Path) -> None:
    directory = CheckpointDir(tmp_path)
    (directory.stage(1) / "there").write_text("x")
    directory.commit(1, {}, known={"gone.distcp": (3, "00")})
    with pytest.raises(ResumeError, match=r"gone.distcp is missing"):
        directory.newest()


@dataclass
class Cursor:
    drawn: int

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def test_parts_come_back_as_they_were(tmp_path: Path) -> None:
    before = {"buffer": Cursor(2), "cursor": Cursor(9)}
    parts.write(parts.take(before), tmp_path)
    found = {"buffer": Cursor(0), "cursor": Cursor(0), "new": Cursor(5)}
    parts.restore(found, tmp_path)
    assert found == before | {"new": Cursor(5)}


def test_a_part_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    parts.write({"parts/cursor.json": b'{"other": 1}'}, tmp_path)
    with pytest.raises(ResumeError, match=r"cursor.json does not fit"):
        parts.restore({"cursor": Cursor(0)}, tmp_path)


def test_a_copy_is_pinned_once_and_as_large_as_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts it to the byte. Shards have all kinds of shapes: none at all, and no numbers."""
    asked: list[tuple[int, str]] = []

    def memory(nbytes: int, device: torch.device) -> tuple[torch.Tensor, int]:
        asked.append((nbytes, device.type))
        return torch.empty(nbytes, dtype=torch.uint8), 0

    monkeypatch.setattr(shards, "pinned", memory)
    buffers, index = Buffers(), MetadataIndex("weight")
    for shape, dtype in (((3, 5), torch.bfloat16), ((), torch.float32), ((0, 4), torch.float32)):
        for value in (1.0, 2.0):
            tensor = torch.full(shape, value, dtype=dtype)
            assert torch.equal(buffers.copy("actor", index, tensor), tensor)
    assert asked == [(30, "cpu"), (4, "cpu"), (0, "cpu")]
