"""vLLM's `vllm.general_plugins` entry point: registers the `hotswap` weight-transfer backend in every vLLM process.

Nothing heavy is imported before vLLM itself asks for it, so the entry point costs other vLLM users nothing.
"""

from __future__ import annotations

BACKEND = "hotswap"


def register() -> None:
    """Register the backend and the engine-core additions; safe to call more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from weightsync.vllm_engine.core import install

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "weightsync.vllm_engine.backend", "HotswapWeightTransferEngine"
        )
    install()
