"""Two ranks on two nodes of a Ray cluster: one node is lost, then all are asked to leave."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.raycluster import RayCluster
from tests.trainer.faults.runs import arguments, curve, events, is_gone
from tests.waiting import wait_until
from trainer.ray_ranks import absolute

PATIENCE_S = 240.0
N1, N2, N3 = (f"127.0.0.{i}" for i in (21, 22, 23))


def test_a_rank_is_told_nothing_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--ray", "--config", "run.yaml", "--set", "steps=3", "--ray-bundle=CPU=1", "--ray-strategy", "PACK"]
    asked = ["--config", str(tmp_path / "run.yaml"), "--set", "steps=3"]
    assert absolute(given, Path("run.yaml")) == asked
    assert absolute(["--set", "steps=3", "--config=run.yaml", "--ray", "auto"], Path("run.yaml")) == asked


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        (["--ray", "127.0.0.1:1"], {}, "ray start --head"),
        (["--ray"], {"publish": {"model": "m", "store": "sqlite:///s.db"}}, "publish.store: .*etcd"),
    ],
)
def test_what_cannot_work_is_said(
    config: dict[str, Any], tmp_path: Path, options: list[str], settings: dict[str, Any], said: str
) -> None:
    command = [sys.executable, "-m", "trainer.main", *arguments(config | settings, tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 2
    assert re.search(said, done.stderr), done.stderr
    assert not events(config["metrics"], "start")


@pytest.mark.slow
@pytest.mark.broad
@pytest.mark.timeout(900)
def test_a_run_goes_on_elsewhere_when_a_node_is_lost(config: dict[str, Any], tmp_path: Path) -> None:
    config |= {"parallel": {"data": 2}, "steps": 100_000, "checkpoint": config["checkpoint"] | {"every": 20}}
    config |= {"faults": {"max_restarts": 1}}
    config["optimizer"] |= {"decay": "constant"}
    path, said = config["metrics"], tmp_path / "said"
    with RayCluster() as cluster:
        cluster.add(N1)
        cluster.add(N2)
        command = [sys.executable, "-m", "server.cli", "train", "--ray", cluster.address, *arguments(config, tmp_path)]
        with said.open("w") as output:
            run = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            wait_until(lambda: len(curve(path)) > 50 and events(path, "checkpoint"), PATIENCE_S, said.read_text, run)
            placed = dict(re.findall(r"rank (\d) runs on (\S+)", said.read_text()))
            assert {placed["0"], placed["1"]} == {N1, N2}
            ranks = rank_processes(tmp_path)
            assert len(ranks) == 2

            cluster.remove(placed["1"])
            cluster.add(N3)
            wait_until(lambda: len(events(path, "start")) == 2, PATIENCE_S, said.read_text, run)
            second = events(path, "start")[1]["step"]
            assert second >= 20
            wait_until(lambda: all(is_gone(rank.pid) for rank in ranks), PATIENCE_S, said.read_text)
            wait_until(lambda: max(curve(path)) > second + 30, PATIENCE_S, said.read_text, run)
            assert re.findall(r"rank \d runs on (\S+)", said.read_text())[-2:].count(N3) == 1

            run.send_signal(signal.SIGTERM)
            assert run.wait(60) == 128 + signal.SIGTERM, said.read_text()
            saved = events(path, "checkpoint")[-1]["step"]
            assert saved == max(curve(path)), "the last step that was done is the one that was saved"
            cluster.free()
        finally:
            run.kill()
            run.wait()


def rank_processes(root: Path) -> list[psutil.Process]:
    """The ranks of the run that is configured in a directory."""
    config = str(root / "config.yaml")
    found = [process for process in psutil.process_iter(["cmdline"]) if config in (process.info["cmdline"] or [])]
    return [process for process in found if "--ray" not in process.info["cmdline"]]
