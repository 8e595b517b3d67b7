"""Writes anew the tables of docs/api.md that are made of declarations in the code: `python scripts/tables.py`.

tests/server/gateway/test_docs.py fails while one of them is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

from server import api
from server.gateway.observe import metrics

API = Path(__file__).parents[1] / "docs" / "api.md"
TABLES = (api.table, metrics.table)


def main() -> None:
    """A table is found by its first line, and ends at the next empty one."""
    text = API.read_text()
    for table in (make() for make in TABLES):
        head = re.escape(table.partition("\n")[0])
        made = table.replace("\\", r"\\") + "\n"
        text, found = re.subn(rf"^{head}\n(?:\|.*\n)+", made, text, flags=re.MULTILINE)
        if found != 1:
            raise SystemExit(f"docs/api.md has {found} tables that begin with {table.partition(chr(10))[0]!r}")
    API.write_text(text)


if __name__ == "__main__":
    main()
