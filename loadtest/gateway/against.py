"""Two gateways in pairs: what a change, or versions that share the traffic, cost, on a machine that others use, too.

Both run at the same time on one core, in front of one upstream, with everything on. Loads of a second alternate between
them, and which of the two comes first alternates, too: what disturbs one disturbs the other. A figure is the median
of the ratios of neighbours.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from loadtest.gateway.contenders import (
    FULL,
    LARGE,
    MANY,
    ONE,
    PACED,
    CannotStart,
    Contender,
    Cores,
    Load,
    Running,
    compiled,
    hotswap_full,
    hotswap_split,
    hotswap_whole,
    pinned,
    running,
    started,
)
from loadtest.gateway.measure import figures, run_load
from loadtest.measure.machine import machine
from server.ports import free_port

LOADS = (
    replace(MANY, seconds=1.0), replace(ONE, seconds=0.5), replace(PACED, seconds=1.5), replace(LARGE, seconds=0.6),
)  # fmt: skip
FIGURES = {
    "many": "cpu_us_per_request", "one": "latency_us_p50", "paced": "cpu_us_per_chunk", "large": "large_cpu_us",
}  # fmt: skip
PAIRS = 25
HERE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ratio:
    """A figure of both, medians over all pairs in us, and `this` by `other` in neighbouring loads."""

    this: float
    other: float
    median: float
    low: float  # quartiles
    high: float
    pairs: int

    @classmethod
    def of(cls, found: Sequence[tuple[float, float]]) -> Ratio:
        """`found`: (this, other) of each pair."""
        low, median, high = statistics.quantiles([this / other for this, other in found], n=4, method="inclusive")
        this, other = (statistics.median(values) for values in zip(*found, strict=True))
        return cls(this, other, median, low, high, len(found))


def run(
    sides: Sequence[Contender], json: Path | None = None, *, pairs: int = PAIRS, loads: Sequence[Load] = LOADS
) -> dict[str, Ratio]:
    """Measures the two `sides`, prints a table, writes `json` if given; by the name of the figure.

    Raises CannotStart, CannotBuild.
    """
    compiled("client")
    cores = Cores.available()
    found: dict[str, list[tuple[float, float]]] = {FIGURES[load.name]: [] for load in loads}
    first, second = (side.name for side in sides)
    with _both(sides, cores) as both:
        for number in range(pairs + 1):  # the first warms both up
            for load in loads:
                cost = {}
                for side in both if number % 2 else reversed(both):
                    seen = run_load(load, side, cores)
                    cost[side.name] = figures(load.name, seen, seen)[FIGURES[load.name]]
                if number:
                    found[FIGURES[load.name]].append((cost[first], cost[second]))
    ratios = {name: Ratio.of(pairs) for name, pairs in found.items()}
    _show(first, second, ratios)
    if json is not None:
        said = {"machine": machine(), "other": second, "figures": {n: asdict(r) for n, r in ratios.items()}}
        json.write_bytes(orjson.dumps(said, option=orjson.OPT_INDENT_2))
    return ratios


def checkouts(other: Path) -> list[Contender]:
    """The gateway of this checkout and of `other`, the root of a checkout with its dependencies in this environment. If
    it is this one, the other gateway runs the sources instead of what is compiled of them. Raises CannotStart."""
    if len({(tree / "server/gateway/_compiled").exists() for tree in (HERE, other)}) > 1:
        raise CannotStart("one of the two gateways is compiled: run `python -m server.gateway.compiled` in the other")
    pure = {"HOTSWAP_PURE": "1"} if other.resolve() == HERE else {}
    return [
        Contender("this checkout", hotswap_full, None, _packages(HERE)),
        Contender(str(other), hotswap_full, None, _packages(other) | pure),
    ]


def splits() -> list[Contender]:
    """Two instances whose versions share the traffic, and two instances of one version."""
    return [
        Contender("two versions", hotswap_split, None, _packages(HERE)),
        Contender("one version", hotswap_whole, None, _packages(HERE)),
    ]


def _packages(tree: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(tree.resolve()), "PYTHONSAFEPATH": "1"}  # not those of the working directory


@contextlib.contextmanager
def _both(sides: Sequence[Contender], cores: Cores) -> Iterator[list[Running]]:
    upstream = free_port()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        command = pinned(cores.upstream, [str(compiled("upstream")), str(upstream)])
        stack.enter_context(running(command, Path(directory) / "upstream.log"))
        yield [stack.enter_context(started(side, upstream, cores)) for side in sides]


def _show(first: str, second: str, ratios: dict[str, Ratio]) -> None:
    table = Table("", first, second, "ratio", "quartiles", title=f"{FULL}, in pairs")
    for name, ratio in ratios.items():
        quartiles = f"{ratio.low:.3f} - {ratio.high:.3f}"
        table.add_row(name, f"{ratio.this:.1f}", f"{ratio.other:.1f}", f"{ratio.median:.3f}", quartiles)
    Console(width=120).print(table)
