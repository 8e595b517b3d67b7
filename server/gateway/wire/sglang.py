"""SGLang's form of POST /generate: its request as one of /v1/completions, and that answer as SGLang's.

    text or input_ids, one or a list       prompt               text          choices[].text
    sampling_params.max_new_tokens, ...    max_tokens, ...      output_ids    choices[].token_ids
    return_logprob, top_logprobs_num, ...  logprobs, echo, ...  meta_info     logprobs, finish_reason, weight_versions

Limits, queue, routing, failover, the answer log and the metrics see the request and the answer of /v1/completions. The
client gets its own form: one object, a list of them for a list of prompts or `n` above 1, or a stream of events of
which each has all that its answer has so far.

SGLang's form of POST /classify becomes vLLM's:

    text or input_ids, one or a list       input                embedding     data[].probs, without activation

Fields that have no meaning here are refused by name. They are accepted where they ask for nothing, such as null, for
clients send those too.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from server.errors import BadUpstream, HttpError
from server.gateway.wire.bodies import Fields, Told, raw_fields

T = TypeVar("T")
NULL: Final = b"null"
_NOTHING: Final = frozenset({NULL, b"false", b"0", b"[]", b"{}", b'""'})  # values that ask for nothing
_UNSET: Final = msgspec.Raw(NULL)
_NONE: Final = msgspec.Raw(b"[]")
# One prompt and several: how their JSON begins.
_PROMPTS: Final = {
    "text": (re.compile(rb'"'), re.compile(rb'\[\s*"'), "a text, or a list of texts"),
    "input_ids": (re.compile(rb"\[\s*\d"), re.compile(rb"\[\s*\["), "a list of token ids, or a list of such lists"),
}

Count = Annotated[int, Meta(ge=0)]
Start = Annotated[int, Meta(ge=-1)]


# requests


class Sampling(msgspec.Struct):
    """`sampling_params`. As in SGLang, null stands for the default, but that of `max_new_tokens` means no bound there,
    which /v1/completions cannot say."""

    max_new_tokens: Count = 128
    n: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Start | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stream_interval: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    choice: list[str] | None = None


class Prompted(msgspec.Struct):
    """The body of /classify. SGLang takes lists of settings too, one for each prompt; here they are the same for
    all."""

    text: msgspec.Raw = _UNSET
    input_ids: msgspec.Raw = _UNSET
    rid: str | list[str] | None = None
    lora_path: str | None = None
    model: str | None = None  # of several that the gateway serves; SGLang serves one
    hotswap: msgspec.Raw = _UNSET


class Asked(Prompted):
    """The body of /generate."""

    sampling_params: msgspec.Raw = _UNSET
    return_logprob: bool | None = None
    logprob_start_len: Start | None = None
    top_logprobs_num: Count | None = None
    token_ids_logprob: list[Count] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None


# Fields of SGLang's requests that are not answered, by what to do instead; all others: leave them out.
_REMEDIES: Final = {
    name: remedy
    for remedy, names in {
        "send images, sounds and films in `messages` to /v1/chat/completions, or to /classify in vLLM's form": (
            "image_data video_data audio_data modalities mm_hashes mm_content_hashes use_audio_in_video video_config "
            "images_config mm_processor_kwargs"
        ),
        "ask for `routed_experts` in this server's own form": "return_routed_experts routed_experts_start_len",
        "send the header x-hotswap-priority, of which the lowest value goes first": "priority",
        "requests with the same header x-session-id go to the same instance": "session_id routing_key conversation_id",
        "leave it out": (
            "return_hidden_states return_sampling_mask return_flat_raw_top_logprobs background no_logs return_bytes "
            "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 return_indexer_topk return_entropy "
            "require_reasoning custom_labels custom_params stop_regex"
        ),
    }.items()
    for name in names.split()
}
# The default of /v1/completions is what the model's generation_config.json says; SGLang's are these.
_DEFAULTS: Final = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}  # fmt: skip
_NAMES: Final = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}  # fmt: skip
_GRAMMARS: Final = {
    "json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag", "choice": "choice",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The rest of a request, of which its answer is made. `listed`: the answer is a list; `scores`: it is of /classify;
    `nothing`: it has no token, though the engine generates one. `inputs` is the first prompt token whose
    log-probability is told, -1 for none; `tops`: so many of the likeliest tokens; `ids`: these tokens' too; `texts`:
    and the tokens as text."""

    rid: str | list[str] | None
    listed: bool
    scores: bool = False
    stream: bool = False
    n: int = 1
    nothing: bool = False
    prompt_ids: bool = False
    logprobs: bool = False
    inputs: int = -1
    tops: int = 0
    ids: Sequence[int] = ()
    texts: bool = False


