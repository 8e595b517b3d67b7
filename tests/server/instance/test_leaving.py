"""SIGTERM to a gateway and to an instance's server: their clients are told first, and what is in flight ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import orjson
import pytest

from server.gateway.config import Limits
from server.instance.middleware import Admission
from server.instance.sidecar import TELL_S, Sidecar
from tests.server.gateway.harness import KEYS, Client, GatewayProcess, gateway_process, get, post, running_gateway
from tests.server.gateway.upstream import Answer, Link, Received, answer_json, streaming, upstream
from tests.server.instance.engines import Engine, config_of, sidecar_of
from tests.waiting import eventually
from weightsync.control.records import InstanceRecord
from weightsync.errors import StoreUnavailable

# gateway


async def asked(client: Client, raw: bytes) -> Answer:
    """The answer on a connection that its client goes on using."""
    client.writer.write(raw)
    return await client.answer()


async def ready(gateway: GatewayProcess) -> tuple[int, str]:
    answer = await gateway.ask(get("/readyz"))
    body = orjson.loads(answer.body)
    return answer.status, body["error"]["code"] if "error" in body else body["status"]


async def until_ready(gateway: GatewayProcess, state: tuple[int, str] | None) -> None:
    """None: until it listens no more."""

    async def reached() -> bool:
        try:
            return await ready(gateway) == state
        except (ConnectionError, asyncio.IncompleteReadError):
            return state is None

    await eventually(reached, 90)


async def test_a_gateway_is_unready_first_and_stops_when_its_streams_have_ended(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def answer(link: Link, received: Received) -> None:
        streams = b"stream" in received.body
        await (streaming(b"data: one\n\n", release, b"data: two\n\n") if streams else answer_json)(link, received)

    async with upstream(answer) as up, AsyncExitStack() as stack:
        record = InstanceRecord("i0", up.address, "SERVING", active_version=1, active_epoch=1)
        with gateway_process(tmp_path, "--no-coordinator", "--leave", "300") as gateway:
            process = gateway.process
            gateway.store.put(KEYS.instance("i0"), record.to_json())
            await until_ready(gateway, (200, "ready"))
            kept = await stack.enter_async_context(gateway.client())
            kept.writer.write(post(body=b'{"stream": true}'))
            # Its head is here, and was written before the gateway was told to leave.
            await eventually(lambda: b"data: one" in kept.reader._buffer, 60)  # type: ignore[attr-defined]
            process.send_signal(signal.SIGTERM)
            await until_ready(gateway, (503, "leaving"))
            async with gateway.client(post()) as late:
                served = await late.answer()
                assert (served.status, served.headers["connection"]) == (200, "close"), "served, and sent elsewhere"
                assert await late.rest() == b""
            process.send_signal(signal.SIGTERM)  # a second one ends the wait
            await until_ready(gateway, None)
            assert process.poll() is None
            release.set()
            streamed = await kept.answer()
            assert (streamed.complete, streamed.body) == (True, b"data: one\n\ndata: two\n\n")
            assert "connection" not in streamed.headers
            last = await asked(kept, post())
            assert (last.status, last.headers["connection"]) == (200, "close"), "nothing had told it to go elsewhere"
            assert await kept.rest() == b""
            await asyncio.to_thread(process.wait, 60)


async def test_a_gateway_without_a_delay_just_stops(tmp_path: Path) -> None:
    with gateway_process(tmp_path, "--no-coordinator") as gateway:
        await until_ready(gateway, (503, "no_instance"))
        gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(gateway.process.wait, 60) == 0


async def test_answers_of_the_app_say_that_a_gateway_leaves_too(tmp_path: Path) -> None:
    with running_gateway(tmp_path) as gateway:
        async with gateway.client() as kept:
            assert "connection" not in (await asked(kept, get("/healthz"))).headers
            gateway.gateway.leaving = True
            answer = await asked(kept, get("/healthz"))
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await kept.rest() == b""


@pytest.mark.parametrize(
    ("begun", "rest", "status"),
    [
        (b"GET /healthz HT", b"TP/1.1\r\nHost: t\r\n\r\n", 200),
        (b"POST /healthz HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\nx", b"x", 405),
    ],
)
async def test_a_request_to_the_app_that_was_arriving_does_not_hold_up_the_end(
    tmp_path: Path, begun: bytes, rest: bytes, status: int
) -> None:
    with running_gateway(tmp_path, limits=Limits(keep_alive_s=600.0)) as gateway:
        async with gateway.client(begun) as kept:
            await eventually(lambda: any(client._reading for client in list(gateway.gateway.clients)))
            gateway.stop()
            await eventually(lambda: any(client._stopping for client in list(gateway.gateway.clients)))
            assert (await asked(kept, rest)).status == status
            async with asyncio.timeout(30):
                assert await kept.rest() == b""


# any server

LEAVING = """
import asyncio, os, signal, sys, uvicorn
from server.leaving import LeavingServer
from tests.waiting import eventually

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs these tests in the background ignores it

