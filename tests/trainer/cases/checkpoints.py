"""Cases about checkpoints, for the ranks of tests/trainer/ranks.py: save while training goes on, fail to write, resume;
and checkpoints that somebody else has prepared, with digests that match."""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import trainer.errors
from tests.trainer.batches import sampled_batch
from tests.trainer.cases import engine
from trainer.checkpoint import engine_state
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.checkpoint.directory import MANIFEST, describe
from trainer.checkpoint.engine_state import StagedEngine
from trainer.config import CheckpointConfig, FaultsConfig
from trainer.errors import CheckpointError, Preempted, RankFailed, ResumeError, TrainerError
from trainer.faults.supervision import Faults
from trainer.megatron.engine import Engine
from trainer.rollouts.experience import TrainState
from trainer.run import Run

WRITE = StagedEngine.write


def _full(_: StagedEngine) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def _steps(built: Engine, first: int, last: int) -> list[list[float]]:
    result = []
    for step in range(first, last):
        stats = built.step(sampled_batch(built.shape.vocab, seed=step))
        result.append([stats.loss, stats.grad_norm, stats.metrics.get("critic_loss", 0.0)])
    return result


def saved_while_training(path: str, parallel: dict[str, int], directory: str, **config: Any) -> dict[str, Any]:
    """Trains 4 steps; the checkpoint of step 2 is written only after the last. Then another engine resumes from it."""
    section = CheckpointConfig(directory, every=1)
    config = {"optimizer": {"lr": 1e-2}} | config
    gate = threading.Event()
    with engine(path, parallel, **config) as built:
        checkpoints = Checkpoints(section, built, {"seed": 0})
        _steps(built, 0, 2)
        with patch.object(StagedEngine, "write", lambda self: (gate.wait(600), WRITE(self))[1]):
            checkpoints.save(2, {"step": 2})
            through = _steps(built, 2, 4)
            unwritten = not list(Path(directory).glob("step-*"))
            gate.set()
            checkpoints.wait()
        events = [name for name, _ in checkpoints.events()]
    with engine(path, parallel, **config) as built:
        train = Checkpoints(section, built, {"seed": 0}).resume()
        resumed = _steps(built, 2, 4)
    return {"through": through, "resumed": resumed, "train": train, "unwritten": unwritten, "events": events}


def resumed(path: str, parallel: dict[str, int], directory: str, **config: Any) -> list[list[float]]:
    """Steps 2 and 3 after resuming in whatever layout."""
    with engine(path, parallel, **{"optimizer": {"lr": 1e-2}} | config) as built:
        assert Checkpoints(CheckpointConfig(directory), built, {"seed": 0}).resume() is not None
        return _steps(built, 2, 4)


