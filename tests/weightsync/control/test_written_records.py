"""Records that are written can be read: every class, and every parameter of a publisher that reaches one."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import re
import time
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.weightsync.codes import refused
from tests.weightsync.tensors import model, read_back
from weightsync import Publisher, SyncStore
from weightsync.control import swap
from weightsync.control.board import Board
from weightsync.control.records import (
    MOST_TOLD,
    TAKEN,
    ActiveRecord,
    ErrorInfo,
    InstanceRecord,
    Keys,
    PartRecord,
    VersionRecord,
)
from weightsync.control.state import Step, decide
from weightsync.control.strict_json import MOST, Record
from weightsync.control.swap import transaction, view_of
from weightsync.errors import RecordError, WeightSyncError

ROOT = Path(__file__).parents[3]
QUICK = settings(
    deadline=None,
    max_examples=30,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SURROGATE = "\ud800"
ETCD_KEYS, ETCD_NBYTES = 128, 3 << 19
NUMBERS = st.sampled_from([-1, 0, 2**53, 2**63, 2**64, 10**30, 10**5000]) | st.integers() | st.booleans()
FLOATS = st.floats() | st.sampled_from([float("nan"), float("inf"), 1e300, -1.0])
ALPHABET = st.characters(exclude_categories=())
TEXTS = st.text(ALPHABET, max_size=8) | st.sampled_from(["", "a/", "a/b", "../x", "\0", SURROGATE, "x" * 70_000])
ANYTHING = (
    (TEXTS | NUMBERS | FLOATS | st.none())
    | st.sampled_from([[], [1], {}, {"a": SURROGATE}, {"a": 3}, {3: "a"}, {"a": "b"}, {"a": float("nan")}])
    | st.builds(object)
    | st.sampled_from([b"x", Path("/a"), np.int64(3), np.float32(1), ("a", SURROGATE)])
)


def sources() -> Iterator[tuple[Path, str]]:
    for package in ("weightsync", "server", "trainer"):
        for path in (ROOT / package).rglob("*.py"):
            yield path, path.read_text()


def record_classes() -> list[type[Record]]:
    """All there are: a new one is among them by itself."""
    found = []
    for path, text in sources():
        for name in re.findall(r"^class (\w+)\(Record\):", text, re.MULTILINE):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            found.append(getattr(module, name))
    return found


def values(hint: Any, plain: Mapping[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Of a field's type; `plain` has the strategies of types that JSON has."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values(argument, plain) for argument in arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values(arguments[0], plain), max_size=3).map(tuple)
    return records(hint) if dataclasses.is_dataclass(hint) else plain[hint]


NONE, BOOLS = st.none(), st.booleans()
GOOD = {int: st.integers(0, 99), float: st.floats(0, 9), str: st.just("a"), bool: BOOLS, type(None): NONE}
ODD = {int: NUMBERS, float: FLOATS | NUMBERS, str: TEXTS, bool: BOOLS, type(None): NONE}


@st.composite
def records(draw: st.DrawFn, kind: Any) -> Any:
    """A record that nobody has looked at: one of its fields has an odd value of its type, or any value at all."""
    made, hints = object.__new__(kind), typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    odd = draw(st.sampled_from(fields))
    for name in fields:
        of_its_type = values(hints[name], ODD if name == odd else GOOD)
        object.__setattr__(made, name, draw(of_its_type | ANYTHING if name == odd else of_its_type))
    return made


def test_all_classes_are_found() -> None:
    assert {"VersionRecord", "KeyRecord", "UsageRecord", "SleepOrder", "LedgerEntry"} <= {
        kind.__name__ for kind in record_classes()
    }


@pytest.mark.parametrize("kind", record_classes(), ids=lambda kind: kind.__name__)
def test_what_is_written_is_read_back_equal(kind: type[Record]) -> None:
    @QUICK
    @given(records(kind))
    def check(record: Record) -> None:
        try:
            raw = record.to_json()
        except RecordError as error:
            assert error.code == "record_refused"  # noqa: PT017
            assert "field" in error.problem or "bytes" in error.problem, error  # noqa: PT017
            return
        assert kind.from_json(raw) == record
        assert kind.LONG_TEXTS or len(raw) <= MOST

    check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("stage_ms", float("nan")), ("expected_flip_ms", float("inf")), ("path", SURROGATE), ("pid", 10**5000)),
        *(("model_dir", "x" * 3_000_000), ("devices", [])),
    ],
    ids=["nan", "infinity", "surrogate", "digits", "long", "list"],
)
def test_a_refusal_names_the_field(field: str, value: object) -> None:
    with refused("record_refused", match=f"InstanceRecord: field '{field}'"):
        dataclasses.replace(InstanceRecord("a", "b"), **{field: value}).to_json()


def test_an_error_can_always_be_told() -> None:
    for told in (f"/models/{SURROGATE}", "x" * 10 * MOST_TOLD):
        for error in (ValueError(told), WeightSyncError(told)):
            assert InstanceRecord("a", "b", error=ErrorInfo.of(error)).to_json()


@pytest.mark.parametrize("name", ["", "a/", "a/b", "a\n", SURROGATE, "x" * 600])
def test_a_name_that_cannot_end_a_key(name: str) -> None:
    keys = Keys("demo")
    for method in (keys.publisher, keys.instance, keys.start, keys.pause):
        with refused("record_refused", match="cannot be the end of a key"):
            method(name)


def test_no_model_writes_among_the_records_of_another() -> None:
    """A model `demo/instances` would have instances join the fleet of `demo`."""
    below = {
        found
        for _, text in sources()
        for found in re.findall(r"\{[\w.()]*\b(?:root|copies|instances|starts|pauses|forms|versions)\}([a-z]+)", text)
    }
    assert {"versions", "instances", "sleeps", "hosts"} <= below <= TAKEN
    for name in TAKEN:
        assert Keys(name).root
        with refused("record_refused", match="among the records of another model"):
            Keys(f"demo/{name}/x")


def parameters() -> list[tuple[str, str]]:
    """Each parameter of each method that writes."""
    methods = ("__init__", "publish", "begin", "activate", "rollback")
    skipped = {"self", "store", "model", "named_tensors", "schema", "sign", "wait", "parts"}  # not put into records
    found = {name: inspect.signature(getattr(Publisher, name)).parameters for name in methods}
    return [(name, each) for name, those in found.items() for each in those if each not in skipped]


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store takes no transaction that etcd would refuse."""
    from weightsync.store.sqlite_db import Database

    write = Database.txn

    def txn(self: Database, compares: Any, puts: Any, leases: Any = None) -> Any:
        assert max(len(compares), len(puts)) <= ETCD_KEYS
        assert sum(len(key.encode()) + len(value or b"") for key, value in puts.items()) <= ETCD_NBYTES
        return write(self, compares, puts, leases)

    monkeypatch.setattr(Database, "txn", txn)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(("method", "name"), parameters(), ids=lambda part: part.strip("_"))
