"""Who is measured: this gateway, bare and with everything on, and the routers on PyPI, each as its manual starts it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.gateway_bench.loads import KEY, MODEL, WHOLE
from loadtest.gateway_bench.processes import Cores, free_port, pinned, running
from server.cli.errors import CliError
from server.gateway.access.records import INFER, KEYS_PREFIX, KeyRecord, digest_of
from server.key_limits import KeyLimits
from weightsync.control.records import InstanceRecord, Keys
from weightsync.store import SyncStore

PEERS = Path("runs/peers")
INSTALL_TIMEOUT_S = 600.0
START_TIMEOUT_S = 90.0


class CannotStart(CliError):
    """A contender did not install, or does not answer."""


@dataclass(frozen=True)
class Place:
    """Where a contender listens, what it forwards to, and a directory of its own."""

    port: int
    upstream: int
    directory: Path


@dataclass(frozen=True)
class Contender:
    """One of those that are measured. `requirement`: what is installed in its own virtual environment."""

    name: str
    command: Callable[[Place], list[str]]
    requirement: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Running:
    """A contender that answers. `pid` is None for the upstream itself, asked directly."""

    name: str
    port: int
    pid: int | None
    version: str


def hotswap(place: Place, *options: str) -> list[str]:
    """This gateway in front of the upstream, with a store of its own."""
    url = _store(place)
    with contextlib.closing(SyncStore(url)) as store:
        address = f"http://127.0.0.1:{place.upstream}"
        record = InstanceRecord("i0", address, "SERVING", active_version=1, active_epoch=1)
        store.put(Keys(MODEL).instance("i0"), record.to_json())
    command = [sys.executable, "-m", "server.gateway", "--store", url, "--model", MODEL, "--port", str(place.port)]
    return [*command, "--log-level", "warning", *options]


def hotswap_full(place: Place) -> list[str]:
    """With authentication and limits on: a key whose limits are asked at every request and never met."""
    limits = KeyLimits(requests_per_min=10**9, tokens_per_min=10**12, concurrency=10**6)
    record = KeyRecord("bench", "bench", digest_of(KEY), (INFER,), time.time(), limits=limits)
    command = hotswap(place)
    with contextlib.closing(SyncStore(_store(place))) as store:
        store.put(KEYS_PREFIX + record.id, record.to_json())
    return command


def _store(place: Place) -> str:
    return f"sqlite://{place.directory}/store.db"


def _vllm_router(policy: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        options = ["--policy", policy] if policy else []
        options += ["--worker-urls", f"http://127.0.0.1:{place.upstream}", "--port", str(place.port)]
        options += ["--host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "warning"]
        return [_program("vllm-router", "vllm-router"), *options, "--worker-startup-check-interval", "1"]

    return command


def _smg(place: Place) -> list[str]:
    options = ["--worker-urls", f"http://127.0.0.1:{place.upstream}", "--port", str(place.port), "--host", "127.0.0.1"]
    options += ["--policy", "round_robin", "--backend", "vllm", "--disable-tokenizer-autoload", "--log-level", "warn"]
    options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    return [_program("smg", "smg"), "launch", *options, "--worker-startup-check-interval", "1"]


def _litellm(place: Place) -> list[str]:
    config = place.directory / "litellm.yaml"
    model = f"{{model: openai/{MODEL}, api_base: 'http://127.0.0.1:{place.upstream}/v1', api_key: none}}"
    config.write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params: {model}\ngeneral_settings: {{master_key: {KEY}}}\n"
    )
    options = ["--config", str(config), "--host", "127.0.0.1", "--port", str(place.port)]
    return [_program("litellm", "litellm"), *options, "--telemetry", "False"]


def _splice(place: Place) -> list[str]:
    return [sys.executable, "-m", "loadtest.gateway_bench.splice", str(place.port), str(place.upstream)]


_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "DISABLE_ADMIN_UI": "True"}
FULL = "hotswap, everything on"
ROUTER = "vllm-router, round robin"
CONTENDERS = (
    Contender("hotswap, open", hotswap),
    Contender(FULL, hotswap_full),
    Contender(ROUTER, _vllm_router("round_robin"), "vllm-router==0.1.17"),
    Contender("vllm-router, default policy", _vllm_router(""), "vllm-router==0.1.17"),
    Contender("smg, round robin", _smg, "smg==1.13.0"),
    Contender("LiteLLM", _litellm, "litellm[proxy]==1.100.5", _OFFLINE),
    Contender("bytes copied on uvloop, no HTTP", _splice),
)


@contextlib.contextmanager
def started(contender: Contender, upstream: int, cores: Cores) -> Iterator[Running]:
    """The contender, when it has answered. Raises CannotStart."""
    if contender.requirement is not None:
        _install(contender.requirement)
    with tempfile.TemporaryDirectory() as directory:
        place = Place(free_port(), upstream, Path(directory))
        log = place.directory / "log"
        with running(pinned(cores.proxy, contender.command(place)), log, contender.environment) as process:
            _wait(contender.name, place.port, process, log)
            yield Running(contender.name, place.port, process.pid, contender.requirement or "this checkout")


def _wait(name: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise CannotStart(f"{name} does not answer; the end of its log:\n{log.read_text(errors='replace')[-1500:]}")
        time.sleep(0.2)


def answers(port: int) -> bool:
    """Whether a chat completion is answered there."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    ask = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", WHOLE, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(ask, timeout=10) as answer:
            return bool(answer.status == 200 and answer.read())
    except (urllib.error.URLError, OSError):
        return False


def _program(environment: str, name: str) -> str:
    return str((PEERS / environment / "bin" / name).resolve())


def _install(requirement: str) -> None:
    """A virtual environment of its own for `requirement`, once: a router's pins would break this project's."""
    name = requirement.partition("==")[0].partition("[")[0]
    directory, done = PEERS / name, PEERS / name / f"{requirement}.installed"
    if done.exists():
        return
    steps = ([sys.executable, "-m", "venv", str(directory)], [str(directory / "bin/pip"), "install", "-q", requirement])
    for step in steps:
        result = subprocess.run(
            step, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=os.environ | {"PIP_NO_INPUT": "1"}
        )
        if result.returncode != 0:
            raise CannotStart(f"{requirement} does not install: {result.stderr[-500:]}")
    done.touch()