def torn(path: str, parallel: dict[str, int], directory: str) -> dict[str, Any]:
    """Two checkpoints, of which a shard of the newer is damaged, then lost; then one of the older too."""
    with engine(path, parallel) as built:
        checkpoints = Checkpoints(CheckpointConfig(directory), built, {"seed": 0})
        for step in (1, 2):
            checkpoints.save(step, {"step": step})
        checkpoints.wait()
        found: list[Any] = [checkpoints.resume()]
        for step in (2, 1):
            if dist.get_rank() == 0:
                shard = min(Path(directory, f"step-{step:08d}", "actor").glob("__1_*.distcp"))
                data = bytearray(shard.read_bytes())
                data[len(data) // 2] ^= 1
                shard.write_bytes(data) if step == 2 else shard.unlink()
            dist.barrier()
            try:
                found.append(checkpoints.resume())
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        return {"found": found}


def disk_full(path: str, parallel: dict[str, int], directory: str) -> list[Any]:
    """Rank 1's disk is full at the first checkpoint, which may fail, works at the second, is full for the next two."""
    seen = []
    with engine(path, parallel) as built:
        checkpoints = Checkpoints(CheckpointConfig(directory, max_failures=1), built, {"seed": 0})
        for step in (1, 2, 3, 4):
            with patch.object(StagedEngine, "write", _full if step != 2 and dist.get_rank() == 1 else WRITE):
                try:
                    checkpoints.save(step, {"step": step})
                    checkpoints.wait()
                except CheckpointError as error:
                    seen.append(f"stopped at {step}: {error}")
                except Exception as error:
                    seen.append(type(error).__name__)
            seen += [[name, values["step"]] for name, values in checkpoints.events()]
    return seen


def left_with(errors: list[str]) -> list[str]:
    """Faults that the other ranks would hear of one that leaves with these errors, one after the other."""
    heard = []
    for name in errors:
        faults = Faults(FaultsConfig(heartbeat_s=0.01, heartbeat_timeout_s=60.0))
        with contextlib.suppress(TrainerError), faults:
            raise getattr(trainer.errors, name)("it is over")
        heard.append(faults._board.fault())
    return heard


def saved_synchronously(path: str, parallel: dict[str, int], directory: str) -> list[list[float]]:
    """`state.save` and `Checkpoints` without a thread write the same numbers."""
    with engine(path, parallel, optimizer={"lr": 1e-2}) as built:
        _steps(built, 0, 2)
        checkpoints = Checkpoints(CheckpointConfig(directory, asynchronous=False), built, {"seed": 0})
        checkpoints.save(2, {"step": 2})
        through = _steps(built, 2, 4)
        checkpoints.resume()
        assert _steps(built, 2, 4) == through
        engine_state.load(built, Path(directory, "step-00000002"))
        return [through[0], _steps(built, 2, 4)[0]]


def left_after_sigterm(path: str, directory: str) -> list[str]:
    """The last words of a run that is told to leave: its disk full, with room, and once more after a leap has begun."""
    said = []
    with engine(path) as built:
        run: Any = Run.__new__(Run)
        run.checkpoints = Checkpoints(CheckpointConfig(directory, max_failures=1), built, {"seed": 0})
        run.faults, run._phases, run._metrics = Mock(), Mock(), Mock()
        run._evaluated, run._suspicious = (-1, 0.0), False
        for step, write, run._suspicious in ((1, _full, False), (2, WRITE, False), (3, WRITE, True)):
            with patch.object(StagedEngine, "write", write):
                try:
                    run.may_leave(TrainState(step))
                except Preempted as left:
                    said.append(str(left))
    return said


def resumed_elsewhere(path: str, directory: str) -> dict[str, Any]:
    """A checkpoint that a GPU has written, as far as its generators tell: whether weights and the host's generator came
    back, and whether those of the device were left as they were."""
    target = Path(directory)
    with engine(path) as built:
        engine_state.save(built, target)
        file = target / "rank-00000.json"
        state = json.loads(file.read_text())
        gpus = base64.b64encode(bytes(16)).decode()  # seed and offset: a CPU's state has 5,056 bytes
        tracker = dict.fromkeys(state["tracker"], gpus)
        file.write_text(json.dumps(state | {"device": "cuda", "cuda": gpus, "tracker": tracker}))
        saved = [p.detach().clone() for p in built.model[0].parameters()]
        _steps(built, 0, 1)
        torch.rand(3)
        engine_state.load(built, target)
        same = all(torch.equal(a, b) for a, b in zip(saved, built.model[0].parameters(), strict=True))
        now = engine_state.rng_state()
        return {"device": state["device"], "same": same, **{k: now[k] == state[k] for k in ("torch", "tracker")}}


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
    a_shard_that_runs_a_command(role, mark)
    index = _index(role)
    for key in index.storage_data:
        index.state_dict_metadata[key.fqn] = BytesStorageMetadata()
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
    """The answer to each trap; `ran` for one that sprang, `loaded` for one that nobody noticed."""
    root, said = Path(directory), {}
    with engine(path, parallel) as built:
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
