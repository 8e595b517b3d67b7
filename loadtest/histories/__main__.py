"""`python -m loadtest.histories FILE...`: the lines of a recorded run that contradict the rules. Status 1 if any do."""

from __future__ import annotations

import sys
from pathlib import Path

from loadtest.histories.check import check

if __name__ == "__main__":
    found = check(map(Path, sys.argv[1:]))
    for contradiction in found:
        print(contradiction)
    print(f"{len(found)} contradictions")
    sys.exit(bool(found))
