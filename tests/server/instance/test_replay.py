"""The instance's side of going on with a stream: which streams can be, what is stamped, and what is not told again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
import pytest

from server.instance.inflight import Inflight
from server.instance.middleware import ProvenanceMiddleware
from server.instance.provenance import traced
from server.instance.replay import Replaying, extensible, reproducible
from server.resume import RESUMABLE, RESUME, RESUMED, Resume, Span
from tests.server.instance.asgi import head, part, sent_by
from weightsync.vllm_engine.engine_core import requests as engine_replay

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"


def params(**changed: Any) -> SimpleNamespace:
    """Those of a stream that can be continued."""
    plain = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "bad_words": None, "extra_args": None, "n": 1}
    none = ("structured_outputs", "thinking_token_budget", "repetition_detection", "prompt_logprobs")
    more = ("prompt_logprob_token_ids", "logprob_token_ids", "trace_decode_token_ids")
    kind = SimpleNamespace(name="DELTA")
    return SimpleNamespace(**{**plain, **dict.fromkeys((*none, *more)), "output_kind": kind, **changed})


@pytest.mark.parametrize(
    ("changed", "can"),
    [
        ({}, True),
        ({"extra_args": {}}, True),
        ({"n": 2}, False),
        ({"output_kind": SimpleNamespace(name="FINAL_ONLY")}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"bad_words": ["x"]}, False),
        ({"structured_outputs": object()}, False),
        ({"thinking_token_budget": 0}, False),
        ({"prompt_logprobs": 0}, False),
        ({"extra_args": {"kv_transfer_params": {}}}, False),
    ],
)
def test_what_a_replay_reproduces(changed: dict[str, Any], can: bool) -> None:
    assert reproducible(params(**changed)) is can


@pytest.mark.parametrize(("wanted", "prompts", "can"), [(True, 1, True), (False, 1, False), (True, 2, False)])
def test_one_engine_request_wanted_by_the_gateway(wanted: bool, prompts: int, can: bool) -> None:
    replaying = Replaying(wanted=wanted)
    for calls in range(1, prompts + 1):
        replaying.begins(calls, "a prompt", params())
    assert replaying.resumable is can


@pytest.mark.parametrize(
    ("prompt", "can"),
    [
        ({"prompt": "text"}, True),
        ({"prompt_token_ids": [1]}, True),
        ({"type": "token", "prompt_token_ids": [1]}, True),
        ({"type": "multimodal", "prompt_token_ids": [1]}, True),
        ({"type": "embeds", "prompt_embeds": object()}, False),
        ({"type": "multimodal", "prompt_token_ids": [1], "prompt_embeds": object()}, False),
        ({"type": "enc_dec"}, False),
    ],
)
def test_prompts_that_tokens_can_be_put_behind(prompt: Any, can: bool) -> None:
    assert extensible(prompt) is can


@dataclass
class Output:
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | None = None
    index: int = 0
    logprobs: None = None
    weight_versions: list[Any] = field(default_factory=list)
    hotswap_prompt: tuple[Any, ...] = ()
    hotswap_replay: Any = None


class Engine:
    """Answers token `n` with the text `<n>`, three to a prompt, as the real one with requests.py does."""

    def __init__(self, version: int = 3) -> None:
        self.inflight = Inflight()
        self.inflight.active = version
        self.version = version
        self.asked: list[Any] = []
        self.generate = traced(self._generate, self.inflight)

    async def _generate(self, prompt: Any, sampling: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        self.asked.append(sampling.extra_args["hotswap"])
        replay = engine_replay.replay_of(SimpleNamespace(sampling_params=sampling))
        done = replay.get("tokens", [])
        spans = [(str(v), s) for v, s in replay.get("spans", [])]
        told = Output("".join(f"<{t}>" for t in done), done)
        told.hotswap_prompt = tuple((end, str(v)) for end, v in replay.get("prompt", ()))
        told.weight_versions = self._spans(spans, len(done))
        for n in range(len(done), 3):
            output = Output(f"<{n}>", [n], "length" if n == 2 else None)
            spans = spans if spans and spans[-1][0] == str(self.version) else [*spans, (str(self.version), n)]
            output.weight_versions = self._spans(spans, n + 1)
            output.hotswap_prompt = told.hotswap_prompt
            output.hotswap_replay, done = (told, []) if done else (None, done)
            yield SimpleNamespace(outputs=[output], prompt_token_ids=[5, 6], finished=n == 2)
        if len(replay.get("tokens", [])) == 3:  # what is made for the sake of the form
            output = Output("?", [99], hotswap_replay=told)
            yield SimpleNamespace(outputs=[output], prompt_token_ids=[5, 6], finished=False)

    @staticmethod
    def _spans(starts: list[tuple[str, int]], total: int) -> list[Any]:
        ends = [*(s for _, s in starts[1:]), total][: len(starts)]
        return [SimpleNamespace(version=v, start=s, end=e) for (v, s), e in zip(starts, ends, strict=True)]


def app(engine: Engine, *, usage: bool = True, created: int = 1) -> Any:
    """vLLM's chat route in short."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["more_body"]:
            body += message["body"]
        body += message["body"]
        assert orjson.loads(body) == {"prompt": "as it came"}
        await send(head())

        async def event(choices: list[Any], **more: Any) -> None:
            data = orjson.dumps({"id": f"chat-{created}", "created": created, "choices": choices, **more})
            await send(part(b"data: " + data + b"\n\n"))

        count, opened = 0, False
        async for output in engine.generate("p", params(), "r"):
            if not opened:
                await event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
                opened = True
            (o,) = output.outputs
            count += len(o.token_ids)
            await event([{"index": 0, "delta": {"content": o.text}, "finish_reason": o.finish_reason}])
        if usage:
            await event([], usage={"prompt_tokens": 2, "completion_tokens": count})
        await send(part(DONE))
        await send(part(more=False))

    return answer


