"""`hotswap approve` and `hotswap policy`: requests that need a second identity."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from server.cli.admin import AdminClient, AsJson, Reason, for_model
from server.cli.keys import seconds_of
from server.cli.output import console, table
from server.cli.weights import show_swap
from server.errors import CliError
from server.gateway.access.approvals import GUARDED

app = typer.Typer(no_args_is_help=True)


@app.command()
@for_model
def approve(
    client: AdminClient,
    request: Annotated[str | None, typer.Argument(help="id of a request; without one, those that wait")] = None,
    refuse: Annotated[bool, typer.Option("--refuse", help="refuse it, or withdraw your own")] = False,
    reason: Reason = None,
    as_json: AsJson = False,
) -> None:
    """Approve what somebody else has asked for, which is then carried out; or list what waits."""
    if request is None:
        _list(client.call("GET", "/admin/approvals"), as_json)
        return
    if not request.isalnum():
        raise CliError(f"{request!r} is not the id of a request; `hotswap approve` lists them")
    path = f"/admin/approvals/{request}"
    answer = client.call("DELETE" if refuse else "POST", path, reason=reason)
    if as_json:
        print(json.dumps(answer))
    elif refuse:
        console().print(f"{answer['action']} of {answer['who']} is refused")
    elif "approvals" in answer:
        _show_policy(answer)
    elif "steps" in answer:
        console().print(f"the release of version {answer['version']} has begun: hotswap release status")
    else:
        show_swap(answer)


@app.command()
@for_model
def policy(
    client: AdminClient,
    approvals: Annotated[
        list[str] | None,
        typer.Option("--approve", help="activate, split, rollback, release or policy: needs approval; may be repeated"),
    ] = None,
    nothing: Annotated[bool, typer.Option("--nothing", help="nothing needs approval")] = False,
    lapse: Annotated[str, typer.Option(help="how long a request waits, such as 1h")] = "1h",
    reason: Reason = None,
    as_json: AsJson = False,
) -> None:
    """Show which requests need the approval of a second identity, or set it."""
    if approvals and nothing:
        raise CliError("--approve and --nothing exclude each other")
    if unknown := set(approvals or ()) - set(GUARDED):
        raise CliError(f"--approve {min(unknown)}: name one of {', '.join(GUARDED)}")
    if not approvals and not nothing:
        answer = client.call("GET", "/admin/policy")
    else:
        body = {"approvals": approvals or [], "lapse_s": seconds_of("--lapse", lapse)}
        answer = client.call("PUT", "/admin/policy", body, reason)
    if as_json:
        print(json.dumps(answer))
    elif "pending" in answer:
        console().print(f"it waits for somebody else: hotswap approve {answer['pending']['id']}")
    else:
        _show_policy(answer)


def _show_policy(policy: dict[str, Any]) -> None:
    needed = ", ".join(policy["approvals"])
    within = f", within {policy['lapse_s']:g} s" if needed else ""
    console().print(f"approval is needed for: {needed or 'nothing'}{within}")


def _list(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    shown = table("id", "action", "version", "who", "reason", "until")
    for one in answer["pending"]:
        about = one["target"] or one["release"]
        version = str(about["version"]) if about is not None else ""
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["until"]))
        shown.add_row(one["id"], one["action"], version, one["who"], one["reason"], until)
    console().print(shown)
