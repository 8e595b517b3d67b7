"""Hosts that read a version: one that joins late, and links that lose packets."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
import torch
from rich.console import Console
from rich.table import Table

from loadtest.measure.processes import cpu_seconds_of, pin
from loadtest.models.checkpoints import BENCH_SHAPE, TINY_SHAPE, make_checkpoint
from loadtest.transfer.feeding.site import (
    JOINING_KV,
    MODEL,
    SOURCE,
    Host,
    Serving,
    Site,
    serving,
    started,
    vllm_args,
    wait,
)
from loadtest.workload.children import streaming
from loadtest.workload.stock_vllm import StockVllm
from server.errors import CliError
from server.ports import free_port
from weightsync.vllm_engine.model.linear import onednn_takes

FETCHED = re.compile(r"is here after ([\d.]+) s")
LOADED = re.compile(r"Loading weights took ([\d.]+) seconds")
EVERY_S = 0.05
PROMPT = [5, 6, 7, 8]


def join(site: Site, number: int) -> dict[str, float]:
    """Seconds until the engine is up (it answers, on dummy weights), then `waited` for the copy, `staged` (until it
    serves) and `first_token`; their `total`. `fetch` is what the peer took for the copy, beside the engine's start.
    `cpu`: seconds of a core until then, of instance and peer."""
    with contextlib.ExitStack() as stack:
        host, port = stack.enter_context(site.host(f"joiner-{number}")), free_port("127.0.0.1")
        clock = time.monotonic()
        peer, instance = started(stack, host.peer()), started(stack, host.instance(port, JOINING_KV))
        at = _followed(host, f"http://127.0.0.1:{port}", instance)
        at = {name: moment - clock for name, moment in at.items()}
        cpu = sum(cpu_seconds_of(child.process.pid) for child in (peer, instance))
        told, record = peer.log.read_text(), site.instance(host.name)
    return split(at, told, record.stage_ms if record is not None else None) | {"cpu": cpu}


def split(at: Mapping[str, float], peer_log: str, stage_ms: float | None) -> dict[str, float]:
    """The times that `join` returns, from moments since the start: `copied`, `up`, `serving`, `token`."""
    fetch = FETCHED.search(peer_log)
    return {
        "engine_up": at["up"],
        "fetch": float(fetch[1]) if fetch is not None else 0.0,
        "copied_at": at["copied"],
        "waited": max(0.0, at["copied"] - at["up"]),
        "staged": at["serving"] - max(at["up"], at["copied"]),
        "staging_itself": (stage_ms or 0.0) / 1e3,
        "first_token": at["token"] - at["serving"],
        "total": at["token"],
    }


def _followed(host: Host, url: str, instance: Any) -> dict[str, float]:
    """When (monotonic seconds) its engine answered, the copy was there, it served, and had said a token."""
    at: dict[str, float] = {}
    with httpx.Client(base_url=url, timeout=60.0) as http:

        def look() -> bool:
            now = time.monotonic
            if "copied" not in at and (copy := host.site.copy(host.name)) is not None and copy.state == "ready":
                at["copied"] = now()
            if "up" not in at and _answers(http):
                at["up"] = now()
            record = host.site.instance(host.name) if "up" in at else None
            if "serving" not in at and record is not None and record.state == "SERVING":
                at["serving"] = now()
                http.headers["authorization"] = f"Bearer {record.key}"
            if "serving" in at and _says_a_token(http):
                at["token"] = now()
            return "token" in at

        wait(look, instance, every_s=EVERY_S)
    return at


def _answers(http: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return http.get("/health").status_code == 200
    return False


def _says_a_token(http: httpx.Client) -> bool:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    return http.post("/v1/completions", json=body).status_code == 200


def from_disk(site: Site, *, cached: bool) -> dict[str, float]:
    """Seconds of stock vLLM: `engine_up` with the weights loaded, `load` of that, `first_token` after that, `total`;
    `cpu`: seconds of a core."""
    log = site.directory / "stock.log"
    log.unlink(missing_ok=True)
    if not cached:
        forget(site.model / "model.safetensors")
    stock = StockVllm(site.model, MODEL, log, (*vllm_args(JOINING_KV), "--enforce-eager"))
    started_at = time.monotonic()
    with stock.running():
        up = time.monotonic()
        with httpx.Client(base_url=stock.url, timeout=60.0) as http:
            if not _says_a_token(http):
                raise SystemExit("stock vLLM answers no request")
        said, cpu = time.monotonic(), cpu_seconds_of(stock.pid)
    loaded = LOADED.search(log.read_text())
    load = float(loaded[1]) if loaded is not None else 0.0
    return {
        "engine_up": up - started_at,
        "load": load,
        "first_token": said - up,
        "total": said - started_at,
        "cpu": cpu,
    }


def forget(file: Path) -> None:
    """Have the kernel drop its cached pages, so that the next reader reads the disk."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def late_joiner(site: Site, rounds: int) -> dict[str, Any]:
    """Medians over rounds in which each way has its turn."""
    ways: dict[str, list[dict[str, float]]] = {"peer": [], "disk": [], "disk, not cached": []}
    for number in range(rounds):
        ways["peer"].append(join(site, number))
        ways["disk"].append(from_disk(site, cached=True))
        ways["disk, not cached"].append(from_disk(site, cached=False))
    return {name: _medians(found) for name, found in ways.items()} | {"rounds": rounds}


