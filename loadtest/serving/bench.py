"""Serving under a target, from little load to three times too much: `hotswap bench serve [--json FILE]`.

Real prompts (prompts.py) through real vLLM. Two gateways stand in front of the same instance: one with the
queue, one with `--max-in-flight 0`, which lets everything through at once as a plain proxy does. Each load is offered
to one and then to the other, as a Poisson process that does not wait for answers. Measured:

1. unloaded: one client. The target is set from it: FIRST_TIMES its median time to the first token, GAP_TIMES its gap.
2. saturation: many clients, each asking again when it has its answer; requests per second are the unit of what follows.
3. 0.5 to 3 times that: goodput, the answers within the target per second. All requests carry a deadline of
   DEADLINE_SHARE of the target, which only the queue looks at.
4. two keys, one offering five times what the other does, and both more than half of what can be served.
5. a tenth of the load urgent, at twice saturation.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console
from rich.table import Table

from loadtest.measure.run import with_machine
from loadtest.models.checkpoints import TINY_SHAPE, make_checkpoint
from loadtest.serving.arrivals import Plan, Seen, Stream
from loadtest.serving.goodput import Target, figures, jain, quantile
from server.ports import free_port
from server.up.config import UpConfig
from server.up.processes import Child
from server.up.server import Server

MODEL = "serve"
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}
"""About 25 M parameters: slow enough that the engine is the bottleneck on one core, not the clients."""

MAX_NUM_SEQS = 16
LOADS = (0.5, 1.0, 1.5, 2.0, 3.0)
FIRST_TIMES, GAP_TIMES = 20.0, 10.0
DEADLINE_SHARE = 0.5
SETTLE_S = 20.0
KEYS = {"heavy": "key-that-offers-five-times-as-much", "light": "key-that-offers-a-little"}
HEAVY, LIGHT = 3.0, 0.6  # times saturation: both above a half
URGENT, PATIENT = 0.2, 1.8


@dataclass(frozen=True)
class Lengths:
    """How long each part lasts, seconds."""

    unloaded: float = 8.0
    saturated: float = 15.0
    load: float = 10.0
    shares: float = 12.0
    grace: float = 4.0


SMALL = Lengths(unloaded=2.0, saturated=3.0, load=2.0, shares=2.0, grace=2.0)
console = Console(stderr=True)


@dataclass(frozen=True)
class Stand:
    """The two gateways, by the names of the report."""

    urls: dict[str, str]

    def offer(self, way: str, seconds: float, grace_s: float, streams: list[Stream], clients: int = 0) -> list[Seen]:
        """One plan, carried out by a process of its own. The same plan offers the same requests at the same times."""
        self._settle()
        plan = Plan(self.urls[way], MODEL, seconds, grace_s, 17, streams, clients)
        done = subprocess.run(
            [sys.executable, "-m", "loadtest.serving.arrivals"],
            input=orjson.dumps(plan),
            capture_output=True,
            check=True,
        )
        return [Seen(**fields) for fields in orjson.loads(done.stdout)]

    def _settle(self) -> None:
        """Until what the last plan left is over, and the queue's gateway trusts the instance with all it can run."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            page = httpx.get(self.urls["queue"] + "/metrics").text.splitlines()
            of = {line.partition("{")[0]: float(line.rsplit(" ", 1)[1]) for line in page if "{instance_id=" in line}
            idle = of.get("hotswap_instance_num_requests_running") == 0
            if idle and of["hotswap_instance_in_flight_limit"] >= MAX_NUM_SEQS:
                return
            time.sleep(0.2)
        console.print(f"[yellow]the instance has not come to rest within {SETTLE_S:g} s")


def run(json: Path | None = None, *, small: bool = False) -> dict[str, Any]:
    """Measures everything, prints the tables, writes `json` if given; returns the figures."""
    work = Path("runs") / ("serve-small" if small else "serve")
    lengths = SMALL if small else Lengths()
    with _stand(work, TINY_SHAPE if small else SHAPE) as stand:
        found = measure(stand, lengths, LOADS if not small else (0.5, 3.0))
    found = {"max_num_seqs": MAX_NUM_SEQS, "seconds": asdict(lengths), **found}
    _print(found)
    return with_machine(found, json)


def measure(stand: Stand, lengths: Lengths, loads: Sequence[float]) -> dict[str, Any]:
    """All parts in turn."""
    found: dict[str, Any] = {}
    one = stand.offer("queue", lengths.unloaded, lengths.grace, [_stream("heavy", 1.0)], clients=1)
    target = _target(one)
    found["unloaded"] = figures(one, lengths.unloaded, target)
    full = stand.offer("direct", lengths.saturated, lengths.grace, [_stream("heavy", 1.0)], clients=2 * MAX_NUM_SEQS)
    found["saturation"] = figures(full, lengths.saturated, target)
    rate = found["saturation"]["completed_per_s"]
    found["target"] = asdict(target)
    deadline = {"x-hotswap-deadline-s": f"{min(600.0, target.first_s * DEADLINE_SHARE):.3f}"}
    found["loads"] = {}
    for load in loads:
        for way in stand.urls:
            console.print(f"{load:g} times saturation, {way}")
            seen = stand.offer(way, lengths.load, lengths.grace, [_stream("heavy", load * rate, deadline)])
            found["loads"].setdefault(f"{load:g}", {})[way] = figures(seen, lengths.load, target)
    found["fairness"] = {way: _fairness(stand, way, rate, lengths, target, deadline) for way in stand.urls}
    found["urgent"] = {way: _urgent(stand, way, rate, lengths, target, deadline) for way in stand.urls}
    return found


