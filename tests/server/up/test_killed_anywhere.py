"""`hotswap up` killed at any line of a start, a copy, a swap or a stop."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence

import pytest

from server.errors import Unauthorized
from tests.server.up.restarts import PERSISTING, STARTING, STOPPING, SWAPPING, Up, killed_at, run, swap_until, swapped
from weightsync.persist.disk import Disk


@pytest.mark.parametrize("every", [397, pytest.param(31, marks=pytest.mark.broad)])
@pytest.mark.parametrize("before", ["nothing", "memory", "disk", "fresh"])
def test_a_start_may_be_killed_at_any_line(server: Up, before: str, every: int) -> None:
    key, lines = "", 1
    while True:
        if before == "nothing":
            shutil.rmtree(server.state_dir, ignore_errors=True)
        elif not server.state_dir.exists() or server.active().version == 1:
            server.start()
            server.trained(2.0)
            key = server.make_key()
            server.stop()
        if before in ("memory", "fresh"):
            server.start()
            server.kill()
        if not killed_at(server.new(fresh=before == "fresh").start, STARTING, lines):
            return
        started = server.start()
        if before == "nothing" or server.active().version == 1:
            assert before in ("nothing", "fresh")
            assert server.served() == (1, 1.0)
            assert server.door(None) == "anonymous"  # a discard takes all or nothing
        else:
            assert server.served() == (2, 2.0)
            assert server.door(key) == "somebody"
            assert server.trained(3.0, commit=False) == 3
            server.forget(3)
        assert len(started.admin_key) > 16
        server.stop()
        lines += every


@pytest.mark.parametrize("share", [40, pytest.param(6, marks=pytest.mark.broad)])
@pytest.mark.parametrize("loses", ["processes", "power"])
@pytest.mark.parametrize(
    ("work", "files", "every"), [("persist", PERSISTING, 23), ("swap", SWAPPING, 211), ("stop", STOPPING, 23)]
)
def test_a_run_may_be_killed_at_any_line(
    server: Up, work: str, files: Sequence[str], every: int, loses: str, share: int
) -> None:
    """While it copies, swaps or stops. The tensors of each version are its number."""
    server.start()
    key, newest, lines, was_killed = server.make_key(), 1, 1, True
    while was_killed:
        server.stop()
        started = server.start()
        before, target = server.active().version, server.trained(newest + 1, commit=work != "swap")
        works: dict[str, Callable[[], object]] = {
            "persist": started.children["persist"].stop,
            "swap": lambda: asyncio.run(swapped(started.store, target)),  # noqa: B023 - called at once
            "stop": started.stop,
        }
        was_killed = killed_at(works[work], files, lines)
        committed = server.active().version
        copies = {kept.version: kept for kept in Disk(server.state_dir / "versions").kept()}
        for kept in copies.values():
            kept.verify()
        (server.kill if loses == "processes" else server.lose_power)()
        goes_on = server.start()
        run(swap_until(goes_on.store, lambda swap: swap.phase in ("done", "aborted")))
        if loses == "power" and committed not in copies:
            assert goes_on.said[0].startswith(f"version {committed} is lost")
            committed = before
        assert server.served() == (committed, float(committed))
        assert server.door(key) == "somebody"
        with pytest.raises(Unauthorized):
            server.door(None)
        assert server.trained(target + 1, commit=False) == target + 1
        server.forget(target + 1)
        newest = target
        lines += every * share
