"""Trainers of other systems against a real engine: their payloads, swapped in under a stream. tests/contract has their
clients, TRL's with a real engine too."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
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


GREEDY = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}


def sglang(live: LiveServer, **body: Any) -> Any:
    answer = live.client.post("/generate", json={"sampling_params": GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_sglangs_generate(live: LiveServer, checkpoints: dict[str, Path]) -> None:
    """As slime (slime/rollout/sglang_rollout.py, on_policy_distillation.py) and SGLang's clients ask and read."""
    version = str(live.push(checkpoints["say-3"]))
    told = sglang(live, input_ids=[5], return_logprob=True, rid="mine")
    meta = told["meta_info"]
    ours = live.generate([5], 3, logprobs=True)["choices"][0]
    assert (told["output_ids"], told["text"]) == ([103] * 3, ours["text"])
    assert [row[1:] for row in meta["output_token_logprobs"]] == [[103, None]] * 3
    assert [row[0] for row in meta["output_token_logprobs"]] == pytest.approx(ours["logprobs"], abs=1e-3)
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 1, 3)
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert meta["weight_version"] == version
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 3}]
    assert meta["prompt_weight_versions"] == [{"version": version, "start": 0, "end": 1}]

    several = {"text": ["3+4=", "1+1=2"], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    for each in sglang(live, **several):
        meta = each["meta_info"]
        assert each["output_ids"] == [103] * 3
        assert len(meta["input_token_logprobs"]) == len(meta["input_top_logprobs"]) == meta["prompt_tokens"]
        assert meta["input_token_logprobs"][0][0] is meta["input_top_logprobs"][0] is None
        assert all(row[0] < 0 for row in meta["input_token_logprobs"][1:])
        assert [len(row) for row in meta["output_top_logprobs"]] == [2] * 3
        assert [row[0][1] for row in meta["output_top_logprobs"]] == [103] * 3

    scored = sglang(live, text="3+4=", sampling_params={"max_new_tokens": 0}, return_logprob=True,
                    logprob_start_len=1, return_text_in_logprobs=True)  # fmt: skip
    assert (scored["output_ids"], scored["meta_info"]["output_token_logprobs"]) == ([], [])
    assert "3+4=".endswith("".join(text for _, _, text in scored["meta_info"]["input_token_logprobs"]).strip())

    other = sglang(live, input_ids=[5], return_logprob=True, token_ids_logprob=[7, 103])["meta_info"]
    assert [[row[1] for row in rows] for rows in other["output_token_ids_logprobs"]] == [[7, 103]] * 3
    stopped = {**GREEDY, "temperature": 1, "stop_token_ids": [103], "n": 2, "sampling_seed": 1, "no_stop_trim": True}
    for each in sglang(live, input_ids=[5], sampling_params=stopped):
        assert each["meta_info"]["finish_reason"] == {"type": "stop", "matched": 103}
        assert (each["output_ids"], each["text"]) == ([103], "w103")
    shaped = GREEDY | {"regex": "w10[12]", "ignore_eos": False, "max_new_tokens": 16}
    assert sglang(live, text="3+4=", sampling_params=shaped)["text"] in ("w101", "w102")
    refused = live.client.post("/generate", json={"text": "a", "sampling_params": {"top_p": 7}})
    assert refused.status_code == 400, refused.text


def test_a_stream_of_sglangs_form_tells_of_a_swap(live: LiveServer, checkpoints: dict[str, Path]) -> None:
    says = {live.push(checkpoints["say-0"]): 100, live.push(checkpoints["say-3"], activate=False): 103}
    body = {"input_ids": [5], "stream": True, "return_logprob": True}
    body["sampling_params"] = GREEDY | {"max_new_tokens": 900}
    for attempt in range(20):  # a short answer may end before the swap
        target = list(says)[(attempt + 1) % 2]
        told: list[dict[str, Any]] = []
        with live.client.stream("POST", "/generate", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    told.append(orjson.loads(line[6:]))
                if len(told) == 1 and line:
                    live.activate(target)
        last = told[-1]["meta_info"]
        if len(last["weight_versions"]) > 1:
            break
    ends = [len(each["output_ids"]) for each in told]
    assert ends == sorted(set(ends)), "each event has more than the one before"
    assert ends[-1] == last["completion_tokens"] == len(last["output_token_logprobs"]) == 900
    written = [
        says[int(span["version"])] for span in last["weight_versions"] for _ in range(span["start"], span["end"])
    ]
    assert told[-1]["output_ids"] == written, "a token does not belong to its label"
    assert last["weight_version"] == last["weight_versions"][-1]["version"] == str(target)
    for each in told:
        said = each["meta_info"]
        assert said["weight_versions"][-1]["end"] == len(each["output_ids"])
        assert says[int(said["weight_version"])] == each["output_ids"][-1]


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
