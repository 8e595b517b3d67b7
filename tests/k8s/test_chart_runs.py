"""A release started by hand: etcd with users and TLS, gateway, the pod's peer and instance, and the first version."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from server.ports import free_port
from tests import etcd
from tests.etcd import Tls
from tests.k8s.helm import SETS, Object, Release, arguments, rendered
from tests.k8s.kubelet import Kubelet
from tests.waiting import wait_until
from weightsync.errors import StoreRefused, StoreUnavailable
from weightsync.store import SyncStore

ADMIN_KEY = "of-this-test-alone"
SMALL = ("--set-json", 'rollout={"kvCacheGib": 0.1, "extraArgs": ["--max-model-len=1024", "--max-num-seqs=8"]}')


@dataclass
class Node:
    """The containers of a release on one host, with etcd's users made."""

    kubelet: Kubelet
    release: Release
    running: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def container(self, component: str, name: str) -> Object:
        return self.release.pod(component).container(name)

    def start(self, component: str, name: str) -> Callable[[Callable[[], bool]], None]:
        """A function that waits for a condition to become true of the container's process."""
        found = self.container(component, name)
        process = self.running.enter_context(self.kubelet.started(found, HOTSWAP_ADMIN_KEY=ADMIN_KEY))
        self.processes[name] = process

        log = self.kubelet.log(found)
        return lambda true: wait_until(true, 240, lambda: log.read_text()[-3000:], process)

    def run(self, component: str, name: str) -> None:
        done = self.kubelet.run(self.container(component, name))
        assert done.returncode == 0, done.stderr

    def probed(self, name: str, probe: str) -> bool:
        return self.kubelet.probed(self.container("rollout", name), probe) == 0

    def gateway(self, probe: str) -> int:
        """The status that the kubelet would get; 0: no answer."""
        path = self.container("gateway", "gateway")[probe]["httpGet"]["path"]
        try:
            return httpx.get(self.url + path, timeout=60).status_code
        except httpx.TransportError:
            return 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.kubelet.ports['8000']}"


@pytest.fixture
def node(tmp_path: Path, checkpoints: dict[str, Path]) -> Iterator[Node]:
    kubelet = Kubelet(tmp_path, checkpoints["a"])
    made = Node(kubelet, rendered("--values", str(SETS["minimal"]), *SMALL))
    try:
        with made.running:
            made.run("etcd-users", "etcd-users")
            yield made
    finally:
        kubelet.etcd.close()


def test_a_member_of_etcd_starts_as_its_manifest_says(tmp_path: Path) -> None:
    tls = Tls(tmp_path / "authority", client_certificates=True)
    for name, source in (("tls.crt", tls.server_cert), ("tls.key", tls.server_key), ("ca.crt", tls.ca)):
        (tmp_path / name).symlink_to(source)
    manifest = rendered("--values", str(SETS["minimal"])).pod("etcd").container("etcd")
    manifest = {**manifest, "env": [{"name": "POD_NAME", "value": "hotswap-etcd-0"}]}
    places = {"hotswap-etcd-0.hotswap-etcd.serving.svc": "127.0.0.1", "0.0.0.0": "127.0.0.1"}
    places |= {"/etc/etcd/tls": str(tmp_path), "/var/lib/etcd": str(tmp_path)}
    places |= dict(zip(("2379", "2380", "2381"), (str(free_port()) for _ in range(3)), strict=True))
    words = arguments(manifest)
    for old, new in places.items():
        words = [word.replace(old, new) for word in words]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen([etcd.require(), *words[1:]], stderr=log) as process:
        try:
            url = f"etcd://127.0.0.1:{places['2379']}/hotswap?ca={tls.ca}"
            address = f"{url}&cert={tls.cert}&key={tls.key}"
            wait_until(lambda: written(address), 120, lambda: (tmp_path / "log").read_text()[-3000:], process)
            wait_until(lambda: refused(url))  # without a certificate
            assert httpx.get(f"http://127.0.0.1:{places['2381']}/health", timeout=30).json() == {"health": "true"}
        finally:
            process.kill()


def written(url: str) -> bool:
    """False while etcd is not there. Raises StoreRefused."""
    try:
        with contextlib.closing(SyncStore(url)) as store:
            return store.put("k", b"{}") > 0
    except StoreRefused:
        raise
    except StoreUnavailable:
        return False


def refused(url: str) -> bool:
    """False while etcd's reason is lost with the connection that it closes."""
    try:
        assert not written(url)
    except StoreRefused:
        return True
    return False


def bring_up(node: Node) -> None:
    """Gateway and peer, and the first version."""
    gateway = node.start("gateway", "gateway")
    gateway(lambda: node.gateway("startupProbe") == 200)
    assert node.gateway("readinessProbe") == 503  # no instance yet
    peer = node.start("rollout", "peer")
    peer(lambda: node.probed("peer", "startupProbe"))
    node.run("rollout", "publish")
    assert list(node.kubelet.arena.glob("slot-*"))


def test_the_first_version_is_published_as_the_manifests_say(node: Node) -> None:
    bring_up(node)
    assert node.probed("peer", "livenessProbe")


@pytest.mark.broad
@pytest.mark.engine
def test_the_pod_serves_once_it_says_that_it_is_ready(node: Node) -> None:
    bring_up(node)
    instance = node.start("rollout", "instance")
    assert not node.probed("instance", "readinessProbe")
    instance(lambda: node.probed("instance", "startupProbe"))
    instance(lambda: node.probed("instance", "readinessProbe"))
    assert node.probed("instance", "livenessProbe")
    instance(lambda: node.gateway("readinessProbe") == 200)
    ask = {"model": "model", "prompt": [5, 6, 7], "max_tokens": 4}
    assert httpx.post(node.url + "/v1/completions", json=ask, timeout=60).status_code == 401  # --require-key
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    answer = httpx.post(node.url + "/v1/completions", json=ask, headers=key, timeout=60)
    assert (answer.status_code, answer.headers["x-hotswap-weight-version"]) == (200, "1")
    leaving = node.processes["instance"]
    leaving.send_signal(signal.SIGTERM)
    leaving.wait(node.release.pod("rollout").spec["terminationGracePeriodSeconds"])
    assert node.gateway("readinessProbe") == 503
