"""SGLang's form of POST /generate and /classify: what each field becomes, what is refused, and what clients get back.

tests/contract/test_sglang.py compares the fields and the answers with SGLang's own types.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from server.errors import BadUpstream
from server.gateway.config import FailoverSettings, HealthSettings, UpstreamSettings
from server.gateway.wire.sglang import Translation, translate
from tests.server.continued import Fleet, event
from tests.server.gateway.harness import RunningGateway, new_key, post, running_gateway
from tests.server.gateway.upstream import Answer, Handler, answering, cut, streaming
from tests.server.refusals import refuses

TEXT = {"text": "3+4="}
OFF = {"eject_after": 10**9, "min_requests": 10**9}
DEFAULTS = {
    "stream": False, "return_token_ids": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "max_tokens": 128,
}  # fmt: skip
SPANS = [{"version": 1, "start": 0, "end": 2}]
TOLD = [{"version": "1", "start": 0, "end": 2}]


def sent(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(translate(orjson.dumps(body))[0])
    return found


def sampling(**params: Any) -> dict[str, Any]:
    return TEXT | {"sampling_params": params}


REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # SGLang's body, and what of /v1/completions differs
    (TEXT, {}),
    (TEXT | {"sampling_params": None, "image_data": None, "priority": None, "return_hidden_states": False}, {}),
    (TEXT | {"rid": "r", "return_logprob": False, "logprob_start_len": 0, "top_logprobs_num": 3}, {}),
    ({"text": ["a", "b"]}, {"prompt": ["a", "b"]}),
    ({"input_ids": [5, 6], "text": None}, {"prompt": [5, 6]}),
    ({"input_ids": [[5], [6]], "stream": True}, {"prompt": [[5], [6]], "stream": True}),
    (sampling(max_new_tokens=3, min_new_tokens=2), {"max_tokens": 3, "min_tokens": 2}),
    (sampling(max_new_tokens=0, min_new_tokens=None), {"max_tokens": 1, "min_tokens": 0}),
    (sampling(temperature=0, top_p=0.5, top_k=7, min_p=None), {"temperature": 0.0, "top_p": 0.5, "top_k": 7}),
    (
        sampling(frequency_penalty=1, presence_penalty=-1, repetition_penalty=1.5),
        {"frequency_penalty": 1.0, "presence_penalty": -1.0, "repetition_penalty": 1.5},
    ),
    (sampling(stop="\n", stop_token_ids=[2]), {"stop": "\n", "stop_token_ids": [2]}),
    (
        sampling(ignore_eos=True, skip_special_tokens=False, spaces_between_special_tokens=False, no_stop_trim=True),
        {
            "ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
        },
    ),
    (
        sampling(n=2, sampling_seed=5, logit_bias={"3": 1}, stream_interval=4),
        {"n": 2, "seed": 5, "logit_bias": {"3": 1.0}, "stream_interval": 4},
    ),
    (sampling(json_schema='{"type": "object"}', regex=""), {"structured_outputs": {"json": '{"type": "object"}'}}),
    (sampling(regex="a+", ebnf=None), {"structured_outputs": {"regex": "a+"}}),
    (sampling(ebnf="root ::= 'a'"), {"structured_outputs": {"grammar": "root ::= 'a'"}}),
    (TEXT | {"lora_path": "adapter"}, {"model": "adapter"}),
    (TEXT | {"model": "toy", "hotswap": {"version": 3}}, {"model": "toy", "hotswap": {"version": 3}}),
    (TEXT | {"return_logprob": True}, {"logprobs": 0, "return_tokens_as_token_ids": True, "echo": False}),
    (
        TEXT | {"return_logprob": True, "top_logprobs_num": 5, "logprob_start_len": 0},
        {"logprobs": 5, "return_tokens_as_token_ids": True, "echo": True},
    ),
    (
        TEXT | {"return_logprob": True, "logprob_start_len": -1, "return_text_in_logprobs": True},
        {"logprobs": 0, "return_tokens_as_token_ids": False, "echo": False},
    ),
    (
        TEXT | {"return_logprob": True, "token_ids_logprob": [7, 8]},
        {"logprobs": 0, "return_tokens_as_token_ids": True, "echo": False, "logprob_token_ids": [7, 8]},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "differs"), REQUESTS)
def test_what_a_request_becomes(body: dict[str, Any], differs: dict[str, Any]) -> None:
    assert sent(body) == {"prompt": "3+4="} | DEFAULTS | differs


REFUSALS: list[tuple[dict[str, Any], str, str]] = [  # body, the error's `param`, and a part of its message
    ({"sampling_params": {}}, "text", "either `text` or `input_ids`"),
    ({"text": "a", "input_ids": [1]}, "text", "either `text` or `input_ids`"),
    ({"text": []}, "text", "a list of texts, and not empty"),
    ({"text": [5]}, "text", "a list of texts"),
    ({"input_ids": "a"}, "input_ids", "a list of token ids"),
    ({"input_ids": []}, "input_ids", "not empty"),
    ({"input_ids": ["a"]}, "input_ids", "a list of token ids"),
    (TEXT | {"prompt": "a"}, "prompt", "leave it out"),
    (TEXT | {"nobodys": False}, "nobodys", "leave it out"),
    (TEXT | {"image_data": ["x"]}, "image_data", "/v1/chat/completions"),
    (TEXT | {"return_routed_experts": True}, "return_routed_experts", "own form"),
    (TEXT | {"priority": 1}, "priority", "x-hotswap-priority"),
    (TEXT | {"session_id": "s"}, "session_id", "x-session-id"),
    (TEXT | {"rid": 5}, "rid", "Expected `str | array | null`"),
    (TEXT | {"stream": "yes"}, "stream", "Expected `bool | null`"),
    (TEXT | {"lora_path": ["a", "b"]}, "lora_path", "got `array`"),
    (TEXT | {"lora_path": "a", "model": "b"}, "lora_path", "send one of them"),
    (TEXT | {"sampling_params": 5}, "sampling_params", "must be one object"),
    (TEXT | {"sampling_params": [{"n": 1}]}, "sampling_params", "one object, for all prompts"),
    (sampling(max_new_tokens=None), "sampling_params.max_new_tokens", "Expected `int`"),
    (sampling(max_new_tokens=-1), "sampling_params.max_new_tokens", ">= 0"),
    (sampling(temperature="hot"), "sampling_params.temperature", "Expected `float | null`"),
    (sampling(stop_regex="a"), "sampling_params.stop_regex", "leave it out"),
    (sampling(beam_width=4), "sampling_params.beam_width", "leave it out"),
    (sampling(custom_params={"a": 1}), "sampling_params.custom_params", "leave it out"),
    (sampling(max_tokens=5), "sampling_params.max_tokens", "leave it out"),
    (sampling(regex="a", ebnf="b"), "sampling_params", "Only one of json_schema, regex, ebnf"),
    (
        TEXT | {"return_logprob": True, "token_ids_logprob": [1], "logprob_start_len": 0},
        "token_ids_logprob",
        "leave out `logprob_start_len`",
    ),
    (TEXT | {"return_logprob": True, "token_ids_logprob": [[1]]}, "token_ids_logprob[0]", "got `array`"),
    (
        TEXT | {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True},
        "return_text_in_logprobs",
        "/detokenize",
    ),
]


@pytest.mark.parametrize(("body", "param", "says"), REFUSALS)
def test_what_is_refused(body: dict[str, Any], param: str, says: str) -> None:
    with refuses(400) as refused:
        translate(orjson.dumps(body))
    assert refused.value.param == param
    assert says in refused.value.message
    assert f"`{param.partition('.')[0]}" in refused.value.message or refused.value.param == "sampling_params"


# answers


def answered(body: dict[str, Any], *pieces: Any) -> Any:
    """The answer to a body, of the upstream's whole answer in pieces, or of its events."""
    _, wanted = translate(orjson.dumps(body))
    translation = Translation(wanted, time.monotonic())
    whole = b"".join(p if isinstance(p, bytes) else orjson.dumps(p) for p in pieces)
    out = b"".join(translation.take(whole[at : at + 7], ended=False) for at in range(0, len(whole), 7))
    out += translation.take(b"", ended=True)
    return out if wanted.stream else orjson.loads(out)


