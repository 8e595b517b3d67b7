"""The results of a run: figures for JSON, tables to look at."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console
from rich.table import Table

from loadtest.chaos.joiner import Stay
from loadtest.chaos.models import EDITIONS, KEPT, MISFIT, REFUSED
from loadtest.chaos.run import Broken
from loadtest.chaos.verdict import VIOLATIONS, Verdict
from loadtest.histories.check import Contradiction
from weightsync.control.records import PastSwapRecord
from weightsync.tls import ClusterTls

EXAMPLES = 20


def faults(done: Sequence[Broken]) -> dict[str, Any]:
    """By kind: how often, and how long after the fault's end the fleet was whole, of those that came alone."""
    found = {}
    for name in sorted({broken.fault.name for broken in done}):
        mine = [broken for broken in done if broken.fault.name == name]
        took = [b.recovery_s for b in mine if b.alone and b.recovery_s is not None]
        found[name] = {"count": len(mine), "hosts": sorted({b.fault.host for b in mine}), "alone": len(took)}
        if took:
            found[name] |= {"recovery_s": round(statistics.median(took), 1), "longest_s": round(max(took), 1)}
    return found


def journal(done: Sequence[Broken], began: float) -> list[dict[str, Any]]:
    """Every fault in order, with its time since the beginning of the run."""
    return [
        {"at_s": round(b.began - began, 1), **_rounded(asdict(b.fault)), "alone": b.alone}
        | {"recovery_s": None if b.recovery_s is None else round(b.recovery_s, 1)}
        | ({"missing": b.missing} if b.missing else {})
        for b in done
    ]


def swaps(past: Mapping[str, PastSwapRecord], since: float) -> dict[str, Any]:
    """Those that ended after the time `since` (unix)."""
    found = [record for record in past.values() if record.ended_at >= since]
    done, aborted = ([r for r in found if r.outcome == outcome] for outcome in ("done", "aborted"))
    return {
        "done": len(done),
        "done by mode": dict(Counter(r.mode for r in done)),
        "done with a remark": dict(Counter(_reason(r.reason) for r in done if r.reason).most_common()),
        "aborted": dict(Counter(_reason(r.reason) for r in aborted).most_common()),
        "not as published": sum(r.verified is False for r in done),
        "longest_s": round(max((r.ended_at - r.opened_at for r in found), default=0.0), 1),
    }


def fetches(peers: Sequence[str], tls: Path) -> int:
    """How many slots peers have fetched, each since it was started last."""
    counted = 0
    for peer in peers:
        with contextlib.suppress(httpx.TransportError):
            page = httpx.get(f"{peer}/metrics", verify=ClusterTls(tls).client_context(), timeout=10.0).text
            counts = re.findall(r"^hotswap_peer_fetch_seconds_count (\S+)$", page, re.MULTILINE)
            counted += sum(int(float(count)) for count in counts)
    return counted


def requests(found: Verdict) -> dict[str, Any]:
    return {
        **found.totals,
        "attempts": dict(found.judged),
        "failed by code": dict(found.refusals.most_common()),
        "by model": {name: dict(counted) for name, counted in found.models.items()},
        "wrong tokens": found.problems["wrong"],
        "answers of another model": found.problems["foreign"],
        "longest time without an answer, s": round(found.silence_s, 1),
        "longest a question took, s": round(found.longest_s, 1),
        "examples": found.examples[:EXAMPLES],
    }


def attacks(made: Sequence[Mapping[str, Any]], complaints: Sequence[str]) -> dict[str, Any]:
    """Hostile requests by kind and outcome, the longest that one took, and what counts against the server."""
    counted = Counter(f"{attack['kind']}: {attack['outcome']}" for attack in made)
    longest = max((attack["ended"] - attack["began"] for attack in made), default=0.0)
    return {**dict(sorted(counted.items())), "longest, s": round(longest, 1), "examples": list(complaints[:EXAMPLES])}


def stays(found: Sequence[Stay], requests: int, complaints: Sequence[str]) -> dict[str, Any]:
    """Figures of joiners; `requests` is how many they had."""
    starts = [s.ready - s.began for s in found if s.ready is not None]
    leaves = [s.gone - s.told for s in found if s.gone is not None and s.told is not None]
    return {
        "joined": len(found),
        "served": len(starts),
        "requests that they had": requests,
        "ready after s, median": round(statistics.median(starts), 1) if starts else None,
        "gone after SIGTERM, longest, s": round(max(leaves), 1) if leaves else None,
        "announced when they leave": sum(s.leaves_at is not None for s in found),
        "complaints": len(complaints),
    }


def pushes(log: Path, since: float, empty: Sequence[tuple[float, float]] = ()) -> dict[str, int]:
    """Counts of a model's swaps by kind of version and outcome, from `since` (unix) on, over all lives of its
    publisher. Before that, and in the times `empty`, there may be no instance that could refuse one.
    """
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
    said = [orjson.loads(line) for line in lines if line.endswith("}")]
    heard = [x for x in said if x["at"] >= since and not any(began <= x["at"] <= ended for began, ended in empty)]
    return dict(sorted(Counter(f"{line['what']}: {line['outcome']}" for line in heard).items()))


def let_in(pushes: Mapping[str, int]) -> int:
    """How many versions were swapped in whose weights are not finite, or whose configuration cannot be served."""
    return sum(n for name, n in pushes.items() if name.startswith((*REFUSED, MISFIT)) and name.endswith(": done"))


DESCRIPTORS = 2.0  # times as many as when the fleet was first whole, and some more: connections come and go
MORE_DESCRIPTORS = 64
SLOTS = 8  # of a pool: what is served and gone back to, what is staged, and what others still read
RECORDS = 600  # of a model: 64 retired versions with their forms, the last swaps, what lives
MOST_EDITIONS = EDITIONS * (KEPT + 1)  # an adapter may have one more, on trial


