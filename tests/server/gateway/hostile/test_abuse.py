"""Abuse of a gateway process, from outside: nothing but public routes is reached, it stays up, its memory stays
bounded, and whatever it prints at its most talkative holds no key and no prompt."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest

from server.gateway import GatewayConfig
from server.gateway.app import build_app
from server.gateway.middleware import is_public
from server.gateway.routes import admin_names, public_names
from tests.server.gateway.harness import KEYS, MODEL, GatewayProcess, gateway_process, get, post, private
from tests.server.gateway.hostile.test_hostile import FRAMINGS, NOT_HTTP, framed
from tests.server.gateway.upstream import Answer, Received, Upstream, cut, read_answer, upstream
from tests.waiting import eventually
from weightsync.control.records import InstanceRecord

ADMIN_KEY = "PLANTED-admin-key-of-the-tests"
INFER_KEY = "PLANTED-infer-key-of-the-tests"
PROMPT = "PLANTED prompt"
AUTH = f"Authorization: Bearer {INFER_KEY}\r\n"
MAX_BODY = 2**20
TIMEOUT_S = 2.0
MOST_GROWTH = 48 * 2**20


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """It asks for keys and logs everything."""
    directory = tmp_path_factory.mktemp("abuse")
    keys = private(directory / "keys", INFER_KEY + "\n")
    options = ["--api-key-file", str(keys), "--max-body", str(MAX_BODY), "--request-timeout", str(TIMEOUT_S)]
    options += ["--log-level", "debug", "--log-format", "json"]
    with gateway_process(directory, *options, key=ADMIN_KEY) as running:
        yield running
        assert running.process.poll() is None, running.log.read_text()[-3000:]
    printed = running.log.read_text()
    assert "PLANTED" not in printed
    assert "Traceback" not in printed
    assert printed.strip()  # it did log


def rss(gateway: GatewayProcess) -> int:
    return int(psutil.Process(gateway.process.pid).memory_info().rss)


async def is_well(gateway: GatewayProcess) -> bool:
    return (await gateway.ask(get("/healthz"))).status == 200


@pytest.fixture
async def behind(gateway: GatewayProcess) -> AsyncIterator[Upstream]:
    """The instance behind the gateway; `requests` holds what clients got through, health checks are left out."""
    async with upstream() as up:
        record = InstanceRecord("i0", up.address, "SERVING", active_version=1, active_epoch=1)
        await asyncio.to_thread(gateway.store.put, KEYS.instance("i0"), record.to_json())

        async def is_known() -> bool:
            return (await gateway.ask(post(headers=AUTH))).status == 200

        await eventually(is_known, 60)
        up.requests.clear()
        yield up
        await asyncio.to_thread(gateway.store.delete, KEYS.instance("i0"))


def reached(up: Upstream) -> list[Received]:
    """Requests that came from clients: a gateway's own questions are GETs of three paths."""
    own = ("/health", "/metrics", "/hotswap/prefixes")
    return [r for r in up.requests if r.target.partition("?")[0] not in own]


# control routes


OF_VLLM = "/sleep /wake_up /scale_elastic_ep /start_profile /v1/load_lora_adapter /invocations /docs"


def control_paths() -> list[str]:
    """Every path that is not public, with its parameters filled in, and some that vLLM has besides."""
    app = build_app(GatewayConfig("sqlite:///nowhere.db", MODEL))
    paths = {re.sub(r"\{\w+\}", "x", str(getattr(route, "path", "/"))) for route in app.routes}
    return sorted([*(path for path in paths if not is_public(path)), *admin_names(), *OF_VLLM.split()])


SPELLINGS = (
    "{0}", "{0}/", "{0}.", "{0}%20", "{0}%00", "{0};x=1", "{0}?x=/healthz", "{0}#", "/{0}", "/.{0}", "/x/..{0}",
    "/%2e{0}", "/healthz/..{0}", "/healthz/%2e%2e{0}", "/healthz%2f..{0}", "/console/..{0}", "/console/%2e%2e{0}",
    "/console%2f..{0}", "/v1/models/..{0}", "http://t{0}", "http://127.0.0.1{0}", "\\{0}",
)  # fmt: skip


