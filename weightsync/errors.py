"""The errors of `weightsync`.

WeightSyncError               base: `code` for machines, a message that says what to do, `tensor` when one is to blame
├── StoreError
│   ├── StoreUnavailable      the store is absent, unwritable, corrupt, locked too long or unreachable
│   │   ├── StoreRefused      it is there and refuses: credentials, certificates, limits
│   │   └── StoreLost         another store, or an older copy, is in its place
│   ├── Conflict              a compare failed: somebody else wrote first
│   ├── LeaseLost             the lease expired; what was kept under it is gone
│   ├── WatchCompacted        the watch asks for events that are no longer kept; list again
│   └── RecordError           a record does not have the fields it must have
├── ArenaError
│   ├── ArenaUnavailable      the directory of the slots cannot be used
│   ├── ArenaFull             no room for one more slot
│   └── SlotBusy              the slot is held by somebody else
├── ManifestError             not a slot, or not the version that was asked for
├── TensorError               one tensor is to blame
│   ├── TensorMismatch        it is not what the reference schema says
│   │   ├── MissingTensor
│   │   ├── UnexpectedTensor
│   │   ├── ShapeMismatch
│   │   └── DtypeMismatch
│   ├── DigestMismatch        its bytes are not those that were published
│   ├── NotFinite             it has NaN or infinities
│   ├── ChecksumMismatch      what the workers would run is not what was published
│   ├── PartsMismatch         the parts that the workers hold do not make up the tensor
│   └── UnsupportedDtype      its element type cannot be carried
├── QuantizationError         weights cannot be quantised as asked, or as they are served
├── UnsupportedVllm           vLLM is a release that this is not written against
├── ConfigMismatch            a version's configuration does not fit to what the instances serve
├── PartNotServed             an instance runs no draft model, or no adapters, to swap
├── CheckpointError           a checkpoint directory cannot be read
├── DeltaError                not a delta, or a damaged one
│   └── DeltaBaseMismatch     it is made against a version that is not here
├── RemoteError               a server took a version neither as a delta nor in full
├── RayUnavailable            no Ray cluster can be used where one was named
├── TlsUnavailable            the certificate, key or authority of a cluster's member cannot be used
├── TransferError             the bytes of a slot did not get from one host to another
│   ├── TransportUnavailable  the library is not installed or does not work here
│   ├── PeerUnreachable       no connection to the other host
│   ├── TransferFailed        the other host died, refused or went away in the middle
│   └── TransferTimedOut      not done in time
├── PeerError                 a version could not be had from another host
│   ├── CopyUnavailable       this host has no copy of a version, and did not get one in time
│   ├── PeerRefused           the other host does not serve what was asked for, or not now
│   └── HostNameError         HOTSWAP_HOST is no name a slot may have
├── SigningKeyError           a key or certificate for signatures cannot be used
├── VersionRefused            a version is not signed by a trusted key, or is not what was signed
├── LedgerUnavailable         older entries of the ledger cannot be read or moved
├── PersistError              the copies on disk cannot be written or read
│   ├── PersistFull           a version has no room there
│   └── VersionLost           the committed version is neither in memory nor on disk; `offer` is what is
├── BucketError               a bucket of versions cannot be opened
│   ├── BucketUnavailable     it does not answer, or refuses
│   ├── BucketTaken           another publisher has published there
│   ├── BucketDamaged         what lies there is not what was published
│   └── VersionGone           a version was removed meanwhile
├── PublishError
│   ├── StalePublisher        a newer publisher of the lineage has taken over
│   ├── BadPart               a part that no version can have, or that has nothing to go with
│   ├── DraftLost             the draft's lease ended before it was committed
│   └── DraftClosed           the draft was already committed or aborted
└── SwapError
    ├── SwapAborted           the version was not made active; `reason` says why
    ├── SwapTimeout           no outcome in time
    ├── StagingCancelled      nobody wants the version any more that was being staged
    ├── FingerprintMismatch   the weights built are not those that were published
    ├── BadSplit              requests cannot be divided like that
    ├── NotEnoughInstances    versions cannot share traffic, as each takes instances of its own
    └── UnknownVersion        no such version, or it cannot be activated any more
"""

