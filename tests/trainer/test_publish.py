"""Versions published by real ranks arrive bit for bit, whatever the layout; failures are typed and survivable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import weightsync
from tests.trainer.faults.runs import arguments
from tests.trainer.fleet import Fleet, fleet, keep, same_tensors
from tests.trainer.ranks import Ranks
from tests.trainer.zygote import Zygote
from weightsync.publish.quantize import KEPT, Quantizer


def served(running: Fleet) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in running.server.model.state_dict().items()}


def test_training_reaches_the_server(one_rank: Ranks, small_models: dict[str, str], tmp_path: Path) -> None:
    with fleet(small_models["qwen3"], tmp_path) as running:
        before = served(running)
        versions = one_rank.call("publish", path=small_models["qwen3"], parallel={}, store=running.store_url, steps=3)[
            0
        ]
        assert running.versions == versions == sorted(set(versions))
        assert running.server.version == versions[-1]
        assert sum(not torch.equal(before[name], tensor) for name, tensor in served(running).items()) == len(before)


def test_bfloat16_is_what_the_wire_carries(one_rank: Ranks, small_models: dict[str, str], tmp_path: Path) -> None:
    with fleet(small_models["qwen3"], tmp_path) as running:
        before = served(running)
        arguments = {"path": small_models["qwen3"], "parallel": {}, "store": running.store_url, "dtype": "bfloat16"}
        one_rank.call("publish", **arguments)
        for name, tensor in served(running).items():
            assert torch.equal(tensor, before[name].to(torch.bfloat16).float())


def test_a_refused_version_leaves_the_old_one(two_ranks: Ranks, small_models: dict[str, str], tmp_path: Path) -> None:
    with fleet(small_models["qwen2"], tmp_path) as running:
        arguments: dict[str, Any] = {"path": small_models["qwen2"], "parallel": {"data": 2}, "store": running.store_url}
        before = served(running)
        running.refuse = True
        lead, other = two_ranks.call("complaint", of="publish", **arguments)
        assert lead[0] == "PublishError"
        assert "made to refuse" in lead[1]
        assert other[0] == "RankFailed"
        assert all(torch.equal(before[name], tensor) for name, tensor in served(running).items())
        assert running.versions == []


def test_a_taken_over_lineage_is_final(one_rank: Ranks, small_models: dict[str, str], tmp_path: Path) -> None:
    with fleet(small_models["qwen2"], tmp_path) as running:
        arguments = {"of": "publish_taken_over", "path": small_models["qwen2"], "store": running.store_url}
        kind, message, final = one_rank.call("complaint", **arguments)[0]
        assert (kind, final) == ("PublishError", True)
        assert "taken over" in message


def trained_while_refused(
    zygote: Zygote, running: Fleet, root: Path, model: str, max_failures: int
) -> tuple[int, str, list[str]]:
    """Exit status, standard error and events of a run whose versions are all refused."""
    config = {
        "model": {"path": model},
        "data": {"kind": "arithmetic"},
        "algorithm": {"name": "sft"},
        "steps": 3,
        "publish": {"model": "tiny", "store": running.store_url, "dtype": "float32", "max_failures": max_failures},
    }
    status, said, errors = zygote.run(arguments(config, root), root)
    return status, errors, [json.loads(line)["event"] for line in said.splitlines()]


def test_failed_publishes_are_survived_as_often_as_allowed(
    zygote: Zygote, small_models: dict[str, str], tmp_path: Path
) -> None:
    with fleet(small_models["qwen2"], tmp_path) as running:
        running.refuse = True
        status, said, events = trained_while_refused(zygote, running, tmp_path, small_models["qwen2"], max_failures=1)
        assert status == 1
        assert events == ["start", "publish_failed", "step"]
        assert said.startswith("error: ")
        assert "made to refuse" in said
        assert len(said.splitlines()) == 1


def test_no_store_says_what_to_do(one_rank: Ranks, small_models: dict[str, str], tmp_path: Path) -> None:
    arguments = {"path": small_models["qwen2"], "parallel": {}, "store": f"sqlite:///{tmp_path}/absent.db"}
    kind, message, _ = one_rank.call("complaint", of="publish", **arguments)[0]
    assert kind == "PublishError"
    assert "hotswap up" in message


SERVED = Quantizer("w4a16", group_size=16)


@pytest.mark.parametrize(
    ("quantize", "served", "key", "said"),
    [
        (None, SERVED, "publish.quantize:", "served in w4a16 in groups of 16. Set publish.quantize.scheme to served"),
        ({"scheme": "served"}, None, "publish.quantize.scheme:", "no weights in int8 per channel"),
        ({"scheme": "int8"}, SERVED, "publish.quantize.scheme:", "int8 per channel does not make"),
        ({"scheme": "w4a16", "group_size": 32}, SERVED, "publish.quantize.scheme:", "served in, w4a16 in groups of 16"),
        ({"scheme": "w4a16", "group_size": 48}, SERVED, "publish.quantize.group_size:", "do not divide into groups"),
        ({"scheme": "served"}, Quantizer("int8", keep=("embed", "norm")), "publish.quantize.scheme:", "lm_head"),
    ],
)
def test_a_quantisation_that_is_not_the_servers_is_refused_before_the_first_publish(
    two_ranks: Ranks,
    small_models: dict[str, str],
    tmp_path: Path,
    quantize: dict[str, Any] | None,
    served: Quantizer | None,
    key: str,
    said: str,
) -> None:
    path, store = small_models["qwen2"], f"sqlite:///{tmp_path}/store.db"
    with fleet(path, tmp_path) as running:
        keep(running)
        publish_once(path, store, served)
        arguments: dict[str, Any] = {"path": path, "parallel": {"tensor": 2}, "store": store, "dtype": "bfloat16"}
        lead, other = two_ranks.call("complaint", of="publish", **arguments, quantize=quantize)
        assert lead[0] == "ConfigError"
        assert lead[1].startswith(key)
        assert said in lead[1]
        assert other[0] == "RankFailed"
        assert len(running.versions) == 1


@pytest.mark.parametrize("served", [SERVED, Quantizer("int8", keep=(*KEPT, "o_proj"), scale_dtype="bfloat16")], ids=str)
def test_the_served_models_quantisation_is_found(
    two_ranks: Ranks, small_models: dict[str, str], tmp_path: Path, served: Quantizer
) -> None:
    """A checkpoint that somebody else quantised, some layers of which they left out, says all that is needed."""
    path, store = small_models["qwen2"], f"sqlite:///{tmp_path}/store.db"
    with fleet(path, tmp_path) as running:
        received = keep(running)
        publish_once(path, store, served)
        arguments: dict[str, Any] = {"path": path, "store": store, "directory": str(tmp_path)}
        two_ranks.call("publish_quantized", **arguments, parallel={"tensor": 2}, quantize={"scheme": "served"})
    assert same_tensors(received[-1], dict(served.tensors(exported(tmp_path).items())))


def exported(directory: Path) -> dict[str, torch.Tensor]:
    """What every rank has written of a checkpoint."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def publish_once(path: str, store: str, quantizer: Quantizer | None) -> None:
    """What `hotswap up` does with a checkpoint in bfloat16, or quantised."""
    tensors = {name: t.bfloat16() for name, t in load_file(Path(path) / "model.safetensors").items()}
    with weightsync.Publisher(store, model="tiny", lineage="server") as publisher:
        publisher.publish(list(quantizer.tensors(tensors.items())) if quantizer is not None else tensors)
