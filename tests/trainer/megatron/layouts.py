"""Parallel layouts, and that training in them is the training of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ranks import Ranks

Layout = dict[str, Any]

SEQUENCE: Layout = {"tensor": 2, "sequence": True}
INTERLEAVED: Layout = {"pipeline": 2, "virtual_pipeline": 2}
FULL: Layout = {"data": 2, "shard": "full"}
SPREAD: Layout = {"data": 2, "expert": 2}
CUT_TWO = [
    ("qwen2", {"context": 2}),
    ("llama-tied", SEQUENCE),
    ("llama-tied", INTERLEAVED),
    ("llama-tied", FULL),
    ("qwen3_moe", SPREAD),
    ("mixtral", SEQUENCE),
    ("mixtral", SEQUENCE | {"expert": 2, "expert_tensor": 1}),
    ("qwen3_moe", {"context": 2, "expert": 2}),
]
CUT_FOUR = [
    ("mixtral", {"pipeline": 2, "virtual_pipeline": 2, "data": 2, "expert": 2}),
    ("qwen3_moe", {"tensor": 2, "sequence": True, "context": 2, "expert": 4, "expert_tensor": 1}),
    ("llama-tied", {"tensor": 2, "sequence": True, "pipeline": 2, "virtual_pipeline": 2}),
    ("qwen2", {"data": 2, "context": 2, "shard": "full"}),
]
TWO = [
    ("qwen2", {"tensor": 2}),
    ("qwen2", {"pipeline": 2}),
    ("llama-tied", {"pipeline": 2}),
    ("qwen2", {"data": 2}),
    *CUT_TWO,
]


def named(cases: list[tuple[str, Layout]]) -> list[str]:
    return ["-".join([model, *(f"{k}{v}" for k, v in layout.items())]) for model, layout in cases]


def alike(
    one_rank: Ranks,
    case: str,
    path: str,
    parallel: Layout,
    rel: float = 2e-4,
    cut: dict[str, Any] | None = None,
    **config: Any,
) -> list[Any]:
    """Every rank of a layout tells what one rank alone does, step by step. `cut`: what else differs for several."""
    alone: list[Any] = one_rank.known(case, path=path, parallel={}, **config)[0]
    ranks = one_rank.spread(parallel).call(case, path=path, parallel=parallel, **config | (cut or {}))
    assert all(rank == ranks[0] for rank in ranks)
    for mine, step in zip(ranks[0], alone, strict=True):
        if isinstance(step, dict) and "value_clip_ratio" in step:
            # A value that lies on the bound counts as clipped or not, by its last bit; three tokens may.
            clipped, expected = (numbers.pop("value_clip_ratio") for numbers in (mine, step))
            assert clipped == pytest.approx(expected, abs=3 / step["tokens"])
        assert mine == pytest.approx(step, rel=rel, abs=1e-6)
    return alone


def goes_on(
    one_rank: Ranks, path: str, directory: Path, saved: Layout, *others: Layout, rel: float = 2e-4, **config: Any
) -> None:
    """A run that is saved in one layout goes on there to the last bit, and within rounding in others."""
    common = {"path": path, "save_at": 2, "directory": str(directory), **config}
    through = one_rank.spread(saved).call("losses", **common, parallel=saved)
    assert one_rank.spread(saved).call("losses", **common, parallel=saved, resume=True) == [s[2:] for s in through]
    for parallel in others:
        resumed = one_rank.spread(parallel).call("losses", **common, parallel=parallel, resume=True)[0]
        assert resumed == [pytest.approx(step, rel=rel) for step in through[0][2:]], parallel
