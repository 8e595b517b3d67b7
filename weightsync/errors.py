"""The errors of `weightsync`: a class for what programs tell apart, a code (`error_codes.py`) for what people read.

WeightSyncError               base: `code` for machines, a message that says what to do, `tensor` when one is to blame
├── PublishError              a version could not be published, or not be made active
│   ├── TensorError           one tensor is to blame
│   ├── CheckpointError       a checkpoint directory cannot be read
│   ├── StalePublisher        a newer publisher of the lineage has taken over
│   └── SwapError             a version was not made active
├── StoreError
│   ├── StoreUnavailable      the store is absent, unwritable, corrupt, locked too long, unreachable or another one
│   │   └── StoreRefused      it is there and refuses: credentials, certificates, limits
│   ├── Conflict              a compare failed: somebody else wrote first
│   ├── LeaseLost             the lease expired; what was kept under it is gone
│   ├── WatchCompacted        the watch asks for events that are no longer kept; list again
│   └── RecordError           a record does not have the fields it must have, or cannot have those it is to have
├── ArenaError
│   └── SlotBusy              the slot is held by somebody else
├── ManifestError             not a slot, or not the version that was asked for
├── PersistError              the copies on disk cannot be written or read
│   └── VersionLost           the committed version is neither in memory nor on disk; `offer` is what is
├── BucketError               a bucket of versions cannot be used
│   ├── BucketDamaged         what lies there is not what was published
│   └── VersionGone           a version was removed meanwhile
├── TransferError             the bytes of a slot did not get from one host to another
│   ├── TransportUnavailable  the library is not installed or does not work here
│   └── PeerUnreachable       no connection to the other host
├── PeerError                 a version could not be had from another host
│   └── PeerRefused           the other host does not serve what was asked for, or not now
├── EngineError               an engine cannot run versions, or not this one
└── TlsUnavailable            the certificate, key or authority of a cluster's member cannot be used
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from weightsync.error_codes import CODES


class WeightSyncError(Exception):
    """Base of the tree. `code` is stable and meant for machines: one of CODES, without another one the name of the
    class in snake case. `tensor` names the tensor to blame, if one is; `details` are further attributes."""

    code = "weightsync_error"
    tensor: str | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.code = re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, message: str, /, *, code: str | None = None, **details: Any) -> None:
        """Raises ValueError for a `code` that is not in CODES."""
        super().__init__(message)
        if code is not None:
            if code not in CODES:
                raise ValueError(f"no error has the code {code!r}: add it to weightsync.error_codes")
            self.code = code
        vars(self).update(details)

    def to_json(self) -> dict[str, str | None]:
        """The error as an instance record or the output of a command has it: code, message, tensor."""
        return {"code": self.code, "message": str(self), "tensor": self.tensor}


# publishing: checkpoints, deltas, signatures, publishers


P = ParamSpec("P")
R = TypeVar("R")


class PublishError(WeightSyncError):
    """A version could not be published, or not be made active."""


def publishing(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, of whose errors all are PublishErrors: any other has its code, message and attributes, and is its
    cause."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except PublishError:
            raise
        except WeightSyncError as error:
            raise PublishError(str(error), **{"code": error.code, **vars(error)}) from error

    return call


def unknown_model(model: str, served: Iterable[str]) -> PublishError:
    """The first version of a model that no instance serves, on a store whose instances serve other models."""
    names = ", ".join(repr(name) for name in sorted(served))
    problem = f"no instance serves a model {model!r}, and it has no version yet (instances serve {names})"
    advice = "pass a served model's name as `model`, or `new_model=True` to publish the first version of a new one"
    return PublishError(f"{problem}: {advice}", code="unknown_model", problem=problem)


class StalePublisher(PublishError):
    """A newer publisher of this lineage has taken over; this one may write no more."""

    def __init__(self, lineage: str, token: int, holder: str) -> None:
        self.lineage, self.token, self.holder = lineage, token, holder
        super().__init__(
            f"lineage {lineage!r} was taken over by {holder} (token {token}): stop this trainer, or give it a lineage "
            "of its own"
        )


class CheckpointError(PublishError):
    """A checkpoint cannot be read. `file` and `tensor` say where, when known."""

    def __init__(self, file: str, problem: str, *, tensor: str | None = None) -> None:
        self.file, self.problem, self.tensor = file, problem, tensor
        super().__init__(f"{file}: {problem}")


def delta_error(problem: str) -> PublishError:
    """A delta is damaged, cut off, or was never one; nothing of it was published."""
    return PublishError(f"not a sound delta: {problem}. Send the version again", code="delta_error")


def unknown_base(version: int, expected: str, got: str | None) -> PublishError:
    """The base of a delta is retired, was never here, or is another version than the one the delta was made against."""
    found = "is not here" if got is None else f"has digest {got} here"
    message = f"the base of the delta, version {version} with digest {expected}, {found}: send the full version instead"
    return PublishError(message, code="unknown_base", version=version, expected=expected, got=got)


def config_mismatch(field: str, problem: str) -> PublishError:
    """The config.json of a version does not fit to the tokenizer and the code of instances, by its `field`."""
    message = (
        f"the config.json of this version has another {field} ({problem}), which does not fit to the tokenizer and "
        "the limits of the served model: serve it as a model of its own, with `hotswap up --model DIR --name NAME`"
    )
    return PublishError(message, code="config_mismatch", field=field)


def version_refused(version: int, problem: str) -> PublishError:
    """The policy of an instance asks for a signature that this version does not have."""
    message = f"{problem}: it is not staged; publish it again, signed with a key that the instance trusts"
    return PublishError(message, code="version_refused", version=version)


def signing_key_error(path: str, problem: str) -> WeightSyncError:
    """The file of a key or certificate cannot be read, or holds another kind of key."""
    return WeightSyncError(f"{path}: {problem}", code="signing_key_error")


# one tensor


OTHER_FORM = ", or give the config.json of a checkpoint that is so (config=, `hotswap weights push DIR`)"


class TensorError(PublishError):
    """One tensor is to blame; `tensor` names it. `expected` and `got`, where there are such, say what is wrong."""

    tensor: str
    expected: Any = None
    got: Any = None


def missing_tensor(tensor: str, expected: object = None) -> TensorError:
    """A tensor of the schema was not delivered."""
    message = f"tensor {tensor!r} is missing: publish every tensor{OTHER_FORM}"
    return TensorError(message, tensor=tensor, code="missing_tensor", expected=expected)


def unexpected_tensor(tensor: str, got: object = None, advice: str = "") -> TensorError:
    """A tensor that the schema does not have. `advice`: what else to do than to leave it out."""
    remedy = f"; {advice}" if advice else f": leave it out{OTHER_FORM}"
    message = f"tensor {tensor!r} is not part of the served model{remedy}"
    return TensorError(message, tensor=tensor, code="unexpected_tensor", got=got)


def shape_mismatch(tensor: str, expected: Sequence[int], got: Sequence[int]) -> TensorError:
    """A tensor has another shape than the schema says."""
    message = f"tensor {tensor!r} has shape {list(got)}, the served model has {list(expected)}: check it{OTHER_FORM}"
    return TensorError(message, tensor=tensor, code="shape_mismatch", expected=tuple(expected), got=tuple(got))


def dtype_mismatch(tensor: str, expected: str, got: str) -> TensorError:
    """A tensor has another dtype than the schema says."""
    message = f"tensor {tensor!r} is {got}, the served model has {expected}: convert it (`cast=True`){OTHER_FORM}"
    return TensorError(message, tensor=tensor, code="dtype_mismatch", expected=expected, got=got)


def digest_mismatch(tensor: str, expected: str, got: str) -> TensorError:
    """The bytes of a tensor are not those that were published."""
    message = f"tensor {tensor!r} has digest {got}, published was {expected}: its bytes changed; publish it again"
    return TensorError(message, tensor=tensor, code="digest_mismatch", expected=expected, got=got)


def not_finite(tensor: str, dtype: str) -> TensorError:
    """A tensor has NaN or infinities, as it was published or in the type that it is served in."""
    message = (
        f"tensor {tensor!r} has NaN or infinite values in {dtype}: publish weights that are finite, or start "
        "instances with --allow-non-finite"
    )
    return TensorError(message, tensor=tensor, code="not_finite")


def checksum_mismatch(tensor: str, expected: int, got: int) -> TensorError:
    """A built tensor, or one of two copies of a tensor, does not have the checksum it must have."""
    message = f"tensor {tensor!r} has checksum {got:08x} as built, {expected:08x} as published: stage it again"
    return TensorError(message, tensor=tensor, code="checksum_mismatch", expected=expected, got=got)


def unsupported_dtype(tensor: str, dtype: str) -> TensorError:
    """The element type of a tensor cannot be carried."""
    message = f"tensor {tensor!r} is {dtype}, which cannot be carried: convert it before publishing"
    return TensorError(message, tensor=tensor, code="unsupported_dtype")


# a swap


class SwapError(PublishError):
    """A version was not made active, or not in time."""


def swap_aborted(version: int, reason: str, tensor: str | None = None) -> SwapError:
    """`reason` says why, `tensor` names a culprit if known."""
    message = f"version {version} was not made active: {reason}"
    return SwapError(message, code="swap_aborted", version=version, reason=reason, tensor=tensor)


def swap_timeout(version: int, seconds: float, hint: str = "") -> SwapError:
    """No outcome in time; the version may still become active."""
    hint = hint or "is a gateway running on this store, and are its instances healthy?"
    message = f"version {version} was neither made active nor refused within {seconds:g} s: {hint}"
    return SwapError(message, code="swap_timeout", version=version)


def fingerprint_mismatch(version: int, expected: str, got: str) -> SwapError:
    """An instance built other weights of a version than were committed; it must not serve them."""
    message = (
        f"version {version} was built with fingerprint {got}, committed was {expected}: this instance does not "
        "serve it; restart the instance, and if that does not help publish the version again"
    )
    return SwapError(message, code="fingerprint_mismatch", version=version, expected=expected, got=got)


def not_enough_instances(versions: int, minimum: int, have: int) -> SwapError:
    """Versions cannot share traffic: an engine runs one version, so each takes instances of its own. `needed` is how
    many there must be."""
    needed, each = versions * minimum, "one" if minimum == 1 else str(minimum)
    message = (
        f"{versions} versions share the traffic of {needed} instances or more ({each} for each), and "
        f"{have} {'serves' if have == 1 else 'serve'}: start {needed - have} more (`hotswap up --instances {needed}`)"
    )
    return SwapError(message, code="not_enough_instances", needed=needed, have=have)


def unknown_version(version: int, state: str | None) -> SwapError:
    """There is no such version, or it is not ready."""
    state_in_words = "does not exist" if state is None else f"is {state}"
    if state == "retired":
        state_in_words += ", so its bytes are no longer held (`--keep-versions` says how many versions are)"
    message = f"version {version} {state_in_words}: list the versions and choose one that is ready"
    return SwapError(message, code="unknown_version", version=version)


# the engine that is to run a version


class EngineError(WeightSyncError):
    """An engine cannot run versions, or not this one, or has ended."""

    advice: str = ""  # on a part that is not served


def unsupported_model(message: str) -> EngineError:
    """This model's weights cannot be staged beside it; the message names the layer and what to use instead."""
    return EngineError(message, code="unsupported_model")


