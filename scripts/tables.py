"""Writes anew the tables of the documentation that are made of declarations in the code: `python scripts/tables.py`.

tests/server/gateway/test_docs.py fails while one of them is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

from server import api, key_limits
from server.gateway import error_map, metrics
from server.gateway.access import roles

DOCS = Path(__file__).parents[1] / "docs"
TABLES = (
    (api.table, "api.md"),
    (metrics.table, "api.md"),
    (error_map.table, "errors.md"),
    (key_limits.header_table, "api.md"),
    (key_limits.table, "gateway.md"),
    (roles.table, "security.md"),
)


def main() -> None:
    """A table is found by its first line, and ends at the next empty one."""
    for make, page in TABLES:
        table, text = make(), (DOCS / page).read_text()
        head = re.escape(table.partition("\n")[0])
        made = table.replace("\\", r"\\") + "\n"
        text, found = re.subn(rf"^{head}\n(?:\|.*\n)+", made, text, flags=re.MULTILINE)
        if found != 1:
            raise SystemExit(f"docs/{page} has {found} tables that begin with {table.partition(chr(10))[0]!r}")
        (DOCS / page).write_text(text)


if __name__ == "__main__":
    main()
