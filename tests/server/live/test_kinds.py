"""Swaps of experts, quantised weights and MLA under traffic, against the answers of fresh stock engines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loadtest.model_kinds import KINDS, make_kind
from tests import stock
from tests.live import VLLM_ARGS, LiveServer

pytestmark = pytest.mark.engine
PROMPTS = [[(7 * i + 3 * j) % 500 + 3 for j in range(20 + 17 * i)] for i in range(4)]
TOKENS, LONG = 24, 400


def said(live: LiveServer) -> list[list[int]]:
    return [live.generate(prompt, TOKENS)["choices"][0]["token_ids"] for prompt in PROMPTS]


def first_span(answer: dict[str, Any], version: int) -> list[int]:
    """The tokens that `version` wrote, from the beginning of an answer."""
    choice = answer["choices"][0]
    spans = choice["weight_versions"]
    assert spans[0]["version"] == version, spans
    return list(choice["token_ids"][: spans[0]["end"]])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["moe", "mla-v3", "gpt-oss", "w8a8-kv", "awq", "gptq", "w4a16", "mixtral", "mla"])
def test_a_swap_of_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    """Two instances. Streams that are open while a version is staged get the old one's tokens, token for token."""
    paths = [make_kind(tmp_path / str(seed), kind, seed=seed) for seed in (0, 1)]
    options = KINDS[kind].vllm
    arguments = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    expected = [stock.answers(path, PROMPTS, TOKENS, **options) for path in paths]
    assert expected[0] != expected[1], "these weights answer alike: the test would show nothing"
    live = LiveServer(paths[0], tmp_path / "state", (*VLLM_ARGS, *arguments), instances=2)
    with live.running(), ThreadPoolExecutor(len(PROMPTS)) as pool:
        first = live.active()
        assert said(live) == expected[0]
        # MLA's kernels on CPU round by the size of the batch: one stream alone.
        prompts = PROMPTS[:1] if kind.startswith("mla") else PROMPTS
        streams = [pool.submit(live.generate, prompt, LONG) for prompt in prompts]
        second = live.push(paths[1])
        for index, stream in enumerate(streams):
            tokens = first_span(stream.result(), first)[:TOKENS]
            assert tokens == expected[0][index][: len(tokens)]
        assert said(live) == expected[1]
        assert live.activate(first).status_code == 200
        assert said(live) == expected[0]
        answer = live.admin.post("/admin/weights/activate", json={"version": second, "mode": "rolling"})
        assert answer.status_code == 200, answer.text
        assert said(live) == expected[1]
        records = live.instances()
        assert {record["active_version"] for record in records} == {second}