def spelt(path: str) -> Iterator[str]:
    yield from (form.format(path) for form in SPELLINGS)
    yield path.upper()
    yield "/%" + f"{ord(path[1]):02x}" + path[2:]
    yield path.replace("/", "%2f")
    yield path.replace("/", "//")
    yield path.replace("/", "/./")


async def test_no_control_route_under_any_spelling_on_the_public_port(
    gateway: GatewayProcess, behind: Upstream
) -> None:
    """With the admin key itself, so that only the port stands between."""
    key = f"Authorization: Bearer {ADMIN_KEY}\r\n"
    names = {re.sub(r"\{\w+\}", "x", name) for name in public_names()}
    paths = control_paths()
    assert {"/admin/weights", "/pause", "/collective_rpc", "/admin/keys"} <= set(paths)
    reader, writer = await gateway.connect()
    for path in paths:
        for target in {*spelt(path)} - names:
            for method in ("GET", "POST"):
                writer.write(f"{method} {target} HTTP/1.1\r\nHost: t\r\n{key}Content-Length: 2\r\n\r\n{{}}".encode())
                got = await asyncio.wait_for(read_answer(reader), 30)
                assert got.status == 404 or (got.status == 400 and target != path), (method, target, got)
                if got.headers.get("connection") == "close":
                    writer.close()
                    reader, writer = await gateway.connect()
    writer.close()
    assert reached(behind) == []


# headers

CARRIERS = (
    "x-session-id", "traceparent", "tracestate", "baggage", "x-request-id", "user-agent", "accept", "content-type",
    "anthropic-version", "x-hotswap-policy", "x-hotswap-version", "x-hotswap-priority", "authorization", "x-api-key",
    "api-key",
)  # fmt: skip


@pytest.mark.parametrize("name", CARRIERS)
async def test_a_value_cannot_carry_a_header(gateway: GatewayProcess, behind: Upstream, name: str) -> None:
    """Line breaks, raw and in other clothes, in everything that is passed on."""
    for value in (
        "a\nx-injected: 1",
        "a\rx-injected: 1",
        "a\r\n x-injected: 1",
        "a\0b",
        "a%0d%0ax-injected: 1",
        "a\x85b",
    ):
        line = f"{name}: {value}\r\n"
        await gateway.ask(post(headers=line if name in ("authorization", "x-api-key", "api-key") else AUTH + line))
    for request in reached(behind):
        assert "x-injected" not in request.headers
        assert request.raw_head.count(b"\n") == request.raw_head.count(b"\r\n")
        assert b"\0" not in request.raw_head


async def test_what_reaches_an_instance_is_on_a_list(gateway: GatewayProcess, behind: Upstream) -> None:
    lines = "".join(
        f"{name}: x\r\n" for name in ("cookie", "x-forwarded-for", "forwarded", "x_hotswap_probe", "x-hotswap_probe",
        "proxy-authorization", "api-key", "te", "trailer", "via", "origin", "x-data-parallel-rank", "content-encoding")
    )  # fmt: skip
    got = await gateway.ask(post(headers=AUTH + lines))
    assert got.status == 200
    (request,) = reached(behind)
    allowed = {"host", "content-type", "content-length", "x-request-id", "traceparent", "tracestate"}
    allowed |= {"x-hotswap-cache-scope", "x-hotswap-resumable"}
    assert set(request.headers) <= allowed
    assert "PLANTED" not in request.raw_head.decode("latin-1")


# time and memory


