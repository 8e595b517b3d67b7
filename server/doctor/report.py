"""All checks, run, and what came of them: a table for people, JSON for machines."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass

import orjson
from rich.console import Console
from rich.text import Text

from server.cli.output import table
from server.doctor.registry import Check, Finding, Status, all_checks, fail
from server.doctor.world import World
from server.errors import ConfigError

COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


@dataclass(frozen=True, slots=True)
class Result:
    """One finding of the check of that name."""

    check: str
    finding: Finding


def chosen(only: Collection[str] = (), without: Collection[str] = ()) -> list[Check]:
    """The checks to run. Raises ConfigError, which lists those there are."""
    checks = all_checks()
    names = [found.name for found in checks]
    if unknown := sorted({*only, *without} - set(names)):
        raise ConfigError(f"there is no check {unknown[0]!r}: choose from {', '.join(names)}")
    return [found for found in checks if (not only or found.name in only) and found.name not in without]


def diagnose(world: World, checks: Iterable[Check]) -> list[Result]:
    """Every finding. A check that breaks is a finding too, and the others go on."""
    return [Result(found.name, finding) for found in checks for finding in _run(found, world)]


def _run(found: Check, world: World) -> list[Finding]:
    try:
        return list(found.function(world))
    except Exception as error:  # a host that nobody thought of must not hide what the other checks find
        said = f"the check broke on this host: {type(error).__name__}: {error}"
        return [fail(said, f"Report it; leave it out meanwhile with --skip {found.name}")]


def failed(results: Iterable[Result]) -> bool:
    return any(result.finding.status == "fail" for result in results)


def to_json(results: list[Result]) -> str:
    """`{"ok": bool, "checks": [{"check", "status", "found", "mend"}, ...]}`."""
    rows = [{"check": result.check, **asdict(result.finding)} for result in results]
    return orjson.dumps({"ok": not failed(results), "checks": rows}).decode()


def show(results: list[Result], console: Console) -> None:
    """A row for each finding, and a line that counts them."""
    shown = table("check", "", "found", "how to mend")
    for result in results:
        finding = result.finding
        status = Text(finding.status, style=COLOURS[finding.status])
        shown.add_row(result.check, status, Text(finding.found), Text(finding.mend))
    console.print(shown)
    counts = {status: sum(r.finding.status == status for r in results) for status in COLOURS}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items() if count) or "nothing was checked")
