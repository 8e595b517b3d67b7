"""`python -m weightsync.persist`: copies each committed version to disk (see the package)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from weightsync.errors import WeightSyncError
from weightsync.hosts import this_host
from weightsync.persist.disk import Disk
from weightsync.persist.service import Persister, yield_to_all
from weightsync.publisher import STORE_ENV
from weightsync.records import Keys
from weightsync.store import open_store


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    yield_to_all()
    try:
        disk = Disk(options.dir, keep=options.keep, max_bytes=options.max_bytes)
        with disk.lock():
            return 0 if asyncio.run(_serve(options.store, options.model, disk)) else 1
    except WeightSyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def _serve(url: str, model: str, disk: Disk) -> bool:
    """Until a signal; whether the active version is on disk then."""
    store = open_store(url, create=False)
    stopped = asyncio.Event()
    try:
        persister = Persister(store, Keys(model), disk, this_host())

        def on_signal() -> None:
            if stopped.is_set():
                persister.abandon()
            stopped.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        return await persister.run(stopped)
    finally:
        with contextlib.suppress(WeightSyncError):
            await store.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weightsync.persist", description="Copy committed versions to disk."
    )
    parser.add_argument("--store", default=os.environ.get(STORE_ENV), required=STORE_ENV not in os.environ)
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--dir", type=Path, required=True, help="where the copies go")
    parser.add_argument("--keep", type=_positive, default=2, help="versions on disk (default: 2)")
    parser.add_argument("--max-bytes", type=_positive, help="bytes on disk; twice what a version takes, or more")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
