"""The demo from an empty directory to a trained model, phase by phase, with real processes throughout.

DemoFailed    a phase could not be completed; says which, and shows the end of the log that tells why
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import yaml

from loadtest.demo.background import Background
from loadtest.demo.client import Clients
from loadtest.demo.recipe import ENGINE_ARGS, KV_CACHE_GIB, MODEL, Recipe
from loadtest.demo.scene import Scene
from loadtest.demo.swaps import follow_swaps
from server.cli.config import UpConfig
from server.cli.errors import CliError
from server.cli.interrupts import held
from server.cli.processes import Child
from server.cli.up import Server

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


class Demo:
    """One run in directory `run`. Call `close` whatever happens: it ends every process and frees the shared memory.

    `watchers` are called about ten times a second while a training runs.
    """

    def __init__(self, run: Path, recipe: Recipe, scene: Scene, watchers: Sequence[Callable[[], None]] = ()) -> None:
        self.run_dir, self.recipe, self.scene, self._watchers = run.resolve(), recipe, scene, watchers
        self.server: Server | None = None
        self._background: Background | None = None
        self._lock: int | None = None

    def run(self) -> None:
        """All phases. Raises DemoFailed."""
        self.build()
        self.serve()
        self.train("fine-tune", "sft")
        self.train("improve", "grpo")
        self.settle()

    def build(self) -> None:
        """Write the small model, as a Hugging Face checkpoint directory."""
        self.scene.enter("build")
        self._clear()
        command = [sys.executable, "-m", "trainer.tiny_model", str(self.run_dir / "model")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoFailed("build", f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")

    def serve(self) -> None:
        """Start gateway and instance, wait until they answer, then let the clients begin."""
        self.scene.enter("serve")
        try:
            with held():
                self.server = server = Server(self._up_config())
                server.start()
            server.wait_ready(timeout_s=240.0)
        except CliError as error:
            raise DemoFailed("serve", str(error)) from error
        clients = Clients(server.url, self.scene.client, self.recipe.questions(self.run_dir, QUESTIONS))
        self._background = Background(clients.run(), follow_swaps(server.store, MODEL, self.scene.swaps))

    def train(self, phase: str, name: str) -> None:
        """Run one training against the live server, until the trainer ends by itself."""
        assert self.server is not None
        self.scene.enter(phase)
        config = getattr(self.recipe, name)(self.run_dir, self.server.url)
        config["telemetry"] = {
            "admin_url": self.server.admin_url,
            "admin_key_file": str(self.server.admin_key_file),
        }
        path = self.run_dir / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        metrics = MetricsTail(Path(config["metrics"]))
        with held():
            trainer = self.server.train(path)
        while trainer.alive:
            self._watch(phase, metrics)
        self._watch(phase, metrics)
        if trainer.process.returncode:
            raise DemoFailed(phase, self._post_mortem(trainer))

    def settle(self) -> None:
        """Let the clients see the last version, then stop them; the server stays up."""
        assert self._background is not None
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            self._watch("improve", None)
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
        for name in ("model", "fine-tuned", "final"):
            shutil.rmtree(self.run_dir / name, ignore_errors=True)
        for name in ("sft.jsonl", "grpo.jsonl"):
            (self.run_dir / name).unlink(missing_ok=True)

    def _up_config(self) -> UpConfig:
        return UpConfig(
            model=str(self.run_dir / "model"),
            name=MODEL,
            port=0,
            throwaway=True,
            state_dir=self.run_dir / "state",
            kv_cache_gib=KV_CACHE_GIB,
            vllm_args=ENGINE_ARGS,
        )

    @staticmethod
    def _post_mortem(child: Child) -> str:
        return f"{child.name} ended with {child.process.returncode}; the end of {child.log}:\n{child.tail()}"
