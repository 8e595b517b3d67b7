"""`hotswap status`: a running server at one look."""

from __future__ import annotations

from typing import Annotated

import typer

from server.cli.admin import AdminClient, KeyFile, StateDir, Url, Which
from server.cli.instances import show_instances, show_swaps
from server.up.paths import ServerInfo, default_state_dir

app = typer.Typer(add_completion=False)


@app.command()
def status(
    state_dir: StateDir = None,
    name: Annotated[str | None, typer.Option(help="served name of the model, if several servers run here")] = None,
    url: Url = None,
    admin_key_file: KeyFile = None,
    model: Which = None,
) -> None:
    """Show the instances, the active version and the last swaps of a running server."""
    if url is None:
        state_dir = state_dir or default_state_dir(name)
        if (info := ServerInfo.read(state_dir)).state != "ready":
            print(f"{info.model} is {info.state}: not every instance serves")
    client = AdminClient(state_dir, url, admin_key_file, model or "")
    show_instances(client)
    show_swaps(client)