from __future__ import annotations

from collections.abc import Sequence


class WeightSyncError(Exception):
    """Base of the tree. `code` is stable and meant for machines; `tensor` names the tensor to blame, if one is."""

    code = "weightsync_error"
    tensor: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """What goes into an instance record or the output of a command: code, message, tensor."""
        return {"code": self.code, "message": str(self), "tensor": self.tensor}


class StoreError(WeightSyncError):
    """The store refused or could not answer."""

    code = "store_error"


class StoreUnavailable(StoreError):
    """The store cannot be used now; reading or writing again later may work."""

    code = "store_unavailable"

    def __init__(self, path: str, reason: str, advice: str) -> None:
        self.path, self.reason, self.advice = path, reason, advice
        super().__init__(f"store {path}: {reason}. {advice}")


class StoreRefused(StoreUnavailable):
    """The store answers and refuses this client or what it asks; trying again helps after somebody has changed it."""

    code = "store_refused"


class StoreLost(StoreUnavailable):
    """There is another store than the one this process was using, or an older copy of it.

    It is never taken for that one: its version numbers would begin again under engines that run some, and its keys
    would be none.
    """

    code = "store_lost"


class Conflict(StoreError):
    """A key was not at the revision the caller expected; nothing was written."""

    code = "conflict"

    def __init__(self, key: str, expected: int, found: int) -> None:
        self.key, self.expected, self.found = key, expected, found
        super().__init__(f"{key} is at revision {found}, not {expected}: read it again and retry")


class LeaseLost(StoreError):
    """The lease expired or was revoked; grant a new one and write the leased keys again."""

    code = "lease_lost"

    def __init__(self, lease: int) -> None:
        self.lease = lease
        super().__init__(f"lease {lease} has ended; grant a new one and write its keys again")


class WatchCompacted(StoreError):
    """Events before `oldest` are no longer kept; list the prefix and watch from the revision that list returned."""

    code = "watch_compacted"

    def __init__(self, start_revision: int, oldest: int) -> None:
        self.start_revision, self.oldest = start_revision, oldest
        super().__init__(
            f"events from revision {start_revision} are gone (oldest kept: {oldest}); list the prefix again"
        )


class RecordError(StoreError):
    """A stored record cannot be read as what its key says it is."""

    code = "record_error"

    def __init__(self, record: str, problem: str) -> None:
        self.record, self.problem = record, problem
        super().__init__(f"{record}: {problem}. Was it written by another release? Run the same one everywhere")


class ArenaError(WeightSyncError):
    """Shared-memory slots cannot be had."""

    code = "arena_error"


class ArenaUnavailable(ArenaError):
    """The arena directory is absent, unwritable or not private."""

    code = "arena_unavailable"


class ArenaFull(ArenaError):
    """No room for one more slot. `needed` and `free` are bytes."""

    code = "arena_full"

    def __init__(self, directory: str, needed: int, free: int) -> None:
        self.directory, self.needed, self.free = directory, needed, free
        super().__init__(
            f"a slot needs {needed:,} bytes, {directory} has {free:,} free: retire versions nobody needs, or enlarge "
            "the file system (mount -o remount,size=...; in a container --shm-size, or a larger emptyDir)"
        )


class SlotBusy(ArenaError):
    """The slot is held by somebody else."""

    code = "slot_busy"


class ManifestError(WeightSyncError):
    """The file is not a slot, or holds another version than the one asked for."""

    code = "manifest_error"


class TensorError(WeightSyncError):
    """One tensor is to blame; `tensor` names it."""

    code = "tensor_error"

    def __init__(self, tensor: str, message: str) -> None:
        self.tensor: str = tensor
        super().__init__(message)


OTHER_FORM = ", or give the config.json of a checkpoint that is so (config=, `hotswap weights push DIR`)"


