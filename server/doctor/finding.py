"""What a check says: how it stands, what was found, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`mend` is empty for what is well. A skipped check says in `found` why."""

    status: Status
    found: str
    mend: str = ""


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warn(found: str, mend: str) -> Finding:
    """It runs, but slower or less safely than it could, or a part that may not be wanted does not."""
    return Finding("warn", found, mend)


def fail(found: str, mend: str) -> Finding:
    """What was asked for cannot run so."""
    return Finding("fail", found, mend)


def skip(why: str) -> Finding:
    """There is nothing here to check, or no way to."""
    return Finding("skip", why)