async def app(scope, receive, send):
    pass

async def leave():
    print("leaving", server.should_exit, flush=True)
    for word in sys.argv[1:]:
        if word == "raise":
            raise RuntimeError("no")
        if word == "hang":
            await asyncio.Event().wait()
    return "orderly" in sys.argv

server = LeavingServer(uvicorn.Config(app, port=0, lifespan="off", log_level="critical"), leave)

async def main():
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    print("up", flush=True)
    await serving
    print("behind", flush=True)

asyncio.run(main())
"""


TERM = (signal.SIGTERM, "leaving False")


@pytest.mark.parametrize(
    ("what", "signals", "rest", "status"),
    [
        (["orderly"], [TERM], "behind\n", 0),
        ([], [TERM], "", -signal.SIGTERM),
        (["raise"], [TERM], "", -signal.SIGTERM),
        (["hang"], [TERM, (signal.SIGTERM, "")], "", -signal.SIGTERM),
        (["hang"], [(signal.SIGINT, "")], "", -signal.SIGINT),
    ],
    ids=["orderly", "in disorder", "a fault", "a second signal", "an interrupt"],
)
def test_what_a_signal_does(what: list[str], signals: list[tuple[int, str]], rest: str, status: int) -> None:
    """`signals`: each with the line that it has printed."""
    command = [sys.executable, "-c", LEAVING, *what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            for number, line in signals:
                process.send_signal(number)
                assert not line or process.stdout.readline() == f"{line}\n"
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (said, process.returncode) == (rest, status)


# an instance


DRAIN_S = 7.0


class Told:
    """A participant that notes what it is told."""

    def __init__(self, state: str = "SERVING", fault: Exception | None = None) -> None:
        self.record = InstanceRecord("i", "http://127.0.0.1:1", state)  # type: ignore[arg-type]
        self.drained, self.leaves_at = False, 0.0
        self._fault = fault

    async def drain(self, leaves_at: float) -> None:
        self.drained, self.leaves_at = True, leaves_at
        if self._fault is not None:
            raise self._fault


class Idle(Admission):
    """Admission whose requests end when the test says so."""

    def __init__(self) -> None:
        super().__init__(None)
        self.waited: float | None = None

    async def idle(self, seconds: float) -> None:
        self.waited = seconds


def sidecar(participant: Told, admission: Admission, *, dead: bool = False) -> Sidecar:
    made = sidecar_of(config_of(Path(os.devnull), drain_s=DRAIN_S), Engine(dead=dead), admission)
    made._participant = participant  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("fault", [None, StoreUnavailable("/x/store.db", "gone", "Wait"), TimeoutError()])
async def test_an_instance_says_that_it_drains_and_waits_for_its_requests(fault: Exception | None) -> None:
    """Also when the store does not take it: then whoever still asks is refused here."""
    told, idle, began = Told(fault=fault), Idle(), time.time()
    assert await sidecar(told, idle).leave() is True
    assert told.drained
    assert 0 < told.leaves_at - began <= DRAIN_S + (time.time() - began)
    assert idle.waited == pytest.approx(DRAIN_S, abs=TELL_S + time.time() - began)


@pytest.mark.parametrize(("state", "dead"), [("TORN", False), ("SERVING", True)])
async def test_an_instance_that_cannot_end_its_requests_does_not_wait(state: str, dead: bool) -> None:
    told, idle = Told(state), Idle()
    assert await sidecar(told, idle, dead=dead).leave() is False
    assert (told.drained, idle.waited) == (False, None)
