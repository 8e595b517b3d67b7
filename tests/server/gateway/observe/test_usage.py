"""Token counts read from the end of an answer, whatever the route and however the answer is cut into pieces."""

from __future__ import annotations

from types import SimpleNamespace as Output
from typing import Any

import orjson
import pytest

from server.gateway.wire import bodies
from server.gateway.wire.bodies import Usage
from server.gateway.wire.relay import ResponseRelay
from server.instance.provenance import Trace, annotate, annotate_chunk

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PLAIN = {"prompt_tokens": 5, "total_tokens": 17, "completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 3}}
ANTHROPIC = {"input_tokens": 5, "output_tokens": 12, "cache_read_input_tokens": 1}
DONE = b"data: [DONE]\n\n"


def relay_of(*pieces: bytes, head: bytes = SSE, complete: bool = True) -> ResponseRelay:
    relay = ResponseRelay(b"r", http10=False, keep_alive=True)
    relay.feed(head)
    for piece in pieces:
        relay.feed(b"%x\r\n%b\r\n" % (len(piece), piece))
    if complete:
        relay.feed(b"0\r\n\r\n")
    return relay


def whole(body: Any, status: bytes = b"200 OK") -> ResponseRelay:
    data = orjson.dumps(body)
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(data))
    relay = ResponseRelay(b"r", http10=False, keep_alive=True)
    for at in range(0, len(head + data), 1000):
        relay.feed((head + data)[at : at + 1000])
    return relay


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def trace(*choices: int, prompts: int = 1) -> Trace:
    """The instance's trace when choices of so many tokens, spread over `prompts` prompts of 5, have ended."""
    known = Trace()
    per_prompt = len(choices) // prompts
    for p in range(prompts):
        base = known.open(per_prompt)
        outputs = [
            Output(index=i, weight_versions=[Output(version="7", start=0, end=n)])
            for i, n in enumerate(choices[p * per_prompt : (p + 1) * per_prompt])
        ]
        known.record(base, outputs, 5)
    return known


def chunk(index: int = 0, finish: str | None = None, text: str = "a", **more: Any) -> bytes:
    return event(
        {"id": "c", "choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}], **more}
    )


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"message": {"content": "x" * 9000}}], "usage": PLAIN},
        {"object": "response", "output": [], "usage": ANTHROPIC, "user": None},
        {"type": "message", "content": [], "usage": ANTHROPIC},
        {"id": "gen", "choices": [{"token_ids": [1] * 9000}], "usage": PLAIN},
        {"object": "list", "data": [{"embedding": [0.5] * 3000}], "usage": PLAIN},
    ],
)
def test_whole_answers(body: dict[str, Any]) -> None:
    expected = Usage(5, 12)
    assert whole(body).usage() == expected
    annotate(body, trace(12), last=True)  # whatever comes after the counts
    assert whole(body).usage() == expected
    body["prompt_token_ids"] = [7] * 9000
    annotate(body, trace(12), last=True)
    assert whole(body).usage() == expected


@pytest.mark.parametrize(
    "ending",
    [
        lambda t: [annotate_chunk(chunk(finish="stop") + DONE, t)],
        lambda t: [annotate_chunk(chunk(finish="stop"), t), event({"choices": [], "usage": PLAIN}), DONE],
        lambda t: [annotate_chunk(chunk(finish="stop", usage=PLAIN), t), event({"choices": [], "usage": PLAIN}), DONE],
        lambda t: [annotate_chunk(event({"type": "response.completed", "response": {"usage": ANTHROPIC}}), t)],
        lambda t: [
            annotate_chunk(event({"type": "message_delta", "delta": {}, "usage": ANTHROPIC}), t),
            b"event: message_stop\n" + event({"type": "message_stop"}),
        ],
        lambda t: [b"event: done\n" + event({"choices": [{"weight_versions": []}], "usage": PLAIN})],
    ],
)
@pytest.mark.parametrize("before", [0, 1, 500])
def test_streams(ending: Any, before: int) -> None:
    pieces = [*([chunk()] * before), *ending(trace(12))]
    body = b"".join(pieces)
    assert relay_of(*pieces).usage() == Usage(5, 12)
    assert relay_of(body).usage() == Usage(5, 12)
    assert relay_of(*(body[i : i + 7] for i in range(0, len(body), 7))).usage() == Usage(5, 12)
    assert relay_of(*pieces, complete=False).usage() == Usage(5, 12)  # the client left once it had what it wanted


