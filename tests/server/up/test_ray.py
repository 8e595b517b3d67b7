"""`hotswap up --ray` on a real cluster of several nodes of this machine, each with its arena and its peer."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.cli.admin import AdminClient
from server.ports import free_port
from server.up.paths import ServerInfo
from tests.etcd import Etcd
from tests.live import VLLM_ARGS
from tests.open_answers import Asked
from tests.raycluster import RayCluster
from tests.waiting import wait_until

N1, N2, N3 = (f"127.0.0.{i}" for i in (11, 12, 13))
TOKENS = 900


def test_a_cluster_that_is_not_there_is_said_before_anything_is_started(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    command = ["up", "--model", str(checkpoints["a"]), "--state-dir", str(state), "--port", "0"]
    command += ["--store", "etcd://127.0.0.1:1", "--ray", f"127.0.0.1:{free_port()}"]
    done = subprocess.run(
        [sys.executable, "-m", "server.cli", *command], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode != 0
    assert "ray start --head" in " ".join(done.stderr.split()), done.stderr
    assert not (state / "server.json").exists()


class Up:
    """The command, and what it says."""

    def __init__(self, cluster: RayCluster, store: str, model: Path, state: Path) -> None:
        self.state, self.output = state, state.with_suffix(".out")
        command = [sys.executable, "-m", "server.cli", "up", "--model", str(model), "--name", "toy", "--port", "0"]
        command += ["--state-dir", str(state), "--store", store, "--persist", "off", "--kv-cache-gib", "0.06"]
        command += ["--ray", cluster.address, "--instances", "2", "--ray-bundle", "CPU=1", *VLLM_ARGS]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def said(self) -> str:
        return " ".join(self.output.read_text().split())

    def place(self, name: str) -> str:
        """The node that it runs on, or ran on last."""
        return re.findall(rf"{name} runs on (\S+)", self.said())[-1]

    def ready(self) -> ServerInfo:
        file = self.state / "server.json"
        wait_until(lambda: file.exists() and ServerInfo.read(self.state).state == "ready", 400, self.said, self.process)
        return ServerInfo.read(self.state)

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(120)


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster() as found:
        yield found


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.broad
@pytest.mark.timeout(1200)
def test_a_node_is_lost_and_another_one_takes_its_instance(
    cluster: RayCluster, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    cluster.add(N1)
    cluster.add(N2)
    etcd = Etcd()
    up = Up(cluster, etcd.url("ray"), checkpoints["say-1"], tmp_path / "state")
    try:
        info = up.ready()
        assert {up.place("instance-0"), up.place("instance-1")} == {N1, N2}
        admin = AdminClient(tmp_path / "state")

        def rows() -> list[dict[str, Any]]:
            return sorted(admin.call("GET", "/admin/instances")["instances"], key=lambda row: str(row["id"]))

        def serving() -> list[dict[str, Any]]:
            return [row for row in rows() if row["eligible"]]

        def answer() -> list[int]:
            return Asked(info.url, 8, stream=False).finish()

        assert answer() == [101] * 8
        body = {"path": str(checkpoints["say-2"]), "activate": True}
        assert admin.call("POST", "/admin/weights", body)["version"] == 2
        assert [row["active_version"] for row in serving()] == [2, 2]
        assert answer() == [102] * 8

        streams = [Asked(info.url, TOKENS) for _ in range(24)]
        wait_until(lambda: all(stream.tokens for stream in streams), 60)
        assert all(row["in_flight"] for row in rows())
        cluster.remove(up.place("instance-1"))
        for stream in streams:
            assert stream.finish() == [102] * TOKENS
        wait_until(lambda: "instance-1 on" in up.said() and "is lost" in up.said(), 60, up.said)
        wait_until(lambda: len(serving()) == 1, 60)
        assert answer() == [102] * 8
        cluster.add(N3)
        wait_until(lambda: len(serving()) == 2, 300, up.said, up.process)
        assert (up.place("instance-1"), up.place("peer-1")) == (N3, N3)
        assert [row["active_version"] for row in rows()] == [2, 2]
        status = subprocess.run(
            [sys.executable, "-m", "server.cli", "status", "--state-dir", str(tmp_path / "state")],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert status.stdout.count("SERVING") == 2, status.stdout
        assert up.end() == 0, up.said()
        assert cluster.free() == cluster.whole()
    finally:
        up.process.kill()
        up.process.wait()
        etcd.close()
