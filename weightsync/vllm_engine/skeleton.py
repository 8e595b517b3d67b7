"""A second copy of the model that never runs: its own `load_weights` places checkpoint tensors where we point it.

Using vLLM's loaders keeps every architecture's naming, fusing (qkv, gate_up) and tensor-parallel slicing its own.
Pages of the copy are never touched until a staging points its parameters into a layout slot, so it costs no memory.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

LAYER = re.compile(r"(?:^|\.)\w+\.\d+(?=\.|$)")


class UnsupportedModelError(RuntimeError):
    """This model's weights cannot be staged beside it; the message names the layer and what to use instead."""


@dataclass(frozen=True)
class Slot:
    """One parameter to fill: the live module it belongs to and its twin in the skeleton.

    `source` is the name under which its bytes are loaded (another slot's name where weights are tied); `role` says
    what runs on it: a "linear" GEMM, an embedding "table" (looked up, never multiplied), or "plain" code.
    """

    name: str
    source: str
    module_name: str
    live: nn.Module
    twin: nn.Module
    leaf: str
    role: Literal["linear", "table", "plain"]

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.twin._parameters[self.leaf]
        assert parameter is not None
        return parameter


@contextlib.contextmanager
def _private_rope_cache() -> Iterator[None]:
    """Rotary modules are cached process-wide; the skeleton must not share the live model's."""
    from vllm.model_executor.layers import rotary_embedding

    cache = rotary_embedding._ROPE_DICT
    saved = dict(cache)
    cache.clear()
    try:
        yield
    finally:
        cache.clear()
        cache.update(saved)


def build_skeleton(vllm_config: Any, model_config: Any, device: torch.device) -> nn.Module:
    """A weightless twin of the worker's model, built by vLLM with a forward context of its own."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with _private_rope_cache(), set_default_torch_dtype(model_config.dtype), device:
        twin: nn.Module = initialize_model(vllm_config=config, model_config=model_config)
    return twin.eval().requires_grad_(False)


def pair_parameters(live: nn.Module, twin: nn.Module) -> list[Slot]:
    """Every parameter of the twin with its live counterpart, in module order; tied ones share a `source`."""
    modules = {n: getattr(m, "base_layer", m) for n, m in live.named_modules()}  # LoRA wraps the layers it may change
    heads = {id(m) for n, m in live.named_modules(remove_duplicate=False) if n.rsplit(".", 1)[-1] == "lm_head"}
    slots: list[Slot] = []
    first: dict[int, str] = {}
    for module_name, twin_module in twin.named_modules():
        for leaf, parameter in twin_module._parameters.items():
            if parameter is None:
                continue
            _check_supported(module_name, twin_module)
            name = f"{module_name}.{leaf}" if module_name else leaf
            module = modules[module_name]
            role = _role(module, leaf, id(module) in heads)
            slots.append(
                Slot(name, first.setdefault(id(parameter), name), module_name, module, twin_module, leaf, role)
            )
    return slots


def _role(module: nn.Module, leaf: str, is_head: bool) -> Literal["linear", "table", "plain"]:
    if leaf != "weight" or not hasattr(module, "cpu_linear"):
        return "plain"
    return "table" if hasattr(module, "org_vocab_size") and not is_head else "linear"


def _check_supported(name: str, module: nn.Module) -> None:
    """Refuse layers whose weights vLLM transforms after loading in a way this backend does not build."""
    method = getattr(module, "quant_method", None)
    known = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    if method is not None and type(method).__name__ not in known:
        raise UnsupportedModelError(
            f"layer {name!r} uses {type(method).__name__}, whose processed weights cannot be staged beside the "
            "running ones yet; serve an unquantized dense checkpoint"
        )


def group_by_layer(names: Iterable[str]) -> list[list[str]]:
    """Tensor names in loading order, one group per decoder layer; unindexed names (embeddings, head) come last."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(layer_of(name), []).append(name)
    tail = groups.pop("", [])
    return [*groups.values(), *([tail] if tail else [])]


def layer_of(name: str) -> str:
    """The path up to and including the outermost layer index ("model.layers.3"), or "" where there is none."""
    match = LAYER.search(name)
    return name[: match.end()] if match else ""


def load_group(twin: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Run the model's own loader on `tensors` and return the names of the parameters it filled."""
    with torch.no_grad():
        return set(twin.load_weights(tensors) or ())
