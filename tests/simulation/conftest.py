"""Fixtures that all simulated worlds need."""

from __future__ import annotations

import pytest

from weightsync.control import swap


@pytest.fixture(autouse=True)
def few_tombstones(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that versions, and the forms that only they had, go within a schedule."""
    monkeypatch.setattr(swap, "TOMBSTONES_KEPT", 1)
