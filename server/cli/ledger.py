"""`hotswap ledger`: what was done to weights and keys, by whom and why; read from the store, not from a gateway."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from server.cli.admin import AdminClient, AsJson, StateDir, StoreUrl, for_gateway
from server.cli.output import console, table
from server.errors import CliError, as_cli_error
from server.up.paths import ServerInfo, default_state_dir
from weightsync.errors import WeightSyncError

T = TypeVar("T")
app = typer.Typer(no_args_is_help=True)

Place = Annotated[
    str | None, typer.Option("--archive", help="where older entries are; default: where the gateway put them")
]


@app.command("list")
@for_gateway
def list_entries(
    client: AdminClient,
    limit: Annotated[int, typer.Option(help="entries at most, of the newest 1000")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the newest entries, as the gateway has them."""
    answer = client.call("GET", f"/admin/ledger?limit={limit}")
    if as_json:
        print(json.dumps(answer))
        return
    shown = table("number", "when", "action", "who", "what", "reason", "outcome")
    for entry in answer["entries"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["at"]))
        what = [f"version {entry['version']}"] if entry["version"] is not None else []
        what += [entry["subject"]] if entry["subject"] else []
        cells = [when, entry["action"], entry["who"], ", ".join(what), entry["reason"], entry["outcome"]]
        shown.add_row(str(entry["number"]), *cells)
    console().print(shown)


@app.command()
def export(
    file: Annotated[Path | None, typer.Argument(help="default: standard output")] = None,
    since: Annotated[int, typer.Option(help="number of the first entry")] = 1,
    archive: Place = None,
    state_dir: StateDir = None,
    store: StoreUrl = None,
) -> None:
    """Write the entries as JSONL, oldest first, exactly as they were written."""
    from server import ledger

    async def lines(opened: Any) -> int:
        count = 0
        async for line in ledger.export(opened, archive or "", since):
            out.write(line + b"\n")
            count += 1
        return count

    try:
        out = file.open("wb") if file is not None else sys.stdout.buffer
    except OSError as error:
        raise CliError(f"{file} cannot be written ({error.strerror})") from error
    try:
        count = _with_store(_url(state_dir, store), lines)
    finally:
        out.flush()
        if file is not None:
            out.close()
    console(stderr=True).print(f"{count} entries")


@app.command()
def verify(
    anchor: Annotated[
        str | None, typer.Option(metavar="NUMBER:DIGEST", help="what an earlier `verify` printed: it must still be so")
    ] = None,
    archive: Place = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
    store: StoreUrl = None,
) -> None:
    """Check the whole chain, in store and files. Status 1 if an entry does not fit; the first such one is named."""
    from server import ledger

    found = _with_store(_url(state_dir, store), lambda opened: ledger.verify(opened, archive or "", anchor))
    out = console(soft_wrap=True)
    if as_json:
        fields = ("entries", "first", "head", "number", "problem", "ok")
        print(json.dumps({name: getattr(found, name) for name in fields}))
    elif found.ok:
        until = f"entries {found.first} to {found.first + found.entries - 1}" if found.entries else "no entries"
        out.print(f"the chain is whole: {until}. Note its end and give it as --anchor later: {found.head}")
    else:
        out.print(f"entry {found.number} does not fit: {found.problem}", style="red")
        out.print(f"{found.entries} entries before it fit")
    if not found.ok:
        raise typer.Exit(1)


@app.command("archive")
def move(
    place: Annotated[str, typer.Argument(help="directory, or a URL of fsspec's such as s3://bucket/ledger")],
    state_dir: StateDir = None,
    store: StoreUrl = None,
) -> None:
    """Move older entries out of the store now, as the gateway that leads does by itself."""
    from server import ledger

    where = place if "://" in place else str(Path(place).expanduser().resolve())
    moved = _with_store(_url(state_dir, store), lambda opened: ledger.archive(opened, where))
    console().print(f"{moved} entries left the store; the newest {ledger.KEPT} stay")


def _url(state_dir: Path | None, store: str | None) -> str:
    if store is not None and state_dir is None:
        return store
    return ServerInfo.read(state_dir or default_state_dir(None)).store


def _with_store(url: str, work: Callable[[Any], Awaitable[T]]) -> T:
    """Raises CliError."""
    from weightsync.store import open_store

    async def run() -> T:
        opened = open_store(url, create=False)
        try:
            return await work(opened)
        finally:
            await opened.close()

    with as_cli_error(WeightSyncError):
        return asyncio.run(run())
