"""Rollouts from a real engine: its routing is replayed in training, and a partial rollout crosses swaps."""

from __future__ import annotations

import base64
import io
import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.live import LiveServer
from tests.trainer.ranks import Ranks
from tests.trainer.rollouts.client import client, records
from tests.trainer.rollouts.teacher_server import logprobs
from tests.waiting import wait_until
from trainer.data.tokenizer import Tokenizer
from trainer.routing import of_trajectory
from trainer.tiny_model import write_tiny_model
from trainer.trajectory import Partial, TrajectoryGroup

pytestmark = [pytest.mark.broad, pytest.mark.engine, pytest.mark.usefixtures("quiet_engines")]
PATIENCE_S = 300
SAMPLES, CROSSING = 16, 8
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
ENGINE = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16", "--max-num-batched-tokens", "64")
RECORDING = ("--enable-return-routed-experts", "--speculative-config", DRAFTS)
BLOCK, ROW_BYTES = 32, 4  # tokens; two layers, two experts of a byte each
BUDGET, ROUNDS = 8, 3
RANDOM = 48  # samples of random weights, which end one in sixteen at each token
PROMPT = [3 + (i * i) % 12 for i in range(100)]  # two chunks


def write_models(root: Path) -> list[Path]:
    """Two models whose experts say much, and the first one with routers that are a little off."""
    paths = [root / name for name in ("first", "second", "off")]
    for seed, path in enumerate(paths[:2]):
        write_tiny_model(path, "qwen3_moe", seed=seed, max_position_embeddings=1024)
        _change(path, lambda name, tensor: tensor * 8 if "experts" in name and "down_proj" in name else tensor)
    shutil.copytree(paths[0], paths[2])
    generator = torch.Generator().manual_seed(2)

    def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * 0.3 * tensor.std()
        return tensor + noise if name.endswith("mlp.gate.weight") else tensor

    _change(paths[2], moved)
    return paths


def _change(path: Path, change: Any) -> None:
    file = path / "model.safetensors"
    save_file({n: change(n, t).contiguous() for n, t in load_file(file).items()}, file, metadata={"format": "pt"})


