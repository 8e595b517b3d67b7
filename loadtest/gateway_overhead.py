"""What the gateway adds, measured against the same upstream asked directly, in one run.

    python -m loadtest.gateway_overhead [--json FILE]

Three processes: this client, the gateway, a canned upstream. Time to first token: one client, direct and through the
gateway in turns, so that both meet the same machine. CPU: what the gateway process used (all its threads, from
/proc/PID/task/*/schedstat) over what it did. Figures depend on the machine; compare only within a run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from weightsync.records import InstanceRecord, Keys
from weightsync.store.sync import SyncStore

MODEL = "canned"
START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Quantiles:
    """Milliseconds."""

    p50: float
    p99: float


@dataclass(frozen=True)
class Report:
    """What `run` measures. `added_*`: gateway minus direct, quantile by quantile."""

    pairs: int
    ttft_ms: dict[str, Quantiles]
    added_ttft_ms: Quantiles
    round_trip_ms: dict[str, Quantiles]
    added_round_trip_ms: Quantiles
    cpu_us_per_request: float
    cpu_us_per_chunk: float
    requests_per_s: float
    rss_mb: float


@dataclass(frozen=True)
class Load:
    """How much is asked."""

    pairs: int = 2000
    clients: int = 32
    requests: int = 12000
    streams: int = 64
    chunks: int = 150
    pace_ms: float = 20.0


@dataclass(frozen=True)
class Servers:
    """The processes under load."""

    direct: int
    gateway: int
    gateway_pid: int


@contextlib.contextmanager
def servers() -> Iterator[Servers]:
    """A canned upstream and a gateway in front of it."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        upstream = _start(stack, "loadtest.canned_upstream", stdout=subprocess.PIPE)
        assert upstream.stdout is not None
        direct = int(upstream.stdout.readline())
        store_url = f"sqlite://{directory}/store.db"
        with contextlib.closing(SyncStore(store_url)) as store:
            record = InstanceRecord("i0", f"http://127.0.0.1:{direct}", "SERVING", active_version=1, active_epoch=1)
            store.put(Keys(MODEL).instance("i0"), record.to_json())
        port = _free_port()
        options = ["--store", store_url, "--model", MODEL, "--port", str(port), "--log-level", "warning"]
        gateway = _start(stack, "server.gateway", *options)
        _wait_ready(port)
        yield Servers(direct, port, gateway.pid)


def measure(load: Load) -> Report:
    """Runs everything once."""
    with servers() as s:
        ports = {"direct": s.direct, "gateway": s.gateway}
        _alternate(ports, 100, stream=True)  # warm
        ttft = _alternate(ports, load.pairs, stream=True)
        whole = _alternate(ports, load.pairs, stream=False)
        begin, cpu = time.perf_counter(), _cpu_s(s.gateway_pid)
        uvloop.run(_closed_loop(s.gateway, load.clients, load.requests))
        per_request = (_cpu_s(s.gateway_pid) - cpu) / load.requests
        rate = load.requests / (time.perf_counter() - begin)
        cpu = _cpu_s(s.gateway_pid)
        uvloop.run(_streams(s.gateway, load))
        per_chunk = (_cpu_s(s.gateway_pid) - cpu) / (load.streams * load.chunks)
        return Report(
            pairs=load.pairs,
            ttft_ms=ttft,
            added_ttft_ms=_added(ttft),
            round_trip_ms=whole,
            added_round_trip_ms=_added(whole),
            cpu_us_per_request=per_request * 1e6,
            cpu_us_per_chunk=per_chunk * 1e6,
            requests_per_s=rate,
            rss_mb=_rss_mb(s.gateway_pid),
        )


def run(json: Path | None = None, *, load: Load | None = None) -> Report:
    """Measures, prints a table, and writes `json` if given."""
    report = measure(load or Load())
    _print(report)
    if json is not None:
        json.write_bytes(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2))
    return report


# one client, blocking: latency


