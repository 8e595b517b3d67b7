"""The run itself: fault after fault, each until its time is over and the fleet is whole again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import httpx

from loadtest.chaos.fleet import COUNT, Layout, Watch
from loadtest.chaos.joiner import END_S, READY_S, Joiner, Stay
from loadtest.chaos.models import CONFIGURE
from loadtest.chaos.verdict import ALONE, LINK, Fault, Window, breaks_gateways, process_name

HEAL_S = 240.0  # on two busy cores a vLLM instance alone takes a minute to start
START_S = 420.0
SLOW_S = 600.0  # all instances start anew, one by one or all at once, and may have to go back
STEP_S = 0.1
READY_TIMEOUT_S = 2.0
LOST_S = 3.0  # that all processes but the store run on after it was restored
FRESH_S = 3.0
ENGINE = "EngineCore"


@dataclass
class Broken:
    """A fault that was done; times are monotonic seconds, `healed` is when the fleet was whole again (None: never).

    A joiner's ends when it is told to leave: what follows is the time until it has left and the fleet is whole.
    """

    fault: Fault
    began: float
    ended: float
    alone: bool = True
    healed: float | None = None
    missing: str = ""

    @property
    def recovery_s(self) -> float | None:
        """From when it was over; a process that is killed is broken in an instant."""
        return None if self.healed is None else self.healed - self.ended

    def window(self, end: float) -> Window:
        return Window(self.fault.host, self.began, self.healed if self.healed is not None else end)


class Run:
    """Breaks things in a layout; `watches` by model. `say` takes lines for whoever looks on, `restored` hears that the
    store was restored."""

    def __init__(
        self,
        layout: Layout,
        watches: Mapping[str, Watch],
        say: Callable[[str], None],
        restored: Callable[[], None] = lambda: None,
    ) -> None:
        self.done: list[Broken] = []
        self.stays: list[Stay] = []
        self._layout, self._watches, self._say, self._restored = layout, watches, say, restored
        self._joiners: list[tuple[Joiner, Broken]] = []
        self._open: list[Broken] = []
        self._overdue: list[tuple[float, Callable[[], None]]] = []

    def until_whole(self, seconds: float, since: float = 0.0) -> bool:
        """Waits until nothing is missing, and all instances went through a swap that began after `since` (unix)."""
        return self._wait(lambda: not self.missing(since), seconds)

    def faults(self, schedule: Iterable[Fault], until: float) -> None:
        """One after the other until the time (monotonic); what is broken then is waited for."""
        for fault in schedule:
            if not (fault.overlaps and self._open):
                self._heal()
            if time.monotonic() >= until:
                break
            self._wait(lambda: False, fault.pause_s)
            self._break(fault)
        self._heal()

    def missing(self, since: float = 0.0) -> list[str]:
        """Lacks of the fleet now. Cheap looks come first: the others take time while something is cut off."""
        stopped = [f"{name} does not run" for name, p in self._layout.processes.items() if not p.runs]
        read = [watch.now.at or 0.0 for watch in self._watches.values()]
        if self._lasts() or stopped or time.monotonic() - min(read) > FRESH_S:
            return stopped or ["a fault lasts, or the store is not read"]
        for placed in self._layout.models:
            watch = self._watches[placed.model]
            if behind := watch.now.behind([process_name("instance", host, placed.model) for host in placed.instances]):
                return behind
            if not watch.whole_swaps(len(placed.instances), since):
                return [f"no swap by all instances of {placed.model} since"]
        return [f"{url} is not ready" for url in self._layout.gateways if not _ready(url)]

    def _break(self, fault: Fault) -> None:
        if fault.kind == "join":
            self._wait(lambda: not self._joiners, READY_S)  # its host has room for one
        began = time.monotonic()
        self._overdue += [(began + fault.seconds, end) for end in self._ends(fault)]
        broken = Broken(fault, began, max(began + fault.seconds, time.monotonic()), alone=not self._open)
        if self._open:
            self._open[0].alone = False
        self._open.append(broken)
        self.done.append(broken)
        if fault.kind == "join":
            joiner = Joiner(self._layout, fault)
            self.stays.append(joiner.stay)
            self._joiners.append((joiner, broken))
        lasts = f" for {fault.seconds:.1f} s" if fault.seconds else ""
        whose = f" of {fault.model}" if fault.model else ""
        self._say(f"{fault.name}{whose} on host {fault.host}{lasts}{'' if broken.alone else ', beside the one before'}")

    def _ends(self, fault: Fault) -> list[Callable[[], None]]:
        """Does it; what ends it."""
        hosts, host = self._layout.hosts, fault.host
        if fault.kind == "cut":
            hosts.cut(host)
            return [lambda: hosts.heal(host)]
        if fault.what == LINK:
            hosts.shape(host, loss=fault.loss)
            return [lambda: hosts.shape(host)]
        if fault.kind == "join":
            return []  # it ends by itself
        if fault.kind == "restore":
            self._restore(fault.seconds)
            return []
        process = self._layout.processes[fault.process]
        if fault.kind == "configure":
            process.tell(CONFIGURE)
            return []
        part = ENGINE if fault.what == "engine" else ""
        if fault.kind == "kill":
            process.kill(part)
            return []
        process.freeze(part)
        return [process.thaw]

    def _restore(self, seconds: float) -> None:
        """Until all start again, no process may take the store for the one that it knew."""
        snapshot = self._layout.snapshot
        self._layout.etcd.save(snapshot)
        self._wait(lambda: False, seconds)
        self._layout.go_back(snapshot)
        self._wait(lambda: False, LOST_S)
        self._layout.start_again()
        self._restored()

    def _heal(self) -> None:
        """Waits until every fault is over and the fleet whole, and notes how long that took."""
        if not self._open:
            return
        self._wait(lambda: not self._lasts(), HEAL_S + (READY_S + END_S if self._joiners else 0.0))
        since = time.time()
        most = SLOW_S if any(broken.fault.kind in ALONE for broken in self._open) else HEAL_S
        whole = self.until_whole(most, since)
        for broken in self._open:
            broken.healed = time.monotonic() if whole else None
            broken.missing = "" if whole else "; ".join(self.missing(since))
        took = max(broken.recovery_s or most for broken in self._open)
        self._say(f"  whole again after {took:.1f} s" if whole else f"  NOT whole: {self._open[0].missing}")
        self._open.clear()

    def _wait(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Whether it came to hold in time. Meanwhile processes are started again and faults end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._tend()
            if holds():
                return True
            time.sleep(STEP_S)
        return False

    def _lasts(self) -> bool:
        return bool(self._overdue or self._joiners)

    def _tend(self) -> None:
        self._layout.tend()
        now = time.monotonic()
        for joiner, broken in list(self._joiners):
            told = joiner.stay.told
            joiner.tend(self._watches[joiner.stay.model].now)
            if told is None and joiner.stay.told is not None:
                broken.ended = now
                self._say(f"  {joiner.stay.instance} served, and leaves")
            if joiner.stay.gone is not None:
                self._joiners.remove((joiner, broken))
        for item in [item for item in self._overdue if item[0] <= now]:
            item[1]()
            self._overdue.remove(item)


def windows(done: Iterable[Broken], end: float) -> list[Window]:
    """When each gateway could not be counted on; `end`: of the run."""
    found = [broken.window(end) for broken in done if breaks_gateways(broken.fault.what)]
    restored = [broken.window(end) for broken in done if broken.fault.kind == "restore"]
    return found + [replace(window, host=host) for window in restored for host in range(COUNT)]


def excuses(done: Iterable[Broken], end: float) -> list[tuple[float, float]]:
    """When something but a joiner was broken, until the fleet was whole again, unix seconds."""
    unix = time.time() - time.monotonic()
    broken = [b for b in done if b.fault.kind != "join"]
    return [(b.began + unix, (end if b.healed is None else b.healed) + unix) for b in broken]


def _ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", timeout=READY_TIMEOUT_S).status_code == 200
    return False
