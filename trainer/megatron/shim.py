"""Lets Megatron-Core run where there is no CUDA device; does nothing where there is one.

Megatron-Core names its device literally (`device="cuda"`, `torch.cuda.current_device()`, `.cuda()`), although nothing
in the modules used here needs a GPU. Without CUDA this module turns those names into the CPU: tensor factories drop the
device, streams and events become inert, the CUDA generator becomes the CPU generator. Process-wide and not undone, and
other libraries see it too (transformers' `from_pretrained` breaks): install it in trainer processes only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from trainer.megatron import releases

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor",
    "as_tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
)
_installed = False


class _InertStream:
    """Stands for torch.cuda.Stream and Event: work on the CPU is already in order."""

    device = _CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _InertStream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def record_event(self, *_: Any) -> _InertStream:
        return self

    def wait(self, *_: Any) -> None: ...

    record = synchronize = wait_stream = wait_event = wait


def install() -> bool:
    """Install the shim. True if this process now runs Megatron-Core on the CPU, False where CUDA exists. Raises
    ModelError."""
    global _installed
    releases.release()
    _complete_megatron()
    if torch.cuda.is_available():
        return False
    if not _installed:
        _installed = True
        _patch_cuda_module()
        _patch_tensors()
        _patch_megatron_rng()
        _patch_megatron_dispatch()
    return True


def _complete_megatron() -> None:
    """Megatron-Core 0.16.1 forgets to define this name without TransformerEngine, with or without CUDA."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _patch_cuda_module() -> None:
    cuda = torch.cuda
    # A function object of its own for every name: torch.compile's tables hold each function once.
    cuda.current_device = lambda: _CPU
    cuda.current_stream = lambda *_, **__: _InertStream()
    cuda.default_stream = lambda *_, **__: _InertStream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.Stream = cuda.Event = _InertStream
    for name in ("synchronize", "set_device", "empty_cache", "manual_seed_all"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.manual_seed = _manual_seed
    cuda.get_rng_state = _get_rng_state
    cuda.set_rng_state = _set_rng_state


def _patch_tensors() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    plain_type = torch.Tensor.type

    @functools.wraps(plain_type)
    def cuda_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The optimizer groups gradients by the names of the CUDA tensor types.
        result = plain_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    torch.Tensor.type = cuda_type


def _patch_megatron_rng() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    # Its tracker warns when the CPU's generator moves while the CUDA one is in use; here they are the same.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _patch_megatron_dispatch() -> None:
    """The token dispatcher wants its split sizes as numpy arrays, and turns only CUDA tensors into them."""
    from megatron.core.transformer.moe import token_dispatcher

    plain = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        is_split = as_numpy and torch.is_tensor(tensor)
        return tensor.numpy() if is_split else plain(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(*_: Any, **__: Any) -> Any:
    return torch.get_rng_state()


def _set_rng_state(state: Any, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_cpu