class TensorMismatch(TensorError):
    """A tensor is not what the reference schema says; `expected` and `got` are what they say of it."""

    code = "tensor_mismatch"

    def __init__(self, tensor: str, expected: object, got: object, message: str) -> None:
        self.expected, self.got = expected, got
        super().__init__(tensor, message)


class MissingTensor(TensorMismatch):
    """A tensor of the schema was not delivered."""

    code = "missing_tensor"

    def __init__(self, tensor: str, expected: object = None) -> None:
        super().__init__(tensor, expected, None, f"tensor {tensor!r} is missing: publish every tensor{OTHER_FORM}")


class UnexpectedTensor(TensorMismatch):
    """A tensor that the schema does not have."""

    code = "unexpected_tensor"

    def __init__(self, tensor: str, got: object = None) -> None:
        message = f"tensor {tensor!r} is not part of the served model: leave it out{OTHER_FORM}"
        super().__init__(tensor, None, got, message)


class ShapeMismatch(TensorMismatch):
    """A tensor has another shape than the schema says."""

    code = "shape_mismatch"

    def __init__(self, tensor: str, expected: Sequence[int], got: Sequence[int]) -> None:
        message = (
            f"tensor {tensor!r} has shape {list(got)}, the served model has {list(expected)}: check it{OTHER_FORM}"
        )
        super().__init__(tensor, tuple(expected), tuple(got), message)


class DtypeMismatch(TensorMismatch):
    """A tensor has another dtype than the schema says."""

    code = "dtype_mismatch"

    def __init__(self, tensor: str, expected: str, got: str) -> None:
        message = f"tensor {tensor!r} is {got}, the served model has {expected}: convert it{OTHER_FORM}"
        super().__init__(tensor, expected, got, message)


class DigestMismatch(TensorError):
    """The bytes of a tensor are not those that were published."""

    code = "digest_mismatch"

    def __init__(self, tensor: str, expected: str, got: str) -> None:
        self.expected, self.got = expected, got
        super().__init__(
            tensor, f"tensor {tensor!r} has digest {got}, published was {expected}: its bytes changed; publish it again"
        )


class NotFinite(TensorError):
    """A tensor has NaN or infinities, as it was published or in the type that it is served in."""

    code = "not_finite"

    def __init__(self, tensor: str, dtype: str) -> None:
        super().__init__(
            tensor,
            f"tensor {tensor!r} has NaN or infinite values in {dtype}: publish weights that are finite, or start "
            "instances with --allow-non-finite",
        )


class ChecksumMismatch(TensorError):
    """A built tensor, or one of two copies of a tensor, does not have the checksum it must have."""

    code = "checksum_mismatch"

    def __init__(self, tensor: str, expected: int, got: int) -> None:
        self.expected, self.got = expected, got
        super().__init__(
            tensor, f"tensor {tensor!r} has checksum {got:08x} as built, {expected:08x} as published: stage it again"
        )


class PartsMismatch(TensorError):
    """The parts of a tensor on all ranks overlap or leave a gap."""

    code = "parts_mismatch"

    def __init__(self, tensor: str, covered: int, words: int) -> None:
        self.covered, self.words = covered, words
        super().__init__(
            tensor,
            f"the ranks hold {covered:,} words of tensor {tensor!r}, which has {words:,}: restart the instance",
        )


class UnsupportedDtype(TensorError):
    """The element type of a tensor cannot be carried."""

    code = "unsupported_dtype"

    def __init__(self, tensor: str, dtype: str) -> None:
        self.dtype = dtype
        super().__init__(tensor, f"tensor {tensor!r} is {dtype}, which cannot be carried: convert it before publishing")


class QuantizationError(WeightSyncError):
    """Weights cannot be quantised as asked, or not in the form in which the model is served."""

    code = "quantization_error"

    def __init__(self, message: str, tensor: str | None = None) -> None:
        self.tensor = tensor
        super().__init__(message)


