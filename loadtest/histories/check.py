"""The contradictions of a history to the rules.

Its writes go through `Rules`. Its requests are compared with what each instance ran when, by the instances' records:

    served   each token is of a version that some instance ran while the request was under way
    order    the versions of an answer follow each other as they did on one instance: it never goes back to a version
             but by a commit, a revert or the end of a trial that is recorded. (Of a stream that other instances went on
             with, each part does.)
    bound    an answer with policy `finish` or `abort` or for one `version`, and its prompt, are of one version; none is
             of one before its `min_version`
    labels   the spans of a whole answer, and of its prompt, begin at 0, follow one another, and cover all tokens
    adapter  the versions of an answer through an adapter have that adapter
    edition  an answer through an edition is through one that was published, of the adapter that was asked for, and of
             the number where one was
    tokens   a token is the one that its version always answers, where that is known of it
    ended    a request is answered or fails with a typed error, unless its client leaves or the history has an excuse
    stuck    a swap leaves each phase in the time that a leader gives it, or STUCK_S later
    whole    the history itself can be read, to its last line but one

An instance runs a version from the commit that asks for it (for a trial: the opening of its swap) until a record says
that it runs another one, so a request is never wronged by a record that came late. All times are of one clock: a
history of several hosts is one of one machine's namespaces.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from loadtest.histories.rules import Rules, Violation
from weightsync.control.editions import EditionRecord, prefix_of, split_name
from weightsync.control.parts import LORA
from weightsync.control.records import InstanceRecord, Keys, VersionRecord
from weightsync.control.state import in_flight, phase_of, phase_s

Says = Callable[[VersionRecord], int | None]
STUCK_S = 30.0  # after a phase should have ended: time for stores to be back
SHOWN = 300  # characters of a line


@dataclass(frozen=True)
class Line:
    """One of a file."""

    place: str
    said: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.place}: {orjson.dumps(self.said).decode()[:SHOWN]}"


@dataclass(frozen=True)
class Contradiction:
    """The lines that cannot be true together by a rule."""

    rule: str
    what: str
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        return "\n  ".join([f"{self.rule}: {self.what}", *map(str, self.lines)])


@dataclass
class Tenure:
    """An instance ran `version` at most from `since` until `until`."""

    version: int | None
    since: float
    line: Line
    until: float = math.inf


class Model:
    """The runs and commits that the writes of one model tell of."""

    def __init__(self, name: str, says: Says) -> None:
        self.keys, self._says = Keys(name), says
        # Of each version that is ready, and since when: a store that was restored gives numbers anew.
        self.parts: dict[int, list[tuple[float, set[str]]]] = {}
        self.editions: dict[str, set[int]] = {}  # the numbers that there ever were of each adapter
        self.answers: dict[int, int] = {}  # the token of a version that always answers the same
        self.tenures: dict[str, list[Tenure]] = {}
        self.wrong: list[Contradiction] = []
        self.gaps: list[tuple[float, float]] = []  # in which nothing is known
        self._rules: Rules | None = None
        self._at = 0.0
        self._began = 0.0  # the phase that the swap is in, or the term of the leader that found it so
        self._committed: dict[int, float] = {}
        self._epochs: dict[str, int] = {}
        self._transaction: list[Line] = []

    @property
    def rules(self) -> Rules:
        assert self._rules is not None, "a history begins with what was found"
        return self._rules

    def take(self, line: Line) -> None:
        """A line about the store. The writes of one revision may have lines of clients between them."""
        kind = line.said["kind"]
        if self._rules is None and kind != "found":
            return self.wrong.append(Contradiction("whole", "what was there before was not recorded", (line,)))
        if self._transaction and (kind != "write" or line.said["revision"] != self._transaction[0].said["revision"]):
            self.flush()
        if kind == "write":
            self._transaction.append(line)
            self._at = line.said["at"]
        elif kind == "rest":
            if (said := self.rules.unrest()) is not None:
                self.wrong.append(Contradiction("rest", said, (line,)))
        else:  # the recorder looks, for the first time or after it has lost sight of the store
            before = self._rules
            self.gaps += [(self._at, line.said["at"])] if before is not None else []
            self._rules = Rules(self.keys, {key: orjson.dumps(value) for key, value in line.said["records"].items()})
            self._rules.committed |= before.committed if before is not None else set()
            self._began = line.said["at"]
            epoch = self._rules.active.epoch if self._rules.active is not None else 0
            self._committed = {e: at for e, at in self._committed.items() if e <= epoch}  # the store may be restored
            self._see(line, self._rules.found)
        return None

    def flush(self) -> None:
        """The transaction is whole."""
        if not self._transaction:
            return
        lines, self._transaction = self._transaction, []
        values = {line.said["key"]: line.said["value"] for line in lines}
        before, at = self.rules.swap, lines[0].said["at"]
        try:
            self.rules.write({key: None if value is None else orjson.dumps(value) for key, value in values.items()})
        except Violation as violation:
            self.wrong.append(Contradiction(violation.rule, violation.what, tuple(lines)))
        after = self.rules.swap
        if before is not None and in_flight(before) and after != before:
            late = at - self._began - phase_s(before)
            if late > STUCK_S:
                self.wrong.append(Contradiction("stuck", f"{before.phase} for {late:.0f} s too long", tuple(lines)))
        if phase_of(after) != phase_of(before) or self.keys.leader in values:
            self._began = at
        for line in lines:
            self._see(line, [line.said["key"]])

    def _see(self, line: Line, keys: Iterable[str]) -> None:
        active = self.rules.active
        if active is not None:
            self._committed.setdefault(active.epoch, active.committed_at)
        names = {key.removeprefix(self.keys.instances) for key in keys if key.startswith(self.keys.instances)}
        for record in self.rules.instances.values():
            if record.id in names:
                self._follow(record, line)
        for key in keys:
            if key.startswith(prefix_of(self.keys)) and key in self.rules.found:
                edition = EditionRecord.from_json(self.rules.found[key])
                self.editions.setdefault(edition.name, set()).add(edition.number)
            if key.startswith(self.keys.versions) and key in self.rules.found:
                version = VersionRecord.from_json(self.rules.found[key])
                if version.state == "ready":
                    known = self.parts.setdefault(version.version, [])
                    known.append((line.said["at"], {part.name for part in version.parts}))
                if (token := self._says(version)) is not None:
                    self.answers[version.version] = token

    def _follow(self, record: InstanceRecord, line: Line) -> None:
        past = self.tenures.setdefault(record.id, [])
        known = self._epochs.get(record.id)
        if past and (past[-1].version, known) == (record.active_version, record.active_epoch):
            return
        swap = self.rules.swap
        tried = swap.opened_at if swap is not None and swap.canary == record.id else 0.0
        since = self._committed.get(record.active_epoch, tried)
        if past:
            past[-1].until, since = line.said["at"], max(since, past[-1].since)
        past.append(Tenure(record.active_version, since, line))
        self._epochs[record.id] = record.active_epoch

    def has(self, part: str) -> bool:
        """Whether any version has it."""
        return any(part in parts for known in self.parts.values() for _, parts in known)

    def lacks(self, part: str, version: int, at: float) -> bool:
        """Whether the version that had this number then is known not to have it."""
        known = [parts for since, parts in self.parts.get(version, []) if since <= at]
        return bool(known) and part not in known[-1]

    def explains(self, versions: Sequence[int], began: float, ended: float, *, resumed: bool) -> bool:
        """Whether one instance (of a stream that was `resumed`: all, one after the other) ran these in this order."""
        ways = [list(_during(past, began, ended)) for past in self.tenures.values()]
        ways = [sorted(itertools.chain(*ways), key=lambda tenure: tenure.since)] if resumed else ways
        return any(_follow_each_other(versions, way) for way in ways)


def _during(past: Sequence[Tenure], began: float, ended: float) -> Iterator[Tenure]:
    """Of one instance's tenures, which are in order, those of that time."""
    first = bisect.bisect_left(past, began, key=lambda tenure: tenure.until)
    return itertools.takewhile(lambda tenure: tenure.since <= ended, (past[i] for i in range(first, len(past))))


