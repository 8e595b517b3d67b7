"""`hotswap editions`: adapters that are served by the edition, without swaps, from the shell."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from server.cli.admin import AdminClient, AsJson, Reason, for_model
from server.cli.output import console, table

app = typer.Typer(no_args_is_help=True)

Number = Annotated[int, typer.Argument(help="of NAME@NUMBER, from `hotswap editions list`")]


@app.command()
@for_model
def publish(
    client: AdminClient,
    name: Annotated[str, typer.Argument(help="of the adapter")],
    directory: Annotated[Path, typer.Argument(help="PEFT directory on the gateway's host")],
    percent: Annotated[float, typer.Option(help="share of the requests for NAME that it gets")] = 100.0,
    keep: Annotated[int, typer.Option(help="newest editions of NAME that stay")] = 3,
    max_age_s: Annotated[float | None, typer.Option("--max-age", help="seconds after which older ones go")] = None,
    sign_key: Annotated[str, typer.Option(help="name of the gateway's --sign-key that signs it")] = "",
    reason: Reason = None,
) -> None:
    """Publish an adapter; NAME stands for it from then on, and NAME@NUMBER pins it."""
    body: dict[str, Any] = {"name": name, "path": str(directory.expanduser().resolve()), "percent": percent}
    body |= {"keep": keep} | ({"max_age_s": max_age_s} if max_age_s is not None else {})
    body |= {"sign_key": sign_key} if sign_key else {}
    made = client.call("POST", "/admin/editions", body, reason)
    share = f"gets {made['percent']:g} % of the requests for {name}"
    console().print(f"{made['id']} {share if made['percent'] else 'is on trial: requests that name it so get it'}")


@app.command("list")
@for_model
def list_editions(client: AdminClient, as_json: AsJson = False) -> None:
    """List the editions of adapters, the oldest first."""
    answer = client.call("GET", "/admin/editions")
    if as_json:
        print(orjson.dumps(answer).decode())
        return
    shown = table("edition", "percent", "step", "MB", "published", "by")
    for edition in answer["editions"]:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(edition["created_at"]))
        size, step = f"{edition['nbytes'] / 1e6:.1f}", "" if edition["step"] is None else str(edition["step"])
        shown.add_row(edition["id"], f"{edition['percent']:g}", step, size, made, edition["publisher"])
    console().print(shown)


@app.command()
@for_model
def share(
    client: AdminClient,
    number: Number,
    percent: Annotated[float, typer.Argument(help="of the requests for the name that no newer edition gets")],
    reason: Reason = None,
) -> None:
    """Give an edition another share of the requests for its name; 100 ends its trial."""
    changed = client.call("PUT", f"/admin/editions/{number}", {"percent": percent}, reason)
    console().print(f"{changed['id']} gets {changed['percent']:g} %")


@app.command()
@for_model
def withdraw(client: AdminClient, number: Number, reason: Reason = None) -> None:
    """Take an edition away; requests that run through it are finished."""
    console().print(f"{client.call('DELETE', f'/admin/editions/{number}', None, reason)['id']} is withdrawn")
