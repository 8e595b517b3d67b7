"""Answers and log-probs from the running server, by the adapters that clients have saved.

A saved adapter (a snapshot) is published as an edition of one of a few names that are this server's own, without a
swap. When one is asked for that no name has, it takes the name that was used longest ago. Requests pin the edition, so
that none is answered by the snapshot before.

Where clients train all weights, a snapshot is a version of the base model, and so is the checkpoint it began with.
There requests name the least version that may answer them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file
from torch import Tensor

import weightsync
from trainer.api.config import ApiConfig
from trainer.api.errors import ApiError
from trainer.api.wire import Sample, SampleRequest, TopK, samples
from trainer.config import GatewayConfig
from trainer.connection import Bearer, verify
from trainer.errors import ModelError, RolloutError
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.hf_files import ADAPTER_FILE, HfTensors
from trainer.megatron.model import DTYPES
from trainer.publish import typed
from trainer.rollouts.generate import Answer, GenerateClient, Request
from weightsync.control.editions import MARK

PREFIX = "tml-"  # without which the SDK takes no key
KNOWN_S = 30.0  # that a key is not asked about again
WAIT_S = 30.0  # for an instance to have a version that is committed


@dataclass(frozen=True)
class Client:
    """The client: a hash of the key, the key for the gateway, and the longest context that the server takes."""

    owner: str
    key: str = field(repr=False)
    context: int
    until: float


class Gateway:
    """The keys' owners, and their requests under their own keys, so that their limits hold."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._http = httpx.AsyncClient(base_url=config.url, timeout=config.timeout_s, verify=verify(config))
        self._known: dict[str, Client] = {}
        self._generating = GenerateClient(config)

    async def client(self, header: str | None) -> Client:
        """Of a request. The gateway says whether the key is good. Raises ApiError (401, 503)."""
        if not header:
            advice = f"set OPENAI_API_KEY to a key of `hotswap keys create`, or TINKER_API_KEY to {PREFIX} and one"
            raise ApiError(401, f"A key is required: {advice}.")
        key = header.removeprefix(PREFIX)
        owner = hashlib.sha256(f"{PREFIX}{key}".encode()).hexdigest()  # one for all SDKs
        if (known := self._known.get(owner)) is not None and known.until > time.monotonic():
            return known
        answer = await self._ask("GET", "/v1/models", key)
        served = answer["data"][0].get("max_model_len")
        self._known = {o: c for o, c in self._known.items() if c.until > time.monotonic()}
        self._known[owner] = Client(owner, key, served or 2**31, time.monotonic() + KNOWN_S)
        return self._known[owner]

    async def generate(self, request: Request) -> tuple[Answer, ...]:
        """`/generate`, under the request's key."""
        return await self._generating.generate(request)

    async def prompt_logprobs(self, client: Client, body: dict[str, Any]) -> list[dict[str, Any] | None]:
        """vLLM's: for each token of the prompt but the first its own log-prob and the likeliest ones, by token id."""
        answer = await self._ask("POST", "/v1/completions", client.key, json=body)
        found: list[dict[str, Any] | None] = answer["choices"][0]["prompt_logprobs"]
        return found

    async def forward(self, client: Client, route: str, body: Any) -> httpx.Response:
        """The answer to an OpenAI request, whose content is still to come. Raises ApiError (503)."""
        asked = self._http.build_request("POST", f"/v1/{route}", json=body)
        try:
            return await self._http.send(asked, auth=Bearer(lambda: client.key), stream=True)
        except httpx.HTTPError as error:
            raise self._away(error) from None

    async def close(self) -> None:
        await self._http.aclose()
        await self._generating.close()

    async def _ask(self, method: str, path: str, key: str, **more: Any) -> Any:
        try:
            answer = await self._http.request(method, path, auth=Bearer(lambda: key), **more)
        except httpx.HTTPError as error:
            raise self._away(error) from None
        if answer.status_code in (401, 403):
            raise ApiError(401, f"the gateway does not take this key: {answer.text[:300]}")
        if answer.status_code >= 500 or answer.status_code == 429:
            raise ApiError(503, f"the gateway at {self._config.url} answered {answer.status_code}: {answer.text[:300]}")
        if answer.is_error:
            status = answer.status_code
            raise RolloutError(f"the gateway refused ({status}): {answer.text[:300]}", status=status)
        return answer.json()

    def _away(self, error: httpx.HTTPError) -> ApiError:
        said = str(error) or type(error).__name__
        return ApiError(503, f"the gateway at {self._config.url} does not answer ({said}); start it")


