"""A whole fleet for tests that kill real things: vLLM instances, two gateways, a real etcd, and clients that stream."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil

from tests.etcd import Etcd
from tests.live import VLLM_ARGS, LiveServer
from tests.waiting import comes_true
from weightsync import SyncStore
from weightsync.control.records import Keys, SwapRecord

TOKENS = 120
# Faults that a client may see whose answer was under way on the instance that died; after all of them it can ask again.
CUT = {"upstream_died", "instance_unreachable", "engine_error", "engine_died", "RemoteProtocolError", "ReadError"}


@dataclass
class Seen:
    """Answers that the clients got: (version, token) pairs, whole answers, and every fault by its code."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    answers: int = 0
    faults: list[str] = field(default_factory=list)

    def saw(self, version: int) -> bool:
        return any(v == version for v, _ in self.tokens)


class Clients:
    """Threads that stream from the public ports until told to stop. Faults are noted and the question asked again."""

    def __init__(self, urls: list[str], count: int = 4, tokens: int = TOKENS) -> None:
        self.seen, self._tokens = Seen(), tokens
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(urls[i % len(urls)],), daemon=True) for i in range(count)
        ]

    @contextlib.contextmanager
    def streaming(self) -> Iterator[Seen]:
        for thread in self._threads:
            thread.start()
        try:
            # The caller breaks things under load only: every client has had an answer's beginning or a fault.
            comes_true(lambda: len(self.seen.tokens) + len(self.seen.faults) >= len(self._threads), 120)
            yield self.seen
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(240)

    def _run(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=240) as http:
            while not self._stop.is_set():
                try:
                    self._ask(http)
                except httpx.HTTPError as error:
                    self.seen.faults.append(type(error).__name__)
                    self._stop.wait(0.1)

    def _ask(self, http: httpx.Client) -> None:
        body = {"prompt_token_ids": [5, 6, 7], "max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        got: list[int] = []
        with http.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != 200:
                self.seen.faults.append(str(orjson.loads(answer.read())["error"]["code"]))
                self._stop.wait(0.1)
                return
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self._take(orjson.loads(line.removeprefix("data: ")), got)
        self.seen.answers += len(got) == self._tokens

    def _take(self, event: dict[str, Any], got: list[int]) -> None:
        """A token that comes alone is seen at once. Several may be of two versions: the spans at the end tell."""
        if event.get("error"):
            self.seen.faults.append(str(event["error"]["code"]))
        tokens = event.get("token_ids", ())
        got += tokens
        if len(tokens) == 1:
            self.seen.tokens.append((event["weight_version"], tokens[0]))
        if "usage" in event:
            for span in event["choices"][0]["weight_versions"]:
                self.seen.tokens += [(span["version"], token) for token in got[span["start"] : span["end"]]]


class Fleet:
    """The server under test, a second gateway, and which checkpoint each version is."""

    def __init__(self, live: LiveServer, checkpoints: dict[str, Path], etcd: Etcd, second_url: str) -> None:
        self.live, self.checkpoints, self.etcd, self.second_url = live, checkpoints, etcd, second_url
        self.version_of: dict[int, int] = {}
        self._turn = 0

    def publish(self, says: int | None = None, *, activate: bool = True) -> int:
        """A new version, of the checkpoint `say-SAYS`; by default it says something else than the one before it."""
        self._turn = (self._turn + 1) % 4 if says is None else says
        version = self.live.push(self.checkpoints[f"say-{self._turn}"], activate=activate)
        self.version_of[version] = self._turn
        return version

    def states(self) -> dict[str, str]:
        return {"-".join(r["id"].rsplit("-", 2)[-2:]): r["state"] for r in self.live.instances()}

    def all_serve(self, version: int) -> bool:
        with contextlib.suppress(httpx.TransportError):  # the gateway is being started again
            return self.live.all_serve(version)
        return False

    def engine_core(self, index: int) -> psutil.Process:
        (core,) = [p for p in self.live.tree(index)[1:] if "EngineCore" in p.name() or "EngineCore" in str(p.cmdline())]
        return core

    def revive(self) -> None:
        """A restart of all processes that have ended, as `hotswap up` does all the time."""
        self.live.processes.restart_ended()

    def mended(self) -> bool:
        """Whether every instance lives and serves, those that were killed included."""
        self.revive()
        children = [child for name, child in self.live.processes.children.items() if name.startswith("instance-")]
        try:
            served = {record["pid"] for record in self.live.instances() if record["eligible"]}
        except (httpx.TransportError, KeyError):  # the gateway is being started again, or waits for the store
            return False
        return all(child.alive for child in children) and served == {child.process.pid for child in children}

    def whole_again(self, version: int) -> bool:
        def look() -> bool:
            self.revive()
            return self.all_serve(version)

        return comes_true(look, 280)

    def swap(self) -> SwapRecord:
        with contextlib.closing(SyncStore(self.live.processes.store)) as store:
            found = store.get(Keys(self.live.name).swap)
        assert found is not None
        return SwapRecord.from_json(found.value)

    def assert_clean(self, seen: Seen, *, faults: Collection[str] = ()) -> None:
        """No token came from other weights than its label says, and no fault but those that are allowed."""
        assert [(v, t) for v, t in seen.tokens if t - 100 != self.version_of.get(v)] == []
        assert set(seen.faults) <= set(faults)
        assert seen.answers > 0


@contextlib.contextmanager
def running(
    checkpoints: dict[str, Path],
    root: Path,
    instances: int = 2,
    vllm_args: tuple[str, ...] = VLLM_ARGS,
    gateway_args: tuple[str, ...] = (),
) -> Iterator[Fleet]:
    """A fleet that serves version 1, which is `say-0`."""
    etcd = Etcd()
    store = etcd.url("contract")
    options: dict[str, Any] = {"instances": instances, "store": store, "gateway_args": gateway_args}
    live = LiveServer(checkpoints["say-0"], root, vllm_args, **options)
    with live.running(), live.another_gateway(*gateway_args) as url:
        found = Fleet(live, checkpoints, etcd, url)
        found.version_of[live.active()] = 0
        yield found
        live.recorder.rest(200)
    etcd.close()
