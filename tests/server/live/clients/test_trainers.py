"""Trainers of other systems against a real engine: their payloads, swapped in under a stream. tests/contract has their
clients, TRL's with a real engine too."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save

from tests.fleet import Clients, Seen
from tests.live import LiveServer
from tests.waiting import wait_until

pytestmark = pytest.mark.engine


@contextmanager
def streaming(live: LiveServer) -> Iterator[Seen]:
    with Clients([live.url], 1, tokens=900).streaming() as seen:
        yield seen
    assert not seen.faults
    said = set(seen.tokens)
    assert len(said) == len({version for version, _ in said}), "a token does not belong to its label"


def saw(seen: Seen, token: int) -> bool:
    return any(said == token for _, said in seen.tokens)


def buckets(directory: Path, number: int) -> list[str]:
    """The tensors of a checkpoint as `number` safetensors files, base64."""
    items = sorted(load_file(directory / "model.safetensors").items())
    parts = [dict(items[i::number]) for i in range(number)]
    return [base64.b64encode(save(part)).decode() for part in parts]


def test_sglangs_payloads(live: LiveServer, checkpoints: dict[str, Path]) -> None:
    """As slime (slime/backends/sglang_utils/sglang_engine.py, `_make_request`) and verl
    (verl/workers/rollout/sglang_rollout/http_server_engine.py) send them."""

    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = live.admin.post(path, json=body)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    live.push(checkpoints["say-0"])
    with streaming(live) as seen:
        wait_until(lambda: saw(seen, 100), 120)
        body = {"model_path": str(checkpoints["say-3"]), "flush_cache": True, "weight_version": "3"}
        assert ask("/update_weights_from_disk", body)["success"] is True
        assert live.generate([5], 2)["choices"][0]["token_ids"] == [103, 103]
        wait_until(lambda: saw(seen, 103), 120)
        ask("/begin_weight_update", {"selector": "all"})
        for bucket in buckets(checkpoints["say-1"], 2):
            payload = {"serialized_named_tensors": [bucket], "load_format": "safetensors", "flush_cache": False}
            ask("/update_weights_from_tensor", {**payload, "weight_version": "4"})
        answer = ask("/end_weight_update", {})
        assert answer["weight_version"] == str(live.active())
        assert live.generate([5], 2)["choices"][0]["token_ids"] == [101, 101]
        wait_until(lambda: saw(seen, 101), 120)


def test_a_pause_freezes_a_stream_and_a_lost_trainer_does_not(live: LiveServer, checkpoints: dict[str, Path]) -> None:
    live.push(checkpoints["say-0"])
    with streaming(live) as seen:
        wait_until(lambda: saw(seen, 100), 120)
        assert live.admin.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        assert live.admin.get("/is_paused").json() == {"is_paused": True}
        wait_until(lambda: frozen(seen), 60)
        assert live.admin.post("/continue_generation", json={}).status_code == 200
        before = len(seen.tokens)
        wait_until(lambda: len(seen.tokens) > before + 20, 60)

        assert live.admin.post("/pause?ttl_s=6").status_code == 200  # and no client resumes
        wait_until(lambda: frozen(seen), 60)
        before = len(seen.tokens)
        wait_until(lambda: len(seen.tokens) > before + 20, 60, what="the pause ended with its lease")
        wait_until(lambda: live.admin.get("/is_paused").json() == {"is_paused": False})


def frozen(seen: Seen) -> bool:
    """Whether no token comes for half a second: a hundred times as long as one takes."""
    before = len(seen.tokens)
    return not threading.Event().wait(0.5) and len(seen.tokens) == before