def is_sglang(fields: Fields) -> bool:
    """Whether a body of /generate or /classify has SGLang's form."""
    unset = msgspec.UNSET
    return fields.text is not unset or fields.input_ids is not unset or fields.sampling_params is not unset


def translate(body: bytes) -> tuple[bytes, Wanted]:
    """The body for /v1/completions, and what the answer is made by. Raises HttpError (400), which names the field."""
    asked = _read(body, Asked, "")
    params = bytes(asked.sampling_params)
    if params != NULL and not params.startswith(b"{"):
        raise _invalid("sampling_params", "`sampling_params` must be one object, for all prompts; send that.")
    sampling = Sampling() if params == NULL else _read(params, Sampling, "sampling_params.")
    common, several = _common(asked, "prompt")
    n = sampling.n or 1
    wanted = Wanted(
        rid=asked.rid, stream=bool(asked.stream), listed=several or n > 1, n=n, nothing=not sampling.max_new_tokens,
        prompt_ids=bool(asked.return_prompt_token_ids), **_logprobs(asked),
    )  # fmt: skip
    sent = common | {"stream": wanted.stream, "return_token_ids": True}
    if wanted.logprobs:
        sent |= {"logprobs": wanted.tops, "return_tokens_as_token_ids": not wanted.texts, "echo": wanted.inputs >= 0}
    if wanted.ids:
        sent["logprob_token_ids"] = wanted.ids
    return msgspec.json.encode(sent | _completion(sampling)), wanted


def translate_classify(body: bytes) -> tuple[bytes, Wanted]:
    """The same for /classify. SGLang pools what the model's head says, without softmax or sigmoid."""
    asked = _read(body, Prompted, "")
    sent, several = _common(asked, "input")
    return msgspec.json.encode(sent | {"use_activation": False}), Wanted(rid=asked.rid, listed=several, scores=True)


def _common(asked: Prompted, field: str) -> tuple[dict[str, Any], bool]:
    """The fields that both routes have, the prompt as `field`, and whether there is a list of prompts."""
    prompt, several = _prompt(asked)
    sent: dict[str, Any] = {field: prompt}
    if asked.lora_path and asked.model:
        raise _invalid("lora_path", "`lora_path` and `model` both name what answers; send one of them.")
    if asked.lora_path or asked.model:
        sent["model"] = asked.lora_path or asked.model
    if bytes(asked.hotswap) != NULL:
        sent["hotswap"] = asked.hotswap
    return sent, several


def _completion(sampling: Sampling) -> dict[str, Any]:
    """The fields of /v1/completions."""
    given = {name: value for name, value in msgspec.structs.asdict(sampling).items() if value is not None}
    grammars = {ours: value for name, ours in _GRAMMARS.items() if (value := given.pop(name, None))}
    if len(grammars) > 1:
        raise _invalid("sampling_params", f"Only one of {', '.join(_GRAMMARS)} can shape an answer; send one.")
    if not sampling.max_new_tokens:  # the engine generates one at least
        given |= {"max_new_tokens": 1, "min_new_tokens": 0}
    sent = _DEFAULTS | {_NAMES.get(name, name): value for name, value in given.items()}
    return sent | {"structured_outputs": grammars} if grammars else sent


def _prompt(asked: Prompted) -> tuple[msgspec.Raw, bool]:
    """The prompt as it was sent, and whether it is a list of them."""
    sent = [name for name in _PROMPTS if bytes(getattr(asked, name)) != NULL]
    if len(sent) != 1:
        raise _invalid("text", "A request has one kind of prompt; send either `text` or `input_ids`.")
    raw: msgspec.Raw = getattr(asked, sent[0])
    one, several, kind = _PROMPTS[sent[0]]
    if not (one.match(raw) or several.match(raw)):
        raise _invalid(sent[0], f"`{sent[0]}` must be {kind}, and not empty.")
    return raw, several.match(raw) is not None


