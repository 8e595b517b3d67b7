"""Rolling swaps of two real instances, guarded by probes (tests/conftest.py): bad weights stop at the canary.

Only real weights make a probe fail, and only a real cache keeps what they computed.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.asking import Labelled
from tests.fleet import Fleet
from tests.waiting import wait_until

pytestmark = pytest.mark.engine
POISON = {"nan": float("nan"), "inf": float("inf"), "overflow": 3e38}
SMOKE = {("rolling", "overflow")}
AFTERWARDS = 200  # answers


class Clients(Labelled):
    """They ask all kinds of prompts."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._chances = [random.Random(client) for client in range(3)]

    def question(self, client: int) -> dict[str, Any]:
        chance = self._chances[client]
        prompt = [chance.randrange(3, 90) for _ in range(chance.randrange(1, 60))]
        return {"prompt_token_ids": prompt, "max_tokens": 20}


def push(fleet: Fleet, directory: Path, **how: Any) -> httpx.Response:
    return fleet.live.admin.post("/admin/weights", json={"path": str(directory), **how})


def test_a_sound_version_goes_round(fleet: Fleet, checkpoints: dict[str, Path]) -> None:
    before = fleet.publish(0)
    with Clients(fleet.live.url) as clients:
        answer = push(fleet, checkpoints["say-1"], mode="rolling", drain_s=5)
        assert answer.status_code == 200, answer.text
        swap = answer.json()["swap"]
        assert (swap["ok"], swap["mode"], swap["probe"]) == (True, "rolling", "passed")
        assert swap["canary"] in {i["id"] for i in fleet.live.instances()}
        version = answer.json()["version"]
        wait_until(lambda: version in clients.answers, 120)
    assert not clients.failures
    assert clients.labelled == {(before, 100), (version, 101)}
    wait_until(lambda: fleet.all_serve(version))  # the gateway sees it a moment later
    found = fleet.live.admin.get("/admin/swap").json()["swap"]
    assert (found["phase"], found["mode"], found["probe"], found["in_flight"]) == ("done", "rolling", "passed", False)


@pytest.mark.parametrize("bad", ["unexpected", "nan"])
def test_bad_weights_stop_at_the_canary(fleet: Fleet, checkpoints: dict[str, Path], tmp_path: Path, bad: str) -> None:
    """No client ever sees a token of them, and the canary is back on the old weights when the answer comes."""
    assert push(fleet, checkpoints["say-1"]).status_code == 200
    before = fleet.live.active()
    directory = checkpoints["say-2"] if bad == "unexpected" else with_nan(checkpoints["say-3"], tmp_path / "nan")
    with Clients(fleet.live.url) as clients:
        answer = push(fleet, directory, mode="rolling")
        problem = answer.json()["error"]
        assert (answer.status_code, problem["code"]) == (409, "swap_aborted")
        assert "prompt words" in problem["reason"], "it says which prompt failed"
        wait_until(lambda: fleet.all_serve(before), 60)
        asked = clients.answers.total()
        wait_until(lambda: clients.answers.total() > asked + 10, 120)
    assert not clients.failures
    assert clients.labelled == {(before, 101)}
    assert fleet.live.active() == before
    found = fleet.live.admin.get("/admin/swap").json()["swap"]
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
    fleet: Fleet, checkpoints: dict[str, Path], tmp_path: Path, mode: str, bad: str
) -> None:
    """Swapped in for all and rolled back, or stopped at the canary: the good version's tokens are its own.

    Zero times NaN is NaN: attention over a block that the bad version wrote would spoil the answer of whoever gets it.
    """
    assert push(fleet, checkpoints["say-1"]).status_code == 200
    good = fleet.live.active()
    with Clients(fleet.live.url) as clients:
        wait_until(lambda: clients.answers.total() > 20, 120)
        answer = push(fleet, poisoned(checkpoints["say-3"], tmp_path / bad, POISON[bad]), mode=mode)
        if mode == "together":
            assert answer.status_code == 200, answer.text
            wait_until(lambda: answer.json()["version"] in clients.answers or clients.failures, 120)
            fleet.live.rollback()
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "swap_aborted")
        wait_until(lambda: fleet.all_serve(good), 60)
        asked, failed = clients.answers.total(), len(clients.failures)
        wait_until(lambda: clients.answers.total() > asked + AFTERWARDS, 240)
    assert {token for version, token in clients.labelled if version == good} == {101}
    assert len(clients.failures) == failed


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
