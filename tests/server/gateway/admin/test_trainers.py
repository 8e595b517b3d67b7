"""The routes of other systems' trainers, spoken to as their clients do, with participants that build nothing.

Shapes come from upstream: vLLM 0.32 vllm/distributed/weight_transfer/clients.py (HTTPVLLMWeightSyncClient) and
vllm/entrypoints/rl/online/api_router.py; SGLang python/sglang/srt/managers/io_struct.py and
python/sglang/srt/entrypoints/http_server.py, as slime (slime/backends/sglang_utils/sglang_engine.py) and verl
(verl/workers/rollout/sglang_rollout/http_server_engine.py) send them.
"""

from __future__ import annotations

import base64
import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from safetensors.numpy import save

from server.gateway.admin.fleet import PauseLeases
from server.gateway.models import publishing
from tests.server.gateway.admin.test_admin import SETTINGS, Toy, checkpoint, participating
from tests.server.gateway.harness import ADMIN_KEY, KEYS, RunningGateway, running_gateway
from tests.server.gateway.upstream import Link, Received
from tests.waiting import eventually
from weightsync import SlotReader, ensure_arena
from weightsync.control.editions import prefix_of, readable
from weightsync.control.records import VersionRecord
from weightsync.errors import StoreUnavailable, shape_mismatch
from weightsync.format.manifest import Schema, TensorSpec


@pytest.fixture
def gateway(tmp_path: Path, arena: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningGateway]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with running_gateway(tmp_path, upstream=SETTINGS, swap_deadline_s=20.0) as running:
        running.store.run(ensure_arena(running.store.store, arena))
        yield running


def left_behind() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("hotswap-update-*"))


