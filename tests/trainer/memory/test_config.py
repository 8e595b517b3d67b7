"""The section `memory`: what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config import TrainerConfig, strict
from trainer.errors import ConfigError

ASYNC = {
    "schedule": {"name": "async"},
    "algorithm": {"name": "grpo"},
    "gateway": {"url": "http://unused"},
    "rollout": {"fixed_sampler": True},
}
SERVING = {"admin_url": "http://127.0.0.1:8001"}


def build(memory: dict[str, Any], **more: Any) -> TrainerConfig:
    config: dict[str, Any] = {"model": {"path": "m"}, "data": {"kind": "arithmetic"}, "algorithm": {"name": "sft"}}
    return strict.build(TrainerConfig, config | {"steps": 1, "memory": memory} | more)


def test_a_whole_section() -> None:
    memory = build({"budget_gib": 70, "reserve_gib": 12, "serving": SERVING | {"level": 1}}).memory
    assert memory is not None
    assert memory.serving is not None
    assert (memory.budget_gib, memory.serving.level, memory.serving.ttl_s, memory.offload) == (70.0, 1, 60.0, "auto")


@pytest.mark.parametrize(
    ("memory", "more", "told"),
    [
        ({}, ASYNC, "memory: phases share the device, but under async they overlap"),
        ({}, {"parallel": {"data": 2, "shard": "full"}}, "memory: parallel.shard full owns its storages"),
        ({"budget_gib": 0}, {}, "memory.budget_gib: must be positive"),
        ({"budget_gib": 2, "reserve_gib": 2}, {}, "reserve_gib: 2 leaves nothing of budget_gib"),
        ({"offload": "nvme"}, {}, "memory.offload"),
        ({"serving": {"admin_url": "8001"}}, {}, "is not an HTTP address"),
        ({"serving": SERVING | {"level": 3}}, {}, "memory.serving.level"),
        ({"serving": SERVING | {"ttl_s": 1}}, {}, "memory.serving.ttl_s: must be in"),
        ({"serving": SERVING | {"engin_gib": 3}}, {}, "engine_gib"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(memory: dict[str, Any], more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(memory, **more)
    assert told in str(refused.value)
