"""Instances that break off and go on with streams, as the real ones do it, out of scripted events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from server.resume import RESUMABLE, RESUME, RESUMED, Resume
from tests.server.gateway.upstream import Link, Received

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n%b\r\n"
STAMPED = b"x-hotswap-weight-version: %d\r\n" + RESUMABLE + b": 1\r\n"
END = b"0\r\n\r\n"


def event(payload: dict[str, Any], name: bytes = b"") -> bytes:
    return name + b"data: " + orjson.dumps(payload) + b"\n\n"


def chat(tokens: list[int], version: int = 1, *, usage: bool = True, answer_id: str = "chat-a") -> list[bytes]:
    """A chat stream of vLLM as the instance stamps it: the role, one event a token, the end, the usage."""

    def of(choice: dict[str, Any], **more: Any) -> bytes:
        choices = [{"index": 0, **choice}]
        return event({"id": answer_id, "created": 7, "choices": choices, "weight_version": version, **more})

    spans = [{"version": version, "start": 0, "end": len(tokens)}]
    said = [of({"delta": {"content": f"<{t}> \u00e9\n"}, "token_ids": [t], "finish_reason": None}) for t in tokens[:-1]]
    ended = {"delta": {"content": "."}, "token_ids": tokens[-1:], "finish_reason": "stop", "stop_reason": None}
    events = [of({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}), *said]
    events.append(of({**ended, "weight_versions": spans}))
    if usage:
        counted = {"completion_tokens": len(tokens)}
        events.append(event({"id": answer_id, "created": 7, "choices": [], "usage": counted}))
    return [*events, b"data: [DONE]\n\n"]


def rest_of(events: list[bytes], resume: Resume) -> list[bytes]:
    """The rest of `events` for a client that has what `resume` says."""
    left = events[len(resume.tokens) + 1 :] if resume.tokens else events[resume.lead :]
    return left[1:] if resume.usage_sent else left


def framed(events: list[bytes]) -> bytes:
    """The events as chunks, without the end."""
    return b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in events)


@dataclass
class Fleet:
    """Instances that all give the answer `events`, cut off at the next of `cuts`, a byte; whole when there is none."""

    events: list[bytes]
    cuts: list[int] = field(default_factory=list)
    version: int = 1
    resumes: list[Resume] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)
    before_resumed: Callable[[Link], Any] | None = None

    async def handle(self, link: Link, request: Received) -> None:
        self.asked.append(request.headers)
        body, events, head = request.body, self.events, STAMPED % self.version
        if (length := request.headers.get(RESUME.decode())) is not None:
            prefix, body = body[: int(length)], body[int(length) :]
            self.resumes.append(msgspec.json.decode(prefix, type=Resume))
            if self.before_resumed is not None:
                answered = await self.before_resumed(link)
                if answered:
                    return
            events = rest_of(events, self.resumes[-1])
            head += RESUMED + b": 1\r\n"
        self.bodies.append(body)
        wire = framed(events) + END
        if self.cuts:
            await link.send(HEAD % head + wire[: self.cuts.pop(0)])
            await asyncio.sleep(0)
            link.writer.close()
            return
        await link.send(HEAD % head + wire)