class Client(httpx.AsyncClient):
    """Posts JSON to the admin port, as upstream's clients do; `json` of what it answers."""

    def __init__(self, gateway: RunningGateway) -> None:
        # As `requests` makes of http://:KEY@host, for upstream's clients that have no setting for a key.
        super().__init__(base_url=gateway.admin_url, auth=("", ADMIN_KEY), timeout=120, trust_env=False)

    async def call(self, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        answer = await self.post(path, json=body)
        return answer.status_code, answer.json()


def tensors(**values: float) -> str:
    """A bucket: tensor `a` of 4 x 4, `b` of 8 and so on, each full of one value."""
    shapes = {"a": (4, 4), "b": (8,)}
    whole = save({name: np.full(shapes.get(name, (2,)), value, np.float32) for name, value in values.items()})
    return base64.b64encode(whole).decode()


def read(gateway: RunningGateway, version: int) -> dict[str, float]:
    """The one value of every tensor, as it was published."""
    found = gateway.store.get(f"models/toy/versions/{version:08d}")
    assert found is not None
    record = VersionRecord.from_json(found.value)
    with SlotReader.open(record.slot, manifest_digest=record.manifest_digest, version=version) as reader:
        values = {name: set(np.frombuffer(bytes(reader.buffer(name)), np.float32).tolist()) for name in ("a", "b")}
    assert all(len(value) == 1 for value in values.values())
    return {name: value.pop() for name, value in values.items()}


# vLLM

RANKS = {"master_address": "10.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


async def test_four_phases_are_one_swap(gateway: RunningGateway, tmp_path: Path) -> None:
    toy = Toy()
    async with participating(gateway, toy), Client(gateway) as client:
        assert await client.call("/init_weight_transfer_engine", {"init_info": {}}) == (
            200,
            {"message": "Weight transfer initialized"},
        )
        assert (await client.call("/start_weight_update")) == (200, {"message": "Weight update started"})
        path = checkpoint(tmp_path / "one")
        assert (await client.call("/update_weights", {"update_info": {"checkpoint_path": path}}))[0] == 200
        assert toy.staged == [], "nothing happens before the end"
        status, answer = await client.call("/finish_weight_update", {"weight_version": "17"})
        assert (status, answer["message"], answer["weight_version"]) == (200, "Weight update finished", "1")
        assert toy.committed == [1]
        assert (await client.get("/weight_info")).json() == {"weight_version": "1"}
        assert (await client.get("/get_world_size")).json() == {"world_size": 1}
        listed = (await client.get("/admin/weights")).json()["versions"]
        assert listed[0]["step"] == 17


async def test_tensors_in_several_calls_are_one_version(gateway: RunningGateway) -> None:
    toy = Toy()
    async with participating(gateway, toy), Client(gateway) as client:
        for step in (1.0, 2.0):
            await client.call("/start_weight_update")
            parts = [{"safetensors": tensors(a=step)}, {"safetensors": tensors(b=step + 0.5)}]
            assert (await client.call("/update_weights", {"update_info": parts[0]}))[0] == 200
            assert (await client.call("/update_weights", {"update_info": parts}))[0] == 200, "the first came again"
            assert (await client.call("/finish_weight_update"))[0] == 200
        assert toy.committed == [1, 2]
        assert read(gateway, 2) == {"a": 2.0, "b": 2.5}
        assert left_behind() == []


async def test_what_is_missing_is_refused_and_nothing_changes(gateway: RunningGateway) -> None:
    toy = Toy()
    async with participating(gateway, toy), Client(gateway) as client:
        for names in ({"a": 1.0, "b": 1.0}, {"a": 2.0}):
            await client.call("/start_weight_update")
            await client.call("/update_weights", {"update_info": {"safetensors": tensors(**names)}})
            status, answer = await client.call("/finish_weight_update")
        assert (status, answer["error"]["code"], answer["error"]["tensor"]) == (422, "missing_tensor", "b")
        assert toy.committed == [1]
        assert left_behind() == []
        status, answer = await client.call("/finish_weight_update")
        assert (status, answer["error"]["code"]) == (409, "no_update")


async def test_a_refused_swap_is_an_error_at_finish(gateway: RunningGateway, tmp_path: Path) -> None:
    toy = Toy(refuse=shape_mismatch("a", [1], [2]))
    async with participating(gateway, toy), Client(gateway) as client:
        await client.call("/start_weight_update")
        await client.call("/update_weights", {"update_info": {"checkpoint_path": checkpoint(tmp_path / "one")}})
        status, answer = await client.call("/finish_weight_update")
        assert (status, answer["error"]["code"], answer["error"]["tensor"]) == (409, "swap_aborted", "a")


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/init_weight_transfer_engine", {"init_info": RANKS}, 501, "nccl_unsupported"),
        ("/init_weight_transfer_engine", {"init_info": {"novelty": 1}}, 400, "invalid_parameter"),
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["f"], "shapes": [[1]]}}, 501, None),
        ("/update_weights", {"update_info": {"ipc_handles_pickled": "gASV"}}, 422, "pickle_refused"),
        ("/update_weights", {"update_info": {"safetensors": "???"}}, 400, "bad_encoding"),
        ("/update_weights", {"update_info": {"safetensors": tensors(a=1.0)[:40]}}, 400, "checkpoint_error"),
        ("/update_weights", {"update_info": {"checkpoint_path": "relative"}}, 400, "bad_path"),
        ("/update_weights", {"update_info": {}}, 400, "invalid_parameter"),
        ("/update_weights", {}, 400, "invalid_parameter"),
        ("/start_weight_update", None, 409, "update_in_progress"),
        ("/finish_weight_update", None, 409, "empty_update"),
        ("/start_draft_weight_update", None, 501, "draft_unsupported"),
        ("/collective_rpc", {"method": "reload_weights"}, 501, "collective_rpc_unsupported"),
        ("/abort_requests", {}, 501, "abort_unsupported"),
        ("/pause?mode=abort", None, 501, "pause_mode_unsupported"),
        ("/pause?ttl_s=1e9", None, 400, "invalid_parameter"),
    ],
)
async def test_what_vllm_has_and_this_has_not(
    gateway: RunningGateway, path: str, body: Any, status: int, code: str | None
) -> None:
    async with Client(gateway) as client:
        await client.call("/start_weight_update")
        found, answer = await client.call(path, body)
        assert (found, answer["error"]["code"]) == (status, code or "nccl_unsupported")
        assert len(answer["error"]["message"]) > 20


