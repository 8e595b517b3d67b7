"""Actors of a schedule: candidates, instances and a gateway, each with a view of its own that may lag.

They decide with the code that runs in production (`swap_state`, `swaps.transaction`, `agent_state`, `Pauses`,
`routing.eligible`); what is modelled is the store, the engine, and time. A step of an actor does at most one thing to
the store, so that anything may happen between any two.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from loadtest.simulation.store import ModelStore
from server.gateway.fleet import routing
from weightsync.control import agent_state, coordinator
from weightsync.control import state as swap_state
from weightsync.control import swap as swaps
from weightsync.control.agent_state import Drain, Flip, Restart, Serve, Stage
from weightsync.control.board import Board
from weightsync.control.forms import MOST_STARTS, start_of
from weightsync.control.pauses import Pauses
from weightsync.control.records import ErrorInfo, FormRecord, InstanceRecord, Keys, LeaderRecord, StartRecord
from weightsync.control.state import Ask, Step
from weightsync.control.trial import ProbeResult
from weightsync.errors import Conflict, StoreError, SwapError, fingerprint_mismatch
from weightsync.store.protocol import MISSING

KEYS = Keys("m")
LEADER_TTL_S, INSTANCE_TTL_S = 3.0, 5.0
FINISH_S = 3.0  # how long a flip waits for requests that asked for the version they began with
PROBE_FAILS = 0.15
START_FAILS = 0.1  # of the starts that a swap asks for
WRONG = "wrong"  # a fingerprint that nobody published
BROKEN = ErrorInfo("c", "broken")
UNFIT = ErrorInfo("not_finite", "no instance can run it", "t")
FORMS = tuple(FormRecord(f'[["{name}","float32",[1]]]', "{}") for name in ("a", "b"))


@dataclass
class Faults:
    """The faults that come next; each is used up by the first it happens to, but for `flips`: while it holds, all fail.

    `unfit`: the versions that no instance can run."""

    stage: bool = False
    build: bool = False
    flip: bool = False
    flips: bool = False
    unfit: set[int] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def take(self, name: str) -> bool:
        found = bool(getattr(self, name))
        setattr(self, name, False)
        found |= self.flips and name == "flip"
        self.seen[f"{name} failed"] += found
        return found


class Watcher:
    """A process with a board. Dead ones do nothing; frozen ones go on where they were, later."""

    def __init__(self, name: str, store: ModelStore, rng: random.Random) -> None:
        self.name, self.store, self.rng = name, store, rng
        self.alive, self.frozen = True, False
        self.lease: int | None = None
        self._board: Board | None = None
        self._cursor = 0

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen

    @property
    def board(self) -> Board:
        assert self._board is not None
        return self._board

    def connect(self) -> bool:
        """True if there was nothing to do; raises StoreUnavailable."""
        if self._board is not None:
            return True
        found, revision = self.store.list(KEYS.root)
        self._board, self._cursor = Board(KEYS, found, revision), len(self.store.events)
        return False

    def deliver(self, count: int) -> None:
        if self._board is None or not self.runs or not self.store.up:
            return
        for event in self.store.events[self._cursor : self._cursor + count]:
            self._board.apply(event)
            self._cursor += 1

    def step(self) -> None:
        if not self.runs:
            return
        try:
            self.act()
        except StoreError:
            self.disconnect()

    def act(self) -> None:
        raise NotImplementedError

    def disconnect(self) -> None:
        self._board = None

    def crash(self) -> None:
        self.alive = False
        self.disconnect()

    def restart(self) -> None:
        self.alive, self.frozen, self.lease = True, False, None


class Candidate(Watcher):
    """`Coordinator.run`, one decision or one write at a time."""

    def __init__(self, name: str, store: ModelStore, rng: random.Random, faults: Faults) -> None:
        super().__init__(name, store, rng)
        self.faults = faults
        self._reset()

    def disconnect(self) -> None:
        """It gives up its term, as far as it can."""
        if self.lease is not None and self.store.up:
            self.store.revoke(self.lease)
        self._reset()

    def crash(self) -> None:
        self.alive = False
        self._reset()

    def _reset(self) -> None:
        super().disconnect()
        self.lease = None
        self.term: int | None = None
        self.phases = coordinator.Phases()
        self.plan: tuple[dict[str, int], dict[str, bytes | None]] | None = None
        self.probed: dict[str, ProbeResult | None] = {}

    def act(self) -> None:
        if not self.connect():
            return
        if self.plan is not None:
            (compares, puts), self.plan = self.plan, None
            with contextlib.suppress(Conflict):
                self.store.txn(compares, puts)
        elif self.term is None:
            self._stand()
        elif self.board.revision(KEYS.leader) == self.term:
            self._decide()
        elif self.board.seen >= self.term:
            self.faults.seen["deposed"] += 1
            self.disconnect()

    def resign(self) -> None:
        self.disconnect()
        self.crash()

    def _stand(self) -> None:
        if self.board.revision(KEYS.leader) != MISSING:
            return
        self.lease = self.store.grant(LEADER_TTL_S)
        record = LeaderRecord(self.name, 0.0)
        try:
            self.term = self.store.txn(
                {KEYS.leader: MISSING}, {KEYS.leader: record.to_json()}, {KEYS.leader: self.lease}
            )
            self.faults.seen["elected"] += 1
            self.faults.seen["elected in a canary phase"] += bool(self.board.swap and self.board.swap.phase == "canary")
        except Conflict:
            self.store.revoke(self.lease)

    def _decide(self) -> None:
        swap = self.board.swap
        probed = self.probed.get(swap.id) if swap is not None else None
        lasted_s = self.phases.lasted_s(swap, self.store.now)
        decision = swap_state.decide(swaps.view_of(self.board, self.store.now, probed, lasted_s=lasted_s))
        if isinstance(decision, Step):
            self.plan = swaps.transaction(self.board, decision, self.term or MISSING, spare=1)
        elif isinstance(decision, Ask):
            if decision.swap.id in self.probed:  # begun in an earlier step
                failed = self.rng.random() < PROBE_FAILS
                self.faults.seen["probe failed"] += failed
                self.probed[decision.swap.id] = ProbeResult(not failed)
            else:
                self.probed[decision.swap.id] = None


@dataclass
class Engine:
    """Weights that really run and that are really held, by version: the fingerprint of each."""

    version: int | None = None
    fingerprint: str = ""
    form: str | None = None
    held: dict[int, str] = field(default_factory=dict)


@dataclass
class Staging:
    """The callback that stages, beside the rest. `built` is its fingerprint, "" if it failed, None until then."""

    version: int
    published: str
    built: str | None = None
    unwanted: bool = False


class Instance(Watcher):
    """`Participant`: one decision, or the end of one callback, at a time."""

    def __init__(self, name: str, store: ModelStore, rng: random.Random, faults: Faults) -> None:
        super().__init__(name, store, rng)
        self.faults = faults
        self._reset()

    def _reset(self) -> None:
        self.record = InstanceRecord(self.name, "x")
        self.started = False
        self.engine = Engine()
        self.requests: list[int | None] = []  # the version that each in flight has asked for; None: any
        self.pauses, self.pauses_seen = Pauses(), self.store.now
        self.staging: Staging | None = None
        self.busy: tuple[Flip, str] | None = None  # with the fingerprint of what it flips to
        self.began = 0.0
        self.draining: tuple[str, float] | None = None
        self.tried: int | None = None

    def crash(self) -> None:
        super().crash()
        self._reset()

    def restart(self) -> None:
        """With dummy weights."""
        super().restart()
        self._reset()

    @property
    def paused(self) -> bool:
        return self.pauses.wanted(self.store.now)

    def admits(self, version: int | None) -> bool:
        """Whether it takes a request (for exactly `version`) now; while it flips it takes none that asks for one."""
        record = self.record
        if not self.runs or not agent_state.admits(record):
            return False
        return version is None or (record.active_version == version and self.busy is None)

    def act(self) -> None:
        self._look_for_pauses()
        if not self.started:
            self._start()
        elif self._board is None or not self.store.holds(self.lease):
            self.faults.seen["registered while staging"] += self._stages
            self._register()
        elif self._stages and self.rng.random() < 0.5:
            self._end_staging()
        elif self.busy is not None:
            self._flip(*self.busy)
        else:
            self._reconcile()

    def _start(self) -> None:
        """The steps of forms.py before there is an engine; then the engine, which may not come up."""
        board = Board(KEYS, *self.store.list(KEYS.root))
        start = start_of(board, self.name)
        if start is None:
            return
        if start.swap_id is not None:
            self.faults.seen["started for a swap"] += 1
            before = board.starts.get(self.name)
            attempts = before.attempts if before is not None and before.swap_id == start.swap_id else 0
            failed = attempts >= MOST_STARTS or self.rng.random() < START_FAILS
            self.faults.seen["start failed"] += failed
            said = StartRecord(start.swap_id, attempts + 1, BROKEN if failed else None)
            self.store.put(KEYS.start(self.name), said.to_json())
            if failed:
                return
        self.started, self.engine.form = True, start.form
        self.record = replace(self.record, form=start.form, swap_id=start.swap_id)

    @property
    def _stages(self) -> bool:
        return self.staging is not None and self.staging.built is None

    def disconnect(self) -> None:
        super().disconnect()
        self.draining = None

    def _look_for_pauses(self) -> None:
        if self.store.up:
            self.pauses.see(self.store.list(KEYS.pauses)[0], self.store.now)
            self.pauses_seen = self.store.now

    def _register(self) -> None:
        former, self._board = self.lease, None
        self.lease = self.store.grant(INSTANCE_TTL_S)
        self._say(self.record)
        if former is not None:
            self.store.revoke(former)
        self.connect()

    def _say(self, record: InstanceRecord) -> None:
        self.record = record
        self.store.put(KEYS.instance(self.name), record.to_json(), self.lease)

    def _reconcile(self) -> None:
        board = self.board
        forms = {record.version: record.form for record in board.versions}
        view = agent_state.View(board.active, board.swap, board.instances, self._drained_for(), forms)
        action = agent_state.decide(self.record, view)
        if not isinstance(action, Drain | Flip):
            self.draining = None
        self._give_up_staging(action)
        if isinstance(action, Serve):
            if self.record.staged_version != self.record.active_version:
                self.engine.held.pop(self.record.staged_version or 0, None)
            self._say(agent_state.serving(self.record, action.active))
        elif isinstance(action, Stage):
            self._prepare(action)
        elif isinstance(action, Drain):
            if self.draining is None or self.draining[0] != action.swap.id:
                self.draining = (action.swap.id, self.store.now + action.swap.drain_s)
            if self.record.state != "COMMITTING":
                self._say(agent_state.leaving(self.record, action.swap))
        elif isinstance(action, Flip):
            self._begin_flip(action)
        elif isinstance(action, Restart):
            self.faults.seen["restarted"] += 1
            self.store.revoke(self.lease or 0)
            self.restart()

    def _drained_for(self) -> str | None:
        if self.draining is None:
            return None
        swap_id, until = self.draining
        return swap_id if not self.requests or self.store.now >= until else None

    def _prepare(self, stage: Stage) -> None:
        if (self.record.state, self.record.swap_id) != ("STAGING", stage.swap.id):
            return self._say(agent_state.staging(self.record, stage.swap))
        try:
            fingerprint = self._staged(stage.swap.target)
        except ValueError:
            return self._say(agent_state.refused(self.record, self._fault(stage.swap.target)))
        if fingerprint is not None:
            self._say(agent_state.staged(self.record, stage.swap.target, fingerprint))
        return None

    def _staged(self, version: int) -> str | None:
        """The fingerprint, once it is staged. Raises ValueError when that failed."""
        if self.staging is None:
            record = self.board.version(version)
            if record is None or record.state != "ready":
                raise ValueError(version)
            self.staging = Staging(version, record.fingerprint)
        built = self.staging.built
        if built is None or self.staging.unwanted:
            return None
        self.staging = None
        if not built:
            raise ValueError(version)
        return built

    def _fault(self, version: int) -> ErrorInfo:
        return UNFIT if version in self.faults.unfit else BROKEN

    def _end_staging(self) -> None:
        staging, held = self.staging, self.engine.held
        assert staging is not None
        if staging.unwanted and self.rng.random() < 0.5:
            staging.built = ""  # stopped in time; else it was through already
        elif staging.version in self.faults.unfit:
            staging.built = ""
            self.faults.seen["unfit"] += 1
        elif staging.version not in held and self.faults.take("stage"):
            staging.built = ""
        else:
            wrong = staging.version not in held and self.faults.take("build")
            staging.built = held.setdefault(staging.version, WRONG if wrong else staging.published)

    def _give_up_staging(self, action: agent_state.Action) -> None:
        staging = self.staging
        if staging is None:
            return
        if not staging.unwanted and agent_state.gives_up(self.record, action, staging.version):
            staging.unwanted = True
            self.faults.seen["staging given up"] += 1
        if staging.unwanted and staging.built is not None:
            self.staging = None
            self.engine.held.pop(staging.version, None)

    def _begin_flip(self, flip: Flip) -> None:
        active, record = flip.active, self.record
        fingerprint: str | None = record.staged_fingerprint
        try:
            if agent_state.to_stage(record, flip) is not None and (fingerprint := self._staged(active.version)) is None:
                return None
            if not agent_state.same(fingerprint, active.fingerprint):
                self.engine.held.pop(active.version, None)
                raise fingerprint_mismatch(active.version, active.fingerprint, fingerprint or "")
        except (ValueError, SwapError):
            return self._say(agent_state.behind(record, active, self._fault(active.version)))
        self.busy, self.began = (flip, fingerprint or ""), self.store.now
        return None

    def _flip(self, flip: Flip, fingerprint: str) -> None:
        active, record = flip.active, self.record
        if any(version is not None for version in self.requests) and self.store.now < self.began + FINISH_S:
            return None  # the flip waits for them
        self.busy = None
        self.faults.seen["cut"] += len(self.requests)
        self.requests = [
            version for version in self.requests if version is None
        ]  # past the bound: cut, with a typed error
        self.faults.seen["cut"] -= len(self.requests)
        if self.faults.take("flip"):
            self.engine.version, self.engine.fingerprint = None, WRONG
            return self._say(agent_state.torn(record, BROKEN))
        engine, version = self.engine, self.board.version(active.version)
        form = version.form if version is not None else None
        self.faults.seen["misloaded"] += engine.form not in (None, form)
        engine.form = engine.form if engine.form is not None else form
        engine.version, engine.fingerprint = active.version, engine.held[active.version]
        kept = {active.version, record.active_version}
        engine.held = {version: held for version, held in engine.held.items() if version in kept}
        tried, self.tried = self.tried, active.version if active.trial is not None else None
        if tried not in (None, active.version):
            engine.held.pop(tried or 0, None)
            self.faults.seen["flipped back"] += 1
        return self._say(replace(agent_state.flipped(record, active, fingerprint), form=form))


class Gateway(Watcher):
    """Chooses an instance by its own view, however old."""

    def act(self) -> None:
        self.connect()

    def pick(self) -> InstanceRecord | None:
        if self._board is None:
            return None
        active, swap = self._board.active, self._board.swap
        eligible = [i for i in self._board.instances.values() if routing.eligible(i, active, swap)]
        return replace(self.rng.choice(eligible)) if eligible else None
