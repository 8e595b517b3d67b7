"""`python -m trainer.report METRICS.jsonl [MORE.jsonl ...] [--to DIR]`: report one run, or compare several."""

from __future__ import annotations

import argparse
import sys

from trainer.launch import status_of
from trainer.report.write import write_report


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for input that must be corrected."""
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description="Plots and Markdown of runs.")
    parser.add_argument("metrics", nargs="+", help="the `metrics` file of a run")
    parser.add_argument("--to", metavar="DIR", help="where to (default: beside the first file)")
    parsed = parser.parse_args(arguments)
    return status_of(lambda: print(write_report(parsed.metrics, parsed.to)))


if __name__ == "__main__":
    sys.exit(main())
