"""The checkpoint engine: versions of a model's weights, published by a trainer, swapped into running servers.

    Publisher, Draft, join       write a version              SlotReader         read and verify one
    RemotePublisher              the same over HTTP
    BucketPublisher              the same through an object store
    Quantizer                    quantised tensors, as checkpoints hold them
    Coordinator, Participant     the two sides of a swap      open_store, Store  where the records live

Importing this package imports neither torch nor vLLM; each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.bucket.publisher import BucketPublisher
    from weightsync.control.agent import Participant
    from weightsync.control.arenas import ensure_arena
    from weightsync.control.coordinator import Coordinator
    from weightsync.control.parts import Adapter
    from weightsync.control.records import ActiveRecord, InstanceRecord, VersionRecord
    from weightsync.control.swap import CommitResult, StageResult
    from weightsync.control.trial import Probe, ProbeResult
    from weightsync.errors import PublishError, WeightSyncError
    from weightsync.format.manifest import Layout, Manifest, Schema, TensorEntry, TensorSpec, diff_schema
    from weightsync.memory.arena import Arena
    from weightsync.memory.receiver import SlotReader
    from weightsync.publish.draft import Draft
    from weightsync.publish.publisher import Publisher, Version, as_schema
    from weightsync.publish.quantize import Quantizer
    from weightsync.publish.remote import RemotePublisher
    from weightsync.publish.writer import SlotWriter, join
    from weightsync.store import Store, SyncStore, open_store

_HOME = {
    "ActiveRecord": "control.records",
    "Adapter": "control.parts",
    "Arena": "memory.arena",
    "BucketPublisher": "bucket.publisher",
    "CommitResult": "control.swap",
    "Coordinator": "control.coordinator",
    "Draft": "publish.draft",
    "InstanceRecord": "control.records",
    "Layout": "format.manifest",
    "Manifest": "format.manifest",
    "Participant": "control.agent",
    "Probe": "control.trial",
    "ProbeResult": "control.trial",
    "PublishError": "errors",
    "Publisher": "publish.publisher",
    "Quantizer": "publish.quantize",
    "RemotePublisher": "publish.remote",
    "Schema": "format.manifest",
    "SlotReader": "memory.receiver",
    "SlotWriter": "publish.writer",
    "StageResult": "control.swap",
    "Store": "store",
    "SwapReport": "control.outcome",
    "SyncStore": "store",
    "TensorEntry": "format.manifest",
    "TensorSpec": "format.manifest",
    "Trust": "signing",
    "Version": "publish.publisher",
    "VersionRecord": "control.records",
    "WeightSyncError": "errors",
    "as_schema": "publish.publisher",
    "diff_schema": "format.manifest",
    "ensure_arena": "control.arenas",
    "join": "publish.writer",
    "open_store": "store",
}

__all__ = [
    "ActiveRecord",
    "Adapter",
    "Arena",
    "BucketPublisher",
    "CommitResult",
    "Coordinator",
    "Draft",
    "InstanceRecord",
    "Layout",
    "Manifest",
    "Participant",
    "Probe",
    "ProbeResult",
    "PublishError",
    "Publisher",
    "Quantizer",
    "RemotePublisher",
    "Schema",
    "SlotReader",
    "SlotWriter",
    "StageResult",
    "Store",
    "SwapReport",
    "SyncStore",
    "TensorEntry",
    "TensorSpec",
    "Trust",
    "Version",
    "VersionRecord",
    "WeightSyncError",
    "as_schema",
    "diff_schema",
    "ensure_arena",
    "join",
    "open_store",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'weightsync' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weightsync.{_HOME[name]}"), name)