def test_every_choice_counts_and_every_prompt_once() -> None:
    known = trace(3, 4, 5, 6, prompts=2)
    early = [annotate_chunk(chunk(index, "stop"), known) for index in (1, 2, 0)]
    pieces = [*early, *([chunk(3, text="b" * 50)] * 200), annotate_chunk(chunk(3, "length"), known), DONE]
    assert relay_of(*pieces).usage() == Usage(10, 18)


def test_a_cut_stream_is_estimated_from_its_events() -> None:
    cut = relay_of(*([chunk(weight_version=7)] * 1000), complete=False)
    assert cut.usage() == Usage(0, 1000, exact=False)
    both = relay_of(chunk() * 3, chunk()[:20], complete=False).usage()
    assert both == Usage(0, 3, exact=False)


def test_counts_of_the_stream_so_far_are_not_taken_for_its_end() -> None:
    started = event({"type": "message_start", "usage": {"input_tokens": 5, "output_tokens": 0}})
    cut = relay_of(started, *([chunk()] * 20), complete=False).usage()
    assert cut is not None
    assert not cut.exact
    assert cut.completion_tokens > 15


FORGED = {"prompt_tokens": 0, "completion_tokens": 0}
VLLM = {"prompt_tokens": 5, "total_tokens": 17, "completion_tokens": 12, "prompt_tokens_details": None}  # read in short


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [], "usage": VLLM, "prompt_logprobs": None, "weight_version": 3},
        {"usage": VLLM, "metadata": {"usage": VLLM | {"completion_tokens": 0}}},
        {"usage": PLAIN, "tools": [{"parameters": {"usage": FORGED}}]},
        {"usage": PLAIN, "metadata": {"usage": FORGED}},
        {"usage": PLAIN, "metadata": {'"usage': FORGED, '"usage":{"prompt_tokens":0}': FORGED}},
        {"usage": PLAIN, "text": '"usage":{"prompt_tokens":0,"completion_tokens":0}}'},
        {"usage": PLAIN, "text": '}],"usage":{"prompt_tokens":0}}\\'},
        {"usage": PLAIN, "prompt": {"variables": [[{"usage": FORGED}]], "usage": "usage"}},
    ],
)
def test_what_a_client_had_echoed_is_not_counted(body: dict[str, Any]) -> None:
    assert whole(body).usage() == Usage(5, 12)


def test_what_reports_nothing_counts_nothing() -> None:
    assert whole({"data": []}).usage() is None
    assert whole({"metadata": {"usage": VLLM}}).usage() is None
    assert whole({"metadata": {"usage": VLLM, "x": 1}, "y": 2}).usage() is None
    assert whole({"text": '"usage":' + orjson.dumps(VLLM).decode() + "}"}).usage() is None
    assert whole({"usage": None}).usage() is None
    assert whole({"usage": {}, "error": {"message": "no"}}, b"400 Bad Request").usage() is None
    assert whole({"error": {"message": "usage"}, "usage": PLAIN}, b"400 Bad Request").usage() is None
    assert ResponseRelay(b"r", http10=False, keep_alive=True).usage() is None


def test_little_is_kept_of_a_long_answer() -> None:
    piece = chunk()
    relay = relay_of(*([piece] * 1000), b"x" * 100_000, *([piece] * 500))
    assert bodies.KEPT <= len(relay.tail()) <= 2 * bodies.KEPT + len(piece)
    assert relay.tail().endswith(piece * 20)


def test_the_last_version_is_the_last_one_named() -> None:
    assert bodies.last_version(chunk(weight_version=6) + chunk(weight_version=7) + DONE) == 7
    assert bodies.last_version(b'{"text":"\\"weight_version\\":9"}') is None
    assert bodies.last_version(b'{"weight_version":null}') is None
