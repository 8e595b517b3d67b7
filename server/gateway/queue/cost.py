"""What a request will cost, guessed before it is served: prompt tokens plus the most it may answer.

Counted in tokens like vLLM's own work. A token of English is about four characters (OpenAI's rule of thumb), and JSON
adds little, so a body of b bytes is taken for b / 4 prompt tokens. Only the share of a queue depends on it; the true
count is charged afterwards where it is known (`AdmissionQueue.settle`).
"""

from __future__ import annotations

import msgspec

BYTES_PER_TOKEN = 4
USUAL_OUTPUT = 256  # where a request does not say; vLLM would let it fill the context
MOST_OUTPUT = 1 << 20

Count = int | float | str | bool | list[msgspec.Raw] | dict[str, msgspec.Raw] | None  # whatever was sent, unchecked


class _Asked(msgspec.Struct):
    """The fields that bound an answer, by the names of the routes; vLLM checks them."""

    max_tokens: Count = None
    max_completion_tokens: Count = None
    max_output_tokens: Count = None
    n: Count = None


_asked = msgspec.json.Decoder(_Asked)


def estimate(body: bytes, generates: bool = True) -> int:
    """Tokens, at least 1. `body` is a JSON object."""
    prompt = len(body) // BYTES_PER_TOKEN + 1
    if not generates:
        return prompt
    try:
        asked = _asked.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return prompt + USUAL_OUTPUT
    output = _count(asked.max_completion_tokens) or _count(asked.max_output_tokens) or _count(asked.max_tokens)
    return prompt + min((output or USUAL_OUTPUT) * (_count(asked.n) or 1), MOST_OUTPUT)


def _count(value: Count) -> int:
    return value if isinstance(value, int) and value > 0 else 0
