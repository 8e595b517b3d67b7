"""`hotswap release`: a version takes over step by step, and is rolled back by what its answers show."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from server.cli.admin import AdminClient, AsJson, Reason, for_model
from server.cli.output import console, table
from server.cli.weights import show_swap
from server.errors import CliError

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Option("--policy", help="name of a policy: `hotswap release policies` lists them")]
File = Annotated[Path | None, typer.Option("--file", help="policy in YAML, instead of a stored one")]
LOOK_S = 1.0


@app.command()
@for_model
def start(
    client: AdminClient,
    version: Annotated[int, typer.Argument(help="the version that is to take over")],
    policy: Name = "default",
    file: File = None,
    wait: Annotated[bool, typer.Option("--wait", help="until it has ended; status 1 if it was rolled back")] = False,
    reason: Reason = None,
) -> None:
    """Begin to release a version."""
    body: dict[str, Any] = {"version": version, "policy": policy}
    body |= {"text": _read(file)} if file is not None else {}
    release = client.call("POST", "/admin/releases", body, reason)
    if "pending" in release:
        show_swap(release)
        return
    console().print(f"the release of version {version} has begun: {_place(release)}")
    while wait and not release["ended"]:
        time.sleep(LOOK_S)
        now = client.call("GET", "/admin/releases")["release"]
        if now["id"] != release["id"]:
            raise CliError("another release has begun since; `hotswap release status` shows it")
        if (now["state"], now["step"], now["reason"]) != (release["state"], release["step"], release["reason"]):
            console().print(_place(now))
        release = now
    if wait and release["state"] != "done":
        raise typer.Exit(1)


@app.command()
@for_model
def status(client: AdminClient, as_json: AsJson = False) -> None:
    """Show the release under way, or the last one, with what is known of its conditions."""
    answer = client.call("GET", "/admin/releases")
    if as_json:
        print(json.dumps(answer))
        return
    release, out = answer["release"], console()
    if release is None:
        out.print("no version was released yet; `hotswap release start VERSION` begins")
        return
    out.print(f"version {release['version']}, over version {release['stable']}: {_place(release)}")
    findings = answer["findings"]
    if findings:
        shown = table("condition", "state", "candidate", "stable", "what is known")
        for finding in findings:
            cells = [_interval(finding["candidate"]), _interval(finding["stable"]), finding["text"].partition(": ")[2]]
            shown.add_row(finding["condition"], finding["state"], *cells)
        out.print(shown)
    else:
        for line in release["findings"]:
            out.print(f"  {line}")


@app.command()
@for_model
def cancel(client: AdminClient, reason: Reason = None) -> None:
    """Take the candidate back."""
    release = client.call("POST", "/admin/releases/cancel", {}, reason)
    console().print(f"version {release['stable']} gets all requests again")


@app.command()
@for_model
def policies(
    client: AdminClient,
    name: Annotated[str | None, typer.Argument(help="show this one")] = None,
    put: Annotated[Path | None, typer.Option(help="store this file under the name")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="delete the one of that name")] = False,
    reason: Reason = None,
) -> None:
    """List the policies; show, store or delete one."""
    if (put is not None or delete) and (name is None or (put is not None and delete)):
        raise CliError("name the policy, and say one of --put FILE and --delete")
    if put is not None:
        stored = client.call("PUT", f"/admin/releases/policies/{name}", {"text": _read(put)}, reason)
        console().print(f"policy {name} has {stored['steps']} step(s)")
        return
    if delete:
        client.call("DELETE", f"/admin/releases/policies/{name}", None, reason)
        console().print(f"policy {name} is deleted")
        return
    answer = client.call("GET", "/admin/releases/policies")
    found, built_in = answer["policies"], answer.get("built_in", ())
    if name is None:
        print("\n".join(f"{known} (built in)" if known in built_in else known for known in sorted(found)))
    elif name in found:
        print(found[name].rstrip("\n"))
    else:
        raise CliError(f"there is no policy named {name}; there are {', '.join(sorted(found)) or 'none'}")


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{file} cannot be read ({error})") from error


def _place(release: dict[str, Any]) -> str:
    state, why = release["state"].replace("_", " "), f": {release['reason']}" if release["reason"] else ""
    if release["state"] in ("applying", "judging", "held"):
        shadow = f", {release['shadow']:g} % repeated" if release["shadow"] else ""
        step = f"step {release['step'] + 1} of {release['steps']}, {release['traffic']:g} % of the requests{shadow}"
        return f"{step}, {state}{why}"
    return f"{state}{why}"


def _interval(bounds: list[float | None] | None) -> str:
    if bounds is None:
        return ""
    low, high = ("" if bound is None else f"{bound:.4g}" for bound in bounds)
    return f"{low} to {high}" if low or high else "-"
