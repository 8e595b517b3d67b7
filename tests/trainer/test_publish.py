"""Versions published by real ranks arrive bit for bit, whatever the layout; failures are typed and survivable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import weightsync
from tests.trainer.faults.runs import arguments, fine_tuning
from tests.trainer.fleet import Fleet, exported, fleet, keep, same_tensors
from tests.trainer.ranks import Ranks
from tests.trainer.zygote import Zygote
from weightsync.publish.quantize import KEPT, Quantizer


def served(running: Fleet) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in running.server.model.state_dict().items()}


@pytest.fixture
def running(qwen2: str, tmp_path: Path) -> Iterator[Fleet]:
    with fleet(qwen2, tmp_path) as made:
        yield made


def test_training_reaches_the_server(one_rank: Ranks, small_models: dict[str, str], tmp_path: Path) -> None:
    path = small_models["qwen3"]
    with fleet(path, tmp_path) as running:
        before = served(running)
        (versions,) = one_rank.call("publish", path=path, parallel={}, store=running.store_url, steps=3)
        assert running.versions == versions == sorted(set(versions))
        assert running.server.version == versions[-1]
        assert sum(not torch.equal(before[name], tensor) for name, tensor in served(running).items()) == len(before)


def test_bfloat16_is_what_the_wire_carries(one_rank: Ranks, qwen2: str, running: Fleet) -> None:
    before = served(running)
    one_rank.call("publish", path=qwen2, parallel={}, store=running.store_url, dtype="bfloat16")
    for name, tensor in served(running).items():
        assert torch.equal(tensor, before[name].to(torch.bfloat16).float())


def test_a_refused_version_leaves_the_old_one(two_ranks: Ranks, qwen2: str, running: Fleet) -> None:
    before = served(running)
    running.refuse = True
    about = {"path": qwen2, "parallel": {"data": 2}, "store": running.store_url}
    lead, other = two_ranks.call("complaint", of="publish", **about)
    assert (lead[0], other[0]) == ("PublishError", "RankFailed")
    assert "made to refuse" in lead[1]
    assert all(torch.equal(before[name], tensor) for name, tensor in served(running).items())
    assert running.versions == []


def test_a_taken_over_lineage_is_final(one_rank: Ranks, qwen2: str, running: Fleet) -> None:
    ((*found, final),) = one_rank.call("complaint", of="publish_taken_over", path=qwen2, store=running.store_url)
    assert (found[0], final) == ("PublishError", True)
    assert "taken over" in found[1]


def test_failed_publishes_are_survived_as_often_as_allowed(
    zygote: Zygote, qwen2: str, running: Fleet, tmp_path: Path
) -> None:
    running.refuse = True
    publish = running.sections["publish"] | {"max_failures": 1}
    status, said, errors = zygote.run(arguments(fine_tuning(qwen2, 3, publish=publish), tmp_path), tmp_path)
    assert status == 1
    assert [json.loads(line)["event"] for line in said.splitlines()] == ["start", "publish_failed", "step"]
    assert errors.startswith("error: ")
    assert "made to refuse" in errors
    assert len(errors.splitlines()) == 1


def test_no_store_says_what_to_do(one_rank: Ranks, qwen2: str, tmp_path: Path) -> None:
    about = {"path": qwen2, "parallel": {}, "store": f"sqlite:///{tmp_path}/absent.db"}
    ((kind, message, _),) = one_rank.call("complaint", of="publish", **about)
    assert kind == "PublishError"
    assert "hotswap up" in message


@pytest.mark.parametrize(("new", "refused"), [(False, "ConfigError"), (True, "PublishError")])
def test_a_model_that_is_not_served_is_refused_before_the_first_publish(
    one_rank: Ranks, qwen2: str, running: Fleet, new: bool, refused: str
) -> None:
    """Unless it is said to be new: then it waits for instances to serve it."""
    about: dict[str, Any] = {"path": qwen2, "parallel": {}, "store": running.store_url}
    named = {"model": "tinny", "new_model": new, "timeout_s": 0.1}
    ((kind, message, _),) = one_rank.call("complaint", of="publish", **about, **named)
    assert kind == refused, message
    if not new:
        assert message.startswith("publish.model: no instance serves a model 'tinny'")
        assert "(instances serve 'tiny'). Write a served model's name, or set publish.new_model" in message


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
    two_ranks: Ranks, qwen2: str, running: Fleet, quantize: Any, served: Quantizer | None, key: str, said: str
) -> None:
    keep(running)
    publish_once(qwen2, running.store_url, served)
    about = {"path": qwen2, "parallel": {"tensor": 2}, "store": running.store_url, "dtype": "bfloat16"}
    lead, other = two_ranks.call("complaint", of="publish", **about, quantize=quantize)
    assert (lead[0], other[0]) == ("ConfigError", "RankFailed")
    assert lead[1].startswith(key)
    assert said in lead[1]
    assert len(running.versions) == 1


@pytest.mark.parametrize("served", [SERVED, Quantizer("int8", keep=(*KEPT, "o_proj"), scale_dtype="bfloat16")], ids=str)
def test_the_served_models_quantisation_is_found(
    two_ranks: Ranks, qwen2: str, running: Fleet, tmp_path: Path, served: Quantizer
) -> None:
    """A checkpoint that another tool quantised, some layers of which it left out, says all that is needed."""
    received = keep(running)
    publish_once(qwen2, running.store_url, served)
    about: dict[str, Any] = {"path": qwen2, "parallel": {"tensor": 2}, "quantize": {"scheme": "served"}}
    two_ranks.call("publish_quantized", **about, store=running.store_url, directory=str(tmp_path))
    assert same_tensors(received[-1], dict(served.tensors(exported(tmp_path).items())))


def publish_once(path: str, store: str, quantizer: Quantizer | None) -> None:
    """A publish of a checkpoint in bfloat16, or quantised, as `hotswap up` does it."""
    tensors = {name: t.bfloat16() for name, t in load_file(Path(path) / "model.safetensors").items()}
    with weightsync.Publisher(store, model="tiny", lineage="server") as publisher:
        publisher.publish(list(quantizer.tensors(tensors.items())) if quantizer is not None else tensors)
