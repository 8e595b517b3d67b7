"""Where a version is on this host, for who is about to open its slots; waits while the host's peer fetches them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from weightsync.board import Board
from weightsync.errors import CopyUnavailable, ManifestError, SlotBusy
from weightsync.hosts import HOST_ENV, host_of, local_path
from weightsync.parts import slots_of
from weightsync.peer.copies import pieces, placed
from weightsync.peer.wants import wanted_versions
from weightsync.receiver import SlotReader
from weightsync.records import CopyRecord, Keys, PartRecord, VersionRecord
from weightsync.store.protocol import Store

STILL_WANTED_S = 2.0  # between looks whether the version is still asked for


async def localized(store: Store, keys: Keys, version: VersionRecord, host: str, timeout_s: float) -> VersionRecord:
    """`version` with the path of each slot's copy on `host` instead of its name, once all are there.

    On the one host ("") that is `version` itself, at once. Raises CopyUnavailable: the peer cannot fetch it, it is not
    here after `timeout_s`, or nobody wants it any more; StoreUnavailable.
    """
    if not host:
        return _on_the_one_host(version)
    wait = _Wait(store, keys, version, host)
    found = asyncio.create_task(wait.paths())
    dropped = asyncio.create_task(wait.until_unwanted())
    try:
        await asyncio.wait({found, dropped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if found.done():
            paths = found.result()
            return placed(version, lambda part: paths[part.manifest_digest])
        if dropped.done():
            dropped.result()
            raise wait.error("nobody wants it any more, so it is not waited for")
        raise wait.error(f"it was not here after {timeout_s:g} s")
    finally:
        for task in (found, dropped):
            task.cancel()
        await asyncio.gather(found, dropped, return_exceptions=True)


def _on_the_one_host(version: VersionRecord) -> VersionRecord:
    """Raises CopyUnavailable for what only a peer could bring."""
    elsewhere = {host for slot in slots_of(version) if (host := host_of(slot))}
    if elsewhere:
        raise CopyUnavailable(
            version.version,
            "",
            f"it lies on host {min(elsewhere)}: set {HOST_ENV}, and run `hotswap peer` on this host",
        )
    return version


class _Wait:
    """For the slots of one version. `last` is what the peer said last of what is missing."""

    def __init__(self, store: Store, keys: Keys, version: VersionRecord, host: str) -> None:
        self._store, self._keys, self._version, self._host = store, keys, version, host
        self._last: CopyRecord | None = None

    async def paths(self) -> dict[str, Path]:
        """By manifest digest, when all are here. Raises CopyUnavailable."""
        return {part.manifest_digest: await self._path(part) for part in pieces(self._version)}

    async def until_unwanted(self) -> None:
        """Return when the version is neither swapped in nor active, previous or asked for."""
        while True:
            await asyncio.sleep(STILL_WANTED_S)
            found = [await self._store.get(key) for key in (self._keys.swap, self._keys.target, self._keys.active)]
            board = Board(self._keys, [kv for kv in found if kv is not None], 0)
            if self._version.version not in wanted_versions(board):
                return

    def error(self, reason: str) -> CopyUnavailable:
        """With what the peer said of it."""
        last = self._last
        if last is None:
            reason += f"; no peer of {self._host} has begun to fetch it: is `hotswap peer` running there?"
            return CopyUnavailable(self._version.version, self._host, reason)
        if last.error is None:
            return CopyUnavailable(self._version.version, self._host, f"{reason}; its peer is still at it")
        return CopyUnavailable(self._version.version, self._host, f"{reason}; {last.error.message}", last.error.code)

    async def _path(self, part: PartRecord) -> Path:
        path = local_path(part.slot, self._host)
        if path is not None and await asyncio.to_thread(_is_there, path, part.manifest_digest):
            return path
        key = self._keys.copy(part.manifest_digest, self._host)
        found, revision = await self._store.list(key)
        for kv in found:
            if kv.key == key and (path := self._look(kv.value)) is not None:
                return path
        async with contextlib.aclosing(self._store.watch(key, revision + 1)) as events:
            async for event in events:
                if event.kv.key == key and event.kind == "put" and (path := self._look(event.kv.value)) is not None:
                    return path
        raise AssertionError("unreachable: a watch does not end")

    def _look(self, raw: bytes) -> Path | None:
        """Raises CopyUnavailable when the peer has failed to fetch it."""
        self._last = copy = CopyRecord.from_json(raw)
        if copy.state == "failed":
            raise self.error("its peer could not fetch it")
        return local_path(copy.slot, self._host) if copy.state == "ready" else None


def _is_there(path: Path, digest: str) -> bool:
    """Whether a slot that was published here still holds it: after a restart of the host it does not."""
    try:
        SlotReader.open(path, manifest_digest=digest, populate=False).close()
    except SlotBusy:
        return True  # somebody looks for a free slot, and has it for a moment
    except (ManifestError, OSError):
        return False
    return True
