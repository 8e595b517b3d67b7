"""`hotswap keys`: the keys of a running gateway, from the shell."""

from __future__ import annotations

import json
import re
import sys
import time
from enum import StrEnum
from typing import Annotated, Any

import typer

from server.cli.admin import AdminClient, AsJson, Reason, for_gateway, with_options
from server.cli.output import console, table
from server.errors import CliError
from server.key_limits import LIMITS, KeyLimits, Limit

app = typer.Typer(no_args_is_help=True)

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
NO_LIMIT = "none"
CLOSES = """This is the first key: from now on every client needs one, and those without get 401 (docs/security.md).
To undo it, revoke all keys for inference, then `hotswap keys open`."""


class Scope(StrEnum):
    """The use that a key allows."""

    infer = "infer"
    viewer = "viewer"
    operator = "operator"
    publisher = "publisher"
    admin = "admin"


Id = Annotated[str, typer.Argument(help="a key's id, from `hotswap keys list`")]
Scopes = Annotated[
    list[Scope] | None, typer.Option("--scope", help="infer (default), or a role on the admin port; may be repeated")
]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="model, alias or adapter that it may ask for; may be repeated")
]
Expires = Annotated[str | None, typer.Option(help="time from now, such as 30d, 12h or 90m; `none`: never")]


def _option(field: str, limit: Limit) -> Any:
    flag = f"--{field.replace('_', '-')}"
    if getattr(KeyLimits, field) is None:
        return Annotated[str | None, typer.Option(flag, help=f"{limit.help}; a number, or `{NO_LIMIT}`")]
    return Annotated[int | None, typer.Option(flag, help=f"{limit.help}; {limit.least} to {limit.most}")]


def _limits(**given: Any) -> dict[str, Any]:
    """Fields of a body that set limits."""
    limits = {field: _number(field, value) for field, value in given.items() if value is not None}
    return {"limits": limits} if limits else {}


with_limits = with_options("limits", {field: _option(field, limit) for field, limit in LIMITS.items()}, _limits)


@app.command()
@for_gateway
@with_limits
def create(
    client: AdminClient,
    limits: dict[str, Any],
    name: Annotated[str, typer.Argument(help="who it is for")],
    scope: Scopes = None,
    expires: Expires = None,
    collect: Annotated[bool, typer.Option("--collect", help="keep the answers it gets, for training")] = False,
    model: Models = None,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask before the first key closes inference")] = False,
    as_json: AsJson = False,
    reason: Reason = None,
) -> None:
    """Make a key. It is shown this once: only its digest is kept. After the first, inference asks for one."""
    body = {"name": name, **_scopes(scope), **_expiry(expires), **limits} | ({"collect": True} if collect else {})
    body |= {"models": model} if model else {}
    if Scope.infer in (scope or [Scope.infer]) and client.call("GET", "/admin/keys")["inference"] == "open":
        typer.echo(CLOSES, err=True)
        if sys.stdin.isatty() and sys.stdout.isatty() and not yes:
            typer.confirm("Make it?", abort=True)
    _show_key(client.call("POST", "/admin/keys", body, reason), as_json)


@app.command("list")
@for_gateway
def list_keys(client: AdminClient, as_json: AsJson = False) -> None:
    """List all keys with their limits."""
    answer = client.call("GET", "/admin/keys")
    if as_json:
        print(json.dumps(answer))
        return
    models = ["models"] if any(key["models"] for key in answer["keys"]) else []  # a terminal has 80 columns
    shown = table("id", "name", "scopes", *models, "state", "expires", "limits")
    for key in answer["keys"]:
        cells = [key["name"], " ".join(key["scopes"])]
        cells += [" ".join(key["models"]) or "all"] if models else []
        cells += [key["state"], _date(key["expires_at"]), _limited(key["limits"]) + _spent(key)]
        shown.add_row(key["id"], *cells)
    console().print(shown)
    if answer["inference"] == "open":
        console().print("inference asks for no key, until one with the scope infer is made")
    elif not any(key["state"] == "active" and Scope.infer in key["scopes"] for key in answer["keys"]):
        console().print("inference asks for a key, and none of these works: `hotswap keys create`, or `keys open`")


@app.command()
@for_gateway
def show(client: AdminClient, key_id: Id) -> None:
    """Print one key's record as JSON."""
    print(json.dumps(client.call("GET", _path(key_id)), indent=1))


