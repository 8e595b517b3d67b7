"""The contenders, their loads and their cores: this gateway, bare and in full, and the routers on PyPI."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from server.errors import CliError
from server.gateway.access.records import INFER, KEYS_PREFIX, KeyRecord, digest_of
from server.key_limits import KeyLimits
from server.ports import free_port
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, ShareRecord, SplitRecord
from weightsync.store import SyncStore

MODEL = "mock"
KEY = "sk-bench-4c1f9a77e2d05b36"
PACE_MS = 20
CHUNKS = 50


def body(*, stream: bool = False, size: int = 1000, **parameters: object) -> bytes:
    """A chat completion with a prompt of about `size` bytes."""
    sentence = "Summarise the following passage in detail. "
    content = sentence * max(1, size // len(sentence))
    messages = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": content}]
    ask = {"model": MODEL, "messages": messages, "temperature": 0.7, "stream": stream}
    return orjson.dumps({"max_tokens": 200} | ask | parameters)


@dataclass(frozen=True)
class Load:
    """One way of asking. Times in seconds; `stagger_ms`: over which connections begin."""

    name: str
    body: bytes
    clients: int
    seconds: float
    warm_s: float = 0.3
    stagger_ms: float = 0.0


WHOLE = body()
MANY = Load("many", WHOLE, clients=32, seconds=1.5)
ONE = Load("one", WHOLE, clients=1, seconds=1.2)
# Streams of a second that begin spread over a second: at every moment as many end and begin.
PACED = Load(
    "paced",
    body(stream=True, max_tokens=CHUNKS, seed=PACE_MS),
    clients=256,
    seconds=2.0,
    warm_s=1.2,
    stagger_ms=CHUNKS * PACE_MS,
)
LARGE = Load("large", body(size=220_000), clients=32, seconds=1.2)
LOADS = (MANY, ONE, PACED, LARGE)

STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Cores:
    """The core of each part. With two cores, client and upstream share one; with one, all do."""

    proxy: int
    client: int
    upstream: int

    @classmethod
    def available(cls) -> Cores:
        cores = sorted(os.sched_getaffinity(0))
        return cls(proxy=cores[-1], client=cores[0], upstream=cores[1] if len(cores) > 2 else cores[0])


def pinned(core: int, command: Sequence[str]) -> list[str]:
    """`command`, to be run on `core` alone, where there is a `taskset` to say so."""
    return ["taskset", "-c", str(core), *command] if shutil.which("taskset") else list(command)


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, ended with all its children."""
    inherited = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=inherited | dict(environment or {}),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
                if sign is signal.SIGTERM and not tree(process.pid)[1:]:
                    break


def tree(pid: int) -> list[int]:
    """`pid` and all that descend from it."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                found += tree(int(child))
    return found


def cpu_s(pid: int) -> float:
    """Seconds of CPU that the living threads of `pid` and its children have used (the scheduler's nanoseconds)."""
    used = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{process}/task"):
                with contextlib.suppress(OSError):
                    used += int(Path(f"/proc/{process}/task/{task}/schedstat").read_text().split()[0])
    return used / 1e9


def rss_mb(pid: int) -> float:
    """Resident memory of `pid` and its children, MiB."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):
            match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
            total += int(match[1]) if match else 0
    return total / 1024


def machine_cpu_s() -> tuple[float, float]:
    """Seconds of CPU the machine has been busy for, and that its host has taken away (steal), since it started."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks[:8]
    hertz = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / hertz, steal / hertz


SOURCES = Path(__file__).parent / "native"
BUILD = Path("runs/native")
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")


class CannotBuild(CliError):
    """There is no C compiler, or it refused."""


def compiled(name: str, build: Path = BUILD) -> Path:
    """The program of `native/NAME.c`, compiled if it has not been in its present form. Raises CannotBuild."""
    source = SOURCES / f"{name}.c"
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for file in (source, SOURCES / "http.h"):
        digest.update(file.read_bytes())
    program = build / f"{name}-{digest.hexdigest()[:16]}"
    if not program.exists():
        _compile(source, program)
    return program.resolve()


def _compile(source: Path, program: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CannotBuild("There is no C compiler: install one (`apt-get install gcc libc6-dev`), then run this again.")
    program.parent.mkdir(parents=True, exist_ok=True)
    unfinished = program.with_name(f"{program.name}.{os.getpid()}")
    done = subprocess.run([compiler, *FLAGS, str(source), "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotBuild(f"{source} does not compile with {compiler}:\n{done.stderr[-2000:]}")
    unfinished.rename(program)


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


def hotswap(place: Place, versions: Sequence[int] = (1,)) -> list[str]:
    """This gateway in front of the upstream, with a store of its own, and an instance for each of `versions`."""
    url = _store(place)
    with contextlib.closing(SyncStore(url)) as store:
        for number, version in enumerate(versions):
            address = f"http://127.0.0.1:{place.upstream}"
            record = InstanceRecord(f"i{number}", address, "SERVING", active_version=version, active_epoch=1)
            store.put(Keys(MODEL).instance(record.id), record.to_json())
    command = [sys.executable, "-m", "server.gateway", "--store", url, "--model", MODEL, "--port", str(place.port)]
    return [*command, "--log-level", "warning"]


def hotswap_full(place: Place, versions: Sequence[int] = (1,)) -> list[str]:
    """With authentication and limits on: a key whose limits are asked at every request and never met."""
    limits = KeyLimits(requests_per_min=10**9, tokens_per_min=10**12, concurrency=10**6)
    record = KeyRecord("bench", "bench", digest_of(KEY), (INFER,), time.time(), limits=limits)
    command = hotswap(place, versions)
    with contextlib.closing(SyncStore(_store(place))) as store:
        store.put(KEYS_PREFIX + record.id, record.to_json())
    return command


def hotswap_whole(place: Place) -> list[str]:
    """`hotswap_full` in front of two instances of one version."""
    command = hotswap_full(place, (1, 1))
    _commit(place, None)
    return command


def hotswap_split(place: Place) -> list[str]:
    """`hotswap_full` in front of two instances, whose versions share the traffic half and half."""
    command = hotswap_full(place, (1, 2))
    _commit(place, SplitRecord((ShareRecord(2, 50.0, ("i1",)),)))
    return command


def _commit(place: Place, split: SplitRecord | None) -> None:
    record = ActiveRecord(1, 1, None, "bench", time.time(), split=split)
    with contextlib.closing(SyncStore(_store(place))) as store:
        store.put(Keys(MODEL).active, record.to_json())


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
    return [sys.executable, "-m", "loadtest.gateway.splice", str(place.port), str(place.upstream)]


_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "DISABLE_ADMIN_UI": "True"}
FULL = "hotswap, everything on"
ROUTER = "vllm-router, round robin"
COPYING = "bytes copied on uvloop, no HTTP"
CONTENDERS = (
    Contender("hotswap, open", hotswap),
    Contender(FULL, hotswap_full),
    Contender(ROUTER, _vllm_router("round_robin"), "vllm-router==0.1.17"),
    Contender("vllm-router, default policy", _vllm_router(""), "vllm-router==0.1.17"),
    Contender("smg, round robin", _smg, "smg==1.13.0"),
    Contender("LiteLLM", _litellm, "litellm[proxy]==1.100.5", _OFFLINE),
    Contender(COPYING, _splice),
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
