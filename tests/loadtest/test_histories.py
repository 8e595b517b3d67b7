"""Recorded histories: a real one keeps the rules, and with one lie in it each rule says which lines contradict.

history.jsonl is of two real instances of version 1: a rolling swap to version 2, one to 3 that the canary's probe
fails, a rollback under two streams, a split; and rest.
"""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from loadtest.histories.check import check
from loadtest.histories.recorder import Log, Recorder
from loadtest.histories.requests import Answer, Outcome
from tests.live import LOGS
from tests.waiting import wait_until
from weightsync.control.editions import EditionRecord, key_of
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, LeaderRecord, SwapRecord, VersionRecord
from weightsync.control.strict_json import Record
from weightsync.store import SyncStore

REAL = Path(__file__).with_name("history.jsonl")
Lines = list[dict[str, Any]]
KEYS = Keys("m")


@pytest.fixture
def lines() -> Lines:
    return [orjson.loads(line) for line in REAL.read_bytes().splitlines()]


def says(version: VersionRecord) -> int:
    return 99 + version.version


def checked(lines: Lines, directory: Path) -> list[str]:
    """Contradictions of the rules, each with the lines that make it."""
    path = directory / "history.jsonl"
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return [str(found) for found in check([path], says)]


def test_a_real_history_keeps_the_rules(lines: Lines) -> None:
    assert check([REAL], says) == []
    crossed = [line for line in lines if line["kind"] == "request" for c in line["choices"] if len(c["spans"]) > 1]
    phases = {line["value"]["phase"] for line in lines if line.get("key") == KEYS.swap}
    assert (len(crossed), phases) == (2, {"prepare", "canary", "commit", "done", "aborted"})


def written(lines: Lines, key: str, **fields: Any) -> dict[str, Any]:
    """The value of the first write of that key with these fields, to be changed."""
    of = (line["value"] for line in lines if line.get("key") == key)
    value: dict[str, Any] = next(value for value in of if fields.items() <= value.items())
    return value


def asked(lines: Lines, number: int) -> dict[str, Any]:
    return [line for line in lines if line["kind"] == "request"][number]


ROLLBACK = 3  # the request that went on from version 2 to 1


def append(lines: Lines, key: str, value: Any) -> None:
    lines.append({"kind": "write", "at": 200.0, "model": "m", "revision": 100, "key": key, "value": value})


def without(lines: Lines, key: str, **fields: Any) -> None:
    value = written(lines, key, **fields)
    lines[:] = [line for line in lines if line.get("value") is not value]


def spans(lines: Lines, number: int, *versions: int) -> None:
    """Other versions for the tokens, one each; the first computed the prompt."""
    (choice,) = asked(lines, number)["choices"]
    choice["spans"] = [{"version": version, "start": i, "end": i + 1} for i, version in enumerate(versions)]
    choice["prompt"] = [{"version": versions[0], "start": 0, "end": 3}]
    choice["tokens"] = [[99 + version, 1] for version in versions]
    asked(lines, number)["length"] = len(versions)


def cut(lines: Lines, outcome: str = "cut") -> None:
    asked(lines, 0).update(outcome=outcome, code="ReadError")


def append_wish(lines: Lines) -> None:
    append(lines, KEYS.target, written(lines, KEYS.target, id="h7") | {"id": "other"})
    lines.append(lines[-1] | {"kind": "rest"})


def late(lines: Lines, key: str, phase: str, at: float) -> None:
    value = written(lines, key, phase=phase)
    next(line for line in lines if line.get("value") is value)["at"] = at


A, B = KEYS.instance("a"), KEYS.instance("b")


def adapted(lines: Lines) -> None:
    """Version 2 alone has an adapter, and version 1 has answered through it."""
    part = {"name": "lora/style", "version": 2, "slot": "", "manifest_digest": "", "nbytes": 0}
    written(lines, KEYS.version(2), state="ready").update(parts=[part])
    asked(lines, 0).update(model="style")


def edition(lines: Lines, answered: str, named: str, *published: int) -> None:
    """The first request named an adapter and was answered through an edition of it; others than that may be there."""
    for number in published:
        record = EditionRecord("tuned", number, "", "", 0, "p", 0.0)
        append(lines, key_of(KEYS, "tuned", number), orjson.loads(record.to_json()))
    asked(lines, 0).update(model=answered, named=named)


