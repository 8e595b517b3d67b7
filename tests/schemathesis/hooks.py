"""Makes of what schemathesis thinks of requests that get as far as the engine, and that nobody has to wait for."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

MODEL = os.environ.get("SERVED_MODEL", "toy")
SHORT = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "min_tokens": 4, "n": 2, "best_of": 2}
LONGEST_WAIT_S = 600


@schemathesis.hook
def before_call(_: Any, case: Any, *__: Any) -> None:
    """A wait for a version that never comes ends with a 504, as it should, but it ends late."""
    if case.headers and _is_wait(case.headers.get("x-hotswap-wait-s")):
        del case.headers["x-hotswap-wait-s"]
    if not isinstance(case.body, dict):
        return
    wish = case.body.get("hotswap")
    if isinstance(wish, dict) and _is_wait(wish.get("wait_s")):
        del wish["wait_s"]
    if case.meta is not None and case.meta.generation.mode.is_positive:
        _shorten(case.body)


def _is_wait(value: Any) -> bool:
    """Whether it is a wait that the gateway would grant."""
    try:
        return not isinstance(value, bool) and 0 <= float(value) <= LONGEST_WAIT_S
    except (TypeError, ValueError):
        return False


def _shorten(body: dict[str, Any]) -> None:
    if "model" in body:
        body["model"] = MODEL
    for name, most in SHORT.items():
        if isinstance(body.get(name), int | float):
            body[name] = min(body[name], most)
