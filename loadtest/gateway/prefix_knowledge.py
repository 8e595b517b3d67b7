"""How many prefix-cache hits gateways get that know only what they have sent, and how many if they knew every cache.

    hotswap bench prefixes [--json FILE] [--small]

A simulation with the code of the gateway (server/gateway/fleet: policy and tables), of the instance (the ledger of what
it reports) and of the engine (weightsync: which prefixes it holds). Conversations without a session id run on
Zipf-distributed system prompts, on instances whose caches drop blocks of 16 tokens in LRU order. A conversation stays
at one gateway, or each of its requests comes to any. `load` looks at no prefix. `own` is the table of what a gateway
has sent, `all` one of what all gateways have sent. `reports` is what a gateway has sent and what instances report,
which it asks for every SCRAPE_S. `events` is what vLLM's KV events would tell, without delay and without loss: which
blocks each instance holds.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from xxhash import xxh3_64_intdigest

from loadtest.measure.run import with_machine
from server.gateway.fleet.affinity import Hint, PrefixTable, hint, tie_break
from server.gateway.fleet.instance import PREFIXES
from server.gateway.fleet.routing import affinity
from server.instance.prefixes import Ledger, with_shares
from server.prefixes import decode, scope_line
from weightsync.vllm_engine.engine_core.prefixes import Holdings, last_blocks

ROUTE, BLOCK, TOKENS = "/v1/completions", 64, 16  # bytes and tokens of a block
VERSION = "1"
INSTANCES, SYSTEMS, SYSTEM_NBYTES = 8, 64, 4096
GATEWAYS = ((1, True), (4, True), (4, False))  # how many, and whether a conversation stays at one
TURNS, THINK_S, TOKEN_S, PREFILL = 6.0, 8.0, 0.02, 8000.0  # on average; tokens/s
SCRAPE_S = 2.0
WAYS = ("load", "own", "all", "reports", "events")


@dataclass
class Engine:
    """Its cache, what it says of that, and the requests that each gateway has there."""

    number: int
    capacity: int
    running: list[int]
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    holdings: Holdings = field(default_factory=Holdings)
    ledger: Ledger = field(default_factory=Ledger)

    def held(self, chain: list[int]) -> int:
        """How many blocks of a prompt it has, from the first on."""
        return next((k for k, block in enumerate(chain) if block not in self.blocks), len(chain))

    def watch(self, body: bytes, chain: list[int]) -> None:
        """A request comes: its prefixes are those to tell of."""
        for prefix, last in last_blocks(with_shares(ROUTE, body, ""), len(chain) * TOKENS, TOKENS):
            self.holdings.watch(VERSION, prefix, _named(chain[last]), held=chain[last] in self.blocks)

    def use(self, chain: list[int]) -> None:
        for block in reversed(chain):  # the end of a prompt is dropped before its beginning
            if block not in self.blocks:
                self.holdings.stored(_named(block))
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.holdings.removed(_named(self.blocks.popitem(last=False)[0]))


def _named(block: int) -> bytes:
    return block.to_bytes(8, "little")


@dataclass
class Seen:
    """An engine as one gateway sees it (routing.Candidate)."""

    engine: Engine
    gateway: int
    way: str
    table: PrefixTable = field(default_factory=lambda: PrefixTable(PREFIXES))
    cursor: str = ""
    others: int = 0
    chain: list[int] = field(default_factory=list)
    failed_at: float = 0.0
    picked_at: int = 0
    state: str = "SERVING"

    @property
    def id(self) -> str:
        return str(self.engine.number)

    @property
    def load(self) -> float:
        return self.engine.running[self.gateway] + self.others

    def cached(self, of: Hint) -> float:
        if self.way in ("own", "all", "reports"):
            return self.table.share(of)
        return self.engine.held(self.chain) / len(self.chain) if self.way == "events" else 0.0

    def tie_break(self, of: Hint) -> int:
        return tie_break(of.key, self.engine.number)

    def scrape(self, now: float) -> None:
        """The answers that the gateway asks for every SCRAPE_S: the load there, and the report."""
        self.others = sum(self.engine.running) - self.engine.running[self.gateway]
        if self.way == "reports":
            self.engine.ledger.take_in([self.engine.holdings.take()])
            report = decode(self.engine.ledger.after(self.cursor).encode())
            held, dropped = (side.get(int(VERSION), ()) for side in (report.held, report.dropped))
            self.table.reported(held, dropped, now, whole=report.whole)
            self.cursor = report.cursor


def chain(body: bytes) -> list[int]:
    """One number for each block and all before it."""
    links, link = [], 0
    for at in range(0, len(body) - BLOCK + 1, BLOCK):
        link = xxh3_64_intdigest(body[at : at + BLOCK], link)
        links.append(link)
    return links


def simulate(way: str, gateways: int, stays: bool, share: float, requests: int) -> dict[str, float]:
    """Hits among all prompt tokens (0 to 1), and the mean of the busiest engine's requests over the mean of all.

    `share`: the blocks of all caches together, of those of the conversations under way.
    """
    rng = random.Random(0)
    systems = [rng.randbytes(SYSTEM_NBYTES // 2).hex().encode() for _ in range(SYSTEMS)]
    weights = [1 / (k + 1) for k in range(SYSTEMS)]
    sessions = 16 * INSTANCES
    wanted = SYSTEMS * SYSTEM_NBYTES // BLOCK + sessions * int(TURNS / 2 * 1800) // BLOCK
    engines = [Engine(n, int(share * wanted / INSTANCES), [0] * gateways) for n in range(INSTANCES)]
    views = [[Seen(engine, g, way) for engine in engines] for g in range(gateways)]
    if way == "all":
        for mine in views[1:]:
            for view, first in zip(mine, views[0], strict=True):
                view.table = first.table
    events: list[tuple[float, int, str, Any]] = []
    serial, hits, asked, uneven, now = 0, 0, 0, 0.0, 0.0

    def later(seconds: float, what: str, about: Any) -> None:
        nonlocal serial
        serial += 1
        heapq.heappush(events, (now + seconds, serial, what, about))

    def opening() -> tuple[bytes, int]:
        return b'{"prompt": "' + rng.choices(systems, weights)[0], rng.randrange(gateways)

    for _ in range(sessions):
        later(rng.uniform(0, THINK_S), "ask", opening())
    later(SCRAPE_S, "scrape", None)
    done, warm = 0, requests // 4
    while done < requests:
        now, _, what, about = heapq.heappop(events)
        if what == "scrape":
            for view in (v for views_of in views for v in views_of):
                view.scrape(now)
            later(SCRAPE_S, "scrape", None)
        elif what == "ask":
            said, gateway = about
            body = said + rng.randbytes(rng.randint(100, 400)).hex().encode()
            gateway, links = gateway if stays else rng.randrange(gateways), chain(body)
            of = hint(ROUTE, body, scope_line(b""), None)
            for view in views[gateway]:
                view.chain = links
            chosen = affinity(views[gateway], now, of)
            chosen.table.add(of)
            found = chosen.engine.held(links)
            chosen.engine.running[gateway] += 1
            answer = rng.randbytes(rng.randint(200, 800)).hex().encode()
            seconds = (len(links) - found) * 16 / PREFILL + len(answer) / 4 * TOKEN_S
            chosen.engine.watch(body, links)
            chosen.engine.use(links)
            later(seconds, "end", (chosen, body + answer))
            done += 1
            if done > warm:
                hits, asked = hits + found, asked + len(links)
                counts = [sum(engine.running) for engine in engines]
                uneven += max(counts) / (sum(counts) / INSTANCES)
        else:
            chosen, body = about
            chosen.engine.running[chosen.gateway] -= 1
            chosen.engine.use(chain(body))
            ended = rng.random() < 1 / TURNS
            later(rng.expovariate(1 / THINK_S), "ask", opening() if ended else (body, chosen.gateway))
    return {"hits": round(hits / asked, 4), "busiest": round(uneven / (requests - warm), 2)}


def run(json: Path | None, *, small: bool = False) -> list[dict[str, Any]]:
    """Simulate all combinations, print the table, and write the figures to `json`; returns them."""
    requests, shares = (400, (1.0,)) if small else (6000, (0.5, 1.0, 2.0))
    rows: list[dict[str, Any]] = [
        {"gateways": g, "stays": stays, "share": share}
        | {way: simulate(way, g, stays, share, requests) for way in WAYS}
        for g, stays in GATEWAYS
        for share in shares
    ]
    table = Table("gateways", "caches / conversations", *WAYS, title="hits among prompt tokens (busiest / mean)")
    for row in rows:
        found = [f"{row[way]['hits']:.1%} ({row[way]['busiest']:.2f})" for way in WAYS]
        name = f"{row['gateways']}{'' if row['stays'] else ', in turns'}"
        table.add_row(name, f"{row['share']:g}", *found)
    Console().print(table)
    with_machine({"rows": rows}, json)
    return rows
