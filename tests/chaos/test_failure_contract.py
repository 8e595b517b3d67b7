"""The failure contract on a whole fleet: two vLLM instances, two gateways, a real etcd. Each test kills something real
and says what the clients saw of it.

Only real processes show what one that is killed leaves behind: sockets, leases, locks, shared memory, an engine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet import CUT, Clients, Fleet
from tests.live import LiveServer
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900, func_only=True)]


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


PUBLISHER = """
import sys
from safetensors.torch import load_file
from weightsync import Publisher
tensors = load_file(sys.argv[3])
publisher = Publisher(sys.argv[1], model=sys.argv[2], lease_ttl_s=2)
print("publishing", flush=True)
while True:
    publisher.publish(tensors.items(), activate=False)
"""


def test_trainer_killed_while_publishing(fleet: Fleet) -> None:
    """Clients see nothing; no half-written version appears; the next trainer publishes."""
    version = fleet.publish()
    weights = fleet.checkpoints["say-3"] / "model.safetensors"
    command = [sys.executable, "-c", PUBLISHER, fleet.live.processes.store, fleet.live.name, str(weights)]
    with Clients([fleet.live.url, fleet.second_url]).streaming() as seen:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "publishing\n"
            os.kill(trainer.pid, signal.SIGKILL)
        assert fleet.live.active() == version

        def none_half_written() -> bool:
            versions = fleet.live.admin.get("/admin/weights").json()["versions"]
            return all(v["state"] != "publishing" for v in versions)

        wait_until(none_half_written, 60)
        version = fleet.publish()
        wait_until(lambda: fleet.all_serve(version))  # the gateway sees it a moment later
    fleet.assert_clean(seen)


def weights_in_use(live: LiveServer, index: int) -> dict[str, tuple[int, int]]:
    """Resident and proportional bytes of each layout slot, weights as kernels read them, that an instance maps."""
    found: dict[str, tuple[int, int]] = {}
    for process in live.tree(index):
        for part in process.memory_maps(grouped=False):
            if part.path.startswith(f"{live.processes.arena}/layout-"):
                rss, pss = found.get(part.path, (0, 0))
                found[part.path] = (rss + part.rss, pss + part.pss)
    return found


def assert_one_copy(live: LiveServer) -> None:
    first, second = (weights_in_use(live, i) for i in range(2))
    shared = first.keys() & second.keys()  # besides, each may have room reserved that the other has not mapped yet
    assert shared
    for path in shared:
        resident = max(first[path][0], second[path][0])
        assert resident >= 0.9 * Path(path).stat().st_size
        assert first[path][1] + second[path][1] <= 1.02 * resident
    assert held_layouts(live, 0) & held_layouts(live, 1), "the two run on slots of their own"


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


def left_in_memory_alone(fleet: Fleet, directory: Path, says: int, *, activate: bool) -> int:
    """A version whose checkpoint is no longer on disk."""
    checkpoint = shutil.copytree(fleet.checkpoints[f"say-{says}"], directory / f"say-{says}")
    version = fleet.live.push(checkpoint, activate=activate)
    fleet.version_of[version] = says
    shutil.rmtree(checkpoint)
    return version


@pytest.mark.parametrize("on_lost", ["abort", pytest.param("continue", marks=pytest.mark.broad)])
def test_instance_killed_while_staging(fleet: Fleet, on_lost: str, tmp_path: Path) -> None:
    """Its streams fail over or end with a typed fault; the swap aborts or goes on without it; it comes back from shared
    memory, and never answers before."""
    version = left_in_memory_alone(fleet, tmp_path, 1, activate=True)
    target = left_in_memory_alone(fleet, tmp_path, 2, activate=False)
    assert_one_copy(fleet.live)
    victim = fleet.live.tree(1)[0]
    served = version if on_lost == "abort" else target

    def back() -> bool:
        fleet.revive()
        assert untrusted_but_asked(fleet.live) == []
        return fleet.all_serve(served)

    with Clients([fleet.live.url]).streaming() as seen:
        wait_until(lambda: seen.answers > 4, 120)
        fleet.engine_core(1).suspend()  # it cannot stage, and stays in the fleet until it is killed
        wish = {"version": target, "on_lost": on_lost}
        _, results = in_background(lambda: fleet.live.admin.post("/admin/weights/activate", json=wish))
        wait_until(lambda: fleet.states() == {"instance-0": "STAGED", "instance-1": "STAGING"}, 120)
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: results, 240)
        if on_lost == "abort":
            assert results[0].status_code == 409, results[0].text
            assert "instance-1" in results[0].json()["error"]["message"]
        else:
            assert results[0].status_code == 200, results[0].text
            assert fleet.live.active() == target
        before = seen.answers
        wait_until(lambda: seen.answers > before + 4, 120)
        wait_until(back, 280)
        assert fleet.live.activate(target).status_code == 200
        wait_until(lambda: fleet.all_serve(target))
        wait_until(lambda: seen.saw(target), 120)
    assert_one_copy(fleet.live)
    # The other instance goes on with the streams; after a commit it runs another version than wrote their beginnings.
    fleet.assert_clean(seen, faults=set() if on_lost == "abort" else CUT)


def test_worker_dies_in_the_flip(fleet: Fleet) -> None:
    """The commit stands; that instance is fenced, started anew with dummy weights, and catches up."""
    fleet.publish()
    target = fleet.publish(activate=False)
    first, core = fleet.live.tree(0)[0], fleet.engine_core(1)
    with Clients([fleet.live.url]).streaming() as seen:
        first.suspend()  # the commit waits for it
        try:
            swapping, results = in_background(lambda: fleet.live.activate(target))
            wait_until(lambda: fleet.states().get("instance-1") == "STAGED", 60)
            core.suspend()  # the flip reaches an engine that does not answer ...
        finally:
            first.resume()
        wait_until(lambda: fleet.live.active() == target, 120)
        os.kill(core.pid, signal.SIGKILL)  # ... and then dies
        wait_until(lambda: fleet.states().get("instance-1") not in ("SERVING", "STAGED", "STAGING"), 120)
        swapping.join(280)
        assert results[0].status_code == 200, results[0].text
        assert fleet.whole_again(target)
    fleet.assert_clean(seen, faults=CUT)
    assert seen.saw(target)


@pytest.mark.broad
def test_coordinator_killed_after_prepare(fleet: Fleet) -> None:
    """The other gateway's coordinator finishes the swap from the record; its clients see nothing."""
    version = fleet.publish()
    target = fleet.publish(activate=False)
    held = fleet.live.tree(1)[0]
    gateway = fleet.live.processes.children["gateway"]
    with Clients([fleet.second_url]).streaming() as seen:
        held.suspend()  # prepare cannot end
        try:
            in_background(lambda: _ignoring(lambda: fleet.live.activate(target)))
            wait_until(lambda: fleet.swap().target == target and fleet.swap().phase == "prepare", 60)
            os.kill(gateway.process.pid, signal.SIGKILL)
            gateway.process.wait(60)
        finally:
            held.resume()

        def finished() -> bool:
            swap = fleet.swap()
            return swap.target == target and swap.phase in ("done", "aborted")

        wait_until(finished, 120)
        swap = fleet.swap()
        assert fleet.whole_again(target if swap.phase == "done" else version)
    assert swap.phase == "done", swap.reason
    fleet.assert_clean(seen)


