"""The errors of `weightsync`: a class for what programs tell apart, a code (`codes.py`) for what people read.

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

import warnings
from typing import TYPE_CHECKING

from weightsync.errors.base import *  # noqa: F403
from weightsync.errors.codes import *  # noqa: F403
from weightsync.errors.engine import *  # noqa: F403
from weightsync.errors.hosts import *  # noqa: F403
from weightsync.errors.memory import *  # noqa: F403
from weightsync.errors.publishing import *  # noqa: F403
from weightsync.errors.store import *  # noqa: F403
from weightsync.errors.swaps import *  # noqa: F403
from weightsync.errors.tensors import *  # noqa: F403

_GONE = {  # classes to catch that the documentation has named
    "BucketTaken": BucketError,  # noqa: F405
    "StoreLost": StoreUnavailable,  # noqa: F405
    "SwapAborted": SwapError,  # noqa: F405
    "SwapTimeout": SwapError,  # noqa: F405
    "TensorMismatch": TensorError,  # noqa: F405
    "UnknownModel": PublishError,  # noqa: F405
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> type[WeightSyncError]:  # noqa: F405
        if name not in _GONE:
            raise AttributeError(f"module 'weightsync.errors' has no attribute {name!r}")
        family = _GONE[name].__name__
        warnings.warn(f"{name} is {family} with a code: catch that (docs/upgrade.md)", DeprecationWarning, stacklevel=2)
        return _GONE[name]
