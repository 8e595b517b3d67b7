"""Publishes a checkpoint as the first version, from the pod with ordinal 0, where there is need of one.

--when first  if no version was ever committed
--when lost   also if no host holds the committed one any more: all pods were started anew, and memory was lost
--when never  not at all
--copies DIR  before that, a committed version that no host holds is restored from the copies in DIR

The slot lies in the memory of this pod; its instance maps it, and the peers of the others fetch it from here.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from weightsync.control.arenas import ensure_arena
from weightsync.control.hosts import host_of, this_host
from weightsync.control.records import ActiveRecord, Keys, VersionRecord
from weightsync.errors import StoreError, VersionLost
from weightsync.peer.copies import ready_digests
from weightsync.persist import restore
from weightsync.push import main as push
from weightsync.store import SyncStore
from weightsync.store.protocol import Store

PATIENCE_S = 120.0  # for the store to answer
GONE_S = 30.0  # for which nobody has had a copy, before it counts as lost; leases last 10 s


def main(arguments: list[str] | None = None) -> int:
    """Exit status: that of weightsync.push, 0 if there is nothing to do."""
    options = parser().parse_args(arguments)
    if options.ordinal != 0:
        return 0
    store, keys = SyncStore(options.store), Keys(options.model)
    try:
        reason = need(store, keys, "lost" if options.copies else options.when, options.gone_after)
        if reason and options.copies and (back := store.run(restored(store.store, options.model, options.copies))):
            print(back, file=sys.stderr, flush=True)
            return 0
        if reason and options.copies:
            reason = need(store, keys, options.when, 0)
    finally:
        store.close()
    print(f"publishing {options.directory}: {reason}" if reason else "nothing to publish", file=sys.stderr, flush=True)
    return push(["--store", options.store, "--model", options.model, str(options.directory)]) if reason else 0


def need(store: SyncStore, keys: Keys, when: str, gone_s: float) -> str:
    """Why a version has to be published; empty if none has to be. Raises StoreError."""
    deadline = time.monotonic() + gone_s
    while when != "never":
        active = active_version(store, keys)
        if active is None:
            return "no version was ever committed"
        if when == "first" or held(store, keys, active):
            return ""
        if time.monotonic() > deadline:
            return f"no host has had version {active.version} for {gone_s:g} s"
        time.sleep(min(1.0, gone_s))
    return ""


async def restored(store: Store, model: str, copies: Path) -> str:
    """The version that is in memory again, and its source; empty if no copy is whole.

    Without a whole copy of the committed version, the newest version with one is committed in its place.
    """
    arena, version = await ensure_arena(store), None
    for _ in range(2):
        try:
            found = await restore(store, model=model, directories=[copies], arena=arena, version=version)
        except VersionLost as error:
            print(error, file=sys.stderr, flush=True)
            if (version := error.offer) is None:
                return ""
        else:
            return f"version {found.version} comes from {found.source}" if found is not None else ""
    return ""


def active_version(store: SyncStore, keys: Keys) -> VersionRecord | None:
    """The committed version's record. A store that is not there yet is waited for. Raises StoreError."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            found = store.get(keys.active)
            if found is None:
                return None
            version = store.get(keys.version(ActiveRecord.from_json(found.value).version))
            return None if version is None else VersionRecord.from_json(version.value)
        except StoreError as error:
            if time.monotonic() > deadline:
                raise
            print(f"waiting for the store: {error}", file=sys.stderr, flush=True)
            time.sleep(1)


def held(store: SyncStore, keys: Keys, version: VersionRecord) -> bool:
    """Whether a host has the version: announced by its peer, or lying here."""
    here = host_of(version.slot) == this_host() and Path(version.slot.removeprefix(f"//{this_host()}")).exists()
    return here or version.manifest_digest in store.run(ready_digests(store.store, keys))


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description="Publish a checkpoint as the first version, if there is none.")
    p.add_argument("directory", type=Path)
    p.add_argument("--model", required=True)
    p.add_argument("--store", default=os.environ.get("HOTSWAP_STORE"))
    p.add_argument("--when", choices=("first", "lost", "never"), default="first")
    p.add_argument("--copies", type=Path, help="directory of copies on disk")
    p.add_argument("--ordinal", type=int, default=0, help="of this pod; only 0 publishes")
    p.add_argument("--gone-after", type=float, default=GONE_S, help="seconds without a copy after which it is lost")
    return p


if __name__ == "__main__":
    sys.exit(main())