def chosen(path: Path, tokens: list[int]) -> np.ndarray:
    """By transformers: the experts of each token but the last, in order, [tokens - 1, layers, 2]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(2).indices.sort(-1).values for layer in logits], 1).numpy()


def recorded(choice: dict[str, Any]) -> np.ndarray:
    found = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert found.dtype == np.uint8
    return np.sort(found, -1)


same = np.testing.assert_array_equal  # says which tokens went elsewhere


@pytest.mark.timeout(900)
def test_training_sends_tokens_where_the_engine_sent_them(one_rank: Ranks, tmp_path: Path) -> None:
    """Prompts in chunks, drafts that are rejected, prompts from the cache, and swaps in the middle of answers."""
    first, second, off = write_models(tmp_path)
    tokenizer = Tokenizer(first)
    (record,) = records(tokenizer, "1+2=")
    live = LiveServer(first, tmp_path / "state", (*ENGINE, *RECORDING), name="demo")
    with live.running():
        with client(live.url, tokenizer, max_tokens=48, routed_experts=True, fixed_sampler=True) as running:
            group = running.round(record, SAMPLES, 0).result(PATIENCE_S)
        answers = [live.generate(PROMPT, 40, routed_experts=True)["choices"][0] for _ in range(2)]
        assert "routed_experts" not in live.generate(PROMPT, 4)["choices"][0]
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "routed_experts": True}
        whole = live.client.post("/v1/completions", json=body).json()["choices"][0]
        stream = live.client.post("/v1/completions", json=body | {"stream": True}).text
        crossed = crossing(live, second)
    for answer in answers:  # the second one's prompt is in the cache
        same(recorded(answer), chosen(first, PROMPT + answer["token_ids"]))
    assert whole["routed_experts"] in stream, "streams end with what whole answers have"
    for prompt, answer, version in crossed:
        spans = answer["weight_versions"]
        rows, end = recorded(answer), len(prompt) + spans[0]["end"] - 1
        assert len(rows) == len(prompt) + len(answer["token_ids"]) - 1
        tokens = (prompt + answer["token_ids"])[: end + 1]
        assert spans[0]["version"] == version
        same(rows[:end], chosen(first, tokens), "tokens of the old weights have their routing")
    assert isinstance(group, TrajectoryGroup)
    sampled = []
    for trajectory in group.trajectories:
        routing = of_trajectory(len(group.prompt_ids), trajectory)
        assert routing is not None
        assert int(routing.min()) >= 0, "every token has its experts"
        same(routing.sort(-1).values.numpy(), chosen(first, [*group.prompt_ids, *trajectory.token_ids]))
        sampled.append((trajectory.token_ids, trajectory.logprobs, routing.tolist()))
    for path, least in ((first, 0.0), (off, 0.005)):
        gap = one_rank.call("gaps", path=str(path), prompt=group.prompt_ids, sampled=sampled)[0]
        print(f"{path.name}: mean difference to the rollout's log-probs {gap}")
        assert gap["replayed"] <= gap["free"] + 1e-6
        assert gap["free"] >= least
    assert gap["replayed"] < gap["free"] / 2, "most of what other routers change is where tokens go"


@pytest.mark.timeout(600)
def test_what_the_store_has_no_room_for_costs_one_answer(tmp_path: Path) -> None:
    """Of a prompt that the prefix cache has, the routing is lost: a typed error, whole and in a stream. Asked again, it
    is there."""
    model = tmp_path / "model"
    write_tiny_model(model, "qwen3_moe", max_position_embeddings=1024)
    room = json.dumps({"max_bytes": 4 * BLOCK * ROW_BYTES})  # a prompt has three full blocks
    options = (*ENGINE, "--enable-return-routed-experts", "--block-size", str(BLOCK), "--aux-output-config", room)
    live = LiveServer(model, tmp_path / "state", options, name="demo")
    asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "routed_experts": True}
    whole = {"prompt_token_ids": PROMPT, "max_tokens": 4, "stream": False, "routed_experts": True}
    others = ([3 + (n * i) % 12 for i in range(100)] for n in itertools.count(5))  # each takes room in the store
    with live.running():
        first = live.generate(PROMPT, 4, routed_experts=True)["choices"][0]
        for route, body in (("/generate", whole), ("/v1/completions", asked)):
            live.generate(next(others), 4)
            refused = live.client.post(route, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "routing_lost"), refused.text
            again = live.generate(PROMPT, 4, routed_experts=True)["choices"][0]
            same(recorded(again), recorded(first))
        for route, body in (("/generate", whole), ("/v1/completions", asked)):
            live.generate(next(others), 4)
            stream = live.client.post(route, json=body | {"stream": True, "max_tokens": 200, "ignore_eos": True})
            told = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: {")]
            assert (stream.status_code == 200) == bool(told), "503 where the engine was done before anything was sent"
            assert orjson.loads((told or [stream.text])[-1])["error"]["code"] == "routing_lost"
            assert live.client.post(route, json=body).status_code == 200
    same(recorded(first), chosen(model, PROMPT + first["token_ids"]))


def crossing(live: LiveServer, other: Path) -> list[tuple[list[int], dict[str, Any], int]]:
    """Answers that a swap fell into, with their prompts and the version that they began with: half of them have their
    keys and values computed anew."""
    before = live.active()
    prompts = [[3 + (i * (3 + n)) % 12 for i in range(60)] for n in range(CROSSING)]
    answer = live.admin.post("/admin/weights", json={"path": str(other), "activate": False})
    after = int(answer.json()["version"])

    def ask(number: int) -> dict[str, Any]:
        policy = ("keep", "recompute")[number % 2]
        asked = {"routed_experts": True, "hotswap": {"policy": policy}}
        return dict(live.generate(prompts[number], 100, **asked)["choices"][0])

    with ThreadPoolExecutor(CROSSING) as pool:
        with live.paused():  # so that no answer ends before the last one begins
            streams = [pool.submit(ask, number) for number in range(CROSSING)]
            wait_until(lambda: live.gateway_metric("hotswap_gateway_requests_in_flight") == CROSSING, 120)
        wait_until(lambda: live.engine_metric("vllm:num_requests_running") == CROSSING, 120, what="all run")
        with live.paused():  # so that none ends before the swap
            assert live.activate(after).status_code == 200
        answers = [stream.result() for stream in streams]
    assert live.activate(before).status_code == 200
    again = live.generate(prompts[0], 20, routed_experts=True)["choices"][0]  # the blocks of the first version
    spans = [answer["weight_versions"] for answer in answers]
    assert all(len(found) > 1 for found in spans), f"the swap came before or after an answer: {spans}"
    return [*((p, a, before) for p, a in zip(prompts, answers, strict=True)), (prompts[0], again, before)]


@pytest.mark.timeout(600)
def test_every_token_comes_from_the_weights_that_served_in_its_round(tmp_path: Path) -> None:
    """Three rounds under three versions. The log-probs that were kept are those of each version's own weights, given
    all the tokens before."""
    weights = [tmp_path / f"weights-{number}" for number in range(ROUNDS)]
    for seed, directory in enumerate(weights):
        write_tiny_model(directory, seed=seed, max_position_embeddings=1024)
    tokenizer = Tokenizer(weights[0])
    (record,) = records(tokenizer, "1+2=")
    live = LiveServer(weights[0], tmp_path / "state", ("--dtype", "float32", "--max-model-len", "256"))
    versions = [1]
    with live.running(), client(live.url, tokenizer, max_tokens=BUDGET * ROUNDS, token_budget=BUDGET) as running:
        going = running.round(record, RANDOM, 0)
        for directory in weights[1:]:
            assert isinstance(going.result(PATIENCE_S), Partial)
            versions.append(live.push(directory))
            wait_until(lambda: writes(live) == versions[-1], what="the instance flips")
            going = running.round(record, RANDOM, 0, going)
        group = going.result(PATIENCE_S)
    assert isinstance(group, TrajectoryGroup)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in weights]
    first = len(group.prompt_ids) - 1  # the place of the first sampled token's log-prob
    lengths = [len(trajectory.token_ids) for trajectory in group.trajectories]
    assert max(lengths) > (ROUNDS - 1) * BUDGET, "none went through all rounds"
    for trajectory in group.trajectories:
        ends = [*range(BUDGET, len(trajectory.token_ids), BUDGET), len(trajectory.token_ids)]
        written = enumerate(zip(versions, ends, strict=False))
        spans = [(version, place * BUDGET, end) for place, (version, end) in written]
        assert [(span.version, span.start, span.end) for span in trajectory.versions] == spans
        for (_, start, end), model in zip(spans, models, strict=False):
            expected = logprobs(model, [*group.prompt_ids, *trajectory.token_ids])[first + start : first + end]
            assert trajectory.logprobs[start:end] == pytest.approx(expected, abs=1e-3)
    long = max(group.trajectories, key=lambda trajectory: len(trajectory.token_ids))
    wrong = logprobs(models[0], [*group.prompt_ids, *long.token_ids])[first + BUDGET :]
    assert max(abs(a - b) for a, b in zip(long.logprobs[BUDGET:], wrong, strict=True)) > 0.1, "versions are alike"


def writes(live: LiveServer) -> int:
    """The version that answers now."""
    return int(live.generate([5], 1)["choices"][0]["weight_versions"][-1]["version"])
