"""Models by name: the base model, and what a key's jobs have trained. The running server answers.

A trained model is a snapshot, as the tinker SDK's samplers use them: it takes one of the server's names when it is
asked and has none. The request goes to the gateway under the client's own key.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
from fastapi.responses import Response, StreamingResponse

from trainer.api.errors import ApiError
from trainer.api.finetuning.jobs import TUNED, Jobs
from trainer.api.journal import Record
from trainer.api.sampling import Client, Gateway, Snapshots
from trainer.api.service import Service

_MISPLACED = (404, 409)  # the server has that name no more, or not in that version
_PASSED_ON = ("content-type", "retry-after")


class Models:
    """Answers by name."""

    def __init__(self, service: Service, jobs: Jobs, gateway: Gateway, snapshots: Snapshots) -> None:
        self._service, self._jobs = service, jobs
        self._gateway, self._snapshots = gateway, snapshots

    def list(self, client: Client) -> list[dict[str, Any]]:
        """OpenAI's model objects."""
        trained = self._service.journal.of_owner(TUNED, client.owner)
        return [self._base(), *(_described(record) for record in trained)]

    def find(self, client: Client, name: str) -> dict[str, Any]:
        """Raises ApiError (404)."""
        return self._base() if name == self._service.config.name else _described(self._jobs.tuned(client, name))

    async def answer(self, client: Client, route: str, body: dict[str, Any]) -> Response:
        """To `chat/completions` or `completions`. Raises ApiError (400, 404, 410, 503)."""
        name = body.get("model")
        if not isinstance(name, str):
            raise ApiError(400, "model is missing: name one of /v1/models", param="model")
        async with AsyncExitStack() as stack:
            part = None
            if name == self._service.config.name:
                asked = body | {"model": self._service.config.publish.model}
            else:
                snapshot = self._service.snapshot(client, self._jobs.tuned(client, name).about["adapter"])
                part = await stack.enter_async_context(self._snapshots.held(snapshot))
                wish = (body.get("hotswap") or {}) | part.terms.get("hotswap", {})
                asked = body | part.terms | ({"hotswap": wish} if wish else {})
            answer = await self._gateway.forward(client, route, asked)
            stack.push_async_callback(answer.aclose)
            headers = {key: answer.headers[key] for key in _PASSED_ON if key in answer.headers}
            if answer.is_success and headers.get("content-type", "").startswith("text/event-stream"):
                held = stack.pop_all()
                return StreamingResponse(_events(answer, name, held), answer.status_code, headers)
            content = _named(await _read(answer), name)
            if part is not None and answer.status_code in _MISPLACED:
                part.snapshot = None  # to be published again
            return Response(content, answer.status_code, headers)

    def _base(self) -> dict[str, Any]:
        longest = self._service.tenants.shape.max_positions
        base = {"id": self._service.config.name, "object": "model", "created": 0, "owned_by": "hotswap"}
        return base | {"max_model_len": longest}


def _described(record: Record) -> dict[str, Any]:
    owner = record.owner[:12]
    return {"id": record.id, "object": "model", "created": int(record.made), "owned_by": owner}


async def _read(answer: httpx.Response) -> bytes:
    try:
        return await answer.aread()
    except httpx.HTTPError as error:
        raise ApiError(503, f"the gateway broke the answer off ({error or type(error).__name__}): ask again") from None


async def _events(answer: httpx.Response, name: str, held: AsyncExitStack) -> AsyncIterator[bytes]:
    async with held:
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            yield b"data: " + _named(data.encode(), name) + b"\n" if data != line else f"{line}\n".encode()


def _named(content: bytes, name: str) -> bytes:
    """An answer, or an event of one, with the model's name in it as the client knows it."""
    try:
        found = json.loads(content)
    except ValueError:
        return content
    if not isinstance(found, dict) or "model" not in found:
        return content
    return json.dumps(found | {"model": name}).encode()
