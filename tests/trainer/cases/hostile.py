"""Checkpoints that somebody else has prepared, with digests that match: what a run does that is to go on from them."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tests.trainer.cases import engine
from tests.trainer.cases.faults import _steps
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.checkpoint.directory import MANIFEST, describe
from trainer.config import CheckpointConfig
from trainer.errors import RankFailed, ResumeError


class Trap:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def an_index_that_runs_a_command(role: Path, mark: Path) -> None:
    (role / ".metadata").write_bytes(pickle.dumps(Trap(mark)))


def an_index_that_reaches_through_a_module_it_may_name(role: Path, mark: Path) -> None:
    def text(value: str) -> bytes:
        return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()

    name = text("torch.distributed.checkpoint.metadata") + text("os.system") + pickle.STACK_GLOBAL
    called = text(f"touch {mark}") + pickle.TUPLE1 + pickle.REDUCE
    (role / ".metadata").write_bytes(pickle.PROTO + b"\x04" + name + called + pickle.STOP)


def an_index_that_looks_up_a_method(role: Path, mark: Path) -> None:
    """As members of enumerations are looked up, in older Pythons."""

    class Touch:
        def __reduce__(self) -> Any:
            return Method(), (mark,)

    class Method:
        def __reduce__(self) -> Any:
            return getattr, (PosixPath, "touch")

        def __call__(self) -> None: ...

    (role / ".metadata").write_bytes(pickle.dumps(Touch()))


def an_index_beside_a_trap(role: Path, mark: Path) -> None:
    index = _index(role)
    index.planner_data = {"kept": Trap(mark)}
    (role / ".metadata").write_bytes(pickle.dumps(index))


def a_weight_that_is_called_bytes(role: Path, mark: Path) -> None:
    index, data = _index(role), io.BytesIO()
    torch.save(Trap(mark), data)
    for key, where in index.storage_data.items():
        index.state_dict_metadata[key.fqn] = BytesStorageMetadata()
        where.relative_path, where.offset, where.length = "trap", 0, len(data.getvalue())
    (role / "trap").write_bytes(data.getvalue())
    index.storage_data |= {type(key)(key.fqn): where for key, where in index.storage_data.items()}
    (role / ".metadata").write_bytes(pickle.dumps(index))


def a_shard_that_runs_a_command(role: Path, mark: Path) -> None:
    index, data = _index(role), io.BytesIO()
    torch.save(Trap(mark), data)
    for where in index.storage_data.values():
        where.relative_path, where.offset, where.length = "trap", 0, len(data.getvalue())
    (role / "trap").write_bytes(data.getvalue())
    (role / ".metadata").write_bytes(pickle.dumps(index))


def a_shard_elsewhere(role: Path, mark: Path) -> None:
    index = _index(role)
    for where in index.storage_data.values():
        where.relative_path = f"../../{where.relative_path}"
    (role / ".metadata").write_bytes(pickle.dumps(index))


def something_else(role: Path, mark: Path) -> None:
    (role / ".metadata").write_bytes(pickle.dumps([1]))


def nothing(role: Path, mark: Path) -> None:
    (role / ".metadata").write_bytes(b"")


def a_common_part_that_runs_a_command(role: Path, mark: Path) -> None:
    if (role / "common.pt").exists():
        torch.save({"scheduler": Trap(mark)}, role / "common.pt")
    else:  # under `shard: full` there is none, and nothing in its place can run
        (role / "fully_sharded.json").write_text('["steps"]')


TRAPS: list[Callable[[Path, Path], None]] = [
    an_index_that_runs_a_command,
    an_index_that_reaches_through_a_module_it_may_name,
    an_index_that_looks_up_a_method,
    an_index_beside_a_trap,
    a_weight_that_is_called_bytes,
    a_shard_that_runs_a_command,
    a_shard_elsewhere,
    something_else,
    nothing,
    a_common_part_that_runs_a_command,
]


def prepared(path: str, parallel: dict[str, Any], directory: str) -> dict[str, str]:
    """What is said to each trap; `ran` for one that sprang, `loaded` for one that nobody noticed."""
    root, said = Path(directory), {}
    with engine({"model": {"path": path}, "parallel": parallel}) as built:
        _steps(built, 0, 1)
        checkpoints = Checkpoints(CheckpointConfig(str(root / "good")), built, {"seed": 0})
        checkpoints.save(1, {"step": 1})
        checkpoints.wait()
        for trap in TRAPS:
            prepare = root / trap.__name__
            mark = root / f"{trap.__name__}.ran"
            if torch.distributed.get_rank() == 0:
                shutil.copytree(root / "good", prepare)
                trap(prepare / "step-00000001" / "actor", mark)
                _seal(prepare / "step-00000001")
            torch.distributed.barrier()
            said[trap.__name__] = _resumed(Checkpoints(CheckpointConfig(str(prepare)), built, {"seed": 0}))
            said[trap.__name__] = "ran" if mark.exists() else said[trap.__name__]
        assert checkpoints.resume() == {"step": 1}, "the engine must still be able to load what is whole"
    return said


def _resumed(checkpoints: Checkpoints) -> str:
    try:
        checkpoints.resume()
    except (ResumeError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def _index(role: Path) -> Any:
    return pickle.loads((role / ".metadata").read_bytes())


def _seal(directory: Path) -> None:
    """Digests of what is there now: whoever can write the files can write these."""
    manifest = json.loads((directory / MANIFEST).read_text())
    files = [file for file in directory.rglob("*") if file.is_file() and file.name != MANIFEST]
    manifest["files"] = {str(file.relative_to(directory)): describe(file) for file in files}
    (directory / MANIFEST).write_text(json.dumps(manifest))
