"""Chunks of HTTP/1.1, where they can be told without a parser."""

from __future__ import annotations


def whole_chunk(data: bytes) -> int:
    """Where the content of `data` begins if it is one chunk with content, to the byte and as usually written; else 0.

    What is not, the parser reads: several chunks or half a one, extensions, capitals, leading zeros, the last chunk.
    """
    line = data.find(b"\r\n", 0, 10)
    size = len(data) - line - 4
    if line < 1 or size < 1 or not data.endswith(b"\r\n") or data[:line] != b"%x" % size:
        return 0
    return line + 2
