"""etcd's certificates and a client's are replaced, authority and all, under a store that stays open."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.etcd import Etcd, Tls
from weightsync import open_store
from weightsync.errors import StoreUnavailable
from weightsync.store import Event


async def test_a_store_goes_on_with_new_certificates(tmp_path: Path) -> None:
    tls = renewed(tmp_path)
    ours = copied(tls, tmp_path / "client")
    server = Etcd(tls=tls)
    store = open_store(server.url("n", **ours))
    try:
        revision = await store.put("a", b"1")
        events: AsyncGenerator[Event, None] = store.watch("b", revision + 1)
        seen = asyncio.create_task(anext(events))
        await store.put("b", b"1")
        assert (await asyncio.wait_for(seen, 30)).kv.value == b"1"
        seen = asyncio.create_task(anext(events))
        await asyncio.to_thread(server.kill)
        copied(renewed(tmp_path), tmp_path / "client")
        await asyncio.to_thread(server.start)
        await store.put("b", b"2")
        assert (await asyncio.wait_for(seen, 30)).kv.value == b"2"
        await events.aclose()
        await asyncio.to_thread(server.kill)
        tls = renewed(tmp_path)
        await asyncio.to_thread(server.start)
        with pytest.raises(StoreUnavailable):  # etcd has its new ones, and this client does not
            await store.get("a")
        copied(tls, tmp_path / "client")
        found = await store.get("a")
        assert found is not None
        assert found.value == b"1"
    finally:
        await store.close()
        server.close()


def renewed(directory: Path) -> Tls:
    """Certificates of another authority, in the files that the server reads."""
    return Tls(directory / "etcd", client_certificates=True)


def copied(tls: Tls, directory: Path) -> dict[str, object]:
    """What a client needs of `tls`, in `directory`: options of its URL."""
    directory.mkdir(exist_ok=True)
    for source in (tls.ca, tls.cert, tls.key):
        shutil.copy(source, directory / source.name)
    return {"ca": directory / tls.ca.name, "cert": directory / tls.cert.name, "key": directory / tls.key.name}