def scores(tokens: dict[int, float], *others: dict[int, float]) -> dict[str, Any]:
    names = [f"token_id:{token}" for token in tokens]
    tops = [{f"token_id:{token}": value for token, value in each.items()} for each in others]
    values = [value if value < 0 else None for value in tokens.values()]
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops}


def choice(index: int = 0, **more: Any) -> dict[str, Any]:
    spans = {"weight_versions": SPANS, "prompt_weight_versions": [{"version": 1, "start": 0, "end": 3}]}
    said = {"index": index, "text": " 7", "token_ids": [20, 2], "prompt_token_ids": [5, 6, 7], "finish_reason": "stop"}
    return said | spans | more


def whole(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "cmpl-1", "choices": list(choices), "weight_version": 1, "usage": {"prompt_tokens": 3}} | more


def test_a_whole_answer() -> None:
    told = answered(TEXT, whole(choice(), usage={"prompt_tokens_details": {"cached_tokens": 2}}))
    assert told["meta_info"].pop("e2e_latency") >= 0
    assert told == {
        "text": " 7",
        "output_ids": [20, 2],
        "meta_info": {
            "id": "cmpl-1",
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 2,
            "weight_version": "1",
            "weight_versions": TOLD,
            "prompt_weight_versions": [{"version": "1", "start": 0, "end": 3}],
        },
    }


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"finish_reason": "length"}, {"type": "length", "length": 2}),
        ({"stop_reason": "\n"}, {"type": "stop", "matched": "\n"}),
        ({"stop_reason": 17}, {"type": "stop", "matched": 17}),
        ({"finish_reason": "abort"}, {"type": "abort", "message": "abort", "status_code": None, "err_type": None}),
    ],
)
def test_the_reason_of_its_end(said: dict[str, Any], told: dict[str, Any]) -> None:
    assert answered(TEXT, whole(choice(**said)))["meta_info"]["finish_reason"] == told