def _alternate(ports: dict[str, int], pairs: int, *, stream: bool) -> dict[str, Quantiles]:
    """Time to the first token (stream) or the whole answer, each way in turns."""
    request = _request(stream=stream, max_tokens=8)
    first, last = (b"data: ", b"0\r\n\r\n") if stream else (b"}", b"}")
    times: dict[str, list[float]] = {name: [] for name in ports}
    with contextlib.ExitStack() as stack:
        links = {name: stack.enter_context(socket.create_connection(("127.0.0.1", p))) for name, p in ports.items()}
        for _ in range(pairs):
            for name, link in links.items():
                times[name].append(_ask(link, request, first, last))
    return {name: _quantiles(values) for name, values in times.items()}


def _ask(link: socket.socket, request: bytes, first: bytes, last: bytes) -> float:
    begin = time.perf_counter()
    link.sendall(request)
    data, elapsed = b"", 0.0
    while not (elapsed and data.endswith(last)):
        more = link.recv(65536)
        if not more:
            raise ConnectionError("the connection was closed in the middle of an answer")
        data += more
        if not elapsed and first in data:
            elapsed = time.perf_counter() - begin
    return elapsed


# many clients: CPU


async def _closed_loop(port: int, clients: int, requests: int) -> None:
    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(requests // clients):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            match = re.search(rb"content-length: (\d+)", head)
            assert match is not None, head
            await reader.readexactly(int(match[1]))
        writer.close()

    request = _request(stream=False, max_tokens=1)
    await asyncio.gather(*(client() for _ in range(clients)))


async def _streams(port: int, load: Load) -> None:
    async def stream() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_request(stream=True, max_tokens=load.chunks, pace_ms=load.pace_ms))
        await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        writer.close()

    tasks = []
    for _ in range(load.streams):  # spread over one interval, as real streams are
        tasks.append(asyncio.create_task(stream()))
        await asyncio.sleep(load.pace_ms / 1e3 / load.streams)
    await asyncio.gather(*tasks)


def _request(*, stream: bool, max_tokens: int, pace_ms: float = 0.0) -> bytes:
    messages = [{"role": "user", "content": "Say a word. " * 20}]
    body = orjson.dumps(
        {"model": MODEL, "messages": messages, "stream": stream, "max_tokens": max_tokens, "pace_ms": pace_ms}
    )
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return head + b"authorization: Bearer sk-bench-0123456789abcdef\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


# processes and figures


def _start(stack: contextlib.ExitStack, module: str, *args: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", module, *args], stdout=stdout)

    def stop() -> None:
        process.terminate()
        process.wait()

    stack.callback(stop)
    return process


def _wait_ready(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as link:
            link.sendall(b"GET /readyz HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
            if b" 200 " in link.recv(1024):
                return
        time.sleep(0.05)
    raise TimeoutError(f"the gateway was not ready within {START_TIMEOUT_S:g} s; run `hotswap gateway` to see why")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def _rss_mb(pid: int) -> float:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def _quantiles(seconds: list[float]) -> Quantiles:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return Quantiles(cuts[49] * 1e3, cuts[98] * 1e3)


def _added(ways: dict[str, Quantiles]) -> Quantiles:
    gateway, direct = ways["gateway"], ways["direct"]
    return Quantiles(gateway.p50 - direct.p50, gateway.p99 - direct.p99)


def _print(report: Report) -> None:
    table = Table("one client", "p50 ms", "p99 ms", title=f"gateway overhead ({report.pairs} alternating pairs)")
    for title, ways, added in (
        ("time to first token", report.ttft_ms, report.added_ttft_ms),
        ("whole answer", report.round_trip_ms, report.added_round_trip_ms),
    ):
        for name, q in (*ways.items(), ("added", added)):
            table.add_row(f"{title}, {name}", f"{q.p50:.3f}", f"{q.p99:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"CPU {report.cpu_us_per_request:.1f} us per request, {report.cpu_us_per_chunk:.1f} us per streamed chunk; "
        f"{report.requests_per_s:.0f} requests/s; RSS {report.rss_mb:.1f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What the gateway adds to latency and what it costs.")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--pairs", type=int, default=Load.pairs, help="alternating pairs of requests")
    args = parser.parse_args()
    run(args.json, load=Load(pairs=args.pairs))


if __name__ == "__main__":
    main()
