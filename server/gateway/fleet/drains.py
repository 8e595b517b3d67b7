"""Drains asked for by an operator, in the store: every gateway leaves such an instance alone.

The record names the process, not only the instance: one that is started anew under the same id takes requests. An
instance that is stopped drains by itself, and says so in its own record.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.control.records import InstanceRecord, Keys
from weightsync.control.strict_json import Record


@dataclass(frozen=True)
class DrainRecord(Record):
    """No new requests for this process of the instance. `since` is unix seconds."""

    id: str
    address: str
    pid: int
    since: float

    def meant_for(self, record: InstanceRecord) -> bool:
        """Whether `record` is still the process that was to be drained."""
        return (self.id, self.address, self.pid) == (record.id, record.address, record.pid)


def drains(keys: Keys) -> str:
    """The prefix of the drain records' keys."""
    return f"{keys.root}drains/"