def _ignoring(work: Callable[[], Any]) -> None:
    with contextlib.suppress(httpx.HTTPError):  # the gateway that was asked is killed on purpose
        work()


@pytest.mark.broad
def test_gateway_killed(fleet: Fleet) -> None:
    """Its connections end; the other replica serves on; no state is lost."""
    version = fleet.publish()
    gateway = fleet.live.processes.children["gateway"]
    with Clients([fleet.second_url]).streaming() as seen, Clients([fleet.live.url], 2).streaming() as cut:
        wait_until(lambda: seen.answers > 2 and cut.answers > 2, 120)
        os.kill(gateway.process.pid, signal.SIGKILL)
        before = seen.answers
        wait_until(lambda: seen.answers > before + 4, 120)
        assert fleet.whole_again(version)
        before = cut.answers
        wait_until(lambda: cut.answers > before, 120)
    fleet.assert_clean(seen)
    assert set(cut.faults) <= {"RemoteProtocolError", "ReadError", "ConnectError", "no_instance"}


@pytest.mark.parametrize("fault", [pytest.param("frozen", marks=pytest.mark.broad), "killed"])
def test_store_away(fleet: Fleet, fault: str) -> None:
    """Clients see nothing; swaps are refused with a typed error; when the store is back, swaps are back."""
    version = fleet.publish()
    target = fleet.publish(activate=False)
    with Clients([fleet.live.url, fleet.second_url]).streaming() as seen:
        _ = fleet.etcd.freeze() if fault == "frozen" else fleet.etcd.kill()
        try:
            refused = fleet.live.activate(target)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "store_unavailable"
            before = seen.answers
            wait_until(lambda: seen.answers > before + 8, 120)
        finally:
            _ = fleet.etcd.thaw() if fault == "frozen" else fleet.etcd.restart()
        wait_until(lambda: fleet.all_serve(version), 120)
        wait_until(lambda: fleet.live.activate(target).status_code == 200, 120)
    fleet.assert_clean(seen)