def test_no_parameter_bricks_a_model(method: str, name: str, store_url: str, store_sync: SyncStore) -> None:
    """After whatever has changed the store, it is listed, decided upon, published to and rolled back."""
    keys = Keys("demo")
    with Publisher(store_url, model="demo", lineage="plain") as plain:
        plain.publish(model(1), activate=False)
        goes_on(plain, store_sync, keys)  # there is a version to roll back from

        @QUICK
        @given(ANYTHING)
        def check(value: object) -> None:
            before, _ = store_sync.list("")
            with contextlib.suppress(WeightSyncError):
                ask(store_url, method, {name: value})
            if store_sync.list("")[0] != before:
                goes_on(plain, store_sync, keys)

        check()


def ask(url: str, method: str, given: dict[str, Any]) -> None:
    """A call with one parameter that is not checked yet."""
    first = given if method == "__init__" else {}
    with Publisher(url, **{"model": "demo"} | first) as publisher:
        if method == "begin":
            schema = [(key, str(tensor.dtype), tensor.shape) for key, tensor in model(2).items()]
            with publisher.begin(schema, **given) as draft:
                for key, tensor in model(2).items():
                    draft.write(key, tensor)
                draft.commit()
        elif method in ("activate", "rollback"):
            version = {"version": publisher.versions()[-1].version} if method == "activate" else {}
            getattr(publisher, method)(**{**version, "wait": False, **given})
        else:
            extra = {} if method == "__init__" else given
            publisher.publish(model(2), **{"wait": False, **extra})


def goes_on(plain: Publisher, store: SyncStore, keys: Keys) -> None:
    async def look() -> Board:
        async with Board.follow(store.store, keys) as board:
            return board

    board = store.run(look())
    for instance in (InstanceRecord("a", "http://a:1", "SERVING"),):
        view = dataclasses.replace(view_of(board, time.time()), instances={instance.id: instance})
        decision = decide(view)
        if isinstance(decision, Step):
            transaction(board, decision, 1)
    version = plain.publish(model(3), activate=False)
    assert version in [v.version for v in board.versions] or plain.versions()[-1].version == version
    for record in plain.versions()[-2:]:
        if record.state == "ready":
            read_back(record)
    before = plain.active()
    found = ActiveRecord(version, before.epoch + 1 if before else 1, before.version if before else version, "s", 0.0)
    store.put(keys.active, found.to_json())
    plain.rollback(wait=False)


@pytest.mark.usefixtures("bounded")
def test_retiring_takes_as_many_transactions_as_it_needs(store_sync: SyncStore) -> None:
    """A publisher that keeps hundreds is followed by one that keeps few; each record is as large as it may be."""
    keys, source = Keys("demo"), "x" * 60_000

    async def work(store: Any) -> list[int]:
        for number in range(1, 200):
            about = (number, "ready", "/s", 1, "d", None, None, "t", 1, 0.0, source if number < 40 else "", 1)
            await store.put(keys.version(number), VersionRecord(*about).to_json())
        rounds = 0
        while await swap.retire(store, keys, spare=2):
            rounds += 1
        board = Board(keys, *await store.list(keys.root))
        assert rounds > 1
        return [v.version for v in board.versions if v.state == "ready"]

    assert store_sync.run(work(store_sync.store)) == [198, 199]


def test_a_retired_version_names_its_own_parts() -> None:
    keys = Keys("demo")
    parts = tuple(PartRecord(f"lora/{n}", n, "/s", "d", 1) for n in (1, 2))
    record = VersionRecord(2, "ready", "/s", 1, "d", None, None, "t", 1, 0.0, "", 1, parts=parts)
    raw = swap.retirement(keys, [record], set(), spare=0)[keys.version(2)]
    assert raw is not None
    assert [part.name for part in VersionRecord.from_json(raw).parts] == ["lora/2"]