LIES: list[tuple[str, str, Callable[[Lines], object]]] = [
    ("phases", "from prepare to done", lambda h: written(h, KEYS.swap, phase="canary").update(phase="done")),
    ("phases", "two swaps at once", lambda h: written(h, KEYS.swap, phase="canary").update(id="other")),
    ("phases", "opened in phase commit", lambda h: without(h, KEYS.swap, id="h6", phase="prepare")),
    ("leader", "a step while no leader", lambda h: h[0]["records"].pop(KEYS.leader)),
    ("leader", "the lead that another", lambda h: append(h, KEYS.leader, {"holder": "other", "since": 0.0})),
    ("commit", "a commit was lost", lambda h: written(h, KEYS.active, epoch=3).update(epoch=4)),
    ("commit", "the way back was lost", lambda h: written(h, KEYS.active, epoch=3).update(previous=None)),
    ("commit", "another version was committed", lambda h: written(h, KEYS.active, epoch=3).update(version=2)),
    ("commit", "a commit was changed", lambda h: written(h, KEYS.active, epoch=1).update(version=2)),
    ("commit", "without its commit record", lambda h: without(h, KEYS.active, epoch=3)),
    ("commit", "a commit of no swap", lambda h: written(h, KEYS.active, epoch=3).update(swap_id="other")),
    ("commit", "a commit by a swap in phase canary", lambda h: without(h, KEYS.swap, id="h3", phase="commit")),
    ("commit", "the commit record was deleted", lambda h: append(h, KEYS.active, None)),
    ("participants", "b is TORN", lambda h: written(h, B, staged_version=1).update(state="TORN")),
    ("versions", "retired that is needed", lambda h: append(h, KEYS.version(2), None)),
    ("versions", "a form stays", lambda h: append(h, KEYS.form("f"), {})),
    ("serving", "serves an uncommitted", lambda h: written(h, A, active_version=3).update(state="SERVING")),
    ("serving", "serves wrong weights", lambda h: written(h, B, active_epoch=4).update(fingerprint="wrong")),
    ("serving", "is ahead", lambda h: written(h, B, active_epoch=3).update(active_epoch=4)),
    ("serving", "serves dummy weights", lambda h: written(h, B, active_epoch=3).update(active_version=None)),
    ("served", "no instance ran version 3 then", lambda h: spans(h, 0, 3)),
    ("served", "no instance ran version 2 then", lambda h: asked(h, 1).update(began=100.0, at=101.0)),
    ("order", "versions [1, 2] in this order", lambda h: spans(h, ROLLBACK, 1, 2)),
    ("order", "versions [2, 1, 2] in this order", lambda h: spans(h, ROLLBACK, 2, 1, 2)),
    ("bound", "versions [1, 2]", lambda h: asked(h, ROLLBACK).update(asked={"policy": "finish"})),
    ("bound", "versions [1, 2]", lambda h: asked(h, ROLLBACK).update(asked={"policy": "abort"}, outcome="refused")),
    ("bound", "versions [1, 2]", lambda h: asked(h, 0).update(asked={"version": 2})),
    ("bound", "versions [1, 2]", lambda h: asked(h, 1)["choices"][0]["prompt"][0].update(version=1)),
    ("bound", "version 1 in", lambda h: asked(h, 0).update(asked={"min_version": 2})),
    ("labels", "of 2, with spans", lambda h: asked(h, 0)["choices"][0]["spans"][0].update(start=1)),
    ("labels", "of 2, with spans", lambda h: asked(h, 0)["choices"][0]["prompt"][0].update(start=1)),
    ("labels", "with spans", lambda h: spans(h, 0, 1, 1)),
    ("labels", "1 tokens", lambda h: asked(h, 0)["choices"][0].update(tokens=[[100, 1]])),
    ("adapter", "versions [1], which do not have lora/style", adapted),
    ("edition", "tuned@7, which was never", lambda h: edition(h, "tuned@7", "tuned", 6, 8)),
    ("edition", "tuned@7 in an answer to tuned@6", lambda h: edition(h, "tuned@7", "tuned@6", 6, 7)),
    ("edition", "tuned@7 in an answer to m", lambda h: edition(h, "tuned@7", "m", 7)),
    ("tokens", "{104} of version 2", lambda h: asked(h, 1)["choices"][0].update(tokens=[[104, 3]])),
    ("labels", "of 9", lambda h: asked(h, 0).update(length=9)),
    ("ended", "cut ReadError", cut),
    ("ended", "untyped", lambda h: cut(h, "untyped")),
    ("rest", "the last wish got no answer", append_wish),
    ("rest", "instance b runs version 1", lambda h: without(h, B, active_epoch=4)),
    ("rest", "the swap stays in phase commit", lambda h: without(h, KEYS.swap, id="h7", phase="done")),
    ("stuck", "prepare for 31 s too long", lambda h: late(h, KEYS.swap, "canary", 240.129 + 31)),
    ("stuck", "commit for 31 s too long", lambda h: late(h, KEYS.swap, "done", 120.865 + 2 * 45.2 + 31)),
    ("whole", "was not recorded", lambda h: h.pop(0)),
]