def _logprobs(asked: Asked) -> dict[str, Any]:
    """The fields of Wanted about log-probabilities. They mean nothing without `return_logprob`, as in SGLang."""
    if not asked.return_logprob:
        return {}
    ids, tops, texts = asked.token_ids_logprob or [], asked.top_logprobs_num or 0, bool(asked.return_text_in_logprobs)
    inputs = -1 if asked.logprob_start_len is None else asked.logprob_start_len
    if ids and (tops or inputs >= 0):
        other = "top_logprobs_num" if tops else "logprob_start_len"
        raise _unsupported("token_ids_logprob", f"leave out `{other}`, or send two requests", f" beside `{other}`")
    if texts and (ids or tops):
        what = " for other tokens than those of prompt and answer"
        raise _unsupported("return_text_in_logprobs", "leave it out, and POST the ids to /detokenize", what)
    return {"logprobs": True, "inputs": inputs, "tops": tops, "ids": ids, "texts": texts}


def _read(raw: bytes, kind: type[T], place: str) -> T:
    """An object with the fields of `kind`, and others only where they ask for nothing."""
    known = kind.__struct_fields__  # type: ignore[attr-defined]
    for name, sent in raw_fields(raw).items():
        idle = bytes(sent) in _NOTHING if name in _REMEDIES else bytes(sent) == NULL
        if name not in known and not idle:
            raise _unsupported(place + name, _REMEDIES.get(name, "leave it out"))
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        found = re.search(r" - at `\$\.?([^`]*)`", str(error))
        name = place + (found[1] if found is not None else "")
        raise _invalid(name, f"`{name}`: {str(error).partition(' - at')[0]}; change it.") from error


def _invalid(name: str, message: str) -> HttpError:
    return HttpError(400, message, code="invalid_parameter", param=name)


def _unsupported(name: str, remedy: str, where: str = "") -> HttpError:
    message = f"`{name}` is not supported in SGLang's form of this route{where}: {remedy}."
    return HttpError(400, message, code="unsupported_parameter", param=name)


# answers


class _Logprobs(msgspec.Struct):
    """Of the prompt's tokens too, where the answer echoes them; tokens are "token_id:17" unless texts are wanted. Raw
    fields are decoded where they are asked for, since an answer has many of them."""

    token_logprobs: list[float | None] = []
    tokens: msgspec.Raw = _NONE
    top_logprobs: msgspec.Raw = _NONE


class _Said(msgspec.Struct):
    """A choice, or what a chunk says of it."""

    index: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[Told] = []
    prompt_weight_versions: list[Told] = []
    resumed_at: list[int] | None = None


class _Scored(msgspec.Struct):
    probs: msgspec.Raw


class _Classes(msgspec.Struct):
    id: str
    data: list[_Scored]
    usage: dict[str, Any]


class _Event(msgspec.Struct):
    id: str = ""
    choices: list[_Said] | None = None
    usage: dict[str, Any] | None = None
    weight_version: int | None = None


_decode = msgspec.json.Decoder(_Event).decode
_decode_classes = msgspec.json.Decoder(_Classes).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode
_decode_tops = msgspec.json.Decoder(list[dict[str, float] | None]).decode
_encode = msgspec.json.Encoder().encode


class _Series:
    """A JSON array that grows. Every event has all of it, so each element is written once."""

    def __init__(self) -> None:
        self._written = bytearray()

    def extend(self, elements: Iterable[Any]) -> None:
        written = _encode(list(elements))[1:-1]
        if written:
            self._written += b"," + written if self._written else written

    def raw(self) -> msgspec.Raw:
        return msgspec.Raw(b"[%b]" % bytes(self._written))


