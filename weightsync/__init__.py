"""The checkpoint engine: versions of a model's weights, published by a trainer, swapped into running servers.

    Publisher, Draft, join       write a version              SlotReader         read and verify one
    RemotePublisher              the same over HTTP
    Share, Collector             a rank on another host
    Coordinator, Participant     the two sides of a swap      open_store, Store  where the records live

Importing this package imports neither torch nor vLLM; each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.arena import Arena
    from weightsync.delta.remote import RemotePublisher
    from weightsync.draft import Draft
    from weightsync.errors import WeightSyncError
    from weightsync.ledger import ensure_arena
    from weightsync.manifest import Layout, Manifest, Schema, TensorEntry, TensorSpec, diff_schema
    from weightsync.parts import Adapter
    from weightsync.publisher import Publisher, as_schema
    from weightsync.receiver import SlotReader
    from weightsync.shares import Collector, Share
    from weightsync.store import Store, SyncStore, open_store
    from weightsync.swap.agent import CommitResult, Participant, StageResult
    from weightsync.swap.coordinator import Coordinator, SwapReport
    from weightsync.swap.probe import Probe, ProbeResult
    from weightsync.writer import SlotWriter, join

_HOME = {
    "Adapter": "parts",
    "Arena": "arena",
    "Collector": "shares",
    "CommitResult": "swap.agent",
    "Coordinator": "swap.coordinator",
    "Draft": "draft",
    "Layout": "manifest",
    "Manifest": "manifest",
    "Participant": "swap.agent",
    "Probe": "swap.probe",
    "ProbeResult": "swap.probe",
    "Publisher": "publisher",
    "RemotePublisher": "delta.remote",
    "Schema": "manifest",
    "Share": "shares",
    "SlotReader": "receiver",
    "SlotWriter": "writer",
    "StageResult": "swap.agent",
    "Store": "store",
    "SwapReport": "swap.coordinator",
    "SyncStore": "store",
    "TensorEntry": "manifest",
    "TensorSpec": "manifest",
    "WeightSyncError": "errors",
    "as_schema": "publisher",
    "diff_schema": "manifest",
    "ensure_arena": "ledger",
    "join": "writer",
    "open_store": "store",
}

__all__ = [
    "Adapter",
    "Arena",
    "Collector",
    "CommitResult",
    "Coordinator",
    "Draft",
    "Layout",
    "Manifest",
    "Participant",
    "Probe",
    "ProbeResult",
    "Publisher",
    "RemotePublisher",
    "Schema",
    "Share",
    "SlotReader",
    "SlotWriter",
    "StageResult",
    "Store",
    "SwapReport",
    "SyncStore",
    "TensorEntry",
    "TensorSpec",
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
