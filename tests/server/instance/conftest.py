"""A store that nothing else uses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from weightsync import Store, open_store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = open_store(f"sqlite://{tmp_path}/store.db")
    yield opened
    await opened.close()
