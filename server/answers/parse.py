"""From the bytes of an exchange to one record: what was asked, what was answered, and which weights wrote which token.

The bytes are those that the client has sent and got, streamed or whole, on every route of ROUTES. An answer that broke
off is read as far as it goes. Spans are those of the answer (server/instance/provenance.py); of a stream that broke off
they are what its chunks say. `parse` is pure and takes milliseconds for a long answer: it runs on a thread.

docs/feedback.md describes the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import orjson

FORMAT: Final = 1
ROUTES: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate")
CUT: Final = frozenset({"length", "max_tokens", "max_output_tokens"})  # finish reasons: it reached its limit of tokens
# The fields of a request that shape its answer. No others are kept: a field that is new may name a user.
PARAMETERS: Final = frozenset({
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "best_of", "chat_template",
    "chat_template_kwargs", "continue_final_message", "documents", "echo", "frequency_penalty", "ignore_eos",
    "include_reasoning", "include_stop_str_in_output", "length_penalty", "logit_bias", "logprob_token_ids", "logprobs",
    "max_completion_tokens", "max_output_tokens", "max_tokens", "max_tool_calls", "min_p", "min_tokens", "n",
    "output_config", "parallel_tool_calls", "presence_penalty", "priority", "prompt_logprobs", "reasoning",
    "reasoning_effort", "repetition_detection", "repetition_penalty", "response_format", "seed", "skip_special_tokens",
    "spaces_between_special_tokens", "stop", "stop_sequences", "stop_token_ids", "structured_outputs", "suffix",
    "temperature", "text", "thinking", "thinking_token_budget", "tool_choice", "top_k", "top_logprobs", "top_p",
    "truncate_prompt_tokens", "truncation", "truncation_side", "use_beam_search",
})  # fmt: skip
_NAMES_A_USER: Final = "user_id"  # in the metadata of Anthropic's API


class Span(msgspec.Struct, frozen=True):
    """Tokens [start, end) and the version of the weights that wrote them, or computed their keys and values."""

    version: int
    start: int
    end: int


class Choice(msgspec.Struct):
    """One sample of an answer. `token_ids` and `logprobs` (of the chosen tokens) are empty where the answer has none;
    `tool_calls` are in the chat routes' form, whatever the route."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = []
    finish_reason: str | None = None
    token_ids: list[int] = []
    logprobs: list[float] = []
    weight_versions: list[Span] = []
    prompt_weight_versions: list[Span] = []


class About(msgspec.Struct, frozen=True):
    """The gateway's knowledge of an exchange: unix seconds, seconds, and names. `code` is that of an error."""

    request_id: str
    route: str
    status: int
    key: str
    key_id: str
    ended: float
    duration_s: float
    first_byte_s: float | None = None
    queued_s: float = 0.0
    code: str | None = None
    instance: str | None = None
    first_version: int | None = None
    last_version: int | None = None
    drawn_version: int | None = None  # by a split of the traffic, whichever version answered
    cluster: int = -1  # of the requests that were drawn together with it, -1: it was drawn by itself
    streamed: bool = False
    served: str = ""  # the model that answered; `Answer.model` is the one asked for


class Answer(msgspec.Struct, tag_field="record", tag="answer"):
    """An exchange as a record. `messages` are those of the chat routes, with instructions as the first; `prompt` is a
    text, token ids, or a list of either. `error` is the answer's own, where it is one or ends with one."""

    format: int
    id: str
    about: About
    model: str = ""
    messages: list[dict[str, Any]] = []
    prompt: str | list[Any] | None = None
    tools: list[Any] = []
    parameters: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    choices: list[Choice] = []
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: dict[str, Any] | None = None

    @property
    def whole(self) -> bool:
        """Whether it came to its end."""
        ended = bool(self.choices) and all(choice.finish_reason is not None for choice in self.choices)
        return ended and self.error is None and self.about.status == 200

    @property
    def version(self) -> int | None:
        """The version that wrote all of it; None if several did, or it is not known."""
        versions = {span.version for choice in self.choices for span in choice.weight_versions}
        versions |= {v for v in (self.about.first_version, self.about.last_version) if v is not None}
        return versions.pop() if len(versions) == 1 else None


def parse(body: bytes, answer: bytes, about: About) -> Answer:
    """The record of an exchange. Raises ValueError for bytes that are no exchange of one of ROUTES."""
    read = _ANSWERS.get(about.route)
    if read is None:
        raise ValueError(f"{about.route} is none of {', '.join(ROUTES)}")
    try:
        record = _asked(orjson.loads(body), about)
        for payload in _events(answer) if about.streamed else _whole(answer):
            _common(record, payload)
            if record.error is None:
                read(record, payload)
        record.choices.sort(key=lambda choice: choice.index)
        return msgspec.convert(msgspec.to_builtins(record), Answer)  # nothing of another type is in it
    except (ValueError, TypeError, AttributeError, LookupError, msgspec.MsgspecError) as error:
        raise ValueError(f"{about.request_id}: {type(error).__name__}: {error}") from error


