"""How long a store takes: a write, a read, a compare-and-swap, and until a watcher has the event, in one run.

    python -m loadtest.scale.store_latency [--json FILE] [URL ...]

Without URLs: SQLite in a temporary directory, and an etcd of one member started for the run (from PATH), each with its
data on the file system of the temporary directory and synced as in service. One client, one call after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from loadtest.measure.machine import machine
from server.ports import free_port
from weightsync.errors import StoreUnavailable
from weightsync.store import Store, open_store

CALLS = 1000
WARM_UP = 50
VALUE = b"x" * 512  # the size of an instance record
START_TIMEOUT_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="*", metavar="URL")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    options = parser.parse_args()
    run(options.json, options.urls)


def run(json: Path | None, urls: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table, and write the figures to `json`; returns them."""
    stores = asyncio.run(measure_all(urls or []))
    report = {"machine": machine(), "calls": CALLS, "value_bytes": len(VALUE), "stores": stores}
    show(stores)
    if json is not None:
        json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
    return report


async def measure_all(urls: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by kind of store and by operation."""
    async with contextlib.AsyncExitStack() as stack:
        if not urls:
            directory = Path(tempfile.mkdtemp(prefix="hotswap-store-"))
            stack.callback(shutil.rmtree, directory)
            urls = [f"sqlite://{directory}/store.db"]
            if binary := shutil.which("etcd"):
                urls.append(await stack.enter_async_context(own_etcd(binary, directory / "etcd")))
        return {url.partition(":")[0]: await measure(url) for url in urls}


@contextlib.asynccontextmanager
async def own_etcd(binary: str, data: Path, *flags: str) -> AsyncIterator[str]:
    """The URL of an etcd that runs while the context is open."""
    client, peer = free_port(), free_port()
    process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
        [
            binary,
            f"--data-dir={data}",
            *(f"--{name}-client-urls=http://127.0.0.1:{client}" for name in ("listen", "advertise")),
            *(f"--{name}-peer-urls=http://127.0.0.1:{peer}" for name in ("listen", "initial-advertise")),
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--log-level=error",
            *flags,
        ],
        stderr=subprocess.DEVNULL,
    )
    url = f"etcd://127.0.0.1:{client}/latency"
    try:
        await _until_open(url)
        yield url
    finally:
        process.kill()
        process.wait()


async def _until_open(url: str) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            with contextlib.suppress(StoreUnavailable):
                return await open_store(url).close()
            await asyncio.sleep(0.05)


async def measure(url: str) -> dict[str, dict[str, float]]:
    """Milliseconds, p50 and p99, of each operation."""
    store, watcher = open_store(url), open_store(url)
    revision = await store.put("latency/a", VALUE)

    async def compare_and_swap() -> None:
        nonlocal revision
        revision = await store.compare_and_swap("latency/a", revision, VALUE)

    figures = {
        "get": await timed(lambda: store.get("latency/a")),
        "compare_and_swap": await timed(compare_and_swap),
        "put": await timed(lambda: store.put("latency/b", VALUE)),
        "event": await events(store, watcher),
    }
    await store.txn({}, {"latency/a": None, "latency/b": None, "latency/event": None})
    await watcher.close()
    await store.close()
    return figures


async def timed(call: Callable[[], Awaitable[object]]) -> dict[str, float]:
    times = []
    for _ in range(WARM_UP + CALLS):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return quantiles(times[WARM_UP:])


async def events(store: Store, watcher: Store) -> dict[str, float]:
    """From before a write until another client of the store has its event."""
    start_revision = await store.put("latency/event", VALUE)
    times = []
    async with contextlib.aclosing(watcher.watch("latency/event", start_revision)) as watch:
        await anext(watch)
        for _ in range(WARM_UP + CALLS):
            start = time.perf_counter()
            await asyncio.gather(store.put("latency/event", VALUE), anext(watch))
            times.append(time.perf_counter() - start)
    return quantiles(times[WARM_UP:])


def quantiles(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {"p50_ms": round(cuts[49] * 1e3, 3), "p99_ms": round(cuts[98] * 1e3, 3)}


def show(stores: dict[str, dict[str, Any]]) -> None:
    table = Table("ms, p50 / p99", *stores)
    for operation in next(iter(stores.values())):
        cells = (f"{s[operation]['p50_ms']:.2f} / {s[operation]['p99_ms']:.2f}" for s in stores.values())
        table.add_row(operation, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
