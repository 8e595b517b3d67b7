"""`python -m loadtest.architectures [NAMES]`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from loadtest.architectures.trial import forked, warm


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.architectures", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("runs/architectures"))
    args = parser.parse_args()
    args.logs.mkdir(exist_ok=True, parents=True)
    warm()
    for name in args.names:
        trial = forked(name, args.logs / f"{name}.log")
        print(json.dumps(asdict(trial)), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")


if __name__ == "__main__":
    main()