def unsupported_vllm(found: str | None, supported: Sequence[str]) -> EngineError:
    """The installed vLLM is a release whose private names may be others than those used here."""
    known = " or ".join(supported)
    message = (
        f"vLLM {found} is installed, and Hotswap works with {known}: install one of them (docs/install.md)"
        if found is not None
        else f"no vLLM is installed: install {known} (docs/install.md)"
    )
    return EngineError(message, code="unsupported_vllm")


def part_not_served(part: str, advice: str) -> EngineError:
    """A version has a part that this instance has no place for."""
    return EngineError(f"this instance cannot take {part!r}: {advice}", code="part_not_served", advice=advice)


# between hosts: transfers, peers, certificates, Ray


class TransferError(WeightSyncError):
    """A read from another host's memory did not happen; what arrived of it is not to be used."""


def transfer_failed(peer: str, reason: str) -> TransferError:
    """A read ended before all its bytes were there; nothing more is written. Reading again, elsewhere, may work."""
    message = f"reading from {peer} failed: {reason}; read again, or from another host"
    return TransferError(message, code="transfer_failed", reason=reason)


def transfer_timed_out(peer: str, seconds: float) -> TransferError:
    """A read was not done in time and was given up; nothing more is written."""
    message = f"reading from {peer} was not done after {seconds:g} s: read from another host"
    return TransferError(message, code="transfer_timed_out")


