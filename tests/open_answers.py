"""Answers of greedy requests, each read on a thread of its own while a test does something to who makes them."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import orjson

PROMPT = [3, 4, 5, 6]


class Asked:
    """One answer of /generate: its tokens as far as they have come, and what went wrong."""

    def __init__(self, url: str, tokens: int, *, stream: bool = True) -> None:
        self.stream, self.tokens, self.fault = stream, list[int](), ""
        self._url = f"{url}/generate"
        self._body = {"prompt_token_ids": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body | {"stream": self.stream}, timeout=120) as answer:
                if answer.status_code != 200:
                    self.fault = answer.read().decode()
                elif self.stream:
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            self._take(orjson.loads(line[6:]))
                else:
                    self._take(orjson.loads(answer.read()))
        except httpx.HTTPError as error:
            self.fault = repr(error)

    def _take(self, found: dict[str, Any]) -> None:
        self.fault = str(found["error"]) if "error" in found else self.fault
        for choice in found.get("choices", [found]):
            self.tokens += choice.get("token_ids") or []

    def finish(self) -> list[int]:
        """All its tokens, once it has ended well."""
        self._thread.join(180)
        assert not self._thread.is_alive()
        assert not self.fault
        return self.tokens
