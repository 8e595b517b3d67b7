"""An instance that plays its part by script, and what a person does at the console."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.server.console.browser import Watched
from tests.server.gateway.harness import ADMIN_KEY, KEYS, MODEL, RunningGateway
from tests.server.gateway.upstream import Link, Received, Upstream
from weightsync.control.records import ActiveRecord, FlipRecord, PastSwapRecord, VersionRecord

MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b> [a](javascript:alert(3)) &amp;"


FLIPS = (FlipRecord("a", 2, "ff", 90.0, 1.5, 0.5, 0.12), FlipRecord("b", 2, "ff", 80.0, 1.6, 0.75))
DONE = PastSwapRecord(
    "x", 2, "done", "rolling", 1.0, 1.3, 1.25, 2, 1, canary="a", probe="passed", verified=True, flips=FLIPS
)
ABORTED = PastSwapRecord(
    "y", 3, "aborted", "together", 2.0, 2.5, previous=2, reason="a byte <b>flipped</b>", tensor="t.w"
)


@dataclass
class Script:
    """The instance's answers to the next chats: pieces with the version that wrote each."""

    pieces: list[tuple[str, int]] = field(default_factory=lambda: [("Hello", 1), (" there.", 1)])
    gate: asyncio.Event | None = None  # waited for before the last piece
    template: bool = True
    error: dict[str, Any] | None = None
    cut: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the client left in the middle
    bodies: list[dict[str, Any]] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)

    async def __call__(self, link: Link, received: Received) -> None:
        if received.target == "/v1/models":
            await link.json(orjson.dumps({"object": "list", "data": [{"id": MODEL}]}))
        elif received.target in ("/v1/chat/completions", "/generate"):
            self.bodies.append(orjson.loads(received.body))
            self.policies += [v for k, v in received.headers.items() if k == "x-hotswap-policy"]
            await self._answer(link, chat=received.target != "/generate")
        else:
            await link.json()

    async def _answer(self, link: Link, *, chat: bool) -> None:
        if self.error is not None:
            await link.json(orjson.dumps({"error": self.error}), status=b"409 Conflict")
        elif chat and not self.template:
            message = "As of transformers v4.44, default chat template is no longer allowed."
            error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
            await link.json(orjson.dumps({"error": error}), status=b"400 Bad Request")
        else:
            await self._stream(link, chat=chat)

    async def _stream(self, link: Link, *, chat: bool) -> None:
        await link.sse_head()
        for at, (text, version) in enumerate(self.pieces):
            if self.gate is not None and at == len(self.pieces) - 1:
                await self._wait(link)
            await link.chunk(piece(text, version, chat=chat))
        if self.cut:
            link.cut()
            return
        await link.chunk(ending(self.pieces, chat=chat))
        await link.end()

    async def _wait(self, link: Link) -> None:
        assert self.gate is not None
        opened = asyncio.create_task(self.gate.wait())
        left = asyncio.create_task(link.gone())
        await asyncio.wait({opened, left}, return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            self.gone.set()
        for task in (opened, left):
            task.cancel()


def piece(text: str, version: int, *, chat: bool) -> bytes:
    if not chat:
        told = {"index": 0, "text": text, "token_ids": [1], "weight_version": version}
        return b"event: token\ndata: %b\n\n" % orjson.dumps(told)
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: %b\n\n" % orjson.dumps({"choices": [choice], "weight_version": version})


def ending(pieces: list[tuple[str, int]], *, chat: bool) -> bytes:
    spans: list[dict[str, int]] = []
    for at, (_, version) in enumerate(pieces):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": at, "end": at})
        spans[-1]["end"] = at + 1
    prompt = [{"version": pieces[0][1], "start": 0, "end": 5}]
    choice = {"index": 0, "finish_reason": "stop", "weight_versions": spans, "prompt_weight_versions": prompt}
    usage = {"prompt_tokens": 5, "completion_tokens": len(pieces), "total_tokens": 5 + len(pieces)}
    if not chat:
        return b"event: done\ndata: %b\n\n" % orjson.dumps({"choices": [choice], "usage": usage})
    last = orjson.dumps({"choices": [{**choice, "delta": {}}]})
    return b"data: %b\n\ndata: %b\n\ndata: [DONE]\n\n" % (last, orjson.dumps({"choices": [], "usage": usage}))


async def register(gateway: RunningGateway, instance: Upstream, **fields: Any) -> None:
    await asyncio.to_thread(gateway.register, instance, **fields)


def admin_page(gateway: RunningGateway) -> str:
    return f"http://{gateway.host}:{gateway.admin_port}/console"


async def sign_in(page: Watched, key: str = ADMIN_KEY) -> None:
    await page.page.get_by_label("Admin key").fill(key)
    await page.page.get_by_role("button", name="Use key").click()
    await page.wait_text("#key-message", "The key works.")


async def ask(page: Watched, text: str = "Hi") -> None:
    await page.page.get_by_label("Your message").fill(text)
    await page.page.get_by_role("button", name="Send").click()


async def answered(page: Watched) -> None:
    await page.wait_attribute("#chat-log", "aria-busy", "^false$")


async def say(page: Watched, text: str = "Hi") -> None:
    """Returns at the end of the answer."""
    await ask(page, text)
    await answered(page)


def version_record(version: int, **fields: Any) -> VersionRecord:
    known: dict[str, Any] = {
        "state": "ready", "slot": "", "nbytes": 123_456_789, "manifest_digest": "d", "base": None, "step": version,
        "publisher": "trainer", "token": 1, "created_at": 1.7e9, "source": "test", "tensors": 1,
        "fingerprint": f"feedbeef{version:08d}",
    }  # fmt: skip
    return VersionRecord(version=version, **{**known, **fields})


def put_versions(gateway: RunningGateway, active: int, previous: int | None) -> None:
    for version in (1, 2, 3):
        state = "retired" if version == 3 else "ready"
        gateway.store.put(KEYS.version(version), version_record(version, state=state).to_json())
    record = ActiveRecord(active, 1, previous, "s", 1.0)
    gateway.store.put(KEYS.active, record.to_json())


def put_swaps(gateway: RunningGateway) -> None:
    """One that was done, and then one that was aborted."""
    for number, record in ((1, DONE), (2, ABORTED)):
        gateway.store.put(KEYS.past_swap(number), record.to_json())


async def serve_version(gateway: RunningGateway, version: int) -> None:
    """The instance runs what is committed, so it is asked."""
    address = gateway.gateway.default.fleet.instances["i0"].record.address
    await asyncio.to_thread(gateway.register, address, "i0", active_version=version)
