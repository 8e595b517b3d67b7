"""Clients' view while a fleet goes from one release to the next: `hotswap bench upgrade --since REVISION`.

Two hosts on one machine, an etcd, and on each host a peer, a gateway and an instance of the release at REVISION of
this repository; a publisher, which signs. One process after the other is replaced by one of this checkout, under load.
In every state between, versions are swapped in and back and pushed, and a rolling swap is asked for, which either
release may refuse. Then comes what only the new release has: a trial, an announcement of leaving, a second model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import orjson
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from rich.console import Console
from rich.table import Table

from loadtest.hosts.etcd import MISSING, alone, binary
from loadtest.measure.gaps import Window
from loadtest.measure.pairs import HERE as ROOT
from loadtest.measure.pairs import Checkout
from loadtest.measure.run import saying, with_machine
from loadtest.upgrade.bench import (
    CHECKPOINTS,
    CLIENTS,
    FIRST,
    LEAVE_S,
    VLLM_ARGS,
    Load,
    Pod,
    Step,
    gateway_ready,
    instance_ready,
    of_clients,
    show_failures,
    timed,
)
from loadtest.upgrade.bench import failures as failed_requests
from loadtest.upgrade.clients import MODEL
from server.errors import CliError
from server.ports import free_port
from server.up.processes import Child, share_of_cores
from weightsync.control.records import CounterRecord, InstanceRecord, Keys, PastSwapRecord
from weightsync.errors import StoreError
from weightsync.store import SyncStore

HOSTS = 2
SECOND, ALIAS = "second", "either"
TIMEOUT_S, TOO_SOON_S = 60.0, 15.0  # for swaps; for one that the other release may never carry out
DRAIN_S = 25.0
Order = Literal["gateways", "instances"]
ORDERS: Mapping[Order, tuple[str, ...]] = {
    "gateways": ("peer", "gateway", "instance", "publisher"),
    "instances": ("peer", "instance", "gateway", "publisher"),
}


def checked_out(revision: str, directory: Path) -> Checkout:
    """The tree of `revision`, unpacked. Raises CliError."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", f"{revision}^{{commit}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise CliError(f"there is no revision {revision!r} in {ROOT}: {found.stderr.strip()}")
    name = found.stdout.strip()
    root = directory / name
    if not root.exists():
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", name], capture_output=True, check=True).stdout
        unpacked = Path(tempfile.mkdtemp(dir=directory))
        subprocess.run(["tar", "-x", "-C", str(unpacked)], input=archive, check=True)
        unpacked.rename(root)
    return Checkout(name, root)


@dataclass(frozen=True)
class Done:
    """Something that was asked for; `outcome` is empty if it came about. `must`: otherwise the upgrade has failed."""

    what: str
    state: str
    window: Window
    outcome: str = ""
    must: bool = True


