"""`/admin/releases`: a version takes over step by step, and is rolled back by what its answers show.

`/admin/releases/policies` has the policies that releases can name. docs/releases.md describes both.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, ConfigDict, Field

from server.errors import ConfigError, HttpError
from server.gateway.access.approvals import ReleaseWish
from server.gateway.admin.deps import ByDep, ModelDep
from server.gateway.admin.weights import WAITS, waits
from server.gateway.models.model import Model
from server.gateway.release.judge import Finding
from server.gateway.release.policy import BUILT_IN, Policy, parse
from server.gateway.release.records import ReleaseKeys, ReleaseRecord
from server.gateway.release.scoring import check_names

router = APIRouter(prefix="/admin", tags=["admin"])

DEFAULT = "default"
PolicyName = Annotated[str, Path(pattern="^[A-Za-z0-9_.-]{1,64}$")]
Text = Annotated[str, Field(min_length=1, max_length=64 * 2**10, description="YAML")]


class Start(BaseModel):
    """A version to release by the stored policy of that name, or by the one in `text`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: Annotated[int, Field(ge=1, lt=2**63)]
    policy: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")] = DEFAULT
    text: Text | None = None


class PolicyText(BaseModel):
    """A policy as YAML."""

    model_config = ConfigDict(extra="forbid", strict=True)
    text: Text


@router.get("/releases")
async def show(model: ModelDep) -> dict[str, Any]:
    """The release under way or the last one, and what is known of the conditions of the step that is judged."""
    record = model.releases.current
    return {
        "model": model.name,
        "release": described(record) if record is not None else None,
        "findings": [_found(finding) for finding in await model.releases.findings()],
    }


@router.post("/releases", responses=WAITS)
async def start(model: ModelDep, by: ByDep, body: Start, response: Response) -> dict[str, Any]:
    """Begins a release, which goes on by itself on whichever gateway leads; or has it wait for approval."""
    text = body.text or await _stored(model, body.policy) or BUILT_IN.get(body.policy)
    if text is None:
        raise _no_policy(body.policy)
    await model.releases.check(body.version, checked(text, model))
    if (pending := await model.approvals.hold("release", by, release=ReleaseWish(body.version, text))) is not None:
        return waits(pending, response)
    return described(await model.releases.start(body.version, text, by))


@router.post("/releases/cancel")
async def cancel(model: ModelDep, by: ByDep) -> dict[str, Any]:
    """Takes the candidate back; answers when that is written down, and the fleet follows."""
    return described(await model.releases.cancel(by))


@router.get("/releases/policies")
async def policies(model: ModelDep) -> dict[str, Any]:
    """The stored policies and those that are built in, by name; `built_in` names the latter."""
    keys = ReleaseKeys(model.name)
    found, _ = await model.store.list(keys.policies)
    stored = {kv.key.removeprefix(keys.policies): kv.value.decode() for kv in found}
    return {"policies": {**BUILT_IN, **stored}, "built_in": sorted(BUILT_IN.keys() - stored.keys())}


@router.put("/releases/policies/{name}")
async def put_policy(model: ModelDep, by: ByDep, name: PolicyName, body: PolicyText) -> dict[str, Any]:
    """Stores a policy. A release under way goes on by the text it began with."""
    policy = checked(body.text, model)
    await model.releases.put_policy(name, body.text, by)
    return {"name": name, "steps": len(policy.steps)}


@router.delete("/releases/policies/{name}")
async def delete_policy(model: ModelDep, by: ByDep, name: PolicyName) -> dict[str, Any]:
    """Deletes a stored policy."""
    if await _stored(model, name) is None:
        raise _no_policy(name)
    await model.releases.put_policy(name, None, by)
    return {"name": name}


def described(record: ReleaseRecord) -> dict[str, Any]:
    """The record as JSON, with its policy's steps. `left_s`: seconds that a step which is judged lasts at least."""
    policy = parse(record.policy)
    step = policy.steps[record.step]
    about: dict[str, Any] = {
        "steps": len(policy.steps),
        "traffic": step.traffic,
        "shadow": step.shadow,
        "ended": record.ended,
    }
    about["plan"] = [{"traffic": s.traffic, "shadow": s.shadow, "seconds": s.seconds} for s in policy.steps]
    left_s = max(0.0, record.since + step.seconds - time.time())
    return asdict(record) | about | {"left_s": left_s if record.state == "judging" else None}


def checked(text: str, model: Model) -> Policy:
    """Raises HttpError (400)."""
    try:
        policy = parse(text)
        check_names(policy, model.config.named)
        return policy
    except ConfigError as error:
        raise HttpError(400, str(error), code="bad_policy") from error


async def _stored(model: Model, name: str) -> str | None:
    found = await model.store.get(ReleaseKeys(model.name).policy(name))
    return found.value.decode() if found is not None else None


def _no_policy(name: str) -> HttpError:
    stores = f"`hotswap release policies {name} --put FILE` stores one (PUT /admin/releases/policies/{name})"
    return HttpError(404, f"No policy named {name!r} is stored; {stores}.", code="no_policy")


def _found(finding: Finding) -> dict[str, Any]:
    intervals = {"candidate": finding.candidate, "stable": finding.stable}
    said = {name: [_number(i.low), _number(i.high)] if i is not None else None for name, i in intervals.items()}
    return {"condition": str(finding.condition), "state": finding.state, "text": finding.text, **said}


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if abs(value) != float("inf") else None
