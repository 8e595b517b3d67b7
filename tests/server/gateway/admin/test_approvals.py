"""Two-person approval: what needs a second identity waits for one, lapses, or is refused; the ledger names both."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from functools import partial

import pytest

from server.errors import CliError
from server.gateway.access.approvals import PENDING, POLICY, Approvals, PendingRecord, PolicyRecord
from server.gateway.access.records import By
from server.ledger import verify
from tests.server.gateway.commands import command
from tests.server.gateway.harness import KEYS, MODEL, RunningGateway, ask, new_key
from weightsync.control import chain
from weightsync.control.records import ActiveRecord
from weightsync.control.swap import Approval
from weightsync.errors import Conflict


async def policy(gateway: RunningGateway, *approvals: str) -> None:
    assert (await ask(gateway, "PUT", "/policy", approvals=approvals))[0] == 200


def active(gateway: RunningGateway) -> int | None:
    found = gateway.store.get(KEYS.active)
    return ActiveRecord.from_json(found.value).version if found is not None else None


def ledger(gateway: RunningGateway) -> list[chain.LedgerEntry]:
    """Oldest first."""
    return gateway.store.run(chain.recent(gateway.store.store, 100))[::-1]


async def test_nothing_waits_without_a_policy(gateway: RunningGateway) -> None:
    assert (await ask(gateway, "GET", "/policy"))[1] == {"approvals": [], "lapse_s": 3600.0}
    assert (await ask(gateway, "POST", "/weights/activate", version=1))[0] == 200
    assert (await ask(gateway, "GET", "/approvals"))[1] == {"pending": []}


async def test_a_second_identity_approves_and_the_ledger_names_both(gateway: RunningGateway) -> None:
    await policy(gateway, "activate")
    one_id, one = await new_key(gateway, name="one", scopes=["operator"])
    two_id, two = await new_key(gateway, name="two", scopes=["operator"])
    status, answer = await ask(gateway, "POST", "/weights/activate?reason=better", one, version=1)
    waiting = answer["pending"]
    assert (status, waiting["action"], waiting["version"]) == (202, "activate", 1)
    assert active(gateway) is None
    (listed,) = (await ask(gateway, "GET", "/approvals"))[1]["pending"]
    assert (listed["id"], listed["who"], listed["reason"]) == (waiting["id"], f"key one ({one_id})", "better")
    assert "digest" not in listed

    path = f"/approvals/{waiting['id']}"
    status, error = await ask(gateway, "POST", path, one)
    assert (status, error["code"]) == (403, "same_identity")
    rotated = await ask(gateway, "POST", f"/keys/{one_id}/rotate")  # a new secret is no new identity
    status, error = await ask(gateway, "POST", path, f"X-Api-Key: {rotated[1]['key']}\r\n")
    assert (status, error["code"]) == (403, "same_identity")
    _, viewer = await new_key(gateway, scopes=["viewer"])
    assert (await ask(gateway, "POST", path, viewer))[1]["code"] == "insufficient_scope"
    assert active(gateway) is None

    status, report = await ask(gateway, "POST", f"{path}?reason=I%20have%20looked", two)
    assert (status, report["version"]) == (200, 1)
    assert active(gateway) == 1
    assert (await ask(gateway, "POST", path, two))[1]["code"] == "unknown_approval"
    waited, approved, asked, committed = [e for e in ledger(gateway) if e.version == 1]
    assert (waited.action, waited.who, waited.reason) == ("approval_wait", f"key one ({one_id})", "better")
    assert (approved.action, approved.who, approved.reason) == ("approve", f"key two ({two_id})", "I have looked")
    assert (asked.action, asked.who, asked.subject) == (
        "activate",
        f"key one ({one_id})",
        f"approved by key two ({two_id})",
    )
    assert waited.swap == approved.swap == asked.swap == committed.swap
    assert gateway.store.run(verify(gateway.store.store)).ok


async def test_a_rollback_needs_none_and_is_no_way_around_it(gateway: RunningGateway) -> None:
    for version in (1, 2):
        assert (await ask(gateway, "POST", "/weights/activate", version=version))[0] == 200
    await policy(gateway, "activate")
    assert (await ask(gateway, "POST", "/weights/rollback"))[0] == 200
    assert active(gateway) == 1
    for body in ({}, {"version": 2}, {"version": 3}):  # 2 is the one before, and was withdrawn
        assert (await ask(gateway, "POST", "/weights/rollback", **body))[0] == 202
    assert active(gateway) == 1
    await policy(gateway)
    assert (await ask(gateway, "POST", "/weights/activate", version=3))[0] == 200
    await policy(gateway, "activate", "rollback")
    status, answer = await ask(gateway, "POST", "/weights/rollback")
    assert (status, answer["pending"]["version"]) == (202, 1)
    assert active(gateway) == 3


@pytest.mark.parametrize("order", [(1, 2), (1, 2, 3), (1, 2, 1, 3), (1, 3), (2, 3, 2, 3)], ids=str)
async def test_one_identity_alone_only_goes_back(gateway: RunningGateway, order: tuple[int, ...]) -> None:
    """A version that first served after the active one becomes active in no order of requests."""
    for version in order:
        assert (await ask(gateway, "POST", "/weights/activate", version=version))[0] == 200
    await policy(gateway, "activate")
    ways: list[tuple[str, dict[str, int]]] = [("rollback", {})]
    ways += [(way, {"version": version}) for way in ("rollback", "activate") for version in (1, 2, 3)]
    draw, went = random.Random(str(order)), 0
    for _ in range(25):
        before = order.index(active(gateway) or 0)
        way, body = draw.choice(ways)
        await ask(gateway, "POST", f"/weights/{way}", **body)
        after = order.index(active(gateway) or 0)
        assert after <= before, (way, body)
        went += after < before
    assert went


async def test_a_request_lapses_and_is_refused_or_withdrawn(gateway: RunningGateway) -> None:
    await policy(gateway, "activate")
    _, one = await new_key(gateway, scopes=["operator"])
    first = (await ask(gateway, "POST", "/weights/activate", one, version=1))[1]["pending"]["id"]
    second = (await ask(gateway, "POST", "/weights/activate", one, version=2))[1]["pending"]["id"]
    third = (await ask(gateway, "POST", "/weights/activate", one, version=3))[1]["pending"]["id"]
    key = f"{PENDING}{MODEL}/{first}"
    found = gateway.store.get(key)
    assert found is not None
    gateway.store.put(key, replace(PendingRecord.from_json(found.value), until=1.0).to_json())
    assert (await ask(gateway, "POST", f"/approvals/{first}"))[1]["code"] == "approval_lapsed"
    assert (await ask(gateway, "POST", f"/approvals/{first}"))[1]["code"] == "unknown_approval"
    assert (await ask(gateway, "DELETE", f"/approvals/{second}?reason=no"))[1]["action"] == "activate"
    assert (await ask(gateway, "DELETE", f"/approvals/{third}", one))[0] == 200
    assert (await ask(gateway, "GET", "/approvals"))[1] == {"pending": []}
    assert active(gateway) is None
    ended = [(e.action, e.version, e.reason) for e in ledger(gateway) if e.action in ("lapse", "refuse")]
    assert ended == [("lapse", 1, ""), ("refuse", 2, "no"), ("refuse", 3, "")]


async def test_what_cannot_be_done_is_told_at_once_and_again_when_it_is_approved(gateway: RunningGateway) -> None:
    await policy(gateway, "activate")
    assert (await ask(gateway, "POST", "/weights/activate", version=9))[1]["code"] == "unknown_version"
    _, one = await new_key(gateway, scopes=["operator"])
    waiting = (await ask(gateway, "POST", "/weights/activate", one, version=3))[1]["pending"]["id"]
    gateway.store.delete(KEYS.version(3))
    assert (await ask(gateway, "POST", f"/approvals/{waiting}"))[1]["code"] == "unknown_version"


async def test_a_split_waits_too(gateway: RunningGateway) -> None:
    assert (await ask(gateway, "POST", "/weights/activate", version=1))[0] == 200
    await policy(gateway, "split")
    shares = [{"version": 1, "percent": 90}, {"version": 2, "percent": 10}]
    status, answer = await ask(gateway, "POST", "/weights/split", shares=shares)
    assert (status, answer["pending"]["action"]) == (202, "split")


async def test_a_policy_that_guards_itself(gateway: RunningGateway) -> None:
    await policy(gateway, "activate", "policy")
    status, answer = await ask(gateway, "PUT", "/policy", approvals=[])
    assert (status, answer["pending"]["action"]) == (202, "policy")
    path = f"/approvals/{answer['pending']['id']}"
    _, operator = await new_key(gateway, scopes=["operator"])
    assert (await ask(gateway, "POST", path, operator))[1]["code"] == "insufficient_scope"
    assert (await ask(gateway, "POST", path))[1]["code"] == "same_identity"
    assert len((await ask(gateway, "GET", "/policy"))[1]["approvals"]) == 2
    second_id, second = await new_key(gateway, name="second", scopes=["admin"])
    assert (await ask(gateway, "POST", path, second))[0] == 200
    assert (await ask(gateway, "GET", "/policy"))[1]["approvals"] == []
    last = ledger(gateway)[-1]
    assert (last.action, last.who, last.subject) == ("policy", "admin key", f"approved by key second ({second_id})")
    assert "nothing needs approval" in last.outcome
    again = Approvals(gateway.store.store, MODEL)  # what does not wait any more is approved by nobody
    consent = Approval(f"{PENDING}{MODEL}/{answer['pending']['id']}", 1, "somebody")
    with pytest.raises(Conflict):
        gateway.store.run(again.put_policy(PolicyRecord(("split",)), By("x"), consent))
    assert (await ask(gateway, "GET", "/policy"))[1]["approvals"] == []


def test_a_guard_of_the_policy_counts_from_the_moment_it_is_written(gateway: RunningGateway) -> None:
    """Also for a request that has looked before: it is refused, and finds the guard when it comes again."""
    store, by = gateway.store, By("one")
    approvals = Approvals(store.store, MODEL)
    for guard in (PolicyRecord(("policy",)), PolicyRecord(("activate", "policy"))):
        assert store.run(approvals.hold("policy", by, policy=PolicyRecord())) is None
        store.run(approvals.put_policy(guard, By("two")))
        with pytest.raises(Conflict):
            store.run(approvals.put_policy(PolicyRecord(), by))
        assert store.run(approvals.policy()) == guard
        assert store.run(approvals.hold("policy", by, policy=PolicyRecord())) is not None
        store.delete(POLICY)


async def test_a_policy_that_cannot_be_read_lets_nothing_pass(gateway: RunningGateway) -> None:
    gateway.store.put(POLICY, b"{}x")
    assert (await ask(gateway, "POST", "/weights/activate", version=1))[0] == 500
    assert active(gateway) is None


async def test_of_two_who_approve_at_once_one_does(gateway: RunningGateway) -> None:
    await policy(gateway, "activate")
    _, one = await new_key(gateway, scopes=["operator"])
    waiting = (await ask(gateway, "POST", "/weights/activate", one, version=1))[1]["pending"]["id"]
    answers = await asyncio.gather(*(ask(gateway, "POST", f"/approvals/{waiting}") for _ in range(4)))
    assert sorted(status for status, _ in answers).count(200) == 1
    assert {answer["code"] for status, answer in answers if status != 200} <= {"approval_gone", "unknown_approval"}
    assert [e.action for e in ledger(gateway)].count("activate") == 1


def test_the_commands(gateway: RunningGateway) -> None:
    run = partial(command, gateway)
    assert "for: nothing" in run("policy")
    assert "for: release, within 3600 s" in run("policy", "--approve", "release")
    assert "for: nothing" in run("policy", "--nothing")
    assert "for: activate, within 7200 s" in run("policy", "--approve", "activate", "--lapse", "2h")
    with pytest.raises(CliError, match="name one of"):
        run("policy", "--approve", "everything")
    key = json.loads(run("keys", "create", "ops", "--scope", "operator", "--json"))["key"]
    told = run("weights", "activate", "1", "--reason", "try")
    assert "waits until" in told
    pending = json.loads(run("approve", "--json"))["pending"][0]["id"]
    assert pending in run("approve")
    with pytest.raises(CliError, match="cannot approve"):
        run("approve", pending)
    with pytest.raises(CliError, match="is not the id"):
        run("approve", "../keys")
    assert "version 1 is active" in run("approve", pending, key=key)
    run("weights", "activate", "2", key=key)
    pending = json.loads(run("approve", "--json"))["pending"][0]["id"]
    assert "is refused" in run("approve", pending, "--refuse")
