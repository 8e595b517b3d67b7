"""What one turn of the loop writes: in order, then what nobody waits for, all before the loop waits again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import cast

import pytest

from server.gateway.wire.pool import Outbox


class Wire(asyncio.Transport):
    def __init__(self, done: list[str], *, closing: bool = False) -> None:
        super().__init__()
        self._done, self._closing = done, closing

    def is_closing(self) -> bool:
        return self._closing

    def writelines(self, list_of_data: Iterable[bytes]) -> None:  # type: ignore[override]
        self._done.append(b"".join(list_of_data).decode())


async def test_work_is_done_behind_all_writes_of_the_turn() -> None:
    outbox, done = Outbox(), cast(list[str], [])
    outbox.put(Wire(done), (b"first ", b"answer"))
    outbox.afterwards(lambda: done.append("counted"))
    outbox.put(Wire(done, closing=True), (b"nobody reads this",))
    outbox.put(Wire(done), (b"second answer",))
    assert done == []
    await asyncio.sleep(0)
    assert done == ["first answer", "second answer", "counted"]


async def test_work_without_a_write_is_done_in_the_same_turn() -> None:
    outbox, done = Outbox(), cast(list[str], [])
    outbox.afterwards(lambda: done.append("counted"))
    await asyncio.sleep(0)
    assert done == ["counted"]


async def test_work_that_fails_keeps_no_other_from_being_done(caplog: pytest.LogCaptureFixture) -> None:
    outbox, done = Outbox(), cast(list[str], [])

    def fails() -> None:
        raise ZeroDivisionError

    def makes_more() -> None:
        outbox.put(Wire(done), (b"more",))
        outbox.afterwards(lambda: done.append("more counted"))

    for work in (fails, makes_more, lambda: done.append("counted")):
        outbox.afterwards(work)
    with caplog.at_level(logging.ERROR, "hotswap.gateway"):
        await asyncio.sleep(0)
    assert done == ["counted"]
    assert "behind an answer" in caplog.text
    await asyncio.sleep(0)
    assert done == ["counted", "more", "more counted"]