async def test_hundreds_of_slow_clients_cost_little(gateway: GatewayProcess, behind: Upstream) -> None:
    """Heads and bodies that come a byte at a time: health is answered meanwhile, and then they are told to go."""
    before = rss(gateway)
    parts = (b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nX: ", post(body=b" " * 1000, headers=AUTH)[:-990], b"P")

    async def told(reader: asyncio.StreamReader) -> tuple[Answer, bytes]:
        return await read_answer(reader), await reader.read()

    links = []
    for number in range(300):
        reader, writer = await gateway.connect()
        writer.write(parts[number % 3])
        links.append((asyncio.ensure_future(told(reader)), writer))
    async with asyncio.timeout(120):
        while unanswered := [writer for answer, writer in links if not answer.done()]:
            assert await is_well(gateway)
            for writer in unanswered:
                writer.write(b" ")
            await asyncio.sleep(0.05)  # between two bytes
    answers = [answer.result() for answer, _ in links]
    assert {a.status for a, _ in answers} <= {408, 400}  # a space after a method alone is no method
    assert [a.status for a, _ in answers].count(408) >= 200
    assert {rest for _, rest in answers} == {b""}
    for _, writer in links:
        writer.close()
    assert reached(behind) == []
    assert rss(gateway) - before < MOST_GROWTH


ENDLESS = {
    "line ends before a request": (b"", b"\r\n" * 2048),
    "chunks of a byte": (framed(f"{AUTH}Transfer-Encoding: chunked\r\n\r\n"), b"1\r\n \r\n" * 1024),
}


async def test_what_has_no_end_is_ended(gateway: GatewayProcess, behind: Upstream) -> None:
    """Either at a size or, when nothing of it is kept, at a time."""
    before = rss(gateway)
    await asyncio.gather(*(send_without_end(gateway, name) for name in ENDLESS))
    assert reached(behind) == []
    assert rss(gateway) - before < MOST_GROWTH


async def send_without_end(gateway: GatewayProcess, name: str) -> None:
    begin, more = ENDLESS[name]
    async with gateway.client(begin) as client:
        answered = asyncio.ensure_future(client.rest())
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(60):
                while not answered.done():
                    client.writer.write(more)
                    await client.writer.drain()
                    await asyncio.sleep(0.005)
        with contextlib.suppress(ConnectionError):
            got = await answered
            assert got == b"" or got.split(b" ")[1] in (b"400", b"408", b"413", b"431"), (name, got[:100])
    assert await is_well(gateway)


async def test_memory_is_back_after_thousands_of_bad_requests(gateway: GatewayProcess, behind: Upstream) -> None:
    raws = [framed(f"{AUTH}{framing}\r\n") for framing in FRAMINGS]
    raws += [post(body=b"[" * 100_000, headers=AUTH), get("/" + "a" * 40_000), *NOT_HTTP.values()]
    raws += [post(body={"prompt": PROMPT, "hotswap": {"policy": PROMPT}}, headers=AUTH)]
    raws += [post(headers=f"Authorization: Bearer PLANTED{n}\r\n") for n in range(20)]

    async def round_of_them() -> None:
        for raw in raws:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await gateway.ask(raw)

    await round_of_them()  # what is allocated once
    before = rss(gateway)
    for _ in range(10):
        await asyncio.gather(*(round_of_them() for _ in range(4)))
    assert rss(gateway) - before < MOST_GROWTH
    assert await is_well(gateway)


async def test_prompts_and_keys_are_in_no_log(gateway: GatewayProcess, behind: Upstream) -> None:
    """The output of the process is looked through when it has ended, for requests of any outcome."""
    for headers in (AUTH, "Authorization: Bearer PLANTED-guess\r\n", "X-Api-Key: PLANTED-guess\r\n", ""):
        for body in (
            b'{"prompt": "PLANTED"',
            b'{"prompt": "PLANTED"}',
            b'{"prompt": "PLANTED", "hotswap": {"PLANTED": 1}}',
        ):
            await gateway.ask(post(body=body, headers=headers))
        await gateway.ask(post("/v1/completions?api_key=PLANTED", headers=headers))
        await gateway.ask(get("/healthz?token=PLANTED", headers))
        await gateway.ask(get("/admin/weights?key=PLANTED", headers), admin=True)
        await gateway.ask(get("/PLANTED", headers))
    behind.handler = cut
    assert (await gateway.ask(post(body={"prompt": PROMPT}, headers=AUTH))).status in (502, 503)
