"""Swaps of a whole fleet as a world of random schedules, and what must hold in all of them.

A move brings events to watchers, lets actors take steps, lets time pass, sends requests, or breaks something; then the
faults stop, and everything must come to rest.
"""

from __future__ import annotations

import random
from typing import ClassVar

from loadtest.histories.rules import Rules, require
from loadtest.simulation.clock import Clock
from loadtest.simulation.schedules import World
from loadtest.simulation.store import ModelStore, Puts
from weightsync.control import agent_state
from weightsync.control.records import ActiveRecord, PauseRecord, ShareRecord, SplitRecord, TargetRecord, VersionRecord
from weightsync.control.state import NOT_RUN, confirmed, in_flight

from .swap_actors import FORMS, KEYS, Candidate, Faults, Gateway, Instance

PAUSE_TTL_S = 8.0
OTHER_FORM = 0.3  # of the versions
SPLITS = 0.25  # of the wishes
TEAR_ALL, LOSE_ALL = 0.3, 0.2  # of the schedules
UNFIT = 0.15  # of the versions


class Swaps(World):
    moves: ClassVar = {
        "calm_once": 6, "step": 63, "ask": 5, "publish": 4, "send": 4, "generate": 5, "let_time_pass": 5, "pause": 1,
        "restart_one": 2, "fail": 5,
    }  # fmt: skip
    steps = 60

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        super().__init__(clock, rng)
        self.store, self.faults = ModelStore(clock), Faults(seen=self.seen)
        self.store.on_write = self.check_write
        self.candidates = [Candidate(f"c{i}", self.store, rng, self.faults) for i in range(rng.choice((1, 2, 2, 3)))]
        self.instances = [Instance(n, self.store, rng, self.faults) for n in "abcd"[: rng.choice((1, 2, 2, 3, 4))]]
        self.gateway = Gateway("g", self.store, rng)
        self.rules = Rules(KEYS)
        self.rules.seen = self.seen
        self.asked = self.published = 0
        self.settling = False
        self.pausers: list[int] = []
        for _ in range(2):
            self.publish()

    @classmethod
    def opening(cls, rng: random.Random) -> list[str]:
        return ["ask", "calm_down"] * rng.choice((0, 1, 1, 1, 2)) + ["ask"]

    @property
    def actors(self) -> list[Candidate | Instance | Gateway]:
        return [*self.candidates, *self.instances, self.gateway]

    # what people do

    def publish(self) -> None:
        self.store.require()
        self.published += 1
        v, new = self.published, FORMS[self.rng.random() < OTHER_FORM]
        if not self.settling and self.served() and self.rng.random() < UNFIT:
            self.faults.unfit.add(v)
        form = new.digest
        record = VersionRecord(v, "ready", "", 0, "", None, None, "t", 1, 0.0, "", 0, fingerprint=f"f{v}", form=form)
        puts: dict[str, bytes | None] = {KEYS.version(v): record.to_json()}
        if not any(known.form == form and known.state == "ready" for known in self.versions()):
            puts[KEYS.form(form)] = new.to_json()  # else it carries on a version that has it
        self.store.txn({}, puts)

    def served(self) -> bool:
        """Whether there is a version to return to: a swap has ended, and an instance runs what it has committed."""
        swap, active = self.rules.swap, self.rules.active
        if swap is None or active is None or in_flight(swap) or swap.reason == NOT_RUN:
            return False
        return any(confirmed(record, active) for record in self.rules.instances.values())

    def ask(self) -> None:
        self.store.require()
        if self.rng.random() < 0.5:
            self.publish()
        version = self.published if self.rng.random() < 0.6 else self.rng.randint(1, self.published)
        self.wish(version, self.split(version) if self.rng.random() < SPLITS else None)

    def wish(self, version: int, split: SplitRecord | None) -> None:
        self.asked += 1
        mode = self.rng.choice(("together", "rolling"))
        drain_s = self.rng.choice((0.0, 4.0))
        on_lost = self.rng.choice(("abort", "continue"))
        target = TargetRecord(version, f"t{self.asked}", "test", 20.0, mode, drain_s, on_lost, split)  # type: ignore[arg-type]
        self.store.put(KEYS.target, target.to_json())

    def split(self, active: int) -> SplitRecord | None:
        """Of that version with one or two others, if there are any."""
        form = self.form_of(active)
        others = [v.version for v in self.versions() if (v.state, v.form) == ("ready", form) and v.version != active]
        chosen = self.rng.sample(others, min(len(others), self.rng.choice((1, 1, 1, 2))))
        percents = [self.rng.choice((0.0, 10.0, 45.0)) for _ in chosen]
        shares = tuple(ShareRecord(v, p) for v, p in zip(sorted(chosen), percents, strict=True))
        return SplitRecord(shares) if shares else None

    def send(self) -> None:
        """A request by way of the gateway; half of them ask for the version that the instance is said to run."""
        found = self.gateway.pick()
        instance = next((i for i in self.instances if found is not None and i.name == found.id), None)
        if found is None or instance is None:
            return
        version = found.active_version if self.rng.random() < 0.5 else None
        if not instance.admits(version):
            self.seen["refused"] += 1
            return
        self.check_serving(instance)
        self.seen["admitted"] += 1
        instance.requests.append(version)

    def generate(self) -> None:
        """A token for every request, and the end of some."""
        for instance in self.instances:
            if not instance.runs or instance.paused:
                continue
            for version in instance.requests:
                wrong = version not in (None, instance.engine.version)
                require(not wrong, f"a request for version {version} got tokens of {instance.engine.version}")
            instance.requests = [r for r in instance.requests if self.rng.random() < 0.85]

    def pause(self) -> None:
        """A client pauses, and may forget it or die."""
        lease = self.store.grant(PAUSE_TTL_S)
        record = PauseRecord(f"p{lease}", "test", PAUSE_TTL_S, 0.0)
        self.store.put(KEYS.pause(record.id), record.to_json(), lease)
        self.pausers.append(lease)

    def tick(self, seconds: float) -> None:
        self.store.tick(seconds, [*(a.lease for a in self.actors if a.runs), *self.pausers])

    # what goes wrong

    def fail(self) -> None:
        rng, kind = self.rng, self.rng.randrange(14)
        if kind < 3:
            rng.choice(self.candidates).crash()
        elif kind == 3:
            rng.choice(self.candidates).resign()
        elif kind == 4:
            rng.choice(self.instances).crash()
        elif kind == 5:
            frozen = rng.choice(self.actors)
            frozen.frozen = not frozen.frozen
        elif kind == 6:
            self.store.up = not self.store.up
            if rng.random() < 0.5:
                self.store.expire()  # it is back, and ends what ran out meanwhile before anybody can renew it
        elif kind == 7:
            self.store.lose_answer = True
        elif kind == 8:
            staging = [i for i in self.instances if i.staging is not None]
            self.revoke(rng.choice(staging or self.actors).lease)
        elif kind == 9 and self.pausers:
            self.pausers.pop()
        elif kind == 10:
            self.faults.flips = not self.faults.flips
        else:
            setattr(self.faults, rng.choice(("stage", "build", "flip")), True)

    def revoke(self, lease: int | None) -> None:
        """The lease ends, as it does when its owner was too slow."""
        if lease is not None and self.store.up:
            self.store.revoke(lease)

    # what goes on

    def step(self) -> None:
        actor = self.rng.choice(self.actors)
        actor.deliver(self.rng.choice((1, 2, 99)))
        actor.step()

    def let_time_pass(self) -> None:
        self.tick(self.rng.choice((0.5, 2.0, 6.0)))

    def restart_one(self) -> None:
        dead = [a for a in self.actors if not a.alive or (isinstance(a, Instance) and a.record.state == "TORN")]
        if dead:
            self.rng.choice(dead).restart()

    def calm_once(self) -> None:
        self.calm(1)

    def calm_down(self) -> None:
        self.calm(self.rng.choice((6, 8, 10)))

    def calm(self, rounds: int) -> None:
        """Everybody sees everything and does what is to do, in any order."""
        actors = self.actors
        for _ in range(rounds):
            self.rng.shuffle(actors)
            for actor in actors:
                actor.deliver(99)
                actor.step()
            self.generate()
            self.check()

    def settle(self) -> None:
        """From here on nothing fails: whatever the state, the last wish gets its answer, and everybody serves."""
        store = self.store
        store.up, store.lose_answer, self.pausers, self.settling = True, False, [], True
        self.faults.stage = self.faults.build = self.faults.flip = self.faults.flips = False
        for actor in self.actors:
            actor.frozen = False
            if not actor.alive:
                actor.restart()
        self.lose_one()
        self.come_to_rest()
        if self.rng.random() < TEAR_ALL:
            self.tear_all()
            self.come_to_rest()
        if self.rng.random() < LOSE_ALL:
            self.lose_all()

    def come_to_rest(self) -> None:
        quiet = 0
        for _ in range(400):
            before = self.store.revision
            for instance in self.instances:
                if instance.record.state == "TORN":
                    instance.restart()  # its process ends, and is started anew
            self.calm(1)
            quiet = quiet + 1 if self.store.revision == before else 0
            if quiet >= 3 and self.dead_end() is None:
                return
            self.tick(1.0 if quiet < 5 else 10.0)
        require(False, self.dead_end() or "it never comes to rest")

    def tear_all(self) -> None:
        """All flips of one more swap fail: what was committed before it is committed again, or still."""
        if (before := self.rules.active) is None or before.split is not None:  # that is placed anew as instances go
            return
        self.faults.flips = True
        self.publish()
        self.wish(self.published, None)
        for _ in range(40):  # answers that last hold up the flip for as long as a drain may take
            self.calm(2)
            self.tick(2.0)
            if (swap := self.rules.swap) is not None and swap.target == self.published and not in_flight(swap):
                break
        swap, active = self.rules.swap, self.rules.active
        require(swap and swap.phase == "aborted", "no instance could flip, and the swap is not aborted")
        require(
            active and (active.version, active.previous) == (before.version, before.previous),
            "no instance could flip, and another commit stands",
        )
        self.seen["all torn"] += sum(i.record.state == "TORN" for i in self.instances) == len(self.instances)
        self.faults.flips = False

    def lose_one(self) -> None:
        """An instance is away for so long that the others divide the versions among them."""
        active = self.rules.active
        if active is None or active.split is None:
            return
        away = self.rng.choice(self.instances)
        self.calm(6)
        away.crash()
        self.tick(2 * PAUSE_TTL_S)
        self.calm(12)
        away.restart()

    def lose_all(self) -> None:
        """All instances are away while a version is committed that none of them can run."""
        if (before := self.rules.active) is None or not self.served():
            return
        for instance in self.instances:
            instance.crash()
        self.tick(2 * PAUSE_TTL_S)
        self.publish()
        self.faults.unfit.add(self.published)
        self.wish(self.published, None)
        self.calm(8)
        for instance in self.instances:
            instance.restart()
        self.come_to_rest()
        active = self.rules.active
        require(active and active.version == before.version, "no instance can run it, and another commit stands")

    def dead_end(self) -> str | None:
        """The fault in the state at rest, if there is one."""
        if (said := self.rules.unrest()) is not None:
            return said
        committed = self.rules.active
        for i in self.instances:
            if i.record.state != "SERVING":
                return f"instance {i.name} stays {i.record.state}"
            active = committed.of(i.name) if committed is not None else None
            if active is not None and i.engine.version != active.version:
                return f"instance {i.name} runs version {i.engine.version}, committed is {active.version}"
            if active is not None and i.engine.form not in (None, self.form_of(active.version)):
                return f"instance {i.name} has an engine of another form than version {active.version}"
            if i.staging is not None:
                return f"instance {i.name} stages version {i.staging.version} for nobody"
            if i.paused:
                return f"instance {i.name} stays paused"
        return None

    # what must hold

    def check_write(self, puts: Puts) -> None:
        if KEYS.swap in puts:
            writers = [c for c in self.candidates if c.term is not None and c.runs]
            held = self.store.get(KEYS.leader)
            require(held and any(c.term == held.mod_revision for c in writers), "a step of one who does not lead")
        before = self.rules.active
        self.rules.write(puts)
        if (active := self.rules.active) is not None and active != before:
            self._check_built(active)

    def _check_built(self, active: ActiveRecord) -> None:
        """All participants of a commit have made the weights that were published."""
        swap = self.rules.swap
        if swap is None or swap.phase != "commit":
            return
        for instance in self.instances:
            reported = instance.record.state != "STARTING"  # or the old process ended unnoticed
            mine = instance.name in swap.participants and instance.record.swap_id == swap.id
            if instance.alive and reported and mine:
                wanted = active.of(instance.name)
                on_trial = instance.engine.version == wanted.version
                built = instance.engine.fingerprint if on_trial else instance.engine.held.get(wanted.version)
                require(built is not None, f"committed, but {instance.name} has not staged it")
                require(built == wanted.fingerprint, f"committed, but {instance.name} built other weights")

    def check(self) -> None:
        for instance in self.instances:
            if instance.alive and agent_state.admits(instance.record):
                self.check_serving(instance)
            if instance.runs and instance.paused:
                require(self.store.now - instance.pauses_seen <= PAUSE_TTL_S, "a pause outlived its owner")

    def check_serving(self, instance: Instance) -> None:
        engine = instance.engine
        if engine.version is None:
            require(instance.record.active_epoch == 0, f"{instance.name} serves dummy weights after a commit")
            return
        require(engine.fingerprint == f"f{engine.version}", f"{instance.name} serves wrong weights")
        require(engine.version in self.rules.committed, f"{instance.name} serves an uncommitted version")
        require(engine.version == instance.record.active_version, f"{instance.name} does not serve what it says")

    def versions(self) -> list[VersionRecord]:
        return [VersionRecord.from_json(kv.value) for kv in self.store.list(KEYS.versions)[0]]

    def form_of(self, version: int) -> str | None:
        found = self.store.get(KEYS.version(version))
        return VersionRecord.from_json(found.value).form if found is not None else None
