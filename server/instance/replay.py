"""Streams that another instance can go on with, and going on with them (server/resume.py).

Going on, the engine wrapper yields first what the client has already, in one output, so that whatever vLLM counts and
parses is where it was; the events made of it are not sent (`Replaying.muted`).
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable
from typing import Any

import msgspec

from server import api
from server.instance.inflight import Problem
from server.resume import RESUMABLE, RESUME, RESUMED, Resume

ROUTES = frozenset(route.path for route in api.ROUTES if route.continued)
MAX_RESUME = 16 * 2**20


class Replaying:
    """A request's side of it. `wanted`: the gateway would like to be able to have the answer continued."""

    def __init__(self, *, wanted: bool = False, resume: Resume | None = None) -> None:
        self.wanted = wanted
        self.resume = resume
        self.resumable = False  # known once the engine has been asked
        self.muted = False  # the client has what is being told now
        self._begun = resume is not None and bool(resume.tokens)
        self._lead = resume.lead if resume is not None and not self._begun else 0
        self._ids: list[int] = []  # of the tokens that the next event tells,
        self._text = ""  # and the end of what it says

    def begins(self, calls: int, prompt: Any, sampling_params: Any) -> None:
        """The engine is asked, for the `calls`th time."""
        self.resumable = self.wanted and calls == 1 and extensible(prompt) and reproducible(sampling_params)

    def record(self, outputs: Iterable[Any]) -> None:
        """An output of the engine, of which the next event is made."""
        if self.resumable and not self.muted:
            for output in outputs:
                self._ids += output.token_ids
                self._text += output.text

    def stamp(self, choice: dict[str, Any], prompt_spans: list[dict[str, int]]) -> None:
        """Put the ids of its tokens into a choice of an event. One that opens the answer tells none."""
        delta = choice.get("delta") or {}
        said = choice.get("text") or delta.get("content") or ""
        if self._ids and "role" not in delta and said.endswith(self._text):
            choice["token_ids"], self._ids, self._text = self._ids, [], ""
            if not self._begun:
                choice["prompt_weight_versions"], self._begun = prompt_spans, True

    def silences(self, payload: dict[str, Any]) -> bool:
        """Whether the client has this event already."""
        if self.muted:
            return True
        if self._lead:
            self._lead -= 1
            return True
        sent = self.resume is not None and self.resume.usage_sent
        return bool(sent and not payload.get("choices") and payload.get("usage"))

    def disguise(self, payload: dict[str, Any]) -> None:
        """Give an event the names that the answer began with."""
        if self.resume is not None:
            names = {"id": self.resume.id, "created": self.resume.created}
            payload |= {k: v for k, v in names.items() if v is not None and k in payload}

    def for_engine(self) -> dict[str, Any]:
        """As weightsync/vllm_engine/engine_core/requests.py reads it."""
        resume = self.resume
        if resume is None or not resume.tokens:
            return {}
        spans = [(span.version, span.start) for span in resume.spans]
        prompt = [(span.end, span.version) for span in resume.prompt_spans]
        ended = resume.finish_reason is not None
        return {"replay": {"tokens": resume.tokens, "spans": spans, "prompt": prompt, "ended": ended}}

    def seams(self) -> dict[str, list[int]]:
        """Where others have gone on with the answer, for the end of it."""
        return {"resumed_at": self.resume.resumed_at} if self.resume is not None else {}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of a stream that tell the gateway whether it can be resumed, and whether it was."""
        found = [(RESUMABLE, b"1")] if self.resumable else []
        return [*found, (RESUMED, b"1")] if self.resume is not None else found


def extensible(prompt: Any) -> bool:
    """Whether tokens can be put behind it: it consists of tokens, and is the decoder's own."""
    if not isinstance(prompt, dict):
        return isinstance(prompt, str)
    return prompt.get("type", "token") in ("token", "multimodal") and "prompt_embeds" not in prompt


def reproducible(params: Any) -> bool:
    """Whether tokens behind the prompt are to the engine what tokens it generated are.

    Penalties and forbidden words look at generated tokens alone, a grammar has a state, and of what plug-ins keep
    nothing is known.
    """
    counted = params.presence_penalty or params.frequency_penalty or params.bad_words or params.extra_args
    stateful = (params.structured_outputs, params.thinking_token_budget, params.repetition_detection)
    scored = (params.prompt_logprobs, params.prompt_logprob_token_ids, params.logprob_token_ids)
    forced = params.trace_decode_token_ids
    rest = (*stateful, *scored, forced)
    single = params.n == 1 and params.output_kind.name == "DELTA"
    return single and not counted and all(each is None for each in rest)


def replayed(output: Any, resume: Resume) -> Any | None:
    """The output that says what the client has, if the engine's first `output` carries it."""
    choice = next((o.hotswap_replay for o in output.outputs if getattr(o, "hotswap_replay", None)), None)
    if choice is None:
        return None
    choice.finish_reason, choice.stop_reason = resume.finish_reason, resume.stop_reason
    told = copy.copy(output)
    told.outputs, told.finished = [choice], resume.finish_reason is not None
    return told


async def read(scope: Any, receive: Any, routes: Container[str] = ROUTES) -> tuple[Replaying, Any]:
    """The gateway's wishes, and `receive` without what it put before the body. Raises Problem."""
    headers = dict(scope.get("headers", ()))
    if scope["path"] not in routes or RESUMABLE not in headers:
        return Replaying(), receive
    if (length := headers.get(RESUME)) is None:
        return Replaying(wanted=True), receive
    if not length.isdigit() or not 0 < int(length) <= MAX_RESUME:
        raise _bad(f"{RESUME.decode()}: {length!r} is not a length")
    prefix, receive = await _split(receive, int(length))
    try:
        return Replaying(wanted=True, resume=msgspec.json.decode(prefix, type=Resume)), receive
    except msgspec.DecodeError as error:
        raise _bad(f"what stands before the body cannot be read: {error}") from error


async def _split(receive: Any, size: int) -> tuple[bytes, Any]:
    """The first `size` bytes of a body, and a `receive` for the rest of it."""
    data, more = b"", True
    while len(data) < size and more:
        message = await receive()
        if message["type"] != "http.request":
            raise _bad("the client left")
        data += message.get("body", b"")
        more = message.get("more_body", False)
    rest: list[dict[str, Any]] = [{"type": "http.request", "body": data[size:], "more_body": more}]

    async def receive_rest() -> Any:
        return rest.pop() if rest else await receive()

    return data[:size], receive_rest


def _bad(message: str) -> Problem:
    """The bytes before the body are not those that a gateway writes there."""
    return Problem(message, code="bad_resume")
