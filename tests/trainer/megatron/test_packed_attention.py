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


@pytest.mark.parametrize("ragged", [False, True], ids=["buckets", "ragged"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("name", ROWS)
def test_block_diagonal_attention_equals_a_dense_mask(one_rank: Ranks, name: str, groups: int, ragged: bool) -> None:
    cases = {(row, n): {"segments": ROWS[row], "groups": n, "ragged": ragged} for row in ROWS for n in (4, 2, 1)}
    (results,) = one_rank.known("each", of="packed_attention", asked=list(cases.values()))
    result = results[list(cases).index((name, groups))]
    assert max(result["differences"]) < 1e-12
    assert result["padding"] == 0
    assert result["causal_equals_plain"]
    assert (result["mean"] > 0.01) == (name != "all padding")


def test_it_does_not_compute_what_a_mask_would_throw_away(one_rank: Ranks) -> None:
    (result,) = one_rank.call("packed_attention", segments=[row(*[13] * 10)], groups=2)
    assert result["scores"] == 10 * 13 * 13
    lengths = [1, 33, 5]
    (result,) = one_rank.call("packed_attention", segments=[row(*lengths)], groups=2, ragged=True)
    assert result["scores"] == sum(length**2 for length in lengths)


CUT = {
    "one": [row(128, width=128)],
    "across every chunk": [row(1, 2, 3, 80, 17, 16, width=128)],
    "at the edges": [row(16, 16, 32, 48, 16, width=128), row(17, 14, 64, width=128)],
    "rows": [row(60, 68, width=128), row(1, 33, 5, width=128), row(width=128)],
}


@pytest.mark.parametrize("ragged", [False, True], ids=["buckets", "ragged"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("name", CUT)
def test_a_cut_row_is_attended_as_a_whole_one(
    one_rank: Ranks, name: str, groups: int, world: int, ragged: bool
) -> None:
    common = {"packed": True, "ragged": ragged}
    cases = {(row, n): {"segments": CUT[row], "groups": n, **common} for row in CUT for n in (4, 2)}
    ranks = one_rank.sharing(world).known("each", of="context_attention", asked=list(cases.values()))
    for result in (results[list(cases).index((name, groups))] for results in ranks):
        assert max(result["differences"]) < 1e-12
        assert result["padding"] == 0


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_compute_equally_much_and_only_what_is_seen(one_rank: Ranks, world: int) -> None:
    """Of 2N chunks a rank attends two, over r + 1 and 2N - r of them: with a dense mask it would be 2N each."""
    segments = [row(128, width=128)] * 2
    results = one_rank.sharing(world).call("context_attention", segments=segments, groups=2, packed=False)
    chunk = 128 // (2 * world)
    for result in results:
        assert max(result["differences"]) < 1e-12
        assert result["scores"] == 2 * (2 * world + 1) * chunk**2
