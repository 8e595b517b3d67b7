"""A fleet of stand-in instances, as most tests of this folder want one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.weightsync.fleet import Fleet, running_fleet


@pytest.fixture
async def fleet(store_url: str) -> AsyncIterator[Fleet]:
    async with running_fleet(store_url) as fleet:
        yield fleet
