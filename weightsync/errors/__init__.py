"""The errors of `weightsync`.

WeightSyncError               base: `code` for machines, a message that says what to do, `tensor` when one is to blame
├── StoreError
│   ├── StoreUnavailable      the store is absent, unwritable, corrupt, locked too long or unreachable
│   │   ├── StoreRefused      it is there and refuses: credentials, certificates, limits
│   │   └── StoreLost         another store, or an older copy, is in its place
│   ├── StoreClosed           this program has closed it, or the publisher that had it
│   ├── Conflict              a compare failed: somebody else wrote first
│   ├── LeaseLost             the lease expired; what was kept under it is gone
│   ├── WatchCompacted        the watch asks for events that are no longer kept; list again
│   └── RecordError           a record does not have the fields it must have
│       └── RecordRefused     a name or a value that no record can have; nothing was written
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
│   ├── VersionNeeded         a version is not removed, as others need it
│   └── VersionGone           a version was removed meanwhile
├── PublishError
│   ├── StalePublisher        a newer publisher of the lineage has taken over
│   ├── UnknownModel          nobody serves the model, and others are served
│   ├── BadPart               a part that no version can have, or that has nothing to go with
│   ├── DraftLost             the draft's lease ended, and other hosts may have freed its shares
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

from weightsync.errors.base import *  # noqa: F403
from weightsync.errors.engine import *  # noqa: F403
from weightsync.errors.hosts import *  # noqa: F403
from weightsync.errors.memory import *  # noqa: F403
from weightsync.errors.publishing import *  # noqa: F403
from weightsync.errors.store import *  # noqa: F403
from weightsync.errors.swaps import *  # noqa: F403
from weightsync.errors.tensors import *  # noqa: F403
