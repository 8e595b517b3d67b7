"""Errors of where versions lie: slots in shared memory, copies on disk, buckets."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.errors.base import WeightSyncError


class ArenaError(WeightSyncError):
    """Shared-memory slots cannot be had."""


def arena_full(directory: str, needed: int, free: int) -> ArenaError:
    """No room for one more slot. `needed` and `free` are bytes."""
    message = (
        f"a slot needs {needed:,} bytes, {directory} has {free:,} free: retire versions nobody needs, or enlarge "
        "the file system (mount -o remount,size=...; in a container --shm-size, or a larger emptyDir)"
    )
    return ArenaError(message, code="arena_full", needed=needed, free=free)


class SlotBusy(ArenaError):
    """The slot is held by somebody else."""


class ManifestError(WeightSyncError):
    """The file is not a slot, or holds another version than the one asked for."""


class PersistError(WeightSyncError):
    """The directory with the copies of versions cannot be used."""


def persist_full(version: int, problem: str) -> PersistError:
    """A version was not written to disk, for want of room; what is there stays."""
    return PersistError(f"version {version} is not on disk: {problem}", code="persist_full", version=version)


class VersionLost(PersistError):
    """The version committed last cannot be served again. `offer`: the newest one that can, None if there is none."""

    def __init__(self, version: int, reason: str, offer: int | None) -> None:
        self.version, self.reason, self.offer = version, reason, offer
        advice = "publish it again" if offer is None else f"version {offer} is whole and could be served instead"
        super().__init__(f"version {version} is active and lost: {reason}; {advice}")


class BucketError(WeightSyncError):
    """A bucket of versions cannot be used as it was named, or now."""


class BucketDamaged(BucketError):
    """An object is not what the record of its version, or its own digest, says."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(f"{path} is damaged: {problem}; publish a later version, in full")


class VersionGone(BucketError):
    """A version that was there a moment ago was removed, as newer ones came."""

    def __init__(self, url: str, number: int) -> None:
        self.number = number
        super().__init__(f"version {number} is no longer in {url}: take the newest one, or keep more (`keep`)")


def version_needed(bucket: str, version: int, users: Sequence[int]) -> BucketError:
    """A version of a bucket cannot be removed: `users` are the versions that need it, none if it is the newest."""
    needed = (
        f"versions {', '.join(map(str, users))} need it: remove those first"
        if users
        else "it is the newest, which followers take: publish another one first"
    )
    return BucketError(f"version {version} stays in {bucket}; {needed}", code="version_needed", version=version)
