"""Ranks wait for rank 0 in no collective of the groups that compute, and get from it what they train on."""

from __future__ import annotations

import pytest

from tests.trainer.ranks import Ranks

MADE_WITH_S, TIMEOUT_S = 100.0, 1.0


@pytest.mark.parametrize("world", [2, 4])
def test_a_lead_may_take_longer_than_a_collective(one_rank: Ranks, world: int) -> None:
    limits = {"made_with_s": MADE_WITH_S, "timeout_s": TIMEOUT_S}
    found = one_rank.sharing(world).call("lead_takes_longer_than_a_collective_may", **limits)
    assert [rank["lead"] for rank in found] == [True] + [False] * (world - 1)
    for rank in found:
        assert rank["limits"] == [MADE_WITH_S] * 2, "the compute groups have the timeout"
        assert len(rank["told"]) == 2
        assert all("timed out" in error.lower() for error in rank["told"])
        assert rank["waited_s"] > 2 * TIMEOUT_S


def test_a_rank_is_sent_the_rows_that_it_trains_on(one_rank: Ranks, qwen2: str) -> None:
    found = {
        data: one_rank.sharing(data).call("received_in_a_step", path=qwen2, parallel={"data": data})
        for data in (1, 2, 4)
    }
    (alone,) = found[1]
    assert alone["rows"] == 8
    for data, ranks in found.items():
        for rank in ranks:
            assert rank["nbytes"] == alone["nbytes"] / data
            assert rank["rows"] == 8 // data
            assert rank["loss"] == pytest.approx(alone["loss"], abs=1e-6)