@app.command()
@for_gateway
@with_limits
def update(
    client: AdminClient,
    limits: dict[str, Any],
    key_id: Id,
    name: Annotated[str | None, typer.Option(help="who it is for")] = None,
    scope: Scopes = None,
    expires: Expires = None,
    disabled: Annotated[bool | None, typer.Option("--disable/--enable", help="whether it works for now")] = None,
    collect: Annotated[
        bool | None, typer.Option("--collect/--no-collect", help="whether the answers it gets are kept, for training")
    ] = None,
    model: Models = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="it may ask for any")] = False,
    reason: Reason = None,
) -> None:
    """Change what is named, in all gateways, within a moment; the rest stays."""
    body = {**_scopes(scope), **_expiry(expires), **limits}
    body |= {
        field: value
        for field, value in (("name", name), ("disabled", disabled), ("collect", collect))
        if value is not None
    }
    body |= {"models": model or []} if model or all_models else {}
    if not body:
        raise CliError("nothing to change: name what is to be different (--help lists the options)")
    record = client.call("PATCH", _path(key_id), body, reason)
    console().print(f"key {record['id']} ({record['name']}) is {record['state']}")


@app.command()
@for_gateway
def rotate(
    client: AdminClient,
    key_id: Id,
    grace: Annotated[str, typer.Option(help="how long the old key works beside the new one, such as 24h")] = "0s",
    as_json: AsJson = False,
    reason: Reason = None,
) -> None:
    """Give a record a new key, which is shown this once; limits stay."""
    _show_key(
        client.call("POST", f"{_path(key_id)}/rotate", {"grace_s": seconds_of("--grace", grace)}, reason), as_json
    )


@app.command()
@for_gateway
def revoke(
    client: AdminClient,
    key_id: Id,
    forget: Annotated[bool, typer.Option(help="also remove its record")] = False,
    reason: Reason = None,
) -> None:
    """End a key for good."""
    record = client.call("GET", _path(key_id))
    if record["state"] != "revoked":
        record = client.call("DELETE", _path(key_id), reason=reason)
    if forget:
        client.call("DELETE", f"{_path(key_id)}?forget=true", reason=reason)
    console().print(f"key {record['id']} ({record['name']}) is revoked" + (" and forgotten" if forget else ""))


@app.command("open")
@for_gateway
def open_inference(client: AdminClient, reason: Reason = None) -> None:
    """Let everybody in without a key, until one is made; only when all keys for inference are revoked."""
    client.call("POST", "/admin/keys/inference/open", reason=reason)
    console().print("inference asks for no key, until one is made")


def _path(key_id: str) -> str:
    if not re.fullmatch("[A-Za-z0-9_-]{1,64}", key_id):
        raise CliError(f"{key_id!r} is not a key's id; `hotswap keys list` shows them")
    return f"/admin/keys/{key_id}"


def _number(name: str, value: str | int) -> int | None:
    if isinstance(value, int):
        return value
    if value == NO_LIMIT:
        return None
    if not value.isdecimal():
        raise CliError(f"--{name.replace('_', '-')} {value}: write a number, or `{NO_LIMIT}`")
    return int(value)


def _scopes(scopes: list[Scope] | None) -> dict[str, Any]:
    return {"scopes": [scope.value for scope in scopes]} if scopes else {}


def _expiry(expires: str | None) -> dict[str, Any]:
    if expires is None:
        return {}
    return {"expires_at": None} if expires == NO_LIMIT else {"expires_in_s": seconds_of("--expires", expires)}


def seconds_of(option: str, text: str) -> float:
    """Seconds of a text such as 30d. Raises CliError."""
    found = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if found is None:
        raise CliError(f"{option} {text}: write a number and a unit of s, m, h, d or w, such as 30d")
    return float(int(found[1]) * SECONDS[found[2]])


def _show_key(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    print(answer["key"])
    note = "keep it now: it is not shown again"
    if answer["old_key_until"] is not None:
        note += f"; the old one works until {_date(answer['old_key_until'])}"
    console(stderr=True).print(f"key {answer['id']} ({answer['name']}): {note}")


def _limited(limits: dict[str, int | None]) -> str:
    """Those that are set: `60 requests/min, 4 concurrency`."""
    titles = {
        name: name.replace("_per_min", "/min").replace("_per_month", "/month").replace("_", " ") for name in LIMITS
    }
    return ", ".join(f"{limits[name]} {title}" for name, title in titles.items() if limits[name] is not None)


def _spent(key: dict[str, Any]) -> str:
    """The tokens used of the month's budget, and when the budget begins anew."""
    spent = key.get("spent")
    return "" if spent is None else f" ({spent['tokens']} used; resets {_date(spent['resets_at'])})"


def _date(moment: float | None) -> str:
    return "" if moment is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
