"""The bodies of the Tinker protocol: protobuf for batches, log-probs and samples, JSON for everything else.

The protobuf messages are declared here by field number, in a pool of their own, so that the SDK's declaration may be in
the same process. Maps are repeated entries, enumerations are integers and members of a `oneof` are plain fields: the
bytes are the same.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from trainer.api.errors import ApiError

PROTOBUF: Final = "application/x-protobuf"
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_DTYPES: Final[dict[int, Any]] = {_FLOAT32: np.float32, _INT64: np.int64, _INT32: np.int32}
STOPPED, TOO_LONG = 0, 1  # why a sample ended

# Message -> "name:number:type"; a `*` before the type repeats it.
_MESSAGES: Final = {
    "SparseCsr": ("values:1:bytes",),
    "Tensor": ("dense:1:bytes", "sparse_csr:2:SparseCsr", "dtype:3:int32", "shape:4:*int64"),
    "EncodedTextChunk": ("tokens:1:bytes",),
    "Chunk": ("encoded_text:1:EncodedTextChunk",),
    "LossFnInput": ("key:1:string", "value:2:Tensor"),
    "Datum": ("model_input:1:*Chunk", "loss_fn_inputs:2:*LossFnInput"),
    "LossConfigValue": ("number:1:double", "text:2:string"),
    "LossFnConfig": ("key:1:string", "value:2:LossConfigValue"),
    "ForwardBackwardRequest": (
        "model_id:1:string",
        "seq_id:2:int32",
        "data:3:*Datum",
        "loss_fn:4:string",
        "forward_only:6:bool",
        "loss_fn_config:7:*LossFnConfig",
    ),
    "BatchedTensor": ("data:1:bytes", "offsets:2:bytes", "dtype:3:int32", "trailing_shape:4:*int64"),
    "OutputField": ("key:1:string", "value:2:BatchedTensor"),
    "ArrayRecord": ("type_tag:1:string", "fields:2:*OutputField", "num_datums:3:int64"),
    "Metric": ("key:1:string", "value:2:double"),
    "ForwardBackwardOutput": (
        "loss_fn_output_type:1:string",
        "loss_fn_outputs:2:*ArrayRecord",
        "metrics:3:*Metric",
    ),
    "TopkLogprobs": ("token_ids:1:bytes", "logprobs:2:bytes", "k:3:uint32", "length:4:uint32"),
    "SampledSequence": ("stop_reason:1:int32", "tokens:2:bytes", "logprobs:3:bytes"),
    "SampleResponse": (
        "sequences:1:*SampledSequence",
        "prompt_logprobs:2:bytes",
        "topk_prompt_logprobs:3:TopkLogprobs",
    ),
}


def _declared() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="hotswap_tinker.proto", package="hotswap", syntax="proto3")
    one = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for said in fields:
            field_name, number, kind = said.split(":")
            made = message.field.add(name=field_name, number=int(number))
            made.label = one.LABEL_REPEATED if kind.startswith("*") else one.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            if kind in _MESSAGES:
                made.type, made.type_name = one.TYPE_MESSAGE, f".hotswap.{kind}"
            else:
                made.type = getattr(one, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"hotswap.{n}")) for n in _MESSAGES}


_CLASSES: Final = _declared()


@dataclass(frozen=True)
class Datum:
    """One sequence: the tokens of the input, and what the loss reads of each position."""

    tokens: NDArray[np.int64]
    inputs: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Batch:
    """The body of `forward_backward`."""

    model_id: str
    seq_id: int
    loss: str
    data: tuple[Datum, ...]
    options: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False

    def digest(self) -> str:
        """The same for the same content: protobuf does not say in which order a map is written."""
        found = hashlib.sha256(repr((self.loss, sorted(self.options.items()), self.forward_only)).encode())
        for datum in self.data:
            for name, values in [("", datum.tokens), *sorted(datum.inputs.items())]:
                found.update(f"{name} {values.dtype} {values.shape} ".encode() + values.tobytes())
        return found.hexdigest()


def read_batch(body: bytes) -> Batch:
    """Raises ApiError (400) when it is not a batch of plain tokens."""
    request = _CLASSES["ForwardBackwardRequest"]()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise ApiError(
            400, f"the body is no ForwardBackwardRequest ({error}): use the tinker SDK 0.25 or later"
        ) from None
    options = {entry.key: entry.value.text or entry.value.number for entry in request.loss_fn_config}
    data = tuple(_datum(number, datum) for number, datum in enumerate(request.data))
    return Batch(request.model_id, request.seq_id, request.loss_fn, data, options, request.forward_only)


def _datum(number: int, message: Any) -> Datum:
    parts = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise ApiError(400, f"datum {number} has an image or audio: this server trains on tokens alone")
        if len(chunk.encoded_text.tokens) % 4:
            raise ApiError(400, f"datum {number}: its tokens are no int32 numbers")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    inputs = {entry.key: _tensor(number, entry.key, entry.value) for entry in message.loss_fn_inputs}
    return Datum(np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64), inputs)


def _tensor(number: int, name: str, message: Any) -> NDArray[Any]:
    where = f"datum {number}, loss_fn_inputs[{name!r}]"
    if message.HasField("sparse_csr"):
        raise ApiError(400, f"{where} is sparse: send a dense tensor with one number for each token")
    if message.dtype not in _DTYPES:
        raise ApiError(400, f"{where} has the data type {message.dtype}: send float32 or int64")
    try:
        values = np.frombuffer(message.dense, _DTYPES[message.dtype])
        return values.reshape(tuple(message.shape)) if message.shape else values
    except ValueError:
        raise ApiError(400, f"{where} does not have as many numbers as its shape {tuple(message.shape)} says") from None


def batch_body(batch: Batch) -> bytes:
    """The bytes that `read_batch` reads."""
    request = _CLASSES["ForwardBackwardRequest"](
        model_id=batch.model_id, seq_id=batch.seq_id, loss_fn=batch.loss, forward_only=batch.forward_only
    )
    for datum in batch.data:
        message = request.data.add()
        message.model_input.add().encoded_text.tokens = datum.tokens.astype(np.int32).tobytes()
        for name, values in datum.inputs.items():
            kind = _FLOAT32 if values.dtype.kind == "f" else _INT64
            dense = values.astype(_DTYPES[kind]).tobytes()
            message.loss_fn_inputs.add(key=name, value=_CLASSES["Tensor"](dense=dense, dtype=kind, shape=values.shape))
    return bytes(request.SerializeToString(deterministic=True))


def output(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """The answer to a batch: each sequence's log-probs of its targets."""
    ends = np.cumsum([0, *(4 * len(values) for values in logprobs)], dtype=np.int64)
    record = _CLASSES["ArrayRecord"](type_tag="ArrayRecord", num_datums=len(logprobs))
    data = np.concatenate([np.zeros(0, np.float32), *logprobs]).astype(np.float32).tobytes()
    batched = _CLASSES["BatchedTensor"](data=data, offsets=ends.tobytes(), dtype=_FLOAT32)
    record.fields.add(key="logprobs", value=batched)
    answer = _CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record])
    for name, value in metrics.items():
        answer.metrics.add(key=name, value=value)
    return bytes(answer.SerializeToString())


