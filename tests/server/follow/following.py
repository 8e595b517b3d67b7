"""A follower whose steps a test takes, and a gateway that publishes and releases."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from server.cli.admin import AdminClient
from server.cli.follow import open_source
from server.follow.config import FollowConfig
from server.follow.loop import Follower
from server.follow.sources import Source
from server.follow.state import FollowState, StateFile
from tests.server.gateway.harness import ADMIN_KEY, RunningGateway
from tests.waiting import wait_until
from weightsync.control import chain

AT_ONCE = "steps: [{traffic: 50, for: 0s}]\n"


class Killed(BaseException):
    """Ends a follower between two of its instructions."""


class Follow:
    """A follower of a directory, whose steps a test takes; `again` is one that begins after its death."""

    def __init__(self, running: RunningGateway, root: Path, **plan: Any) -> None:
        self.running, self.root, self.runs = running, root, root / "runs"
        self.runs.mkdir()
        (root / "admin.key").write_text(ADMIN_KEY)
        self.place = [f"http://127.0.0.1:{running.admin_port}", root / "admin.key"]
        self.plan = FollowConfig("", **{"interval_s": 0.01, "settle_s": 0.0, **plan})
        self.dies_after = ""
        self.open()

    def open(self, source: Source | None = None) -> None:
        """Begins to follow `source`, or `runs`."""
        self.admin = AdminClient(None, str(self.place[0]), Path(self.place[1]))
        source = source or open_source(FollowConfig(source=f"dir://{self.runs}"))
        self.file = StateFile(self.root / "cache", source.told)
        self.follower = Follower(source, self, self.file, self.root / "cache", self.plan)

    def again(self, source: Source | None = None) -> None:
        self.file.close()
        self.open(source)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, reason: str | None = None) -> Any:
        answer = self.admin.call(method, path, body, reason)
        self._dies(f"{method} {path}")
        return answer

    def upload(self, path: str, query: Mapping[str, str], pieces: Iterable[bytes], reason: str) -> Any:
        answer = self.admin.upload(path, query, pieces, reason)
        self._dies(path)
        return answer

    def _dies(self, after: str) -> None:
        if after == self.dies_after:
            self.dies_after = ""
            raise Killed

    def steps(self, count: int = 3) -> None:
        for _ in range(count):
            self.follower.step()

    def dies_and_begins_again(self, after: str, source: Source | None = None) -> None:
        """Killed when it has asked for that, before it could note the answer."""
        self.dies_after = after
        with pytest.raises(Killed):
            self.until(lambda _: False)
        self.again(source)

    @contextlib.contextmanager
    def process(
        self, source: str, stderr: int | None = None, policy: str = "default"
    ) -> Iterator[subprocess.Popen[str]]:
        """A process that follows `source`, with a cache of its own; it is killed at the end."""
        command = [sys.executable, "-m", "server.cli", "follow", source, "--interval", "0.05", "--settle", "0"]
        command += ["--url", str(self.place[0]), "--admin-key-file", str(self.place[1])]
        command += ["--policy", policy, "--cache-dir", str(self.root / "process")]
        with subprocess.Popen(command, stderr=stderr, text=True, env=os.environ | {"COLUMNS": "200"}) as process:
            try:
                yield process
            finally:
                process.kill()

    def until(self, condition: Callable[[FollowState], object]) -> FollowState:
        """Takes steps until the state is so."""

        def there() -> bool:
            self.follower.step()
            return bool(condition(self.file.state))

        wait_until(there, 120.0, lambda: str(self.file.state))  # some wait for other projects' servers, too
        return self.file.state

    def until_tried(self, name: str, outcome: str) -> str:
        """The reason."""
        wanted = (name, outcome)
        return self.until(lambda s: s.tried and (s.tried[-1].name, s.tried[-1].outcome) == wanted).tried[-1].reason

    def store_policy(self, text: str, name: str = "default") -> None:
        self.admin.call("PUT", f"/admin/releases/policies/{name}", {"text": text})

    @property
    def active(self) -> int | None:
        version: int | None = self.admin.call("GET", "/admin/weights/active")["version"]
        return version

    def sources(self) -> list[str]:
        """Names of the checkpoints that versions were made of, oldest first."""
        versions = self.admin.call("GET", "/admin/weights")["versions"]
        return [Path(version["source"]).name for version in versions]

    def deeds(self, action: str) -> list[chain.LedgerEntry]:
        store = self.running.store
        return [e for e in store.run(chain.recent(store.store, 100))[::-1] if e.action == action]
