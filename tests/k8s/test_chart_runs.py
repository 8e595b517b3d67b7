"""A release started by hand: etcd with users and TLS, the gateway, the pod's peer, and the first version."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.k8s.helm import Object, release
from tests.k8s.kubelet import Kubelet
from tests.weightsync.tensors import model, save_safetensors
from weightsync.records import ActiveRecord, Keys
from weightsync.store.sync import SyncStore


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_safetensors(checkpoint / "model.safetensors", model(3.0))
    made = Kubelet(tmp_path, checkpoint)
    yield made
    made.close()


def container(component: str, name: str) -> Object:
    return release("minimal").pod(component).container(name)


def until(true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


def answers(url: str, status: int) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == status
    except httpx.TransportError:
        return False


def test_a_release_comes_up_with_what_its_manifests_say(kubelet: Kubelet) -> None:
    users = kubelet.run(container("etcd-users", "etcd-users"))
    assert users.returncode == 0, users.stderr
    gateway, peer, publish = (
        container("gateway", "gateway"),
        container("rollout", "peer"),
        container("rollout", "publish"),
    )
    with (
        kubelet.started(gateway, HOTSWAP_ADMIN_KEY="of-this-test-alone") as serving,
        kubelet.started(peer) as fetching,
    ):
        url = f"http://127.0.0.1:{kubelet.ports['8000']}"
        until(lambda: answers(url + gateway["startupProbe"]["httpGet"]["path"], 200), serving, kubelet.log(gateway))
        assert answers(url + gateway["readinessProbe"]["httpGet"]["path"], 503)  # no instance yet
        until(lambda: kubelet.probed(peer, "startupProbe") == 0, fetching, kubelet.log(peer))
        first = kubelet.run(publish)
        assert first.returncode == 0, first.stderr
        assert kubelet.probed(peer, "livenessProbe") == 0
    _, env = kubelet.command(gateway)
    store = SyncStore(env["HOTSWAP_STORE"])
    found = store.get(Keys("model").active)
    store.close()
    assert found is not None
    assert ActiveRecord.from_json(found.value).version == 1
    assert list(kubelet.arena.glob("slot-*"))
