"""An adapter is published alone, as a part of a version, and the server answers with it under its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import weightsync
from tests import stock
from tests.live import LiveServer
from tests.trainer.fleet import exported, fleet
from tests.trainer.ranks import Ranks
from tests.trainer.test_mixture import ENGINE, PROMPTS, check_learned, learn, mistaken
from tests.trainer.test_publish import publish_once
from tests.trainer.zygote import Zygote
from weightsync.control.parts import ADAPTER_CONFIG
from weightsync.memory.receiver import SlotReader

LORA: dict[str, Any] = {"name": "math", "rank": 4}


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["one", "tensor", "pipeline"])
def test_a_version_brings_the_adapter_and_keeps_the_base(
    one_rank: Ranks, small_models: dict[str, str], tmp_path: Path, parallel: dict[str, int]
) -> None:
    """Every rank writes its share of what `save_to` would get."""
    path = small_models["qwen3"]
    with fleet(path, tmp_path) as running:
        publish_once(path, running.store_url, None)
        arguments: dict[str, Any] = {"store": running.store_url, "lora": LORA, "directory": str(tmp_path)}
        version = one_rank.spread(parallel).call("publish_adapter", path=path, parallel=parallel, **arguments)[0]
        with weightsync.Publisher(running.store_url, model="tiny", lineage="reader") as reader:
            base, adapted = reader.versions()[-2:]
        assert (adapted.version, adapted.base_version, adapted.slot) == (version, base.version, base.slot)
        (part,) = adapted.parts
        assert part.name == "lora/math"
        with SlotReader.open(part.slot, manifest_digest=part.manifest_digest) as slot:
            slot.verify_all()
            described = slot.manifest.metadata[ADAPTER_CONFIG]
            found = {
                name: torch.frombuffer(bytearray(slot.buffer(name)), dtype=torch.float32).reshape(entry.shape)
                for name, entry in slot.manifest.tensors.items()
            }
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    assert yaml.safe_load(described) == yaml.safe_load((tmp_path / "adapter_config.json").read_text())
    assert part.nbytes < base.nbytes / 2


def test_an_adapter_without_a_base_is_refused(one_rank: Ranks, small_models: dict[str, str], tmp_path: Path) -> None:
    with fleet(small_models["qwen3"], tmp_path) as running:
        arguments: dict[str, Any] = {"store": running.store_url, "lora": LORA, "directory": str(tmp_path)}
        arguments |= {"path": small_models["qwen3"], "parallel": {}}
        ((kind, said, _),) = one_rank.call("complaint", of="publish_adapter", **arguments)
    assert kind == "PublishError"
    assert "no base model yet" in said


@pytest.mark.broad
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quiet_engines")
def test_an_adapter_learns_from_rewards_while_it_is_swapped_every_step(zygote: Zygote, tmp_path: Path) -> None:
    """`hotswap up` and `hotswap train`, with the configuration that is the example: the base model answers as before,
    and the adapter's name with what stock vLLM makes of the saved adapter."""
    model, adapter = mistaken(zygote, tmp_path), tmp_path / "adapter"
    live = LiveServer(model, tmp_path / "state", (*ENGINE, "--enable-lora", "--max-lora-rank", "16"), name="demo")
    with live.running():
        before = [live.generate(prompt, 4)["choices"][0]["token_ids"] for prompt in PROMPTS]
        metrics = learn(live, "grpo_lora.yaml", tmp_path, save_to=str(adapter), checkpoint=None)
        base = [live.generate(prompt, 4)["choices"][0]["token_ids"] for prompt in PROMPTS]
        said = [live.generate(prompt, 4, model="sums")["choices"][0]["token_ids"] for prompt in PROMPTS]
        active = live.active()
        versions = live.admin.get("/admin/weights").json()["versions"]

    check_learned(metrics, active)
    (newest,) = [version for version in versions if version["version"] == active]
    assert newest["base_version"] == 1, "the weights were published again"
    assert [part["name"] for part in newest["parts"]] == ["lora/sums"]
    assert base == before == stock.answers(model, PROMPTS, 4, dtype="float32")
    assert said == stock.answers(model, PROMPTS, 4, adapter=adapter, dtype="float32", max_lora_rank=16)
    assert said != base
    numbers, whole = (sum(t.numel() for t in exported(path).values()) for path in (adapter, model))
    assert numbers < 0.2 * whole
