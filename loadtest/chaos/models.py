"""The models of the fleet: two, an alias and their adapters, where they run, and what their versions answer."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weightsync.control.editions import split_name

FIRST, SECOND, ALIAS = "alpha", "beta", "either"
ALIASES: Mapping[str, tuple[str, ...]] = {ALIAS: (SECOND, FIRST)}  # the second has fewer instances, so it is missed
ADAPTERS: Mapping[str, str] = {"style": FIRST, "tone": SECOND}  # and their bases, whose answers they do not change
EDITIONS, KEPT = 50, 2  # of a model: the adapters with editions, and the newest editions of each that stay
POPULAR = 5  # of these, which are published and asked for as often as all others
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


def flawed(edition: int) -> bool:
    """Whether the edition with this number is not finite, so that no instance may serve it. Its overflow would show in
    answers alone, so an edition has none."""
    return badness(edition) in REFUSED


def editions_of(model: str) -> tuple[str, ...]:
    """The adapters of the model that have editions. None of them changes what the model answers."""
    return tuple(f"{model}-{n:02d}" for n in range(EDITIONS))


def one_of(model: str, chance: random.Random) -> str:
    """One of these adapters."""
    return chance.choice(editions_of(model)[: chance.choice((POPULAR, EDITIONS))])


_EDITIONS = {name: model for model in FIRST_TOKEN for name in editions_of(model)}
_BASES = {**ADAPTERS, **_EDITIONS}


def base_of(name: str) -> str:
    """The model that answers for an adapter or an edition; else the name itself."""
    return _BASES.get(split_name(name)[0], name)


def is_adapter(name: str) -> bool:
    return base_of(name) != name


def answerers(name: str) -> tuple[str, ...]:
    """The models, by name, that may answer a request for that name."""
    return ALIASES.get(name, (base_of(name),))


def answers_for(by: str, asked: str) -> bool:
    """Whether an answer that names `by` may be one to a request for `asked`."""
    (adapter, number), (answered, by_number) = split_name(asked), split_name(by)
    if adapter in _EDITIONS:
        return answered == adapter and by_number is not None and number in (None, by_number)
    return by in answerers(asked) or (asked in ADAPTERS and by == asked)


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
