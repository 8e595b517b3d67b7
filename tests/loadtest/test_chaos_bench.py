"""The judges of `hotswap bench chaos`: what they let pass and what they do not. No fleet is started here."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import psutil
import pytest

from loadtest.chaos import joiner, publisher
from loadtest.chaos.clients import Attempt, Question, Wish, attempt, drawn, problems
from loadtest.chaos.fleet import DRAIN_S, Snapshot, Supervised, pools, survivors
from loadtest.chaos.hostile import Attack, Attacker, bodies, complaints, told
from loadtest.chaos.joiner import Joiner, Served, Stay, Tenure, tenures
from loadtest.chaos.models import ALIAS, FIRST, KEPT, POPULAR, SECOND, badness, editions_of, flawed, placed
from loadtest.chaos.models import token_of as token_of_model
from loadtest.chaos.report import MOST_EDITIONS, RECORDS, SLOTS, Held, Wrongs, held, let_in, pushes, swaps, violations
from loadtest.chaos.run import Broken, windows
from loadtest.chaos.verdict import AFTER_S, SILENT_S, Fault, Verdict, Window, judge, schedule, verdict
from loadtest.histories.requests import Choice
from loadtest.hosts.namespaces import until
from loadtest.models.checkpoints import make_constant_checkpoint
from tests.server.gateway.harness import running_gateway
from tests.weightsync.codes import refused
from weightsync import Publisher, SyncStore, ensure_arena
from weightsync.control.editions import split_name
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, PastSwapRecord

FINE = {FIRST: {"not as published": 0}}
SPANS = [{"version": 4, "start": 0, "end": 2}, {"version": 5, "start": 2, "end": 3}]
KEEP = Wish()


def answer(*tokens: int, spans: list[dict[str, int]]) -> Choice:
    return Choice(list(spans), [], list(tokens))


def token_of(version: int) -> int:
    return token_of_model(FIRST, version)


def kinds(found: Choice, wish: Wish, asked: str = FIRST, by: str = "") -> list[str]:
    return [kind for kind, _ in problems(found, by, wish, asked)]


def test_the_same_seed_breaks_the_same_things_and_everything_breaks_once_before_anything_twice() -> None:
    one, again, other = (list(itertools.islice(schedule(seed, 3, placed(3, 2)), 59)) for seed in (7, 7, 8))
    assert one == again != other
    places = [(fault.name, fault.model, fault.host) for fault in one]
    assert len(places) == 59
    assert places.count(("join joiner", SECOND, 0)) == 4
    assert len(set(places)) == 56
    assert {
        ("kill engine", FIRST, 2), ("freeze etcd", "", 1), ("cut link", "", 0), ("loss link", "", 2),
        ("configure publisher", FIRST, 0), ("configure publisher", SECOND, 2), ("restore etcd", "", 0),
        ("kill publisher", FIRST, 0), ("kill publisher", SECOND, 2), ("freeze instance", SECOND, 1),
    } <= {*places}  # fmt: skip
    assert not {("kill instance", SECOND, 0), ("kill engine", SECOND, 0)} & {*places}
    assert not any(f.overlaps for f in one if f.kind in ("configure", "restore"))
    # Joiners take turns on the hosts that lack their model.
    deck = list(itertools.islice(schedule(3, 3, placed(3, 1)), 53))
    assert sorted(f.host for f in deck if f.kind == "join") == [0, 0, 1, 1]
    assert not any(f.kind == "join" for f in itertools.islice(schedule(3, 3, placed(3, 3)), 63))


def test_an_answer_that_crosses_a_swap_is_right_where_its_tokens_are() -> None:
    crossed = answer(token_of(4), token_of(4), token_of(5), spans=SPANS)
    assert kinds(crossed, KEEP) == []
    assert kinds(answer(token_of(4), token_of(5), token_of(5), spans=SPANS), KEEP) == ["wrong"]
    part = Choice()  # what arrived of a broken stream
    part.take({"token_ids": [token_of(4)]}, 4)
    part.take({"token_ids": [token_of(4), token_of(5)], "weight_versions": SPANS}, 5)
    assert kinds(part, KEEP) == []
    part.take({"token_ids": [token_of(5)]}, 6)
    assert kinds(part, KEEP) == ["wrong"]


def made(**fields: Any) -> dict[str, Any]:
    return asdict(Attempt(1, 10.0, FIRST, "/generate", True, "keep", False, 10.0, ended=12.0)) | fields


def test_failures_are_typed_and_may_be_repeated_or_count() -> None:
    assert judge(made(), []) == "answered"
    assert judge(made(outcome="refused", code="upstream_died"), []) == "refused"
    assert judge(made(outcome="refused", code="something_new", retry_after=1.0), []) == "refused"
    assert judge(made(outcome="refused", code="something_new"), []) == "not retryable"
    assert judge(made(outcome="untyped", status=500), []) == "untyped"


def test_a_broken_connection_is_excused_by_its_own_gateway_at_that_time_alone() -> None:
    broken = made(outcome="cut", code="ReadError")
    assert judge(broken, [Window(1, 11.0, 11.5)]) == "gateway's"
    assert judge(broken, [Window(1, 2.0, 10.0 - AFTER_S)]) == "gateway's"
    assert judge(broken, [Window(0, 11.0, 11.5), Window(1, 12.5, 13.0), Window(1, 2.0, 9.0 - AFTER_S)]) == "cut"


def test_a_run_counts_what_is_against_the_promise_and_the_longest_silence() -> None:
    attempts = [
        made(tokens=8),
        made(ended=30.0, problems=[("mixed", "...")]),
        made(outcome="cut", code="ReadError", tokens=3),
        made(outcome="refused", code="no_instance", retry_after=1.0),
    ]
    found = verdict(attempts, [], 10.0, 33.0)
    assert (found.violations, len(found.examples), found.totals["tokens checked"]) == (2, 2, 11)
    assert (found.silence_s, found.longest_s) == (18.0, 20.0)


def test_a_request_that_takes_too_long_counts_whatever_was_broken() -> None:
    slow = made(outcome="cut", code="ReadTimeout", ended=11.0 + SILENT_S)
    found = verdict([slow, made(ended=9.0 + SILENT_S)], [Window(1, 11.0, 11.5)], 10.0, 33.0)
    assert (found.problems, found.violations) == ({"silent": 1}, 1)


def test_a_restore_breaks_every_gateway() -> None:
    restored = Broken(Fault("restore", "etcd", 0, 2.0, 0.0), 10.0, 12.0, healed=50.0)
    killed = Broken(Fault("kill", "etcd", 0, 0.0, 0.0), 10.0, 10.0, healed=50.0)
    assert windows([restored, killed], 90.0) == [Window(host, 10.0, 50.0) for host in range(3)]


def test_a_fleet_that_holds_more_and_more_is_found(tmp_path: Path) -> None:
    for name in (*(f"slot-aa.bb-{n:03d}" for n in range(SLOTS + 1)), "slot-aa-000", "layout-cc-lock"):
        (tmp_path / "arena0").mkdir(exist_ok=True)
        (tmp_path / "arena0" / name).touch()
    slots = pools(tmp_path)
    assert slots == {"arena0/slot-aa": 1, "arena0/slot-aa.bb": SLOTS + 1}
    assert pools(tmp_path, {f"{tmp_path}/arena0/slot-aa-000"}) == {"arena0/slot-aa.bb": SLOTS + 1}
    before = Held({"peer-0": 20, "gateway-0": 30}, {}, {FIRST: 9})
    grown = Held(
        {"peer-0": 20 * 2 + 65, "gateway-0": 124},
        slots,
        {FIRST: RECORDS, SECOND: RECORDS + 1},
        {FIRST: MOST_EDITIONS + 1},
    )
    complaints = held(before, grown)["complaints"]
    assert complaints == [
        "peer-0 holds 105 descriptors, 20 at the start",
        f"arena0/slot-aa.bb has {SLOTS + 1} slots",
        f"{SECOND} has {RECORDS + 1} records",
        f"{FIRST} has {MOST_EDITIONS + 1} editions",
    ]
    assert violations(Verdict(), {}, [], Wrongs(held=complaints)) == complaints
    assert held(before, before)["complaints"] == []


def test_a_process_that_outlives_its_run_is_found(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"], env={"HOTSWAP_ARENA": f"{tmp_path}/arena0"}) as process:
        try:
            until(lambda: survivors(tmp_path) == [f"sleep ({process.pid})"])
            assert survivors(tmp_path / "other") == []
        finally:
            process.kill()
    assert survivors(tmp_path) == []


QUESTION = Question(FIRST, "/generate", True, 3, (5, 6), KEEP)
TOKEN = 'event: token\ndata: {{"token_ids": [{}], "weight_version": 4}}\n\n'
ERROR = '{"error": {"message": "m", "type": "server_error", "code": "upstream_died"}}'
SPAN = '{"version": 4, "start": 0, "end": 3}'
DONE = f'event: done\ndata: {{"model": "alpha", "choices": [{{"weight_versions": [{SPAN}]}}]}}\n\n'


@pytest.mark.parametrize(
    ("status", "body", "outcome", "code"),
    [
        (200, 3 * TOKEN.format(token_of(4)) + DONE, "answered", ""),
        (200, TOKEN.format(token_of(4)), "cut", "Incomplete"),
        (200, TOKEN.format(token_of(4)) + f"event: error\ndata: {ERROR}\n\n", "refused", "upstream_died"),
        (502, ERROR, "refused", "upstream_died"),
        (500, "Internal Server Error", "untyped", ""),
        (500, '{"error": {"message": "m", "type": "t", "code": 500}}', "untyped", ""),
        (200, TOKEN.format(token_of(4)) + "event: token\ndata: {\n\n", "untyped", "JSONDecodeError"),
        (200, 'event: token\ndata: {"weight_version": 4}\n\n', "untyped", "KeyError"),
        (200, "event: token\ndata: 7\n\n", "untyped", "AttributeError"),
    ],
)
async def test_what_came_of_an_attempt(status: int, body: str, outcome: str, code: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
    async with httpx.AsyncClient(base_url="http://gateway", transport=transport) as http:
        found = await attempt(http, 0, QUESTION, 0.0)
    assert (found.outcome, found.code, found.problems) == (outcome, code, [])


def test_what_breaks_a_promise() -> None:
    assert violations(Verdict(), FINE, [], Wrongs()) == []
    assert violations(Verdict(), FINE, [], Wrongs(load=-9)) == ["the clients ended with status -9: see above"]
    said = violations(Verdict(), FINE, [], Wrongs(ended={"instance-1": 2}, attacks=["ids: ..."]))
    assert said == ["instance-1 ended by itself, 2 times", "1 hostile requests were not refused as they must be"]


def test_an_instance_that_does_not_run_what_is_committed_is_behind() -> None:
    active = ActiveRecord(5, 9, 4, "s", 0.0)
    follows = InstanceRecord("a", "http://a", "STAGING", active_version=5, active_epoch=9)
    late = InstanceRecord("b", "http://b", "SERVING", active_version=5, active_epoch=8)
    torn = InstanceRecord("c", "http://c", "TORN", active_version=5, active_epoch=9)
    now = Snapshot(0.0, active, None, {record.id: record for record in (follows, late, torn)})
    assert [said.split()[0] for said in now.behind(["a", "b", "c", "d"])] == ["b", "c", "d"]


def test_reasons_that_differ_in_names_are_one() -> None:
    past = {
        "x": PastSwapRecord("x", 6, "aborted", "rolling", 0.0, 9.0, reason="instance alpha-instance-2 is gone"),
        "y": PastSwapRecord("y", 7, "aborted", "rolling", 0.0, 9.0, reason="instance beta-joiner-0 is gone"),
    }
    assert swaps(past, since=5.0)["aborted"] == {"an instance is gone": 2}


def test_bad_versions_answer_what_they_like_and_good_ones_do_not() -> None:
    assert [badness(version) for version in (6, 7, 8, 15, 23, 31)] == [None, "nan", None, "inf", "overflow", "nan"]
    spans = [{"version": 23, "start": 0, "end": 1}, {"version": 22, "start": 1, "end": 2}]
    assert kinds(answer(0, token_of(22), spans=spans), KEEP) == []
    assert kinds(answer(0, 0, spans=spans), KEEP) == ["wrong"]
    spans[1]["version"] = 24
    assert kinds(answer(0, 0, spans=spans), KEEP) == []  # with the bad version's KV cache
    assert kinds(answer(0, 0, spans=spans), Wish("recompute")) == ["wrong"]
    assert kinds(answer(0, 0, spans=[{"version": 24, "start": 0, "end": 2}]), KEEP) == ["wrong", "wrong"]


def test_versions_that_are_not_finite_must_be_refused(tmp_path: Path) -> None:
    log = tmp_path / "publisher.log"
    log.write_text(
        'Traceback of a life before\n{"at": 1.0, "what": "nan rolling", "outcome": "refused"}\n'
        '{"at": 2.0, "what": "overflow together", "outcome": "done"}\n{"at": 3.0, "what": "sma'
    )
    assert let_in(pushes(log, 0.0)) == 0
    log.write_text('{"at": 4.0, "what": "inf together", "outcome": "done"}\n')
    assert let_in(pushes(log, 4.0)) == 1
    assert let_in(pushes(log, 5.0)) == let_in(pushes(log, 0.0, [(3.0, 4.5)])) == 0
    assert "1 versions that must be refused were swapped in" in violations(Verdict(), FINE, [], Wrongs(let_in=1))


def attack(**fields: Any) -> dict[str, Any]:
    return asdict(Attack("ids", "/generate", 1, 10.0, 12.0, "refused", 400, "400")) | fields


def test_what_counts_of_an_attack() -> None:
    assert complaints([attack(), attack(status=503, code="no_instance")], []) == []
    assert complaints([attack(kind="grammar", outcome="answered", status=200)], []) == []
    for bad in (
        attack(outcome="answered", status=200),
        attack(outcome="untyped", status=500),
        attack(status=500, code="internal_error"),
        attack(outcome="cut", status=0),
    ):
        assert len(complaints([bad], [])) == 1
    assert complaints([attack(outcome="cut", status=0)], [Window(1, 11.0, 11.5)]) == []


def test_bodies_of_attacks_are_what_they_say() -> None:
    chance = random.Random(3)
    for _ in range(50):
        route, body = bodies("ids", "m", 512, chance)
        ids = [*body.get("prompt_token_ids", ()), *body.get("allowed_token_ids", ())]
        ids += map(int, body.get("logit_bias", ()))
        ids += [i for p in [body.get("prompt", [])] for q in p for i in (q if isinstance(q, list) else [q])]
        assert any(not 0 <= i < 512 for i in ids), (route, body)


def test_what_a_server_says_to_an_attack() -> None:
    for status, body, outcome in (
        (200, b"{}", "answered"),
        (400, b'{"error": {"message": "m", "type": "t", "code": 400}}', "refused"),
        (500, b"Internal Server Error", "untyped"),
        (422, b'{"detail": []}', "untyped"),
    ):
        assert told(status, body)[0] == outcome


def test_a_token_of_one_model_under_the_label_of_the_other_is_wrong() -> None:
    """An alias is answered by one of its models."""
    spans = [{"version": 5, "start": 0, "end": 1}]
    theirs = answer(token_of_model(SECOND, 5), spans=spans)
    assert kinds(theirs, KEEP, SECOND) == []
    assert kinds(theirs, KEEP, FIRST) == ["wrong"]
    assert kinds(theirs, KEEP, FIRST, SECOND) == ["foreign"]
    assert kinds(theirs, KEEP, FIRST, FIRST) == ["wrong"]
    spans[0]["end"] = 2
    for model in (FIRST, SECOND):
        ours = answer(token_of_model(model, 5), token_of_model(model, 5), spans=spans)
        assert kinds(ours, KEEP, ALIAS) == []  # of a stream that broke, nobody has said whose it was
        assert kinds(ours, KEEP, ALIAS, model) == []
    assert kinds(answer(token_of(5), token_of_model(SECOND, 5), spans=spans), KEEP, ALIAS) == ["wrong"]
    assert kinds(Choice(), KEEP, ALIAS, "hosted") == ["foreign"]


def test_an_adapter_answers_as_its_base_does_and_may_be_gone() -> None:
    spans = [{"version": 5, "start": 0, "end": 1}]
    assert kinds(answer(token_of(5), spans=spans), KEEP, "style", "style") == []
    assert kinds(answer(token_of(6), spans=spans), KEEP, "style", "style") == ["wrong"]
    assert kinds(answer(token_of(5), spans=spans), KEEP, "tone", "tone") == ["wrong"]
    assert kinds(answer(token_of(5), spans=spans), KEEP, "style", SECOND)[0] == "foreign"
    gone = made(outcome="refused", status=404, code="model_not_found")
    assert judge(gone | {"model": "style"}, []) == "refused"
    assert judge(gone, []) == "not retryable"


def test_an_edition_answers_as_its_base_does_under_its_own_number_if_it_is_finite() -> None:
    spans = [{"version": 5, "start": 0, "end": 1}]
    right = answer(token_of(5), spans=spans)
    for asked in ("alpha-07", "alpha-07@12"):
        assert kinds(right, KEEP, asked, "alpha-07@12") == kinds(right, KEEP, asked) == []
        assert kinds(answer(token_of(6), spans=spans), KEEP, asked, "alpha-07@12") == ["wrong"]
        for by in ("alpha-07", "alpha-08@12", FIRST):
            assert kinds(right, KEEP, asked, by) == ["foreign"]
    assert kinds(right, KEEP, "alpha-07@12", "alpha-07@13") == ["foreign"]
    assert kinds(right, KEEP, FIRST, "alpha-07@12") == ["foreign"]
    assert kinds(answer(token_of_model(SECOND, 5), spans=spans), KEEP, "beta-01", "beta-01@4") == []
    assert kinds(right, KEEP, "alpha-07", "alpha-07@15") == ["flawed"]
    assert [flawed(number) for number in (7, 15, 23, 31)] == [True, True, False, True]


def test_an_edition_may_be_gone_and_a_flawed_one_alone_is_refused() -> None:
    refused = made(outcome="refused", status=422, code="not_finite", model="alpha-07")
    said = "{{'message': 'The adapter alpha-07@{} cannot be served: tensor q has NaN or infinite values"
    assert judge(refused | {"message": said.format(15)}, []) == "refused"
    assert judge(refused | {"message": said.format(16)}, []) == "not retryable"
    assert judge(refused | {"message": said.format(15), "code": "shape_mismatch"}, []) == "not retryable"
    assert judge(refused | {"status": 404, "code": "model_not_found"}, []) == "refused"
    found = verdict([refused | {"message": said.format(15)}, made(model="alpha-07@4", by="alpha-07@4")], [], 10.0, 33.0)
    counted = ("answers through an edition", "of these by its number", "refusals of an edition that is not finite")
    assert [found.totals[name] for name in counted] == [1, 1, 1]
    assert found.models[FIRST]["answers"] == 1


def test_the_questions_are_of_every_kind() -> None:
    chance = random.Random(2)
    asked = [drawn(chance, {FIRST: 5, SECOND: 6}, {"alpha-03": 11}) for _ in range(2000)]
    adapters = {*editions_of(FIRST)[:POPULAR], *editions_of(SECOND)[:POPULAR]}
    assert {FIRST, SECOND, ALIAS, "style", "tone", *adapters} < {q.model for q in asked}
    assert {split_name(q.model)[1] for q in asked if q.model.startswith("alpha-03@")} > {11}
    assert {q.wish.min_version for q in asked if q.model in editions_of(SECOND)} == {None, 6}
    beams = [q for q in asked if q.beams]
    assert beams
    assert all(q.body()["use_beam_search"] and not q.stream and q.route == "/v1/completions" for q in beams)


async def test_bodies_that_are_framed_badly_are_refused_or_ignored(tmp_path: Path) -> None:
    """By a real gateway. Without a version to serve, none is answered."""
    chance, codes = random.Random(4), Counter[str]()
    with running_gateway(tmp_path) as gateway, (tmp_path / "attacks").open("wb", buffering=0) as file:
        attacker = Attacker([gateway.url], 512, chance, file)
        for _ in range(60):
            made = await attacker._framed(0)
            assert complaints([asdict(made)], []) == [], made
            codes[made.message] += made.outcome == "refused"
    assert {name for name, count in codes.items() if count} >= {"a negative size", "a size beyond all", "no size"}


def test_a_publisher_brings_adapters_and_takes_them_away(tmp_path: Path) -> None:
    paths = [make_constant_checkpoint(tmp_path / f"say-{i}", token=100 + i) for i in range(4)]
    given, chance, url = publisher.read(FIRST, paths), random.Random(1), f"sqlite://{tmp_path}/store.db"
    with contextlib.closing(SyncStore(url)) as store:
        store.run(ensure_arena(store.store, tmp_path / "arena"))
        with Publisher(url, model=FIRST) as trainer:
            has, seen, forms = False, set[str](), []
            for epoch in range(1, 15):
                config = given.config if epoch == 1 else None
                if epoch == 7:
                    config = publisher.another(given.config, chance, misfit=False)
                version, brought = publisher.publish(trainer, given, large=False, config=config, chance=chance)
                (record,) = [v for v in trainer.versions() if v.version == version]
                has = brought == " with adapter" or (has and not brought)
                assert {part.name for part in record.parts} == ({"lora/style"} if has else set())
                active = ActiveRecord(version, epoch, None, "s", 0.0)
                store.put(Keys(FIRST).active, active.to_json())
                seen.add(brought)
                forms.append(record.form)
            misfit = publisher.another(given.config, chance, misfit=True)
            with refused("config_mismatch"):
                publisher.publish(trainer, given, large=False, config=misfit, chance=chance)
    assert [len(set(forms)), len(set(forms[:6])), len(set(forms[6:]))] == [2, 1, 1]
    assert seen == {"", " with adapter", " without adapter"}


def test_a_publisher_keeps_two_editions_of_each_adapter_and_withdraws_the_flawed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (f"{FIRST}-1", f"{FIRST}-2")
    monkeypatch.setattr(publisher, "editions_of", lambda model: names)
    monkeypatch.setattr(publisher, "one_of", lambda model, chance: chance.choice(names))
    paths = [make_constant_checkpoint(tmp_path / f"say-{i}", token=100 + i) for i in range(4)]
    given, chance, url = publisher.read(FIRST, paths), random.Random(1), f"sqlite://{tmp_path}/store.db"
    bad, seen = set[int](), set[int]()
    with contextlib.closing(SyncStore(url)) as store:
        store.run(ensure_arena(store.store, tmp_path / "arena"))
        for _ in range(3):  # lives, of which each goes on where the one before was killed
            with Publisher(url, model=FIRST) as trainer:
                for _ in range(6):
                    publisher.editions(trainer, given, chance)
                    found = trainer.editions()
                    assert bad.isdisjoint(edition.number for edition in found)
                    bad = {edition.number for edition in found if flawed(edition.number)}
                    seen |= bad
                    for name in names:
                        counted = [edition for edition in found if edition.name == name and edition.percent]
                        assert len(counted) <= KEPT
    assert seen


def test_answers_are_counted_by_the_model_that_wrote_them() -> None:
    attempts = [
        made(by=FIRST, tokens=8),
        made(model=ALIAS, by=FIRST, tokens=4, problems=[("wrong", "...")]),
        made(model=ALIAS, by=SECOND, tokens=2),
    ]
    found = verdict(attempts, [], 10.0, 33.0)
    assert (found.models[FIRST]["tokens checked"], found.models[FIRST]["wrong"]) == (12, 1)
    assert found.models[SECOND] == {"answers": 1, "tokens checked": 2, "crossed a swap": 0}
    assert found.totals["answers to a request for an alias"] == 2
    assert found.totals["of these by its second model"] == 1


def test_a_joiner_answers_no_older_version_and_loses_nothing_as_it_leaves() -> None:
    past = [
        PastSwapRecord("a", 5, "done", "together", 0.0, 11.0, committed_at=10.0, epoch=1),
        PastSwapRecord("b", 6, "done", "together", 0.0, 21.0, committed_at=20.0, epoch=2),
        PastSwapRecord("c", 5, "done", "together", 0.0, 91.0, committed_at=90.0, epoch=3),
        PastSwapRecord("d", 7, "aborted", "together", 0.0, 95.0),
    ]
    assert tenures(past) == [Tenure(5, 10.0, 21.0), Tenure(6, 20.0, 91.0), Tenure(5, 90.0, float("inf"))]
    stay = Stay(SECOND, 0, "j", 30.0, ready=40.0, told=60.0, gone=66.0)

    def said(**fields: Any) -> list[str]:
        request = replace(Served("j", 50.0, 51.0, 6, 200, ""), **fields)
        return joiner.complaints([stay], [request], {SECOND: tenures(past)}, [(100.0, 120.0)])

    assert said() == []
    assert said(first=8) == []  # its swap had not ended when the run did
    assert "older version" in said(first=5)[0]
    assert said(began=22.0, first=5) == []
    assert "lost" in said(ended=62.0, status=502, code="upstream_died")[0]
    assert said(ended=62.0, status=409, code="version_unavailable") == []
    assert said(ended=50.5, status=502, code="upstream_died") == []  # for others to judge: nobody was leaving
    assert "not there" in said(began=10.0, ended=12.0)[0]
    assert joiner.complaints([replace(stay, problem="...")], [], {}, []) == ["j: ..."]
    assert joiner.complaints([stay], [Served("j", 99.0, 101.0, 5, 502, "upstream_died")], {}, [(100.0, 120.0)]) == []
    assert violations(Verdict(), {}, [], Wrongs(joiners=["j: ..."])) == ["j: ..."]


@pytest.mark.parametrize(("part", "own_ends"), [("", 1), ("sleep", 0)])
def test_what_ends_because_a_part_of_it_was_frozen_has_not_ended_by_itself(
    tmp_path: Path, part: str, own_ends: int
) -> None:
    words = ["sh", "-c", "sleep 600 & wait"]
    here: Any = SimpleNamespace(run=lambda _, argv, **popen: subprocess.Popen(argv, **popen))  # a host that is this one
    process = Supervised("p", here, 0, words, {"PATH": os.environ["PATH"]}, tmp_path / "log")
    try:
        pid = process._process.pid
        until(lambda: [child.name() for child in psutil.Process(pid).children()] == ["sleep"])
        process.freeze(part)
        assert not process.runs
        process.thaw()
        os.kill(pid, signal.SIGTERM)
        until(lambda: process.returncode is not None)
        process.tend()
        assert process.own_ends == own_ends
    finally:
        process.stop()


def test_what_ends_of_a_part_that_was_killed_while_it_was_frozen_has_not_ended_by_itself(tmp_path: Path) -> None:
    words = ["sh", "-c", "sleep 600; exit 1"]
    here: Any = SimpleNamespace(run=lambda _, argv, **popen: subprocess.Popen(argv, **popen))
    process = Supervised("p", here, 0, words, {"PATH": os.environ["PATH"]}, tmp_path / "log")
    try:
        pid = process._process.pid
        until(lambda: [child.name() for child in psutil.Process(pid).children()] == ["sleep"])
        assert process.descriptors >= 6
        process.freeze()
        process.kill("sleep")
        process.thaw()
        until(lambda: process.returncode is not None)
        process.tend()
        assert (process.own_ends, process.descriptors) == (0, 0)
    finally:
        process.stop()


def joins() -> tuple[Joiner, Mock]:
    """A joiner, and what stands for its process."""
    process = Mock(returncode=None)
    fault = Fault("join", "joiner", 0, 0.0, 0.0, model=SECOND)
    return Joiner(SimpleNamespace(join=lambda *_: process), fault), process  # type: ignore[arg-type]


def test_a_joiner_is_told_to_leave_once_it_serves_what_is_committed() -> None:
    active = ActiveRecord(5, 9, 4, "s", 0.0)
    record = InstanceRecord("beta-joiner-0", "http://j", "SERVING", active_version=5, active_epoch=8)
    one, process = joins()
    one.tend(Snapshot(0.0, active, None, {record.id: record}))
    assert one.stay.ready is None
    current = replace(record, active_epoch=9)
    one.tend(Snapshot(0.0, active, None, {record.id: current}))
    one.tend(Snapshot(0.0, active, None, {record.id: current}))
    assert one.stay.ready is not None
    assert process.terminate.called
    told = one.stay.told or 0.0
    one.tend(Snapshot(0.0, active, None, {record.id: replace(current, state="DRAINING", leaves_at=told + DRAIN_S)}))
    process.returncode = 0
    one.tend(Snapshot(0.0, active, None, {}))
    assert (one.stay.leaves_at, one.stay.problem, process.stop.called) == (told + DRAIN_S, "", True)


def test_a_joiner_that_ends_by_itself_or_badly_is_complained_of() -> None:
    one, process = joins()
    process.returncode = 1
    one.tend(Snapshot(0.0))
    assert one.stay.problem == "ended by itself with status 1"
    assert one.stay.gone is not None
    other, process = joins()
    other.stay.ready = other.stay.told = time.time()
    other.stay.leaves_at = other.stay.told + 60.0
    process.returncode = 0
    other.tend(Snapshot(0.0))
    assert other.stay.problem == "announced that it leaves 60.0 s after SIGTERM"
    third, process = joins()
    third.stay.ready, third.stay.told = 1.0, 2.0
    third.tend(Snapshot(0.0))
    assert "still there" in third.stay.problem
    assert process.stop.called
