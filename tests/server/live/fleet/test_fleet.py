"""Two real instances behind one gateway: swapped together and one by one, one killed, and what both share."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import Clients, Fleet
from tests.live import LiveServer
from tests.waiting import wait_until

pytestmark = pytest.mark.engine


def test_both_flip_together_under_streams(fleet: Fleet) -> None:
    fleet.publish(0)
    with Clients([fleet.live.url]).streaming() as seen:
        for says in (1, 2):
            version = fleet.publish(says, activate=False)
            answer = fleet.live.activate(version)
            assert answer.status_code == 200, answer.text
            assert fleet.all_serve(version)
            assert {i["active_epoch"] for i in fleet.live.instances()} == {answer.json()["epoch"]}
            wait_until(lambda: seen.saw(version))  # noqa: B023
    fleet.assert_clean(seen)
    assert len({i["fingerprint"] for i in fleet.live.instances()}) == 1


def test_a_request_waits_for_a_version_and_gets_it(fleet: Fleet) -> None:
    version = fleet.publish(activate=False)
    wish = {"min_version": version, "wait_s": 120}
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(fleet.live.generate, [3, 4, 5], 4, hotswap=wish)
        wait_until(lambda: 'hotswap_gateway_held{model="toy"} 1.0' in fleet.live.client.get("/metrics").text)
        assert fleet.live.activate(version).status_code == 200
        (choice,) = request.result(120)["choices"]
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 4}]
    bound = {"x-hotswap-version": str(version - 1)}
    refused = fleet.live.client.post("/generate", json={"prompt": "a"}, headers=bound)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "version_unavailable"
    assert refused.json()["error"]["active_version"] == version


def weights_in_use(live: LiveServer, index: int) -> dict[str, tuple[int, int]]:
    """Resident and proportional bytes of each layout slot, weights as kernels read them, that an instance maps."""
    found: dict[str, tuple[int, int]] = {}
    for process in live.tree(index):
        for part in process.memory_maps(grouped=False):
            if part.path.startswith(f"{live.processes.arena}/layout-"):
                rss, pss = found.get(part.path, (0, 0))
                found[part.path] = (rss + part.rss, pss + part.pss)
    return found


def test_both_share_one_copy_of_the_weights(fleet: Fleet) -> None:
    fleet.publish()
    assert_shared(fleet.live)


def assert_shared(live: LiveServer) -> None:
    first, second = (weights_in_use(live, i) for i in range(2))
    shared = first.keys() & second.keys()  # besides, each may have room reserved that the other has not mapped yet
    assert shared
    for path in shared:
        resident = max(first[path][0], second[path][0])
        assert resident >= 0.9 * Path(path).stat().st_size
        assert first[path][1] + second[path][1] <= 1.02 * resident
    live_slots = [held_layouts(live, i) for i in range(2)]
    assert live_slots[0] & live_slots[1], "the two run on slots of their own"


def held_layouts(live: LiveServer, index: int) -> set[str]:
    """Layout slots that an instance holds a lock on: those its live, previous and staged weights lie in."""
    inodes = {f.stat().st_ino: f.name for f in live.processes.arena.glob("layout-*[0-9]")}
    pids = {process.pid for process in live.tree(index)}
    held = set()
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "FLOCK" in fields and "->" not in fields and int(fields[4]) in pids:  # an arrow: it waits for the lock
            held.add(inodes.get(int(fields[5].rsplit(":", 1)[1]), ""))
    return held - {""}


def untrusted_but_asked(live: LiveServer) -> list[dict[str, Any]]:
    """Instances that get requests although their weights are not the committed ones."""
    active = live.admin.get("/admin/weights/active").json()
    return [
        i for i in live.instances()
        if i["eligible"] and (i["active_version"], i["fingerprint"]) != (active["version"], active["fingerprint"])
    ]  # fmt: skip


@pytest.mark.broad  # the failure contract has it in the first tier
def test_a_killed_instance_comes_back_from_shared_memory(fleet: Fleet, tmp_path: Path) -> None:
    """Killed while it stages, with no weights left on disk: it ends up with the fleet's, and never answers before."""
    versions = []
    for says in (1, 2):
        checkpoint = Path(shutil.copytree(fleet.checkpoints[f"say-{says}"], tmp_path / f"say-{says}"))
        versions.append(fleet.live.push(checkpoint, activate=says == 1))
        fleet.version_of[versions[-1]] = says
        shutil.rmtree(checkpoint)
    before, refused = versions
    victim = fleet.live.processes.children["instance-1"].process
    with Clients([fleet.live.url], 2).streaming() as seen, ThreadPoolExecutor(1) as pool:
        os.killpg(victim.pid, signal.SIGSTOP)  # so that the swap waits for it
        swap = pool.submit(fleet.live.activate, refused)
        wait_until(lambda: fleet.live.instances()[0]["staged_version"] == refused, 30)
        os.killpg(victim.pid, signal.SIGKILL)
        answer = swap.result(60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "swap_aborted")
        assert "instance-1" in answer.json()["error"]["message"]

        served = seen.answers
        wait_until(lambda: seen.answers > served + 4, 60)  # the other one goes on
        assert [(i["eligible"], i["state"], i["active_version"]) for i in fleet.live.instances()] == [
            (True, "SERVING", before)
        ]

        def back() -> bool:
            fleet.revive()
            assert untrusted_but_asked(fleet.live) == []
            return fleet.all_serve(before)

        wait_until(back, 300)
        assert fleet.live.processes.children["instance-1"].process.pid != victim.pid
        answer = fleet.live.activate(refused)
        assert answer.status_code == 200, answer.text
        assert fleet.all_serve(refused)
        wait_until(lambda: seen.saw(refused))
    fleet.assert_clean(seen)  # the other one goes on with its streams
    assert_shared(fleet.live)
