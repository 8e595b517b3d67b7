"""The gateway as users run it: a process, its options, its keys, its memory, and the real OpenAI SDK against it."""

from __future__ import annotations

import dataclasses
import hashlib
import signal
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from server.errors import ConfigError
from server.gateway import GatewayConfig, Limits, UpstreamSettings
from server.gateway.__main__ import configured, main
from server.gateway.access.key_sources import load_keys
from server.gateway.access.records import ADMIN, INFER
from tests.cluster_tls import Authority
from tests.server.gateway.harness import RunningGateway, gateway_process, private, running_gateway
from tests.server.gateway.upstream import answering, streaming

# Far too large, or needed by few gateways and imported when they are.
FORBIDDEN = ("torch", "vllm", "transformers", "megatron", "numpy", "httpx", "rich", "grpc", "opentelemetry")


def test_nothing_large_is_imported() -> None:
    probe = (
        "import sys, server.gateway.__main__, server.gateway.main, server.gateway.app, server.gateway.connection\n"
        f"print([m for m in {FORBIDDEN!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_check_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOTSWAP_ADMIN_KEY", raising=False)
    key, store = tmp_path / "keys" / "admin.key", f"sqlite://{tmp_path / 'store.db'}"
    main(["--check", "--model", "m", "--store", store, "--admin-key-file", str(key)])
    assert "can be used" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    key.parent.mkdir()
    key.write_text("short")
    with pytest.raises(SystemExit):
        main(["--check", "--model", "m", "--store", store, "--admin-key-file", str(key)])


# errors, as the SDK shows them


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    keys = private(tmp_path / "api.keys", "the-key-of-the-sdk-tests\n")
    with running_gateway(tmp_path, api_key_file=keys, upstream=UpstreamSettings(hold_s=0.0)) as g:
        yield g


@pytest.fixture
async def sdk(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    key = "the-key-of-the-sdk-tests"
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
        yield client


async def complete(client: openai.AsyncOpenAI, **options: object) -> object:
    return await client.completions.create(model="toy", prompt="x", **options)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("ask", "error", "status", "code", "says"),
    [
        (complete, openai.InternalServerError, 503, "no_instance", "hotswap instance"),
        (lambda sdk: complete(sdk.copy(api_key="w" * 20)), openai.AuthenticationError, 401, "invalid_api_key", "key"),
        (lambda sdk: sdk.files.list(), openai.NotFoundError, 404, "not_found", "/v1/files"),
    ],
)
async def test_sdk_raises_its_own_errors(
    sdk: openai.AsyncOpenAI, ask: Any, error: type[openai.APIStatusError], status: int, code: str, says: str
) -> None:
    with pytest.raises(error) as caught:
        await ask(sdk)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("key", "error"),
    [("the-key-of-the-sdk-tests", openai.InternalServerError), ("w" * 20, openai.AuthenticationError)],
)
async def test_the_sdk_for_azure_sends_its_key_in_a_header_of_its_own(
    gateway: RunningGateway, key: str, error: type[openai.APIStatusError]
) -> None:
    url = f"{gateway.url}/v1"
    async with openai.AsyncAzureOpenAI(base_url=url, api_key=key, api_version="preview", max_retries=0) as azure:
        with pytest.raises(error):  # with the right key there is no instance
            await azure.responses.create(model="toy", input="x")


async def test_sdk_sees_the_instances_own_errors_unchanged(gateway: RunningGateway, sdk: openai.AsyncOpenAI) -> None:
    body = b'{"error":{"message":"no such model","type":"NotFoundError","param":"model","code":404}}'
    async with gateway.instance(answering(body, b"404 Not Found")):
        with pytest.raises(openai.NotFoundError) as caught:
            await complete(sdk)
    assert caught.value.body == orjson.loads(body)["error"]


async def test_sdk_sees_a_stream_break(gateway: RunningGateway, sdk: openai.AsyncOpenAI) -> None:
    choice = b'{"index":0,"text":"one","finish_reason":null,"logprobs":null}'
    event = b'data: {"id":"c","object":"text_completion","created":1,"model":"toy","choices":[%b]}\n\n' % choice

    async def read() -> None:
        async for chunk in await complete(sdk, stream=True):  # type: ignore[attr-defined]
            texts.append(chunk.choices[0].text)  # noqa: PERF401 - what came before the fault counts

    texts: list[str] = []
    async with gateway.instance(streaming(event, cut=True)):
        with pytest.raises(openai.APIError) as caught:
            await read()
    assert texts == ["one"]
    assert "mid-answer" in caught.value.message or "broke" in caught.value.message


# the command


def test_a_generated_admin_key_works_and_is_private(tmp_path: Path) -> None:
    with gateway_process(tmp_path, key="") as running:
        path = tmp_path / "admin.key"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        key = path.read_text().strip()
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.get(f"{running.admin_url}/admin/weights", headers=headers, timeout=60)
        assert answer.json() == {"model": "toy", "active": None, "versions": []}
    assert running.process.returncode in (0, -signal.SIGTERM)
    assert key not in running.log.read_text()


def presented(gateway: RunningGateway) -> bytes:
    """The certificate a client gets now."""
    pem = ssl.get_server_certificate((gateway.host, gateway.port), timeout=60)
    return ssl.PEM_cert_to_DER_cert(pem)


