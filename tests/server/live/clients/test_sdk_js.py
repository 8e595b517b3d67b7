"""The OpenAI JavaScript SDK against the gateway and a real engine: what it parses, keeps, and raises."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.live import LiveServer
from tests.node import installed

pytestmark = pytest.mark.engine
JS = Path(__file__).parents[3] / "js"


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.Popen[str]]:
    """Starts tests/js/openai_sdk.js with the given arguments, the SDK installed as its lock file says."""
    directory = tmp_path_factory.mktemp("js")
    node = installed(JS, directory)

    def start(live: LiveServer, what: str) -> subprocess.Popen[str]:
        arguments = [*node, "openai_sdk.js", live.url + "/v1", live.name, what]
        pipe = subprocess.PIPE
        return subprocess.Popen(arguments, cwd=directory, stdout=pipe, stderr=pipe, text=True)

    return start


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON object in the last line it prints."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return dict(orjson.loads(output.strip().splitlines()[-1]))


def test_answers_arrive_with_the_fields_of_this_server(
    live: LiveServer, checkpoints: dict[str, Path], sdk: Callable[..., subprocess.Popen[str]]
) -> None:
    version = live.push(checkpoints["say-1"])
    told = result(sdk(live, "answers"))
    whole = [{"version": version, "start": 0, "end": 5}]
    assert told["header"] == str(version)
    text = told["chat"]["choices"][0]["message"]["content"]
    assert text
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in told["chatStream"]) == text
    assert "".join(c["choices"][0]["text"] for c in told["completionStream"]) == text
    assert told["completion"]["choices"][0]["text"] == text
    deltas = [e for e in told["responseStream"] if e["type"] == "response.output_text.delta"]
    assert "".join(e["delta"] for e in deltas) == told["response"]["output_text"] == text
    last = [told[name][-1]["choices"][0] for name in ("chatStream", "completionStream")]
    for choice in (told["chat"]["choices"][0], told["completion"]["choices"][0], *last, told["response"]):
        assert choice["weight_versions"] == whole
        (prompt,) = choice["prompt_weight_versions"]
        assert (prompt["version"], prompt["start"]) == (version, 0)
    assert told["responseStream"][-1]["response"]["weight_versions"] == whole
    assert {e["weight_version"] for e in deltas} == {version}
    assert told["withField"]["choices"][0]["weight_versions"] == whole


def test_refusals_are_the_errors_of_the_sdk(live: LiveServer, sdk: Callable[..., subprocess.Popen[str]]) -> None:
    told = result(sdk(live, "errors"))
    assert all(error["typed"] for error in told.values())
    for name in ("header", "field", "stream", "responses"):
        found = {k: told[name][k] for k in ("name", "status", "code", "type")}
        assert found == {
            "name": "ConflictError",
            "status": 409,
            "code": "version_unavailable",
            "type": "conflict_error",
        }
    assert (told["waited"]["name"], told["waited"]["status"]) == ("InternalServerError", 504)
    assert told["waited"]["code"] == "version_wait_timeout"
    assert (told["policy"]["name"], told["policy"]["code"]) == ("BadRequestError", "invalid_parameter")
    assert told["model"]["name"] == "NotFoundError"


def test_a_stream_that_a_swap_cuts_ends_with_a_typed_error(
    live: LiveServer, checkpoints: dict[str, Path], sdk: Callable[..., subprocess.Popen[str]]
) -> None:
    live.push(checkpoints["say-1"])
    live.push(checkpoints["say-2"])
    stream = sdk(live, "cut")
    assert stream.stdout is not None
    assert orjson.loads(stream.stdout.readline()) == "streams"
    assert live.admin.post("/admin/weights/rollback").status_code == 200  # the quickest swap there is
    told = result(stream)
    assert 0 < told["chunks"] < 900
    assert told["error"]["typed"]
    assert (told["error"]["code"], told["error"]["type"]) == ("weights_changed", "conflict_error")