def _follow_each_other(versions: Sequence[int], way: Iterable[Tenure]) -> bool:
    there = iter(way)
    return all(any(tenure.version == version for tenure in there) for version in versions)


@dataclass
class Checker:
    """Takes lines, then says what is wrong."""

    says: Says
    models: dict[str, Model] = field(default_factory=dict)
    requests: list[Line] = field(default_factory=list)
    excuses: list[Mapping[str, Any]] = field(default_factory=list)
    wrong: list[Contradiction] = field(default_factory=list)

    def read(self, path: Path) -> None:
        for line in self._lines(path):
            if line.said["kind"] == "request":
                self.requests.append(line)
            elif line.said["kind"] == "excuse":
                self.excuses.append(line.said)
            else:
                name = line.said["model"]
                self.models.setdefault(name, Model(name, self.says)).take(line)

    def contradictions(self) -> list[Contradiction]:
        for model in self.models.values():
            model.flush()
        found = self.wrong + [wrong for model in self.models.values() for wrong in model.wrong]
        return found + [wrong for line in self.requests for wrong in self._judge(line)]

    def _lines(self, path: Path) -> Iterator[Line]:
        raw = path.read_bytes().split(b"\n")
        for number, text in enumerate(raw, 1):
            try:
                yield Line(f"{path}:{number}", orjson.loads(text))
            except orjson.JSONDecodeError:
                if number < len(raw):  # the last one is empty, or its writer was killed as it wrote it
                    line = Line(f"{path}:{number}", {"text": text.decode(errors="replace")})
                    self.wrong.append(Contradiction("whole", "not a line of JSON", (line,)))

    def _judge(self, line: Line) -> Iterator[Contradiction]:
        said = line.said
        outcome, code = said["outcome"], said["code"]
        excused = any(e["server"] == said["server"] and _meet(said, e["began"], e["ended"]) for e in self.excuses)
        if outcome == "untyped" or (outcome == "cut" and not excused):
            yield Contradiction("ended", f"{outcome} {code}".strip(), (line,))
        model, adapter = self._model(said["model"])
        seen = model if model is not None and not any(_meet(said, *gap) for gap in model.gaps) else None
        if seen is not None and split_name(said["model"])[1] is not None:
            yield from _edition(line, seen.editions)
        for choice in said["choices"]:
            if outcome == "answered":
                yield from _labels(line, choice, said["length"])
            yield from _bound(line, choice, said["asked"])
            if model is not None and adapter:
                yield from _adapter(line, choice, model, adapter)
            if seen is not None:
                yield from _order(line, choice, seen)
            if model is not None and said["length"] is not None:
                yield from _tokens(line, choice, model.answers)

    def _model(self, name: str) -> tuple[Model | None, str]:
        """The model that an answer is of by the name in it, and the part that it came through, "" for none."""
        if (model := self.models.get(name)) is not None:
            return model, ""
        adapter, number = split_name(name)
        for model in self.models.values():
            if number is not None and adapter in model.editions:
                return model, ""
            if model.has(LORA + name):
                return model, LORA + name
        if len(self.models) == 1:  # of an answer that broke off before it said whose it was
            return next(iter(self.models.values())), ""
        return None, ""