async def test_one_update_at_a_time_and_a_dead_trainer_makes_way(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Client(gateway) as client:
        for begin, again in (("/start_weight_update", 409), ("/init_weight_transfer_engine", 200)):
            await client.call("/start_weight_update")
            await client.call("/update_weights", {"update_info": {"safetensors": tensors(a=1.0)}})
            body = {"init_info": {}} if "init" in begin else None
            assert (await client.call(begin, body))[0] == again
        assert left_behind() == []
        await client.call("/start_weight_update")
        await client.call("/update_weights", {"update_info": {"safetensors": tensors(a=1.0)}})
        monkeypatch.setattr(publishing, "IDLE_S", 0.0)
        assert (await client.call("/start_weight_update"))[0] == 200
        assert left_behind() == []


async def test_a_store_that_is_away_at_finish_loses_no_update(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise StoreUnavailable("toy", "it is away", "try again")

    async with Client(gateway) as client:
        await client.call("/start_weight_update")
        await client.call("/update_weights", {"update_info": {"safetensors": tensors(a=1.0)}})
        with monkeypatch.context() as patch:
            patch.setattr(PauseLeases, "renew_all", away)
            assert (await client.call("/finish_weight_update"))[0] == 503
        assert (await client.call("/start_weight_update"))[0] == 409, "it is still under way"
        assert (await client.call("/init_weight_transfer_engine", {"init_info": {}}))[0] == 200
        assert left_behind() == []


async def healthy(client: Client) -> bool:
    return (await client.get("/health")).status_code == 200


async def test_prime_rl_names_a_directory(gateway: RunningGateway, tmp_path: Path) -> None:
    """As src/prime_rl/utils/client.py of prime-rl asks (559b4477): a pause, one call, and generation goes on."""
    toy = Toy()
    async with participating(gateway, toy), Client(gateway) as client:
        await eventually(lambda: healthy(client))  # prime-rl waits, too, until an instance is seen
        assert (await client.call("/pause?mode=keep&clear_cache=false"))[0] == 200
        status, answer = await client.call("/update_weights", {"weight_dir": checkpoint(tmp_path / "one")})
        assert (status, answer["weight_version"]) == (200, "1")
        assert (await client.call("/resume"))[0] == 200
        assert toy.committed == [1]
        for body in ({"weight_dir": None}, {"weight_dir": str(tmp_path), "update_info": {}}):
            status, answer = await client.call("/update_weights", body)
            assert (status, answer["error"]["code"]) == (400, "invalid_parameter")
        status, answer = await client.call("/update_weights", {"weight_dir": str(tmp_path / "nowhere")})
        assert (status, answer["error"]["code"]) == (400, "checkpoint_error")


def adapter(directory: Path) -> str:
    checkpoint(directory)
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    return str(directory)


def editions(gateway: RunningGateway) -> list[str]:
    found = gateway.store.list(prefix_of(KEYS))[0]
    return [record.full_name for record in readable({kv.key: kv.value for kv in found})]


def parts(gateway: RunningGateway, version: int) -> list[str]:
    found = gateway.store.get(KEYS.version(version))
    assert found is not None
    return [part.name for part in VersionRecord.from_json(found.value).parts]


@pytest.mark.parametrize("prefix", ["/v1", "/skyrl/v1", ""])
async def test_an_adapter_is_an_edition(gateway: RunningGateway, tmp_path: Path, prefix: str) -> None:
    """vLLM's routes, which TRL asks, SkyRL's own for loading, and SGLang's, which prime-rl asks too. Nothing is
    swapped."""
    toy, named = Toy(), {"lora_name": "mine", "lora_path": adapter(tmp_path / "adapter")}
    load, unload = f"{prefix}/load_lora_adapter", f"{prefix.removeprefix('/skyrl')}/unload_lora_adapter"
    async with participating(gateway, toy), Client(gateway) as client:
        await first_version(gateway, client, tmp_path)
        for number, body in enumerate((named, named | ({"load_inplace": True} if prefix else {"pinned": True}))):
            answered = await client.post(load, json=body)
            assert answered.status_code == 200
            told = answered.text if prefix else answered.json()["success"]
            assert told == ("Success: LoRA adapter 'mine' added successfully." if prefix else True)
            assert editions(gateway) == [f"mine@{number + 2}"]
        assert (await client.post(unload, json={"lora_name": "mine"})).status_code == 200
        assert (toy.committed, editions(gateway)) == ([1], [])
        assert (await client.post(unload, json={"lora_name": "mine"})).status_code == 422
        wrongs = ({"lora_path": ""}, {"lora_name": "a b"}, {"lora_name": "a@1"}, {"novelty": 1})
        for wrong in (*wrongs, {"lora_path": str(tmp_path / "no")}):
            assert (await client.post(load, json=named | wrong)).status_code in (400, 422)
        assert (toy.committed, editions(gateway)) == ([1], [])


async def test_an_adapter_goes_as_an_edition_and_as_a_part(gateway: RunningGateway, tmp_path: Path) -> None:
    """Were the part to stay, requests for the name would go on through it."""
    toy, place = Toy(), adapter(tmp_path / "adapter")
    async with participating(gateway, toy), Client(gateway) as client:
        await first_version(gateway, client, tmp_path)
        assert (await client.call("/admin/weights", {"path": place, "part": "lora/mine"}))[0] == 200
        for last in (3, 3):  # the second time version 2 still had the part, and version 3 does not
            body = {"lora_name": "mine", "lora_path": place}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
            assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})).status_code == 200
            assert (len(toy.committed), parts(gateway, toy.committed[-1]), editions(gateway)) == (last, [], [])


