"""What ranks are asked to do in the tests of checkpoints: save while training goes on, fail to write, resume."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist

import trainer.errors
from tests.trainer.batches import sampled_batch
from tests.trainer.cases import engine
from trainer.checkpoint import engine_state
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.checkpoint.engine_state import StagedEngine
from trainer.config import CheckpointConfig, FaultsConfig
from trainer.errors import CheckpointError, Preempted, TrainerError
from trainer.faults.supervision import Faults
from trainer.megatron.engine import Engine
from trainer.rollouts.experience import TrainState
from trainer.run import Run


def _steps(built: Engine, first: int, last: int) -> list[list[float]]:
    result = []
    for step in range(first, last):
        stats = built.step(sampled_batch(built.shape.vocab, seed=step))
        result.append([stats.loss, stats.grad_norm, stats.metrics.get("critic_loss", 0.0)])
    return result


def saved_while_training(path: str, parallel: dict[str, int], directory: str, **config: Any) -> dict[str, Any]:
    """Trains 4 steps; the checkpoint of step 2 is written only after the last. Then another engine resumes from it."""
    section = CheckpointConfig(directory, every=1)
    model = {"model": {"path": path}, "parallel": parallel, "optimizer": {"lr": 1e-2}} | config
    gate, original = threading.Event(), StagedEngine.write
    with engine(model) as built:
        checkpoints = Checkpoints(section, built, {"seed": 0})
        _steps(built, 0, 2)
        StagedEngine.write = lambda self: (gate.wait(60), original(self))[1]  # type: ignore[method-assign]
        checkpoints.save(2, {"step": 2})
        StagedEngine.write = original  # type: ignore[method-assign]
        through = _steps(built, 2, 4)
        unwritten = not list(Path(directory).glob("step-*"))
        gate.set()
        checkpoints.wait()
        events = [name for name, _ in checkpoints.events()]
    with engine(model) as built:
        train = Checkpoints(section, built, {"seed": 0}).resume()
        resumed = _steps(built, 2, 4)
    return {"through": through, "resumed": resumed, "train": train, "unwritten": unwritten, "events": events}


def resumed(path: str, parallel: dict[str, int], directory: str, **config: Any) -> list[list[float]]:
    """Steps 2 and 3 after resuming in whatever layout."""
    with engine({"model": {"path": path}, "parallel": parallel, "optimizer": {"lr": 1e-2}} | config) as built:
        assert Checkpoints(CheckpointConfig(directory), built, {"seed": 0}).resume() is not None
        return _steps(built, 2, 4)


def torn(path: str, parallel: dict[str, int], directory: str) -> dict[str, Any]:
    """Two checkpoints, of which a shard of the newer is damaged, then lost; then one of the older too."""
    with engine({"model": {"path": path}, "parallel": parallel}) as built:
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

    def full(self: StagedEngine) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    original, seen = StagedEngine.write, []
    with engine({"model": {"path": path}, "parallel": parallel}) as built:
        checkpoints = Checkpoints(CheckpointConfig(directory, max_failures=1), built, {"seed": 0})
        for step in (1, 2, 3, 4):
            if step != 2 and dist.get_rank() == 1:
                StagedEngine.write = full  # type: ignore[method-assign]
            try:
                checkpoints.save(step, {"step": step})
                checkpoints.wait()
            except CheckpointError as error:
                seen.append(f"stopped at {step}: {error}")
            except Exception as error:
                seen.append(type(error).__name__)
            finally:
                StagedEngine.write = original  # type: ignore[method-assign]
            seen += [[name, values["step"]] for name, values in checkpoints.events()]
    return seen


def left_with(errors: list[str]) -> list[str]:
    """What the other ranks would hear of one that leaves with these errors, one after the other."""
    heard = []
    for name in errors:
        faults = Faults(FaultsConfig(heartbeat_s=0.01, heartbeat_timeout_s=60.0))
        with contextlib.suppress(TrainerError), faults:
            raise getattr(trainer.errors, name)("it is over")
        heard.append(faults._board.fault())
    return heard


def saved_synchronously(path: str, parallel: dict[str, int], directory: str) -> list[list[float]]:
    """`state.save` and `Checkpoints` without a thread write the same numbers."""
    with engine({"model": {"path": path}, "parallel": parallel, "optimizer": {"lr": 1e-2}}) as built:
        _steps(built, 0, 2)
        checkpoints = Checkpoints(CheckpointConfig(directory, asynchronous=False), built, {"seed": 0})
        checkpoints.save(2, {"step": 2})
        through = _steps(built, 2, 4)
        checkpoints.resume()
        assert _steps(built, 2, 4) == through
        engine_state.load(built, Path(directory, "step-00000002"))
        return [through[0], _steps(built, 2, 4)[0]]


def left_after_sigterm(path: str, directory: str) -> list[str]:
    """What a run says that is told to leave: its disk full, with room, and once more after a leap has begun."""

    def full(self: StagedEngine) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    original, said = StagedEngine.write, []
    with engine({"model": {"path": path}}) as built:
        run: Any = Run.__new__(Run)
        run.checkpoints = Checkpoints(CheckpointConfig(directory, max_failures=1), built, {"seed": 0})
        run.faults, run._phases, run._metrics = Mock(), Mock(), Mock()
        run._evaluated, run._suspicious = (-1, 0.0), False
        for step, write, run._suspicious in ((1, full, False), (2, original, False), (3, original, True)):
            StagedEngine.write = write  # type: ignore[method-assign]
            try:
                run.may_leave(TrainState(step))
            except Preempted as left:
                said.append(str(left))
            finally:
                StagedEngine.write = original  # type: ignore[method-assign]
    return said


def resumed_elsewhere(path: str, directory: str) -> dict[str, Any]:
    """A checkpoint that a GPU has written, as far as its generators tell: whether weights and the host's generator came
    back, and whether those of the device were left as they were."""
    target = Path(directory)
    with engine({"model": {"path": path}}) as built:
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
