"""LoRA adapters of a worker: built from published tensors beside the running ones, and replaced between two batches.

An adapter keeps its vLLM id over its versions, so requests in flight go on with the new weights. Building (PEFT names,
scaling, merging of packed projections) is vLLM's own, on the staging thread; a commit copies the finished matrices into
the place the kernels read. A commit to a version without an adapter empties its place. When vLLM has evicted an adapter
and wants it back, it gets the committed one from here.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
import torch

from weightsync.control.parts import ADAPTER_CONFIG, EDITION_URL, LORA, LORA_URL
from weightsync.errors import (
    EngineError,
    not_finite,
    part_not_served,
    shape_mismatch,
    unexpected_tensor,
)
from weightsync.format.fingerprint import checksum, grid, is_finite
from weightsync.memory.receiver import SlotReader
from weightsync.vllm_engine.staging.bundle import PartOrder


def refused(message: str) -> EngineError:
    """An adapter that this server cannot run."""
    return EngineError(message, code="adapter_refused")


@dataclass
class LoraGeneration:
    """One adapter of one version, ready to be placed."""

    digest: str
    name: str
    model: Any
    host: LoraHost

    def commit(self) -> list[Any]:
        return self.host.place(self.name, self.model)

    def withdraw(self) -> None:
        """Its place in the engine is empty from the next batch on."""
        self.host.withdraw(self.name, self.model.id)

    def release(self) -> None:
        self.model = None


class LoraHost:
    """The adapters of one worker. Raises EngineError when vLLM was started without LoRA."""

    def __init__(self, runner: Any, *, allow_non_finite: bool = False) -> None:
        self._allow_non_finite = allow_non_finite
        worker_manager = getattr(runner, "lora_manager", None)
        if worker_manager is None:
            raise part_not_served(f"{LORA}NAME", "start the instance with --enable-lora")
        self._worker_manager = worker_manager
        self._manager = worker_manager._adapter_manager
        self._committed: dict[str, Any] = {}
        self._editions: dict[str, Any] = {}  # by full name
        self._load_from_disk = worker_manager._load_adapter
        worker_manager._load_adapter = self._load

    def build(self, order: PartOrder) -> tuple[LoraGeneration, dict[str, Any]]:
        """(the adapter of `order`, report fields: `nbytes` read, `sums` of its tensors as they lie in memory).

        Raises EngineError, TensorError, ManifestError.
        """
        reader = SlotReader.open(order.slot, manifest_digest=order.manifest_digest, version=order.version)
        try:
            if not reader.manifest.tensors:
                raise refused("the adapter has no tensors: publish what PEFT saves")
            helper = self._helper(reader.manifest.metadata.get(ADAPTER_CONFIG, ""))
            tensors = {name: self._read(reader, name) for name in reader.manifest.tensors}
            sums = {name: _sums(tensor) for name, tensor in tensors.items()}
            model = self._model(order.lora_id, tensors, helper)
            self._check_finite(model)
            return LoraGeneration(order.manifest_digest, order.name, model, self), {
                "nbytes": reader.nbytes,
                "sums": sums,
            }
        finally:
            reader.close()

    def _read(self, reader: SlotReader, name: str) -> torch.Tensor:
        entry = reader.manifest.tensors[name]
        with reader.buffer(name) as data:
            if not (self._allow_non_finite or is_finite(data, entry.dtype)):
                raise not_finite(name, entry.dtype)
        return _copy(reader, name)

    def _check_finite(self, model: Any) -> None:
        """Check the weights as they were scaled, merged and cast to the type that adapters are served in."""
        for module, weights in model.loras.items() if not self._allow_non_finite else ():
            for matrices in (weights.lora_a, weights.lora_b):
                for matrix in matrices if isinstance(matrices, list) else [matrices]:
                    if matrix is not None and not bool(torch.isfinite(matrix).all()):
                        raise not_finite(module, str(matrix.dtype).removeprefix("torch."))

    def place(self, name: str, model: Any) -> list[Any]:
        """Make `model` what the adapter runs on from the next batch on; returns what it replaces."""
        manager = self._manager
        former = self._committed.get(name)
        self._committed[name] = model
        if model.id in manager._registered_adapters:
            manager._registered_adapters[model.id] = model
        if model.id in manager._active_adapters:
            index = manager.lora_index_to_id.index(model.id)
            for module_name, module in manager.modules.items():
                weights = manager._get_lora_layer_weights(model, module_name)
                if weights is None:
                    module.reset_lora(index)
                else:
                    module.set_lora(index, weights.lora_a, weights.lora_b)
        return [former]

    def withdraw(self, name: str, lora_id: int) -> None:
        """No version that runs has this adapter; its requests have been ended (engine_core/requests.py)."""
        self._committed.pop(name, None)
        self._manager.remove_adapter(lora_id)

    def keep_edition(self, name: str, model: Any) -> None:
        """vLLM gets this model when a request goes through the edition."""
        self._editions[name] = model

    def drop_edition(self, name: str) -> None:
        """vLLM has it no longer, either."""
        if (model := self._editions.pop(name, None)) is not None:
            self._manager.remove_adapter(model.id)

    def _load(self, request: Any) -> Any:
        """Replaces vLLM's method: an adapter published to this server never comes from disk."""
        path: str = request.lora_path
        if path.startswith(EDITION_URL):
            model = self._editions.get(path.removeprefix(EDITION_URL))
        elif path.startswith(LORA_URL):
            model = self._committed.get(path.removeprefix(LORA_URL))
        else:
            return self._load_from_disk(request)
        if model is None:
            raise refused(f"adapter {request.lora_name!r} has not been published to this server yet")
        return model

    def _helper(self, config: str) -> Any:
        from vllm.lora.peft_helper import PEFTHelper

        try:
            helper = PEFTHelper.from_dict(orjson.loads(config or b"null"))
            helper.validate_legal(self._worker_manager.lora_config)
        except (orjson.JSONDecodeError, ValueError, TypeError, AttributeError) as error:
            raise refused(
                f"the adapter configuration cannot be used ({error}): publish PEFT's adapter_config.json"
            ) from error
        return helper

    def _model(self, lora_id: int, tensors: dict[str, torch.Tensor], helper: Any) -> Any:
        from vllm.lora.lora_model import LoRAModel

        manager, config = self._manager, self._worker_manager.lora_config
        self._check_shapes(tensors, helper)
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        model = LoRAModel.from_lora_tensors(
            lora_id,
            tensors,
            helper,
            device="cpu",
            dtype=config.lora_dtype,
            model_vocab_size=self._worker_manager.vocab_size,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
            skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
        )
        manager._validate_moe_lora_format(model)
        manager._create_merged_loras_inplace(model)
        return model

    def _check_shapes(self, tensors: dict[str, torch.Tensor], helper: Any) -> None:
        """vLLM copies what is too small into the corner of its buffers: compare with the layers first."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        mapper = mapper.get_rename_mapper() if mapper is not None else None
        skipped = getattr(self._manager.model, "lora_skip_prefixes", None) or []
        sizes = self._sizes()
        for name, tensor in tensors.items():
            if is_base_embedding_weights(name) or LoRAModel._should_skip_module(name, skipped):
                continue  # the base's own, which PEFT saves too, or of layers that take no part in inference
            try:
                module, is_a = parse_fine_tuned_lora_name(name, mapper)
                rank, _ = helper.get_rank_and_scaling(parse_fine_tuned_lora_name(name)[0])
                inner, outer = sizes[module]
            except (ValueError, KeyError) as error:
                advice = "vLLM runs no adapter on such a layer of this model: train the adapter without it"
                raise unexpected_tensor(name, advice=advice) from error
            expected = (rank, inner) if is_a else (outer, rank)
            if tuple(tensor.shape) != expected:
                raise shape_mismatch(name, expected, tuple(tensor.shape))

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """(input, output) size of every layer an adapter may change, under the checkpoint's names; the input of an
        embedding is the vocabulary."""
        sizes: dict[str, tuple[int, int]] = {}
        for name, module in self._manager.modules.items():
            layer = module.base_layer
            if hasattr(layer, "embedding_dim"):
                sizes[name] = (layer.org_vocab_size, layer.embedding_dim)
                continue
            if hasattr(layer, "org_vocab_size"):  # the head, which vLLM wraps in the processor of logits
                sizes[name] = (module.hidden_size, layer.org_vocab_size)
                continue
            if not hasattr(layer, "output_size"):
                continue
            parts = self._manager.packed_modules.get(name, [name])
            outputs = _output_sizes(layer) if len(parts) > 1 else [layer.output_size]
            sizes |= {part: (layer.input_size, out) for part, out in zip(parts, outputs, strict=True)}
        return sizes


def _output_sizes(layer: Any) -> list[int]:
    """Of the projections packed into one layer, over all tensor-parallel ranks."""
    if hasattr(layer, "total_num_kv_heads"):
        kv = layer.total_num_kv_heads * layer.head_size
        return [layer.total_num_heads * layer.head_size, kv, layer.total_num_kv_heads * layer.v_head_size]
    return list(layer.output_sizes)


def _copy(reader: SlotReader, name: str) -> torch.Tensor:
    """The tensor, checked against its digest, in memory of its own: scaling is merged into it."""
    reader.verify(name)
    entry = reader.manifest.tensors[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the mapping is read-only, and nothing here writes to it
        flat = torch.frombuffer(reader.buffer(name), dtype=getattr(torch, entry.dtype))
    return flat.view(entry.shape).clone()


def _sums(tensor: torch.Tensor) -> list[list[int]]:
    """As a worker reports them (fingerprint.py): the one part that is the whole tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    rows, cols = grid(dtype, tuple(tensor.shape))
    data = memoryview(tensor.view(torch.uint8).numpy())
    return [[rows, cols, 0, rows, 0, cols, checksum(data, dtype, tuple(tensor.shape))]]


