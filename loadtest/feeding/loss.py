"""What a serving instance loses of its tokens/s while its host feeds another one; windows with and without alternate.

apart   the engine on one core; its host's peer, the reader, the gateway and the clients on the other
shared  all of them on all cores
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

from loadtest.children import streaming
from loadtest.cpu import pin
from loadtest.feeding.site import MODEL, SOURCE, Host, Serving, Site
from server.cli.errors import CliError

GENERATED = re.compile(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)
SETTLE_S = 0.5
STREAMS = 8


class Reading:
    """The process of the reader (reader.py)."""

    def __init__(self, host: Host) -> None:
        command = [sys.executable, "-m", "loadtest.feeding.reader", MODEL, SOURCE]
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
