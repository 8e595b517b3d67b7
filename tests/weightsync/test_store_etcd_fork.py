"""A process that has an etcd store open starts other programs, as the gateway does for every publication."""

from __future__ import annotations

import subprocess
import sys

from tests.etcd import Etcd

STARTS = """
import asyncio, collections, contextlib, sys
import uvloop
from weightsync import open_store

async def main():
    store, ended = open_store(sys.argv[1]), collections.Counter()

    async def traffic():
        while True:
            await store.put("a", b"1")

    busy = asyncio.create_task(traffic())
    for _ in range(400):
        child = await asyncio.create_subprocess_exec("/bin/true")
        ended[await child.wait()] += 1
    busy.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await busy
    await store.close()
    print(dict(ended))

uvloop.run(main())
"""


def test_no_child_dies_before_it_has_begun(etcd: Etcd) -> None:
    """gRPC's own fork handlers, left on, kill about one in a hundred (SIGSEGV)."""
    run = subprocess.run(
        [sys.executable, "-c", STARTS, etcd.url("fork")], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.strip() == "{0: 400}"
