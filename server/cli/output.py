"""The output of commands: lines that stay whole where no terminal reads them, and tables that fit where one does."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

ENDLESS = 1 << 16  # columns


def console(*, stderr: bool = False, **how: Any) -> Console:
    """One of the two channels. Text is printed as it is: names may have brackets. Without a terminal no line is broken:
    programs and files read it."""
    made = Console(stderr=stderr, markup=False, highlight=False, **how)
    if not made.is_terminal:
        made.width = ENDLESS
    return made


def table(*headers: str, whole: bool = False) -> Table:
    """A table with these columns.

    The first names what a row is about, and is whole in one line; any other cell that has no room goes on in the next,
    unless all are to be `whole`.
    """
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, header in enumerate(headers):
        made.add_column(header, overflow="fold", no_wrap=whole or index == 0)
    return made


def show(made: Table) -> None:
    """Print a table that is `whole`, without the last columns if a terminal has no room for them; it says which."""
    out, left_out = console(), list[str]()
    endless = out.options.update(max_width=ENDLESS)
    while len(made.columns) > 1 and Measurement.get(out, endless, made).maximum > out.width:
        left_out.insert(0, str(made.columns.pop().header))
    out.print(made)
    if left_out:
        out.print(f"no room for {', '.join(left_out)}: use a wider terminal, or --json")
