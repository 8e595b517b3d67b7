"""The weights that an instance starts with, until it has its first version."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from weightsync.errors import CheckpointError
from weightsync.publish.checkpoint import Checkpoint
from weightsync.vllm_engine.model.placement import load_group

SHARED = {"has_own_lm_head": "lm_head", "has_own_embed_tokens": "embed_tokens"}


VALUE = 2.0**-10  # as small as vLLM's random weights; zeros would be divided by where they are scales
GIVEN = "dummy_weight_value"  # where vLLM looks for the value of a dummy weight


class PlaceholderLoader(DummyModelLoader):
    """Weights of one value, which takes a tenth of the time of vLLM's random ones: an instance starts sooner.

    A tensor that a checkpoint may lack, a buffer or a scale of one element, keeps its initial value, as when vLLM
    loads a checkpoint: a random scale of the KV cache may be negative, and vLLM then fails at its first step. Scales of
    one element that the checkpoint has are loaded from it: captured graphs take them in as numbers, which no version
    can change afterwards.
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
        given = [p for p in model.parameters() if p.is_floating_point() and not hasattr(p, GIVEN)]
        for parameter in given:
            setattr(parameter, GIVEN, VALUE)
        super().load_weights(model, model_config)
        for parameter in given:
            delattr(parameter, GIVEN)
        for tensor, value in kept:
            tensor.data.copy_(value)
        if any(isinstance(tensor, nn.Parameter) and tensor.numel() for tensor, _ in kept):
            _load_numbers(model, model_config)
        if model_config.runner == "draft":
            _keep_what_is_its_own(model, str(model_config.model))


def _load_numbers(model: nn.Module, model_config: Any) -> None:
    """Have the model's own loader fill what the checkpoint has of one element, each of the tensors there a scale.

    A configuration from elsewhere may name tensors otherwise than this checkpoint does: nothing is loaded then.
    """
    if getattr(model_config, "hf_config_path", None) not in (None, model_config.model):
        return
    try:
        checkpoint = Checkpoint(str(model_config.model))
    except CheckpointError:  # the directory has no weights
        return
    if numbers := dict(_numbers(checkpoint)):
        load_group(model, numbers.items())


def _numbers(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Its tensors of one element, by name."""
    with checkpoint.opened() as files:
        for name, file in files.items():
            if math.prod(file.spec.shape) == 1:
                data = bytearray(os.pread(file.fd, file.spec.nbytes, file.begin))
                yield name, torch.frombuffer(data, dtype=getattr(torch, file.spec.dtype)).view(file.spec.shape)


def _keep_what_is_its_own(model: nn.Module, checkpoint: str) -> None:
    """Tell vLLM whether a draft's checkpoint has a head and an embedding, else the draft runs the target's.

    vLLM also takes one for the target's that holds the same values, as placeholders do.
    """
    flags = [flag for flag in SHARED if hasattr(model, flag)]
    try:
        published = Checkpoint(checkpoint).schema.tensors if flags else ()
    except CheckpointError:  # of another format: no version can come from it
        return
    for flag in flags:
        parameters = [p for name, p in model.named_parameters() if SHARED[flag] in name]
        if parameters and any(SHARED[flag] in name for name in published):
            setattr(model, flag, True)
            for parameter in parameters:
                parameter.data.neg_()
