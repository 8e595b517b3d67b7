"""The critic: the language model's trunk with one number for every token in place of the vocabulary.

The value at position t is that of the state before the token at t + 1, so it lines up with the labels and every other
field of a batch. The head starts at zero: untrained values are zero in every layout.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.megatron.convert import load_hf
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.hf_files import HfTensors
from trainer.megatron.model import build_model

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class ValueHead(torch.nn.Linear):  # type: ignore[misc]
    """hidden [T, B, H] -> values [T, B, 1] float32. Whole on every tensor-parallel rank; called like Megatron's
    output layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        torch.nn.init.zeros_(self.weight)
        self.sequence_parallel = config.sequence_parallel
        # Each rank sees its own part of the sequence: gradients are summed over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        values = super().forward(hidden).float()
        if self.sequence_parallel:
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def load_critic(
    shape: ModelShape, transformer: TransformerConfig, tensors: HfTensors | None, chunk: int | None = None
) -> Any:
    """This rank's part: the checkpoint's trunk (None: Megatron's initialisation), and a new head on the last stage.

    Nothing is tied to the embedding, whose second copy the value head replaces.
    """
    untied = dataclasses.replace(shape, tied=False)
    model = build_model(untied, transformer, chunk)
    if tensors is not None:
        tensors.check(shape.schema("float32"))
        load_hf(model, untied, lambda name: tensors.get(_EMBEDDING if shape.tied and name == _HEAD else name))
    if model.post_process:
        model.output_layer = ValueHead(transformer)
    return model