@pytest.mark.parametrize(("rule", "said", "lie"), LIES, ids=[f"{rule}: {said}" for rule, said, _ in LIES])
def test_a_lie_is_found_by_its_rule(
    rule: str, said: str, lie: Callable[[Lines], object], lines: Lines, tmp_path: Path
) -> None:
    lie(lines)
    first = checked(lines, tmp_path)[0]
    assert first.startswith(f"{rule}: ")
    assert said in first
    assert f"{tmp_path}/history.jsonl:" in first, "it names the line"


def test_what_is_allowed(lines: Lines, tmp_path: Path) -> None:
    cut(lines)
    began, server = asked(lines, 0)["began"], asked(lines, 0)["server"]
    spans(lines, ROLLBACK, 2, 1)
    asked(lines, ROLLBACK)["choices"][0]["resumed"] = 1
    excuse = {"kind": "excuse", "at": 200.0, "began": began, "ended": began, "server": server}
    lines.append(excuse)
    assert checked(lines, tmp_path) == []
    for named in ("tuned", "tuned@7", ""):
        edition(lines, "tuned@7", named, 7)
        assert checked(lines, tmp_path) == []
    append(lines, key_of(KEYS, "tuned", 7), None)
    lines[-1]["revision"] += 1
    assert checked(lines, tmp_path) == [], "it may have been withdrawn since"
    excuse["server"] = "another"
    assert [found.split(":")[0] for found in checked(lines, tmp_path)] == ["ended"]


def test_a_swap_may_wait_for_the_first_instance(tmp_path: Path) -> None:
    """A model may be published days before an instance starts."""
    lines: Lines = [{"kind": "found", "at": 100.0, "model": "m", "revision": 1, "records": {}}]
    active = ActiveRecord(1, 1, None, "s", 0.0)
    for at, phase in ((101.0, "prepare"), (102.0, "commit"), (102.0 + 86400, "done")):
        swap = SwapRecord("s", 1, phase, (), 161.0, 101.0)
        puts: dict[str, Record] = {KEYS.leader: LeaderRecord("g", at), KEYS.swap: swap}
        for key, record in (puts | ({KEYS.active: active} if phase == "commit" else {})).items():
            append(lines, key, orjson.loads(record.to_json()))
            lines[-1] |= {"at": at, "revision": at}
        if phase == "prepare":  # the leader was there before
            lines[0]["records"] = {KEYS.leader: lines[1]["value"]}
    assert checked(lines, tmp_path) == []
    lines[-1]["value"]["participants"] = lines[2]["value"]["participants"] = ["a"]
    lines[4]["value"]["participants"] = ["a"]
    assert [found.split(":")[0] for found in checked(lines, tmp_path)] == ["stuck"]


def test_a_gap_is_not_held_against_anybody(lines: Lines, tmp_path: Path) -> None:
    """The store kept no changes: what instances ran meanwhile is not known."""
    at = next(i for i, line in enumerate(lines) if line.get("revision") == 52)
    found = dict(lines[0]["records"]) | {line["key"]: line["value"] for line in lines[1:] if line["kind"] == "write"}
    spans(lines, ROLLBACK, 3, 2, 1)
    gap = {"kind": "found", "at": 150.0, "model": "m", "revision": 99, "records": found}
    rest = [line for line in lines if line["kind"] == "request"][ROLLBACK:]
    assert checked([*lines[:at], gap, rest[0]], tmp_path) == []