def _whole(answer: bytes) -> Iterator[dict[str, Any]]:
    if answer:  # a client that left early has none
        yield _object(answer)


def _events(answer: bytes) -> Iterator[dict[str, Any]]:
    """The objects in the events that are whole. An answer of another kind (an error) is one object."""
    if answer[:1] == b"{":
        yield _object(answer)
        return
    for event in answer.split(b"\n\n")[:-1]:
        for line in event.split(b"\n"):
            if line.startswith(b"data: {"):
                yield _object(line[6:])


def _object(raw: bytes) -> dict[str, Any]:
    found = orjson.loads(raw)
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    return found


def _asked(request: dict[str, Any], about: About) -> Answer:
    metadata = request.get("metadata")
    found = Answer(
        format=FORMAT,
        id="",
        about=about,
        model=str(request.get("model") or ""),
        tools=request.get("tools") or [],
        metadata={k: v for k, v in metadata.items() if k != _NAMES_A_USER} if isinstance(metadata, dict) else {},
        parameters={name: value for name, value in request.items() if name in PARAMETERS},
    )
    if about.route in ("/v1/completions", "/generate"):
        ids = request.get("prompt_token_ids")
        found.prompt = request.get("prompt") if ids is None else ids
        return found
    first = request.get("instructions") or request.get("system")
    found.messages = [{"role": "system", "content": first}] if first else []
    if about.route == "/v1/responses":
        said = request.get("input")
        found.messages += [{"role": "user", "content": said}] if isinstance(said, str) else [*map(_item, said or [])]
    else:
        found.messages += request.get("messages") or []
    return found


def _item(item: dict[str, Any]) -> dict[str, Any]:
    """An input item of /v1/responses as a chat message."""
    if item.get("type") == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_call(item.get("call_id"), item)]}
    if item.get("type") == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    content = item.get("content")
    if isinstance(content, list):
        parts = [part | {"type": "text"} if "text" in part else part for part in content]
        content = "".join(part["text"] for part in parts) if all("text" in part for part in parts) else parts
    return {"role": item.get("role", "assistant"), "content": content}


def _common(record: Answer, payload: dict[str, Any]) -> None:
    """Takes the fields that answers and events of all routes have: an id, an error, counts."""
    inner = payload.get("response") or payload.get("message")
    inner = inner if isinstance(inner, dict) else {}
    named = payload.get("id") or inner.get("id")
    if isinstance(named, str) and (not record.id or inner):
        record.id = named
    error = payload.get("error") or inner.get("error")
    if error is None and payload.get("object") == "error":
        error = payload
    if error is not None:
        record.error = error if isinstance(error, dict) else {"message": str(error)}
    for told in (payload.get("hotswap_usage"), payload.get("usage"), inner.get("usage")):
        if isinstance(told, dict):
            prompt = told.get("prompt_tokens", told.get("input_tokens"))
            completion = told.get("completion_tokens", told.get("output_tokens"))
            record.prompt_tokens = record.prompt_tokens if prompt is None else prompt
            record.completion_tokens = record.completion_tokens if completion is None else completion


def _choice(record: Answer, index: int) -> Choice:
    for choice in record.choices:
        if choice.index == index:
            return choice
    record.choices.append(Choice(index))
    return record.choices[-1]


def _versions(choice: Choice, said: dict[str, Any], version: int | None, *, last: bool, new: int) -> None:
    """Spans: at the end those of the whole choice; before it, those of the `new` tokens that a chunk has brought."""
    told = said.get("weight_versions")
    if told and (last or not choice.token_ids):
        choice.weight_versions = _spans(told)
    elif new and not last:
        end = len(choice.token_ids)
        for span in _spans(said.get("hotswap_weight_versions") or told or ()) or [Span(version or 0, end - new, end)]:
            _extend(choice.weight_versions, span)
    if said.get("prompt_weight_versions"):
        choice.prompt_weight_versions = _spans(said["prompt_weight_versions"])


def _spans(told: Any) -> list[Span]:
    """Versions are texts where the client has asked for vLLM's form."""
    return [Span(int(span["version"]), span["start"], span["end"]) for span in told]


def _extend(spans: list[Span], span: Span) -> None:
    if span.version <= 0 or span.end <= span.start or (spans and span.end <= spans[-1].end):
        return
    if spans and spans[-1].version == span.version:
        spans[-1] = Span(span.version, spans[-1].start, span.end)
    else:
        spans.append(span)


def _choices(record: Answer, payload: dict[str, Any]) -> None:
    """/v1/chat/completions and /v1/completions, a whole answer or an event."""
    for said in payload.get("choices") or ():
        choice = _choice(record, said.get("index", 0))
        message = said.get("message") or said.get("delta") or {}
        choice.text += said.get("text") or message.get("content") or ""
        choice.reasoning += message.get("reasoning") or message.get("reasoning_content") or ""
        _add_calls(choice, message.get("tool_calls") or ())
        choice.logprobs += _logprobs(said.get("logprobs"))
        new = said.get("token_ids") or []
        choice.token_ids += new
        reason = said.get("finish_reason")
        choice.finish_reason = reason or choice.finish_reason
        _versions(choice, said, payload.get("weight_version"), last=reason is not None, new=len(new))


