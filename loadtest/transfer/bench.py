"""How fast a slot's bytes come from another process, by transport, and how fast to several hosts, by real peers.

    hotswap bench transfer [--json FILE] [--small] [--part reads|links|joiner|feeding]

`links`: to 1 and 8 hosts in network namespaces, each behind a link of its own.
Also, with real instances (feeding/): a late joiner's first token, and what serving loses while it feeds.

All ends are processes of this machine, and but for `links` on loopback, so that sender and receivers share its cores
and its memory: the rates compare transports, and say nothing of a network. Rounds of the contenders alternate.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.hosts.certificates import self_signed
from loadtest.measure.machine import memcpy_gbps
from loadtest.measure.run import with_machine
from loadtest.transfer.feeding.bench import PARTS as INSTANCE_PARTS
from loadtest.transfer.feeding.bench import show as show_instances
from loadtest.transfer.feeding.bench import with_instances
from loadtest.transfer.hosts import by_hosts, by_links
from loadtest.transfer.peer import RAW
from weightsync.transport import available

ROUNDS = 5
RECEIVERS = (1, 2, 4, 8)
READS, LINKS = "reads", "links"
PARTS = (READS, LINKS, *INSTANCE_PARTS)
LINK_GBIT = 0.1  # two cores carry 8 of them, with TLS
TLS = "tcp, mutual TLS"


class Contender:
    """A source and its receivers, which wait for their turn."""

    def __init__(self, stack: contextlib.ExitStack, name: str, nbytes: int, tls: str, receivers: int) -> None:
        self._nbytes = nbytes
        transport = "tcp" if name == TLS else name
        common = [transport, str(nbytes), tls if name == TLS else ""]
        self._source = stack.enter_context(_process("serve", *common))
        endpoint, region, digest = _line(self._source).split()
        arguments = ["receive", *common, endpoint, region]
        self._receivers = [stack.enter_context(_process(*arguments)) for _ in range(receivers)]
        for receiver in self._receivers:
            if _line(receiver).strip() != digest:
                raise SystemExit(f"{name}: other bytes arrived than were sent")

    def round(self) -> float:
        """Seconds from the first receiver's beginning to the last one's end."""
        for receiver in self._receivers:
            assert receiver.stdin is not None
            receiver.stdin.write("\n")
            receiver.stdin.flush()
        spans = [tuple(map(float, _line(receiver).split())) for receiver in self._receivers]
        return max(end for _, end in spans) - min(start for start, _ in spans)

    def gbps(self, seconds: float) -> float:
        """Of all receivers together."""
        return self._nbytes * len(self._receivers) / seconds / 1e9


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "loadtest.transfer.peer", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise SystemExit("a process of the benchmark has ended; its reason is above")
    return line


def by_transport(nbytes: int, rounds: int, tls: str) -> dict[str, dict[str, float]]:
    """GB/s to one receiver, by contender; those whose library is not there are left out."""
    usable = [name for name, reason in available().items() if not reason]
    with contextlib.ExitStack() as stack:
        contenders = {
            name: Contender(stack, name, nbytes, tls, receivers=1) for name in (RAW, *usable, TLS)
        }  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, contender in contenders.items():
                seconds[name].append(contender.round())
        return {name: _rates(contenders[name], taken) for name, taken in seconds.items()}


def by_receivers(nbytes: int, rounds: int, counts: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """GB/s and seconds until the last has everything, by the number of those that read from one source at once."""
    figures = {}
    for count in counts:
        with contextlib.ExitStack() as stack:
            contender = Contender(stack, "tcp", nbytes, "", receivers=count)
            taken = [contender.round() for _ in range(rounds)]
            figures[str(count)] = _rates(contender, taken) | {"seconds": round(statistics.median(taken), 3)}
    return figures


def _rates(contender: Contender, seconds: list[float]) -> dict[str, float]:
    rates = [contender.gbps(taken) for taken in seconds]
    return {"median_gbps": round(statistics.median(rates), 2), "best_gbps": round(max(rates), 2)}


def reads(*, small: bool) -> dict[str, Any]:
    """Between processes that do nothing else."""
    nbytes, rounds, counts = (8 << 20, 1, RECEIVERS[:2]) if small else (256 << 20, ROUNDS, RECEIVERS)
    with tempfile.TemporaryDirectory(prefix="hotswap-transfer-") as directory:
        return {
            "nbytes": nbytes,
            "memcpy_gbps": round(memcpy_gbps(nbytes), 2),
            "by_transport": by_transport(nbytes, rounds, str(self_signed(Path(directory) / "tls"))),
            "by_receivers": by_receivers(nbytes // 4, rounds, counts),
            "by_hosts": by_hosts(nbytes // 4, rounds, counts),
        }


def links(*, small: bool) -> dict[str, Any]:
    """Needs root. Raises LinkUnavailable, RuntimeError: no namespaces, or no limits, can be had here."""
    nbytes, rounds, counts = (
        (4 << 20, 1, ((1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2)))
        if small
        else (256 << 20, 3, ((1, 1, 1), (8, 1, 1), (8, 2, 1), (8, 4, 1), (8, 4, 4)))
    )
    return by_links(nbytes, rounds, counts, LINK_GBIT, chunk=1 << 20)


def run(json: Path | None, *, small: bool = False, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """Measure those `parts`, print the tables, and write the figures to `json`; returns them."""
    report = reads(small=small) if READS in parts else {}
    report |= {"by_links": links(small=small)} if LINKS in parts else {}
    report |= with_instances(parts, small=small)
    show(report)
    return with_machine(report, json)


def show(report: dict[str, Any]) -> None:
    if "by_transport" in report:
        show_reads(report)
    if "by_links" in report:
        show_links(report["by_links"])
    show_instances(report)


def show_reads(report: dict[str, Any]) -> None:
    memcpy = report["memcpy_gbps"]
    table = Table("one receiver, loopback", "GB/s, median", "best", "of memcpy", title=f"memcpy {memcpy:.1f} GB/s")
    for name, found in report["by_transport"].items():
        share = f"{found['median_gbps'] / memcpy:.0%}"
        table.add_row(name, f"{found['median_gbps']:.2f}", f"{found['best_gbps']:.2f}", share)
    Console().print(table)
    ways = ("all read from one source", "peers", "of it from the source")
    table = Table("receivers", *ways, title="seconds until the last has all, tcp")
    for count, found in report["by_hosts"].items():
        star = report["by_receivers"][count]["seconds"]
        table.add_row(count, f"{star:.2f}", f"{found['seconds']:.2f}", f"{found['from_source']:.0%}")
    Console().print(table)


def show_links(found: dict[str, Any]) -> None:
    title = f"{found['nbytes'] >> 20} MiB, links of {found['link_gbit']:g} Gbit/s: {found['link_s']:.2f} s for one"
    columns = ("seconds", "of one link's", "each read", "copies that the source sent", "cores busy")
    table = Table("hosts", *columns, title=title)
    for count in (key for key in found if key[0].isdigit()):
        row = found[count]
        seconds = ", ".join(f"{s:.2f}" for s in row["seconds"])
        table.add_row(
            count, seconds, f"{row['of_a_link']:.2f}", f"{row['read_by_each']:.2f}", f"{row['copies_from_source']:.2f}",
            f"{row['cores']:.1f}",
        )  # fmt: skip
    Console().print(table)
