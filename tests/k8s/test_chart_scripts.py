"""The small programs of the chart, against real servers, a real etcd, a real coordinator and real processes."""

from __future__ import annotations

import contextlib
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from server.instance import sidecar
from tests.cluster_tls import Authority
from tests.coordinating import coordinating
from tests.k8s.helm import CHART, SETS, arguments, release, rendered
from tests.k8s.kubelet import Kubelet
from tests.waiting import wait_until
from tests.weightsync.tensors import model, save_safetensors
from weightsync import Publisher, open_store
from weightsync.control.records import ActiveRecord, Keys
from weightsync.errors import StoreRefused
from weightsync.persist import __main__ as persister
from weightsync.store import SyncStore
from weightsync.tls import ClusterTls

FILES = CHART / "files"


class Instance:
    """An instance as a probe sees it: /health's status, and the version among its metrics."""

    def __init__(self) -> None:
        self.status, self.version = 200, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        registry = CollectorRegistry()
        metric = sidecar.ACTIVE_VERSION
        Gauge(metric._name, metric._documentation, registry=registry).set(self.version)
        body = generate_latest(registry) if scope["path"] == "/metrics" else b"{}"
        status = 200 if scope["path"] == "/metrics" else self.status
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Authority(tmp_path_factory.mktemp("authority")).mount(tmp_path_factory.mktemp("member"))


@pytest.fixture
def instance(certificates: Path) -> Iterator[Instance]:
    """It answers members alone, as behind the chart's options."""
    app = Instance()
    tls = ClusterTls(certificates)
    config = uvicorn.Config(app, log_config=None, lifespan="off", ssl_context_factory=lambda *_: tls.server_context())
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([app.listener],), daemon=True)
    thread.start()
    yield app
    server.should_exit = True
    thread.join(30)


def probe(what: str, port: int, certificates: Path | None, *at: str, **env: str) -> tuple[int, str]:
    """The command of the manifest's probe."""
    container = release("minimal").pod("rollout").container("instance")
    python, isolated, script, _, _, path = container["livenessProbe"]["exec"]["command"]
    assert (python, isolated) == ("python", "-I")
    env |= {"HOTSWAP_CLUSTER_TLS": str(certificates)} if certificates is not None else {}
    command = [sys.executable, isolated, str(FILES / Path(script).name), what, str(port), path, *at]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)
    return done.returncode, done.stderr.strip()


def test_probes_mean_what_they_say(instance: Instance, certificates: Path) -> None:
    assert probe("started", instance.port, certificates) == (0, "")
    assert probe("alive", instance.port, certificates) == (0, "")
    assert probe("ready", instance.port, certificates) == (1, "it does not run a committed version yet")
    instance.version = 12
    assert probe("ready", instance.port, certificates) == (0, "")
    instance.status = 503  # vLLM's, once its engine has died
    for what in ("started", "alive", "ready"):
        assert probe(what, instance.port, certificates) == (1, "/health answers 503")


def test_a_follower_is_ready_with_its_leader(instance: Instance, certificates: Path) -> None:
    follower = list(release("leaderworkerset").pods())[-1].container("follower")
    *_, script, what, port, path, variable = follower["readinessProbe"]["exec"]["command"]
    assert (Path(script).name, what, port, path) == ("probe.py", "ready", "8001", "/health")
    addresses = {"POD_IP": "127.0.0.9", variable: "localhost"}  # nothing listens at its own
    assert variable == "LWS_LEADER_ADDRESS"
    assert probe(what, instance.port, certificates, variable, **addresses)[0] == 1
    instance.version = 12
    assert probe(what, instance.port, certificates, variable, **addresses) == (0, "")
    assert probe(what, instance.port, certificates, **addresses) == (1, "it does not listen")