def test_a_renewed_certificate_needs_no_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.tls.INTERVAL_S", 0.0)
    authority = Authority(tmp_path / "authority")
    cert, key = authority.issue("now")
    with running_gateway(tmp_path, ssl_certfile=cert, ssl_keyfile=key) as gateway:
        first = presented(gateway)
        url = f"https://{gateway.host}:{gateway.port}"
        with httpx.Client(verify=False, base_url=url, timeout=60) as client:
            assert client.get("/healthz").status_code == 200
            answer = client.post("/v1/completions", content=b"{")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
            new_cert, new_key = authority.issue("next")
            new_cert.rename(cert)  # the key has not come yet
            assert presented(gateway) == first
            new_key.rename(key)
            assert presented(gateway) == ssl.PEM_cert_to_DER_cert(cert.read_text()) != first
            cert.unlink()
            assert presented(gateway) != first
            assert client.get("/healthz").status_code == 200  # over the connection of before


def test_every_limit_is_an_option() -> None:
    numbers = {
        "max_body": 1, "max_head": 2, "max_headers": 3, "request_timeout_s": 4.0, "keep_alive_s": 5.0,
        "stalled_client_s": 6.0, "max_connections": 7, "max_buffered": 8,
    }  # fmt: skip
    assert numbers.keys() == {f.name for f in dataclasses.fields(Limits)}
    options = "--max-body 1 --max-head 2 --max-headers 3 --request-timeout 4 --keep-alive 5 --write-timeout 6 "
    options += "--max-connections 7 --max-buffered 8 --require-key --store sqlite:///s.db --model toy "
    options += "--ssl-certfile c.pem --ssl-keyfile k.pem"
    config = configured(options.split())
    assert dataclasses.asdict(config.limits) == numbers
    assert config.require_key
    assert (config.ssl_certfile, config.ssl_keyfile) == (Path("c.pem"), Path("k.pem"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "toy"], "--store"),
        (["--model", "toy", "--store", "sqlite:///proc/nowhere/store.db"], "/proc/nowhere"),
        (["--model", "toy", "--store", "redis://x"], "redis"),
        (["--model", "", "--store", "sqlite:///tmp/x.db"], "--model"),
        (["--model", "toy", "--store", "sqlite:///tmp/x.db", "--port", "70000"], "--port"),
        (["--model", "toy", "--store", "sqlite:///tmp/x.db", "--admin-port", "70000"], "--admin-port"),
        (["--model", "toy", "--store", "sqlite:///tmp/x.db", "--admin-port", "8000"], "--admin-port"),
        (["--model", "toy", "--store", "sqlite:///tmp/x.db", "--ssl-certfile", "/x"], "--ssl-keyfile"),
        (["--model", "toy", "--store", "sqlite:///tmp/x.db", "--max-headers", "0"], "--max-headers"),
        (["--model", "toy", "--store", "sqlite:///tmp/x.db", "--write-timeout", "-1"], "--write-timeout"),
        (["--model", "toy", "--store", "sqlite:///tmp/x.db", "--keep-alive", "nan"], "--keep-alive"),
        (["--model", "toy", "--store", "sqlite:///tmp/x.db", "--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
    ],
)
def test_wrong_options_end_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], says: str
) -> None:
    monkeypatch.delenv("HOTSWAP_STORE", raising=False)
    with pytest.raises(SystemExit) as ended:
        main([option.replace("/tmp/x.db", f"{tmp_path}/x.db") for option in options])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("hotswap gateway: ")
    assert says in line


# keys


def config(tmp_path: Path, **fields: object) -> GatewayConfig:
    return GatewayConfig(store=f"sqlite://{tmp_path}/store.db", model="toy", **fields)  # type: ignore[arg-type]


def test_keys_may_be_given_hashed(tmp_path: Path) -> None:
    hashed = [f"sha256:{hashlib.sha256(key).hexdigest()}" for key in (b"the admin's key", b"the client's key")]
    file = private(tmp_path / "keys", f"{hashed[1]} client\n\n# none\n")
    ring = load_keys(config(tmp_path, admin_key=hashed[0], api_key_file=file))
    assert ring.authorize(b"the admin's key", ADMIN).name == "admin"
    assert ring.authorize(b"the client's key", INFER).name == "client"


def test_a_generated_key_is_kept(tmp_path: Path) -> None:
    load_keys(config(tmp_path))
    key = (tmp_path / "admin.key").read_text().strip()
    assert load_keys(config(tmp_path)).authorize(key.encode(), ADMIN).name == "admin"


@pytest.mark.parametrize(
    ("name", "text", "mode", "says"),
    [
        ("api.keys", "short\n", 0o600, "16 characters"),
        ("api.keys", "", 0o600, "no key"),
        ("api.keys", "# only a comment\n", 0o600, "no key"),
        ("api.keys", "long-enough-to-be-a-key\n", 0o644, "chmod 600"),
        ("admin.key", "", 0o600, "16 characters"),
        ("admin.key", "short", 0o600, "16 characters"),
        ("admin.key", "long-enough-to-be-a-key", 0o640, "chmod 600"),
    ],
)
def test_unfit_key_files_are_refused(tmp_path: Path, name: str, text: str, mode: int, says: str) -> None:
    file = private(tmp_path / name, text)
    file.chmod(mode)
    given: dict[str, object] = {} if name == "admin.key" else {"admin_key": "0123456789abcdef", "api_key_file": file}
    with pytest.raises(ConfigError, match=says):
        load_keys(config(tmp_path, **given))


def test_a_short_admin_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="16 characters"):
        load_keys(config(tmp_path, admin_key="admin"))