def test_the_recorder_writes_what_the_store_is_told(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    with contextlib.closing(SyncStore(url)) as store, contextlib.closing(Log(tmp_path / "log")) as log:
        store.put(KEYS.leader, LeaderRecord("g", 0.0).to_json())
        with contextlib.closing(Recorder(log, url, ["m"])) as recorder:
            wait_until(lambda: log.path.stat().st_size > 0)
            swap = SwapRecord("s", 1, "commit", (), 0.0, 0.0)
            store.txn({}, {KEYS.swap: swap.to_json(), KEYS.active: ActiveRecord(1, 1, None, "s", 0.0).to_json()})
            store.put(KEYS.instance("a"), InstanceRecord("a", "x", key="secret").to_json())
            store.put(KEYS.form("f"), b"large")
            store.put(Keys("m2").swap, swap.to_json())
            wait_until(lambda: KEYS.form("f").encode() in log.path.read_bytes())
            store.delete(KEYS.leader)
            recorder.rest(0.0)
        text = log.path.read_bytes()
    found, *writes, rest = [orjson.loads(line) for line in text.splitlines()]
    assert [*found["records"]] == [KEYS.leader]
    keys = [(line["revision"] - found["revision"], line["key"].removeprefix(KEYS.root)) for line in writes]
    assert keys == [(1, "swap"), (1, "active"), (2, "instances/a"), (3, "forms/f"), (5, "leader")]
    assert [writes[3]["value"], writes[4]["value"]] == [{}, None]
    assert (rest["kind"], b"secret" in text) == ("rest", False)


TOKEN = 'event: token\ndata: {{"index":{},"token_ids":[7],"weight_version":{}}}\n\n'
END = '{{"index":{},"finish_reason":"stop","weight_versions":[{{"version":4,"start":0,"end":2}}]}}'
DONE = f'event: done\ndata: {{"model":"m","choices":[{END.format(0)},{END.format(1)}]}}\n\n'.replace("{{", "{")
PIECE = 'data: {{"model":"m","weight_version":{},"choices":[{{"index":0,"token_ids":[7,8]{}}}]}}\n\n'
TWO = PIECE.format(3, "") + PIECE.format(
    4, ',"hotswap_weight_versions":[{"version":3,"start":2,"end":3},{"version":4,"start":3,"end":4}]'
)  # fmt: skip
AS_TEXT = PIECE.format(
    4, ',"finish_reason":"stop","weight_versions":[{"version":"3","start":0,"end":3},{"version":"4","start":3,"end":6}]'
)  # fmt: skip
CHAT = 'data: {{"model":"m","weight_version":{},"choices":[{{"index":0,"delta":{{"content":"a"}}}}]}}\n\n'


@pytest.mark.parametrize(
    ("status", "body", "broken", "outcome", "spans"),
    [
        (200, TOKEN.format(0, 3) + TOKEN.format(1, 3) + TOKEN.format(0, 4) + DONE, None, "answered",
         [[(4, 0, 2)], [(4, 0, 2)]]),
        (200, TOKEN.format(0, 3) + TOKEN.format(0, 4), None, "cut", [[(3, 0, 1), (4, 1, 2)]]),
        (200, TOKEN.format(0, 3) + "event: token\nda", ("left", "closed"), "left", [[(3, 0, 1)]]),
        (200, CHAT.format(3) + CHAT.format(4) + "data: [DONE]\n\n", ("left", "closed"), "answered",
         [[(3, 0, 0), (4, 0, 0)]]),
        (200, TWO, None, "cut", [[(3, 0, 3), (4, 3, 4)]]),
        (200, TWO + AS_TEXT + "data: [DONE]\n\n", None, "answered", [[(3, 0, 3), (4, 3, 6)]]),
        (500, '{"error":{"message":"m","type":"t"}}', None, "untyped", []),
        (400, '{"error":{"message":"m","type":"t","code":400}}', None, "refused", []),
    ],
)  # fmt: skip
def test_what_came_of_a_request(
    status: int, body: str, broken: tuple[Outcome, str] | None, outcome: str, spans: list[list[tuple[int, ...]]]
) -> None:
    answer = Answer()
    answer.read(status, status == 200, body.encode(), broken)
    found = [[(s["version"], s["start"], s["end"]) for s in choice.spans] for choice in answer.choices.values()]
    assert (answer.outcome, found) == (outcome, spans)


class _Breaks(http.server.BaseHTTPRequestHandler):
    """Breaks off in the middle of each answer."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", "1000")
        self.end_headers()
        self.wfile.write(TOKEN.format(0, 3).encode())

    def log_message(self, *_: object) -> None: ...


def test_requests_of_httpx_are_recorded(tmp_path: Path) -> None:
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Breaks) as server,
        contextlib.closing(Log(tmp_path / "log")) as log,
        httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}") as client,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        LOGS[server.server_port] = log
        body = {"max_tokens": 5, "ignore_eos": True, "hotswap": {"policy": "finish"}}
        with pytest.raises(httpx.RemoteProtocolError):
            client.post("/generate", json=body, headers={"x-hotswap-version": "3"})
        with client.stream("POST", "/v1/completions", json=body | {"stop": "x"}) as answer:
            next(answer.iter_bytes())
        client.get("/generate")
        del LOGS[server.server_port]
        server.shutdown()
    cut, left = [orjson.loads(line) for line in log.path.read_bytes().splitlines()]
    assert (cut["outcome"], cut["asked"], cut["length"]) == ("cut", {"policy": "finish", "version": 3}, 5)
    assert cut["choices"][0]["spans"] == [{"version": 3, "start": 0, "end": 1}]
    assert (left["outcome"], left["asked"], left["length"]) == ("left", {"policy": "finish"}, None)
