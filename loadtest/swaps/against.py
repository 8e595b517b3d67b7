"""Clients' view of swaps of this checkout and of another, in pairs: `hotswap bench swap --against DIRECTORY`.

Both servers run at the same time, and streams go to one of them at a time. A visit alternates quiet time and swaps
under these streams, as the benchmark of one checkout does (stall.py).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.measure import pairs as paired
from loadtest.measure.pairs import Checkout, Ratio, Serving
from loadtest.models.kinds import bench_checkpoints
from loadtest.swaps.stall import MODEL, VLLM_ARGS, WARM_UP, Windows, cpu_ms_per_token, drive, swap_once
from loadtest.workload.children import publishing
from server.errors import CliError

PAIRS, SWAPS, EACH_S = 4, 2, 6.0  # swaps of a visit, and what each takes at most with the quiet time before
# Room for all streams, and no more: two servers and two publishers share the memory of the machine, 24 GB at least.
ARGS = (*VLLM_ARGS, "--kv-cache-memory-bytes", str(5 << 28))


@dataclass(frozen=True)
class Side:
    """A server, and the process that publishes to it, both of one checkout."""

    serving: Serving
    publish: Callable[[int], dict[str, Any]]


def run(
    other: Path,
    json: Path | None = None,
    *,
    pairs: int = PAIRS,
    streams: int = 16,
    small: bool = False,
    kind: str = "dense",
) -> dict[str, Ratio]:
    """Measures both checkouts, prints a table, and writes `json` if it is given; by the name of the figure.

    Raises CliError.
    """
    work = Path("runs") / ("bench-small" if small else "bench")
    models = bench_checkpoints(work, kind, small=small)
    both = paired.checkouts(other)
    with contextlib.ExitStack() as stack:
        this, that = (stack.enter_context(_side(c, work / f"side-{i}", models)) for i, c in enumerate(both))
        ratios = paired.by_turns((this, that), [partial(_visit, streams)], pairs)
    paired.report(f"swaps of {kind} under {streams} streams", (both[0].name, both[1].name), ratios, json)
    return ratios


@contextlib.contextmanager
def _side(checkout: Checkout, state: Path, models: list[Path]) -> Iterator[Side]:
    with (
        paired.serving(checkout, state.resolve(), models[0], MODEL, ARGS) as serving,
        publishing(serving.store, MODEL, models, checkout.environment) as publish,
    ):
        for number in range(WARM_UP):
            swap_once(serving.admin, publish, number % 2, Windows())
        yield Side(serving, publish)


def _visit(streams: int, side: Side) -> dict[str, float]:
    windows = Windows()
    pid = side.serving.process.process.pid

    def swap(number: int) -> None:
        swap_once(side.serving.admin, side.publish, number % 2, windows)

    gaps, lost = drive(side.serving.url, pid, streams, SWAPS, swap, windows, EACH_S)
    if any(lost.values()):
        raise CliError(f"requests were lost at the server of {side.serving.checkout.name}: {lost}")
    return {
        "longest gap with a swap, ms": 1e3 * statistics.median(gaps.longest(windows.swapping)),
        "longest gap without, ms": 1e3 * statistics.median(gaps.longest(windows.quiet)),
        "tokens/s with a swap": gaps.tokens_per_s(windows.swapping),
        "tokens/s without": gaps.tokens_per_s(windows.quiet),
        "CPU of the engine, ms a token": cpu_ms_per_token(gaps, windows),
        "publishing, ms": statistics.median(windows.publish_ms),
        "staging, ms": statistics.median(windows.stage_ms),
        "commit, ms": statistics.median(windows.commit_ms),
    }