class TransportUnavailable(TransferError):
    """A transport cannot be used on this machine: not installed, broken, or not allowed as configured."""

    def __init__(self, transport: str, reason: str, advice: str) -> None:
        self.transport, self.reason, self.advice = transport, reason, advice
        super().__init__(f"transport {transport}: {reason}. {advice}")


class PeerUnreachable(TransferError):
    """No connection to a peer: it is down, somewhere else, or does not know this one."""

    def __init__(self, peer: str, reason: str) -> None:
        self.peer, self.reason = peer, reason
        super().__init__(f"peer {peer} cannot be reached: {reason}; read from another host, or look whether it is up")


class PeerError(WeightSyncError):
    """A version could not be had from another host."""


def copy_unavailable(version: int, host: str, reason: str, cause: str | None = None) -> PeerError:
    """This host has no copy of a version; `cause` is the code of what kept its peer from fetching one, if known."""
    message = f"version {version} is not on host {host or '(unnamed)'}: {reason}"
    return PeerError(message, code="copy_unavailable", version=version, cause=cause)


def bad_host_name(host: str) -> PeerError:
    """A host cannot be called so."""
    message = (
        f"no host can be called {host!r}: set HOTSWAP_HOST to lower-case letters, digits, dots and dashes, 63 at "
        "most, with a letter or digit at both ends"
    )
    return PeerError(message, code="host_name")