def _target(unloaded: Sequence[Seen]) -> Target:
    first = quantile([s.first for s in unloaded if s.first is not None], 0.5)
    gap = quantile([s.gap for s in unloaded if s.gap is not None], 0.5)
    if first is None or gap is None:
        raise RuntimeError(f"an unloaded server gave no answer, but {Counter(s.status for s in unloaded)}; see runs/")
    return Target(FIRST_TIMES * first, GAP_TIMES * gap)


def _fairness(
    stand: Stand, way: str, rate: float, lengths: Lengths, target: Target, more: dict[str, str]
) -> dict[str, Any]:
    streams = [_stream("heavy", HEAVY * rate, more), _stream("light", LIGHT * rate, more)]
    seen = stand.offer(way, lengths.shares, lengths.grace, streams)
    of = {s.name: figures([x for x in seen if x.name == s.name], lengths.shares, target) for s in streams}
    return {
        "jain_tokens": jain([f["tokens_per_s"] for f in of.values()]),
        "jain_good_tokens": jain([f["good_tokens_per_s"] for f in of.values()]),
        **of,
    }


def _urgent(
    stand: Stand, way: str, rate: float, lengths: Lengths, target: Target, more: dict[str, str]
) -> dict[str, Any]:
    """Of one key, so that only the class tells them apart. Without the queue there are no classes either."""
    patient = more | ({"x-hotswap-priority": "5"} if way == "queue" else {})
    streams = [_stream("heavy", URGENT * rate, more, "urgent"), _stream("heavy", PATIENT * rate, patient, "patient")]
    seen = stand.offer(way, lengths.shares, lengths.grace, streams)
    return {s.name: figures([x for x in seen if x.name == s.name], lengths.shares, target) for s in streams}


def _stream(key: str, rate: float, headers: dict[str, str] | None = None, name: str = "") -> Stream:
    return Stream(name or key, rate, {"authorization": f"Bearer {KEYS[key]}"} | (headers or {}))


@contextlib.contextmanager
def _stand(work: Path, shape: dict[str, Any]) -> Iterator[Stand]:
    """An instance with its gateway, and a second gateway on the same store."""
    work.mkdir(parents=True, exist_ok=True)
    model = work / "model"
    if not (model / "config.json").exists():
        make_checkpoint(model, scale=2.0, **shape)
    keys = work / "keys"
    keys.write_text("".join(f"{key} {name}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    args = ("--max-model-len", "2048", "--max-num-seqs", str(MAX_NUM_SEQS))
    server = Server(
        UpConfig(
            model=str(model), name=MODEL, port=free_port("127.0.0.1"), throwaway=True, state_dir=work / "state",
            api_key_file=keys, kv_cache_gib=1.0, vllm_args=args,
        )
    )  # fmt: skip
    server.start()
    try:
        server.wait_ready()
        with _second_gateway(server, keys) as direct:
            yield Stand({"queue": server.url, "direct": direct})
    finally:
        server.stop()


@contextlib.contextmanager
def _second_gateway(server: Server, keys: Path) -> Iterator[str]:
    port = free_port("127.0.0.1")
    args = ["server.gateway", "--store", server.store, "--model", MODEL, "--port", str(port)]
    args += ["--api-key-file", str(keys), "--admin-key-file", str(server.admin_key_file)]
    args += ["--no-coordinator", "--max-in-flight", "0"]
    url = f"http://127.0.0.1:{port}"
    child = Child("second gateway", args, server.state_dir / "logs" / "second-gateway.log")
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url + "/readyz", timeout=2).status_code == 200:
                    break
            if not child.alive or time.monotonic() > deadline:
                raise RuntimeError(f"the second gateway did not start:\n{child.tail()}")
            time.sleep(0.1)
        yield url
    finally:
        child.stop()


def _print(found: dict[str, Any]) -> None:
    target, full = found["target"], found["saturation"]
    console.print(
        f"saturation {full['completed_per_s']:.1f} requests/s, {full['tokens_per_s']:.0f} tokens/s; target: first "
        f"token {target['first_s'] * 1e3:.0f} ms, then {target['gap_s'] * 1e3:.1f} ms"
    )
    columns = ("way", "offered/s", "good/s", "good of offered", "first token p50 / p99 ms", "gap p50 ms", "refused")
    table = Table("load", *columns)
    for load, ways in found["loads"].items():
        for way, f in ways.items():
            table.add_row(load, way, *_row(f))
    console.print(table)
    shares = Table("who", *columns)
    for part in ("fairness", "urgent"):
        for way, of in found[part].items():
            for name in of:
                if isinstance(of[name], dict):
                    shares.add_row(name, way, *_row(of[name]))
    console.print(shares)
    for way, of in found["fairness"].items():
        console.print(f"Jain's index, {way}: tokens {of['jain_tokens']:.3f}, good {of['jain_good_tokens']:.3f}")


def _row(f: dict[str, Any]) -> list[str]:
    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f}"

    refused = ", ".join(f"{n} x {code}" for code, n in f["refused"].items())
    refused += f", {f['unfinished']} unfinished" if f["unfinished"] else ""
    return [
        f"{f['offered_per_s']:.1f}",
        f"{f['goodput_per_s']:.1f}",
        f"{f['good_of_offered']:.0%}",
        f"{ms(f['first_token_ms_p50'])} / {ms(f['first_token_ms_p99'])}",
        ms(f["gap_ms_p50"]),
        refused,
    ]
