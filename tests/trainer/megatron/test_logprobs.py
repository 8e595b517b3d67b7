"""Log-probs and entropies in chunks of tokens are those of whole logits, forward and backward."""

from __future__ import annotations

import pytest

from tests.trainer.ranks import Ranks

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 0.15}
MODEL = {"hidden": 6, "vocab": 13}


@pytest.mark.parametrize(("world", "padded"), [(1, 13), (1, 16), (2, 14), (4, 20), (4, 28)])
def test_chunks_compute_what_whole_logits_do(one_rank: Ranks, world: int, padded: int) -> None:
    """Also where a rank's rows are padding in part, or all of them."""
    sizes = {"tokens": 11, **MODEL, "padded": padded, "chunks": [1, 4, 100], "dtypes": [*TOLERANCE]}
    for results in one_rank.sharing(world).call("chunked_logprobs", **sizes):
        for found in results:
            given, wide = found["dtype"]
            assert wide == ("float64" if given == "float64" else "float32")
            assert max(found[name] for name in ("values", "by_hidden", "by_weight")) < TOLERANCE[given], found
            assert found["likeliest"], found


@pytest.mark.parametrize(("world", "padded"), [(1, 16), (2, 14)])
def test_exact_products_of_half_precision_are_rounded_once(one_rank: Ranks, world: int, padded: int) -> None:
    """Values as from whole logits in float64; gradients only as far as bfloat16 and float16 hold them."""
    dtypes = ["bfloat16", "float16"]
    sizes = {"tokens": 11, **MODEL, "padded": padded, "chunks": [1, 4, 100], "dtypes": dtypes, "exact": True}
    for results in one_rank.sharing(world).call("chunked_logprobs", **sizes):
        for found in results:
            assert found["dtype"][1] == "float32"
            assert found["values"] < TOLERANCE["float32"]
            assert max(found["by_hidden"], found["by_weight"]) < TOLERANCE["bfloat16"]


def test_no_more_than_a_chunk_of_logits_is_held(one_rank: Ranks) -> None:
    sizes = {"tokens": 400, **MODEL, "padded": 13, "chunks": [50], "dtypes": ["float32"]}
    ((found,),) = one_rank.call("chunked_logprobs", **sizes)
    assert found["largest"] == max(50 * 13, 400 * 6) < 400 * 13