class Publishing:
    """The process of the publisher."""

    def __init__(self, release: Checkout, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        command = [sys.executable, str(ROOT / "loadtest/upgrade/publishing.py"), *arguments]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **env},
            )
        self.release = release

    def ask(self, what: str, timeout_s: float) -> dict[str, Any]:
        """Raises CliError when it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, timeout_s, file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            raise CliError(f"the publisher of release {self.release.name} has ended; see its log")
        return dict(orjson.loads(line))

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Site:
    """The store, two hosts, and whatever runs there. Use as a context: all ends with it."""

    def __init__(self, work: Path, checkpoints: Mapping[str, list[Path]]) -> None:
        self.state, self.checkpoints = work / "state", checkpoints
        self._memory = Path(f"/dev/shm/hotswap-upgrade-{os.getpid()}")  # noqa: S108 - arenas, and the data of etcd
        self.store = ""  # once it is open
        self._started: list[Pod] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[Site]:
        """Raises CliError."""
        if (etcd := binary()) is None:
            raise CliError(MISSING)
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.mkdir(parents=True)
        self._memory.mkdir(mode=0o700)
        self._make_keys()
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self._memory, ignore_errors=True)
            self.store, _ = stack.enter_context(alone(etcd, self._memory, "--unsafe-no-fsync"))
            stack.callback(self._end)
            yield self

    def _end(self) -> None:
        for pod in reversed(self._started):
            pod.kill()

    def peer(self, release: Checkout, host: int, name: str) -> Pod:
        port = free_port("127.0.0.1")
        args = ["server.cli", "peer", "--model", MODEL, "--listen", f"127.0.0.1:{port}", "--transport", "tcp"]
        return self._pod(release, name, "peer", host, port, args, lambda port: _answers(port, "/metrics"))

    def gateway(self, release: Checkout, host: int, name: str, *, models: Path | None = None) -> Pod:
        port, admin = free_port("127.0.0.1"), free_port("127.0.0.1")
        args = ["server.gateway", "--port", str(port), "--admin-port", str(admin), "--leave", str(LEAVE_S)]
        args += ["--admin-key-file", str(self.state / "admin.key")]
        args += ["--models", str(models)] if models is not None else ["--model", MODEL]
        return self._pod(release, name, "gateway", host, port, args, gateway_ready)

    def instance(self, release: Checkout, host: int, name: str, *, model: str = MODEL) -> Pod:
        port = free_port("127.0.0.1")
        args = ["server.cli", "instance", "--model", str(self.checkpoints[model][0]), "--name", model]
        args += [
            "--instance-id",
            f"{model}-{host}",
            "--port",
            str(port),
            "--trust",
            str(self.state / "signer.pub"),
            *VLLM_ARGS,
        ]
        return self._pod(release, name, "instance", host, port, args, instance_ready)

    def publisher(self, release: Checkout, name: str, model: str = MODEL) -> Publishing:
        arguments = [self.store, model, *map(str, self.checkpoints[model])]
        return Publishing(release, arguments, self._environment(release, 0), self.state / f"{name}.log")

    def push(self, release: Checkout, version: int) -> str:
        """The tool of an operator, on the second host; what it complained of, if it did."""
        directory = self.checkpoints[MODEL][version % CHECKPOINTS]
        command = [sys.executable, "-m", "weightsync.push", "--store", self.store, "--model", MODEL, str(directory)]
        env = {**os.environ, **self._environment(release, 1)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        return done.stderr.strip().splitlines()[-1] if done.returncode else ""

    def refused_records(self) -> dict[str, int]:
        """How often processes said that a record has a field they do not know, by log."""
        found = {log.stem: log.read_text(errors="replace").count("unknown field") for log in self.state.glob("*.log")}
        return {name: count for name, count in sorted(found.items()) if count}

    def _pod(
        self,
        release: Checkout,
        name: str,
        kind: str,
        host: int,
        port: int,
        args: list[str],
        ready: Callable[[int], bool],
    ) -> Pod:
        child = Child(name, args, self.state / f"{name}.log", self._environment(release, host))
        pod = Pod(name, kind, port, child, ready)
        self._started.append(pod)
        return pod

    def _environment(self, release: Checkout, host: int) -> dict[str, str]:
        return {
            "HOTSWAP_HOST": f"h{host}",
            "HOTSWAP_STORE": self.store,
            "HOTSWAP_ARENA": str(self._memory / f"arena{host}"),
            "HOTSWAP_SIGN_KEY": str(self.state / "signer.key"),
            **share_of_cores(host, HOSTS, VLLM_ARGS, os.environ),
            **release.environment,
        }

    def _make_keys(self) -> None:
        for host in range(HOSTS):
            (self._memory / f"arena{host}").mkdir(mode=0o700)
        key = ed25519.Ed25519PrivateKey.generate()
        private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (self.state / "signer.key").touch(mode=0o600)
        (self.state / "signer.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (self.state / "signer.pub").write_bytes(public)


def _answers(port: int, path: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=3.0).status_code == 200
    return False


@dataclass
class Crossing:
    """From `old` to `new`, process by process."""

    site: Site
    load: Load
    old: Checkout
    new: Checkout
    say: Callable[[str], None]
    publishing: Publishing
    pods: dict[tuple[str, int], Pod] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    state: str = "old"

    def run(self, order: Order) -> float:
        """Returns the seconds it took."""
        started = time.monotonic()
        self.exercise()
        for kind in ORDERS[order]:
            for host in range(HOSTS) if kind != "publisher" else (0,):
                self._replace(kind, host)
                self.state = f"{kind} {host} is new" if kind != "publisher" else "all are new"
                self.exercise()
            if kind == "instance":
                self._restart_new()
        self.use()
        return time.monotonic() - started

    def exercise(self) -> None:
        """A swap, a rollback and a push must come about; a rolling swap may be refused."""
        self.say(f"{self.state}:")
        self._asked("together", TIMEOUT_S)
        self._asked("rollback", TIMEOUT_S)
        self._note("push", lambda: self.site.push(self.publishing.release, _next(self.site.store)))
        self._asked("rolling", TOO_SOON_S, must=self.state == "all are new")

    def use(self) -> None:
        """Features that only the new release has."""
        self.state = "afterwards"
        self._note("trial", self._trial)
        self._note("leaves_at", self._announced)
        self._note("several models", self._several_models)

    def _asked(self, what: str, timeout_s: float, *, must: bool = True) -> None:
        def ask() -> str:
            said = self.publishing.ask(what, timeout_s)
            return f"{said['code']}: {said['error']}" if "error" in said else ""

        self._note(what, ask, must=must)

    def _note(self, what: str, do: Callable[[], str], *, must: bool = True) -> None:
        started = time.monotonic()
        try:
            outcome = do()
        except (StoreError, CliError, subprocess.TimeoutExpired, httpx.HTTPError, ValueError, LookupError) as error:
            outcome = repr(error)
        self.done.append(Done(what, self.state, (started, time.monotonic()), outcome, must))
        self.say(f"  {what}: {outcome or 'done'} ({time.monotonic() - started:.1f} s)")

    def _replace(self, kind: str, host: int) -> None:
        self.say(f"{kind} {host} is replaced")
        started, name = time.monotonic(), f"{kind}-{host}-new"
        ended_s = ready_s = 0.0
        if kind == "publisher":
            self.publishing.end()
            self.publishing = self.site.publisher(self.new, name)
        elif kind == "gateway":
            new = self.site.gateway(self.new, host, name)
            self.load.tell("add", new.name, new.port)
            ready_s = new.wait_ready()
            ended_s = self._retired(kind, host, new)
        else:
            ended_s = self.pods[kind, host].end()
            new = self.site.peer(self.new, host, name) if kind == "peer" else self.site.instance(self.new, host, name)
            self.pods[kind, host] = new
            ready_s = new.wait_ready()
        self.steps.append(Step(f"{kind} {host}", (started, time.monotonic()), round(ended_s, 2), round(ready_s, 2)))

    def _retired(self, kind: str, host: int, new: Pod) -> float:
        old, self.pods[kind, host] = self.pods[kind, host], new
        ended_s = old.end()
        if kind == "gateway":
            self.load.tell("remove", old.name)
        return ended_s

    def _restart_new(self) -> None:
        """A new instance leaves, and so announces when, though old gateways may be there still."""
        self.state = "a new instance leaves"
        self._note("leave and return", lambda: self._replaced_again(0))

    def _replaced_again(self, host: int) -> str:
        self.pods["instance", host].end()
        self.pods["instance", host] = self.site.instance(self.new, host, f"instance-{host}-again{len(self.steps)}")
        self.pods["instance", host].wait_ready()
        return ""

    def _trial(self) -> str:
        """The last rolling swap had a canary, and its probe has passed."""
        with contextlib.closing(SyncStore(self.site.store)) as store:
            found = [PastSwapRecord.from_json(kv.value) for kv in store.list(Keys(MODEL).history)[0]]
        last = max((past for past in found if past.mode == "rolling"), key=lambda past: past.opened_at)
        return "" if (last.outcome, last.probe) == ("done", "passed") else f"the last rolling swap: {last}"

    def _announced(self) -> str:
        """An instance that leaves with a stream under way says until when."""
        keys, host = Keys(MODEL), 1
        key = keys.instance(f"{MODEL}-{host}")
        told, seen = time.time(), None
        pod = self.pods["instance", host]
        pod.tell_to_end()
        with contextlib.closing(SyncStore(self.site.store)) as store:
            while seen is None and (found := store.get(key)) is not None:
                seen = InstanceRecord.from_json(found.value).leaves_at
        self._replaced_again(host)
        if seen is None:
            return "its record went without it; was nothing in flight there?"
        return "" if told <= seen <= told + DRAIN_S + 2.0 else f"announced {seen - told:.1f} s, for {DRAIN_S:g}"

    def _several_models(self) -> str:
        """A second model behind new gateways, by its name and by an alias of both."""
        models = self.site.state / "models.yaml"
        models.write_text(
            f"models: [{{name: {MODEL}}}, {{name: {SECOND}}}]\naliases: {{{ALIAS}: [{SECOND}, {MODEL}]}}\n"
        )
        publisher = self.site.publisher(self.new, "publisher-second", SECOND)
        publisher.ask("first", TIMEOUT_S)
        publisher.end()
        second = self.site.instance(self.new, 0, "instance-second", model=SECOND)
        gateways = [self.site.gateway(self.new, host, f"gateway-{host}-models", models=models) for host in range(HOSTS)]
        second.wait_ready()
        for host, new in enumerate(gateways):
            self.load.tell("add", new.name, new.port)
            new.wait_ready()
            self._retired("gateway", host, new)
        found = {name: _token(gateways[0].port, name) for name in (MODEL, SECOND, ALIAS)}
        ours, theirs = range(FIRST, FIRST + CHECKPOINTS), range(FIRST + CHECKPOINTS, FIRST + 2 * CHECKPOINTS)
        right = found[MODEL] in ours and found[SECOND] in theirs and found[ALIAS] in theirs
        return "" if right else f"the models answer {found}"


def _token(port: int, model: str) -> int:
    """The token that the model answers."""
    body = {"model": model, "prompt_token_ids": [5, 6], "max_tokens": 1, "temperature": 0, "stream": False}
    answer = httpx.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=60.0)
    answer.raise_for_status()
    return int(answer.json()["choices"][0]["token_ids"][0])


def _next(store: str) -> int:
    """The number of the next version."""
    with contextlib.closing(SyncStore(store)) as opened:
        found = opened.get(Keys(MODEL).counter)
    return CounterRecord.from_json(found.value).version + 1 if found is not None else 1


def run(
    json: Path | None, *, since: str, order: Order = "gateways", clients: dict[str, int] | None = None
) -> dict[str, Any]:
    """From that revision to this checkout, under load. Prints the outcome, writes it to `json`; returns it."""
    work, clients, console = Path("runs/upgrade").resolve(), clients or CLIENTS, Console()
    work.mkdir(parents=True, exist_ok=True)
    old, new = checked_out(since, work), Checkout("new", ROOT)
    made = saying(work, range(FIRST, FIRST + 2 * CHECKPOINTS))
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(Site(work, {MODEL: made[:CHECKPOINTS], SECOND: made[CHECKPOINTS:]}).open())
        load = Load(clients)
        stack.callback(load.kill)
        crossing = Crossing(site, load, old, new, console.print, site.publisher(old, "publisher-0"))
        stack.callback(lambda: crossing.publishing.end())
        for host in range(HOSTS):
            crossing.pods["peer", host] = site.peer(old, host, f"peer-{host}")
            crossing.pods["gateway", host] = gateway = site.gateway(old, host, f"gateway-{host}")
            crossing.pods["instance", host] = site.instance(old, host, f"instance-{host}")
            load.tell("add", gateway.name, gateway.port)
        if "error" in (said := crossing.publishing.ask("first", TIMEOUT_S)):
            raise CliError(f"no first version: {said['error']}")
        for pod in crossing.pods.values():
            pod.wait_ready()
        load.wait_running()
        began = time.monotonic()
        seconds = crossing.run(order)
        seen = load.stop()
        refused = site.refused_records()
    report = _summed_up(seen, crossing, began) | {"seconds": round(seconds, 1), "order": order, "since": old.name}
    report = with_machine(report | {"records refused": refused, "clients": clients}, json)
    show(report, console)
    return report


def _summed_up(seen: Mapping[str, Any], crossing: Crossing, began: float) -> dict[str, Any]:
    """The report, of what the clients saw and what was done; times are seconds since `began`."""
    return of_clients(seen, began) | {
        "versions": len(seen["versions"]),
        "examples": seen["tally"]["examples"],
        "steps": [timed(step, began) for step in crossing.steps],
        "done": [timed(done, began) for done in crossing.done],
    }


def failures(report: Mapping[str, Any]) -> int:
    """Requests that failed, tokens and labels that are wrong, and what did not come about although it must."""
    missing = sum(bool(done["must"] and done["outcome"]) for done in report["done"])
    return failed_requests(report) + missing


def show(report: Mapping[str, Any], console: Console) -> None:
    checked = report["checked"]
    table = Table("", "", title=f"from {report['since']} to this release under load, {report['order']} first")
    table.add_row("seconds", f"{report['seconds']:g}")
    table.add_row("requests; failed", f"{report['requests']:,}; {report['failed']}")
    table.add_row("tokens checked", f"{checked['tokens']:,}")
    table.add_row("of other weights than their label; wrong labels", f"{checked['wrong']}; {checked['mislabelled']}")
    table.add_row(
        "answers over a swap; streams that went on elsewhere", f"{checked['crossed']}; {report['continued_elsewhere']}"
    )
    table.add_row("records refused, by process", str(report["records refused"] or "none"))
    console.print(table)
    table = Table("state", "what", "seconds", "outcome")
    for done in report["done"]:
        start, end = done["window"]
        table.add_row(done["state"], done["what"], f"{end - start:.1f}", done["outcome"][:120] or "done")
    console.print(table)
    show_failures(report, console)
