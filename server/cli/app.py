"""The commands by name. A module is imported when its command is asked for: what only reads starts quickly."""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# Where each command is, and what the list says of a group of them.
OURS = {
    "status": "server.cli.status",
    "doctor": "server.cli.commands",
    "up": "server.cli.commands",
    "instance": "server.cli.commands",
    "gateway": "server.cli.commands",
    "follow": "server.cli.commands",
    "peer": "server.cli.commands",
    "train": "server.cli.commands",
    "train-server": "server.cli.commands",
    "approve": "server.cli.approvals",
    "policy": "server.cli.approvals",
    "reward-server": "server.cli.commands",
}
GROUPS = {
    "weights": ("server.cli.weights", "Publish, activate, roll back, verify and compare weight versions."),
    "editions": ("server.cli.editions", "Adapters by the edition, without swaps: publish, list, share out, withdraw."),
    "release": ("server.cli.releases", "Let a version take over step by step, judged by its answers."),
    "keys": ("server.cli.keys", "Make, limit, rotate and revoke keys of a running gateway."),
    "ledger": ("server.cli.ledger", "What was done to weights and keys, by whom and why: list, export, verify."),
    "answers": ("server.cli.answers", "List, export and delete what is kept of answers."),
    "instances": ("server.cli.instances", "Show instances, take one out of routing, and back."),
    "store": ("server.cli.store_roles", "Roles and users of an etcd."),
}


class Commands(TyperGroup):
    """Ours, and those of other packages: entry points of the group `hotswap.commands`, each a Typer application."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in OURS:
            group: Any = typer.main.get_command(importlib.import_module(OURS[cmd_name]).app)
            return getattr(group, "commands", {cmd_name: group})[cmd_name]  # an application of one command is that one
        if cmd_name in GROUPS:
            module, text = GROUPS[cmd_name]
            command = _named(cmd_name, importlib.import_module(module).app)
            command.help = text
            return command
        if (ours := super().get_command(ctx, cmd_name)) is not None:
            return ours
        return next((_named(cmd_name, entry.load()) for entry in _plugins() if entry.name == cmd_name), None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in (known := self.list_commands(ctx)):
            close = difflib.get_close_matches(args[0], known)
            meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{meant}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*OURS, *super().list_commands(ctx), *GROUPS, *sorted(entry.name for entry in _plugins())]


def _plugins() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group="hotswap.commands"))


def _named(name: str, application: typer.Typer) -> Any:
    command = typer.main.get_command(application)
    command.name = name
    command.params = [p for p in command.params if p.name not in ("install_completion", "show_completion")]
    return command


app = typer.Typer(
    name="hotswap",
    cls=Commands,
    help="An LLM server whose weights can be replaced while it answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hotswap {version('hotswap')}")
        raise typer.Exit


@app.callback()
def hotswap(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="print the version and end")
    ] = False,
) -> None:
    """An LLM server whose weights can be replaced while it answers."""