def _logprobs(told: Any) -> list[float]:
    """Of the chosen tokens: of chats, of completions, and of /generate."""
    if isinstance(told, dict):
        content = told.get("content")
        told = told.get("token_logprobs") if content is None else [token["logprob"] for token in content]
    return [float(value) for value in told or () if value is not None]


def _add_calls(choice: Choice, calls: Any) -> None:
    """Calls of tools, whole or in pieces: a piece has an index, and its text goes on where the last one ended."""
    for call in calls:
        at = call.get("index", len(choice.tool_calls))
        function = call.get("function") or {}
        while len(choice.tool_calls) <= at:
            choice.tool_calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        kept = choice.tool_calls[at]
        kept["id"] = call.get("id") or kept["id"]
        kept["function"]["name"] += function.get("name") or ""
        kept["function"]["arguments"] += function.get("arguments") or ""


def _call(call_id: Any, said: dict[str, Any]) -> dict[str, Any]:
    arguments = said.get("arguments", said.get("input", ""))
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": said.get("name"), "arguments": text}}


def _generate(record: Answer, payload: dict[str, Any]) -> None:
    """/generate: `token` events and `done`, or one object like `done`."""
    for said in payload.get("choices") or ([payload] if "token_ids" in payload else ()):
        choice = _choice(record, said.get("index", 0))
        new = said.get("token_ids") or []
        choice.text += said.get("text") or ""
        choice.token_ids += new
        choice.logprobs += _logprobs(said.get("logprobs"))
        choice.finish_reason = said.get("finish_reason") or choice.finish_reason
        if said.get("weight_versions"):  # all of them so far
            choice.weight_versions = _spans(said["weight_versions"])
        _versions(choice, {**said, "weight_versions": None}, payload.get("weight_version"), last=False, new=len(new))


def _responses(record: Answer, payload: dict[str, Any]) -> None:
    """/v1/responses: the response itself, or the event that has it at the end; before that, pieces of text."""
    kind = payload.get("type") or ""
    if kind == "response.output_text.delta":
        _choice(record, 0).text += payload.get("delta") or ""
        return
    response = payload.get("response") if kind else payload
    if not isinstance(response, dict) or response.get("status") not in ("completed", "incomplete", "failed"):
        return
    record.choices = [choice := Choice(0)]
    for item in response.get("output") or ():
        parts = [part for part in item.get("content") or () if "text" in part]
        text = "".join(part["text"] for part in parts)
        if item.get("type") == "function_call":
            choice.tool_calls.append(_call(item.get("call_id") or item.get("id"), item))
        elif item.get("type") == "reasoning":
            choice.reasoning += text
        else:
            choice.text += text
            choice.logprobs += [float(t["logprob"]) for part in parts for t in part.get("logprobs") or ()]
    why = (response.get("incomplete_details") or {}).get("reason")
    choice.finish_reason = why or ("stop" if response["status"] == "completed" else response["status"])
    _versions(choice, response, None, last=True, new=0)


def _messages(record: Answer, payload: dict[str, Any]) -> None:
    """/v1/messages: the message itself, or its blocks and their deltas."""
    kind = payload.get("type")
    choice = _choice(record, 0)
    if kind == "message":
        for block in payload.get("content") or ():
            _block(choice, block, whole=True)
        choice.finish_reason = payload.get("stop_reason") or choice.finish_reason
        _versions(choice, payload, None, last=True, new=0)
    elif kind == "content_block_start":
        _block(choice, payload.get("content_block") or {}, whole=False)
    elif kind == "content_block_delta":
        delta = payload.get("delta") or {}
        choice.text += delta.get("text") or ""
        choice.reasoning += delta.get("thinking") or ""
        if delta.get("partial_json") and choice.tool_calls:
            choice.tool_calls[-1]["function"]["arguments"] += delta["partial_json"]
    elif kind == "message_delta":
        choice.finish_reason = (payload.get("delta") or {}).get("stop_reason") or choice.finish_reason
        _versions(choice, payload, None, last=True, new=0)


def _block(choice: Choice, block: dict[str, Any], *, whole: bool) -> None:
    if block.get("type") == "tool_use":
        call = _call(block.get("id"), block)
        if not whole:  # its input follows in pieces
            call["function"]["arguments"] = ""
        choice.tool_calls.append(call)
    choice.text += block.get("text") or ""
    choice.reasoning += block.get("thinking") or ""


_ANSWERS: Final[dict[str, Callable[[Answer, dict[str, Any]], None]]] = {
    "/v1/chat/completions": _choices,
    "/v1/completions": _choices,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
    "/generate": _generate,
}