class UnsupportedVllm(WeightSyncError):
    """The installed vLLM is a release whose private names may be others than those used here."""

    code = "unsupported_vllm"

    def __init__(self, found: str | None, supported: Sequence[str]) -> None:
        self.found = found
        known = " or ".join(supported)
        super().__init__(
            f"vLLM {found} is installed, and Hotswap works with {known}: install one of them (docs/install.md)"
            if found is not None
            else f"no vLLM is installed: install {known} (docs/install.md)"
        )


class ConfigMismatch(WeightSyncError):
    """A version has other tensors, and its config.json does not fit to the tokenizer and the code that instances have.

    `field` of config.json is to blame.
    """

    code = "config_mismatch"

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        super().__init__(
            f"the config.json of this version has another {field} ({problem}), which does not fit to the tokenizer and "
            "the limits of the served model: serve it as a model of its own, with `hotswap up --model DIR --name NAME`"
        )


class PartNotServed(WeightSyncError):
    """A version has a part that this instance has no place for; nothing changed."""

    code = "part_not_served"

    def __init__(self, part: str, advice: str) -> None:
        self.part, self.advice = part, advice
        super().__init__(f"this instance cannot take {part!r}: {advice}")


class CheckpointError(WeightSyncError):
    """A checkpoint cannot be read. `file` and `tensor` say where, when known."""

    code = "checkpoint_error"

    def __init__(self, file: str, problem: str, *, tensor: str | None = None) -> None:
        self.file, self.problem, self.tensor = file, problem, tensor
        super().__init__(f"{file}: {problem}")


class DeltaError(WeightSyncError):
    """A delta is damaged, cut off, or was never one; nothing of it was published."""

    code = "delta_error"

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"not a sound delta: {problem}. Send the version again")


class DeltaBaseMismatch(DeltaError):
    """The base of a delta is retired, was never here, or is another version than the one the delta was made against."""

    code = "unknown_base"

    def __init__(self, version: int, expected: str, got: str | None) -> None:
        self.version, self.expected, self.got = version, expected, got
        found = "is not here" if got is None else f"has digest {got} here"
        super().__init__(f"its base, version {version} with digest {expected}, {found}: send the full version instead")


class RemoteError(WeightSyncError):
    """A server refused a version, or could not be reached. `status` is HTTP's, `answer_code` the server's, if known."""

    code = "remote_error"

    def __init__(self, message: str, *, status: int | None = None, answer_code: str | None = None) -> None:
        self.status, self.answer_code = status, answer_code
        super().__init__(message)


class TransferError(WeightSyncError):
    """A read from another host's memory did not happen; what arrived of it is not to be used."""

    code = "transfer_error"


class TransportUnavailable(TransferError):
    """A transport cannot be used on this machine: not installed, broken, or not allowed as configured."""

    code = "transport_unavailable"

    def __init__(self, transport: str, reason: str, advice: str) -> None:
        self.transport, self.reason, self.advice = transport, reason, advice
        super().__init__(f"transport {transport}: {reason}. {advice}")


class PeerUnreachable(TransferError):
    """No connection to a peer: it is down, somewhere else, or does not know this one."""

    code = "peer_unreachable"

    def __init__(self, peer: str, reason: str) -> None:
        self.peer, self.reason = peer, reason
        super().__init__(f"peer {peer} cannot be reached: {reason}; read from another host, or look whether it is up")


class TransferFailed(TransferError):
    """A read ended before all its bytes were there; nothing more is written. Reading again, elsewhere, may work."""

    code = "transfer_failed"

    def __init__(self, peer: str, reason: str) -> None:
        self.peer, self.reason = peer, reason
        super().__init__(f"reading from {peer} failed: {reason}; read again, or from another host")


class TransferTimedOut(TransferError):
    """A read was not done in time and was given up; nothing more is written."""

    code = "transfer_timed_out"

    def __init__(self, peer: str, seconds: float) -> None:
        self.peer, self.seconds = peer, seconds
        super().__init__(f"reading from {peer} was not done after {seconds:g} s: read from another host")


