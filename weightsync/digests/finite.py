"""Looks for NaN and infinities in published bytes as they are read: two reductions over words that lie in the cache.

In every IEEE format the words of NaN and infinity are the largest of their sign: from `limit` on where the sign bit is
clear, and from `limit` with the sign bit on where it is set. So the largest signed and the largest unsigned word tell.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# dtype -> (unsigned word, the first word that is not finite, the same as a signed word)
_LIMITS: dict[str, tuple[type[np.unsignedinteger[Any]], int, type[np.signedinteger[Any]]]] = {
    "float64": (np.uint64, 0x7FF0 << 48, np.int64),
    "float32": (np.uint32, 0x7F80 << 16, np.int32),
    "bfloat16": (np.uint16, 0x7F80, np.int16),
    "float16": (np.uint16, 0x7C00, np.int16),
    "float8_e5m2": (np.uint8, 0x7C, np.int8),
    "float8_e4m3fn": (np.uint8, 0x7F, np.int8),  # it has no infinity
}


def is_finite(data: memoryview | bytes | bytearray, dtype: str) -> bool:
    """Whether no element of the contiguous bytes is NaN or infinite; True for types that have neither."""
    if dtype not in _LIMITS or not len(data):
        return True
    word, limit, signed = _LIMITS[dtype]
    words = np.frombuffer(data, word)
    sign = 1 << (8 * words.itemsize - 1)
    return bool(words.view(signed).max() < limit) and bool(words.max() < limit | sign)
