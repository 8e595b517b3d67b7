"""The files that a publication and a swap enter, on one host with SQLite: `python scripts/entered.py`.

Engines are those of examples/swap_loop.py. A file counts once a function of it is called; `publication` is of the
threads that publish, `swap` of the loop that leads, stages, commits and flips.
"""

from __future__ import annotations

import asyncio
import runpy
import shutil
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np

from weightsync import Publisher

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "weightsync") + "/"


class Trace:
    """The calls of each file of weightsync, by the thread that makes them."""

    def __init__(self) -> None:
        self.calls: dict[int, Counter[str]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            found = self.calls.setdefault(threading.get_ident(), Counter())
            found[frame.f_code.co_filename.removeprefix(f"{ROOT}/")] += 1


async def main(directory: Path) -> None:
    example = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "swap_loop.py")))
    url, trace = f"sqlite://{directory / 'store.db'}", Trace()
    tensors = {"weight": np.ones(4, np.float32)}
    threading.setprofile(trace)  # of the threads that begin from now on
    sys.setprofile(trace)
    async with example.fleet(url, "ab"):
        publisher = await asyncio.to_thread(Publisher, url, model=example.MODEL)
        try:
            await asyncio.to_thread(publisher.publish, tensors)  # the first version defines the schema
            trace.calls.clear()
            await asyncio.to_thread(publisher.publish, tensors)
            calls = {thread: Counter(counts) for thread, counts in trace.calls.items()}
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            publisher.close()
            shutil.rmtree(publisher.arena.directory)
    leader = calls.pop(threading.get_ident())
    others: Counter[str] = sum(calls.values(), Counter())
    for name, counts in (("publication", others), ("swap", leader)):
        print(f"{name}: {len(counts)} files, {sum(counts.values())} calls")
        for file, count in sorted(counts.items()):
            print(f"{count:>8}  {file}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(main(Path(name)))
