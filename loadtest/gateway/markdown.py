"""The tables that a run prints, which are those of docs/benchmarks.md; again from the file that it wrote:

python -m loadtest.gateway.markdown docs/benchmarks/gateway.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from loadtest.gateway.cancel import GIVE_UP_S, STATES

ROWS = (
    ("requests/s at 32 clients", ("requests_per_s",), 1),
    ("CPU us per request", ("cpu_us_per_request",), 1),
    ("added latency at one client, p50 / p99 us", ("added_latency_us_p50", "added_latency_us_p99"), 1),
    ("256 streams paced at 20 ms: CPU us per chunk", ("cpu_us_per_chunk",), 1),
    ("share of a core, %", ("core_share",), 100),
    ("added time to first token, p50 / p99 us", ("added_ttft_us_p50", "added_ttft_us_p99"), 1),
    ("added inter-token latency, p50 / p99 us", ("added_gap_us_p50", "added_gap_us_p99"), 1),
    ("220 KB prompts/s", ("large_requests_per_s",), 1),
    ("resident memory, MiB", ("rss_mb",), 1),
)


def tables(report: dict[str, Any]) -> str:
    """Contenders side by side, medians of the rounds; then the targets."""
    found = {name: c for name, c in report["contenders"].items() if "failed" not in c and name != "direct"}
    rows = [["", *found], ["---"] * (len(found) + 1)]
    for title, figures, scale in ROWS:
        rows.append([title, *(" / ".join(_figure(c, f, scale) for f in figures) for c in found.values())])
    for state in STATES:
        title = f"client left ({state}) to upstream closed, ms"
        rows.append([title, *(_left(c["cancel_ms"].get(state)) for c in found.values())])
    return _table(rows) + "\n" + _table([["target", "wanted", "measured", ""], ["---"] * 4, *_targets(report)])


def _targets(report: dict[str, Any]) -> list[list[str]]:
    rows = []
    for target in report["targets"]:
        wanted = f"{'at most' if target['at_most'] else 'at least'} {_number(target['wanted'])}"
        measured = "-" if target["measured"] is None else _number(target["measured"])
        rows.append([target["name"], wanted, measured, "met" if target["met"] else "**missed**"])
    return rows


def _figure(contender: dict[str, Any], name: str, scale: int) -> str:
    spread = contender["figures"].get(name)
    return _number(spread["median"] * scale) if spread is not None else "-"


def _left(times: list[float | None] | None) -> str:
    if not times:
        return "-"
    seen = [t for t in times if t is not None]
    never = len(times) - len(seen)
    return f"over {GIVE_UP_S * 1e3:.0f} ({never} of {len(times)})" if never else _number(median(seen))


def _number(value: float) -> str:
    if abs(value) < 0.005:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _table(rows: list[list[str]]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def main() -> None:
    print(tables(orjson.loads(Path(sys.argv[1]).read_bytes())), end="")


if __name__ == "__main__":
    main()
