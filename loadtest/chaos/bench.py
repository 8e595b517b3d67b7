"""Chaos on three hosts: `hotswap bench chaos [--minutes N] [--seed N] [--json FILE]`. Exit status 1 if a promise broke.

The page docs/chaos.md says what is done, and what it is held to.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from loadtest.chaos import joiner, report
from loadtest.chaos.fleet import COUNT, Layout, Watch, pools, survivors
from loadtest.chaos.hostile import complaints
from loadtest.chaos.models import placed
from loadtest.chaos.run import HEAL_S, START_S, Run, excuses, windows
from loadtest.chaos.verdict import AFTER_S, PUBLISHER, process_name, schedule, verdict
from loadtest.histories.check import check
from loadtest.histories.recorder import Log, Recorder
from loadtest.hosts import etcd
from loadtest.hosts.namespaces import CannotShape, Hosts, obstacle, until
from loadtest.measure.run import with_machine
from loadtest.models.checkpoints import TINY_SHAPE
from server.up import interrupts
from weightsync.control.editions import EditionRecord, prefix_of
from weightsync.control.records import Keys
from weightsync.dying import with_me
from weightsync.peer.copies import parsed
from weightsync.store import SyncStore

STOP_S = 120.0
LOAD_S = 5.0
console = Console(stderr=True)


def run(
    json: Path | None = None,
    *,
    minutes: float = 30.0,
    seed: int = 0,
    clients: int = 4,
    hostile: int = 2,
    second: int = 2,
) -> dict[str, Any]:
    """Breaks things for so long, prints what came of it, writes `json`; returns the figures. `second`: how many hosts
    have the second model all the time. Raises SystemExit."""
    if not 1 <= second <= COUNT:
        raise SystemExit(f"hotswap bench chaos: --second {second}: there are {COUNT} hosts; give 1 to {COUNT}")
    binary, models = _tools(), placed(COUNT, second)
    work = Path("runs/chaos").resolve() / f"{time.strftime('%m%d-%H%M%S')}-{seed}"
    console.print(f"seed {seed}, {minutes:g} minutes; logs in {work}")
    try:
        with Hosts(COUNT, shaped=True) as hosts:
            if not hosts.can_shape:
                raise SystemExit(f"hotswap bench chaos: {CannotShape()}")
            layout = Layout(hosts, binary, work, seed, models)
            with contextlib.closing(layout):
                found = _run(layout, work, minutes, seed, clients, hostile)
            found["violations"] += [f"{name} lives on after the run" for name in survivors(layout.memory)]
    finally:
        interrupts.ignore()
    found = {
        "seed": seed,
        "minutes": minutes,
        "hosts": COUNT,
        "clients": clients,
        "hostile": hostile,
        "models": {placed.model: len(placed.instances) for placed in models},
        **found,
    }
    report.show(console, found)
    return with_machine(found, json)


def _tools() -> str:
    """The path of etcd."""
    if (said := obstacle()) is not None:
        raise SystemExit(f"hotswap bench chaos: {said}")
    if (binary := etcd.binary()) is None:
        raise SystemExit(f"hotswap bench chaos: {etcd.MISSING}")
    if etcd.client() is None:
        raise SystemExit(f"hotswap bench chaos: {etcd.NO_CLIENT}")
    return binary


def _run(layout: Layout, work: Path, minutes: float, seed: int, clients: int, hostile: int) -> dict[str, Any]:
    layout.start_stores()
    until(lambda: layout.etcd.listen() and layout.etcd.agreed())
    layout.start_rest()
    with contextlib.ExitStack() as stack:
        watches = {p.model: stack.enter_context(Watch(layout.store, p.model)) for p in layout.models}
        log = stack.enter_context(contextlib.closing(Log(work / "history.jsonl")))
        recorder = stack.enter_context(contextlib.closing(Recorder(log, layout.store, watches)))
        doing = Run(layout, watches, console.print, recorder.start_again)
        if not doing.until_whole(START_S):
            raise SystemExit(f"the fleet did not start: {doing.missing()}; see {work / 'logs'}")
        before = _held(layout)
        answers, attacks = work / "attempts.jsonl", work / "attacks.jsonl"
        vocabulary = str(TINY_SHAPE["vocab_size"])
        with (
            _load("clients", [str(seed), str(clients), str(answers), str(log.path)], layout.gateways) as load,
            _load("hostile", [vocabulary, str(seed), str(hostile), str(attacks)], layout.gateways) as enemies,
        ):
            time.sleep(LOAD_S)
            began, since = time.monotonic(), time.time()
            doing.faults(schedule(seed, COUNT, layout.models), began + 60 * minutes)
            ended = time.monotonic()
            for process in (enemies, load):
                process.communicate("stop\n", timeout=STOP_S)
        fetches = report.fetches(layout.peers, layout.tls)
        for placed in layout.models:
            layout.processes[process_name(PUBLISHER, placed.publisher, placed.model)].stop()
        recorder.rest(HEAL_S)
        held = report.held(before, _held(layout))
        broken, unix = windows(doing.done, ended), time.time() - time.monotonic()
        for window in broken:
            lasted = {"began": window.began + unix, "ended": window.ended + AFTER_S + unix}
            log.write("excuse", **lasted, server=layout.gateways[window.host].removeprefix("http://"))
    contradictions = check([log.path])
    attempts = [orjson.loads(line) for line in answers.read_bytes().splitlines()]
    found = verdict(attempts, broken, began, ended)
    attacked = [orjson.loads(line) for line in attacks.read_bytes().splitlines()]
    logs = {p.model: layout.log(process_name(PUBLISHER, p.publisher, p.model)) for p in layout.models}
    empty = excuses([b for b in doing.done if b.fault.kind == "restore"], ended)
    pushes = {model: report.pushes(log, since, empty) for model, log in logs.items()}
    gateways = [layout.log(process_name("gateway", host)) for host in range(COUNT)]
    asked = joiner.served(gateways, {stay.instance for stay in doing.stays})
    past = {model: joiner.tenures(watch.past.values()) for model, watch in watches.items()}
    wrongs = report.Wrongs(
        ended={name: p.own_ends for name, p in layout.processes.items() if p.own_ends},
        load=load.returncode or enemies.returncode,
        attacks=complaints(attacked, broken),
        joiners=joiner.complaints(doing.stays, asked, past, excuses(doing.done, ended)),
        let_in=sum(map(report.let_in, pushes.values())),
        held=held["complaints"],
        history=contradictions,
    )
    swaps = {model: report.swaps(watch.past, since) for model, watch in watches.items()}
    return {
        "seconds": round(ended - began, 1),
        "faults": report.faults(doing.done),
        "requests": report.requests(found),
        "attacks": report.attacks(attacked, wrongs.attacks),
        "joiners": report.stays(doing.stays, len(asked), wrongs.joiners),
        "swaps": swaps,
        "pushes": pushes,
        "fetches": fetches,
        "held": held,
        "history": report.history(contradictions, log.path),
        "ended by themselves": wrongs.ended,
        "violations": report.violations(found, swaps, doing.done, wrongs),
        "journal": report.journal(doing.done, began),
    }


def _held(layout: Layout) -> report.Held:
    records, editions, slots = dict[str, int](), dict[str, int](), set[str]()
    with contextlib.closing(SyncStore(layout.store, create=False)) as store:
        for model in (placed.model for placed in layout.models):
            keys = Keys(model)
            found = store.list(keys.root)[0]
            mine = [EditionRecord.from_json(kv.value) for kv in found if kv.key.startswith(prefix_of(keys))]
            digests = {edition.manifest_digest for edition in mine}
            copies = [copy for copy in parsed(keys, store.list(keys.copies)[0]) if copy.digest in digests]
            slots |= {edition.slot for edition in mine} | {str(layout.arena(copy.host) / copy.slot) for copy in copies}
            records[model], editions[model] = len(found) - len(mine), len(mine)
    return report.Held(layout.descriptors(), pools(layout.memory, slots), records, editions)


@contextlib.contextmanager
def _load(program: str, words: list[str], urls: list[str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", f"loadtest.chaos.{program}", *words, *urls]
    with interrupts.held():
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=os.environ, preexec_fn=with_me())
    try:
        yield process
    finally:
        process.kill()
        process.wait()