@dataclass
class _Part:
    """The weights under one of the server's names (None: the base model's). `version`: of the base, or the number of
    the edition. `users` are requests that are under way."""

    name: str | None
    snapshot: Path | None = None
    version: int = 0
    users: int = 0
    used: int = 0

    @property
    def terms(self) -> dict[str, Any]:
        """The fields of a request by which these weights answer it."""
        if self.name is not None:
            return {"model": f"{self.name}{MARK}{self.version}"}
        return {"hotswap": {"min_version": self.version, "wait_s": WAIT_S}}


class Snapshots:
    """Parts, by the snapshot that has them."""

    def __init__(self, config: ApiConfig, shape: ModelShape) -> None:
        self._config, self._shape = config, shape
        names = [None] if config.full else [f"{config.adapters}-{number}" for number in range(config.limits.served)]
        self._parts = [_Part(name) for name in names]
        self._moved, self._uses = asyncio.Condition(), 0
        self._turn, self._wanted = asyncio.Lock(), False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._publisher: weightsync.Publisher | None = None

    @asynccontextmanager
    async def held(self, snapshot: Path) -> AsyncIterator[_Part]:
        """The part that has it, and keeps it within the body. Raises ApiError (410), PublishError."""
        part = await self._hold(snapshot)
        try:
            yield part
        except RolloutError:
            part.snapshot = None  # another version may have been activated that has it no more: publish it again
            raise
        finally:
            async with self._moved:
                part.users -= 1
                self._moved.notify_all()

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    async def _hold(self, snapshot: Path) -> _Part:
        if not self._wanted and (found := self._placed(snapshot)) is not None:
            return self._used(found)
        async with self._turn:  # one publishes at a time, and nobody overtakes one that waits for a part
            part = self._placed(snapshot) or await self._freed()
            if part.snapshot != snapshot:
                part.snapshot = None
                part.version = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._publish, snapshot, part.name
                )
                part.snapshot = snapshot
            return self._used(part)

    async def _freed(self) -> _Part:
        self._wanted = True
        try:
            async with self._moved:
                while (part := self._free()) is None:
                    await self._moved.wait()
            return part
        finally:
            self._wanted = False

    def _used(self, part: _Part) -> _Part:
        self._uses += 1
        part.users, part.used = part.users + 1, self._uses
        return part

    def _placed(self, snapshot: Path) -> _Part | None:
        return next((part for part in self._parts if part.snapshot == snapshot), None)

    def _free(self) -> _Part | None:
        """The one that nobody uses, and was used longest ago."""
        return min((part for part in self._parts if not part.users), key=lambda part: part.used, default=None)

    def _publish(self, snapshot: Path, name: str | None) -> int:
        try:
            content = self._checkpoint(snapshot) if name is None else _adapter(snapshot)
        except (FileNotFoundError, ModelError):
            raise ApiError(
                410, f"the snapshot {snapshot.name} is no longer kept: save a newer one, or save it under a name"
            ) from None
        number: int
        if name is None:
            number = typed(self._opened().publish, content, timeout_s=self._config.publish.timeout_s)
        else:
            number = typed(self._opened().publish_edition, name, content, keep=1)
        return number

    def _checkpoint(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        dtype = self._config.publish.dtype
        tensors = HfTensors(directory)
        return ((name, tensors.get(name).to(DTYPES[dtype])) for name, _, _ in self._shape.schema(dtype))

    def _opened(self) -> weightsync.Publisher:
        if self._publisher is None:
            c = self._config
            self._publisher = typed(
                weightsync.Publisher, c.publish.store_url, model=c.publish.model, lineage=c.adapters
            )
        return self._publisher

    def _close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def _adapter(directory: Path) -> weightsync.Adapter:
    config = json.loads((directory / "adapter_config.json").read_text())
    return weightsync.Adapter(load_file(directory / ADAPTER_FILE), config)


class Sampler:
    """Answers requests for samples."""

    def __init__(self, gateway: Gateway, snapshots: Snapshots) -> None:
        self._gateway, self._snapshots = gateway, snapshots

    async def sample(self, client: Client, request: SampleRequest, snapshot: Path | None) -> bytes:
        """By a snapshot, or by the base model. Raises ApiError (400, 410), RolloutError, PublishError."""
        prompt = check(request, client.context)
        if snapshot is None:
            return await self._sampled(client, request, prompt, {})
        async with self._snapshots.held(snapshot) as part:
            return await self._sampled(client, request, prompt, part.terms)

    async def _sampled(
        self, client: Client, request: SampleRequest, prompt: tuple[int, ...], terms: dict[str, Any]
    ) -> bytes:
        params = request.sampling_params
        greedy = params.temperature == 0  # then vLLM gives one answer, and all are the same
        asked = Request(
            prompt,
            1 if greedy else request.num_samples,
            params.max_tokens or client.context - len(prompt),
            params.temperature,
            seed=None if params.seed is None else params.seed % (2**63 - 1),
            more={"top_p": params.top_p, "top_k": params.top_k} | _stop(params.stop) | terms,
            key=client.key,
        )
        answers = await self._gateway.generate(asked)
        found = [Sample(a.turn.token_ids, a.turn.logprobs or (), a.finish_reason == "stop") for a in answers]
        found *= request.num_samples // len(found)
        if not (request.prompt_logprobs or request.topk_prompt_logprobs):
            return samples(found)
        k = request.topk_prompt_logprobs
        body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "prompt_logprobs": k} | terms
        rows = await self._gateway.prompt_logprobs(client, body)
        return samples(found, _own(prompt, rows, request.prompt_logprobs_last_n), _top(rows, k) if k else None)


