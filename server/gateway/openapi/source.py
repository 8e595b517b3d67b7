"""The public document, made when it is first asked for and kept while the instance it came from is there."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import orjson
from fastapi import FastAPI

from server.errors import HttpError, Unavailable
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.scrape import fetch
from server.gateway.openapi import document

if TYPE_CHECKING:
    from server.gateway.gateway import Gateway

log = logging.getLogger("hotswap.gateway")

PATH = b"/hotswap/openapi.json"  # of an instance: server/instance/openapi.py
TIMEOUT_S = 10.0
RETRY_S = 1.0  # an instance that gave no document is not asked again at once


class PublicDocument:
    """The document as bytes. Made by one request at a time, on a thread: it takes tens of milliseconds."""

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._source: tuple[str, str, bool] | None = None
        self._bytes = b""
        self._failed_at = float("-inf")

    async def get(self, gateway: Gateway, app: FastAPI) -> bytes:
        """The document. Raises Unavailable when no instance tells what it serves."""
        async with self._making:
            if not self._is_current(gateway):
                await self._make(gateway, app)
            return self._bytes

    def _is_current(self, gateway: Gateway) -> bool:
        """An instance that is gone has perhaps made way for another vLLM; none at all is no reason to ask anew."""
        if self._source is None or self._source[2] != (not gateway.keys.open_inference):
            return False
        there = {(i.id, i.record.address) for i in gateway.fleet.instances.values()}
        return self._source[:2] in there or not gateway.fleet.serving

    async def _make(self, gateway: Gateway, app: FastAPI) -> None:
        if not gateway.fleet.serving:
            raise gateway.fleet.unavailable()
        key_required = not gateway.keys.open_inference
        if time.monotonic() - self._failed_at > RETRY_S:
            for instance in list(gateway.fleet.serving):
                told = await _ask(instance)
                if told is not None:
                    self._bytes = await asyncio.to_thread(_build, app, told, key_required)
                    self._source = (instance.id, instance.record.address, key_required)
                    return
            self._failed_at = time.monotonic()
        raise Unavailable("No instance tells what its routes are; try again.", code="not_answering")


async def _ask(instance: Instance) -> bytes | None:
    try:
        status, body = await fetch(instance, PATH, TIMEOUT_S)
    except (HttpError, TimeoutError) as failure:
        log.warning("%s did not tell its OpenAPI document: %s", instance.id, failure or "it took too long")
        return None
    return body if status == 200 else None


def _build(app: FastAPI, told: bytes, key_required: bool) -> bytes:
    return orjson.dumps(document.public(app, orjson.loads(told), key_required=key_required))
