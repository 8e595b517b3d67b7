"""The processes behind the demo: server, trainer, clients, and the swaps that they see."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import yaml

from loadtest.demo.client import Clients
from loadtest.demo.recipe import Course
from loadtest.demo.scene import Scene, Swap, SwapStats
from loadtest.measure.run import up
from server.errors import CliError
from server.up.interrupts import held
from server.up.processes import Child
from server.up.server import Server
from trainer.errors import Preempted
from trainer.tiny_model import tiny_run
from weightsync import open_store
from weightsync.control.records import InstanceRecord, Keys, SwapRecord
from weightsync.store import KeyValue


class Background:
    """Runs coroutines that have no end until `stop`; the first error of one stops all and is raised by `check`."""

    def __init__(self, *coroutines: Coroutine[Any, Any, None]) -> None:
        self._coroutines = coroutines
        self._error: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="demo-clients", daemon=True)
        self._thread.start()
        self._started.wait()

    def check(self) -> None:
        """Raise what ended the thread early, if anything did."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Cancel everything and wait for it; safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    async def _main(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        tasks = [asyncio.create_task(c) for c in self._coroutines]
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in [*tasks, stopping]:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                self._error = outcome


async def follow_swaps(store_url: str, model: str, stats: SwapStats) -> None:
    """Append to `stats` until cancelled; the store's watch has no gaps, so no swap is missed."""
    store, keys = open_store(store_url, create=False), Keys(model)
    try:
        found, revision = await store.list(keys.root)
        for kv in found:
            _read(kv, keys, stats)
        async with contextlib.aclosing(store.watch(keys.root, revision + 1)) as events:
            async for event in events:
                if event.kind == "put":
                    _read(event.kv, keys, stats)
    finally:
        await store.close()


def _read(kv: KeyValue, keys: Keys, stats: SwapStats) -> None:
    if kv.key.startswith(keys.instances):
        record = InstanceRecord.from_json(kv.value)
        known = stats.last.epoch if stats.last else 0
        if record.state == "SERVING" and record.active_version is not None and record.active_epoch > known:
            times = (record.stage_ms or 0.0, record.commit_ms or 0.0)
            stats.done.append(Swap(record.active_version, record.active_epoch, *times))
    elif kv.key == keys.swap:
        swap = SwapRecord.from_json(kv.value)
        if swap.phase == "aborted":
            stats.aborted.append(f"version {swap.target}: {swap.reason}")


POLL_S = 0.1
QUESTIONS = 6
SETTLE_S = 1.0  # the client goes on for a moment on the last version


class DemoFailed(Exception):
    """`phase` could not be completed."""

    def __init__(self, phase: str, problem: str) -> None:
        super().__init__(f"the demo failed in phase '{phase}': {problem}")


class MetricsTail:
    """The events of a metrics file that were added since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + 1 if whole else 0
        return [orjson.loads(line) for line in whole.splitlines()]


class Training(NamedTuple):
    """One that has been started, and its events."""

    trainer: Child
    metrics: MetricsTail


class Demo:
    """One run in directory `run`. Call `close` whatever happens: it ends every process and frees the shared memory.

    `watchers` are called about ten times a second while a training runs.
    """

    def __init__(self, run: Path, recipe: Course, scene: Scene, watchers: Sequence[Callable[[], None]] = ()) -> None:
        self.run_dir, self.recipe, self.scene, self._watchers = run.resolve(), recipe, scene, watchers
        self.server: Server | None = None
        self._background: Background | None = None
        self._lock: int | None = None

    def run(self) -> None:
        """All phases. Raises DemoFailed."""
        self.build()
        (phase, name), *later = self.recipe.trainings
        self.follow(phase, self.serve(name))
        for phase, name in later:
            self.train(phase, name)
        self.settle()

    def build(self) -> None:
        """Write the model, as a Hugging Face checkpoint directory."""
        self.scene.enter("build")
        self._clear()
        command = self.recipe.build(self.run_dir)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoFailed("build", f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")

    def serve(self, first: str) -> Training:
        """Start gateway and instance, and beside them the training `first`, which waits for them once it has made its
        model. Wait until they answer, then let the clients begin."""
        self.scene.enter("serve")
        try:
            with held():
                model, state = self.run_dir / "model", self.run_dir / "state"
                self.server = server = up(
                    model, self.recipe.model, state, self.recipe.engine_args, kv_cache_gib=self.recipe.kv_cache_gib
                )
                server.start()
            training = self.begin(first)
            server.wait_ready(timeout_s=240.0)
        except CliError as error:
            raise DemoFailed("serve", str(error)) from error
        clients = Clients(server.url, self.recipe, self.scene, self.recipe.questions(self.run_dir, QUESTIONS))
        swaps = follow_swaps(server.store, self.recipe.model, self.scene.swaps)
        self._background = Background(clients.run(), swaps)
        return training

    def train(self, phase: str, name: str) -> None:
        """Run one training against the live server, until the trainer ends by itself or has done enough."""
        self.follow(phase, self.begin(name))

    def begin(self, name: str) -> Training:
        """Start a training."""
        assert self.server is not None
        config = getattr(self.recipe, name)(self.run_dir, self.server.url)
        config["telemetry"] = {
            "admin_url": self.server.admin_url,
            "admin_key_file": str(self.server.admin_key_file),
        }
        path = self.run_dir / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tiny_run(config), sort_keys=False))
        with held():
            return Training(self.server.train(path), MetricsTail(Path(config["metrics"])))

    def follow(self, phase: str, training: Training) -> None:
        """Watch a training until it has ended by itself or has done enough."""
        self.scene.enter(phase)
        trainer, metrics = training
        stopped = False
        while trainer.alive:
            self._watch(phase, metrics)
            if not stopped and self.recipe.enough(self.scene):
                stopped = True
                trainer.process.terminate()  # it leaves after the step that is under way
        self._watch(phase, metrics)
        if trainer.process.returncode and not (stopped and trainer.process.returncode == Preempted.exit_code):
            raise DemoFailed(phase, self._post_mortem(trainer))

    def settle(self) -> None:
        """Let the clients see the last version, then stop them; the server stays up."""
        assert self._background is not None
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            self._watch(self.recipe.phases[-2], None)
        self._background.stop()
        self._background.check()
        self.scene.enter("done")

    def close(self) -> None:
        """End every process and free the shared memory; safe to call twice, and at any point."""
        if self._background is not None:
            self._background.stop()
        if self.server is not None:
            self.server.stop()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _watch(self, phase: str, metrics: MetricsTail | None) -> None:
        """One look at everything that runs."""
        assert self.server is not None
        assert self._background is not None
        for event in metrics.read() if metrics is not None else []:
            self.scene.read(event)
        self._background.check()
        for name in ("gateway", "instance-0"):
            if not self.server.children[name].alive:
                raise DemoFailed(phase, self._post_mortem(self.server.children[name]))
        for watcher in self._watchers:
            watcher()
        time.sleep(POLL_S)

    def _clear(self) -> None:
        """Take the directory for this run and remove what an earlier one left in it."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoFailed("build", f"another demo runs in {self.run_dir}; end it, or use --dir") from None
        for name in ("model", "fine-tuned", "final", "adapter"):
            shutil.rmtree(self.run_dir / name, ignore_errors=True)
        for _, name in self.recipe.trainings:
            (self.run_dir / f"{name}.jsonl").unlink(missing_ok=True)

    @staticmethod
    def _post_mortem(child: Child) -> str:
        return f"{child.name} ended with {child.process.returncode}; the end of {child.log}:\n{child.tail()}"