def check(paths: Iterable[Path], says: Says = lambda _: None) -> list[Contradiction]:
    """Of the histories in these files, which are of one run. `says`: the token that a version answers, whatever it is
    asked; None for a version of which that is not known."""
    checker = Checker(says)
    for path in paths:
        checker.read(path)
    return checker.contradictions()


def _meet(said: Mapping[str, Any], began: float, ended: float) -> bool:
    """Whether a request was under way in that time."""
    return bool(began <= said["at"] and said["began"] <= ended)


def _versions(spans: Iterable[Mapping[str, int]]) -> list[int]:
    """In their order, each once for as long as it goes on."""
    return [version for version, _ in itertools.groupby(span["version"] for span in spans)]


def _order(line: Line, choice: Mapping[str, Any], model: Model) -> Iterator[Contradiction]:
    versions, began, ended = _versions(choice["spans"]), line.said["began"], line.said["at"]
    records = tuple(tenure.line for past in model.tenures.values() for tenure in past if tenure.version in versions)
    for version in dict.fromkeys(versions):
        if not model.explains([version], began, ended, resumed=False):
            yield Contradiction("served", f"no instance ran version {version} then", (line, *records))
            return
    resumed = choice["resumed"] > 0 or line.said["outcome"] != "answered"  # only its end would say that it was
    if not model.explains(versions, began, ended, resumed=resumed):
        yield Contradiction("order", f"no instance ran versions {versions} in this order", (line, *records))


