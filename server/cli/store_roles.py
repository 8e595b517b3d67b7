"""`hotswap store`: what an administrator of etcd does for a cluster."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from server.cli.output import console
from server.errors import CliError, as_cli_error
from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from server.etcd_roles import Role

app = typer.Typer(no_args_is_help=True)


@app.callback()
def store() -> None:
    """Users and roles of an etcd."""


@app.command()
def roles(
    model: Annotated[list[str], typer.Option(help="a served model; give all that use this etcd and namespace")],
    etcd: Annotated[
        str | None, typer.Option(envvar="HOTSWAP_STORE", help="etcd://HOST/NAMESPACE?user=root&password_file=...")
    ] = None,
    passwords: Annotated[
        Path | None, typer.Option(help="directory with a password a user, gateway to peer; missing ones are made")
    ] = None,
    enable: Annotated[bool, typer.Option(help="also make the user root, and let nobody in without a user")] = False,
) -> None:
    """Make or correct the roles gateway, instance, trainer and peer; with --passwords a user of each."""
    from server.etcd_roles import ROOT
    from server.etcd_roles import roles as roles_of

    if enable and passwords is None:
        raise CliError("--enable: give --passwords DIR too, or nobody could get in any more")
    wanted = roles_of(model)
    if etcd is None:
        _show(wanted)
        return
    names = [role.name for role in wanted] + ([ROOT] if enable else [])
    with as_cli_error(WeightSyncError):
        known = {name: _password(passwords / name) for name in names} if passwords is not None else {}
        asyncio.run(_apply(etcd, wanted, known, enable=enable))
    console().print(f"{', '.join(names)}: as they should be" + (f"; passwords in {passwords}" if passwords else ""))


async def _apply(etcd: str, wanted: tuple[Role, ...], passwords: dict[str, str], *, enable: bool) -> None:
    from server.etcd_roles import Administrator

    administrator = Administrator(etcd)
    try:
        for role in wanted:
            await administrator.make_role(role)
        await administrator.make_users(passwords)
        if enable:
            await administrator.require_users()
    finally:
        await administrator.close()


def _password(path: Path) -> str:
    """The password in the file, which is written (0600) if it is not there."""
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(32))
        password = path.read_text().rstrip("\r\n")
    except OSError as error:
        raise CliError(f"{path} cannot be read or made ({error.strerror}): name a directory of yours") from error
    if not password:
        raise CliError(f"{path} is empty: put the password into it, or delete it to have one made")
    return password


def _show(wanted: tuple[Role, ...]) -> None:
    table = Table("role", "writes", "reads")
    for role in wanted:
        table.add_row(role.name, "\n".join(sorted(role.writes)), "\n".join(sorted(role.reads)))
    console().print(table)
