"""Flips wait for the requests that must not cross them, and for no others."""

from __future__ import annotations

import asyncio

import pytest

from server.gateway.terms import MAX_FINISH_S
from server.instance.inflight import FINISH_S, Inflight, VersionMismatch, Wish
from weightsync.control.state import CONFIRM_S


def test_headers() -> None:
    given = [(b"x-hotswap-policy", b"finish"), (b"x-hotswap-finish-s", b"2.5"), (b"x-hotswap-version", b"7")]
    assert Wish.of(given) == Wish(policy="finish", finish_s=2.5, version=7)
    assert Wish.of([(b"host", b"x")]) == Wish()


async def test_a_flip_waits_for_those_that_finish_and_holds_new_ones_only() -> None:
    inflight, finish = Inflight(), Wish(policy="finish")
    inflight.active = 1
    order: list[str] = []

    async def flip() -> None:
        async with inflight.closing(2):
            order.append("flipped")
            inflight.active = 2

    async def late() -> None:
        await inflight.admit(Wish(version=2))
        order.append("admitted")

    with inflight.running(finish), inflight.running(Wish()):
        flipping = asyncio.create_task(flip())
        await asyncio.sleep(0)
        held = asyncio.create_task(late())
        await inflight.admit(Wish())
        await asyncio.sleep(0)
        assert order == []
        order.append("finished")
    await asyncio.gather(flipping, held)
    assert order == ["finished", "flipped", "admitted"]


async def test_no_request_makes_a_flip_wait_longer_than_its_swap_does() -> None:
    """Else the swap is done without this instance, which then gets no requests until it has flipped."""
    wish = Wish.of([(b"x-hotswap-policy", b"finish"), (b"x-hotswap-finish-s", b"3600")])
    assert FINISH_S < wish.finish_s == MAX_FINISH_S < CONFIRM_S


async def test_patience_ends() -> None:
    inflight = Inflight()
    inflight.active = 1
    with inflight.running(Wish(version=1, finish_s=0.01)):
        async with asyncio.timeout(30), inflight.closing(2):
            pass


async def test_a_version_that_is_not_here_is_refused() -> None:
    inflight = Inflight()
    inflight.active = 4
    await inflight.admit(Wish(min_version=4))
    with pytest.raises(VersionMismatch):
        await inflight.admit(Wish(version=3))


def test_a_client_orders_its_requests_within_its_class_and_leaves_it_neither_way() -> None:
    urgent, plain, patient = (Wish.of([(b"x-hotswap-priority", b"%d" % p)]) for p in (-9, 0, 1))
    assert Wish.of([]).in_engine(0) == plain.in_engine(0) == 0
    asked = [-(10**12), -1, 0, 1, 999, 1000, 10**12]
    for higher, lower in ((urgent, plain), (plain, patient)):
        assert max(higher.in_engine(a) for a in asked) < min(lower.in_engine(a) for a in asked)
    assert plain.in_engine(-5) == plain.in_engine(0) < plain.in_engine(7) < plain.in_engine(8)
