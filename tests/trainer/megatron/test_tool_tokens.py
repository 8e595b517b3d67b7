"""Text that a tool wrote is read and never learned: no gradient comes from its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.ranks import Ranks

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "samples_per_prompt": 3, "entropy_coef": 0.1},
    "dr-grpo by sequence": {"name": "grpo", "samples_per_prompt": 3, "ratio": "sequence", "normalize": "sequence"},
    "reinforce++": {"name": "reinforce++", "samples_per_prompt": 3},
    "kimi": {"name": "kimi", "samples_per_prompt": 3, "entropy_coef": 0.1},
}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_targets_at_a_tool_s_tokens_change_no_gradient(
    one_rank: Ranks, qwen2: str, algorithm: str, packed: bool
) -> None:
    (found,) = one_rank.call("gradients", path=qwen2, algorithm=ALGORITHMS[algorithm], packed=packed)
    assert found["tools"] == 0.0, "not a bit of it"
    assert found["reaches_tools"] == 0.0
    assert found["policy"] > 0.01 * found["largest"] > 0, "the same change where it must count"
    assert found["reaches_policy"] > 0
