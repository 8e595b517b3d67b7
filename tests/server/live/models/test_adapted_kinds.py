"""A LoRA adapter over quantised weights, against fresh stock engines: the adapter swapped, the base, and both.

Requests to the base and through the adapter are not in one batch: there stock vLLM answers the base's otherwise, too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loadtest.models.checkpoints import make_adapter
from loadtest.models.kinds import make_kind
from tests import stock
from tests.cpu import avx512_only
from tests.live import VLLM_ARGS, LiveServer
from tests.server.live.models.test_kinds import LONG, PROMPTS, TOKENS, first_span
from tests.server.live.models.test_parts import pushed

pytestmark = [pytest.mark.engine, pytest.mark.broad, avx512_only]


def test_base_and_adapter_swap_alone_and_together(tmp_path: Path) -> None:
    bases = [make_kind(tmp_path / f"base-{seed}", "awq", seed=seed) for seed in (0, 1)]
    one, two = (make_adapter(tmp_path / f"adapter-{i}", seed=i) for i in (1, 2))
    plain = [stock.answers(base, PROMPTS, TOKENS) for base in bases]
    first, second, last = (
        stock.answers(base, PROMPTS, TOKENS, adapter=adapter)
        for base, adapter in ((bases[0], one), (bases[0], two), (bases[1], two))
    )
    assert len({str(answers) for answers in (*plain, first, second, last)}) == 5, "some of these answer alike"
    live = LiveServer(bases[0], tmp_path / "state", (*VLLM_ARGS, "--enable-lora"))

    def said(model: str) -> list[list[int]]:
        return [live.generate(p, TOKENS, model=model)["choices"][0]["token_ids"] for p in PROMPTS]

    with live.running(), ThreadPoolExecutor(len(PROMPTS)) as pool:
        version = pushed(live, one, "lora/x")
        assert (said("x"), said(live.name)) == (first, plain[0])
        streams = [pool.submit(live.generate, p, LONG, model="x") for p in PROMPTS]
        pushed(live, two, "lora/x")
        for expected, stream in zip(first, streams, strict=True):
            tokens = first_span(stream.result(), version)[:TOKENS]
            assert tokens == expected[: len(tokens)]
        assert (said("x"), said(live.name)) == (second, plain[0])
        pushed(live, bases[1])
        assert (said("x"), said(live.name)) == (last, plain[1])
        assert live.admin.post("/admin/weights/rollback").status_code == 200
        assert (said("x"), said(live.name)) == (second, plain[0])
