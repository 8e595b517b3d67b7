"""Arbitrary input for every parser of the gateway alone: a result that keeps its promises, or its typed error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from server.errors import ConfigError, HttpError
from server.gateway import GatewayConfig, Limits, terms
from server.gateway.access.costs import bounded, reckon
from server.gateway.access.key_sources import load_keys
from server.gateway.fleet.instance import parse
from server.gateway.models.probes import load_probes
from server.gateway.observe import context
from server.gateway.routes import admin_names, find, public_names
from server.gateway.wire import bodies
from server.gateway.wire.bodies import check_object
from server.gateway.wire.head import read_head, upstream_head

FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LIMITS = Limits(max_body=1000, max_head=2000, max_headers=20)


def check(error: HttpError | ConfigError, names: Path | None = None) -> None:
    """It is the client's fault, or the file's, and it says so."""
    assert str(error)
    if isinstance(error, HttpError):
        assert 400 <= error.status < 500
    assert names is None or str(names) in str(error)


# what llhttp lets through as a header: no line breaks, no NUL
token = st.text("abcdefghijklmnopqrstuvwxyz-_0123456789", min_size=1, max_size=20).map(str.encode)
OTHERS = (
    b"host content-length transfer-encoding connection expect authorization x-api-key x-request-id x-session-id "
    b"api-key traceparent tracestate content-type user-agent"
)
known = st.sampled_from([*sorted(terms.HEADERS), *OTHERS.split()])
value = st.binary(max_size=40).map(lambda raw: raw.translate(None, b"\r\n\0")) | st.sampled_from(
    [b"0", b"1", b"-1", b"1e3", b"1e999", b"keep", b"finish", b"chunked", b"close", b"Basic Og==", b"Basic \xff"]
)


@FUZZ
@given(st.lists(st.tuples(known | token, value), max_size=12))
@example([(b"host", b"t"), (b"authorization", b"Basic " + b"=" * 30)])
@example([(b"host", b"t"), (b"x-hotswap-finish-s", b"1e-300"), (b"x-hotswap-policy", b"finish")])
def test_heads(headers: list[tuple[bytes, bytes]]) -> None:
    assume(all(v.isdigit() and len(v) < 18 for n, v in headers if n == b"content-length"))  # llhttp has seen to it
    try:
        head = read_head(headers, "1.1", LIMITS, terms.HEADERS)
        asked, _ = terms.read(head.asked or {}, b"", in_body=False)
    except HttpError as error:
        check(error)
        return
    (target,) = find(b"/generate")
    raw = upstream_head(target.route.method, target.upstream, b"host: 127.0.0.1:1\r\n", head, 0, asked.lines)
    assert raw.endswith(b"\r\n\r\n")
    assert raw.count(b"\r\n\r\n") == 1
    lines = raw.split(b"\r\n")[1:-2]
    names = [line.partition(b":")[0] for line in lines]
    assert not {b"authorization", b"x-api-key", b"api-key", b"cookie", b"connection", b"transfer-encoding"} & set(names)
    assert names.count(b"content-length") == names.count(b"host") == 1


fields = st.dictionaries(
    st.sampled_from(
        ["policy", "finish_s", "version", "min_version", "wait_s", "priority", "deadline_s", "failover", "x"]
    ),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["keep", "same"]),
    max_size=4,
)


@FUZZ
@given(
    fields | st.integers() | st.lists(st.integers()), st.dictionaries(st.text(max_size=5), st.integers(), max_size=3)
)
def test_wishes_in_bodies(wish: object, others: dict[str, int]) -> None:
    body = msgspec.json.encode({**others, "hotswap": wish})
    try:
        asked, left = terms.read({}, body, in_body=True)
    except HttpError as error:
        check(error)
        return
    assert msgspec.json.decode(left) == {k: v for k, v in others.items() if k != "hotswap"}
    assert re.fullmatch(rb"(x-hotswap-[a-z-]+: [\w.+-]+\r\n)*", asked.lines)
    assert asked.deadline_s > 0
    assert not math.isnan(asked.deadline_s)


@FUZZ
@given(st.binary(max_size=60) | st.text(max_size=30).map(lambda t: b'{"a":"' + t.encode("utf-8", "replace") + b'"}'))
def test_bodies(body: bytes) -> None:
    try:
        check_object(body)
    except HttpError as error:
        check(error)
    else:
        assert isinstance(msgspec.json.decode(body), dict)
        body.decode()


number = (
    st.sampled_from([b"true", b"null", b'"5"', b"[]", b"{}"])
    | st.sampled_from(b"-1 -0 1.0 1e999 1e999999 -1e-999999 1E+400".split())
    | st.sampled_from([b"9" * 400, b"9" * 4000, b"-" + b"9" * 4000, b"0." + b"1" * 4000])
    | st.integers().map(lambda n: b"%d" % n)
)


@FUZZ
@given(number)
def test_versions_in_bodies(value: bytes) -> None:
    try:
        asked, _ = terms.read({}, b'{"hotswap": {"version": %b}}' % value, in_body=True)
        assert asked.need is None or asked.need.version is not None
    except HttpError as error:
        check(error)


@FUZZ
@given(
    st.sampled_from(["max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "prompt"]),
    number,
    st.integers(1, 10**6),
)
def test_bounds_on_answers(name: str, value: bytes, bound: int) -> None:
    """With a key that bounds its answers: what goes on stays JSON, and asks for no more."""
    body = b'{"%b": %b}' % (name.encode(), value)
    asked = check_object(body)
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"):
        try:
            assert reckon(asked, route, len(body)).output > 0
            kept = bounded(asked, route, bound, body)
        except HttpError as error:
            check(error)
            continue
        assert isinstance(json.loads(kept), dict)


@FUZZ
@given(st.binary(max_size=80) | st.text("/v1.%2efcompltinsgra;?#\\ :", max_size=40).map(str.encode))
def test_request_targets(url: bytes) -> None:
    for target in find(url):
        assert target.route.name in {*public_names(), *admin_names()}
        path = target.upstream.partition(b"?")[0]
        assert re.fullmatch(rb"/[A-Za-z0-9_/-]+", path)
        assert b".." not in path


pieces = st.sampled_from(
    [b'"usage":{', b'"hotswap_usage": {', b'"prompt_tokens":', b'"completion_tokens": 7', b"1", b"}", b"{", b"]", b"[",
     b'"', b"\\", b",", b"\n\n", b"data: ", b"[DONE]", b'"weight_version":', b"99999999999999999999", b'"x":"usage\\""']
)  # fmt: skip


@FUZZ
@given(st.lists(pieces | st.binary(max_size=8), max_size=30).map(b"".join), st.integers(0, 10**9))
def test_tails_of_answers(tail: bytes, size: int) -> None:
    found = bodies.read_usage(tail)
    assert found is None or (found.prompt_tokens >= 0 and found.completion_tokens >= 0)
    guess = bodies.estimate_usage(tail, size)
    assert guess is None or (guess.completion_tokens >= 0 and not guess.exact)
    version = bodies.last_version(tail)
    assert version is None or version >= 0


hexes = st.text("0123456789abcdefABCDEFg-", max_size=60)
trace_lines = st.tuples(st.sampled_from(["traceparent", "tracestate", "user-agent"]), hexes | st.text(max_size=20))


@FUZZ
@given(st.lists(trace_lines, max_size=4), st.floats(0, 1))
@example([("traceparent", "00-" + "0" * 32 + "-" + "1" * 16 + "-01")], 1.0)
@example([("traceparent", "ff-" + "1" * 32 + "-" + "1" * 16 + "-01")], 1.0)
@example([("traceparent", "00-" + "1" * 32 + "-" + "1" * 16 + "-01")] * 2, 1.0)
def test_trace_contexts(headers: list[tuple[str, str]], ratio: float) -> None:
    raw = [(n.encode(), v.encode("utf-8", "replace").translate(None, b"\r\n\0")) for n, v in headers]
    forward = b"".join(b"%b: %b\r\n" % pair for pair in raw)
    begun, lines = context.begin(forward, ratio)
    assert len(re.findall(rb"^traceparent: ", lines, re.MULTILINE)) == 1
    assert re.search(rb"^traceparent: 00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[01]\r\n", lines, re.MULTILINE)
    assert 0 < begun.trace_id < 2**128
    assert lines.count(b"\n") <= forward.count(b"\n") + 1


@FUZZ
@given(st.binary(max_size=200) | st.lists(pieces, max_size=5).map(b"".join))
def test_pages_of_metrics(page: bytes) -> None:
    parse(page)
    parse(b'vllm:num_requests_running{engine="0"} ' + page)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "input"
    os.close(os.open(path, os.O_CREAT, 0o600))
    return path


lines = st.sampled_from(
    [b"sha256:", b"a" * 64, b" name", b" --collect", b"\n", b"# x", b"\r\n", b"\xff", b"0123456789abcdef", b"\0"]
)


@FUZZ
@given(st.binary(max_size=100) | st.lists(lines, max_size=8).map(b"".join))
def test_key_files(file: Path, text: bytes) -> None:
    file.write_bytes(text)
    try:
        load_keys(
            GatewayConfig("sqlite:///nowhere.db", "toy", admin_key="an-admin-key-of-the-tests", api_key_file=file)
        )
    except ConfigError as error:
        check(error, names=file)


probes = st.sampled_from(
    [b"- ", b"prompt: ", b"expect: ", b"{regex: '('}", b"[1, 2]", b"\n", b"  ", b"max_tokens: 9", b"name: x", b"*a",
     b"&a ", b"!!python/object:os.system", b"<<: ", b'{"prompt": "x"}', b"\t", b"1", b"min_mean_logprob: .nan"]
)  # fmt: skip


@FUZZ
@given(st.binary(max_size=60) | st.lists(probes, max_size=8).map(b"".join), st.sampled_from([".yaml", ".jsonl"]))
@example(b"- [prompt: 1", ".yaml")
@example(b"- prompt: " + b"[" * 3000, ".yaml")
@example(b'{"prompt": ' + b"[" * 3000, ".jsonl")
def test_probe_files(file: Path, text: bytes, suffix: str) -> None:
    path = file.with_suffix(suffix)
    path.write_bytes(text)
    try:
        found = load_probes(path)
    except ConfigError as error:
        check(error, names=path)
    else:
        assert all(probe.prompt for probe in found)


# long texts in bodies, which are not looked into


@pytest.fixture
def short_texts() -> Iterator[None]:
    """Texts are long that are longer than the name of any field."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "LONG", 24)
        yield


