"""Zstandard streams that say when they were cut short; zstandard's own reader takes that for their end."""

from __future__ import annotations

import io
from typing import Any

import zstandard

BLOCK_BYTES = 1 << 16


class ZstdReader(io.RawIOBase):
    """The content of one frame or several, one after the other. Raises EOFError where the last is not whole."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._frame: Any = None  # None between two frames
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            block = self._stream.read(BLOCK_BYTES)
            if not block:
                if self._frame is not None:
                    raise EOFError("it ends before its last frame does")
                return 0
            self._content = memoryview(self._decompress(block))
        size = min(len(buffer), len(self._content))
        buffer[:size] = self._content[:size]
        self._content = self._content[size:]
        return size

    def _decompress(self, block: bytes) -> bytes:
        parts = []
        while block:
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                parts.append(self._frame.decompress(block))
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            block = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        return b"".join(parts)
