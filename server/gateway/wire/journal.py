"""The journal of a stream: what a client has of it, from which another instance could go on.

The pieces that went out are kept as they are: bytes in a list. They are read in bundles of some kilobytes, or when the
instance has died; then only what a continuation needs is left of them: token ids, which version wrote them, and a few
names. A client is only ever given whole events, so that it can be gone on after any of them.
"""

from __future__ import annotations

import re
from array import array
from typing import Final

import msgspec

from server.gateway.wire.bodies import Event, Said, Told, decode_event
from server.resume import Resume, Span

BUNDLE: Final = 16 * 2**10  # bytes kept as they came, at most, and one piece
ID_BYTES: Final = array("I").itemsize

_IDS: Final = re.compile(rb'"token_ids":\[([0-9,]+)\]')
_VERSION: Final = re.compile(rb'"weight_version":([0-9]+)[,}]')
# In JSON a text cannot hold these: its quotes are escaped.
_RARE: Final = (b'"weight_versions":', b'"hotswap_weight_versions":', b'"finish_reason":"', b'"error":')


class ReplayMemory:
    """Bytes that all streams of a gateway may keep for it, `per_stream` of them one; 0: none do."""

    def __init__(self, limit: int, per_stream: int) -> None:
        self.limit, self.per_stream = limit, per_stream
        self.used = 0

    def open(self, request_bytes: int) -> Journal | None:
        """A journal for the answer to a request of this size, which is kept along; None if that would be too much."""
        size = request_bytes + BUNDLE
        if size > self.per_stream or self.used + size > self.limit:
            return None
        self.used += size
        return Journal(self, request_bytes)


class Journal:
    """The journal of one stream. `take` is on the hot path."""

    __slots__ = (
        "_charged", "_ids", "_lead", "_memory", "_names", "_partial", "_pieces", "_prompt", "_request_bytes", "_seams",
        "_size", "_spans", "_usage_sent", "done", "finish", "lost",
    )  # fmt: skip

    def __init__(self, memory: ReplayMemory, request_bytes: int) -> None:
        self._memory, self._request_bytes = memory, request_bytes
        self._charged = request_bytes + BUNDLE
        self._pieces: list[bytes] = []
        self._size = 0
        self._partial = b""  # the beginning of an event, held until its end is here
        self._ids = array("I")
        self._spans: list[Span] = []
        self._prompt: list[Span] = []
        self._lead = 0
        self._names: tuple[str | None, int | None] = None, None
        self._usage_sent = False
        self._seams: list[int] = []
        self.finish: tuple[str, int | str | None] | None = None
        self.done = False  # the last event has gone out
        self.lost = False  # it has become too long, or what the instance sends cannot be continued

    def take(self, piece: bytes) -> bytes:
        """The bytes of the body that may go out now: whole events."""
        if self._partial or piece[-2:] != b"\n\n":
            piece = self._whole(piece)
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > BUNDLE:
            self._read()
        return piece

    def rest(self) -> bytes:
        """The bytes that were held back, when the body has ended in order."""
        rest, self._partial = self._partial, b""
        return rest

    def close(self) -> None:
        """The stream has ended: nothing is kept any more."""
        self._lose()
        self._memory.used -= self._charged
        self._charged = 0

    def _lose(self) -> None:
        """It cannot be gone on with. The request stays where it is, until the end."""
        if not self.lost:
            self._memory.used -= self._charged - self._request_bytes
            self._charged = self._request_bytes
        self.lost = True
        self._pieces.clear()
        del self._ids[:]

    def broken(self) -> bool:
        """The instance has died, the unfinished event with it; whether the stream could be gone on with."""
        self._partial = b""
        self._read()
        return not self.lost

    def resume(self, version: int | None) -> Resume:
        """The state that another instance goes on from; `version`: of the weights that must, None if any may."""
        self._seams.append(len(self._ids))
        reason, stop = self.finish or (None, None)
        return Resume(
            self._ids.tolist(), self._spans, self._prompt, version, self._lead, *self._names, reason, stop,
            self._usage_sent, list(self._seams),
        )  # fmt: skip

    @property
    def version(self) -> int | None:
        """Of the weights that wrote the last token."""
        return self._spans[-1].version if self._spans else None

    def _whole(self, piece: bytes) -> bytes:
        piece = self._partial + piece
        end = piece.rfind(b"\n\n") + 2 if not self.lost else len(piece)
        if end < 2:
            end = 0
        self._partial = piece[end:]
        if len(self._partial) > self._memory.per_stream:  # no event is so long
            self._lose()
            return piece[:end] + self.rest()
        return piece[:end]

    def _read(self) -> None:
        bundle = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        if self.lost:
            return
        before = len(self._ids)
        try:
            if not self._read_fast(bundle):
                for event in bundle.split(b"\n\n"):
                    self._read_event(event)
        except (msgspec.DecodeError, ValueError, OverflowError):
            self._lose()
            return
        self._charge((len(self._ids) - before) * ID_BYTES)

    def _charge(self, size: int) -> None:
        memory = self._memory
        if self._charged + size > memory.per_stream or memory.used + size > memory.limit:
            self._lose()
            return
        memory.used += size
        self._charged += size

    def _read_fast(self, bundle: bytes) -> bool:
        """The middle of an answer that one version writes, without parsing it; False if it may be anything else."""
        if not self._ids or self.finish is not None or any(each in bundle for each in _RARE):
            return False
        versions = set(_VERSION.findall(bundle))
        if len(versions) != 1:
            return False
        found = b",".join(_IDS.findall(bundle))
        self._add([int(i) for i in found.split(b",")] if found else [], int(versions.pop()), [])
        return True

    def _read_event(self, event: bytes) -> None:
        name, found, data = event.partition(b"data: ")
        if not found:
            return  # a comment, or the nothing behind the last event
        if data == b"[DONE]":
            self.done = True
            return
        payload = decode_event(data)
        if payload.error is not None:
            raise ValueError("it has ended with an error")
        if name.startswith(b"event: done"):
            self.done = True
            return
        self._note(payload, payload.choices[0] if payload.choices else payload)

    def _note(self, payload: Event, said: Said) -> None:
        if self._names[0] is None:
            self._names = payload.id, payload.created
        if said.token_ids:
            if payload.weight_version is None:
                raise ValueError("tokens of no version")
            self._prompt = self._prompt or said.prompt_weight_versions
            told = said.hotswap_weight_versions or said.weight_versions
            self._add(said.token_ids, payload.weight_version, told)
        elif not self._ids:
            self._lead += 1
        if said.finish_reason is not None:
            self.finish = said.finish_reason, said.stop_reason
        elif not payload.choices and payload.usage is not None:
            self._usage_sent = True

    def _add(self, ids: list[int], version: int, spans: list[Told]) -> None:
        start = len(self._ids)
        self._ids.extend(ids)
        end = len(self._ids)
        for span in spans or [Told(version, start, end)]:
            self._extend(int(span.version), max(span.start, start), min(span.end, end))

    def _extend(self, version: int, start: int, end: int) -> None:
        if end <= start:
            return
        last = self._spans[-1] if self._spans else None
        if last is not None and last.version == version and last.end == start:
            self._spans[-1] = Span(version, last.start, end)
        else:
            self._spans.append(Span(version, start, end))