def test_several_answers_are_a_list_with_ids_of_their_own() -> None:
    told = answered({"text": ["a", "b"], "rid": "r"}, whole(choice(1, text="b"), choice(0, text="a")))
    assert [(each["text"], each["meta_info"]["id"]) for each in told] == [("a", "r_0"), ("b", "r_1")]
    told = answered({"text": ["a"], "rid": ["mine"]}, whole(choice()))
    assert [each["meta_info"]["id"] for each in told] == ["mine"]
    told = answered(sampling(n=2), whole(choice(0), choice(1)))
    assert [each["meta_info"]["id"] for each in told] == ["cmpl-1_0", "cmpl-1_1"]
    assert answered(TEXT | {"rid": "r"}, whole(choice()))["meta_info"]["id"] == "r"


def test_a_mixed_answer_says_which_version_wrote_which_token() -> None:
    spans = [{"version": 1, "start": 0, "end": 1}, {"version": 2, "start": 1, "end": 2}]
    meta = answered(TEXT, whole(choice(weight_versions=spans), weight_version=2))["meta_info"]
    assert meta["weight_version"] == "2"
    assert meta["weight_versions"] == [span | {"version": str(span["version"])} for span in spans]


def test_log_probabilities_of_the_answer() -> None:
    body = TEXT | {"return_logprob": True}
    meta = answered(body, whole(choice(logprobs=scores({20: -0.5, 2: -0.25}))))["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 20, None], [-0.25, 2, None]]
    assert (meta["input_token_logprobs"], meta["output_token_logprobs_length"]) == ([], 2)
    assert "output_top_logprobs" not in meta
    texts = {"tokens": [" 7", "</s>"], "token_logprobs": [-0.5, -0.25], "top_logprobs": []}
    meta = answered(body | {"return_text_in_logprobs": True}, whole(choice(logprobs=texts)))["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 20, " 7"], [-0.25, 2, "</s>"]]


def test_log_probabilities_of_the_prompt_and_of_other_tokens() -> None:
    """The first of them is null, as SGLang tells it, and the token drawn is no top one unless it is likely enough."""
    body = TEXT | {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 1}
    rows: list[Any] = [None, {"token_id:9": -2.0}, {"token_id:7": -0.1}, {"token_id:20": -3.0, "token_id:21": -0.1}, {}]
    echoed = scores({5: 0, 6: -1.0, 7: -0.1, 20: -3.0, 2: -0.2}) | {"top_logprobs": rows}
    meta = answered(body, whole(choice(logprobs=echoed)))["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 6, None], [-0.1, 7, None]]
    assert meta["output_token_logprobs"] == [[-3.0, 20, None], [-0.2, 2, None]]
    assert meta["input_top_logprobs"] == [None, [[-0.1, 7, None]]]
    assert meta["output_top_logprobs"] == [[[-0.1, 21, None]], []]
    ids = TEXT | {"return_logprob": True, "token_ids_logprob": [21, 20]}
    row = {20: -0.5, 21: -4.0}
    meta = answered(ids, whole(choice(logprobs=scores({20: -0.5, 2: -0.2}, row, row))))["meta_info"]
    assert meta["output_token_ids_logprobs"] == [[[-4.0, 21, None], [-0.5, 20, None]]] * 2
    assert meta["input_token_ids_logprobs"] == []


def test_no_token_is_told_where_none_was_asked_for() -> None:
    body = sampling(max_new_tokens=0) | {
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_prompt_token_ids": True,
    }
    echoed = scores({5: 0, 6: -1.0, 7: -0.1, 20: -3.0})
    told = answered(body, whole(choice(token_ids=[20], logprobs=echoed)))
    assert (told["text"], told["output_ids"], told["prompt_token_ids"]) == ("", [], [5, 6, 7])
    meta = told["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["input_token_logprobs"] == [[None, 5, None], [-1.0, 6, None], [-0.1, 7, None]]
    assert meta["output_token_logprobs"] == meta["weight_versions"] == []
    assert meta["weight_version"] == "1"


@pytest.mark.parametrize("body", [b"[]", b'{"choices": 5}', b'{"error": 1}', b'{"choices": []}', b"no"])
def test_what_is_no_completion_fails(body: bytes) -> None:
    with pytest.raises(BadUpstream, match="The instance's answer"):
        answered(TEXT, body)


STREAM = TEXT | {"stream": True}


def said(version: int = 1, index: int = 0, **more: Any) -> bytes:
    choices = [{"index": index, "text": "", "finish_reason": None, **more}]
    return event({"id": "cmpl-1", "created": 7, "choices": choices, "weight_version": version})


def told_by(stream: bytes) -> list[dict[str, Any]]:
    assert stream.endswith(b"\n\ndata: [DONE]\n\n")
    return [orjson.loads(each[6:]) for each in stream.split(b"\n\n")[:-2]]


EVENTS = [
    said(text="a", token_ids=[20], prompt_token_ids=[5, 6, 7]),
    said(2, text="bc", token_ids=[21, 22]),
    said(2, text=".", token_ids=[2], finish_reason="stop", weight_versions=[
        {"version": 1, "start": 0, "end": 1}, {"version": 2, "start": 1, "end": 4},
    ], prompt_weight_versions=[{"version": 1, "start": 0, "end": 3}]),
    b"data: [DONE]\n\n",
]  # fmt: skip


def test_each_event_of_a_stream_has_all_so_far() -> None:
    first, second, last = told_by(answered(STREAM, *EVENTS))
    assert [each["text"] for each in (first, second, last)] == ["a", "abc", "abc."]
    assert [each["output_ids"] for each in (first, second, last)] == [[20], [20, 21, 22], [20, 21, 22, 2]]
    assert [each["meta_info"]["weight_version"] for each in (first, second, last)] == ["1", "2", "2"]
    mixed = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
    assert second["meta_info"]["weight_versions"] == mixed
    assert last["meta_info"]["weight_versions"] == [mixed[0], mixed[1] | {"end": 4}]
    assert [each["meta_info"]["finish_reason"] for each in (first, last)] == [None, {"type": "stop", "matched": 2}]
    assert {each["meta_info"]["prompt_tokens"] for each in (first, second, last)} == {3}
    assert "e2e_latency" in last["meta_info"]
    assert "index" not in last


def test_events_that_come_together_are_one_for_each_sample() -> None:
    _, wanted = translate(orjson.dumps(STREAM | {"sampling_params": {"n": 2}}))
    translation = Translation(wanted, 0.0)
    piece = said(token_ids=[20]) + said(index=1, token_ids=[30]) + said(token_ids=[21]) + b"data: [DONE]\n\n"
    told = told_by(translation.take(piece, ended=False))
    assert [(each["index"], each["output_ids"]) for each in told] == [(0, [20, 21]), (1, [30])]


def test_an_error_in_a_stream_passes() -> None:
    failed = b'event: error\ndata: {"error":{"code":"weights_changed"}}\n\n'
    out = answered(STREAM, EVENTS[0], failed)
    assert out.endswith(failed)
    assert out.startswith(b'data: {"text":"a"')


# through a gateway


UPSTREAM = UpstreamSettings(
    scrape_interval_s=3600.0, hold_s=0.0, health=HealthSettings(**OFF), failover=FailoverSettings()
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), upstream=UPSTREAM) as running:
        yield running


@asynccontextmanager
async def serving(gateway: RunningGateway, *handlers: Handler) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(gateway.instance(h, f"i{i}")) for i, h in enumerate(handlers)]
    for i in range(len(handlers)):
        gateway.unregister(f"i{i}")


async def ask(
    gateway: RunningGateway, handler: Handler, body: Any, headers: str = "", route: str = "/generate"
) -> tuple[Answer, Any]:
    async with serving(gateway, handler) as (up,):
        return await gateway.ask(post(route, body, headers)), up.requests


async def test_a_request_goes_to_vllms_route_and_comes_back_in_its_own_form(gateway: RunningGateway) -> None:
    body = TEXT | {"hotswap": {"version": 1}}
    answer, (received,) = await ask(gateway, answering(orjson.dumps(whole(choice()))), body)
    assert received.target == "/v1/completions"
    assert received.headers["x-hotswap-version"] == "1"
    assert "hotswap" not in orjson.loads(received.body)
    assert (answer.status, answer.complete) == (200, True)
    assert orjson.loads(answer.body)["meta_info"]["weight_version"] == "1"


async def test_own_form_is_left_alone(gateway: RunningGateway) -> None:
    answer, (received,) = await ask(gateway, answering(b'{"ok":true}'), b'{"prompt": "a"}')
    assert (received.target, received.body, answer.body) == ("/generate", b'{"prompt": "a"}', b'{"ok":true}')


CLASSES: dict[str, Any] = {"id": "classify-1", "usage": {"prompt_tokens": 3}, "data": [
    {"index": 0, "label": "good", "probs": [0.25, -1.5], "num_classes": 2},
    {"index": 1, "label": "good", "probs": [2.0, -8.5], "num_classes": 2},
]}  # fmt: skip


async def classified(gateway: RunningGateway, body: Any, said: Any = CLASSES) -> tuple[Answer, Any]:
    handler = answering(orjson.dumps(said), extra=b"x-hotswap-weight-version: 7\r\n")
    return await ask(gateway, handler, body, route="/classify")


async def test_scores_of_a_text_and_of_several(gateway: RunningGateway) -> None:
    one = CLASSES | {"data": CLASSES["data"][:1]}
    answer, (received,) = await classified(gateway, TEXT | {"rid": "r", "image_data": None}, one)
    assert (received.target, orjson.loads(received.body)) == ("/classify", {"input": "3+4=", "use_activation": False})
    told = orjson.loads(answer.body)
    assert told["meta_info"].pop("e2e_latency") >= 0
    ended = {"finish_reason": {"type": "length", "length": 0}, "weight_version": "7"}
    assert told == {"embedding": [0.25, -1.5], "meta_info": {"id": "r", "prompt_tokens": 3} | ended}
    answer, (received,) = await classified(gateway, {"input_ids": [[5], [6, 7]], "lora_path": "mine"})
    assert orjson.loads(received.body) == {"input": [[5], [6, 7]], "model": "mine", "use_activation": False}
    told = orjson.loads(answer.body)
    assert [each["embedding"] for each in told] == [[0.25, -1.5], [2.0, -8.5]]
    assert [each["meta_info"]["id"] for each in told] == ["classify-1_0", "classify-1_1"]
    assert "prompt_tokens" not in told[0]["meta_info"], "vLLM counts those of all"


async def test_scores_in_vllms_form_or_none(gateway: RunningGateway) -> None:
    answer, (received,) = await classified(gateway, {"input": "a"})
    assert (orjson.loads(answer.body), orjson.loads(received.body)) == (CLASSES, {"input": "a"})
    bad: list[Any] = [[], CLASSES | {"data": []}, CLASSES | {"data": [{"label": "good"}]}]
    for said in bad:
        assert (await classified(gateway, TEXT, said))[0].refusal == (502, "bad_upstream")
    for body, param in ((TEXT | {"dimensions": 2}, "dimensions"), (TEXT | {"image_data": "x"}, "image_data")):
        answer, received = await ask(gateway, answering(), body, route="/classify")
        assert (answer.refusal, answer.error["param"], received) == ((400, "unsupported_parameter"), param, [])


async def test_a_refusal_never_reaches_an_instance(gateway: RunningGateway) -> None:
    answer, received = await ask(gateway, answering(), TEXT | {"image_data": "x"})
    assert (answer.refusal, answer.error["param"], received) == ((400, "unsupported_parameter"), "image_data", [])


async def test_an_instances_refusal_passes(gateway: RunningGateway) -> None:
    error = b'{"error": {"message": "too long"}}'
    answer, _ = await ask(gateway, answering(error, b"400 Bad Request"), TEXT)
    assert (answer.status, answer.body, answer.headers["content-length"]) == (400, error, str(len(error)))


async def test_a_stream_goes_on_at_another_instance(gateway: RunningGateway) -> None:
    """Wherever its instance dies, the client has the stream that it would have had."""
    tokens = [said(text="a", token_ids=[20]), said(text="bc", token_ids=[21])]
    ended = said(text=".", token_ids=[2], finish_reason="stop", weight_versions=[{"version": 1, "start": 0, "end": 3}])
    fleet = Fleet([said(prompt_token_ids=[5, 6, 7]), *tokens, ended, b"data: [DONE]\n\n"])
    async with serving(gateway, fleet.handle, fleet.handle):
        untouched = await gateway.ask(post("/generate", STREAM))
        for at in range(0, sum(map(len, fleet.events)), 23):
            fleet.cuts = [at]
            answer = await gateway.ask(post("/generate", STREAM))
            assert (answer.status, answer.complete) == (200, True)
            last, wanted = told_by(answer.body)[-1], told_by(untouched.body)[-1]
            for each in (last, wanted):
                each["meta_info"].pop("e2e_latency", None)
            assert last == wanted
    assert fleet.resumes


async def test_a_stream_that_breaks_ends_with_the_gateways_error(gateway: RunningGateway) -> None:
    handler = streaming(EVENTS[0], cut=True)
    answer, _ = await ask(gateway, handler, STREAM)
    assert not answer.complete
    first, error, _ = answer.body.split(b"\n\n")
    assert orjson.loads(first[6:])["output_ids"] == [20]
    assert error.startswith(b"event: error\ndata: ")


async def test_an_instance_that_dies_before_its_first_byte(gateway: RunningGateway) -> None:
    good = answering(orjson.dumps(whole(choice())))
    async with serving(gateway, cut, good):
        for _ in range(4):  # whichever is asked first
            answer = await gateway.ask(post("/generate", TEXT))
            assert orjson.loads(answer.body)["text"] == " 7"


async def test_old_clients_get_it_too(gateway: RunningGateway) -> None:
    async with serving(gateway, answering(orjson.dumps(whole(choice())))):
        answer = await gateway.ask(post("/generate", TEXT).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert orjson.loads(answer.body)["text"] == " 7"
    assert "transfer-encoding" not in answer.headers


async def test_limits_count_the_tokens_of_its_answer(tmp_path: Path) -> None:
    """Those that are asked for before it, and those that came after it."""
    with running_gateway(tmp_path, upstream=UPSTREAM) as locked:
        _, key = await new_key(locked, limits={"tokens_per_min": 1000, "max_output_tokens": 50})
        counted = whole(choice()) | {"usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}}
        asks = sampling(max_new_tokens=40) | {"text": ["a", "b"]}
        answer, _ = await ask(locked, answering(orjson.dumps(counted)), asks, key)
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert 1000 - left >= 80, "reserved: two answers of 40"
        answer, _ = await ask(locked, answering(orjson.dumps(counted)), sampling(max_new_tokens=1), key)
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 900, "and given back: the answer had two"
        answer, _ = await ask(locked, answering(), sampling(max_new_tokens=51), key)
        assert answer.refusal == (400, "max_output_exceeded")