async def ask(
    engine: Engine, resume: Resume | None = None, *, pieces: int = 1, created: int = 1, **more: Any
) -> tuple[dict[str, Any], list[bytes]]:
    """Head and events of an answer; the body of the request comes in so many pieces."""
    prefix = msgspec.json.encode(resume) if resume is not None else b""
    headers = [(RESUMABLE, b"1"), *([(RESUME, b"%d" % len(prefix))] if resume is not None else [])]
    body = prefix + b'{"prompt": "as it came"}'
    size = -(-len(body) // pieces)
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    answering = ProvenanceMiddleware(app(engine, created=created), lambda: 3, **more)
    start, *rest = await sent_by(answering, CHAT, *parts, headers=headers)
    data = b"".join(m["body"] for m in rest)
    return {"status": start["status"], **{k.decode(): v for k, v in start["headers"]}}, data.split(b"\n\n")[:-1]


def told(events: list[bytes]) -> list[dict[str, Any]]:
    return [orjson.loads(e.removeprefix(b"data: ")) for e in events if e != DONE.strip()]


async def test_every_event_carries_the_ids_of_its_tokens() -> None:
    head, events = await ask(Engine())
    assert head[RESUMABLE.decode()] == b"1"
    assert RESUMED.decode() not in head
    opening, first, second, last, usage = told(events)
    assert "token_ids" not in opening["choices"][0]
    assert [e["choices"][0]["token_ids"] for e in (first, second, last)] == [[0], [1], [2]]
    assert first["choices"][0]["prompt_weight_versions"] == [{"version": 3, "start": 0, "end": 2}]
    assert "prompt_weight_versions" not in second["choices"][0]
    assert "choices" in usage


async def test_other_streams_are_as_they_were() -> None:
    head, events = await ask(Engine(), resumable=frozenset())
    assert RESUMABLE.decode() not in head
    assert not any(b"token_ids" in e for e in events)


@pytest.mark.parametrize("pieces", [1, 2, 40])
@pytest.mark.parametrize("sent", range(6))
async def test_what_follows_is_told_and_nothing_twice(sent: int, pieces: int) -> None:
    """`sent`: events the client has."""
    _, whole = await ask(Engine())
    tokens = list(range(max(0, min(sent - 1, 3))))
    resume = Resume(
        tokens=tokens,
        spans=[Span(3, 0, len(tokens))] if tokens else [],
        prompt_spans=[Span(3, 0, 2)] if tokens else [],
        version=3,
        lead=min(sent, 1),
        id="chat-1" if sent else None,
        created=1 if sent else None,
        finish_reason="length" if sent > 3 else None,
        usage_sent=sent > 4,
        resumed_at=[len(tokens)],
    )
    head, events = await ask(Engine(), resume, pieces=pieces, created=9 if sent else 1)
    assert (head["status"], head[RESUMED.decode()], head[RESUMABLE.decode()]) == (200, b"1", b"1")
    rest = [orjson.loads(e[6:]) if e[6:7] == b"{" else e for e in events]
    expected = [orjson.loads(e[6:]) if e[6:7] == b"{" else e for e in whole[sent:]]
    for one in rest:
        if not isinstance(one, dict) or not one["choices"]:
            continue
        if one["choices"][0]["finish_reason"]:
            assert one["choices"][0].pop("resumed_at") == [len(tokens)]
        elif len(tokens) > 0:  # this instance has sent fewer events than there are tokens
            assert one.pop("hotswap_usage") == {"prompt_tokens": 2, "completion_tokens": len(tokens) + 1}
    assert rest == expected


async def test_spans_over_the_whole_answer() -> None:
    resume = Resume([0, 1], [Span(2, 0, 1), Span(3, 1, 2)], [Span(1, 0, 1), Span(2, 1, 2)], 3)
    _, events = await ask(Engine(), resume)
    (last, *_) = told(events)
    (choice,) = last["choices"]
    assert [tuple(s.values()) for s in choice["weight_versions"]] == [(2, 0, 1), (3, 1, 3)]
    assert [tuple(s.values()) for s in choice["prompt_weight_versions"]] == [(1, 0, 1), (2, 1, 2)]


async def test_other_weights_are_refused() -> None:
    engine = Engine(version=4)
    refused = Resume([0], [Span(3, 0, 1)], [Span(3, 0, 2)], 3)
    head, _ = await ask(engine, refused)
    assert (head["status"], head["x-hotswap-refused"]) == (409, b"version")
    assert not engine.asked
    head, _ = await ask(engine, Resume([0], [Span(3, 0, 1)], [Span(3, 0, 2)], None))
    assert head["status"] == 200


@pytest.mark.parametrize("length", [b"0", b"-1", b"x", b"5", b"99", b"99999999999"])
async def test_what_is_no_resume(length: bytes) -> None:
    headers = [(RESUMABLE, b"1"), (RESUME, length)]
    start, answer = await sent_by(
        ProvenanceMiddleware(app(Engine()), lambda: 3), CHAT, b'{"tokens": 1}', headers=headers
    )
    assert start["status"] == 400
    assert orjson.loads(answer["body"])["error"]["code"] == "bad_resume"


ERROR = b'data: {"error":{"message":"EngineCore encountered an issue"}}\n\n'


@pytest.mark.parametrize("resumable", [True, False])
@pytest.mark.parametrize("begun", [True, False])
async def test_a_dead_engine(resumable: bool, begun: bool) -> None:
    """Its streams are cut, for another instance to go on, where one can; before the first byte they are refused."""
    engine = Engine()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send(head())
        if begun:
            async for _ in engine.generate("p", params(n=1 if resumable else 2), "r"):
                await send(part(b'data: {"choices":[{"index":0,"text":"<0>"}]}\n\n'))
                break
        for body in (ERROR, DONE, b""):
            await send(part(body, more=bool(body)))

    answering = ProvenanceMiddleware(answer, lambda: 3, dead=lambda: True)
    sent = await sent_by(answering, "/v1/completions", headers=[(RESUMABLE, b"1")])
    body = b"".join(m.get("body", b"") for m in sent)
    if not begun:
        assert sent[0]["status"] == 503
        assert (b"x-hotswap-refused", b"lost") in sent[0]["headers"]
        assert orjson.loads(body)["error"]["code"] == "engine_died"
    elif resumable:
        assert ERROR not in body
        assert sent[-1]["more_body"]
    else:
        assert body.endswith(ERROR)
