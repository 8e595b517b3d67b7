"""A gateway in the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.gateway.harness import RunningGateway, running_gateway


@pytest.fixture
def gateway(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningGateway]:
    """Without a coordinator: records of swaps are the test's own. A parameter, or `UPSTREAM` of the test's module, says
    how it treats instances."""
    upstream = getattr(request, "param", request.module.UPSTREAM)
    with running_gateway(tmp_path, upstream=upstream, run_coordinator=False) as running:
        yield running