def _medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    medians = {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}
    return medians | {"totals": [round(r["total"], 2) for r in rounds]}


GENERATED = re.compile(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)
SETTLE_S = 0.5
STREAMS = 8


class Reading:
    """The process of the reader (reader.py)."""

    def __init__(self, host: Host) -> None:
        command = [sys.executable, "-m", "loadtest.transfer.feeding.reader", MODEL, SOURCE]
        variables = {**os.environ, **host.variables}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )  # fmt: skip
        self._line()

    def go(self) -> None:
        self._say("go")

    def stop(self) -> int:
        """The bytes read since `go`."""
        self._say("stop")
        return int(self._line())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _say(self, word: str) -> None:
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)

    def _line(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit("the reader has ended; its reason is above")
        return line


def loss(site: Site, source: Serving, pairs: int, window_s: float) -> dict[str, Any]:
    """By placement: tokens/s without and with a reader, in `pairs` of windows, what was lost, and GB/s read."""
    figures = {}
    with contextlib.ExitStack() as stack:
        reading = Reading(stack.enter_context(site.host("reader")))
        stack.callback(reading.end)
        seconds = 600.0 + 2 * pairs * window_s  # more than it takes: a read is waited for, and they are ended with this
        clients = stack.enter_context(streaming(source.url, MODEL, STREAMS, seconds))
        cores = sorted(os.sched_getaffinity(0))
        for name, (engine, others) in {"apart": (cores[:1], cores[1:]), "shared": (cores, cores)}.items():
            if not others:
                continue  # one core: nothing can be apart
            pin(source.engine.process.pid, engine)
            for process in (source.peer.process, source.gateway.process, reading.process, clients):
                pin(process.pid, others)
            figures[name] = _windows(source, reading, pairs, window_s) | {"engine": engine, "others": others}
    return figures


def _windows(source: Serving, reading: Reading, pairs: int, window_s: float) -> dict[str, Any]:
    without, fed, gbps = list[float](), list[float](), list[float]()
    with httpx.Client(base_url=source.engine_url, timeout=60.0) as http:
        _rate(http, window_s)
        reading.go()
        time.sleep(window_s)  # the holder digests its chunks for the first reader
        reading.stop()
        for _ in range(pairs):
            time.sleep(SETTLE_S)
            without.append(_rate(http, window_s))
            with _read(reading, gbps):
                fed.append(_rate(http, window_s))
    return figures_of(without, fed) | {"read_gbps": round(statistics.median(gbps), 3)}


@contextlib.contextmanager
def _read(reading: Reading, gbps: list[float]) -> Iterator[None]:
    reading.go()
    started = time.monotonic()
    time.sleep(SETTLE_S)
    yield
    gbps.append(reading.stop() / (time.monotonic() - started) / 1e9)


def figures_of(without: list[float], fed: list[float]) -> dict[str, Any]:
    """Of windows that alternated, in tokens/s. `lost` is of the medians, `lost_by_pair` of neighbours.

    Raises CliError when there is a window without tokens."""
    if not all(without):
        raise CliError("the instance generated nothing in a whole window: this machine is too slow or too busy for it")
    by_pair = [1 - b / a for a, b in zip(without, fed, strict=True)]
    return {
        "tokens_per_s": round(statistics.median(without), 1),
        "tokens_per_s_fed": round(statistics.median(fed), 1),
        "lost": round(1 - statistics.median(fed) / statistics.median(without), 4),
        "lost_by_pair": [round(part, 4) for part in by_pair],
    }


def _rate(http: httpx.Client, seconds: float) -> float:
    """Tokens that the engine generates per second, by its own count."""
    before, started = _generated(http), time.monotonic()
    time.sleep(seconds)
    return (_generated(http) - before) / (time.monotonic() - started)


def _generated(http: httpx.Client) -> float:
    return sum(float(count) for count in GENERATED.findall(http.get("/metrics").raise_for_status().text))


PARTS = ("joiner", "feeding")
ROUNDS, PAIRS, WINDOW_S = 5, 8, 5.0


def with_instances(parts: Sequence[str], *, small: bool) -> dict[str, Any]:
    """Those of PARTS that are asked for; nothing is started for none."""
    wanted = [part for part in PARTS if part in parts]
    if not wanted:
        return {}
    report: dict[str, Any] = {}
    with Site(_checkpoint(small)).open() as site, serving(site) as source:
        if "joiner" in wanted:
            report["late_joiner"] = late_joiner(site, 1 if small else ROUNDS)
        if "feeding" in wanted:
            report["feeding"] = loss(site, source, 2 if small else PAIRS, 1.0 if small else WINDOW_S)
        report["dtype"] = orjson.loads((site.model / "config.json").read_bytes())["dtype"]
        copy = site.copy(source.host.name)
        report["version_nbytes"] = copy.nbytes if copy is not None else 0
    return report


def _checkpoint(small: bool) -> Path:
    """In bf16 where oneDNN multiplies that here, else in float32: other kernels take seconds for a token."""
    dtype = "bfloat16" if onednn_takes(torch.bfloat16) else "float32"
    path = Path("runs") / ("feeding-small" if small else f"feeding-{dtype}") / "model"
    shape: dict[str, Any] = TINY_SHAPE if small else BENCH_SHAPE
    return path if (path / "config.json").exists() else make_checkpoint(path, dtype=dtype, **shape)


def show(report: dict[str, Any]) -> None:
    if "late_joiner" in report:
        table = Table("seconds, median", "engine up", "fetch", "load", "wait", "stage", "first token", "total", "CPU")
        for name in ("peer", "disk", "disk, not cached"):
            found = report["late_joiner"][name]
            parts = ("engine_up", "fetch", "load", "waited", "staged", "first_token", "total", "cpu")
            table.add_row(name, *(f"{found[part]:.2f}" if part in found else "" for part in parts))
        Console().print(table)
    if "feeding" in report:
        table = Table("while it feeds", "tokens/s without", "with", "lost", "pair by pair", "read, GB/s")
        for name, found in report["feeding"].items():
            rates = (f"{found['tokens_per_s']:.0f}", f"{found['tokens_per_s_fed']:.0f}", f"{found['lost']:.1%}")
            pairs = " ".join(f"{part:.0%}" for part in found["lost_by_pair"])
            table.add_row(name, *rates, pairs, f"{found['read_gbps']:.2f}")
        Console().print(table)
