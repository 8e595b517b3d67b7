"""OpenAI's SDKs, for Python and for JavaScript: what they parse and keep, and the errors that they raise.

Requests say in extra fields what they ask of swaps, and answers have the versions of the weights in extra fields.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from tests.live import LiveServer
from tests.node import JS, installed

pytestmark = pytest.mark.engine
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(live: LiveServer, checkpoints: dict[str, Path]) -> openai.OpenAI:
    live.push(checkpoints["say-1"])
    live.push(checkpoints["say-2"])
    return openai.OpenAI(base_url=live.url + "/v1", api_key="unused", max_retries=0)


Wish = dict[str, Any]


def chat(client: openai.OpenAI, live: LiveServer, wish: Wish, **more: Any) -> Any:
    return client.chat.completions.create(messages=MESSAGES, **asking(live, wish, **more))


def completion(client: openai.OpenAI, live: LiveServer, wish: Wish, **more: Any) -> Any:
    return client.completions.create(prompt="3+4=", **asking(live, wish, **more))


def asking(live: LiveServer, wish: Wish, tokens: int = 4, labels: bool = False, **more: Any) -> dict[str, Any]:
    extra = {"ignore_eos": True, "hotswap": wish, "return_weight_versions": labels}
    return {"model": live.name, "max_tokens": tokens, "temperature": 0, "extra_body": extra, **more}


def response(client: openai.OpenAI, live: LiveServer, wish: Wish, tokens: int = 4, **more: Any) -> Any:
    asked: Any = {"model": live.name, "max_output_tokens": tokens, "temperature": 0, "extra_body": {"hotswap": wish}}
    return client.responses.create(input="hi", **asked, **more)


ROUTES = [chat, completion, response]
Call = Callable[..., Any]


@pytest.mark.parametrize("call", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_version_that_does_not_run_is_a_conflict_and_a_bad_wish_a_bad_request(
    live: LiveServer, client: openai.OpenAI, call: Call, stream: bool
) -> None:
    with pytest.raises(openai.ConflictError) as refused:
        call(client, live, {"version": 999999}, stream=stream)
    assert refused.value.code == "version_unavailable"
    with pytest.raises(openai.InternalServerError) as waited:
        call(client, live, {"min_version": 999999, "wait_s": 0.1}, stream=stream)
    assert (waited.value.status_code, waited.value.code) == (504, "version_wait_timeout")
    with pytest.raises(openai.BadRequestError) as bad:
        call(client, live, {"policy": "never"}, stream=stream)
    assert (bad.value.code, bad.value.param) == ("invalid_parameter", "hotswap.policy")


@pytest.mark.parametrize("call", ROUTES)
def test_what_is_asked_of_swaps_changes_nothing_without_one(
    live: LiveServer, client: openai.OpenAI, call: Call
) -> None:
    version = live.active()
    for wish in ({"policy": "finish", "finish_s": 5}, {"policy": "recompute"}, {"version": version}):
        answer = call(client, live, wish)
        choice = answer if call is response else answer.choices[0]
        assert choice.model_extra["weight_versions"] == [{"version": version, "start": 0, "end": 4}]
        (prompt,) = choice.model_extra["prompt_weight_versions"]
        tokens = answer.usage.input_tokens if call is response else answer.usage.prompt_tokens
        assert prompt == {"version": version, "start": 0, "end": tokens}


def texts(call: Call, events: Iterable[Any]) -> Iterable[str]:
    """The pieces of text in a stream."""
    for event in events:
        if call is response:
            if event.type == "response.output_text.delta":
                yield event.delta
        elif event.choices:
            yield (event.choices[0].delta.content if call is chat else event.choices[0].text) or ""


def cut(live: LiveServer, call: Call, events: Iterable[Any]) -> tuple[openai.APIError | None, int]:
    """The error that ends a stream when the weights are swapped after its first token, and how much came before."""
    seen = 0
    try:
        for text in texts(call, events):
            if text and not seen:
                live.rollback()
            seen += bool(text)
    except openai.APIError as error:
        return error, seen
    return None, seen


@pytest.mark.parametrize("call", ROUTES)
def test_a_stream_cut_by_a_swap_raises_a_typed_error(live: LiveServer, client: openai.OpenAI, call: Call) -> None:
    for _ in range(8):  # on a busy machine the swap may come when everything is said
        error, seen = cut(live, call, call(client, live, {"policy": "abort"}, tokens=900, stream=True))
        if error is not None:
            break
    assert error is not None
    assert 0 < seen < 900
    assert (error.code, error.type) == ("weights_changed", "conflict_error")


async def while_swapping(live: LiveServer, *call: Any, **more: Any) -> asyncio.Task[Any]:
    """A call that has ended, in whatever way, while the weights were swapped again and again."""
    asked = asyncio.create_task(asyncio.to_thread(*call, **more))
    while not asked.done():
        await asyncio.to_thread(live.rollback)
    return asked


@pytest.mark.parametrize("call", ROUTES)
async def test_a_whole_answer_cut_by_a_swap_raises_a_typed_error(
    live: LiveServer, client: openai.OpenAI, call: Call
) -> None:
    for _ in range(8):
        asked = await while_swapping(live, call, client, live, {"policy": "abort"}, tokens=900)
        if (error := asked.exception()) is not None:
            break
    assert isinstance(error, openai.ConflictError)
    assert (error.code, error.type) == ("weights_changed", "conflict_error")


def check_labels(choice: Any, tokens: int) -> set[str]:
    """The versions in a choice's spans, which are vLLM's; beside them stand those of the prompt as ever."""
    spans = choice.model_extra["weight_versions"]
    assert all(set(span) == {"version", "start", "end"} for span in spans)
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == tokens
    assert all(isinstance(span["version"], str) for span in spans)
    assert isinstance(choice.model_extra["prompt_weight_versions"][0]["version"], int)
    return {span["version"] for span in spans}


@pytest.mark.parametrize("call", [chat, completion])
def test_a_streams_last_chunk_has_spans_as_vllm_has_them(live: LiveServer, client: openai.OpenAI, call: Call) -> None:
    for _ in range(8):  # on a busy machine the swap may come when everything is said
        versions: set[str] = set()
        chunks = []
        for chunk in call(client, live, {}, tokens=300, labels=True, stream=True):
            if len(chunks) == 3:
                live.rollback()
            chunks.append(chunk)
            versions.add(str(chunk.model_extra["weight_version"]))
        *others, last = [choice for chunk in chunks for choice in chunk.choices]
        assert last.finish_reason == "length"
        assert not [choice for choice in others if "weight_versions" in choice.model_extra]
        assert check_labels(last, 300) == versions
        if len(versions) > 1:
            return
    pytest.fail("no swap fell into a stream")


@pytest.mark.parametrize("call", [chat, completion])
async def test_a_whole_answer_has_spans_as_vllm_has_them(live: LiveServer, client: openai.OpenAI, call: Call) -> None:
    for _ in range(8):
        answer = (await while_swapping(live, call, client, live, {}, tokens=900, labels=True)).result()
        versions = check_labels(answer.choices[0], 900)
        assert str(answer.model_extra["weight_version"]) in versions
        if len(versions) > 1:
            return
    pytest.fail("no swap fell into an answer")


# JavaScript

Sdk = Callable[[LiveServer, str], subprocess.Popen[str]]


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Sdk:
    """Starts tests/js/openai_sdk.js with the given arguments, the SDK installed as its lock file says."""
    directory = tmp_path_factory.mktemp("js")
    node = installed(JS, directory)

    def start(live: LiveServer, what: str) -> subprocess.Popen[str]:
        arguments = [*node, "openai_sdk.js", live.url + "/v1", live.name, what]
        pipe = subprocess.PIPE
        return subprocess.Popen(arguments, cwd=directory, stdout=pipe, stderr=pipe, text=True)

    return start


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON object in the last line it prints."""
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return dict(orjson.loads(output.strip().splitlines()[-1]))


