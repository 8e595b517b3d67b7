"""Two real instances behind one gateway: swapped together and one by one, one killed, and what both share."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.live import LiveServer
from tests.waiting import wait_until

pytestmark = pytest.mark.engine
BODY = {"prompt_token_ids": [3, 4, 5, 6], "max_tokens": 150, "temperature": 0, "ignore_eos": True}


@dataclass
class Fleet:
    """The server, and which token each version answers, whatever it is asked."""

    live: LiveServer
    checkpoints: dict[str, Path]
    token_of: dict[int, int] = field(default_factory=dict)

    def publish(self, name: str) -> int:
        """A new version, not yet active."""
        path = str(self.checkpoints[name])
        answer = self.live.admin.post("/admin/weights", json={"path": path, "activate": False})
        assert answer.status_code == 200, answer.text
        version = int(answer.json()["version"])
        self.token_of[version] = 100 + int(name.removeprefix("say-"))
        return version

    def activate(self, version: int, **how: Any) -> httpx.Response:
        return self.live.admin.post("/admin/weights/activate", json={"version": version, **how})

    def seen(self) -> list[tuple[bool, str, int]]:
        """Eligible, state, version of both."""
        return [(i["eligible"], i["state"], i["active_version"]) for i in self.live.instances()]

    def both_serve(self, version: int) -> bool:
        return self.seen() == [(True, "SERVING", version)] * 2

    def untrusted_but_asked(self) -> list[dict[str, Any]]:
        """Instances that get requests although their weights are not the committed ones."""
        active = self.live.admin.get("/admin/weights/active").json()
        return [
            i for i in self.live.instances()
            if i["eligible"] and (i["active_version"], i["fingerprint"]) != (active["version"], active["fingerprint"])
        ]  # fmt: skip


@dataclass
class Streams:
    """Clients that ask `/generate` until told to stop; each token of a whole answer with the version it is said to be
    from."""

    url: str
    tokens: list[tuple[int, int]] = field(default_factory=list)
    answers: int = 0
    broken: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self, count: int = 4) -> Iterator[Streams]:
        stop = threading.Event()
        with ThreadPoolExecutor(count) as pool:
            clients = [pool.submit(self._client, stop) for _ in range(count)]
            try:
                wait_until(lambda: self.answers >= count, 60)
                yield self
            finally:
                stop.set()
        for client in clients:
            client.result()

    def wrong(self, token_of: dict[int, int]) -> list[tuple[int, int]]:
        return [(version, token) for version, token in self.tokens if token_of[version] != token]

    def _client(self, stop: threading.Event) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while not stop.is_set():
                try:
                    self._answer(http)
                except httpx.TransportError as error:
                    self.broken.append(type(error).__name__)

    def _answer(self, http: httpx.Client) -> None:
        with http.stream("POST", "/generate", json=BODY) as answer:
            if answer.status_code != 200:
                self.broken.append(orjson.loads(answer.read())["error"]["code"])
                return
            got: list[int] = []
            for line in answer.iter_lines():
                event = orjson.loads(line[6:]) if line.startswith("data: ") else {}
                got += event.get("token_ids", ())
                if "usage" in event:
                    spans = event["choices"][0]["weight_versions"]
                    self.tokens += [(s["version"], token) for s in spans for token in got[s["start"] : s["end"]]]
                    self.answers += 1
                if "error" in event:
                    self.broken.append(event["error"]["code"])


@pytest.fixture(scope="module")
def fleet(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("fleet")
    own = {name: Path(shutil.copytree(checkpoints[name], root / name)) for name in ("say-0", "say-1", "say-2")}
    live = LiveServer(own["say-0"], root / "state", instances=2)
    with live.running():
        yield Fleet(live, own, {1: 100})


def test_both_flip_together_under_streams(fleet: Fleet) -> None:
    with Streams(fleet.live.url).running() as streams:
        for name in ("say-1", "say-2"):
            version = fleet.publish(name)
            answer = fleet.activate(version)
            assert answer.status_code == 200, answer.text
            assert fleet.both_serve(version)
            assert {i["active_epoch"] for i in fleet.live.instances()} == {answer.json()["epoch"]}
            wait_until(lambda: version in {v for v, _ in streams.tokens})  # noqa: B023
    assert streams.wrong(fleet.token_of) == []
    assert streams.broken == []
    assert len({i["fingerprint"] for i in fleet.live.instances()}) == 1


def test_one_after_the_other_under_streams(fleet: Fleet) -> None:
    with Streams(fleet.live.url).running() as streams:
        version = fleet.publish("say-0")
        answer = fleet.activate(version, mode="rolling")
        assert answer.status_code == 200, answer.text
        wait_until(lambda: fleet.both_serve(version))
        wait_until(lambda: version in {v for v, _ in streams.tokens})
    assert streams.wrong(fleet.token_of) == []
    assert streams.broken == []


def test_a_request_waits_for_a_version_and_gets_it(fleet: Fleet) -> None:
    version = fleet.publish("say-2")
    wish = {"min_version": version, "wait_s": 120}
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(fleet.live.generate, [3, 4, 5], 4, hotswap=wish)
        wait_until(lambda: 'hotswap_gateway_held{model="toy"} 1.0' in fleet.live.client.get("/metrics").text)
        assert fleet.activate(version).status_code == 200
        (choice,) = request.result(120)["choices"]
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 4}]
    refused = fleet.live.client.post("/generate", json=BODY, headers={"x-hotswap-version": str(version - 1)})
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "version_unavailable"
    assert refused.json()["error"]["active_version"] == version


def weights_in_use(live: LiveServer, index: int) -> dict[str, tuple[int, int]]:
    """Resident and proportional bytes of each layout slot, weights as kernels read them, that an instance maps."""
    found: dict[str, tuple[int, int]] = {}
    for process in live.tree(index):
        for part in process.memory_maps(grouped=False):
            if part.path.startswith(f"{live.processes.arena}/layout-"):
                rss, pss = found.get(part.path, (0, 0))
                found[part.path] = (rss + part.rss, pss + part.pss)
    return found


def test_both_share_one_copy_of_the_weights(fleet: Fleet) -> None:
    version = fleet.publish("say-1")
    assert fleet.activate(version).status_code == 200
    assert_shared(fleet.live)


def assert_shared(live: LiveServer) -> None:
    first, second = (weights_in_use(live, i) for i in range(2))
    shared = first.keys() & second.keys()  # besides, each may have room reserved that the other has not mapped yet
    assert shared
    for path in shared:
        resident = max(first[path][0], second[path][0])
        assert resident >= 0.9 * Path(path).stat().st_size
        assert first[path][1] + second[path][1] <= 1.02 * resident
    live_slots = [held_layouts(live, i) for i in range(2)]
    assert live_slots[0] & live_slots[1], "the two run on slots of their own"


def held_layouts(live: LiveServer, index: int) -> set[str]:
    """Layout slots that an instance holds a lock on: those its live, previous and staged weights lie in."""
    inodes = {f.stat().st_ino: f.name for f in live.processes.arena.glob("layout-*[0-9]")}
    pids = {process.pid for process in live.tree(index)}
    held = set()
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "FLOCK" in fields and int(fields[4]) in pids:
            held.add(inodes.get(int(fields[5].rsplit(":", 1)[1]), ""))
    return held - {""}


@pytest.mark.broad  # the failure contract has it in the first tier
def test_a_killed_instance_comes_back_from_shared_memory(fleet: Fleet) -> None:
    """Killed while it stages, with no weights left on disk: it ends up with the fleet's, and never answers before."""
    before, refused = fleet.live.active(), fleet.publish("say-2")
    for checkpoint in fleet.checkpoints.values():
        for file in checkpoint.glob("*.safetensors"):
            file.unlink()
    victim = fleet.live.processes.children["instance-1"].process
    with Streams(fleet.live.url).running(2) as streams, ThreadPoolExecutor(1) as pool:
        os.killpg(victim.pid, signal.SIGSTOP)  # so that the swap waits for it
        swap = pool.submit(fleet.activate, refused)
        wait_until(lambda: fleet.live.instances()[0]["staged_version"] == refused, 30)
        os.killpg(victim.pid, signal.SIGKILL)
        answer = swap.result(60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "swap_aborted")
        assert "instance-1" in answer.json()["error"]["message"]

        served = streams.answers
        wait_until(lambda: streams.answers > served + 4, 60)  # the other one goes on
        assert fleet.seen() == [(True, "SERVING", before)]

        def back() -> bool:
            fleet.live.processes.restart_ended()
            assert fleet.untrusted_but_asked() == []
            return fleet.both_serve(before)

        wait_until(back, 300)
        assert fleet.live.processes.children["instance-1"].process.pid != victim.pid
        answer = fleet.activate(refused)
        assert answer.status_code == 200, answer.text
        assert fleet.both_serve(refused)
        wait_until(lambda: refused in {v for v, _ in streams.tokens})
    assert streams.wrong(fleet.token_of) == []
    assert streams.broken == []  # the other one goes on with its streams
    assert_shared(fleet.live)
