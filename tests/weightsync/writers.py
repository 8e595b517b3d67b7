"""Watches which module of the product writes the records of a swap."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORDS = re.compile(r"models/.+/(swap|active)\Z")
WRITER = "weightsync/control/swap.py"
PASSING = ("weightsync/store/", "weightsync/control/chain.py")  # they write on behalf of their caller
PRODUCT = ("weightsync/", "server/", "trainer/")


def watched(write: Callable[..., Awaitable[Any]], found: list[str]) -> Callable[..., Awaitable[Any]]:
    """`write`, a method of a store; each write of a swap or active record by another module than WRITER is `found`."""

    @functools.wraps(write)
    async def call(store: Any, *args: Any, **more: Any) -> Any:
        keys = [key for key in _written(args) if RECORDS.match(key)]
        if keys and (writer := next(_modules(), WRITER)).startswith(PRODUCT) and writer != WRITER:
            found.append(f"{writer} writes {', '.join(keys)}")
        return await write(store, *args, **more)

    return call


def _written(args: tuple[Any, ...]) -> Iterator[str]:
    """The keys that a call writes: `txn` has them in its second argument, the other calls one in their first."""
    if isinstance(args[0], Mapping):
        yield from args[1]
    else:
        yield args[0]


def _modules() -> Iterator[str]:
    """The files of the repository that wait for this write, the nearest first, without those that pass it on."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
        if name.startswith((*PRODUCT, "tests/", "loadtest/")) and not name.startswith(PASSING):
            yield name
        frame = frame.f_back  # type: ignore[assignment]
