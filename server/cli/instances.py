"""`hotswap instances`: who there is and how they do; taking one out of routing, putting it to sleep, and back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from server.cli.admin import AdminClient, for_model, percentages, served
from server.cli.output import console, table
from server.errors import RequestFailed

app = typer.Typer(no_args_is_help=True)
LONG_FLIP_MS = 50.0  # about a step
POLL_S = 0.25
LAST = 3  # swaps that `hotswap status` shows
SETTLED_S = 3.0  # without a request: longer than between two looks of a gateway at its metrics
Name = Annotated[str, typer.Argument(help="id of the instance, as `hotswap instances list` shows it")]


@app.command("list")
@for_model
def list_(client: AdminClient) -> None:
    """Every instance with its state, versions, load and last swap times."""
    show_instances(client)


@app.command()
@for_model
def drain(
    client: AdminClient,
    name: Name,
    wait: Annotated[float, typer.Option(help="seconds to wait until it has no request of any gateway's")] = 0.0,
) -> None:
    """Send it no new requests, at any gateway, until `resume` or until it is started anew."""
    client.call("POST", f"/admin/instances/{name}/drain")
    if wait:
        _wait_until_idle(client, name, wait)
    console().print(f"{name} gets no new requests" + (" and has none" if wait else ""))


@app.command()
@for_model
def resume(client: AdminClient, name: Name) -> None:
    """Send it requests again."""
    answer = client.call("POST", f"/admin/instances/{name}/resume")
    console().print(f"{name} " + ("is about to stop by itself" if answer["draining"] else "gets requests again"))


@app.command()
@for_model
def sleep(
    client: AdminClient,
    name: Name,
    level: Annotated[int, typer.Option(min=1, max=2, help="1: quick to wake, 2: least memory")] = 2,
    drain: Annotated[float, typer.Option(help="seconds that requests in flight get to end")] = 30.0,
    wait: Annotated[float, typer.Option(help="seconds to wait until its memory is free")] = 60.0,
) -> None:
    """Have it give its memory back, until `wake`."""
    body = {"level": level, "drain_s": drain, "requested_by": "hotswap", "wait_s": 0.0}
    client.call("POST", f"/admin/instances/{name}/sleep", body)
    asleep = _wait_for(lambda: name in {r["id"] for r in client.call("GET", "/admin/sleep")["asleep"]}, wait)
    console().print(f"{name} " + ("sleeps" if asleep else "is falling asleep"))


@app.command()
@for_model
def wake(
    client: AdminClient,
    name: Name,
    wait: Annotated[float, typer.Option(help="seconds to wait until it serves")] = 120.0,
) -> None:
    """End its sleep."""
    client.call("POST", f"/admin/instances/{name}/wake", {"wait_s": 0.0})
    serves = _wait_for(lambda: name in _eligible(client), wait)
    console().print(f"{name} " + ("serves" if serves else "is waking"))


def show_instances(client: AdminClient) -> None:
    """Print every instance with its state, versions and last swap times."""
    rows = client.call("GET", "/admin/instances")["instances"]
    on_gpus = ["copies"] if any(r.get("device_copies") is not None for r in rows) else []
    shown = table("instance", "state", "version", "epoch", "weights", "load", "stage, flip ms", *on_gpus)
    for r in rows:
        times = " ".join(f"{r[k]:.2f}" for k in ("stage_ms", "commit_ms") if r.get(k))
        cells = [r["id"], _state(r), r["active_version"], r["active_epoch"], (r["fingerprint"] or "")[:8]]
        more = [r.get("device_copies") for _ in on_gpus]
        shown.add_row(*(str(c) if c is not None else "" for c in [*cells, f"{r['load']:g}", times, *more]))
    out = console()
    out.print(shown)
    for r in rows:
        if r.get("devices"):
            out.print(f"{r['id']}: on {', '.join(map(_device, r['devices']))}", soft_wrap=True)
        for trouble in _troubles(r):
            out.print(f"{r['id']}: {trouble}")
    with contextlib.suppress(RequestFailed):  # the store may be away, and what is above is told without it
        for sleeper in client.call("GET", "/admin/sleep")["asleep"]:
            out.print(f"{sleeper['id']}: asleep; `hotswap instances wake {sleeper['id']}` wakes it")
    asked = {r["active_version"] for r in rows if r["eligible"]}
    for version, percent in percentages(client.call("GET", "/admin/weights/active")).items():
        lost = "" if version in asked else "; nobody runs it now, so others answer them"
        out.print(f"version {version} has {percent:g} % of the requests{lost}")


def show_swaps(client: AdminClient) -> None:
    """Print the active version, the newest that could be swapped in, and the last swaps."""
    weights, out = client.call("GET", "/admin/weights"), console()
    active = weights["active"]
    known = {active["version"], *percentages(active)} if active is not None else {0}
    newer = [v["version"] for v in weights["versions"] if v["state"] == "ready" and v["version"] > max(known)]
    out.print(f"active: {served(active)}" if active is not None else "no version is active")
    if newer:
        out.print(f"published, and not active: {', '.join(map(str, sorted(newer)))}")
    for swap in client.call("GET", "/admin/swaps")["swaps"][:LAST]:
        took, ago = swap["ended_at"] - swap["opened_at"], time.time() - swap["ended_at"]
        why = f": {swap['reason']}" if swap["reason"] else ""
        what = f"swap to {served(swap)}, {swap['mode']}: {swap['outcome']}"
        out.print(f"{what} in {took:.2f} s, {ago:.0f} s ago{why}")


def _device(found: dict[str, Any]) -> str:
    name = found["uuid"] if found["index"] is None else f"GPU {found['index']} ({found['uuid']})"
    return f"{name} of {found['host']}" if found["host"] else name


def _troubles(row: dict[str, Any]) -> Iterator[str]:
    """The reasons that keep requests away from the instance, and its last error."""
    if not row["answering"]:
        yield "does not answer its health check"
    elif row["circuit"] != "closed":
        yield f"its circuit is {row['circuit']}: requests to it failed"
    if row.get("staged_version") is not None and (row.get("expected_flip_ms") or 0) > LONG_FLIP_MS:
        yield f"a commit of version {row['staged_version']} stalls it for about {row['expected_flip_ms']:.0f} ms"
    if row["error"]:
        yield str(row["error"].get("message", ""))


def _state(row: dict[str, Any]) -> str:
    if row["draining"]:
        left_s = max(0.0, row["leaves_at"] - time.time()) if row.get("leaves_at") else None
        return "DRAINING" if left_s is None else f"DRAINING (leaves in {left_s:.0f} s)"
    return str(row["state"]) if row["eligible"] else f"{row['state']} (gets no requests)"


def _eligible(client: AdminClient) -> set[str]:
    return {row["id"] for row in client.call("GET", "/admin/instances")["instances"] if row["eligible"]}


def _wait_for(holds: Callable[[], bool], wait_s: float) -> bool:
    """Whether it came to hold in that time."""
    deadline = time.monotonic() + wait_s
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return held


def _wait_until_idle(client: AdminClient, name: str, wait_s: float) -> None:
    deadline, busy_at, left = time.monotonic() + wait_s, time.monotonic(), 0
    while (now := time.monotonic()) < busy_at + SETTLED_S:
        left = _requests(client, name)
        busy_at = now if left else busy_at
        if left and now > deadline:
            raise RequestFailed(f"{name} still has {left} request(s) after {wait_s:g} s, and gets no new ones; wait on")
        time.sleep(POLL_S)


def _requests(client: AdminClient, name: str) -> int:
    """Requests there: this gateway's, and all that the engine has. 0 when it has gone."""
    rows = client.call("GET", "/admin/instances")["instances"]
    row = next((r for r in rows if r["id"] == name), None)
    if row is None:
        return 0
    signals = row["signals"] or {}
    engine = signals.get("num_requests_running", 0) + signals.get("num_requests_waiting", 0)
    return max(int(row["in_flight"]), int(engine))
