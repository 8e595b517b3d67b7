"""Real vLLM models in this process, with no engine around them: a live one, and the staging side beside it."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from weightsync.vllm_engine.staging.stager import DEFAULT, Rules, StageOrder, Stager, staging_device, use_one_core


@dataclass
class Worker:
    """The parts of a vLLM worker, for one checkpoint directory and one (pretended) tensor-parallel rank."""

    model: Any
    vllm_config: Any
    stager: Stager

    def stage(self, record: Any, unread: tuple[str, ...] = ()) -> Any:
        """The generation built from a published version. Raises AssertionError with the stager's error."""
        order = StageOrder(record.version, record.slot, record.manifest_digest, unread=unread)
        return self.build(order, threading.Event())

    def build(self, order: StageOrder, stop: threading.Event) -> Any:
        """The generation of an order, built on a thread as in a worker. Raises as `stage`."""
        with ThreadPoolExecutor(1, initializer=use_one_core) as pool:
            try:
                return pool.submit(self.stager.stage, order, stop).result()
            except Exception as error:
                raise AssertionError(self.stager.report.error) from error


@contextlib.contextmanager
def worker(
    checkpoint: Path,
    *,
    dtype: str = "bfloat16",
    rank: int = 0,
    world: int = 1,
    stage: int = 0,
    stages: int = 1,
    rules: Rules = DEFAULT,
    **options: Any,
) -> Iterator[Worker]:
    """A model with dummy weights and its stager. `rank` of `world` tensor-parallel ranks, in `stage` of `stages` of a
    pipeline, only believes that the others exist. `options` are vLLM's.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    common: dict[str, Any] = {"enforce_eager": True, "load_format": "dummy", "max_model_len": 256}
    args = EngineArgs(model=str(checkpoint), dtype=dtype, **common, **options)
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        _be_alone()
    group = SimpleNamespace(world_size=world, rank_in_group=rank, rank=rank, is_first_rank=True, is_last_rank=True)
    group.device_group = SimpleNamespace(rank=lambda: rank, size=lambda: world)
    saved = (parallel_state._TP, parallel_state._PP, parallel_state._EP)
    if world > 1:
        parallel_state._TP = parallel_state._EP = group
    if world > 1 or stages > 1:
        ends = {"is_first_rank": stage == 0, "is_last_rank": stage == stages - 1}
        parallel_state._PP = SimpleNamespace(world_size=stages, rank_in_group=stage, rank=stage, **ends)
    cpu = torch.device("cpu")
    try:
        with set_current_vllm_config(config):
            config.parallel_config.rank = stage * world + rank
            config.parallel_config.world_size = world * stages
            with set_default_torch_dtype(config.model_config.dtype):
                model = initialize_model(vllm_config=config, model_config=config.model_config)
                get_model_loader(config.load_config).load_weights(model, config.model_config)
                process_weights_after_loading(model, config.model_config, cpu)
            config.compilation_config.static_forward_context = {}
            place = staging_device(cpu, 1.0)
            place.reserve(model)
            stager = Stager(model, config, config.model_config, place, rules=rules)
            yield Worker(model, config, stager)
    finally:
        parallel_state._TP, parallel_state._PP, parallel_state._EP = saved


def _be_alone() -> None:
    """Give vLLM the process groups of a single rank, once per process: experts ask for theirs."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        store = tempfile.NamedTemporaryFile(prefix="hotswap-groups-")  # noqa: SIM115 - its name is what is needed
        parallel_state.init_distributed_environment(1, 0, f"file://{store.name}", 0, "gloo")
        parallel_state.initialize_model_parallel()
        parallel_state._EP = parallel_state._EP or parallel_state._TP  # vLLM makes one only if this model has experts
