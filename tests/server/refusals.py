"""The statuses that a test expects a request to be refused with."""

from __future__ import annotations

import pytest

from server.errors import HttpError


def refuses(*statuses: int, match: str | None = None) -> pytest.RaisesExc[HttpError]:
    """As pytest.raises, of an HttpError with one of `statuses`."""
    return pytest.raises(HttpError, match=match, check=lambda error: error.status in statuses)