class _Answer:
    """One sample so far."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._text = ""
        self._count = 0
        self._ids, self._prompt = _Series(), list[int]()
        self._series = {name: _Series() for name in _series(wanted)}
        self._spans: list[Told] = []
        self._last: _Said | None = None  # the chunk that ends it
        self._last_id: int | None = None

    def add(self, said: _Said, version: int | None) -> None:
        """Takes a chunk in. `version`: of the weights that wrote its last token."""
        self._prompt = said.prompt_token_ids or self._prompt
        ids = said.token_ids or []
        if said.logprobs is not None and self._series:
            self._score(said.logprobs, ids)
        if not self._wanted.nothing:
            self._text += said.text
            self._ids.extend(ids)
        self._last_id = ids[-1] if ids else self._last_id
        end = self._count + len(ids)
        told = said.weight_versions or ([Told(version, self._count, end)] if version is not None and ids else [])
        for span in told:
            self._extend(span)
        self._count = end
        if said.finish_reason is not None:
            self._last = said

    def _score(self, logprobs: _Logprobs, ids: list[int]) -> None:
        """By columns: a loop over the tokens of a long answer would hold up all others."""
        wanted, values, start = self._wanted, logprobs.token_logprobs, self._wanted.inputs
        split = max(len(values) - len(ids), 0)  # only what an answer begins with echoes the prompt
        every = self._prompt[:split] + ids
        texts: Sequence[str | None] = _decode_texts(logprobs.tokens) if wanted.texts else [None] * len(values)
        others = _decode_tops(logprobs.top_logprobs) if wanted.tops or wanted.ids else []
        if 0 <= start < split:  # SGLang tells nothing of the token that it begins with
            values[start], others[start : start + 1] = None, [None] * len(others[start : start + 1])
        for side, part in (("input", slice(start, split)), ("output", slice(split, None))):
            if (side == "input" and start < 0) or (side == "output" and wanted.nothing):
                continue
            self._series[f"{side}_token_logprobs"].extend(zip(values[part], every[part], texts[part], strict=False))
            if wanted.tops or wanted.ids:
                kind = "top" if wanted.tops else "token_ids"
                self._series[f"{side}_{kind}_logprobs"].extend(map(self._others, others[part]))

    def _others(self, tops: dict[str, float] | None) -> list[tuple[float, int, None]] | None:
        """The likeliest tokens, or those that were asked for."""
        if tops is None:
            return None
        found = {int(token.removeprefix("token_id:")): value for token, value in tops.items()}
        if self._wanted.ids:
            return [(found[token], token, None) for token in self._wanted.ids if token in found]
        best = sorted(found.items(), key=lambda each: -each[1])[: self._wanted.tops]
        return [(value, token, None) for token, value in best]

    def _extend(self, span: Told) -> None:
        """Spans of a last chunk are of the whole answer, those of others begin where the ones before end."""
        if span.start == 0:
            self._spans.clear()
        last = self._spans[-1] if self._spans else None
        if last is not None and last.version == span.version:
            last.end = span.end
        else:
            self._spans.append(span)

    def told(self, name: str, started: float, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer so far, in SGLang's form."""
        empty, last = self._wanted.nothing, self._last
        version = self._spans[-1].version if self._spans else None
        meta: dict[str, Any] = {
            "id": name,
            "finish_reason": None if last is None else self._finish(last),
            "prompt_tokens": len(self._prompt),
            "completion_tokens": 0 if empty else self._count,
            "weight_version": None if version is None else str(version),
            "weight_versions": _spans([] if empty else self._spans),
        }
        meta |= {name: series.raw() for name, series in self._series.items()}
        if self._wanted.logprobs:
            meta["output_token_logprobs_length"] = meta["completion_tokens"]
        if usage.get("prompt_tokens_details") and not self._wanted.listed:
            meta["cached_tokens"] = usage["prompt_tokens_details"].get("cached_tokens")
        if last is not None:
            meta["prompt_weight_versions"] = _spans(last.prompt_weight_versions)
            meta |= {"resumed_at": last.resumed_at} if last.resumed_at is not None else {}
            meta["e2e_latency"] = time.monotonic() - started
        told = {"text": self._text, "output_ids": self._ids.raw(), "meta_info": meta}
        return told | {"prompt_token_ids": self._prompt} if self._wanted.prompt_ids else told

    def _finish(self, last: _Said) -> dict[str, Any]:
        if self._wanted.nothing or last.finish_reason == "length":
            return {"type": "length", "length": 0 if self._wanted.nothing else self._count}
        if last.finish_reason == "stop":
            return {"type": "stop", "matched": self._last_id if last.stop_reason is None else last.stop_reason}
        return {"type": "abort", "message": last.finish_reason, "status_code": None, "err_type": None}