class RayUnavailable(WeightSyncError):
    """The Ray cluster that was named cannot be used."""

    code = "ray_unavailable"

    def __init__(self, address: str, reason: str, advice: str) -> None:
        self.address, self.reason, self.advice = address, reason, advice
        super().__init__(f"--ray {address}: {reason}. {advice}")


class TlsUnavailable(WeightSyncError):
    """The certificate, the key or the authority of a member of the cluster cannot be used, or is asked for."""

    code = "tls_unavailable"

    def __init__(self, directory: str, reason: str, advice: str) -> None:
        self.directory, self.reason, self.advice = directory, reason, advice
        super().__init__(f"certificates in {directory or 'no directory'}: {reason}. {advice}")


class PeerError(WeightSyncError):
    """A version could not be had from another host."""

    code = "peer_error"


class CopyUnavailable(PeerError):
    """This host has no copy of a version; `cause` is the code of what kept its peer from fetching one, if known."""

    code = "copy_unavailable"

    def __init__(self, version: int, host: str, reason: str, cause: str | None = None) -> None:
        self.version, self.host, self.cause = version, host, cause
        super().__init__(f"version {version} is not on host {host or '(unnamed)'}: {reason}")


class PeerRefused(PeerError):
    """Another host's peer does not serve what was asked for, or not now. `status` is HTTP's, `reason` the peer's."""

    code = "peer_refused"

    def __init__(self, host: str, status: int, reason: str, message: str) -> None:
        self.host, self.status, self.reason, self.message = host, status, reason, message
        super().__init__(f"the peer of {host} answers {status} ({reason}): {message}")


class HostNameError(PeerError):
    """A host cannot be called so."""

    code = "host_name"

    def __init__(self, host: str) -> None:
        self.host = host
        super().__init__(
            f"no host can be called {host!r}: set HOTSWAP_HOST to lower-case letters, digits, dots and dashes, 63 at "
            "most, with a letter or digit at both ends"
        )


class PersistError(WeightSyncError):
    """The directory with the copies of versions cannot be used."""

    code = "persist_error"


class PersistFull(PersistError):
    """A version was not written to disk, for want of room; what is there stays."""

    code = "persist_full"

    def __init__(self, version: int, problem: str) -> None:
        self.version, self.problem = version, problem
        super().__init__(f"version {version} is not on disk: {problem}")


class VersionLost(PersistError):
    """The version committed last cannot be served again. `offer`: the newest one that can, None if there is none."""

    code = "version_lost"

    def __init__(self, version: int, reason: str, offer: int | None) -> None:
        self.version, self.reason, self.offer = version, reason, offer
        advice = "publish it again" if offer is None else f"version {offer} is whole and could be served instead"
        super().__init__(f"version {version} is active and lost: {reason}; {advice}")


class BucketError(WeightSyncError):
    """A bucket of versions cannot be used as it was named."""

    code = "bucket_error"


class BucketUnavailable(BucketError):
    """It cannot be reached, read or written now; doing the same again later may work."""

    code = "bucket_unavailable"


class BucketTaken(BucketError):
    """The number that this publisher would have used next is another's."""

    code = "bucket_taken"

    def __init__(self, url: str, number: int) -> None:
        self.number = number
        advice = "stop one of the two, or give this one a prefix of its own; a new publisher goes on from there"
        super().__init__(f"another publisher has published version {number} in {url}: {advice}")


class BucketDamaged(BucketError):
    """An object is not what the record of its version, or its own digest, says."""

    code = "bucket_damaged"

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(f"{path} is damaged: {problem}; publish a later version, in full")


class VersionGone(BucketError):
    """A version that was there a moment ago was removed, as newer ones came."""

    code = "version_gone"

    def __init__(self, url: str, number: int) -> None:
        self.number = number
        super().__init__(f"version {number} is no longer in {url}: take the newest one, or keep more (`keep`)")


class PublishError(WeightSyncError):
    """A version could not be published."""

    code = "publish_error"