def test_flipped_byte(fleet: Fleet) -> None:
    """The digest names the tensor; the swap aborts on every instance; clients see nothing."""
    version = fleet.publish()
    target = fleet.publish(activate=False)
    records = {v["version"]: v for v in fleet.live.admin.get("/admin/weights").json()["versions"]}
    with Path(records[target]["slot"]).open("r+b") as slot:
        slot.seek(-8192, os.SEEK_END)
        byte = slot.read(1)[0]
        slot.seek(-1, os.SEEK_CUR)
        slot.write(bytes([byte ^ 1]))
    with Clients([fleet.live.url]).streaming() as seen:
        refused = fleet.live.activate(target)
        assert refused.status_code == 409
        assert refused.json()["error"]["tensor"]
        wait_until(lambda: fleet.all_serve(version))  # an instance says so when it has dropped the other one
    fleet.assert_clean(seen)
    assert {v for v, _ in seen.tokens} == {version}


SECOND_TRAINER = """
import sys
from safetensors.torch import load_file
from weightsync import Publisher
from weightsync.errors import StalePublisher
tensors = load_file(sys.argv[3])
publisher = Publisher(sys.argv[1], model=sys.argv[2])
publisher.hold()
print("holding", flush=True)
sys.stdin.readline()
try:
    publisher.publish(tensors.items())
except StalePublisher as error:
    print(error.code, flush=True)
"""


@pytest.mark.broad
def test_two_trainers(fleet: Fleet) -> None:
    """The one that was replaced is refused; what it would have published is never seen."""
    fleet.publish()
    weights = str(fleet.checkpoints["say-1"] / "model.safetensors")
    command = [sys.executable, "-c", SECOND_TRAINER, fleet.live.processes.store, fleet.live.name, weights]
    with Clients([fleet.live.url]).streaming() as seen:
        trainers = []
        for _ in range(2):
            trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "holding\n"
            trainers.append(trainer)
        before = fleet.live.active()
        refused, _ = trainers[0].communicate("go\n", timeout=240)
        assert refused == "stale_publisher\n"
        assert fleet.live.active() == before
        accepted, _ = trainers[1].communicate("go\n", timeout=240)
        assert accepted == ""
        assert fleet.live.active() > before
        fleet.version_of[fleet.live.active()] = 1
    fleet.assert_clean(seen)
