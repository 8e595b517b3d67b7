"""vLLM's `vllm.general_plugins` entry point: registers the `hotswap` weight-transfer backend in every vLLM process.

Nothing heavy is imported before vLLM itself asks for it, so the entry point costs other vLLM users nothing. A release
of vLLM that is not known here is left as it is: their programs go on, and an instance says so before it starts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal

from weightsync.dying import die_with
from weightsync.vllm_engine.releases import known

BACKEND = "hotswap"
OWNER_ENV = "HOTSWAP_INSTANCE_PID"
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64


def register() -> None:
    """Register the backend and the engine-core additions; safe to call more than once in a process."""
    if not known():
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from weightsync.vllm_engine.engine_core.core import install

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "weightsync.vllm_engine.backend", "HotswapWeightTransferEngine"
        )
        os.register_at_fork(after_in_child=_die_with_owner)  # a forked process does not come here
    install()
    if OWNER_ENV in os.environ:
        _begin_with_placeholders()
    _allow_amx()
    _die_with_owner()


def _begin_with_placeholders() -> None:
    """In an instance, `--load-format dummy` is ours. vLLM looks at that name elsewhere: a new one would not do."""
    from vllm.model_executor import model_loader

    from weightsync.vllm_engine.loader import PlaceholderLoader

    model_loader._LOAD_FORMAT_TO_MODEL_LOADER["dummy"] = PlaceholderLoader


def _allow_amx() -> None:
    """Ask Linux for the tile registers of AMX, for this process and those it forks.

    vLLM's attention on CPU uses them wherever the processor has them, but leaves asking to oneDNN, which asks only when
    one of its own kernels needs them. Without it the first request ends the process with an illegal instruction. Where
    there is no AMX the call fails, and nothing needs it.
    """
    if platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)


def _die_with_owner() -> None:
    """In the processes vLLM starts for an instance: end when the parent does, even if it was killed.

    vLLM's own clean-up runs in the parent, so a SIGKILL there would leave engine processes holding their memory.
    """
    owner = os.environ.get(OWNER_ENV)
    if owner is not None and owner != str(os.getpid()):
        die_with(os.getppid(), signal.SIGKILL)
