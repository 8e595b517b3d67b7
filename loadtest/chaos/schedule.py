"""What breaks, in which order: a deck of every fault of every process and link, shuffled by a seed, again and again.

So each of them comes once before any comes twice, and the same seed gives the same run, as far as time allows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "freeze", "cut", "loss"]
ON_EACH = ("instance", "engine", "peer", "gateway", "etcd")
PUBLISHER = "publisher"
LINK = "link"
FREEZE_S, CUT_S, LOSS_S = (2.0, 12.0), (3.0, 15.0), (5.0, 15.0)
LOSS = (0.02, 0.15)
PAUSE_S = (2.0, 8.0)
OVERLAPPING = 0.2


@dataclass(frozen=True)
class Fault:
    """`what` on `host` is broken for `seconds` (0: it is killed), `pause_s` after the fleet was whole again.

    `overlaps`: it comes while the fleet is not whole yet after the fault before. `loss` is a share of frames.
    """

    kind: Kind
    what: str
    host: int
    seconds: float
    pause_s: float
    overlaps: bool = False
    loss: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.what}"


def schedule(seed: int, hosts: int, publisher: int = 0) -> Iterator[Fault]:
    """Faults without end. `publisher`: the host where it runs."""
    chance = random.Random(seed)
    while True:
        deck = _deck(hosts, publisher)
        chance.shuffle(deck)
        for kind, what, host in deck:
            yield _drawn(chance, kind, what, host)


def _deck(hosts: int, publisher: int) -> list[tuple[Kind, str, int]]:
    places = [(what, host) for what in ON_EACH for host in range(hosts)] + [(PUBLISHER, publisher)]
    ends: list[tuple[Kind, str, int]] = [("kill", what, host) for what, host in places]
    stops: list[tuple[Kind, str, int]] = [("freeze", what, host) for what, host in places]
    links: list[tuple[Kind, str, int]] = [(kind, LINK, host) for host in range(hosts) for kind in ("cut", "loss")]
    return ends + stops + links


def _drawn(chance: random.Random, kind: Kind, what: str, host: int) -> Fault:
    """All chances are drawn for every fault, so that a change of one range does not move the rest."""
    seconds = {bounds: chance.uniform(*bounds) for bounds in (FREEZE_S, CUT_S, LOSS_S)}
    loss, pause_s, overlaps = chance.uniform(*LOSS), chance.uniform(*PAUSE_S), chance.random() < OVERLAPPING
    bounds = {"kill": None, "freeze": FREEZE_S, "cut": CUT_S, "loss": LOSS_S}[kind]
    lasts = seconds[bounds] if bounds is not None else 0.0
    return Fault(kind, what, host, lasts, pause_s, overlaps, loss if kind == "loss" else 0.0)