async def test_an_adapter_that_an_instance_refuses_leaves_the_one_before(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    """No request for the name alone meets it."""
    named, asked = {"lora_name": "mine", "lora_path": adapter(tmp_path / "adapter")}, list[str]()
    refuses = {"error": {"message": "The adapter cannot be served: rank 99", "code": "adapter_refused"}}

    async def said(link: Link, received: Received) -> None:
        asked.append(f"{received.target} {received.headers.get('x-hotswap-edition')}")
        await link.json(
            orjson.dumps(refuses if len(asked) > 1 else {}), b"422 Unprocessable" if len(asked) > 1 else b"200 OK"
        )

    async with participating(gateway, Toy()), Client(gateway) as client:
        await first_version(gateway, client, tmp_path)
        async with gateway.instance(said, instance_id="serving"):
            assert (await client.post("/v1/load_lora_adapter", json=named)).status_code == 200
            answered = await client.post("/v1/load_lora_adapter", json=named)
            assert (answered.status_code, answered.json()["error"]["code"]) == (422, "adapter_refused")
    assert asked == ["/hotswap/config mine@2", "/hotswap/config mine@3"]
    assert editions(gateway) == ["mine@2"]


async def test_vllm_pause_and_resume(gateway: RunningGateway) -> None:
    async with Client(gateway) as client:
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        status, answer = await client.call("/pause?mode=keep&clear_cache=false")
        assert (status, answer["status"], answer["ttl_s"]) == (200, "paused", 120)
        await client.call("/pause?ttl_s=500")
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        assert (await client.call("/resume")) == (200, {"status": "resumed"})
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert (await client.call("/resume"))[0] == 200, "as upstream, whether paused or not"
        assert (await client.call("/reset_prefix_cache")) == (200, {"success": True})


# SGLang

PICKLED = base64.b64encode(pickle.dumps([("a", 1)])).decode()


async def test_from_disk(gateway: RunningGateway, tmp_path: Path) -> None:
    """The payload of SGLang's own test/srt/rl/test_update_weights_from_disk.py, and slime's."""
    toy = Toy()
    async with participating(gateway, toy), Client(gateway) as client:
        status, answer = await client.call("/update_weights_from_disk", {"model_path": checkpoint(tmp_path / "one")})
        assert (status, answer["success"], answer["num_paused_requests"]) == (200, True, 0)
        body = {"model_path": checkpoint(tmp_path / "one"), "flush_cache": True, "weight_version": "5"}
        status, answer = await client.call("/update_weights_from_disk", {**body, "load_format": "auto"})
        assert (status, answer["success"], answer["weight_version"]) == (200, True, "2")
        assert toy.committed == [1, 2]
        status, answer = await client.call("/update_weights_from_disk", {"model_path": str(tmp_path / "nowhere")})
        assert (status, answer["success"], answer["error"]["code"]) == (400, False, "checkpoint_error")
        assert "nowhere" in answer["message"]
        toy.refuse = shape_mismatch("a", [1], [2])
        status, answer = await client.call("/update_weights_from_disk", body)
        assert (status, answer["success"], answer["error"]["code"]) == (409, False, "swap_aborted")


async def first_version(gateway: RunningGateway, client: Client, tmp_path: Path) -> None:
    body = {"path": checkpoint(tmp_path / "first")}
    assert (await client.call("/admin/weights", body))[0] == 200


def known_schema(gateway: RunningGateway) -> None:
    """As after a first version, without one."""
    specs = {"a": TensorSpec("float32", (4, 4)), "b": TensorSpec("float32", (8,))}
    gateway.store.put(KEYS.schema, Schema(specs).to_json())


def bucket(label: str | None = "1", **values: float) -> dict[str, Any]:
    """As slime's update_weights_from_tensor: one item per rank, `load_format`, `flush_cache`, `weight_version`."""
    body = {"serialized_named_tensors": [tensors(**values)], "load_format": "safetensors", "flush_cache": False}
    return body if label is None else {**body, "weight_version": label}


async def test_from_tensor_swaps_when_the_last_bucket_is_there(gateway: RunningGateway, tmp_path: Path) -> None:
    toy = Toy()
    async with participating(gateway, toy), Client(gateway) as client:
        await first_version(gateway, client, tmp_path)
        await client.call("/pause_generation", {})
        status, answer = await client.call("/update_weights_from_tensor", bucket(a=3.0))
        assert (status, answer["success"], answer["missing"]) == (200, True, 1)
        assert (await client.call("/update_weights_from_tensor", bucket(a=3.0)))[1]["missing"] == 1
        assert toy.committed == [1]
        status, answer = await client.call("/update_weights_from_tensor", bucket(b=4.0))
        assert (status, answer["success"], answer["weight_version"]) == (200, True, "2")
        assert read(gateway, 2) == {"a": 3.0, "b": 4.0}
        assert (await client.call("/continue_generation", {}))[1]["status"] == "ok"
        assert left_behind() == []


@pytest.mark.parametrize("first", [True, False])
async def test_a_session_swaps_at_its_end(gateway: RunningGateway, tmp_path: Path, first: bool) -> None:
    """The first version of a model too: the session says when it is complete."""
    toy = Toy()
    async with participating(gateway, toy), Client(gateway) as client:
        if not first:
            await first_version(gateway, client, tmp_path)
        before = list(toy.committed)
        await client.call("/begin_weight_update", {"selector": "all"})
        for values in ({"a": 3.0}, {"b": 4.0}, {"b": 4.0}):
            status, answer = await client.call("/update_weights_from_tensor", bucket("12", **values))
            assert (status, answer["success"]) == (200, True)
        assert toy.committed == before
        status, answer = await client.call("/update_weights_from_tensor", bucket("12", b=5.0))
        assert (status, answer["error"]["code"]) == (409, "duplicate_tensor")
        status, answer = await client.call("/end_weight_update", {})
        version = len(before) + 1
        assert (status, answer["success"], answer["weight_version"]) == (200, True, str(version))
        assert toy.committed == [*before, version]
        assert read(gateway, version) == {"a": 3.0, "b": 4.0}
        listed = (await client.get("/admin/weights")).json()["versions"]
        assert {v["version"]: v["step"] for v in listed}[version] == 12
        assert left_behind() == []


async def test_a_session_that_is_not_complete_changes_nothing(gateway: RunningGateway, tmp_path: Path) -> None:
    """Nor does one that another one, or a pause, comes after: its trainer did not come back."""
    toy = Toy()
    async with participating(gateway, toy), Client(gateway) as client:
        await first_version(gateway, client, tmp_path)
        assert (await client.call("/end_weight_update", {}))[1]["error"]["code"] == "no_update"
        await client.call("/begin_weight_update", {})
        await client.call("/update_weights_from_tensor", bucket(a=3.0))
        status, answer = await client.call("/end_weight_update", {})
        assert (status, answer["success"], answer["error"]["code"]) == (409, False, "incomplete_update")
        assert "1 missing" in answer["message"]
        for again in ("/begin_weight_update", "/pause_generation"):
            await client.call("/begin_weight_update", {})
            await client.call("/update_weights_from_tensor", bucket(a=3.0))
            await client.call(again, {})
            assert left_behind() == []
        assert (await client.call("/continue_generation", {}))[0] == 200
        await client.call("/begin_weight_update", {})
        status, answer = await client.call("/end_weight_update", {})
        assert (status, answer["success"]) == (200, True)
        assert (toy.committed, left_behind()) == ([1], [])
        assert (await client.call("/start_weight_update", {"is_checkpoint_format": True}))[0] == 200
        status, answer = await client.call("/begin_weight_update", {})
        assert (status, answer["error"]["code"]) == (409, "update_in_progress")


@pytest.mark.parametrize("how", ["pause", "label", "other bytes"])
async def test_rounds_of_two_trainers_never_mix(gateway: RunningGateway, tmp_path: Path, how: str) -> None:
    async with participating(gateway, Toy()), Client(gateway) as client:
        await first_version(gateway, client, tmp_path)
        await client.call("/update_weights_from_tensor", bucket(a=3.0))
        if how == "pause":
            await client.call("/pause_generation", {})
        label = "2" if how == "label" else "1"
        values = {"a": 5.0} if how == "other bytes" else {"b": 5.0}
        status, answer = await client.call("/update_weights_from_tensor", bucket(label, **values))
        assert (status, answer["missing"]) == (200, 1), "the dead trainer's bucket does not count"
        rest = {"b": 5.0} if how == "other bytes" else {"a": 5.0}
        assert (await client.call("/update_weights_from_tensor", bucket(label, **rest)))[1]["weight_version"] == "2"
        assert read(gateway, 2) == {"a": 5.0, "b": 5.0}


async def test_continuing_with_half_an_update_is_an_error_and_continues(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    toy = Toy()
    async with participating(gateway, toy), Client(gateway) as client:
        await first_version(gateway, client, tmp_path)
        await client.call("/pause_generation", {"mode": "retract"})
        await client.call("/update_weights_from_tensor", bucket(a=3.0))
        status, answer = await client.call("/continue_generation", {})
        assert (status, answer["success"], answer["error"]["code"]) == (409, False, "incomplete_update")
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert toy.committed == [1]
        assert left_behind() == []


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, 422, "pickle_refused"),
        ("/update_weights_from_tensor", {**bucket(), "load_format": "flattened_bucket"}, 422, "pickle_refused"),
        ("/update_weights_from_tensor", {**bucket(), "serialized_named_tensors": [PICKLED]}, 422, "pickle_refused"),
        ("/update_weights_from_tensor", {**bucket(a=1.0), "abort_all_requests": True}, 400, "abort_unsupported"),
        ("/update_weights_from_tensor", {**bucket(), "selector": "draft"}, 501, "draft_unsupported"),
        ("/begin_weight_update", {"selector": "draft"}, 501, "draft_unsupported"),
        ("/update_weights_from_disk", {"model_path": "/x", "load_format": "pt"}, 501, "bad_load_format"),
        ("/update_weights_from_disk", {"model_path": "/x", "keep_pause": True}, 501, "unsupported"),
        ("/update_weights_from_disk", {"model_path": "relative"}, 400, "bad_path"),
        ("/init_weights_update_group", {"master_address": "h", "master_port": 1}, 501, "nccl_unsupported"),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, 501, "nccl_unsupported"),
        ("/release_memory_occupation", {}, 501, "memory_unsupported"),
        ("/pause_generation", {"mode": "abort"}, 501, "pause_mode_unsupported"),
        ("/update_weight_version", {"new_version": "mine"}, 409, "label_follows_weights"),
        ("/abort_request", {"abort_all": True}, 501, "abort_unsupported"),
    ],
)
async def test_what_sglang_has_and_this_has_not(
    gateway: RunningGateway, path: str, body: Any, status: int, code: str
) -> None:
    known_schema(gateway)
    async with Client(gateway) as client:
        found, answer = await client.call(path, body)
        assert (found, answer["success"], answer["error"]["code"]) == (status, False, code)
        assert answer["message"] == answer["error"]["message"]
        assert left_behind() == []