def test_one_that_sleeps_does_not_listen_and_lives(certificates: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert probe("alive", port, certificates) == (0, "")
    assert probe("started", port, certificates) == (1, "it does not listen")
    assert probe("ready", port, certificates) == (1, "it does not listen")


def test_strangers_are_not_answered(instance: Instance, tmp_path: Path) -> None:
    status, said = probe("alive", instance.port, None)
    assert (status, said.startswith("it does not answer")) == (1, True)
    other = Authority(tmp_path / "other").mount(tmp_path / "stranger")
    status, said = probe("alive", instance.port, other)
    assert (status, "CERTIFICATE" in said.upper()) == (1, True)


@contextlib.contextmanager
def once(*command: str) -> Iterator[subprocess.Popen[str]]:
    wrapper = [sys.executable, str(FILES / "run_once.py"), *command]
    with subprocess.Popen(wrapper, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_has_succeeded_is_not_started_again_and_what_fails_ends_with_its_status() -> None:
    with once("true") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "done; waiting to be stopped\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    with once("sh", "-c", "exit 2") as process:
        assert process.wait(60) == 2
    with once("sh", "-c", "kill -KILL $$") as process:
        assert process.wait(60) == 128 + signal.SIGKILL


def test_a_signal_is_passed_on() -> None:
    saves = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    with once("sh", "-c", saves) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert process.stdout.read() == "saved\n"


async def test_the_job_makes_the_users_of_etcd(tmp_path: Path) -> None:
    kubelet = Kubelet(tmp_path, tmp_path)
    try:
        job = release("minimal").pod("etcd-users").container("etcd-users")
        for _ in range(2):  # the second time authentication is on
            done = kubelet.run(job)
            assert done.returncode == 0, done.stderr
        _, env = kubelet.command(release("minimal").pod("gateway").container("gateway"))
        store, stranger = open_store(env["HOTSWAP_STORE"]), open_store(kubelet.command(job)[1]["OPEN"])
        await store.put("gateway/keys/k", b"{}")
        with pytest.raises(StoreRefused):
            await stranger.put("gateway/keys/k", b"{}")
        await store.close()
        await stranger.close()
    finally:
        kubelet.etcd.close()


# the first version


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(FILES / "first_version.py"))


def active(url: str) -> int | None:
    with contextlib.closing(SyncStore(url)) as store:
        found = store.get(Keys("demo").active)
    return None if found is None else ActiveRecord.from_json(found.value).version


def test_the_first_pod_publishes_the_first_version(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, arena, url = tmp_path / "checkpoint", tmp_path / "arena", f"sqlite://{tmp_path}/store.db"
    monkeypatch.setenv("HOTSWAP_ARENA", str(arena))
    monkeypatch.setenv("HOTSWAP_HOST", "pod-0")
    directory.mkdir()
    save_safetensors(directory / "model.safetensors", model(3.0))
    publish = ["--store", url, "--model", "demo", "--gone-after", "0", str(directory)]
    with coordinating(url, "demo"):
        assert script["main"]([*publish, "--ordinal", "1"]) == 0
        assert active(url) is None
        assert script["main"](publish) == 0
        assert active(url) == 1
        for when in ("first", "lost"):  # it lies here
            assert script["main"]([*publish, "--when", when]) == 0
            assert active(url) == 1
        for slot in arena.glob("slot-*"):  # the pod has lost its memory
            slot.unlink()
        assert script["main"]([*publish, "--when", "first"]) == 0
        assert active(url) == 1
        assert script["main"]([*publish, "--when", "lost"]) == 0
        assert active(url) == 2


def test_the_first_pod_restores_what_all_pods_have_lost(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version of a trainer, committed after the checkpoint's, and not the checkpoint's."""
    arena, copies, url = tmp_path / "arena", tmp_path / "copies", f"sqlite://{tmp_path}/store.db"
    monkeypatch.setenv("HOTSWAP_ARENA", str(arena))
    monkeypatch.setenv("HOTSWAP_HOST", "pod-0")
    first = tmp_path / "checkpoint"
    first.mkdir()
    save_safetensors(first / "model.safetensors", model(3.0))
    copies.mkdir()
    start = ["--store", url, "--model", "demo", "--gone-after", "0", "--copies", str(copies), str(first)]
    with coordinating(url, "demo"):
        assert script["main"]([*start, "--when", "never"]) == 0  # nothing was ever committed
        assert active(url) is None
        assert script["main"]([*start, "--when", "lost"]) == 0
        assert active(url) == 1
        with Publisher(url, model="demo") as publisher:
            assert publisher.publish(model(5.0)) == 2
        persisting = [sys.executable, "-m", "weightsync.persist", "--store", url, "--model", "demo", "--dir"]
        with subprocess.Popen([*persisting, str(copies)]) as process:
            wait_until(lambda: (copies / "2").is_dir(), 60, process=process)
            process.terminate()
        assert process.returncode == 0
        for when in ("never", "lost"):
            lost(arena)
            assert script["main"]([*start, "--when", when]) == 0
            assert active(url) == 2
            assert list(arena.glob("slot-*"))
        lost(arena)
        shutil.rmtree(copies / "2")  # the one before, if it is there, comes in its place, under an epoch of its own
        kept = [path.name for path in copies.iterdir() if path.name.isdigit()]
        assert script["main"]([*start, "--when", "never"]) == 0
        assert active(url) == (1 if kept else 2)
        assert bool(list(arena.glob("slot-*"))) == bool(kept)
        for path in copies.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        lost(arena)
        assert script["main"]([*start, "--when", "lost"]) == 0  # no copy is left: the checkpoint, published anew
        assert active(url) == 3


def lost(arena: Path) -> None:
    """The memory of all pods."""
    for slot in arena.glob("slot-*"):
        slot.unlink()


def test_a_pod_copies_and_restores_as_its_manifest_says(script: dict[str, Any]) -> None:
    r = rendered("--values", str(SETS["leaderworkerset"]), "--set-json", 'persist.volume={"csi": {"driver": "x"}}')
    leader, worker = (p for p in r.pods() if p.where.startswith("LeaderWorkerSet"))
    assert [c["name"] for c in leader.spec["initContainers"]] == ["peer", "publish", "persist"]
    assert [c["name"] for c in worker.spec["initContainers"]] == ["peer"]
    assert {v["name"]: v for v in leader.spec["volumes"]}["persist"]["csi"] == {"driver": "x"}
    for name in ("publish", "persist"):
        assert {"name": "persist", "mountPath": "/persist"} in leader.container(name)["volumeMounts"]
    persist = leader.container("persist")
    options = persister._parser().parse_args([*persist["args"], "--store", "x"])
    assert (str(options.dir), options.model, options.keep) == ("/persist", "model", 2)
    parsed = script["parser"]().parse_args(arguments(leader.container("publish"))[2:])
    assert (str(parsed.copies), parsed.when) == ("/persist", "lost")
    trained = release("colocated").pod("rollout").container("publish")  # the chart publishes nothing, and restores
    assert script["parser"]().parse_args(arguments(trained)[2:]).when == "never"


def test_the_manifest_publishes_with_options_that_the_script_takes(script: dict[str, Any]) -> None:
    for name in ("minimal", "leaderworkerset"):
        container = release(name).pod("rollout").container("publish")
        python, path, *options = arguments(container)
        assert (python, Path(path).name) == ("python", "first_version.py")
        parsed = script["parser"]().parse_args(options)
        assert (parsed.ordinal, parsed.when) == (0, "lost")
        assert str(parsed.directory) == "/models/model"
