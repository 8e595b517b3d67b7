"""`hotswap bench`: the benchmarks of loadtest/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)
Json = Annotated[Path | None, typer.Option("--json", help="write the figures here as JSON")]


@app.command()
def swap(
    json: Json = None,
    streams: Annotated[int, typer.Option(help="concurrent streams")] = 16,
    swaps: Annotated[int, typer.Option(help="swaps measured per way")] = 6,
    small: Annotated[bool, typer.Option(help="a tiny model: checks the benchmark, says nothing of speed")] = False,
) -> None:
    """Client-visible token gaps with no swap, with hotswap, and with vLLM's own pause, update and resume."""
    from loadtest.swap_stall import run

    run(json, streams=streams, swaps=swaps, small=small)


@app.command()
def gateway(json: Json = None) -> None:
    """What the gateway adds: time to first token, CPU per request and per streamed chunk."""
    from loadtest.gateway_overhead import run

    run(json)
