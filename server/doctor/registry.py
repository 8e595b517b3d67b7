"""A check's findings, and the list of checks: every function in `server.doctor.checks` marked with `@check`. All of
them run here, and their findings become JSON."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import orjson

from server.doctor.world import World
from server.errors import ConfigError
from server.missing import setup

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`mend` is empty for what is well. A skipped check says in `found` why."""

    status: Status
    found: str
    mend: str = ""


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warn(found: str, mend: str) -> Finding:
    """It runs, but slower or less safely than it could, or a part that may not be wanted does not."""
    return Finding("warn", found, mend)


def fail(found: str, mend: str) -> Finding:
    """A finding with which the server cannot run as asked."""
    return Finding("fail", found, mend)


def skip(why: str) -> Finding:
    """There is nothing here to check, or no way to."""
    return Finding("skip", why)


Function = Callable[[World], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """`about` says in a few words what is looked at."""

    name: str
    about: str
    function: Function


_CHECKS: dict[str, Check] = {}


def check(name: str, about: str) -> Callable[[Function], Function]:
    """Puts a function into the list. A check yields one finding or more and raises nothing on purpose."""

    def register(function: Function) -> Function:
        assert name not in _CHECKS, f"two checks are called {name}"
        _CHECKS[name] = Check(name, about, function)
        return function

    return register


def all_checks() -> list[Check]:
    """By name."""
    package = importlib.import_module("server.doctor.checks")
    for module in pkgutil.iter_modules(package.__path__):
        try:
            importlib.import_module(f"{package.__name__}.{module.name}")
        except ModuleNotFoundError as error:
            name = module.name.replace("_", "-")
            _CHECKS[name] = _unable(name, error.name or "a package")
    return [_CHECKS[name] for name in sorted(_CHECKS)]


def _unable(name: str, package: str) -> Check:
    """Stands for a check that cannot run without `package`."""
    text = f"the package {package} is not installed, so this cannot be checked"
    return Check(name, "", lambda _: [fail(text, setup())])


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
