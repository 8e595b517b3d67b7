"""Chat templates of others."""

from __future__ import annotations

from tests.world import found, rows

LICENCES = {"Apache-2.0", "Apache 2.0 License"}


def test_the_table_is_what_the_packages_hold() -> None:
    """After a package changes: `python -m tests.world`, and look at what the other tests say of the new ones."""
    listed = rows()
    assert listed == list(found())
    assert {row.licence for row in listed} <= LICENCES
    assert len(listed) >= 80
