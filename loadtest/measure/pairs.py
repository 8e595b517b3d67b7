"""Two sides of a comparison, by turns on one machine. Figures are ratios of neighbours: what disturbs one side disturbs
the other, too.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from loadtest.measure.run import with_machine
from server.cli.admin import AdminClient
from server.errors import CliError
from server.ports import free_port
from server.up.paths import ServerInfo
from server.up.processes import Child

HERE = Path(__file__).resolve().parents[2]
READY_S = 600.0
Side = TypeVar("Side")


@dataclass(frozen=True)
class Checkout:
    """A tree of this repository. `root` is the directory that its processes import, with their dependencies from this
    environment."""

    name: str
    root: Path

    @property
    def environment(self) -> dict[str, str]:
        """Without PYTHONSAFEPATH, `-m` would import from the working directory."""
        return {"PYTHONPATH": str(self.root.resolve()), "PYTHONSAFEPATH": "1"}


def checkouts(other: Path) -> tuple[Checkout, Checkout]:
    """This checkout and that at `other`. Raises CliError."""
    if not (other / "server" / "cli").is_dir():
        raise CliError(f"{other} is no checkout of this repository: it has no server/cli. Name its root directory")
    return Checkout("this checkout", HERE), Checkout(str(other), other)


@dataclass(frozen=True)
class Ratio:
    """A figure of both sides, medians over all pairs, and `this` by `other` in neighbouring visits."""

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


def by_turns(
    sides: tuple[Side, Side], visits: Sequence[Callable[[Side], Mapping[str, float]]], pairs: int, *, warm_up: int = 1
) -> dict[str, Ratio]:
    """The ratio of each figure that the visits return. Every visit goes to both sides, `pairs` times and `warm_up`
    times before; the side that comes first alternates."""
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for number in range(warm_up + pairs):
        for visit in visits:
            if number % 2:
                this, other = (visit(side) for side in sides)
            else:
                other, this = (visit(side) for side in reversed(sides))
            if number >= warm_up:
                for name in this:
                    found[name].append((this[name], other[name]))
    return {name: Ratio.of(each) for name, each in found.items()}


def report(title: str, names: tuple[str, str], ratios: Mapping[str, Ratio], json: Path | None) -> None:
    """Prints a table, and writes `json` if it is given."""
    table = Table("", *names, "ratio", "quartiles", title=f"{title}, in pairs")
    for name, ratio in ratios.items():
        quartiles = f"{ratio.low:.3f} - {ratio.high:.3f}"
        table.add_row(name, f"{ratio.this:.4g}", f"{ratio.other:.4g}", f"{ratio.median:.3f}", quartiles)
    Console(width=120).print(table)
    with_machine({"other": names[1], "figures": {name: asdict(ratio) for name, ratio in ratios.items()}}, json)


class Serving:
    """`hotswap up` of a checkout, as its users start it."""

    def __init__(self, checkout: Checkout, state: Path, info: ServerInfo, process: Child) -> None:
        self.checkout, self.url, self.store, self.process = checkout, info.url, info.store, process
        self.admin = AdminClient(state)


@contextlib.contextmanager
def serving(checkout: Checkout, state: Path, model: Path, name: str, arguments: Sequence[str]) -> Iterator[Serving]:
    """A server with one instance that serves. `state` is emptied first; `arguments` are further options of `up`. Raises
    CliError."""
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True)
    options = ["--model", str(model), "--name", name, "--port", str(free_port()), "--state-dir", str(state)]
    command = ["server.cli", "up", *options, "--persist", "off", *arguments]
    process = Child(f"the server of {checkout.name}", command, state / "up.log", checkout.environment)
    try:
        deadline = time.monotonic() + READY_S
        while (info := _ready(state)) is None:
            if not process.alive or time.monotonic() > deadline:
                raise CliError(f"{process.name} does not serve; the end of {process.log}:\n{process.tail()}")
            time.sleep(0.2)
        yield Serving(checkout, state, info, process)
    finally:
        process.stop(30.0)


def _ready(state: Path) -> ServerInfo | None:
    with contextlib.suppress(CliError):
        if (info := ServerInfo.read(state)).state == "ready":
            return info
    return None