def _adapter(line: Line, choice: Mapping[str, Any], model: Model, adapter: str) -> Iterator[Contradiction]:
    lacking = [v for v in _versions(choice["spans"]) if model.lacks(adapter, v, line.said["at"])]
    if lacking:
        yield Contradiction("adapter", f"versions {lacking}, which do not have {adapter}", (line,))


def _edition(line: Line, editions: Mapping[str, Set[int]]) -> Iterator[Contradiction]:
    answered, asked = line.said["model"], line.said["named"]
    adapter, number = split_name(answered)
    if number not in editions.get(adapter, ()):
        yield Contradiction("edition", f"{answered}, which was never published", (line,))
    if asked not in ("", answered, adapter):
        yield Contradiction("edition", f"{answered} in an answer to {asked}", (line,))


def _labels(line: Line, choice: Mapping[str, Any], length: int | None) -> Iterator[Contradiction]:
    spans, tokens = choice["spans"], sum(count for _, count in choice["tokens"])
    written = spans[-1]["end"] if spans else 0
    whole = written == (tokens or written) and (length is None or not spans or written == length)
    if not whole or not (_contiguous(spans) and _contiguous(choice["prompt"])):
        said = f"{tokens} tokens, of {length or 'any number'}, with spans {spans} after {choice['prompt']}"
        yield Contradiction("labels", said, (line,))


def _tokens(line: Line, choice: Mapping[str, Any], answers: Mapping[int, int]) -> Iterator[Contradiction]:
    tokens = [token for token, count in choice["tokens"] for _ in range(count)]
    for span in choice["spans"]:
        says = answers.get(span["version"])
        wrong = set(tokens[span["start"] : span["end"]]) - {says}
        if wrong and says is not None:
            yield Contradiction("tokens", f"{wrong} of version {span['version']}, which answers {says}", (line,))


def _contiguous(spans: Sequence[Mapping[str, int]]) -> bool:
    """Whether they begin at 0, follow one another, and each is of another version than the one before."""
    edges = [0, *(span["end"] for span in spans)]
    follow = all(edge == span["start"] for edge, span in zip(edges, spans, strict=False))
    return follow and all(one["version"] != other["version"] for one, other in itertools.pairwise(spans))


def _bound(line: Line, choice: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[Contradiction]:
    found, wanted, least = set(_versions(choice["spans"])), asked.get("version"), asked.get("min_version")
    if asked.get("policy") in ("finish", "abort") or wanted is not None:
        found |= {*_versions(choice["prompt"]), *([wanted] if wanted is not None else [])}
        if len(found) > 1:
            yield Contradiction("bound", f"versions {sorted(found)} in an answer to {dict(asked)}", (line,))
    elif least is not None and found and min(found) < least:
        yield Contradiction("bound", f"version {min(found)} in an answer to {dict(asked)}", (line,))