async def test_a_payload_larger_than_the_model_is_refused(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.gateway.admin.weights.SLACK", 0)
    known_schema(gateway)
    async with Client(gateway) as client:
        status, answer = await client.call("/update_weights_from_tensor", bucket(a=1.0, b=1.0, c=1.0))
        assert (status, answer["error"]["code"]) == (413, "update_too_large")


async def test_model_info_health_and_flush(gateway: RunningGateway, tmp_path: Path) -> None:
    async with Client(gateway) as client:
        assert (await client.get("/health_generate")).status_code == 503
        assert (await client.get("/get_model_info")).json()["success"] is False
        async with participating(gateway, Toy()):
            await first_version(gateway, client, tmp_path)
            info = (await client.get("/get_model_info")).json()
            assert (info["is_generation"], info["weight_version"], info["served_model_name"]) == (True, "1", "toy")
            assert (await client.get("/health_generate")).status_code == 200
            for answer in (await client.get("/flush_cache"), await client.post("/flush_cache")):
                assert answer.status_code == 200
            same = {"new_version": "1", "abort_all_requests": False}
            assert (await client.call("/update_weight_version", same))[1]["new_version"] == "1"


def test_what_a_killed_gateway_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, mine = tmp_path / "hotswap-update-999999999-x", tmp_path / f"hotswap-update-{os.getpid()}-x"
    for directory in (dead, mine):
        directory.mkdir()
    publishing.Updates()
    assert (dead.exists(), mine.exists()) == (False, True)