@dataclass(frozen=True)
class Held:
    """The fleet's holdings at one moment: descriptors by process, slots by pool, records and editions by model. The
    slots and the records of editions are in their number alone."""

    descriptors: Mapping[str, int]
    slots: Mapping[str, int]
    records: Mapping[str, int]
    editions: Mapping[str, int] = field(default_factory=dict)


def held(before: Held, after: Held) -> dict[str, Any]:
    """`before`: when the fleet was first whole; `after`: when all came to rest."""
    grown = {
        name: f"{n} descriptors, {before.descriptors.get(name, 0)} at the start"
        for name, n in after.descriptors.items()
        if n > DESCRIPTORS * before.descriptors.get(name, 0) + MORE_DESCRIPTORS
    }
    said = [f"{name} holds {counts}" for name, counts in grown.items()]
    said += [f"{pool} has {n} slots" for pool, n in after.slots.items() if n > SLOTS]
    said += [f"{model} has {n} records" for model, n in after.records.items() if n > RECORDS]
    said += [f"{model} has {n} editions" for model, n in after.editions.items() if n > MOST_EDITIONS]
    most = max(after.descriptors, key=lambda name: after.descriptors[name], default="")
    return {
        "descriptors at the start, at rest": [sum(one.descriptors.values()) for one in (before, after)],
        "most descriptors": f"{after.descriptors.get(most, 0)} of {most}",
        "most slots of a pool": max(after.slots.values(), default=0),
        "records": dict(after.records),
        "editions": dict(after.editions),
        "complaints": said,
    }


def history(found: Sequence[Contradiction], path: Path) -> dict[str, Any]:
    """The contradictions of the recorded history to the rules, by rule."""
    counted = Counter(wrong.rule for wrong in found)
    return {"file": str(path), "contradictions": dict(counted), "examples": [str(wrong) for wrong in found[:EXAMPLES]]}


@dataclass(frozen=True)
class Wrongs:
    """Faults beside those of answers and swaps: processes that `ended` though nobody had broken them, by name; the
    exit status of the `load` (if it is not 0, nothing else is known); complaints about `attacks` and `joiners`; how
    many versions were `let_in` that staging must refuse; what is `held` beyond the bounds; what in the `history`
    contradicts the rules."""

    ended: Mapping[str, int] = field(default_factory=dict)
    load: int | None = 0
    attacks: Sequence[str] = ()
    joiners: Sequence[str] = ()
    let_in: int = 0
    held: Sequence[str] = ()
    history: Sequence[Contradiction] = ()


def violations(
    found: Verdict, swap_figures: Mapping[str, Mapping[str, Any]], done: Sequence[Broken], wrongs: Wrongs
) -> list[str]:
    """Broken promises, in words; `swap_figures` are of each model."""
    said = [f"the clients ended with status {wrongs.load}: see above"] if wrongs.load else []
    said += [f"{name} ended by itself, {count} times" for name, count in wrongs.ended.items()]
    said += [f"{wrongs.let_in} versions that must be refused were swapped in"] if wrongs.let_in else []
    said += [f"{len(wrongs.attacks)} hostile requests were not refused as they must be"] if wrongs.attacks else []
    said += [*wrongs.joiners, *wrongs.held]
    said += [f"{n} x {rule} in the history" for rule, n in Counter(wrong.rule for wrong in wrongs.history).items()]
    said += [f"{count} x {kind}" for kind, count in found.problems.items() if count]
    said += [f"{found.judged[kind]} failed requests: {kind}" for kind in VIOLATIONS if found.judged[kind]]
    for model, figures in swap_figures.items():
        said += (
            [f"{figures['not as published']} commits of {model} not as published"]
            if figures["not as published"]
            else []
        )
    return said + [f"not whole after {b.fault.name} on host {b.fault.host}: {b.missing}" for b in done if b.missing]


def show(console: Console, report: Mapping[str, Any]) -> None:
    table = Table("fault", "times", "whole again after s (median)", "longest", title="faults")
    for name, of in report["faults"].items():
        table.add_row(name, str(of["count"]), str(of.get("recovery_s", "")), str(of.get("longest_s", "")))
    console.print(table)
    titles = [("requests", report["requests"]), ("attacks", report["attacks"]), ("joiners", report["joiners"])]
    titles += [("held", report["held"]), ("history", report["history"])]
    titles += [(f"{title} of {model}", of) for title in ("swaps", "pushes") for model, of in report[title].items()]
    for title, figures in titles:
        table = Table(title, "")
        for name, value in figures.items():
            if name != "examples":
                table.add_row(name, _text(value))
        console.print(table)
    console.print(f"ended by themselves: {_text(report['ended by themselves'])}")
    console.print(f"versions fetched, since each peer's last start: {report['fetches']}")
    for said in report["violations"] or ["no violation"]:
        console.print(said, style="red" if report["violations"] else "green")
    for example in (example for of in ("requests", "attacks", "history") for example in report[of]["examples"]):
        console.print(example, highlight=False)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{count} {name}" for name, count in value.items()) or "none"
    return str(value)


def _reason(reason: str | None) -> str:
    """Reasons that differ in numbers and names only are one."""
    name = r"\b\w+-(instance|joiner)-\d\b"
    shorter = re.sub(f"{name}(, {name})*", "an instance", (reason or "").partition("(")[0])
    return re.sub(r"\d+(\.\d+)?", "N", shorter).replace("instance an instance", "an instance").strip()[:100]


def _rounded(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}
