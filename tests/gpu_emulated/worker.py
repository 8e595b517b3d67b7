"""The parts of a vLLM worker on the emulated GPU, without an engine around it: a model, Hotswap's weight-transfer
engine, and a step that was captured as a graph."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loadtest.gpu_day import engine as gpu_day
from loadtest.models import vllm_worker
from loadtest.models.equality import bits, publish, state
from tests.gpu_emulated import standin
from tests.gpu_emulated.kinds import Tensors
from weightsync import Publisher
from weightsync.control.records import VersionRecord
from weightsync.format.fingerprint import combine
from weightsync.store import SyncStore
from weightsync.vllm_engine.device.generation import Generation
from weightsync.vllm_engine.staging.bundle import BASE

ARENA_NBYTES = 1 << 28
LEASE_S = 600.0  # a busy machine may take long over a version
SUMMED = 64 << 10  # bytes of each tensor that the step takes in


class StagingRefused(Exception):
    """A version could not be staged; the message is the report's."""


class Worker:
    """`device` of those of the stand-in; `way`: how versions are flipped to, "copy" or "remap"; `copies` of the weights
    for that, and `share` of the device that the instance was given. `sleeps`: vLLM's allocator holds the weights.
    `left`: bytes that other processes leave of the device when the model is there."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        way: str = "copy",
        device: int = 0,
        copies: str = "2",
        share: float = 0.9,
        sleeps: bool = False,
        left: int | None = None,
    ) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.worker.workspace import init_workspace_manager

        from weightsync.vllm_engine.backend import HotswapWeightTransferEngine, InitInfo

        os.environ |= {"HOTSWAP_DEVICE_FLIP": way, "HOTSWAP_DEVICE_COPIES": copies}
        self.device, self.sleeps = torch.device("cuda", device), sleeps
        torch.cuda.set_device(self.device)
        common: dict[str, Any] = {"dtype": "bfloat16", "load_format": "dummy", "max_model_len": 256}
        args = EngineArgs(model=str(checkpoint), gpu_memory_utilization=share, **common)
        self.config = args.create_engine_config()
        with set_current_vllm_config(self.config):
            vllm_worker._be_alone()
        init_workspace_manager(self.device)
        with _sleeping_memory() if sleeps else contextlib.nullcontext():
            self.model = self.built(None)
            torch.cuda.synchronize()  # vLLM unmaps what the model has given back of it
        self.config.compilation_config.static_forward_context = {}
        self.config.compilation_config.static_all_moe_layers = []
        if left is not None:
            torch.cuda.empty_cache()
            standin.hold_all_but(device, left)
        with set_current_vllm_config(self.config):
            self.engine = HotswapWeightTransferEngine(None, self.config, self.device, self.model)
            self.engine.init_transfer_engine(InitInfo())
        self.step = Step(self.model)
        _ask_as_kernels_do(self.model)

    def built(self, tensors: Tensors | None) -> nn.Module:
        """As vLLM's loaders build it: from these tensors, or with placeholders."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = copy.copy(self.config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), torch.no_grad():
            with self.device:
                model = initialize_model(vllm_config=config, model_config=config.model_config)
            if tensors is None:
                get_model_loader(config.load_config).load_weights(model, config.model_config)
            else:
                model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
            process_weights_after_loading(model, config.model_config, self.device)
        return model

    def begin(self, record: VersionRecord) -> None:
        """Begin to stage a published version."""
        from vllm.config import set_current_vllm_config

        from weightsync.vllm_engine.backend import UpdateInfo

        with set_current_vllm_config(self.config):
            self.engine.stage(UpdateInfo(record.version, str(record.slot), record.manifest_digest))

    def stage(self, record: VersionRecord) -> None:
        """Raises StagingRefused, also where other bytes were built than were published."""
        from vllm.config import set_current_vllm_config

        self.begin(record)
        with set_current_vllm_config(self.config):
            self.engine.drain_pending()
        report = self.engine.report()
        if report.error is not None:
            raise StagingRefused(report.error["message"])
        if combine([report.pieces[BASE]["sums"]]) != record.fingerprint:
            raise StagingRefused("the fingerprint is not the published one")

    def commit(self, record: VersionRecord) -> None:
        self.engine.commit(record.version)

    def flip(self, record: VersionRecord) -> None:
        self.stage(record)
        self.commit(record)

    @property
    def staged(self) -> Generation:
        bundle = self.engine._stager.bundle
        assert bundle is not None, "nothing is staged"
        generation = bundle.pieces[BASE].generation
        assert isinstance(generation, Generation)
        return generation

    def staged_on_device(self) -> bool:
        """Whether what is staged waits on the device, and not on the host."""
        slot: Any = self.staged.slot
        return bool(slot.on_device)

    def used(self) -> int:
        """Bytes of the device that are taken, after torch has given back what it keeps."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return standin.ask(f"used{self.device.index}")

    def differences(self, reference: nn.Module) -> list[str]:
        """Tensors and scalars that are not, to the bit, those of `reference`, and sums of the captured step that are
        not those of its tensors."""
        found = []
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for path, theirs in reference.named_modules(remove_duplicate=False):
            ours = dict(state(modules[path]))
            found += [f"{path}.{name}" for name, value in state(theirs) if not _same(ours.get(name), value)]
        self.step.replay()
        found += [f"the graph's {name}" for name in self.step.unlike(reference)]
        return found


def _ask_as_kernels_do(model: nn.Module) -> None:
    """Kernels of a mixture ask for this in the first step, and vLLM keeps it in what runs."""
    for module in model.modules():
        if (found := getattr(getattr(module, "quant_method", None), "moe_quant_config", None)) is not None:
            _ = found.ocp_mx_scheme


def _same(ours: Any, theirs: Any) -> bool:
    if not isinstance(theirs, torch.Tensor):
        return bool(ours == theirs)
    if not isinstance(ours, torch.Tensor) or ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
        return False
    return theirs.is_meta or torch.equal(bits(ours.detach().cpu()), bits(theirs.detach().cpu()))


class Step:
    """Sums over the first bytes of each parameter and buffer, captured once. A replay reads at the addresses that were
    captured: it shows a version only if that is where its weights are."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in _tensors(model)]
        device = next(model.parameters()).device
        self._places = torch.arange(SUMMED, device=device) % 251 + 1
        self._sums = torch.zeros(len(self._names), dtype=torch.int64, device=device)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(self._graph):
            self._sum(model, self._sums)

    def _sum(self, model: nn.Module, sums: torch.Tensor) -> None:
        for index, (_, tensor) in enumerate(_tensors(model)):
            words = tensor.detach().reshape(-1).view(torch.uint8)[:SUMMED]
            sums[index].copy_((words.to(torch.int64) * self._places[: words.numel()]).sum())

    def replay(self) -> None:
        """Queue it on the current stream. Raises RuntimeError where memory is gone that it reads."""
        self._graph.replay()

    def unlike(self, reference: nn.Module) -> list[str]:
        """Names of tensors of which the last replay saw others than those of `reference`."""
        seen = self._sums.cpu().tolist()
        expected = torch.zeros_like(self._sums)
        self._sum(reference, expected)
        return [n for n, ours, theirs in zip(self._names, seen, expected.cpu().tolist(), strict=True) if ours != theirs]


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.numel()]


@contextlib.contextmanager
def publishing(versions: Sequence[Tensors]) -> Iterator[Callable[[int], VersionRecord]]:
    """A function that publishes the tensors in `versions[index]` as a version, in a store and an arena of its own."""
    with gpu_day.arena(ARENA_NBYTES) as directory:
        url = f"sqlite://{directory}/store.db"
        SyncStore(url).close()
        with Publisher(url, model="m", lease_ttl_s=LEASE_S) as publisher:
            yield lambda index: publish(publisher, versions[index])


# sleep ----------------------------------------------------------------------------------------------------------------


def _sleeping_memory() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance().use_memory_pool(tag="weights")


def sleep(worker: Worker) -> None:
    """As a sleep of level 1 in place: versions leave the device, and so do the weights."""
    from vllm.device_allocator.cumem import CuMemAllocator

    worker.engine.vacate()
    CuMemAllocator.get_instance().sleep(offload_tags=("weights",))


def wake() -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    CuMemAllocator.get_instance().wake_up()
