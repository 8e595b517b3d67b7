"""Two real engines of different models behind one gateway: one is swapped while the other streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from tests.live import LiveServer
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.broad]
BODY = {"prompt_token_ids": [3, 4, 5, 6], "temperature": 0, "ignore_eos": True}
FILE = """\
models:
  - name: toy
  - name: other
    checkpoint: {checkpoint}
aliases:
  fast: [other, toy]
"""


@pytest.fixture(scope="module")
def live(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    root = tmp_path_factory.mktemp("models")
    file = root / "models.yaml"
    file.write_text(FILE.format(checkpoint=checkpoints["say-1"]))
    server = LiveServer(checkpoints["say-0"], root / "state", models=file)
    with server.running():
        yield server


def chat(live: LiveServer, model: str) -> tuple[int, dict[str, Any], httpx.Headers]:
    answer = live.client.post("/generate", json=BODY | {"model": model, "max_tokens": 3, "stream": False})
    return answer.status_code, answer.json(), answer.headers


def test_one_is_swapped_while_the_other_streams(live: LiveServer, checkpoints: dict[str, Path]) -> None:
    _, body, headers = chat(live, "fast")
    assert body["choices"][0]["token_ids"] == [101] * 3
    assert "x-hotswap-fallback" not in headers
    assert [m.id for m in openai.OpenAI(base_url=f"{live.url}/v1", api_key="none").models.list()] == [
        "toy",
        "other",
        "fast",
    ]
    got: list[int] = []
    stream = BODY | {"model": "toy", "max_tokens": 900}
    with live.client.stream("POST", "/generate", json=stream) as answer:
        lines = answer.iter_lines()
        for line in lines:
            if line.startswith("data: ") and "token_ids" in line:
                break
        path = {"path": str(checkpoints["say-2"]), "activate": True}
        pushed = live.admin.post("/admin/weights", json=path, params={"model": "other"})
        assert pushed.status_code == 200, pushed.text
        version = pushed.json()["version"]
        for line in lines:
            event = orjson.loads(line[6:]) if line.startswith("data: ") else {}
            got += event.get("token_ids", ())
            if "usage" in event:
                spans = event["choices"][0]["weight_versions"]
    assert spans == [{"version": 1, "start": 0, "end": 900}], "the other model's swap is none of its own"
    assert set(got) == {100}
    _, body, headers = chat(live, "other")
    assert body["choices"][0]["token_ids"] == [102] * 3
    assert headers["x-hotswap-weight-version"] == str(version)
    assert live.admin.get("/admin/weights/active", params={"model": "toy"}).json()["version"] == 1
    entries = live.admin.get("/admin/ledger").json()["entries"]
    assert {entry["model"] for entry in entries if entry["action"] == "push"} <= {"toy", "other"}
    assert any(entry["model"] == "other" for entry in entries)
    page = live.client.get("/metrics").text
    assert f'hotswap_active_version{{model="other"}} {float(version)}' in page
    assert 'hotswap_active_version{model="toy"} 1.0' in page


def test_an_alias_leads_on_where_its_model_has_gone(live: LiveServer) -> None:
    live.processes.children["instance-other-0"].process.kill()
    wait_until(lambda: "x-hotswap-fallback" in chat(live, "fast")[2], 60)
    status, body, headers = chat(live, "fast")
    assert (status, body["choices"][0]["token_ids"]) == (200, [100] * 3)
    assert headers["x-hotswap-fallback"].startswith("from=other; reason=")
    live.processes.restart_ended()
    wait_until(lambda: live.processes.restart_ended() or chat(live, "other")[0] == 200, 300)
    assert chat(live, "fast")[1]["choices"][0]["token_ids"] == [102] * 3, "it has the version that was committed last"
