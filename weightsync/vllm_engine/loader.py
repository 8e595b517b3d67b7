"""The weights that an instance starts with, until it has its first version."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


class PlaceholderLoader(DummyModelLoader):
    """vLLM's random weights, but for what a checkpoint may lack: buffers, and scales of one element.

    Those keep the values that they were made with, as they do when vLLM loads a checkpoint. A random scale of the KV
    cache may be negative, and vLLM then fails at its first step; a random buffer would stay random.
    """

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        kept = [
            (tensor, tensor.data.clone())
            for module in model.modules()
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
            and not tensor.is_meta
            and not (isinstance(tensor, nn.Parameter) and tensor.numel() > 1)
        ]
        super().load_weights(model, model_config)
        for tensor, value in kept:
            tensor.data.copy_(value)