def read_output(content: bytes) -> tuple[list[NDArray[np.float32]], dict[str, float]]:
    """The arguments that `output` was given."""
    answer = _CLASSES["ForwardBackwardOutput"]()
    answer.ParseFromString(content)
    ((batched,),) = [[f.value for f in record.fields] for record in answer.loss_fn_outputs]
    ends = np.frombuffer(batched.offsets, np.int64) // 4
    values = np.frombuffer(batched.data, np.float32)
    rows = [values[start:end] for start, end in itertools.pairwise(ends)]
    return rows, {metric.key: metric.value for metric in answer.metrics}


@dataclass(frozen=True)
class Sample:
    """One answer of a sampler."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool


TopK = Sequence[Sequence[tuple[int, float]]]  # of each position its (token, log-prob), most likely first


def samples(found: Iterable[Sample], prompt: Sequence[float] | None = None, top: TopK | None = None) -> bytes:
    """The answer to a request for samples; `prompt` are log-probs of its tokens (NaN where there is none)."""
    answer = _CLASSES["SampleResponse"]()
    for sample in found:
        answer.sequences.add(
            stop_reason=STOPPED if sample.stopped else TOO_LONG,
            tokens=np.asarray(sample.tokens, np.int32).tobytes(),
            logprobs=np.asarray(sample.logprobs, np.float32).tobytes(),
        )
    if prompt is not None:
        answer.prompt_logprobs = np.asarray(prompt, np.float32).tobytes()
    if top is not None:
        k = max((len(row) for row in top), default=0)
        ids, logprobs = np.zeros((len(top), k), np.int32), np.full((len(top), k), -99999.0, np.float32)
        for place, row in enumerate(top):
            for rank, (token, logprob) in enumerate(row):
                ids[place, rank], logprobs[place, rank] = token, logprob
        found_top = {"token_ids": ids.tobytes(), "logprobs": logprobs.tobytes(), "k": k, "length": len(top)}
        answer.topk_prompt_logprobs.CopyFrom(_CLASSES["TopkLogprobs"](**found_top))
    return bytes(answer.SerializeToString())


class Body(BaseModel):
    """A JSON body. Fields that a later SDK adds are not looked at."""

    model_config = ConfigDict(protected_namespaces=())

    def digest(self) -> str:
        """The same for the same content."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class Lora(Body):
    """`train_unembed` changes nothing: the head has no adapter."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    display_name: str | None = None


class CreateModel(Body):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: dict[str, Any] = {"type": "adamw"}


class Adam(Body):
    """Of one step; as torch.optim.AdamW, after the norm of the gradient was clipped to `grad_clip_norm` (0: not)."""

    learning_rate: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(default=0.0, allow_inf_nan=False)


class OptimStep(Body):
    model_id: str
    seq_id: int
    adam_params: Adam | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body):
    model_id: str
    seq_id: int
    path: str | None = None
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveForSampler(SaveWeights):
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"


class LoadWeights(Body):
    """Onto a model (`model_id`, `seq_id`), or as the beginning of a new one (`session_id`, `model_seq_id`)."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None


class CreateSampler(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(Body):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = -1
    top_p: float = Field(default=1.0, gt=0, le=1)


class InputChunk(Body):
    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(Body):
    chunks: list[InputChunk]


class SampleRequest(Body):
    prompt: ModelInput
    sampling_params: SamplingParams
    sampling_session_id: str | None = None
    seq_id: int | None = None
    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0)
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)

    def token_ids(self) -> tuple[int, ...]:
        """Raises ApiError (400) for a prompt that is not tokens alone, or empty."""
        if any(chunk.type != "encoded_text" for chunk in self.prompt.chunks):
            raise ApiError(400, "the prompt has an image or audio: this server samples from tokens alone")
        ids = tuple(token for chunk in self.prompt.chunks for token in chunk.tokens)
        if not ids:
            raise ApiError(400, "the prompt is empty: give at least one token")
        return ids


class SessionId(Body):
    session_id: str


class ModelId(Body):
    model_id: str


class SamplerId(Body):
    sampling_session_id: str


class RequestId(Body):
    request_id: str


class TimeToLive(Body):
    ttl_seconds: int | None = None


class TinkerPath(Body):
    tinker_path: str
