"""Errors of weightsync by their codes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from weightsync.errors import WeightSyncError


@contextlib.contextmanager
def refused(code: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Inside an error of this code is raised; each code has one class (tests/weightsync/test_errors.py)."""
    with pytest.raises(WeightSyncError, match=match) as caught:
        yield caught
    assert caught.value.code == code