# vLLM's kernels on CPUs ----------------------------------------------------------------------------------------------


def mend_kernels(runner: Any) -> None:
    """Have the kernels that vLLM has for adapters on CPUs answer what those for GPUs do. Once per process.

    * A token of no adapter has the index -1, which is the last place of theirs: beside requests of an adapter that lies
      there, the base model's got its matrices. Here it gets none. `bgmv_expand` alone serves embeddings.
    * The part that an adapter has in the output head is computed for each sequence that gets a token. Log-probs of a
      prompt have a row for each of its tokens, and the engine would end. Here they are without that part, as on GPUs
      (vllm-project/vllm#51594).
    """
    if runner.lora_config is None or runner.device.type != "cpu":
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    if not hasattr(lora_ops.bgmv_shrink, "__wrapped__"):
        lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = _of_adapters(lora_ops.bgmv_shrink)
        lora_ops.bgmv_expand = punica_cpu.bgmv_expand = _to_adapters(lora_ops.bgmv_expand)
        wrapper = punica_cpu.PunicaWrapperCPU
        wrapper.add_lora_logits = _of_sequences(wrapper.add_lora_logits)


def _of_adapters(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def bgmv_shrink(
        inputs: torch.Tensor, matrices: torch.Tensor, output: torch.Tensor, places: torch.Tensor, scaling: float = 1.0
    ) -> None:
        original(inputs, matrices, output, places, scaling)
        output.masked_fill_((places < 0).unsqueeze(1), 0)

    return bgmv_shrink


def _to_adapters(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def bgmv_expand(
        inputs: torch.Tensor,
        matrices: torch.Tensor,
        output: torch.Tensor,
        places: torch.Tensor,
        add_inputs: bool = True,
    ) -> None:
        original(inputs.masked_fill((places < 0).unsqueeze(1), 0), matrices, output, places, add_inputs)

    return bgmv_expand


def _of_sequences(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add_lora_logits(self: Any, logits: torch.Tensor, hidden: torch.Tensor, *args: Any, **more: Any) -> None:
        if hidden.numel() // hidden.shape[-1] == len(self.sampler_indices):
            original(self, logits, hidden, *args, **more)

    return add_lora_logits
