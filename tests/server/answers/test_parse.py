"""From bytes to records: every route, whole and streamed, and streams that broke off; and the numbers of a record."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from server.answers.measures import OPENING, measure, repetition
from server.answers.parse import FORMAT, PARAMETERS, ROUTES, About, Answer, Choice, Span, parse
from server.gateway.release.policy import METRICS, REFUSALS, searched
from server.instance.generate import GenerateRequest
from tests.server import continued
from tests.server.continued import event

SPANS = [{"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 5}]
OVER = [Span(3, 0, 2), Span(4, 2, 5)]
PROMPT = [{"version": 3, "start": 0, "end": 9}]


def about(route: str, *, streamed: bool = False, **more: Any) -> About:
    return About(
        **{
            "request_id": "r", "route": route, "status": 200, "key": "ada", "key_id": "k", "ended": 1.0,
            "duration_s": 0.5, "streamed": streamed, **more,
        }
    )  # fmt: skip


def read(route: str, request: dict[str, Any], answer: dict[str, Any] | list[bytes], **more: Any) -> Answer:
    streamed = isinstance(answer, list)
    raw = b"".join(answer) if isinstance(answer, list) else orjson.dumps(answer)
    found = parse(orjson.dumps(request), raw, about(route, streamed=streamed, **more))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Answer) == found
    return found


def test_a_chat_that_is_whole() -> None:
    message = {
        "role": "assistant", "content": "Hi", "reasoning": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
    }  # fmt: skip
    logprobs = {"content": [{"token": "H", "logprob": -0.5}, {"token": "i", "logprob": -1.5}]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": logprobs}
    body = {
        "id": "chatcmpl-r", "choices": [choice | {"weight_versions": SPANS, "prompt_weight_versions": PROMPT}],
        "weight_version": 4, "usage": {"prompt_tokens": 9, "total_tokens": 14, "completion_tokens": 5},
    }  # fmt: skip
    request = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}], "tools": [{"type": "function"}]}
    found = read("/v1/chat/completions", request | {"temperature": 0, "metadata": {"a": "b"}, "user": "x"}, body)
    (said,) = found.choices
    assert (said.text, said.reasoning, said.tool_calls) == ("Hi", "hm", message["tool_calls"])
    assert (said.logprobs, said.finish_reason) == ([-0.5, -1.5], "tool_calls")
    assert (said.weight_versions, said.prompt_weight_versions) == (OVER, [Span(3, 0, 9)])
    assert (found.id, found.prompt_tokens, found.completion_tokens) == ("chatcmpl-r", 9, 5)
    assert (found.messages, found.tools) == (request["messages"], request["tools"])
    assert (found.parameters, found.metadata) == ({"temperature": 0}, {"a": "b"})
    assert (found.whole, found.version) == (True, None)


NOT_KEPT = {
    # who asks, and in which conversation
    "cache_salt", "metadata", "previous_response_id", "prompt_cache_key", "request_id", "safety_identifier",
    "session_id", "user",
    # records have them in fields of their own
    "input", "instructions", "messages", "model", "prompt", "prompt_token_ids", "system", "tools",
    # for plug-ins, or bytes
    "ec_transfer_params", "kv_transfer_params", "media_io_kwargs", "mm_payload", "mm_processor_kwargs",
    "previous_input_messages", "prompt_embeds", "vllm_xargs", "watermarking",
    # how the answer is sent and kept, not what it says
    "background", "enable_response_messages", "include", "return_mm_kwargs", "return_prompt_text", "return_token_ids",
    "return_token_offsets", "return_tokens_as_token_ids", "routed_experts", "routed_experts_prompt_start",
    "service_tier", "store", "stream", "stream_interval", "stream_options",
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_of_a_request_s_other_fields_those_are_kept_that_shape_the_answer(route: str) -> None:
    """A field that a client or a later release adds is kept once it is listed."""
    request = dict.fromkeys({*NOT_KEPT, "brand_new"} - {"messages", "input", "tools", "metadata"}, "x")
    request |= {"metadata": {"user_id": "u", "solution": "7"}}
    found = parse(orjson.dumps(request | {"top_p": 0.5}), b"", about(route))
    assert found.parameters == {"top_p": 0.5}
    assert found.metadata == {"solution": "7"}


def test_each_field_that_vllm_knows_is_kept_or_is_not() -> None:
    known = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, *ResponsesRequest.model_fields}
    known |= {*AnthropicMessagesRequest.model_fields, *GenerateRequest.model_fields}
    assert known <= PARAMETERS | NOT_KEPT
    assert not PARAMETERS & NOT_KEPT


def test_a_chat_that_is_streamed() -> None:
    found = read("/v1/chat/completions", {"messages": []}, continued.chat([5, 6, 7], 3))
    (said,) = found.choices
    assert (said.text, said.token_ids, said.finish_reason) == ("<5> é\n<6> é\n.", [5, 6, 7], "stop")
    assert (said.weight_versions, found.id, found.completion_tokens) == ([Span(3, 0, 3)], "chat-a", 3)
    assert (found.whole, found.version) == (True, 3)


def test_a_stream_that_breaks_off_says_what_its_chunks_say() -> None:
    events = [*continued.chat([5, 6, 7], 3)[:3], *continued.chat([8, 9, 10], 4)[1:3]]
    for end in (b"", b'data: {"choices', continued.event({"error": {"message": "gone"}}, b"event: error\n")):
        found = read("/v1/chat/completions", {"messages": []}, [*events, end], status=499)
        (said,) = found.choices
        assert (said.token_ids, said.finish_reason, found.whole) == ([5, 6, 8, 9], None, False)
        assert said.weight_versions == [Span(3, 0, 2), Span(4, 2, 4)]
        assert (found.error is None) == (not end.startswith(b"event"))


def test_a_chunk_of_two_versions_has_their_spans() -> None:
    def chunk(ids: list[int], version: int, **more: Any) -> bytes:
        choice = {"index": 0, "delta": {"content": "x"}, "token_ids": ids, "finish_reason": None}
        return event({"id": "c", "choices": [choice | more], "weight_version": version})

    two = [{"version": 3, "start": 1, "end": 2}, {"version": 4, "start": 2, "end": 3}]
    for name in ("weight_versions", "hotswap_weight_versions"):
        found = read("/v1/chat/completions", {"messages": []}, [chunk([1], 3), chunk([2, 3], 4, **{name: two})])
        assert found.choices[0].weight_versions == [Span(3, 0, 2), Span(4, 2, 3)]


def test_calls_of_tools_come_in_pieces() -> None:
    def chunk(**call: Any) -> bytes:
        return event({"id": "c", "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]})

    pieces = [
        chunk(index=0, id="a", function={"name": "f", "arguments": ""}),
        chunk(index=0, function={"arguments": '{"x"'}),
        chunk(index=1, id="b", function={"name": "g", "arguments": "{}"}),
        chunk(index=0, function={"arguments": ":1}"}),
    ]
    assert read("/v1/chat/completions", {"messages": []}, pieces).choices[0].tool_calls == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_completions_of_several_prompts_and_samples() -> None:
    choices = [
        {"index": i, "text": f"t{i}", "finish_reason": "length", "logprobs": {"token_logprobs": [None, -float(i)]},
         "weight_versions": [{"version": "7", "start": 0, "end": 2}]}
        for i in (1, 0)
    ]  # fmt: skip
    usage = {"prompt_tokens": 2, "total_tokens": 6, "completion_tokens": 4}
    body = {"id": "cmpl-r", "choices": choices, "usage": usage}
    found = read("/v1/completions", {"prompt": ["a", "b"], "return_weight_versions": True}, body)
    assert [(c.index, c.text, c.logprobs) for c in found.choices] == [(0, "t0", [-0.0]), (1, "t1", [-1.0])]
    assert (found.prompt, found.version) == (["a", "b"], 7)


@pytest.mark.parametrize("streamed", [False, True])
def test_tokens_in_and_tokens_out(streamed: bool) -> None:
    ended = {"index": 0, "finish_reason": "length", "weight_versions": SPANS, "prompt_weight_versions": PROMPT}
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
    whole = ended | {"text": "abcde", "token_ids": [1, 2, 3, 4, 5], "logprobs": [-1.0] * 5}
    token = {"index": 0, "text": "abc", "token_ids": [1, 2, 3], "logprobs": [-1.0] * 3, "weight_version": 4}
    events = [
        continued.event(token | {"prompt_weight_versions": PROMPT, "weight_versions": SPANS}, b"event: token\n"),
        continued.event(token | {"text": "de", "token_ids": [4, 5], "logprobs": [-1.0] * 2}, b"event: token\n"),
        continued.event({"id": "gen-1", "choices": [ended], "usage": usage}, b"event: done\n"),
    ]
    answer: Any = events if streamed else {"id": "gen-1", "choices": [whole], "usage": usage}
    found = read("/generate", {"prompt_token_ids": [7, 8]}, answer)
    wanted = Choice(0, "abcde", "", [], "length", [1, 2, 3, 4, 5], [-1.0] * 5, OVER, [Span(3, 0, 9)])
    assert (found.choices, found.prompt, found.id) == ([wanted], [7, 8], "gen-1")
    assert (found.prompt_tokens, found.completion_tokens) == (9, 5)


def test_tokens_of_a_stream_that_breaks_off() -> None:
    token = {"index": 0, "text": "a", "token_ids": [1], "logprobs": None}
    pieces = [continued.event(token | {"weight_version": v}, b"event: token\n") for v in (3, 3, 4)]
    assert read("/generate", {"prompt": "x"}, pieces).choices[0].weight_versions == [Span(3, 0, 2), Span(4, 2, 3)]


RESPONSE = {
    "id": "resp_1", "object": "response", "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"},
    "output": [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "Hi", "logprobs": [{"logprob": -2.0}]}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ],
    "usage": {"input_tokens": 9, "output_tokens": 5}, "weight_versions": SPANS, "prompt_weight_versions": PROMPT,
}  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
def test_responses(streamed: bool) -> None:
    opening = {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress", "output": []}}
    events = [
        event(opening), event({"type": "response.output_text.delta", "delta": "Hi", "item_id": "m"}),
        event({"type": "response.incomplete", "response": RESPONSE}),
    ]  # fmt: skip
    asked = [
        {"role": "user", "content": [{"type": "input_text", "text": "He"}, {"type": "input_text", "text": "llo"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    answer: Any = events if streamed else RESPONSE
    found = read("/v1/responses", {"input": asked, "instructions": "Be kind"}, answer)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert found.choices == [Choice(0, "Hi", "hm", [call], "max_output_tokens", [], [-2.0], OVER, [Span(3, 0, 9)])]
    assert found.messages == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    assert (found.id, found.prompt_tokens, found.completion_tokens) == ("resp_1", 9, 5)
    if streamed:
        assert read("/v1/responses", {"input": "x"}, events[:2], status=499).choices == [Choice(0, "Hi")]


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_messages(streamed: bool) -> None:
    blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hi"}]
    tool = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
    spans = {"weight_versions": SPANS, "prompt_weight_versions": PROMPT}
    usage = {"input_tokens": 9, "output_tokens": 5}
    message = {"type": "message", "id": "msg", "content": [*blocks, tool], "stop_reason": "tool_use", "usage": usage}
    events = [
        event({"type": "message_start", "message": {"id": "msg", "content": [], "usage": {"input_tokens": 9}}}),
        event({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}}),
        event({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}}),
        event({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hi"}}),
        event({"type": "content_block_start", "index": 2, "content_block": tool | {"input": {}}}),
        event({"type": "content_block_delta", "index": 2, "delta": {"partial_json": '{"a":'}}),
        event({"type": "content_block_delta", "index": 2, "delta": {"partial_json": "1}"}}),
        event({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": usage, **spans}),
        event({"type": "message_stop"}),
    ]
    answer: Any = events if streamed else message | spans
    found = read("/v1/messages", {"system": "Be kind", "messages": [{"role": "user", "content": "x"}]}, answer)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert found.choices == [Choice(0, "Hi", "hm", [call], "tool_use", [], [], OVER, [Span(3, 0, 9)])]
    assert found.messages[0] == {"role": "system", "content": "Be kind"}
    assert (found.id, found.prompt_tokens, found.completion_tokens, found.whole) == ("msg", 9, 5, True)


def test_an_answer_that_is_an_error() -> None:
    found = read("/v1/completions", {"prompt": "x"}, {"error": {"message": "no", "code": 400}}, status=400)
    assert (found.error, found.choices, found.whole) == ({"message": "no", "code": 400}, [], False)


@pytest.mark.parametrize(
    ("body", "answer", "route"),
    [
        (b"{}", b"{", "/generate"),
        (b"{}", b"[1]", "/v1/completions"),
        (b"[]", b"{}", "/v1/completions"),
        (b"{}", b'{"choices":[1]}', "/v1/completions"),
        (b"{}", b'{"choices":[{"weight_versions":[{}]}]}', "/v1/chat/completions"),
        (b"{}", b"{}", "/tokenize"),
    ],
)
def test_what_is_no_exchange_is_unreadable(body: bytes, answer: bytes, route: str) -> None:
    with pytest.raises(ValueError, match=r"^r: |is none of"):
        parse(body, answer, about(route))


FIELDS = ["choices", "message", "delta", "content", "tool_calls", "usage", "index", "response", "type"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(route=st.sampled_from(ROUTES), payload=JSON, streamed=st.booleans())
def test_no_answer_raises_anything_else(route: str, payload: Any, streamed: bool) -> None:
    raw = event(payload) if streamed else orjson.dumps(payload)
    try:
        found = parse(b"{}", raw, about(route, streamed=streamed))
    except ValueError:
        return
    assert isinstance(found, Answer)


@settings(max_examples=50, deadline=None)
@given(cut=st.integers(0, 1500))
def test_a_stream_may_break_off_at_any_byte(cut: int) -> None:
    raw = b"".join(continued.chat([5, 6, 7, 8, 9], 3))
    whole = parse(b"{}", raw, about("/v1/chat/completions", streamed=True))
    found = parse(b"{}", raw[:cut], about("/v1/chat/completions", streamed=True))
    for said in found.choices:
        assert whole.choices[0].text.startswith(said.text)
        assert whole.choices[0].token_ids[: len(said.token_ids)] == said.token_ids
        assert sum(span.end - span.start for span in said.weight_versions) == len(said.token_ids)


# the numbers of one answer

REFUSES = searched(REFUSALS)


def answered(*choices: Choice, tokens: int | None = 5, error: dict[str, Any] | None = None, **more: Any) -> Answer:
    known = about("/generate", **{"streamed": True, "first_byte_s": 0.1, **more})
    return Answer(FORMAT, "a", known, choices=list(choices), completion_tokens=tokens, error=error)


def said(text: str = "one two", reason: str | None = "stop", **more: Any) -> Choice:
    return Choice(0, text, finish_reason=reason, **more)


def test_every_metric_of_an_answer_by_itself() -> None:
    found = measure(answered(said(logprobs=[-1.0, -2.0])), REFUSES)
    assert found == {
        "errors": 0.0, "duration_s": 0.5, "first_token_s": 0.1, "tokens": 5.0, "token_s": pytest.approx(0.1),
        "cut": 0.0, "repetition": 0.0, "refusals": 0.0, "logprob": -1.5,
    }  # fmt: skip
    assert found.keys() == METRICS.keys() - {"feedback", "left", "arrived"}


def test_what_the_server_failed_has_no_other_metric() -> None:
    for failed in (
        answered(status=503, code="no_instance"),
        answered(said(reason=None)),
        answered(said(), code="upstream_died"),
        answered(said(), error={"message": "x"}),
    ):
        assert measure(failed) == {"errors": 1.0}


@pytest.mark.parametrize("status", [400, 404, 409, 429, 499])
def test_what_the_client_did_says_nothing(status: int) -> None:
    assert measure(answered(status=status)) == {}


def test_several_samples_have_their_mean() -> None:
    found = measure(answered(said("I cannot do that"), said(reason="length"), tokens=6), REFUSES)
    assert (found["cut"], found["refusals"], found["tokens"]) == (0.5, 0.5, 6.0)
    assert found["token_s"] == pytest.approx(0.4 / 2)


def test_what_was_not_streamed_or_counted_has_no_times_of_tokens() -> None:
    assert "token_s" not in measure(answered(said(), streamed=False))
    assert "token_s" not in measure(answered(said(), tokens=1))
    assert "tokens" not in measure(answered(said(), tokens=None))
    assert "logprob" not in measure(answered(said()))


def test_only_the_opening_declines() -> None:
    assert measure(answered(said("x" * 195 + " I cannot do that")), REFUSES)["refusals"] == 0.0
    assert measure(answered(said("As you like. I won't.")), REFUSES)["refusals"] == 1.0


@pytest.mark.parametrize(
    ("text", "share"), [("", 0.0), ("a b c", 0.0), ("a b c d", 0.0), ("a a a a a", 0.5), ("a b c d a b c d", 0.2)]
)
def test_repetition(text: str, share: float) -> None:
    assert repetition(text) == pytest.approx(share)


def test_no_pattern_takes_long() -> None:
    """`re` would try each of the 2 ** 199 ways to divide the text between the two repetitions."""
    patterns = searched((r"(\w+)+!", "I CANNOT", r"\bnie\b"))
    cases = {"a" * OPENING: 0.0, "a" * 100 + "!": 1.0, "I cannot": 1.0, "Nie.": 1.0, "I can": 0.0}
    for text, declines in cases.items():
        assert measure(answered(said(text)), patterns)["refusals"] == declines
    assert searched(()) == ()
