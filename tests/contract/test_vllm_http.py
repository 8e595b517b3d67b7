"""vLLM's routes and its client of them, in every release: the client out of the sources of each, at the admin port."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.contract import stubs
from tests.contract.conftest import BUCKET, Served, calls
from tests.contract.release import answered, declared, sources
from tests.server.gateway.admin.test_admin import checkpoint
from weightsync.vllm_engine import VLLM_VERSIONS, releases

CLIENT, BASE = "vllm.distributed.weight_transfer.clients", "vllm.distributed.weight_transfer.base"
TYPES = ("WeightTransferInitRequest", "WeightTransferUpdatePayload", "WeightTransferUpdateRequest")
ELSEWHERE = ("launchers", "cli")  # servers of other kinds
ADMIN = "/admin routes do it for the whole fleet"
ENGINE = "one engine's own, and the gateway has many"
SPEECH = "models that transcribe are not served"
OTHERS = "a form of other APIs: the same is asked by the routes that are here"
# Routes that stock vLLM answers and this server does not.
NOT_HERE = {
    "POST /v1/audio/transcriptions": SPEECH, "POST /v1/audio/translations": SPEECH, "WEBSOCKET /v1/realtime": SPEECH,
    "POST /sleep": ADMIN, "POST /wake_up": ADMIN, "GET /is_sleeping": ADMIN, "POST /release_kv_cache_memory": ADMIN,
    "POST /weight_checker": ADMIN, "GET /kv_event_sources": ENGINE, "POST /reset_encoder_cache": ENGINE,
    "POST /reset_mm_cache": ENGINE, "POST /start_profile": ENGINE, "POST /stop_profile": ENGINE,
    "POST /fault_tolerance/apply": ENGINE, "GET /fault_tolerance/status": ENGINE, "POST /scale_elastic_ep": ENGINE,
    "POST /is_scaling_elastic_ep": ENGINE, "POST /inference/v1/abort_requests": "clients end their own requests",
    "POST /cohere/v2/chat": OTHERS, "POST /cohere/v2/chat/render": OTHERS, "POST /v1/systemone": OTHERS,
    "POST /v1/decisions": OTHERS, "POST /invocations": OTHERS, "POST /v2/embed": OTHERS,
    "GET /docs": "GET /openapi.json has the document",
}  # fmt: skip
ONLY_IN = {"POST /v1/decisions": "0.33.0"}


@pytest.fixture(scope="module", params=VLLM_VERSIONS)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def root(release: str) -> Path:
    return sources("vllm", "vllm", release, releases.release()).root


def test_every_route_is_here_or_has_a_reason(root: Path, release: str) -> None:
    modules = [path for path in (root / "vllm/entrypoints").rglob("*.py") if not {*ELSEWHERE} & {*path.parts}]
    routes = declared(modules)
    assert len(routes & answered()) > 35
    assert routes - answered() == {route for route in NOT_HERE if ONLY_IN.get(route, release) == release}


@pytest.fixture(scope="module")
def kind(root: Path) -> Any:
    (module,) = stubs.load(root, [CLIENT], {BASE: dict.fromkeys(TYPES)})
    return module.HTTPVLLMWeightSyncClient


def test_its_client_of_weights(kind: Any, served: Served, tmp_path: Path) -> None:
    """With the key in its base URL."""
    client = kind(served.admin)
    before = served.toy.committed[-1]
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({"checkpoint_path": checkpoint(tmp_path / "one")})
    assert served.toy.committed[-1] == before
    client.finish_weight_update("12")
    assert served.toy.committed[-1] == before + 1
    client.start_weight_update()
    client.update_weights([{"safetensors": base64.b64encode(BUCKET).decode()}])
    client.finish_weight_update()
    assert served.toy.committed[-1] == before + 2
    with pytest.raises(requests.HTTPError) as refused:
        client.init_weight_transfer_engine({"master_address": "127.0.0.1", "master_port": 1})
    assert refused.value.response.json()["error"]["code"] == "nccl_unsupported"
    client.start_weight_update()
    with pytest.raises(requests.HTTPError) as refused:
        client.update_weights({"ipc_handles": {"a": b"handle"}})
    assert refused.value.response.json()["error"]["code"] == "pickle_refused"
    client.shutdown_weight_transfer_engine()
    phases = {"start_weight_update", "update_weights", "finish_weight_update"}
    assert calls(kind) == phases | {"init_weight_transfer_engine", "shutdown_weight_transfer_engine"}
