"""Trainers of other systems against a real engine: their own clients and payloads, swapped in under a stream."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from safetensors.torch import load_file, save

from tests.live import LiveServer
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

BODY = {"prompt_token_ids": [7, 8, 9], "max_tokens": 900, "temperature": 0, "ignore_eos": True}


class Stream:
    """Streams `/generate` until it is told to stop: every token with the version that wrote it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seen: list[tuple[int, int]] = []
        self.errors: list[str] = []
        self.stop = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self.stop.is_set():
                with client.stream("POST", "/generate", json=BODY) as answer:
                    self._read(answer)

    def _read(self, answer: httpx.Response) -> None:
        event = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: ") and event == "token":
                data = orjson.loads(line.removeprefix("data: "))
                if len(data["token_ids"]) == 1:
                    self.seen.append((data["token_ids"][0], data["weight_version"]))
            elif line.startswith("data: ") and event == "error":
                self.errors.append(line)

    def saw(self, token: int) -> bool:
        return any(seen == token for seen, _ in self.seen)


@contextmanager
def streaming(live: LiveServer) -> Iterator[Stream]:
    stream = Stream(live.url)
    thread = threading.Thread(target=stream.run)
    thread.start()
    try:
        yield stream
    finally:
        stream.stop.set()
        thread.join(60)
    assert not stream.errors
    of_version: dict[int, set[int]] = {}
    for token, version in stream.seen:
        of_version.setdefault(version, set()).add(token)
    assert all(len(tokens) == 1 for tokens in of_version.values()), "a token does not belong to its label"


def buckets(directory: Path, number: int) -> list[str]:
    """The tensors of a checkpoint as `number` safetensors files, base64."""
    items = sorted(load_file(directory / "model.safetensors").items())
    parts = [dict(items[i::number]) for i in range(number)]
    return [base64.b64encode(save(part)).decode() for part in parts]


def test_vllms_own_client_drives_the_four_phases(live: LiveServer, checkpoints: dict[str, Path]) -> None:
    """vllm/distributed/weight_transfer/clients.py, HTTPVLLMWeightSyncClient, with the key in its base URL."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    live.push(checkpoints["say-0"])
    key = live.processes.admin_key
    client = HTTPVLLMWeightSyncClient(live.processes.admin_url.replace("http://", f"http://:{key}@"))
    with streaming(live) as stream:
        wait_until(lambda: stream.saw(100))
        client.init_weight_transfer_engine({})
        client.start_weight_update()
        client.update_weights({"checkpoint_path": str(checkpoints["say-1"])})
        client.finish_weight_update("12")
        assert live.generate([5], 2)["choices"][0]["token_ids"] == [101, 101], "finish answers when it serves"
        wait_until(lambda: stream.saw(101))

        client.start_weight_update()
        for part in buckets(checkpoints["say-2"], 3):
            client.update_weights([{"safetensors": part}])
        client.finish_weight_update(None)
        assert live.generate([5], 2)["choices"][0]["token_ids"] == [102, 102]
        wait_until(lambda: stream.saw(102))
        client.shutdown_weight_transfer_engine()


def test_sglangs_payloads(live: LiveServer, checkpoints: dict[str, Path]) -> None:
    """As slime (slime/backends/sglang_utils/sglang_engine.py, `_make_request`) and verl
    (verl/workers/rollout/sglang_rollout/http_server_engine.py) send them."""

    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = live.admin.post(path, json=body)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    live.push(checkpoints["say-0"])
    with streaming(live) as stream:
        wait_until(lambda: stream.saw(100))
        body = {"model_path": str(checkpoints["say-3"]), "flush_cache": True, "weight_version": "3"}
        assert ask("/update_weights_from_disk", body)["success"] is True
        assert live.generate([5], 2)["choices"][0]["token_ids"] == [103, 103]
        wait_until(lambda: stream.saw(103))
        for bucket in buckets(checkpoints["say-1"], 2):
            payload = {"serialized_named_tensors": [bucket], "load_format": "safetensors", "flush_cache": False}
            answer = ask("/update_weights_from_tensor", {**payload, "weight_version": "4"})
        assert answer["weight_version"] == str(live.active())
        assert live.generate([5], 2)["choices"][0]["token_ids"] == [101, 101]
        wait_until(lambda: stream.saw(101))


def test_a_pause_freezes_a_stream_and_a_lost_trainer_does_not(live: LiveServer, checkpoints: dict[str, Path]) -> None:
    live.push(checkpoints["say-0"])
    with streaming(live) as stream:
        wait_until(lambda: stream.saw(100))
        assert live.admin.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        assert live.admin.get("/is_paused").json() == {"is_paused": True}
        wait_until(lambda: frozen(stream), 20)
        assert live.admin.post("/continue_generation", json={}).status_code == 200
        seen = len(stream.seen)
        wait_until(lambda: len(stream.seen) > seen + 20)

        assert live.admin.post("/pause?ttl_s=3").status_code == 200  # and nobody resumes
        wait_until(lambda: frozen(stream), 20)
        seen = len(stream.seen)
        wait_until(lambda: len(stream.seen) > seen + 20, 30, what="the pause ended with its lease")
        assert live.admin.get("/is_paused").json() == {"is_paused": False}


def frozen(stream: Stream) -> bool:
    """Whether no token comes for half a second: a hundred times as long as one takes."""
    before = len(stream.seen)
    return not threading.Event().wait(0.5) and len(stream.seen) == before
