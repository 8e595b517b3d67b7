"""Editions of adapters, published while others are streamed: what that does to the gaps of streams that have no part in
it, and how soon a new edition answers.

One server on which a thousand adapters are registered. Streams go through the base and through one edition. Three kinds
of windows alternate: nothing is published; editions are published, one every 0.3 s, to a store of no server's, which
costs the same work on the same cores; editions are published to the server, and each is asked for a token at once.
All ratios are within the run, window by window. The engine has all cores but one, which is for all else: the publisher,
the gateway and the clients, which elsewhere are on other hosts.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from loadtest.measure import run as shared
from loadtest.measure.gaps import Gaps, Window, summary
from loadtest.measure.processes import pin
from loadtest.models.checkpoints import TINY_SHAPE, make_adapter, make_checkpoint
from loadtest.swaps.fleet import FLEET_SHAPE
from loadtest.workload.children import last_line, streaming
from server.up.processes import BIND_ENV
from server.up.server import Server
from weightsync import Adapter, Publisher, SyncStore
from weightsync.control.editions import prefix_of
from weightsync.control.records import Keys

REGISTERED, PER_MINUTE = 1000, 200
WINDOW_S, SETTLE_S = 6.0, 1.0
ARENA_ENV = "HOTSWAP_ARENA"
NAME, STEADY = "base", "steady"
ROOM_S = 10.0  # for the gateway and the instance to know of an edition


@dataclass
class Seen:
    """Windows on the monotonic clock; times in ms."""

    quiet: list[Window] = field(default_factory=list)
    elsewhere: list[Window] = field(default_factory=list)
    publishing: list[Window] = field(default_factory=list)
    publish_ms: list[float] = field(default_factory=list)
    to_token_ms: list[float] = field(default_factory=list)
    failed: int = 0


def run(json: Path | None, *, streams: int = 8, windows: int = 6, small: bool = False) -> dict[str, Any]:
    """Measure, print the table, write the figures to `json`; returns them."""
    work = Path("runs") / ("adapters-small" if small else "adapters")
    shape, registered = (TINY_SHAPE, 50) if small else (FLEET_SHAPE, REGISTERED)
    windows = 2 if small else windows
    if not (model := work / "model").exists():
        make_checkpoint(model, seed=0, **shape)
    if not (place := work / "adapter").exists():
        make_adapter(place, seed=1, rank=8, **shape)
    args = ["--max-model-len", "2048", "--max-num-seqs", "32", "--kv-cache-memory-bytes", str(256 << 20)]
    args += ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "8", "--max-cpu-loras", "16"]
    *engine, other = sorted(os.sched_getaffinity(0))
    os.environ[BIND_ENV] = ",".join(map(str, engine or [other]))
    try:
        with shared.up(model, NAME, work / "state", tuple(args)) as server:
            server.wait_ready()
            pin(os.getpid(), [other], but="VLLM::EngineCore")
            figures = _measure(server, _adapter(place), streams, windows, registered)
    finally:
        del os.environ[BIND_ENV]
        pin(os.getpid(), [*engine, other])
    found = shared.with_machine({"streams": streams, "registered": registered, **figures}, json)
    _print(found)
    return found


def _adapter(place: Path) -> Callable[[int], Adapter]:
    """The adapter, each time with other values."""
    config = orjson.loads((place / "adapter_config.json").read_bytes())
    tensors = load_file(place / "adapter_model.safetensors")

    def scaled(number: int) -> Adapter:
        factor = np.float32(1.0 + (number % 97) / 970)
        return Adapter({name: tensor * factor for name, tensor in tensors.items()}, config)

    return scaled


def _measure(
    server: Server, adapter: Callable[[int], Adapter], streams: int, windows: int, registered: int
) -> dict[str, Any]:
    seen = Seen()
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(server.store, model=NAME, lineage="adapters"))
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
        began = time.monotonic()
        for number in range(registered):
            publisher.publish_edition(f"adapter-{number}", adapter(number))
        registering_s = time.monotonic() - began
        publisher.publish_edition(STEADY, adapter(0))
        _asked(client, STEADY)
        other = stack.enter_context(_elsewhere(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))))
        other.publish_edition(STEADY, adapter(0))
        seconds = windows * 3 * (WINDOW_S + SETTLE_S) + 10.0
        base = stack.enter_context(streaming(server.url, NAME, streams // 2, seconds))
        steady = stack.enter_context(streaming(server.url, STEADY, streams - streams // 2, seconds))
        for window in range(windows):
            start = time.monotonic()
            time.sleep(WINDOW_S)
            seen.quiet.append((start, time.monotonic()))
            seen.elsewhere.append(_every(lambda made, name: other.publish_edition(name, made, keep=2), adapter, window))
            time.sleep(SETTLE_S)
            seen.publishing.append(_every(partial(_publish, publisher, client, seen), adapter, window))
            time.sleep(SETTLE_S)
        reports = {name: last_line(each, seconds + 120) for name, each in (("base", base), ("edition", steady))}
    arrivals = [stream for report in reports.values() for stream in report["arrivals"]]
    gaps, lost = Gaps.of(arrivals), sum(r[key] for r in reports.values() for key in ("failed", "truncated"))
    kinds = {"quiet": seen.quiet, "elsewhere": seen.elsewhere, "publishing": seen.publishing}
    p99s = {kind: [summary(gaps.within([each]))["p99"] for each in found] for kind, found in kinds.items()}
    return {
        "registering_ms_each": registering_s * 1e3 / registered,
        "record_bytes": _record_bytes(server),
        "gap_ms": {kind: summary(gaps.within(found)) for kind, found in kinds.items()},
        "p99_over_quiet": _ratio(p99s["publishing"], p99s["quiet"]),
        "p99_over_elsewhere": _ratio(p99s["publishing"], p99s["elsewhere"]),
        "publish_ms": _spread(seen.publish_ms),
        "publish_to_token_ms": _spread(seen.to_token_ms),
        "published_per_minute": 60 * len(seen.publish_ms) / sum(end - begin for begin, end in seen.publishing),
        "tokens_kept": gaps.tokens_per_s(seen.publishing) / gaps.tokens_per_s(seen.quiet),
        "lost": lost + seen.failed,
    }


@contextmanager
def _elsewhere(directory: str) -> Iterator[Publisher]:
    """A publisher to a store and an arena of its own."""
    store = f"sqlite://{directory}/store.db"
    SyncStore(store).close()
    before = os.environ.get(ARENA_ENV)
    os.environ[ARENA_ENV] = f"{directory}/slots"
    Path(os.environ[ARENA_ENV]).mkdir(mode=0o700)
    try:
        with Publisher(store, model=NAME) as publisher:
            yield publisher
    finally:
        os.environ.pop(ARENA_ENV)
        if before is not None:
            os.environ[ARENA_ENV] = before


def _every(publish: Callable[[Adapter, str], Any], adapter: Callable[[int], Adapter], window: int) -> Window:
    start, every_s = time.monotonic(), 60.0 / PER_MINUTE
    for number in range(int(WINDOW_S / every_s)):
        publish(adapter(number + 1000 * window), f"tuned-{number % 10}")
        time.sleep(max(0.0, start + (number + 1) * every_s - time.monotonic()))
    return start, time.monotonic()


def _publish(publisher: Publisher, client: httpx.Client, seen: Seen, made: Adapter, name: str) -> None:
    asked = time.monotonic()
    edition = publisher.publish_edition(name, made, keep=2)
    seen.publish_ms.append((time.monotonic() - asked) * 1e3)
    seen.failed += not _asked(client, f"{name}@{edition}")
    seen.to_token_ms.append((time.monotonic() - asked) * 1e3)


def _ratio(of: list[float], over: list[float]) -> dict[str, Any]:
    found = [one / other for one, other in zip(of, over, strict=True)]
    first, median, third = np.percentile(found, [25, 50, 75])
    return {"median": median, "quartiles": [first, third], "windows": found}


def _asked(client: httpx.Client, name: str) -> bool:
    """Whether the adapter answers, once it is known."""
    until = time.monotonic() + ROOM_S
    while time.monotonic() < until:
        answer = client.post("/generate", json={"model": name, "prompt_token_ids": [3, 4, 5], "max_tokens": 1})
        if answer.status_code == 200:
            return True
        time.sleep(0.005)
    return False


def _record_bytes(server: Server) -> float:
    """Of one edition, in the store."""
    store = SyncStore(server.store)
    found = store.list(prefix_of(Keys(NAME)))[0]
    store.close()
    return statistics.mean(len(kv.value) for kv in found)


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p99": float(np.percentile(values, 99)), "max": max(values)}


def _print(found: dict[str, Any]) -> None:
    table = Table("", "p50", "p99", "max", title=f"{found['registered']} adapters, {found['streams']} streams; ms")
    for name in ("quiet", "elsewhere", "publishing"):
        table.add_row(f"gap, {name}", *(f"{found['gap_ms'][name][key]:.1f}" for key in ("p50", "p99", "max")))
    for name in ("publish_ms", "publish_to_token_ms"):
        spread = found[name]
        table.add_row(
            name.removesuffix("_ms").replace("_", " "), *(f"{spread[k]:.1f}" for k in ("median", "p99", "max"))
        )
    console = Console(width=120)
    console.print(table)
    for name, said in (("p99_over_quiet", "no publications"), ("p99_over_elsewhere", "publications elsewhere")):
        ratio = found[name]
        quartiles = " to ".join(f"{value:.2f}" for value in ratio["quartiles"])
        console.print(f"p99 gap with publications over {said}: {ratio['median']:.2f} (quartiles {quartiles})")
    console.print(
        f"{found['published_per_minute']:.0f}/min; {found['record_bytes']:.0f} bytes a record; lost: {found['lost']}"
    )
