"""Where no hosts can be made, the tests that need them are skipped, and say why."""

from __future__ import annotations

from typing import Any

from loadtest.hosts import namespaces
from loadtest.hosts.namespaces import NO_IP, CannotShape
from tests.lacking import lacking, unable


def require() -> None:
    """Skips the test where no namespaces can be made; that the tools are missing is a failure in CI."""
    if (said := namespaces.obstacle()) is not None:
        (lacking if said == NO_IP else unable)(f"network namespaces: {said}")


class Hosts(namespaces.Hosts):
    """Hosts whose links cannot be shaped skip the test that would have it."""

    def shape(self, host: int, **how: Any) -> None:
        try:
            super().shape(host, **how)
        except CannotShape as error:
            unable(str(error))
