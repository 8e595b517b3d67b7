"""Where no hosts can be made, the tests that need them are skipped, and say why."""

from __future__ import annotations

import os
from typing import Any

import pytest

from loadtest.hosts import namespaces
from loadtest.hosts.namespaces import NO_IP, CannotShape


def require() -> None:
    """Skips the test where no namespaces can be made; that the tools are missing is a failure in CI."""
    if (said := namespaces.obstacle()) is not None:
        fails = said == NO_IP and os.environ.get("CI") == "true"
        (pytest.fail if fails else pytest.skip)(f"network namespaces: {said}")


class Hosts(namespaces.Hosts):
    """Hosts whose links cannot be shaped skip the test that would have it."""

    def shape(self, host: int, **how: Any) -> None:
        try:
            super().shape(host, **how)
        except CannotShape as error:
            pytest.skip(str(error))
