"""The models of the fleet: two and an alias, where they run, and what their versions answer."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

FIRST, SECOND, ALIAS = "alpha", "beta", "either"
ALIASES: Mapping[str, tuple[str, ...]] = {ALIAS: (SECOND, FIRST)}  # the second has fewer instances, so it is missed
ADAPTERS: Mapping[str, str] = {"style": FIRST, "tone": SECOND}  # and their bases, whose answers they do not change
FIRST_TOKEN: Mapping[str, int] = {FIRST: 100, SECOND: 200}
CHECKPOINTS = 4
BAD_EVERY = 8
Bad = Literal["nan", "inf", "overflow"]
CONFIGURE = signal.SIGUSR1  # to a publisher: the next version has another configuration, which can be served
MISFIT = "misfit"  # a version whose configuration cannot be served, which must be refused as well
REFUSED: tuple[Bad, ...] = ("nan", "inf")  # what staging must refuse; the third kind shows only while it runs


def token_of(model: str, version: int) -> int:
    """The token that a good version of the model answers, whatever it is asked."""
    return FIRST_TOKEN[model] + version % CHECKPOINTS


def badness(version: int) -> Bad | None:
    """The flaw in the weights of a version, by its number. Answers of a bad one are anybody's guess."""
    kinds: tuple[Bad, ...] = (*REFUSED, "overflow")
    return kinds[version // BAD_EVERY % len(kinds)] if version % BAD_EVERY == BAD_EVERY - 1 else None


def answerers(name: str) -> tuple[str, ...]:
    """The models, by name, that may answer a request for that name."""
    return ALIASES.get(name, (ADAPTERS.get(name, name),))


@dataclass(frozen=True)
class Placement:
    """A model's hosts: those of its instances, its publisher's, and those where an instance joins and leaves."""

    model: str
    instances: tuple[int, ...]
    publisher: int
    joins: tuple[int, ...] = ()


def placed(hosts: int, second: int) -> tuple[Placement, ...]:
    """The first model has an instance on each host, the second on `second` of them, the last ones; on the others it
    joins and leaves."""
    others = tuple(range(hosts - second))
    return (
        Placement(FIRST, tuple(range(hosts)), publisher=0),
        Placement(SECOND, tuple(range(hosts))[hosts - second :], publisher=hosts - 1, joins=others),
    )


def models_file() -> dict[str, Any]:
    """The file that `hotswap gateway --models` reads (JSON is YAML)."""
    return {"models": [{"name": FIRST}, {"name": SECOND}], "aliases": {k: list(v) for k, v in ALIASES.items()}}