class PeerRefused(PeerError):
    """Another host's peer does not serve what was asked for, or not now. `status` is HTTP's, `reason` the peer's."""

    def __init__(self, host: str, status: int, reason: str, message: str) -> None:
        self.host, self.status, self.reason, self.message = host, status, reason, message
        super().__init__(f"the peer of {host} answers {status} ({reason}): {message}")


class TlsUnavailable(WeightSyncError):
    """The certificate, the key or the authority of a member of the cluster cannot be used, or is asked for."""

    def __init__(self, directory: str, reason: str, advice: str) -> None:
        self.directory, self.reason, self.advice = directory, reason, advice
        super().__init__(f"certificates in {directory or 'no directory'}: {reason}. {advice}")


def ray_unavailable(address: str, reason: str, advice: str) -> WeightSyncError:
    """The Ray cluster that was named cannot be used."""
    return WeightSyncError(f"--ray {address}: {reason}. {advice}", code="ray_unavailable")


# the places where versions lie: slots in shared memory, copies on disk, buckets


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


# the store and its records


RELEASES = "Was it written by another release? Run the same one everywhere"


class StoreError(WeightSyncError):
    """The store refused or could not answer."""


class StoreUnavailable(StoreError):
    """The store cannot be used now; reading or writing again later may work.

    Not so with the code `store_lost`: there is another store than the one this process was using, or an older copy of
    it. It is never taken for that one: its version numbers would begin again under engines that run some, and its keys
    would be none.
    """

    def __init__(self, path: str, reason: str, advice: str, *, code: str | None = None) -> None:
        self.path, self.reason, self.advice = path, reason, advice
        super().__init__(f"store {path}: {reason}. {advice}", code=code)


class StoreRefused(StoreUnavailable):
    """The store answers and refuses this client or what it asks; trying again helps after somebody has changed it."""


def store_closed(owner: str) -> StoreError:
    """This program has closed its connection to the store, or the publisher that had it."""
    return StoreError(f"this {owner} was closed: make another", code="store_closed")


class Conflict(StoreError):
    """A key was not at the revision the caller expected; nothing was written."""

    def __init__(self, key: str, expected: int, found: int) -> None:
        self.key, self.expected, self.found = key, expected, found
        super().__init__(f"{key} is at revision {found}, not {expected}: read it again and retry")


class LeaseLost(StoreError):
    """The lease expired or was revoked; grant a new one and write the leased keys again."""

    def __init__(self, lease: int) -> None:
        self.lease = lease
        super().__init__(f"lease {lease} has ended; grant a new one and write its keys again")


class WatchCompacted(StoreError):
    """Events before `oldest` are no longer kept; list the prefix and watch from the revision that list returned."""

    def __init__(self, start_revision: int, oldest: int) -> None:
        self.start_revision, self.oldest = start_revision, oldest
        super().__init__(
            f"events from revision {start_revision} are gone (oldest kept: {oldest}); list the prefix again"
        )


class RecordError(StoreError):
    """A record is not what its key says it is."""

    def __init__(self, record: str, problem: str, advice: str = RELEASES, *, code: str | None = None) -> None:
        self.record, self.problem = record, problem
        super().__init__(f"{record}: {problem}. {advice}", code=code)


def record_refused(record: str, problem: str, advice: str = RELEASES) -> RecordError:
    """A name or a value that no record can have. Nothing was written."""
    return RecordError(record, problem, advice, code="record_refused")


def ledger_unavailable(what: str, problem: str) -> WeightSyncError:
    """A file of the ledger cannot be read or written, or the chain may not be moved as it is."""
    return WeightSyncError(f"{what}: {problem}", code="ledger_unavailable")


_GONE = {  # classes to catch that the documentation has named
    "BucketTaken": BucketError,
    "StoreLost": StoreUnavailable,
    "SwapAborted": SwapError,
    "SwapTimeout": SwapError,
    "TensorMismatch": TensorError,
    "UnknownModel": PublishError,
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> type[WeightSyncError]:
        if name not in _GONE:
            raise AttributeError(f"module 'weightsync.errors' has no attribute {name!r}")
        family = _GONE[name].__name__
        warnings.warn(f"{name} is {family} with a code: catch that (docs/upgrade.md)", DeprecationWarning, stacklevel=2)
        return _GONE[name]