def test_answers_arrive_with_the_fields_of_this_server(
    live: LiveServer, checkpoints: dict[str, Path], sdk: Sdk
) -> None:
    version = live.push(checkpoints["say-1"])
    told = result(sdk(live, "answers"))
    whole = [{"version": version, "start": 0, "end": 5}]
    assert told["header"] == str(version)
    text = told["chat"]["choices"][0]["message"]["content"]
    assert text
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in told["chatStream"]) == text
    assert "".join(c["choices"][0]["text"] for c in told["completionStream"]) == text
    assert told["completion"]["choices"][0]["text"] == text
    deltas = [e for e in told["responseStream"] if e["type"] == "response.output_text.delta"]
    assert "".join(e["delta"] for e in deltas) == told["response"]["output_text"] == text
    last = [told[name][-1]["choices"][0] for name in ("chatStream", "completionStream")]
    for choice in (told["chat"]["choices"][0], told["completion"]["choices"][0], *last, told["response"]):
        assert choice["weight_versions"] == whole
        (prompt,) = choice["prompt_weight_versions"]
        assert (prompt["version"], prompt["start"]) == (version, 0)
    assert told["responseStream"][-1]["response"]["weight_versions"] == whole
    assert {e["weight_version"] for e in deltas} == {version}
    assert told["withField"]["choices"][0]["weight_versions"] == whole


def test_refusals_are_the_errors_of_the_sdk(live: LiveServer, sdk: Sdk) -> None:
    told = result(sdk(live, "errors"))
    assert all(error["typed"] for error in told.values())
    for name in ("header", "field", "stream", "responses"):
        found = [told[name][k] for k in ("name", "status", "code", "type")]
        assert found == ["ConflictError", 409, "version_unavailable", "conflict_error"]
    assert (told["waited"]["name"], told["waited"]["status"]) == ("InternalServerError", 504)
    assert told["waited"]["code"] == "version_wait_timeout"
    assert (told["policy"]["name"], told["policy"]["code"]) == ("BadRequestError", "invalid_parameter")
    assert told["model"]["name"] == "NotFoundError"


def test_a_stream_that_a_swap_cuts_ends_with_a_typed_error(
    live: LiveServer, checkpoints: dict[str, Path], sdk: Sdk
) -> None:
    live.push(checkpoints["say-1"])
    live.push(checkpoints["say-2"])
    for _ in range(8):  # on a busy machine the swap may come when everything is said
        stream = sdk(live, "cut")
        assert stream.stdout is not None
        assert orjson.loads(stream.stdout.readline()) == "streams"
        live.rollback()
        told = result(stream)
        if "answer" not in told["error"]:
            break
    assert 0 < told["chunks"] < 900
    assert told["error"]["typed"]
    assert (told["error"]["code"], told["error"]["type"]) == ("weights_changed", "conflict_error")
