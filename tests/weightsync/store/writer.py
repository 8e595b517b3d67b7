"""Writes 0, 1, 2 and so on to one key: `python -m tests.weightsync.store.writer URL NAME COUNT`."""

from __future__ import annotations

import sys

from weightsync import SyncStore


def main(url: str, name: str, count: int) -> None:
    store = SyncStore(url)
    for number in range(count):
        store.put(f"w/{name}", b"%d" % number)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
