"""Ranks of the trainer: on emulated GPUs, one each, and on the CPU for comparison.

The default group of ranks on GPUs is gloo for tensors of the device alone: it refuses one of the host, as NCCL does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu_emulated import kernels, operators, standin
from tests.trainer.ranks import run_ranks

Case = Callable[[], Any]


class RanksFailed(Exception):
    """A rank raised, or died; the message has its traceback."""


def on_gpus(case: Case, world: int = 1, **settings: int) -> list[Any]:
    """The results of `case` on each rank, by JSON. `settings`: of the stand-in. Raises RanksFailed, also where an
    operator has reached machine code, which computes nothing."""

    def meet() -> None:
        standin.configure({"devices": world, **settings})
        operators.everywhere()
        _by_references()
        _join("cuda:gloo")

    def checked() -> Any:
        answer = case()
        torch.cuda.synchronize()
        if operators.failures:
            raise operators.failures[0]
        assert standin.ask("kernels") == 0, "an operator has reached machine code"
        return answer

    return _answers(run_ranks(world, checked, meet))


def on_cpus(case: Case, world: int = 1) -> list[Any]:
    """As `on_gpus`, by ranks that see no GPU."""

    def meet() -> None:
        standin.configure({"devices": 0})
        _as_on_a_gpu()
        _join("gloo")

    return _answers(run_ranks(world, case, meet))


def _join(backend: str) -> None:
    import torch.distributed as dist

    from trainer.megatron import shim
    from trainer.megatron.parallel import use_device

    assert shim.install() is (backend == "gloo")
    for flash in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp):
        flash(False)  # attention by plain operators on both kinds of device
    torch.backends.cuda.enable_cudnn_sdp(False)
    use_device()
    dist.init_process_group(backend)


def _as_on_a_gpu() -> None:
    """Have the CPU sum in a GPU's order: a norm is one kernel, whose input gets one gradient; heads of keys and values
    are repeated in float32; and Adam goes through all tensors at once."""
    from torch.optim import adam

    from trainer.megatron import attention

    causal = attention.CausalAttention._causal

    def repeated(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if query.dtype is torch.float32:
            key, value = (attention._for_each_head(t, query.shape[2]) for t in (key, value))
        return causal(self, query, key, value)

    attention.CausalAttention._causal = repeated  # type: ignore[method-assign]
    plain = F.rms_norm
    F.rms_norm = lambda x, *given, **named: plain(x.view_as(x), *given, **named)
    adam._default_to_fused_or_foreach = lambda *_, **__: (False, True)


def _by_references() -> None:
    """In place of flash attention."""
    from trainer.megatron import attention

    attention.varlen_attn = kernels.varlen_attn
    plain = attention.causal_lower_right

    def causal_lower_right(*size: int) -> Any:
        with _disable_current_modes():  # under a mode torch makes no tensor of a class of its own
            return plain(*size)

    attention.causal_lower_right = causal_lower_right


def _answers(found: dict[str, Any]) -> list[Any]:
    if "error" in found:
        raise RanksFailed(found["error"])
    results: list[Any] = found["results"]
    return results