TEXT = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)
pieces = st.sampled_from([b'"', b"\\", b'\\"', b"\\\\", b"{", b"}", b":", b",", b"a" * 20, b"\xff", b"\n", b" ", b"1"])


def left_out(body: bytes) -> bytes:
    """The result of `without_texts`, without a bound on how long it looks."""
    return TEXT.sub(lambda m: b'"%b"' % (b"." * 44 + b"%020d" % len(m[1]) if len(m[1]) > 24 else m[1]), body)


@FUZZ
@given(st.lists(pieces, max_size=30).map(b"".join))
@example(b'{"a":"' + b"\\\\" * 40 + b'","b":"\\\\\\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}')
@example(b'{"a":"unfinished')
@example(b'{"unfinished\\')
@pytest.mark.usefixtures("short_texts")
def test_long_texts_are_left_out(body: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_FIRST_STEPS", 1000)
        patch.setattr(bodies, "_MOST_ESCAPES", 1000)
        without = bodies.without_texts(body)
    assert without == left_out(body)
    assert bodies.size_of(without) == len(body)


def looked_into(body: bytes) -> bodies.Fields:
    """The fields of a body that has no long texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "LONG", len(body))
        return check_object(body)


def shape(value: object) -> object:
    """The part of a value that is the same whether texts were left out or not."""
    if isinstance(value, dict):
        return [shape(v) for v in value.values()]
    if isinstance(value, list):
        return [shape(v) for v in value]
    return "text" if isinstance(value, str) else value


def sent(fields: bodies.Fields) -> dict[str, object]:
    told = {name: getattr(fields, name) for name in fields.__struct_fields__}
    return {name: shape(msgspec.json.decode(raw)) for name, raw in told.items() if raw is not msgspec.UNSET}


short = st.text(max_size=3)
leaves = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=60) | st.text('"\\/\n', max_size=60)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(short, inner, max_size=3))
FEWER = settings(FUZZ, max_examples=100)  # they are slow to make
requests = st.dictionaries(st.sampled_from(["prompt", "model", "n", "max_tokens", "hotswap", "messages", "x"]), values)


@FEWER
@given(requests, st.booleans(), st.integers(0, 40), st.integers(2, 5))
@pytest.mark.usefixtures("short_texts")
def test_a_body_is_the_same_without_its_long_texts(value: dict[str, object], plain: bool, steps: int, row: int) -> None:
    """However early the search for them is given up."""
    body = json.dumps(value, ensure_ascii=plain).encode(errors="surrogatepass")
    assume(b"\xed" not in body)  # half of a pair of surrogates is no UTF-8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_FIRST_STEPS", steps)
        patch.setattr(bodies, "_MOST_ESCAPES", row)
        assert sent(check_object(body)) == sent(looked_into(body))


@FEWER
@given(requests, st.integers(0, 400), st.sampled_from([b"", b'"', b"\\", b"{", b"]", b",", b"\n", b"\x00", b"\xff"]))
@pytest.mark.usefixtures("short_texts")
def test_faults_outside_of_long_texts_are_found(value: dict[str, object], at: int, change: bytes) -> None:
    body = json.dumps(value, ensure_ascii=True).encode()
    assume(at < len(body))
    body = body[:at] + change + body[at + 1 :]
    try:
        looked_into(left_out(body))
    except HttpError:
        with pytest.raises(HttpError):
            check_object(body)
        return
    with contextlib.suppress(HttpError):  # it gave up early, and the fault is in a text it has not come to
        check_object(body)


@pytest.mark.parametrize("of", [b"\\", b'\\"', b'"', b'"a"', b"\\\\\\", b'"' + b"a" * 2100 + b'" ' + b'"' * 64])
def test_no_body_takes_long(of: bytes) -> None:
    """A step for each of its quotes, or for each of the backslashes before them, would take a second."""
    body = b'{"a":' + of * (16 * 2**20 // len(of))
    seen = 0

    class Counting(bytes):
        def find(self, *args: object) -> int:  # type: ignore[override]
            nonlocal seen
            seen += 1
            return super().find(*args)  # type: ignore[arg-type]

    bodies.without_texts(Counting(body))
    assert seen < 2 * (32 + len(body) // 256)
