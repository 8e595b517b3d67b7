"""Releases over the admin port and by command, on a gateway with two participants that build nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from server.errors import CliError
from server.gateway.release.policy import BUILT_IN
from server.gateway.release.records import ReleaseKeys, ReleaseRecord
from tests.server.gateway.admin.test_admin import two_participants
from tests.server.gateway.commands import command
from tests.server.gateway.harness import KEYS, RunningGateway, ask, new_key
from tests.server.gateway.upstream import upstream
from tests.waiting import wait_until
from weightsync.control import chain
from weightsync.control.records import ActiveRecord

POLICY = "steps: [{traffic: 50, for: 0s, conditions: [{metric: errors, max: 0.1}]}]\n"


@pytest.fixture(autouse=True)
def _a_canary_that_has_flipped_is_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.gateway.models.model.build_probe", lambda *_: None)


@pytest.fixture
def gateway(gateway: RunningGateway) -> Iterator[RunningGateway]:
    """Version 1 is active on both instances."""
    gateway.store.put(KEYS.active, ActiveRecord(1, 1, None, "first", 0.0).to_json())
    with two_participants(gateway):
        yield gateway


async def state(gateway: RunningGateway) -> dict[str, Any]:
    status, found = await ask(gateway, "GET", "/releases")
    assert status == 200
    return found


def until(gateway: RunningGateway, *states: str) -> None:
    def there() -> bool:
        current = gateway.gateway.default.releases.current
        return current is not None and current.state in states

    wait_until(there, what=lambda: str(gateway.gateway.default.releases.current))


async def test_a_release_divides_the_traffic_and_is_cancelled(gateway: RunningGateway) -> None:
    assert (await state(gateway))["release"] is None
    status, begun = await ask(gateway, "POST", "/releases?reason=better", version=2, text=POLICY)
    assert (status, begun["state"], begun["steps"], begun["requested_by"]) == (200, "evaluating", 1, "admin key")
    until(gateway, "held")
    found = await state(gateway)
    assert found["release"]["reason"].startswith("errors max 0.1: 0 of 100 answers")
    assert [(f["condition"], f["state"], f["candidate"]) for f in found["findings"]] == [
        ("errors max 0.1", "blind", [0.0, 1.0]),
        ("left max increase 0.05", "open", [0.0, 1.0]),
        ("arrived max change 0.02", "open", [0.0, 1.0]),
    ]
    split = (await ask(gateway, "GET", "/weights/active"))[1]["split"]
    assert [(share["version"], share["percent"]) for share in split["shares"]] == [(2, 50.0)]
    assert (await ask(gateway, "POST", "/releases", version=3, text=POLICY))[1]["code"] == "not_whole"
    assert (await ask(gateway, "POST", "/releases/cancel?reason=no"))[0] == 200
    until(gateway, "rolled_back")
    assert (await ask(gateway, "GET", "/weights/active"))[1]["split"] is None
    told = gateway.store.run(chain.recent(gateway.store.store, 100))
    assert ("release", 2, "better") in [(entry.action, entry.version, entry.reason) for entry in told]
    ends = [entry.outcome for entry in told if entry.action == "release_end"]
    assert ends == ["rolled_back: cancelled by admin key: no"]
    assert (await ask(gateway, "POST", "/releases/cancel"))[1]["code"] == "no_release"


async def test_what_cannot_begin_says_why(gateway: RunningGateway) -> None:
    for body, status, code in (
        ({"version": 2, "policy": "none"}, 404, "no_policy"),
        ({"version": 2, "text": f"minimum: 2\n{POLICY}"}, 409, "not_enough_instances"),
        ({"version": 2, "text": "steps: []"}, 400, "bad_policy"),
        ({"version": 9, "text": POLICY}, 404, "unknown_version"),
        ({"version": 1, "text": POLICY}, 409, "already_active"),
        ({"version": 0, "text": POLICY}, 400, "invalid_parameter"),
    ):
        said = await ask(gateway, "POST", "/releases", **body)
        assert (said[0], said[1]["code"]) == (status, code)
        assert code != "not_enough_instances" or "2 serve: start 2 more" in said[1]["message"]
    assert (await state(gateway))["release"] is None
    _, viewer = await new_key(gateway, name="looks", scopes=["viewer"])
    assert (await ask(gateway, "POST", "/releases", viewer, version=2, text=POLICY))[0] == 403
    assert (await ask(gateway, "GET", "/releases", viewer))[0] == 200


@pytest.mark.parametrize("guarded", ["release", "activate", "split"])
async def test_a_release_waits_for_one_approval_where_it_would_do_what_needs_it(
    gateway: RunningGateway, guarded: str
) -> None:
    assert (await ask(gateway, "PUT", "/policy", approvals=[guarded]))[0] == 200
    status, answer = await ask(gateway, "POST", "/releases?reason=better", version=2, text=POLICY)
    waiting = answer["pending"]
    assert (status, waiting["action"], waiting["version"]) == (202, "release", 2)
    assert (await state(gateway))["release"] is None
    path = f"/approvals/{waiting['id']}"
    assert (await ask(gateway, "POST", path))[1]["code"] == "same_identity"
    two_id, two = await new_key(gateway, name="two", scopes=["operator"])
    status, begun = await ask(gateway, "POST", f"{path}?reason=seen", two)
    assert (status, begun["version"], begun["requested_by"]) == (200, 2, "admin key")
    assert (await ask(gateway, "POST", path, two))[0] in (404, 409)
    until(gateway, "held")  # its split needed no further approval
    told = gateway.store.run(chain.recent(gateway.store.store, 100))
    assert (f"key two ({two_id})", "seen") in [(e.who, e.reason) for e in told if e.action == "approve"]
    assert (await ask(gateway, "POST", "/releases/cancel"))[0] == 200
    until(gateway, "rolled_back")  # nor has its end


@pytest.mark.parametrize("role", ["viewer", "operator", "publisher", "admin"])
async def test_no_role_chooses_what_the_gateway_opens(gateway: RunningGateway, tmp_path: Path, role: str) -> None:
    """Neither a file with the gateway's rights nor an address, in a policy of its own or in a stored one."""
    (secret := tmp_path / "secret").write_text("the key of the admin")
    _, key = await new_key(gateway, scopes=[role])
    judged = "steps: [{traffic: 50, for: 0s, conditions: [{metric: reward/x, min: 0.5}]}]\n"
    async with upstream() as trap:
        for text in (
            f"rewards: {{x: {{url: '{trap.address}', key_file: {secret}}}}}\n" + judged,
            f"rewards: {{x: {{url: '{trap.address}'}}}}\n" + judged,
            "rewards: {x: {}}\n" + judged,
            f"rewards: {{{trap.address}: {{}}}}\n" + judged.replace("/x", f"/{trap.address}"),
            f"rewards: {{x: {{}}}}\nevaluation: [{{file: {secret}, by: x, min: 0.1}}]\n" + judged,
        ):
            gateway.store.put(ReleaseKeys("toy").policy("old"), text.encode())
            for body in ({"text": text}, {"policy": "old"}):
                status, said = await ask(gateway, "POST", "/releases", key, version=2, **body)
                refused = (403, "insufficient_scope") if role == "viewer" else (400, "bad_policy")
                assert (status, said["code"]) == refused
                assert role == "viewer" or "--reward" in said["message"]
        _, said = await ask(gateway, "POST", "/weights", key, path=str(tmp_path), sign_key=str(secret))
        assert said["code"] == ("insufficient_scope" if role in ("viewer", "operator") else "unknown_sign_key")
        assert (await state(gateway))["release"] is None
        assert trap.connections == 0


