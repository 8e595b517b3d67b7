"""`hotswap doctor`: what this host lacks, and how to mend it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from server.cli.errors import CliError
from server.cli.paths import resolve_model

Names = Annotated[list[str] | None, typer.Option(help="run this check alone; may be given again")]


def doctor(
    store: Annotated[str | None, typer.Option(envvar="HOTSWAP_STORE", help="store URL to check")] = None,
    model: Annotated[str | None, typer.Option(help="checkpoint that is to fit: directory, or name as for `up`")] = None,
    arena: Annotated[Path | None, typer.Option(help="directory of the slots; default: as the processes choose")] = None,
    cluster_tls: Annotated[
        Path | None, typer.Option(envvar="HOTSWAP_CLUSTER_TLS", help="directory with tls.crt, tls.key and ca.crt")
    ] = None,
    host: Annotated[str, typer.Option(help="address the gateway is to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port the gateway is to listen on")] = 8000,
    admin_port: Annotated[int | None, typer.Option(help="its admin port, if it must be that one")] = None,
    instances: Annotated[int, typer.Option(help="vLLM instances on this host")] = 1,
    keep_versions: Annotated[int, typer.Option(help="versions kept staged, the active one included")] = 2,
    only: Names = None,
    skip: Annotated[list[str] | None, typer.Option(help="leave this check out; may be given again")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Check this host, its store and its certificates, and say how to mend each. Exit status 1 if a check fails."""
    from server.doctor import report
    from server.doctor.world import World

    try:
        checks = report.chosen(only or (), skip or ())
    except report.UnknownCheck as error:
        raise CliError(str(error)) from error
    world = World(
        store=store, model_dir=resolve_model(model) if model else None, arena=arena, cluster_tls=cluster_tls, host=host,
        port=port, admin_port=admin_port, instances=instances, keep_versions=keep_versions,
    )  # fmt: skip
    with _quiet("hotswap.gateway"):  # what it says of its machine code is in the report
        results = report.diagnose(world, checks)
    if as_json:
        print(report.to_json(results))
    else:
        report.show(results, Console(highlight=False))
    raise typer.Exit(1 if report.failed(results) else 0)


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Errors only from `logger` meanwhile."""
    target = logging.getLogger(logger)
    before = target.level
    target.setLevel(logging.ERROR)
    try:
        yield
    finally:
        target.setLevel(before)
