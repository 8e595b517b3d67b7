"""Nothing in a checkpoint directory is ever run, whoever wrote it and whatever its manifest says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ranks import Ranks

EXPECTED = {
    "an_index_that_runs_a_command": "asks for posix.system",
    "an_index_that_reaches_through_a_module_it_may_name": "asks for torch.distributed.checkpoint.metadata.os.system",
    "an_index_that_looks_up_a_method": "looks up an attribute",
    "an_index_beside_a_trap": "asks for posix.system",
    "a_shard_that_runs_a_command": "Weights only load failed",
    "a_shard_elsewhere": "points outside of the directory",
    "something_else": "it holds a list",
    "nothing": "is not to be read",
}
MEGATRON = EXPECTED | {
    "a_weight_that_is_called_bytes": "is not to be read",  # its own check of shapes is first
    "a_common_part_that_runs_a_command": "Weights only load failed",
}
FULL = EXPECTED | {
    "a_weight_that_is_called_bytes": "Weights only load failed",
    "a_common_part_that_runs_a_command": "does not fit this run",
}


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [({"tensor": 2}, MEGATRON), ({"data": 2, "shard": "full"}, FULL)],
    ids=["megatron", "full"],
)
def test_a_prepared_checkpoint_is_refused_and_runs_nothing(
    two_ranks: Ranks, small_models: dict[str, str], tmp_path: Path, parallel: dict[str, Any], expected: dict[str, str]
) -> None:
    path, directory = small_models["qwen2"], str(tmp_path)
    lead, other = two_ranks.call("prepared", path=path, parallel=parallel, directory=directory)
    assert lead.keys() == expected.keys()
    for trap, problem in expected.items():
        assert lead[trap].startswith("ResumeError"), trap
        assert problem in lead[trap], trap
        assert other[trap].startswith("RankFailed"), "it is said once"
    assert not list(tmp_path.glob("*.ran"))
