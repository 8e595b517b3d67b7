"""A real instance sleeps: its memory is really free, versions go on meanwhile, and it wakes with the active one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.live import LiveServer
from tests.waiting import wait_until

pytestmark = pytest.mark.engine
MB = 1 << 20
SMALL = 150 * MB  # an interpreter and a client of the store; an engine takes several times as much


def resident(live: LiveServer) -> int:
    """Private bytes of the instance's processes."""
    return sum(process.memory_full_info().uss for process in live.tree() if process.status() != psutil.STATUS_ZOMBIE)


def asleep(live: LiveServer) -> list[str]:
    return [record["id"] for record in live.admin.get("/admin/sleep").json()["asleep"]]


def sleepers(live: LiveServer) -> list[int]:
    """The process ids of what sleeps; of one that was killed, too, until its lease ends."""
    return [record["pid"] for record in live.admin.get("/admin/sleep").json()["asleep"]]


def restarted(live: LiveServer, pid: int) -> bool:
    """Do what `hotswap up` does, again and again."""
    live.processes.restart_ended()
    child = live.processes.children["instance-0"]
    return child.alive and child.process.pid != pid


def order(live: LiveServer, what: str, **body: object) -> str:
    answer = live.admin.post(f"/admin/instances/instance-0/{what}", json={"wait_s": 240, **body})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["state"])


def test_an_instance_gives_its_memory_back_and_wakes_with_the_version_active_then(
    live: LiveServer, checkpoints: dict[str, Path]
) -> None:
    pid, before = live.tree()[0].pid, resident(live)
    assert order(live, "sleep", level=2, drain_s=5) == "asleep"
    assert asleep(live) == ["instance-0"]
    wait_until(lambda: live.instances() == [])  # the gateway sees it a moment later
    assert live.tree()[0].pid == pid, "its supervisor would take it for dead"
    wait_until(
        lambda: resident(live) < SMALL, what=lambda: f"{resident(live) / MB:.0f} MB of {before / MB:.0f} are left"
    )
    assert live.client.get("/readyz").status_code == 503

    version = live.push(checkpoints["say-1"])  # nobody is there to stage it; it is committed all the same
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: restarted(live, pid), 120)
    anew = live.tree()[0].pid
    wait_until(lambda: sleepers(live) == [anew], 200, what="started anew, it must sleep on")
    assert resident(live) < SMALL

    assert order(live, "wake") == "serving"
    assert live.instance()["active_version"] == version == live.active()
    assert set(live.generate([3, 4, 5], 4)["choices"][0]["token_ids"]) == {101}
    wait_until(lambda: asleep(live) == [])
