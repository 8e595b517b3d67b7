"""A seed means the same answer whether the prompt is computed in one piece or in chunks, and ends no engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live import VLLM_ARGS, LiveServer
from trainer.tiny_model import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.broad, pytest.mark.timeout(900)]

PROMPTS = [[3 + (start + i) % 12 for i in range(100)] for start in range(3)]
CHUNKED = ("--max-num-batched-tokens", "64")


def test_a_prompt_in_chunks_gets_its_seed_s_answer(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    answers = []
    for number, more in enumerate(((), CHUNKED)):
        live = LiveServer(tmp_path / "model", tmp_path / f"state-{number}", (*VLLM_ARGS, *more))
        with live.running():
            said = [live.generate(p, 20, temperature=1.0, seed=7)["choices"][0]["token_ids"] for p in PROMPTS]
            assert live.generate(PROMPTS[0], 4)["choices"][0]["token_ids"], "the engine is there"
        answers.append(said)
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) == len(PROMPTS), "samples of different prompts"
