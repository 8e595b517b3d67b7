"""Two gateways in pairs: what a change, or versions that share the traffic, cost, on a machine that others use, too.

Both run at the same time on one core, in front of one upstream, with everything on. Loads of a second alternate between
them (`loadtest/measure/pairs.py`).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from loadtest.measure import pairs as paired
from loadtest.measure.pairs import HERE, Checkout, Ratio
from server.ports import free_port

LOADS = (
    replace(MANY, seconds=1.0), replace(ONE, seconds=0.5), replace(PACED, seconds=1.5), replace(LARGE, seconds=0.6),
)  # fmt: skip
FIGURES = {
    "many": "cpu_us_per_request", "one": "latency_us_p50", "paced": "cpu_us_per_chunk", "large": "large_cpu_us",
}  # fmt: skip
PAIRS = 25


def run(
    sides: Sequence[Contender], json: Path | None = None, *, pairs: int = PAIRS, loads: Sequence[Load] = LOADS
) -> dict[str, Ratio]:
    """Measures the two `sides`, prints a table, writes `json` if given; by the name of the figure, in us.

    Raises CannotStart, CannotBuild.
    """
    compiled("client")
    cores = Cores.available()
    visits: list[Callable[[Running], Mapping[str, float]]] = [partial(_visit, load, cores) for load in loads]
    first, second = sides
    with _both(sides, cores) as (this, other):
        ratios = paired.by_turns((this, other), visits, pairs)
    paired.report(FULL, (first.name, second.name), ratios, json)
    return ratios


def _visit(load: Load, cores: Cores, side: Running) -> dict[str, float]:
    seen = run_load(load, side, cores)
    name = FIGURES[load.name]
    return {name: figures(load.name, seen, seen)[name]}


def checkouts(other: Path) -> list[Contender]:
    """The gateway of this checkout and of `other`, the root of a checkout with its dependencies in this environment. If
    it is this one, the other gateway runs the sources instead of what is compiled of them. Raises CannotStart,
    CliError."""
    if len({(tree / "server/gateway/_compiled").exists() for tree in (HERE, other)}) > 1:
        raise CannotStart("one of the two gateways is compiled: run `python -m server.gateway.compiled` in the other")
    pure = {"HOTSWAP_PURE": "1"} if other.resolve() == HERE else {}
    this, that = paired.checkouts(other)
    return [
        Contender(this.name, hotswap_full, None, this.environment),
        Contender(that.name, hotswap_full, None, that.environment | pure),
    ]


def splits() -> list[Contender]:
    """Two instances whose versions share the traffic, and two instances of one version."""
    here = Checkout("this checkout", HERE).environment
    return [
        Contender("two versions", hotswap_split, None, here),
        Contender("one version", hotswap_whole, None, here),
    ]


@contextlib.contextmanager
def _both(sides: Sequence[Contender], cores: Cores) -> Iterator[list[Running]]:
    upstream = free_port()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        command = pinned(cores.upstream, [str(compiled("upstream")), str(upstream)])
        stack.enter_context(running(command, Path(directory) / "upstream.log"))
        yield [stack.enter_context(started(side, upstream, cores)) for side in sides]
