"""The gateway as users run it: a process, its options, its keys, its memory, and the real OpenAI SDK against it."""

from __future__ import annotations

import dataclasses
import datetime
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
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from loadtest.gateway.contenders import CONTENDERS, Cores, compiled, running, started
from server.errors import ConfigError
from server.gateway import GatewayConfig, Limits, UpstreamSettings
from server.gateway.__main__ import configured, main
from server.gateway.access.key_sources import load_keys
from server.gateway.access.records import ADMIN, INFER
from server.ports import free_port
from tests.server.gateway.harness import RunningGateway, gateway_process, running_gateway
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


# one process for these: the benchmark's upstream behind it


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    upstream = running([str(compiled("upstream")), str(port)], tmp_path_factory.mktemp("upstream") / "log")
    with upstream, started(CONTENDERS[0], port, Cores.available()) as gateway:
        yield f"http://127.0.0.1:{gateway.port}"


def test_the_sdk_streams_and_lists(base_url: str) -> None:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="EMPTY", max_retries=0)
    assert [model.id for model in client.models.list()] == ["mock"]
    messages = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model="mock", messages=messages)  # type: ignore[arg-type]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len((whole.choices[0].message.content or "").split()) == 200
    stream = client.chat.completions.create(model="mock", messages=messages, max_tokens=5, stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == " token" * 5


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


async def ask_with_a_wrong_key(client: openai.AsyncOpenAI) -> object:
    return await complete(client.with_options(api_key="wrong-wrong-wrong-wrong"))


async def list_files(client: openai.AsyncOpenAI) -> object:
    return await client.files.list()


@pytest.mark.parametrize(
    ("ask", "error", "status", "code", "says"),
    [
        (complete, openai.InternalServerError, 503, "no_instance", "hotswap instance"),
        (ask_with_a_wrong_key, openai.AuthenticationError, 401, "invalid_api_key", "key"),
        (list_files, openai.NotFoundError, 404, "not_found", "/v1/files"),
    ],
)
async def test_sdk_raises_its_own_errors(
    sdk: openai.AsyncOpenAI, ask: Any, error: type[openai.APIStatusError], status: int, code: str, says: str
) -> None:
    with pytest.raises(error) as caught:
        await ask(sdk)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert says in caught.value.message


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
        answer = httpx.get(f"{running.admin_url}/admin/weights", headers={"authorization": f"Bearer {key}"})
        assert answer.json() == {"model": "toy", "active": None, "versions": []}
    assert running.process.returncode in (0, -signal.SIGTERM)
    assert key not in running.log.read_text()


def self_signed(directory: Path) -> tuple[Path, Path]:
    """A new certificate and its key, in `directory`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    cert = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    valid = cert.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    signed = valid.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private_form = serialization.PrivateFormat.PKCS8
    (directory / "c.pem").write_bytes(signed.public_bytes(pem))
    (directory / "k.pem").write_bytes(key.private_bytes(pem, private_form, serialization.NoEncryption()))
    return directory / "c.pem", directory / "k.pem"


def presented(gateway: RunningGateway) -> bytes:
    """The certificate a client gets now."""
    pem = ssl.get_server_certificate((gateway.host, gateway.port), timeout=10)
    return ssl.PEM_cert_to_DER_cert(pem)


def test_a_renewed_certificate_needs_no_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.tls.INTERVAL_S", 0.0)
    cert, key = self_signed(tmp_path)
    with running_gateway(tmp_path, ssl_certfile=cert, ssl_keyfile=key) as gateway:
        first = presented(gateway)
        url = f"https://{gateway.host}:{gateway.port}"
        with httpx.Client(verify=False, base_url=url) as client:
            assert client.get("/healthz").status_code == 200
            answer = client.post("/v1/completions", content=b"{")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
            (tmp_path / "next").mkdir()
            new_cert, new_key = self_signed(tmp_path / "next")
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


def private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


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
    ("text", "mode", "says"),
    [
        ("short\n", 0o600, "16 characters"),
        ("", 0o600, "no key"),
        ("# only a comment\n", 0o600, "no key"),
        ("long-enough-to-be-a-key\n", 0o644, "chmod 600"),
    ],
)
def test_unfit_key_files_are_refused(tmp_path: Path, text: str, mode: int, says: str) -> None:
    file = private(tmp_path / "keys", text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        load_keys(config(tmp_path, admin_key="0123456789abcdef", api_key_file=file))


@pytest.mark.parametrize(("text", "mode"), [("", 0o600), ("short", 0o600), ("long-enough-to-be-a-key", 0o640)])
def test_unfit_admin_key_files_are_refused(tmp_path: Path, text: str, mode: int) -> None:
    file = private(tmp_path / "admin.key", text)
    file.chmod(mode)
    with pytest.raises(ConfigError):
        load_keys(config(tmp_path))


def test_a_short_admin_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="16 characters"):
        load_keys(config(tmp_path, admin_key="admin"))
