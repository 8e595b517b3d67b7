"""Stores and buckets that are there, away, closed to us or without a majority, etcd's clock, and files of models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from server.doctor.checks.store import NARROW_S, Sample, bounds, judge_clock
from server.doctor.registry import Finding, Status
from server.doctor.world import World
from server.ports import free_port
from tests.etcd import Etcd, Tls
from tests.server.asking import answering
from tests.server.doctor.worlds import checkpoint, findings, host, only, statuses
from tests.weightsync.bucket.test_bucket import publisher, weights
from weightsync import SyncStore, open_store
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys


@pytest.fixture(autouse=True)
def _a_busy_machine_has_time_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("store", "models_file"):
        monkeypatch.setattr(f"server.doctor.checks.{module}.TIMEOUT_S", 60.0)


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    server = Etcd()
    yield server
    server.close()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Etcd, Tls]]:
    """An etcd that wants to see a client's certificate."""
    tls = Tls(tmp_path_factory.mktemp("tls"), client_certificates=True)
    server = Etcd(tls=tls)
    yield server, tls
    server.close()


def test_a_sqlite_store(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    assert "made when it is needed" in only(findings("store", World(store=url)), "ok").found
    SyncStore(url).close()
    assert "takes writes" in only(findings("store", World(store=url)), "ok").found
    store = SyncStore(url)
    assert store.list("")[0] == []
    store.close()
    (tmp_path / "other.db").write_bytes(b"no database" * 500)
    assert "damaged" in only(findings("store", World(store=f"sqlite://{tmp_path}/other.db")), "fail").mend


def test_a_sqlite_store_on_a_file_system_of_the_network(tmp_path: Path) -> None:
    world = host(tmp_path, {"/proc/mounts": "server:/home / nfs4 rw 0 0\n"}, store=f"sqlite://{tmp_path}/store.db")
    assert "etcd://" in only(findings("store", world), "fail").mend


def test_no_store_and_what_is_none() -> None:
    assert "--store" in only(findings("store", World()), "skip").found
    only(findings("store", World(store="redis://somewhere")), "fail")
    assert "user" in only(findings("store", World(store="etcd://me:secret@host")), "fail").found
    only(findings("clock", World(store="sqlite:///store.db")), "skip")
    only(findings("clock", World(store="etcd://h?nonsense=1")), "skip")


def test_an_etcd_that_is_well(etcd: Etcd) -> None:
    found = findings("store", World(store=etcd.url("doctor")))
    assert [finding.found.split(",")[0] for finding in found] == [f"{etcd.hosts[0]} answers", "takes writes and leases"]
    assert "fail" not in statuses(found)
    assert only(findings("clock", World(store=etcd.url())), "ok").found.startswith(f"{etcd.hosts[0]} is ")


def test_nobody_listens() -> None:
    port = free_port()
    url = f"etcd://127.0.0.1:{port}"
    found = findings("store", World(store=url))
    assert statuses(found) == ["fail", "fail"]
    assert "Start etcd there" in found[0].mend
    assert "`store`" in only(findings("clock", World(store=url)), "skip").found


@pytest.mark.broad
def test_a_lost_member_is_a_warning_and_a_lost_majority_a_failure() -> None:
    cluster = Etcd(3)
    try:
        cluster.kill(2)
        found = findings("store", World(store=cluster.url()))
        assert "fail" not in statuses(found)
        assert (found[2].status, cluster.hosts[2] in found[2].found) == ("warn", True)
        cluster.kill(1)
        assert statuses(findings("store", World(store=cluster.url()))) == ["fail"] * 4
    finally:
        cluster.close()


def test_tls_faults_are_told_apart(secured: tuple[Etcd, Tls], etcd: Etcd, tmp_path: Path) -> None:
    server, tls = secured
    well = server.url(ca=tls.ca, cert=tls.cert, key=tls.key)
    assert "fail" not in statuses(findings("store", World(store=well)))
    only(findings("clock", World(store=well)), "ok")
    other = Tls(tmp_path)
    expected = {
        server.url(): "?ca=/path",
        server.url(ca=other.ca): "authority that signed",
        server.url(ca=tls.ca): "certificate that it trusts",
        server.url(ca=tmp_path / "absent.pem"): "Check ca=",
        etcd.url(ca=tls.ca): "leave ca= out",
    }
    for url, mend in expected.items():
        cannot_be_used(url, mend)
        only(findings("clock", World(store=url)), "skip")


def cannot_be_used(url: str, mend: str) -> None:
    found = findings("store", World(store=url))
    assert set(statuses(found)) == {"fail"}, found
    assert mend in found[0].mend


def test_users_and_what_they_may(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("right")
    (tmp_path / "wrong").write_text("wrong")
    server = Etcd()
    try:
        server.require_users(root="root", doctor="right")
        user = {"user": "doctor", "password_file": tmp_path / "password"}
        assert "fail" not in statuses(findings("store", World(store=server.url("doctor", **user))))
        cannot_be_used(server.url("doctor"), "wants a user")
        cannot_be_used(server.url("doctor", user="doctor", password_file=tmp_path / "wrong"), "password")
        cannot_be_used(server.url("elsewhere", **user), "Grant the role")
    finally:
        server.close()


def test_an_etcd_of_other_hosts_without_tls_and_users_is_warned_of() -> None:
    port = free_port()
    found = findings("store", World(store=f"etcd://0.0.0.0:{port}"))
    assert statuses(found)[2:] == ["warn", "warn"]
    assert "without TLS" in found[2].found
    assert "lets in whoever" in found[3].found


@pytest.mark.parametrize(
    ("skew", "expected"), [(0.0, "ok"), (-0.6, "ok"), (4.0, "warn"), (-4.0, "warn"), (30.0, "fail"), (-30.0, "fail")]
)
def test_the_clocks_difference_is_bounded_by_what_every_answer_says(skew: float, expected: Status) -> None:
    samples = []
    for step in range(40):  # an answer every 30 ms, written in the middle of a round trip of 4 ms
        sent = 1000.5 + 0.03 * step
        samples.append(Sample(sent, sent + 0.004, float(int(sent + 0.002 + skew))))
    low, high = bounds(samples)
    assert low <= skew <= high
    assert high - low < NARROW_S
    only([judge_clock("host", low, high)], expected)


def test_a_slow_network_widens_the_bounds_and_never_accuses() -> None:
    low, high = bounds([Sample(1000.0, 1008.0, 1002.0)])
    assert (low, high) == (-6.0, 3.0)
    only([judge_clock("host", low, high)], "ok")


def test_a_clock_that_was_set_meanwhile_is_told() -> None:
    low, high = bounds([Sample(1000.0, 1000.1, 1000.0), Sample(1001.0, 1001.1, 1009.0)])
    assert "was set" in only([judge_clock("host", low, high)], "warn").found


# buckets


def test_a_bucket_is_tried_out(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket/run"
    assert "pass --bucket" in only(findings("bucket", World(environ={})), "skip").found
    assert "no version yet" in only(findings("bucket", World(bucket=url)), "ok").found
    publisher(url).publish(weights())
    assert "the newest of its 1 versions is 1" in only(findings("bucket", World(bucket=url)), "ok").found


def test_one_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    away = only(findings("bucket", World(bucket=f"file://{tmp_path}/file/run")), "fail")
    assert "cannot be used" in away.found
    assert "AWS_ACCESS_KEY_ID" in away.mend
    found = only(findings("bucket", World(bucket="nothing://somebody:secret@x/run?token=secret")), "fail")
    assert "cannot be opened" in found.found
    assert "secret" not in found.found + found.mend


# files of models


def look(tmp_path: Path, text: str, store: str | None = None) -> list[Finding]:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return findings("models-file", host(tmp_path, models=file, store=store))


def test_a_mistake_is_told_with_its_line(tmp_path: Path) -> None:
    only(findings("models-file", host(tmp_path)), "skip")
    found = only(look(tmp_path, "models:\n  - name: a\naliases:\n  fast: [b]\n"), "fail")
    assert "line 4: alias fast: there is no model b" in found.found


@pytest.mark.parametrize(("there", "status"), [(True, "ok"), (False, "fail")])
def test_a_checkpoint_must_be_there(tmp_path: Path, there: bool, status: Status) -> None:
    place = tmp_path / "model"
    if there:
        checkpoint(place)
    found = look(tmp_path, f"models: [{{name: a, checkpoint: {place}}}]")
    assert only(found[1:], status).found.startswith("a: ")


def test_models_started_elsewhere_are_looked_up_in_the_store(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    text = "models: [{name: whole}, {name: bare}]"

    async def register() -> None:
        store = open_store(url)
        keys = Keys("whole")
        await store.put(keys.instance("i"), InstanceRecord("i", "http://127.0.0.1:1").to_json())
        await store.put(keys.active, ActiveRecord(1, 1, None, "s", 0.0).to_json())
        await store.close()

    asyncio.run(register())
    told = {(finding.status, finding.found.partition(": ")[0]) for finding in look(tmp_path, text, url)[1:]}
    assert told == {("ok", "whole"), ("warn", "bare")}
    mends = [finding.mend for finding in look(tmp_path, text, url) if finding.status == "warn"]
    assert ["push" in mends[0], "instance" in mends[1]] == [True, True]
    assert len(look(tmp_path, text, f"sqlite://{tmp_path}/none.db")) == 1, "`store` tells of that"


def hosted(path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """An upstream's answer."""
    if path != "/v1/models":
        return 404, b"{}"
    return (200, b'{"data": [{"id": "large-1"}]}') if headers["authorization"] == "Bearer right" else (401, b"{}")


@pytest.mark.parametrize(
    ("key", "path", "model", "status", "said"),
    [
        ("right", "/v1", "large-1", "ok", "lists large-1"),
        ("right", "/v1", "large-2", "warn", "does not list large-2"),
        ("wrong", "/v1", "large-1", "fail", "does not take the key"),
        ("right", "/v2", "large-1", "warn", "404"),
    ],
)
def test_an_upstream_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, path: str, model: str, status: Status, said: str
) -> None:
    monkeypatch.setenv("HOSTED_KEY", key)
    with answering(hosted) as url:
        upstream = f"{{url: '{url}{path}', model: {model}, api-key-env: HOSTED_KEY}}"
        found = only(look(tmp_path, f"models: [{{name: a}}, {{name: hosted, upstream: {upstream}}}]")[1:], status)
    assert said in found.found
    assert key not in found.found + found.mend


def test_an_upstream_that_is_not_there(tmp_path: Path) -> None:
    upstream = f"{{url: 'http://127.0.0.1:{free_port()}/v1'}}"
    found = only(look(tmp_path, f"models: [{{name: a}}, {{name: hosted, upstream: {upstream}}}]")[1:], "fail")
    assert "cannot be reached" in found.found
