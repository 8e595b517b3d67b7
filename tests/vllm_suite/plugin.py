"""Pytest plug-in for vLLM's tests: the server they would start is the one at $SUITE_URL, and outcomes go to a file.

It is loaded in a process of its own, in which `tests` is vLLM's package and not this project's. Every request brings
the key in $SUITE_KEY, if there is one: what an instance asks of its gateways.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
import requests

outcomes: dict[str, str] = {}
# Asks for 10,000 tokens, which a model of these lengths refuses: it passes where refusals take half a second.
LEFT = frozenset({"test_request_cancellation"})


class RemoteOpenAIServer:
    """The server that vLLM's tests start, as they see it: the one at $SUITE_URL. Their options are not its own."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.url_root = os.environ["SUITE_URL"]

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        """It goes on."""

    def url_for(self, *parts: str) -> str:
        return self.url_root + "/" + "/".join(parts)

    def get_client(self, **more: Any) -> Any:
        return openai.OpenAI(**self._options("/v1", more))

    def get_async_client(self, **more: Any) -> Any:
        return openai.AsyncOpenAI(**self._options("/v1", more))

    def get_client_anthropic(self, **more: Any) -> Any:
        return anthropic.Anthropic(**self._options("", more))

    def get_async_client_anthropic(self, **more: Any) -> Any:
        return anthropic.AsyncAnthropic(**self._options("", more))

    def _options(self, path: str, more: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": self.url_root + path, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 20} | more


def bring_key(client: Any, build: str) -> None:
    """Requests that `client`, a class, makes in its method `build` bring the key."""
    made = getattr(client, build)

    def with_key(*args: Any, **more: Any) -> Any:
        request = made(*args, **more)
        request.headers["authorization"] = f"Bearer {os.environ['SUITE_KEY']}"
        return request

    setattr(client, build, with_key)


if os.environ.get("SUITE_KEY"):
    for library in (httpx, httpx2):  # the SDKs have moved to the second
        bring_key(library.Client, "build_request")
        bring_key(library.AsyncClient, "build_request")
    bring_key(requests.Session, "prepare_request")


utils: Any = types.ModuleType("tests.utils")
utils.RemoteOpenAIServer = RemoteOpenAIServer
sys.modules["tests.utils"] = utils


@pytest.fixture(scope="session")
def qwen3_lora_files() -> str:
    """Of vLLM's own conftest.py, which is not loaded; there is no adapter here."""
    return "no adapter"


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Those that ask a server alone; the others test vLLM's classes."""
    asking = [item for item in items if {"server", "client"} & set(item.fixturenames) and item.originalname not in LEFT]
    config.hook.pytest_deselected(items=[item for item in items if item not in asking])
    items[:] = asking


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        passed = report.outcome == "passed" and outcomes.get(report.nodeid, "passed") == "passed"
        outcomes[report.nodeid] = "passed" if passed else str(report.longrepr)[-2000:]


def pytest_sessionfinish() -> None:
    Path(os.environ["SUITE_OUTCOMES"]).write_text(json.dumps(outcomes))