def check(request: SampleRequest, context: int) -> tuple[int, ...]:
    """The prompt's tokens. Raises ApiError (400) for what cannot be answered."""
    for name in ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
        if getattr(request, name):
            raise ApiError(400, f"{name} is not computed here: leave it out", "unsupported")
    prompt = request.token_ids()
    if len(prompt) + (request.sampling_params.max_tokens or 1) > context:
        asked = request.sampling_params.max_tokens or 1
        raise ApiError(
            400,
            f"{len(prompt)} prompt tokens and max_tokens {asked} exceed the context of {context}: shorten one of them",
        )
    return prompt


def _stop(stop: str | list[str] | list[int] | None) -> dict[str, Any]:
    if stop is None:
        return {}
    if isinstance(stop, str):
        return {"stop": [stop]}
    if not stop:
        return {"ignore_eos": True}
    return {"stop_token_ids" if isinstance(stop[0], int) else "stop": list(stop)}


def _own(prompt: tuple[int, ...], rows: list[dict[str, Any] | None], last: int | None) -> list[float]:
    found = [math.nan if row is None else row[str(t)]["logprob"] for t, row in zip(prompt, rows, strict=True)]
    return found if last is None else [math.nan] * max(len(found) - last, 0) + found[-last:]


def _top(rows: list[dict[str, Any] | None], k: int) -> TopK:
    by_logprob: Callable[[tuple[int, float]], float] = lambda pair: -pair[1]  # noqa: E731
    said = [[(int(token), one["logprob"]) for token, one in (row or {}).items()] for row in rows]
    return [sorted(row, key=by_logprob)[:k] for row in said]