def _series(wanted: Wanted) -> list[str]:
    kinds = ["token"] if wanted.logprobs else []
    kinds += ["top"] if wanted.tops else ["token_ids"] if wanted.ids else []
    return [f"{side}_{kind}_logprobs" for kind in kinds for side in ("input", "output")]


def _spans(spans: list[Told]) -> list[dict[str, Any]]:
    return [{"version": str(span.version), "start": span.start, "end": span.end} for span in spans]


class Translation:
    """One answer of /v1/completions or /classify on its way out. `take` gets its body as it comes. `version`: of the
    weights, as the answer's head has it."""

    version = b""

    def __init__(self, wanted: Wanted, started: float) -> None:
        self._wanted, self._started = wanted, started
        self._held = bytearray()  # of a whole answer, or of an event, that has not ended
        self._answers: dict[int, _Answer] = {}
        self._id = ""

    def take(self, piece: bytes, *, ended: bool) -> bytes:
        """The bytes of the body that go out now. Raises BadUpstream for what is no answer of the route."""
        self._held += piece
        try:
            if self._wanted.stream:
                return self._events()
            return self._whole() if ended else b""
        except msgspec.MsgspecError as error:
            raise BadUpstream(f"The instance's answer is not of its route ({error}).") from error

    def _events(self) -> bytes:
        """Of several events of one sample, the last one says all."""
        *events, self._held = self._held.split(b"\n\n")
        out: list[bytes] = []
        news: dict[int, None] = {}
        for event in events:
            if event.startswith(b"data: {") and (indexes := self._add(_decode(event[6:]))) is not None:
                news |= dict.fromkeys(indexes)
            else:
                out += [*map(self._event, news), bytes(event), b"\n\n"]
                news.clear()
        return b"".join((*out, *map(self._event, news)))

    def _event(self, index: int) -> bytes:
        told = self._told(index, None)
        return b"data: %b\n\n" % _encode(told | {"index": index} if self._wanted.listed else told)

    def _whole(self) -> bytes:
        if self._wanted.scores:
            classes = _decode_classes(bytes(self._held))
            self._id = classes.id
            told = [self._scored(index, each.probs, classes.usage) for index, each in enumerate(classes.data)]
        else:
            found = _decode(bytes(self._held))
            told = [self._told(index, found.usage) for index in sorted(self._add(found) or ())]
        if not told:
            raise BadUpstream("The instance's answer has no choices.")
        return _encode(told if self._wanted.listed else told[0])

    def _add(self, event: _Event) -> list[int] | None:
        """The samples that it is of; None for another event."""
        if event.choices is None:
            return None
        self._id = self._id or event.id
        for said in event.choices:
            answer = self._answers.setdefault(said.index, _Answer(self._wanted))
            answer.add(said, event.weight_version)
        return [said.index for said in event.choices]

    def _scored(self, index: int, scores: msgspec.Raw, usage: dict[str, Any]) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._name(index),
            "finish_reason": {"type": "length", "length": 0},  # as SGLang says it
            "weight_version": self.version.decode() or None,
            "e2e_latency": time.monotonic() - self._started,
        }
        if not self._wanted.listed:  # vLLM counts all prompts together
            meta["prompt_tokens"] = usage.get("prompt_tokens")
        return {"embedding": scores, "meta_info": meta}

    def _told(self, index: int, usage: dict[str, Any] | None) -> dict[str, Any]:
        return self._answers[index].told(self._name(index), self._started, usage or {})

    def _name(self, index: int) -> str:
        rid = self._wanted.rid
        name, at = rid or self._id, index // self._wanted.n
        if isinstance(name, list):
            return name[at] if at < len(name) else self._id
        return f"{name}_{index}" if self._wanted.listed else name
