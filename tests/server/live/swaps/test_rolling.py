"""Rolling swaps of two real instances, guarded by probes: what the canary is asked, and that bad weights stop there.

The instances take weights that are not finite, so that what these leave in the KV cache can be looked for.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.asking import Asking
from tests.live import VLLM_ARGS, LiveServer
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

POISON = {"nan": float("nan"), "inf": float("inf"), "overflow": 3e38}
SMOKE = {("rolling", "overflow")}
AFTERWARDS = 200  # answers
# say-0, say-1 and say-3 answer these words: tests/conftest.py, and the tokenizer of loadtest/models/checkpoints.py.
PROBES = """
- {name: words, prompt: [3, 4, 5], max_tokens: 4, expect: {regex: "^(w100|w101|w103)+$"}, min_mean_logprob: -5}
- {name: text, prompt: "abc", max_tokens: 2}
"""


@pytest.fixture(scope="module")
def server(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two instances that serve say-0 at first; tests leave them serving some version."""
    probes = tmp_path_factory.mktemp("probes") / "probes.yaml"
    probes.write_text(PROBES)
    state = tmp_path_factory.mktemp("rolling")
    arguments = ("--probes", str(probes))
    engine = (*VLLM_ARGS, "--allow-non-finite")
    live = LiveServer(checkpoints["say-0"], state, engine, name="rolling", instances=2, gateway_args=arguments)
    with live.running():
        yield live


class Clients(Asking):
    """Random prompts; what came back, `labelled` as (version, token)."""

    def __init__(self, url: str) -> None:
        super().__init__(url, 3)
        self.labelled: set[tuple[int, int]] = set()
        self.asked = 0
        self._chances = [random.Random(client) for client in range(3)]

    @property
    def tokens(self) -> set[int]:
        return {token for _, token in self.labelled.copy()}

    @property
    def versions(self) -> set[int]:
        return {version for version, _ in self.labelled.copy()}

    def question(self, client: int) -> dict[str, Any]:
        chance = self._chances[client]
        prompt = [chance.randrange(3, 90) for _ in range(chance.randrange(1, 60))]
        return {"prompt_token_ids": prompt, "max_tokens": 20}

    def take(self, client: int, choice: dict[str, Any]) -> None:
        for span in choice["weight_versions"]:
            self.labelled |= {(span["version"], t) for t in choice["token_ids"][span["start"] : span["end"]]}
        self.asked += 1


def push(server: LiveServer, directory: Path, **how: Any) -> httpx.Response:
    return server.admin.post("/admin/weights", json={"path": str(directory), **how})


def everywhere(server: LiveServer, version: int) -> bool:
    found = [(i["state"], i["active_version"], i["eligible"]) for i in server.instances()]
    return found == [("SERVING", version, True)] * 2


def test_a_sound_version_goes_round(server: LiveServer, checkpoints: dict[str, Path]) -> None:
    with Clients(server.url) as clients:
        answer = push(server, checkpoints["say-1"], mode="rolling", drain_s=5)
        assert answer.status_code == 200, answer.text
        swap = answer.json()["swap"]
        assert (swap["ok"], swap["mode"], swap["probe"]) == (True, "rolling", "passed")
        assert swap["canary"] in {i["id"] for i in server.instances()}
        version = answer.json()["version"]
        wait_until(lambda: version in clients.versions)
    assert not clients.failures
    assert clients.tokens <= {100 + i for i in range(4)}
    assert everywhere(server, version)
    found = server.admin.get("/admin/swap").json()["swap"]
    assert (found["phase"], found["mode"], found["probe"], found["in_flight"]) == ("done", "rolling", "passed", False)


@pytest.mark.parametrize("bad", ["unexpected", "nan"])
def test_bad_weights_stop_at_the_canary(
    server: LiveServer, checkpoints: dict[str, Path], tmp_path: Path, bad: str
) -> None:
    """No client ever sees a token of them, and the canary is back on the old weights when the answer comes."""
    assert push(server, checkpoints["say-1"]).status_code == 200
    before = server.active()
    directory = checkpoints["say-2"] if bad == "unexpected" else with_nan(checkpoints["say-3"], tmp_path / "nan")
    with Clients(server.url) as clients:
        answer = push(server, directory, mode="rolling")
        problem = answer.json()["error"]
        assert (answer.status_code, problem["code"]) == (409, "swap_aborted")
        assert "prompt words" in problem["reason"], "it says which prompt failed"
        wait_until(lambda: everywhere(server, before))
        asked = clients.asked
        wait_until(lambda: clients.asked > asked + 10)
    assert not clients.failures
    assert (clients.tokens, clients.versions) == ({101}, {before})
    assert server.active() == before
    found = server.admin.get("/admin/swap").json()["swap"]
    assert (found["phase"], found["probe"]) == ("aborted", "failed")
    assert found["reason"] == problem["reason"]


@pytest.mark.parametrize(
    ("mode", "bad"),
    [
        pytest.param(mode, bad, marks=[pytest.mark.broad] if (mode, bad) not in SMOKE else [])
        for mode in ("together", "rolling")
        for bad in POISON
    ],
)
def test_nothing_of_a_bad_version_is_left_in_the_cache(
    server: LiveServer, checkpoints: dict[str, Path], tmp_path: Path, mode: str, bad: str
) -> None:
    """Swapped in for all and rolled back, or stopped at the canary: the good version's tokens are its own.

    Zero times NaN is NaN: attention over a block that the bad version wrote would spoil the answer of whoever gets it.
    """
    assert push(server, checkpoints["say-1"]).status_code == 200
    good = server.active()
    with Clients(server.url) as clients:
        wait_until(lambda: clients.asked > 20, 60)
        answer = push(server, poisoned(checkpoints["say-3"], tmp_path / bad, POISON[bad]), mode=mode)
        if mode == "together":
            assert answer.status_code == 200, answer.text
            wait_until(lambda: answer.json()["version"] in clients.versions or clients.failures, 60)
            assert server.admin.post("/admin/weights/rollback").status_code == 200
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "swap_aborted")
        wait_until(lambda: everywhere(server, good), 60)
        asked, failed = clients.asked, len(clients.failures)
        wait_until(lambda: clients.asked > asked + AFTERWARDS, 120)
    assert {token for version, token in clients.labelled if version == good} == {101}
    assert len(clients.failures) == failed


def test_rollback_to_any_ready_version(server: LiveServer, checkpoints: dict[str, Path]) -> None:
    versions = [push(server, checkpoints[name]).json()["version"] for name in ("say-0", "say-1")]
    answer = server.admin.post("/admin/weights/rollback", json={"version": versions[0], "mode": "rolling"})
    assert answer.status_code == 200, answer.text
    assert server.active() == versions[0]
    assert server.generate([5, 6], 3)["choices"][0]["token_ids"] == [100] * 3
    answer = server.admin.post("/admin/weights/rollback")
    assert answer.json()["version"] == versions[1]
    answer = server.admin.post("/admin/weights/rollback", json={"version": 10**6})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_version")


def with_nan(source: Path, target: Path) -> Path:
    """The checkpoint with one NaN in its output matrix."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"][7, 7] = float("nan")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def poisoned(source: Path, target: Path, value: float) -> Path:
    """The checkpoint with values in attention that make keys and values NaN or infinite."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if "v_proj.weight" in name:
            tensor.fill_(value)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
