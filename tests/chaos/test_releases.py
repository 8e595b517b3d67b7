"""Releases under fault: three vLLM instances, two gateways, a real etcd, a real reward server. Clients fail only
if their answer was on a process that died, and the fleet ends on the version that is good."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from server.gateway.release.records import ReleaseKeys, ReleaseRecord
from tests.fleet import CUT, Clients, Fleet, running
from tests.trainer.rewards.test_server import serving
from tests.waiting import wait_until
from weightsync import SyncStore
from weightsync.control.records import Keys, LeaderRecord
from weightsync.errors import StoreError

# The start of three engines has a limit of its own.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.broad, pytest.mark.timeout(900, func_only=True)]
REWARDS = [{"kind": "regex", "name": f"says-{k}", "pattern": f"w10{k}"} for k in range(4)]
REWARDS.append({"kind": "regex", "name": "any", "pattern": "w10"})


@pytest.fixture(scope="module")
def fleet(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, rewards: httpx.Client
) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("releases")
    (root / "set.jsonl").write_text('{"prompt": "w3 w4"}\n' * 4)
    named = [("reward", f"{reward['name']}={rewards.base_url}") for reward in REWARDS]
    named.append(("evaluation", f"words={root}/set.jsonl"))
    args = tuple(word for option, value in named for word in (f"--{option}", value))
    with running(checkpoints, root, instances=3, gateway_args=args) as found:
        yield found


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("rewards"), rewards=REWARDS) as client:
        yield client


@pytest.fixture
def store(fleet: Fleet) -> Iterator[SyncStore]:
    found = SyncStore(fleet.live.processes.store)
    yield found
    found.close()


class Release:
    """A release of a new version, which is harmful by the reward `old` of what it takes over from."""

    def __init__(self, fleet: Fleet, store: SyncStore, steps: str, more: str = "") -> None:
        self.stable = fleet.publish()
        old = f"says-{fleet.version_of[self.stable]}"
        self.version = fleet.publish(activate=False)
        self._fleet, self._store = fleet, store
        named = ", ".join(f"{name}: {{timeout_s: 2}}" for name in (old, "any"))
        text = f"sticky: none\nrewards: {{{named}}}\n{more}steps: [{steps.replace('OLD', old)}]\n"
        wait_until(lambda: fleet.all_serve(self.stable), 120)
        answer = fleet.live.admin.post("/admin/releases", json={"version": self.version, "text": text})
        assert answer.status_code == 200, answer.text

    @property
    def record(self) -> ReleaseRecord:
        found = self._store.get(ReleaseKeys(self._fleet.live.name).current)
        assert found is not None
        return ReleaseRecord.from_json(found.value)

    def until(self, *states: str, step: int = 0, seconds: float = 200) -> ReleaseRecord:
        """In one of the states, at this step or a later one: a step that has its evidence is over at once."""
        seen: list[ReleaseRecord] = []

        def there() -> ReleaseRecord | None:
            self._fleet.revive()
            try:
                seen[:] = [self.record]
            except (StoreError, TimeoutError):  # it is being started again
                return None
            return seen[0] if seen[0].state in states and seen[0].step >= step else None

        return wait_until(there, seconds, what=lambda: f"{states} at step {step} of {seen}")


HARMFUL = "{traffic: 50, for: 1h, conditions: [{metric: reward/OLD, min: 0.5, least: 10}]}"
TOKENS = 40  # short answers: each is evidence
GOOD = "[{metric: reward/any, min: 0.5, least: 10, prove: true}]"


def test_the_gateway_that_leads_dies_between_the_evidence_and_the_rollback(fleet: Fleet, store: SyncStore) -> None:
    """It is frozen before there is evidence, and killed when there is; the other one takes the version back."""
    release = Release(fleet, store, HARMFUL)
    release.until("judging")
    gateway = fleet.live.processes.children["gateway"].process
    led = _led_by(gateway.pid, fleet, store)
    os.kill(gateway.pid, signal.SIGSTOP)
    with Clients([fleet.second_url], tokens=TOKENS).streaming() as seen:
        wait_until(lambda: sum(version == release.version for version, _ in seen.tokens) > 100, 120)
        os.kill(gateway.pid, signal.SIGKILL)
        gateway.wait(60)
        record = release.until("rolled_back")
        assert fleet.whole_again(release.stable)
    assert "reward/says" in record.reason
    assert _leader(fleet, store) != led, "it did lead"
    fleet.assert_clean(seen)


def test_the_store_is_killed_in_the_middle_of_a_step(fleet: Fleet, store: SyncStore) -> None:
    """Counts that gateways make meanwhile are evidence when the store is back."""
    release = Release(fleet, store, HARMFUL)
    release.until("judging")
    fleet.etcd.kill()
    try:
        with Clients([fleet.live.url, fleet.second_url], tokens=TOKENS).streaming() as seen:
            wait_until(lambda: seen.answers > 20 and any(v == release.version for v, _ in seen.tokens), 120)
            fleet.etcd.restart()
            record = release.until("rolled_back")
            assert fleet.whole_again(release.stable)
    finally:
        fleet.etcd.restart()
    assert "reward/says" in record.reason
    fleet.assert_clean(seen)


def test_something_dies_at_each_step(fleet: Fleet, store: SyncStore, rewards: httpx.Client) -> None:
    """The candidate's only instance, one of the stable version's, the leading gateway, and etcd: a good version takes
    over all the same, step by step."""
    steps = ", ".join(f"{{traffic: {percent}, for: 0s, conditions: {GOOD}}}" for percent in (30, 40, 50, 100))
    release = Release(fleet, store, steps)

    def of_version(version: int) -> int:
        records = fleet.live.instances()
        return next(int(r["id"].rsplit("-", 1)[-1]) for r in records if r["active_version"] == version)

    def kill_instance(version: int) -> None:
        os.kill(fleet.live.tree(of_version(version))[0].pid, signal.SIGKILL)

    def kill_gateway() -> None:
        os.kill(fleet.live.processes.children["gateway"].process.pid, signal.SIGKILL)

    def kill_store() -> None:
        fleet.etcd.kill()
        fleet.etcd.restart()

    def dies(kill: Callable[[], None], step: int, *states: str) -> None:
        """At this step, which lasts until the fleet is whole again: there is no evidence while the judge hangs."""
        release.until("judging", "held", *states, step=step)
        judge.suspend()
        try:
            kill()
            wait_until(fleet.mended, 200, what=lambda: f"the fleet is whole: {fleet.live.instances()}")
        finally:
            judge.resume()

    judge = _listens(rewards.base_url.port)
    with Clients([fleet.second_url], tokens=TOKENS).streaming() as seen:
        dies(lambda: kill_instance(release.version), 0)
        dies(lambda: kill_instance(release.stable), 1)
        dies(kill_gateway, 2)
        dies(kill_store, 3, "finishing", "done")
        record = release.until("done", "rolled_back", "cancelled")
        assert record.state == "done", record.reason
        assert fleet.whole_again(release.version)
    fleet.assert_clean(seen, faults=CUT)


def test_an_evaluation_whose_judge_hangs_holds_the_release(
    fleet: Fleet, store: SyncStore, rewards: httpx.Client
) -> None:
    """No client gets an answer by the version until the judge goes on."""
    sets = "evaluation: [{name: words, by: any, min: 0.5, max_tokens: 4}]\n"
    with Clients([fleet.live.url, fleet.second_url], tokens=TOKENS).streaming() as seen:
        judge = _listens(rewards.base_url.port)
        judge.suspend()
        try:
            release = Release(fleet, store, "{traffic: 50, for: 1h}", sets)
            wait_until(lambda: release.record.reason, 120, what=lambda: str(release.record))
            assert release.record.state == "evaluating"
            assert 'hotswap_release_state{model="toy",state="held"} 1.0' in httpx.get(f"{fleet.live.url}/metrics").text
            assert all(version != release.version for version, _ in seen.tokens)
        finally:
            judge.resume()
        release.until("judging")
        wait_until(lambda: any(version == release.version for version, _ in seen.tokens), 120)
        assert fleet.live.admin.post("/admin/releases/cancel", json={}).status_code == 200
        release.until("rolled_back")
        assert fleet.whole_again(release.stable)
    fleet.assert_clean(seen)


def _leader(fleet: Fleet, store: SyncStore) -> str:
    found = store.get(Keys(fleet.live.name).leader)
    return LeaderRecord.from_json(found.value).holder if found is not None else ""


def _led_by(pid: int, fleet: Fleet, store: SyncStore) -> str:
    """The leader's name, once it is that process: on a busy machine the other gateway may have come to lead."""
    other = _listens(httpx.URL(fleet.second_url).port)
    other.suspend()
    try:
        wait_until(lambda: f":{pid}:" in _leader(fleet, store), 120)
        return _leader(fleet, store)
    finally:
        other.resume()


def _listens(port: int | None) -> psutil.Process:
    (found,) = {c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
    return psutil.Process(found)
