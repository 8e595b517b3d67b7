"""Attention of packed rows is that of each sequence by itself."""

from __future__ import annotations

import pytest

from tests.trainer.ranks import Ranks


def row(*lengths: int, width: int = 130) -> list[int]:
    ids = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
    return ids + [0] * (width - len(ids))


ROWS = {
    "one": [row(130)],
    "many": [row(1, 2, 3, 70, 17, 16, 15)],
    "rows": [row(60, 70), row(1, 33, 5), row()],
    "all padding": [row()],
}


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("name", ROWS)
def test_block_diagonal_attention_equals_a_dense_mask(one_rank: Ranks, name: str, groups: int) -> None:
    (result,) = one_rank.call("packed_attention", segments=ROWS[name], groups=groups)
    assert max(result["differences"]) < 1e-12
    assert result["padding"] == 0
    assert result["causal_equals_plain"]
    assert (result["mean"] > 0.01) == (name != "all padding")


def test_it_does_not_compute_what_a_mask_would_throw_away(one_rank: Ranks) -> None:
    (result,) = one_rank.call("packed_attention", segments=[row(*[13] * 10)], groups=2)
    assert result["scores"] == 10 * 13 * 13
