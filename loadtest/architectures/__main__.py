"""`python -m loadtest.architectures`: every architecture; with NAMES, those alone, and nothing is written."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from loadtest.architectures.report import JSON, PAGE, page, summary
from loadtest.architectures.trial import Trial, forked, registered, warm
from loadtest.measure.machine import machine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.architectures", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--logs", type=Path, default=Path("runs/architectures"), help="what each trial printed")
    args = parser.parse_args()
    args.logs.mkdir(exist_ok=True, parents=True)
    warm()
    trials: list[Trial] = []
    for name in args.names or registered():
        trials.append(forked(name, args.logs / f"{name}.log"))
        print(f"{name}: {trials[-1].outcome}, {trials[-1].seconds} s {trials[-1].reason}".rstrip(), flush=True)
    if not args.names:
        JSON.write_text(json.dumps({"machine": machine(), "trials": [asdict(t) for t in trials]}, indent=1) + "\n")
        PAGE.write_text(page(PAGE.read_text(), json.loads(JSON.read_text())))
    print(summary(trials))


if __name__ == "__main__":
    main()