class BadPart(PublishError):
    """A part cannot be published so: its name, an adapter without its configuration, or no base model to go with."""

    code = "bad_part"


class StalePublisher(PublishError):
    """A newer publisher of this lineage has taken over; this one may write no more."""

    code = "stale_publisher"

    def __init__(self, lineage: str, token: int, holder: str) -> None:
        self.lineage, self.token, self.holder = lineage, token, holder
        super().__init__(
            f"lineage {lineage!r} was taken over by {holder} (token {token}): stop this trainer, or give it a lineage "
            "of its own"
        )


class DraftLost(PublishError):
    """The lease of a draft ended before the commit (the process was stopped too long, or the store was away)."""

    code = "draft_lost"


class DraftClosed(PublishError):
    """The draft was already committed or aborted; begin another."""

    code = "draft_closed"


class SwapError(WeightSyncError):
    """A version was not made active."""

    code = "swap_error"


class SwapAborted(SwapError):
    """The version was not made active and nothing changed. `reason` says why, `tensor` names a culprit if known."""

    code = "swap_aborted"

    def __init__(self, version: int, reason: str, tensor: str | None = None) -> None:
        self.version, self.reason, self.tensor = version, reason, tensor
        super().__init__(f"version {version} was not made active: {reason}")


class SwapTimeout(SwapError):
    """No outcome in time."""

    code = "swap_timeout"

    def __init__(self, version: int, seconds: float) -> None:
        self.version, self.seconds = version, seconds
        super().__init__(
            f"version {version} was neither made active nor refused within {seconds:g} s: is a gateway running on this "
            "store, and are its instances healthy?"
        )


class StagingCancelled(SwapError):
    """The swap it was staged for has ended, or was superseded."""

    code = "staging_cancelled"

    def __init__(self) -> None:
        super().__init__("staging was cancelled: its swap has ended, or another one took its place")


class SigningKeyError(WeightSyncError):
    """The file of a key or certificate cannot be read, or holds another kind of key."""

    code = "signing_key_error"

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


class VersionRefused(WeightSyncError):
    """The policy of an instance asks for a signature that this version does not have."""

    code = "version_refused"

    def __init__(self, version: int, problem: str) -> None:
        self.version = version
        super().__init__(f"{problem}: it is not staged; publish it again, signed with a key that the instance trusts")


class LedgerUnavailable(WeightSyncError):
    """A file of the ledger cannot be read or written, or the chain may not be moved as it is."""

    code = "ledger_unavailable"

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what}: {problem}")


class FingerprintMismatch(SwapError):
    """An instance built other weights of a version than were committed; it must not serve them."""

    code = "fingerprint_mismatch"

    def __init__(self, version: int, expected: str, got: str) -> None:
        self.version, self.expected, self.got = version, expected, got
        super().__init__(
            f"version {version} was built with fingerprint {got}, committed was {expected}: this instance does not "
            "serve it; restart the instance, and if that does not help publish the version again"
        )


class BadSplit(SwapError):
    """Requests cannot be divided like that."""

    code = "bad_split"


class NotEnoughInstances(SwapError):
    """Versions cannot share traffic: an engine runs one version, so each takes instances of its own. `needed` is how
    many there must be."""

    code = "not_enough_instances"

    def __init__(self, versions: int, minimum: int, have: int) -> None:
        self.needed, self.have = versions * minimum, have
        each = "one" if minimum == 1 else str(minimum)
        super().__init__(
            f"{versions} versions share the traffic of {self.needed} instances or more ({each} for each), and "
            f"{have} {'serves' if have == 1 else 'serve'}: start {self.needed - have} more (`hotswap up --instances "
            f"{self.needed}`)"
        )


class UnknownVersion(SwapError):
    """There is no such version, or it is not ready."""

    code = "unknown_version"

    def __init__(self, version: int, state: str | None) -> None:
        self.version, self.state = version, state
        what = "does not exist" if state is None else f"is {state}"
        super().__init__(f"version {version} {what}: list the versions and choose one that is ready")
