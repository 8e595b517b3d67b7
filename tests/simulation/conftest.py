"""Fixtures that all simulated worlds need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from weightsync.control import swap


@pytest.fixture(autouse=True)
def few_tombstones(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that versions, and the forms that only they had, go within a schedule."""
    monkeypatch.setattr(swap, "TOMBSTONES_KEPT", 1)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a thread is done at once: threads are not simulated."""

    async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
