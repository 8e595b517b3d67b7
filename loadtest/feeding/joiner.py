"""A late joiner: from its start, on a host that holds nothing, to its first token; beside stock vLLM's start from disk.

Peer and instance of the joining host start at one moment, so the version arrives while the engine starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from loadtest.feeding.site import MODEL, VLLM_ARGS, Host, Site, started, wait
from loadtest.stock_vllm import StockVllm
from server.cli.up import free_port

FETCHED = re.compile(r"is here after ([\d.]+) s")
LOADED = re.compile(r"Loading weights took ([\d.]+) seconds")
EVERY_S = 0.05
PROMPT = [5, 6, 7, 8]


def join(site: Site, number: int) -> dict[str, float]:
    """Seconds until the engine is up (it answers, on dummy weights), then `waited` for the copy, `staged` (until it
    serves) and `first_token`; their `total`. `fetch` is what the peer took for the copy, beside the engine's start."""
    with contextlib.ExitStack() as stack:
        host, port = stack.enter_context(site.host(f"joiner-{number}")), free_port("127.0.0.1")
        clock = time.monotonic()
        peer, instance = started(stack, host.peer()), started(stack, host.instance(port))
        at = _followed(host, f"http://127.0.0.1:{port}", instance)
        at = {name: moment - clock for name, moment in at.items()}
        told, record = peer.log.read_text(), site.instance(host.name)
    return split(at, told, record.stage_ms if record is not None else None)


def split(at: Mapping[str, float], peer_log: str, stage_ms: float | None) -> dict[str, float]:
    """What `join` returns, of moments since the start: `copied`, `up`, `serving`, `token`."""
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
    """Seconds of stock vLLM: `engine_up` with the weights loaded, `load` of that, `first_token` after that, `total`."""
    log = site.directory / "stock.log"
    log.unlink(missing_ok=True)
    if not cached:
        forget(site.model / "model.safetensors")
    stock = StockVllm(site.model, MODEL, log, VLLM_ARGS)
    started_at = time.monotonic()
    with stock.running():
        up = time.monotonic()
        with httpx.Client(base_url=stock.url, timeout=60.0) as http:
            if not _says_a_token(http):
                raise SystemExit("stock vLLM answers no request")
        said = time.monotonic()
    loaded = LOADED.search(log.read_text())
    load = float(loaded[1]) if loaded is not None else 0.0
    return {"engine_up": up - started_at, "load": load, "first_token": said - up, "total": said - started_at}


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
