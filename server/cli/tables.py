"""Tables that can be read on a terminal of 80 columns: nothing in them is cut off."""

from __future__ import annotations

from rich import box
from rich.table import Table


def table(*headers: str) -> Table:
    """A table with these columns.

    The first names what a row is about, and is whole in one line; any other cell that has no room goes on in the next.
    """
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, header in enumerate(headers):
        made.add_column(header, overflow="fold", no_wrap=index == 0)
    return made
