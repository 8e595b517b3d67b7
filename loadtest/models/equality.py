"""Whether a model that was swapped is the model that stock vLLM loads: every parameter, buffer, tensor and scalar."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from loadtest.models import vllm_worker
from loadtest.models.mapped_memory import HostDriver
from loadtest.models.vllm_worker import Worker
from weightsync import Publisher
from weightsync.control.records import VersionRecord
from weightsync.format.fingerprint import combine
from weightsync.vllm_engine.device.cuda import Cuda
from weightsync.vllm_engine.device.remap import Remap

Tensors = Mapping[str, torch.Tensor]
HANDLE_NBYTES = 64 << 10  # small ones, so that a tiny model lies in several


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(checkpoint.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def publish(publisher: Publisher, tensors: Tensors) -> VersionRecord:
    publisher.publish(dict(tensors), activate=False)
    return max(publisher.versions(), key=lambda record: record.version)


def fresh(w: Worker, tensors: Tensors) -> nn.Module:
    """The model as stock vLLM loads it. Raises ValueError for a parameter that it misses."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(w.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), torch.no_grad():
        model = initialize_model(vllm_config=config, model_config=config.model_config)
        loaded = model.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
        if loaded is not None and config.model_config.quantization is None:
            DefaultModelLoader(config.load_config).track_weights_loading(model, loaded)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


@contextlib.contextmanager
def flipping(how: str, *, captured: bool = False) -> Iterator[None]:
    """Stage and flip as on a CPU ("pointed"), or as on a GPU ("copied", "remapped"): what is not replaced keeps its
    address. `captured`: nothing may be replaced, as under captured graphs.

    There is room for one version on the "device" beside the live one: others wait on the host.
    """
    if how == "pointed":
        yield
        return
    from vllm.model_executor.layers import utils

    def place(device: torch.device, _share: float) -> Cuda:
        found = (
            Cuda(device, copies=1)
            if how == "copied"
            else Remap(device, copies=2, driver=HostDriver(), largest_handle=HANDLE_NBYTES)
        )
        found.replaces = not captured
        return found

    with (
        patch.object(vllm_worker, "staging_device", place),
        patch.dict(os.environ, {"HOTSWAP_LINEAR_KERNEL": "private"}),
        patch.object(utils, "check_cpu_sgl_kernel", lambda *_: False),  # which keeps biases in a type of its own
    ):
        yield


def swap(w: Worker, publisher: Publisher, versions: Sequence[Tensors], how: str) -> Iterator[tuple[str, list[str]]]:
    """Stage two versions and the first one again, and flip there, back and on; (step, what is wrong then)."""
    references = [fresh(w, tensors) for tensors in versions]
    dtype = w.vllm_config.model_config.dtype
    generations = []
    for index in (0, 1, 0):
        record = publish(publisher, versions[index])
        generations.append(w.stage(record))
        same = combine([w.stager.report.sums]) == record.fingerprint
        yield f"staging {len(generations)}", [] if same else ["the fingerprint is not the published one"]
    kept = [(live, live.data_ptr()) for live, _ in generations[0].flips.tensors if live.numel()]
    yield "before", [] if differences(w.model, references[0], dtype) else ["the model began with the version itself"]
    steps = {"first": (0, 0), "second": (1, 1), "rollback": (0, 0), "again": (1, 1), "third": (2, 0)}
    for name, (generation, index) in steps.items():
        generations[generation].commit()
        yield name, differences(w.model, references[index], dtype)
    yield "versions", [] if differences(w.model, references[1], dtype) else ["both versions are equal"]
    moved = [live for live, address in kept if live.data_ptr() != address]
    right = kept and len(moved) == (len(kept) if how == "pointed" else 0)
    yield "addresses", [] if right else [f"{len(moved)} of {len(kept)} tensors moved"]


def state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Its parameters, buffers, tensors and scalars by name, also those in lists and dictionaries."""
    for kind in ("_parameters", "_buffers"):
        yield from ((name, tensor) for name, tensor in module.__dict__[kind].items() if tensor is not None)
    for name, value in module.__dict__.items():
        if not name.startswith(("_parameters", "_buffers", "_modules")):
            yield from _leaves(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, int, float, str)):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}[{index}]", item)
    elif type(value) is dict:
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]", item)


def differences(live: nn.Module, reference: nn.Module, dtype: torch.dtype) -> list[str]:
    """Differences of a model that was swapped from one that was loaded, and those of its layers that compute otherwise.

    A layer of which `model/layout.py` chooses the kernel keeps its weights elsewhere: there the outputs count.
    """
    found = []
    modules = dict(live.named_modules(remove_duplicate=False))
    for path, theirs in reference.named_modules(remove_duplicate=False):
        ours = modules[path]
        if getattr(reference, "is_pooling_model", False) and path.rsplit(".", 1)[-1] == "lm_head":
            continue  # never run, and nothing fills it
        values = dict(state(ours))
        chosen = hasattr(theirs, "cpu_linear")
        for name, value in state(theirs):
            if chosen and not _is_table(theirs, name):
                continue
            if isinstance(value, torch.Tensor):
                same = (
                    value.numel() == 0
                    or value.is_meta
                    or (name in values and torch.equal(bits(values[name]), bits(value)))
                )
            else:
                same = values.get(name) == value
            found += [] if same else [f"{path}.{name}"]
        if (x := _input(theirs, dtype)) is not None:
            expected, got = (m.quant_method.apply(m, x, m.bias).float() for m in (theirs, ours))
            found += [] if torch.equal(got, expected) else [f"{path} computes otherwise"]
    return found


def _is_table(module: nn.Module, name: str) -> bool:
    """Whether this is the weight of an embedding: it is looked up where it lies."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    return name == "weight" and isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


def _input(module: nn.Module, dtype: torch.dtype) -> torch.Tensor | None:
    """Something to compute on, if it is a linear layer or a head that has a kernel."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    kernel = module.__dict__.get("cpu_linear")
    absorbed = kernel is nn.functional.linear and (module.weight.is_meta or not module.weight.numel())
    bare = kernel is None and isinstance(getattr(module, "quant_method", None), UnquantizedLinearMethod)
    if absorbed or bare or not hasattr(module, "bias") or not hasattr(module, "quant_method"):
        return None
    is_head = isinstance(module, ParallelLMHead)
    width = module.embedding_dim if is_head else getattr(module, "input_size_per_partition", 0)
    return torch.randn(5, width).to(getattr(module, "params_dtype", dtype)) if width else None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
