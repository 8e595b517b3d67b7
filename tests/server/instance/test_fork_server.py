"""vLLM's processes are forked from what an instance has imported, have its environment, and end with it."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import psutil
import pytest

from server.instance import fork_server
from server.up.forks import Forked
from tests.waiting import ended, wait_until
from tests.warm import ENGINES, warm

pytestmark = pytest.mark.engine


def program(log: Path, *what: str, **env: str) -> Forked:
    # vLLM may have set it here, in an earlier test of this process: what is to be chosen is not told.
    ours = {name: value for name, value in os.environ.items() if name != "VLLM_WORKER_MULTIPROC_METHOD"}
    return warm(ENGINES).start(["tests.server.instance.forked", *what], {**ours, **env}, log)


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_engines_and_their_workers_are_forked(tmp_path: Path, build: str) -> None:
    log = tmp_path / "log"
    assert program(log, "nested", build).wait(200) == 0, log.read_text()
    engine, worker, *codes = (ast.literal_eval(line) for line in log.read_text().splitlines()[-4:])
    assert engine["vllm"]
    assert worker["vllm"]
    assert engine["pid"] != worker["pid"]
    assert worker["threads"] == 3 or build == "cpu", "as many as vLLM has chosen for it"
    assert (engine["later"], worker["later"]) == ("by the instance", "by an engine")
    assert codes == [7, 0]


@pytest.mark.parametrize(
    ("build", "env", "way"),
    [
        ("cuda", {}, "forkserver"),
        ("cuda", {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, "spawn"),
        ("used", {}, "fork"),  # vLLM's own, which its server's command line changes into "spawn"
    ],
)
def test_where_no_fork_could_have_a_gpu_vllm_starts_its_processes(
    tmp_path: Path, build: str, env: dict[str, str], way: str
) -> None:
    log = tmp_path / "log"
    assert program(log, "way", build, **env).wait(200) == 0, log.read_text()
    assert log.read_text().splitlines()[-1] == way


def test_the_server_ends_with_its_instance(tmp_path: Path) -> None:
    log = tmp_path / "log"
    instance = program(log, "wait")
    wait_until(lambda: log.exists() and "pid" in log.read_text(), 120, what="the engine starts")
    (server,) = (p for p in psutil.Process(instance.pid).children() if p.children())
    instance.kill()
    wait_until(lambda: ended(server), 60, what="it ends too")


def test_the_libraries_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are the variables that are read at an import."""
    from vllm.config import VllmConfig

    for name in ("LD_PRELOAD", *fork_server.AS_IMPORTED):
        monkeypatch.setenv(name, "")
    wanted = fork_server.libraries()
    VllmConfig()  # sets them
    assert os.environ["LD_PRELOAD"] == wanted
    assert "libgomp" in wanted
    assert {name: os.environ[name] for name in fork_server.AS_IMPORTED} == fork_server.AS_IMPORTED
    assert fork_server.libraries() == wanted  # nothing is added to what is there


def test_a_process_begins_with_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda _program, _argv, environment: ran.append(environment))
    monkeypatch.setenv("LD_PRELOAD", "")
    fork_server.begin_with_libraries()
    assert ran == []  # PyTorch is here already: it is too late
    monkeypatch.delitem(sys.modules, "torch")
    fork_server.begin_with_libraries()
    monkeypatch.setenv("LD_PRELOAD", ran[0]["LD_PRELOAD"])
    fork_server.begin_with_libraries()
    monkeypatch.setattr(fork_server, "for_cpus", lambda: False)
    monkeypatch.setenv("LD_PRELOAD", "")
    fork_server.begin_with_libraries()
    assert len(ran) == 1