async def test_a_release_in_the_store_with_a_url_is_ignored(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    old = "rewards: {x: {url: 'http://127.0.0.1:1'}}\n" + POLICY
    record = ReleaseRecord("r", 2, 1, old, "evaluating", 0, since=1.0, started_at=1.0)
    gateway.store.put(ReleaseKeys("toy").current, record.to_json())
    wait_until(lambda: "settings of the gateway (--reward" in caplog.text)
    assert (await state(gateway))["release"] is None
    assert (await ask(gateway, "POST", "/releases", version=2, text=POLICY))[0] == 200


async def test_a_release_begins_without_a_policy_and_where_there_is_one_by_that(gateway: RunningGateway) -> None:
    assert (await ask(gateway, "DELETE", "/releases/policies/default"))[1]["code"] == "no_policy"
    status, begun = await ask(gateway, "POST", "/releases", version=2)
    assert (status, begun["policy"], begun["steps"]) == (200, BUILT_IN["default"], 2)
    assert (await ask(gateway, "POST", "/releases/cancel"))[0] == 200
    until(gateway, "rolled_back")
    assert (await ask(gateway, "PUT", "/releases/policies/default", text=POLICY))[0] == 200
    assert (await ask(gateway, "GET", "/releases/policies"))[1] == {"policies": {"default": POLICY}, "built_in": []}
    assert (await ask(gateway, "POST", "/releases", version=2))[1]["policy"] == POLICY


async def test_policies_are_stored_by_name(gateway: RunningGateway) -> None:
    assert (await ask(gateway, "PUT", "/releases/policies/careful", text=POLICY))[1] == {"name": "careful", "steps": 1}
    assert (await ask(gateway, "PUT", "/releases/policies/bad", text="steps: {"))[1]["code"] == "bad_policy"
    assert (await ask(gateway, "GET", "/releases/policies"))[1]["policies"] == BUILT_IN | {"careful": POLICY}
    _, operator = await new_key(gateway, name="ops", scopes=["operator"])
    assert (await ask(gateway, "PUT", "/releases/policies/careful", operator, text=POLICY))[0] == 403
    assert (await ask(gateway, "DELETE", "/releases/policies/careful"))[0] == 200
    assert (await ask(gateway, "DELETE", "/releases/policies/careful"))[0] == 404
    told = gateway.store.run(chain.recent(gateway.store.store, 100))
    assert [e.outcome for e in told if e.action == "release_policy"] == ["was deleted", "was stored"]


def test_the_command(gateway: RunningGateway, tmp_path: Path) -> None:
    run = partial(command, gateway, "release")
    (file := tmp_path / "policy.yaml").write_text(POLICY)
    assert "no version was released yet" in run("status")
    assert run("policies").strip() == "default (built in)"
    assert run("policies", "default") == BUILT_IN["default"]
    assert "has 1 step(s)" in run("policies", "careful", "--put", str(file))
    assert run("policies").split("\n")[:2] == ["careful", "default (built in)"]
    assert run("policies", "careful") == POLICY
    assert "has begun: evaluating" in run("start", "2", "--policy", "careful")
    until(gateway, "held")
    said = run("status")
    assert "step 1 of 1, 50 % of the requests, held" in said
    assert "errors max 0.1" in said
    assert json.loads(run("status", "--json"))["release"]["state"] == "held"
    assert "version 1 gets all requests again" in run("cancel", "--reason", "late")
    until(gateway, "rolled_back")
    assert "rolled back: cancelled by admin key: late" in run("status")
    assert "is deleted" in run("policies", "careful", "--delete")
    for words in (["policies", "--put", str(file)], ["policies", "other"], ["start", "2", "--file", "/nowhere"]):
        with pytest.raises(CliError):
            run(*words)
