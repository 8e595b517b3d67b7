"""Runs to be killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.faults.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as running:
        yield running
