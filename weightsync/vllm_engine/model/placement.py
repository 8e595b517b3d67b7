"""Placement: the rectangle of a published tensor that each parameter receives, learnt from vLLM's own loaders.

A skeleton is a second copy of the model that never runs: its own `load_weights` places checkpoint tensors where we
point it. Using vLLM's loaders keeps every architecture's naming, fusing (qkv, gate_up) and tensor-parallel slicing its
own. Pages of the copy are never touched until a staging points its parameters into a layout slot, so it costs no
memory.

The loader is run once on views of a published slot under a dispatch mode that notes every copy into a parameter and
carries none out. Later stagings replay what was noted, straight from the published slot into the layout slot.

A parameter that is filled in any other way than by copies of rectangles and by constants (arithmetic, a transpose, an
intermediate tensor) is `opaque`: its layer goes through vLLM's loader each time.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.errors import missing_tensor, unsupported_model

if TYPE_CHECKING:
    from weightsync.vllm_engine.model.processing import Processing

LAYER = re.compile(r"(?:^|\.)\w+\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Pair:
    """One parameter or buffer to fill: the live module it belongs to and its twin in the skeleton.

    `source` is the name under which its bytes are loaded (another pair's name where weights are tied); `role` says
    what runs on it: a "linear" GEMM, an embedding "table" (looked up, never multiplied), "plain" code, or a layer that
    is "processed" once it is loaded. The module of a "shared" one belongs to another model, whose versions carry it.
    `required` ones must be in every version. `made` ones
    come into being when a version that has them is loaded.
    """

    name: str
    source: str
    module_name: str
    live: nn.Module
    twin: nn.Module
    leaf: str
    role: Literal["linear", "table", "plain", "processed", "shared"]
    required: bool = True
    made: bool = False

    @property
    def parameter(self) -> torch.Tensor:
        tensor = held(self.twin, self.leaf)
        assert tensor is not None
        return tensor


def joined(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf


def held(module: nn.Module, leaf: str) -> torch.Tensor | None:
    """The parameter or buffer of this name."""
    found = module._parameters.get(leaf)
    return found if found is not None else module._buffers.get(leaf)


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


@dataclass(frozen=True)
class Served:
    """A draft that a worker runs beside its model, and what vLLM builds another one from."""

    model: nn.Module
    vllm_config: Any
    model_config: Any

    def skeleton(self, device: torch.device) -> nn.Module:
        from vllm.compilation.backends import set_model_tag

        with set_model_tag("hotswap_draft"):  # vLLM tells the compiled parts of two models apart by it
            return build_skeleton(self.vllm_config, self.model_config, device)


def pair_parameters(live: nn.Module, twin: nn.Module, processing: Processing | None = None) -> list[Pair]:
    """Every parameter and buffer of the twin with its live counterpart, in module order; tied ones share a `source`.

    Loaders fill some buffers, and leave most as they were made: those are paired, but not required. A model that only
    pools never runs a head, and its checkpoints have none.
    """
    modules = lives(live)
    heads = {id(m) for n, m in live.named_modules(remove_duplicate=False) if n.rsplit(".", 1)[-1] == "lm_head"}
    idle = heads if getattr(live, "is_pooling_model", False) else ()
    processed = {name: own for name, *own in processing.parameters()} if processing is not None else {}
    shared, aliases = (processing.shared, processing.aliases) if processing is not None else ((), ())
    pairs: list[Pair] = []
    first: dict[int, str] = {}
    for module_name, twin_module in twin.named_modules():
        module = modules[module_name]
        for leaf, tensor in [*twin_module._parameters.items(), *twin_module._buffers.items()]:
            name = joined(module_name, leaf)
            if tensor is None or name in processed or first.get(id(tensor)) in processed:
                continue
            if name in aliases or id(module) in idle:
                continue
            source = first.setdefault(id(tensor), name)
            role = "shared" if module_name in shared else _role(module, leaf, id(module) in heads)
            required = leaf in twin_module._parameters and role != "shared"
            pairs.append(Pair(name, source, module_name, module, twin_module, leaf, role, required))
    for name, (twin_module, leaf, required) in processed.items():
        pairs.append(Pair(name, name, name.rpartition(".")[0], twin_module, twin_module, leaf, "processed", required))
    return pairs


def pair_made(pairs: Iterable[Pair]) -> list[Pair]:
    """The parameters that the loader has given to modules of `pairs` since those were found: the bias of a head."""
    modules = {pair.module_name: pair for pair in pairs if pair.role not in ("processed", "shared")}
    known = {pair.name for pair in pairs}
    return [
        Pair(name, name, module_name, pair.live, pair.twin, leaf, "plain", required=False, made=True)
        for module_name, pair in modules.items()
        for leaf, parameter in pair.twin._parameters.items()
        if parameter is not None and (name := joined(module_name, leaf)) not in known
    ]


def _role(module: nn.Module, leaf: str, is_head: bool) -> Literal["linear", "table", "plain", "shared"]:
    if leaf != "weight" or not hasattr(module, "cpu_linear"):
        return "plain"
    return "table" if hasattr(module, "org_vocab_size") and not is_head else "linear"


def lives(live: nn.Module) -> dict[str, nn.Module]:
    """The running modules by every name that they have. LoRA wraps the layers that it may change."""
    return {n: getattr(m, "base_layer", m) for n, m in live.named_modules(remove_duplicate=False)}


def shared_modules(live: nn.Module, twin: nn.Module, elsewhere: Collection[int]) -> frozenset[str]:
    """Names of the twin's modules that stand for one that runs in another model, too, or under an earlier name.

    `elsewhere`: ids of the other model's modules.
    """
    running, seen = lives(live), set(elsewhere)
    found = set()
    for name, _ in twin.named_modules():
        if id(running[name]) in seen:
            found.add(name)
        seen.add(id(running[name]))
    return frozenset(found)


class WithHead(nn.Module):
    """A model and the prediction head (MTP) that comes in its checkpoint, as one model to fill."""

    def __init__(self, target: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.target, self.head = target, head

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Each loader takes what is its own."""
        given = list(tensors)
        return {
            f"{name}.{filled}"
            for name, model in self.named_children()
            for filled in model.load_weights(given) or ()  # type: ignore[operator]
        }


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
    """Run the model's own loader on `tensors` and return the names of the parameters it filled, if it says."""
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    with torch.no_grad(), disable_mtp_completeness_check():  # that check wants all tensors in one call
        return set(twin.load_weights(tensors) or ())


aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Box:
    """Rows [row, row + rows) and columns [col, col + cols) of a tensor seen as a matrix; in elements."""

    row: int
    col: int
    rows: int
    cols: int

    @property
    def area(self) -> int:
        return self.rows * self.cols

    def meets(self, other: Box) -> bool:
        return (
            self.row < other.row + other.rows
            and other.row < self.row + self.rows
            and self.col < other.col + other.cols
            and other.col < self.col + self.cols
        )


@dataclass(frozen=True, slots=True)
class Rect:
    """`target`, a part of a parameter, receives the equally large `source` of the published tensor `name`."""

    target: Box
    source: Box
    name: str


@dataclass(frozen=True)
class Placement:
    """The source of every parameter, by the name it is loaded under. `constants` are parts set to one value: padding.

    vLLM's loader fills `opaque` parameters, each from the tensors named. Nothing replays the tensors `unused`.
    """

    rects: dict[str, tuple[Rect, ...]]
    constants: dict[str, tuple[tuple[Box, float], ...]]
    opaque: Mapping[str, tuple[str, ...]]
    unused: tuple[str, ...]


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor as rows and columns: the last dimension is a row, a scalar or 1-D tensor is one row."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(matrix(tensor.shape))


def learn(
    twin: torch.nn.Module, pairs: list[Pair], tensors: dict[str, torch.Tensor], groups: list[list[str]]
) -> Placement:
    """Watch the twin's loader take `tensors`, one group after the other.

    Raises TensorError, and EngineError for loaders that do what cannot be staged beside a running model.
    """
    own = {s.name: s.parameter for s in pairs if s.name == s.source}
    watch = Watch(own, tensors, {s.name for s in pairs if s.role == "processed"})
    shared = {s.name for s in pairs if s.role == "shared"}
    for names in groups:
        with watch.group(names):
            watch.filled |= load_group(twin, watch.feed(names))
        watch.note_replaced({s.name: s.parameter for s in pairs if s.name == s.source})
    if missing := sorted({s.source for s in pairs if s.required} - watch.filled - watch.touched()):
        raise missing_tensor(missing[0])
    return watch.placement(shared)


class Watch(TorchDispatchMode):
    """Notes what is written into parameters, and skips it."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        tensors: dict[str, torch.Tensor],
        processed: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.filled: set[str] = set()
        self._parameters, self._tensors, self._processed = dict(parameters), tensors, processed
        self._addresses = {name: p.data_ptr() for name, p in parameters.items()}
        self._targets = _Ranges(parameters)
        self._sources = _Ranges(tensors)
        self._rects: dict[str, dict[Box, Rect]] = {name: {} for name in parameters}
        self._constants: dict[str, list[tuple[Box, float]]] = {name: [] for name in parameters}
        self._opaque: set[str] = set()
        self._touched: dict[str, set[int]] = {name: set() for name in parameters}
        self._groups: list[list[str]] = []

    @contextmanager
    def group(self, names: list[str]) -> Iterator[None]:
        self._groups.append(names)
        with self:
            yield
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() != self._addresses[name]:
                if name in self._processed:
                    self._addresses[name] = parameter.data_ptr()
                    self._note_opaque(name)
                    continue
                raise unsupported_model(
                    f"the loader of {name!r} replaces the parameter's memory, so that versions cannot be staged beside "
                    "the running one; serve another architecture"
                )

    def note_replaced(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Some loaders make a parameter anew: nothing of that was a write to the one that was there."""
        for name, parameter in parameters.items():
            if parameter is not self._parameters[name]:
                self._parameters[name], self._addresses[name] = parameter, parameter.data_ptr()
                self._note_opaque(name)

    def feed(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._tensors[name]) for name in names)

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = list(_written(func, args, kwargs or {}))
        names = [self._targets.find(tensor) for tensor in written]
        for tensor in written:
            if (source := self._sources.find(tensor)) is not None:
                raise unsupported_model(
                    f"the model's loader changes the tensor {source!r} that it is given, which other instances read "
                    "too; serve another architecture"
                )
        if len(written) != 1 or names[0] is None:
            for name in filter(None, names):
                self._note_opaque(name)
            return func(*args, **(kwargs or {}))
        self._note(names[0], func, args)
        return written[0]

    def touched(self) -> set[str]:
        """The parameters that were written to; loaders of drafts do not say."""
        return {name for name, groups in self._touched.items() if groups}

    def placement(self, shared: Collection[str] = ()) -> Placement:
        own = self._parameters.keys() - shared
        for name in own:
            if name not in self._opaque and (self._touched[name] or name in self.filled):
                self._require_coverage(name)
        opaque = {
            name: tuple(tensor for index in sorted(self._touched[name]) for tensor in self._groups[index])
            for name in sorted(self._opaque & own)
        }
        rects = {n: tuple(r.values()) for n, r in self._rects.items() if n in own and n not in opaque}
        used = {rect.name for found in rects.values() for rect in found}
        unused = tuple(name for name in self._tensors if name not in used)
        constants = {n: tuple(c) for n, c in self._constants.items() if c and n in own and n not in opaque}
        return Placement(rects, constants, opaque, unused)

    def _note(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        target = args[0]
        self._touched[name].add(len(self._groups) - 1)
        if target.numel() == 0:
            return
        box = box_of(target, self._parameters[name])
        if box is None:
            self._opaque.add(name)
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            value = float(args[1]) if len(args) > 1 else 0.0
            if any(box.meets(target) for target in self._rects[name]):
                self._opaque.add(name)
            self._constants[name].append((box, value))
        elif func is aten.copy_.default and (rect := self._rect(target, box, args[1])) is not None:
            self._rects[name].pop(box, None)  # a later copy to the same place replaces it
            self._rects[name][box] = rect
        else:
            self._opaque.add(name)

    def _rect(self, target: torch.Tensor, box: Box, source: torch.Tensor) -> Rect | None:
        name = self._sources.find(source)
        if name is None or source.shape != target.shape:
            return None
        found = box_of(source, self._tensors[name])
        if found is None or (found.rows, found.cols) != (box.rows, box.cols):
            return None
        return Rect(box, found, name)

    def _note_opaque(self, name: str) -> None:
        self._touched[name].add(len(self._groups) - 1)
        self._opaque.add(name)

    def _require_coverage(self, name: str) -> None:
        """Every element must be written, and by one copy: of two copies of one place nobody knows which one counts."""
        boxes = sorted(self._rects[name], key=lambda box: box.row)
        if any(a.meets(b) for i, a in enumerate(boxes) for b in _below(boxes, i)):
            self._opaque.add(name)
            return
        parameter = self._parameters[name]
        constants = dict.fromkeys(box for box, _ in self._constants[name])
        bare = [box for box in constants if not any(box.meets(b) for b in boxes)]
        if any(box.area == parameter.numel() for box in constants):
            return
        if sum(b.area for b in [*boxes, *bare]) == parameter.numel():
            return
        if name not in self._processed or not self._evenly_padded(parameter, boxes):
            raise missing_tensor(name)
        self._opaque.add(name)

    def _evenly_padded(self, parameter: torch.Tensor, boxes: list[Box]) -> bool:
        """Whether each expert of (experts, rows, columns) is as full as the others: then the rest is padding."""
        if parameter.ndim < 3:
            return bool(boxes)
        rows = matrix(parameter.shape[1:])[0]
        filled = [0] * parameter.shape[0]
        for box in boxes:
            filled[box.row // rows] += box.area
        return len(set(filled)) == 1 and filled[0] > 0


def _below(boxes: list[Box], index: int) -> Iterator[Box]:
    """Those behind `index`, sorted by row, that begin before it ends."""
    end = boxes[index].row + boxes[index].rows
    return itertools.takewhile(lambda box: box.row < end, itertools.islice(boxes, index + 1, None))


class _Ranges:
    """Finds the tensor of a set in whose memory another one begins."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), n) for n, t in tensors.items())
        self._spans = [span for span in spans if span[1] > span[0]]
        self._starts = [span[0] for span in self._spans]

    def find(self, tensor: torch.Tensor) -> str | None:
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._starts, address) - 1
        return self._spans[at][2] if at >= 0 and address < self._spans[at][1] else None


def box_of(view: torch.Tensor, base: torch.Tensor) -> Box | None:
    """Where `view` lies in `base` (contiguous), or None when it is no rectangle of it in the same order."""
    cols = matrix(base.shape)[1]
    offset = view.data_ptr() - base.data_ptr()
    if view.dtype != base.dtype or offset % base.element_size() or not 0 <= offset < base.nbytes:
        return None
    row, col = divmod(offset // base.element_size(), cols)
    dims = [(n, s) for n, s in zip(view.shape, view.stride(), strict=True) if n != 1]
    if view.is_contiguous() and view.numel() % cols == 0 and col == 0:
        return Box(row, 0, view.numel() // cols, cols)
    width = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    step, rows = cols, 1
    for size, stride in reversed(dims):
        if stride != step:
            return None
        step, rows = step * size, rows * size
    return Box(row, col, rows, width) if col + width <= cols else None


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator changes in place."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        yield from (v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, torch.Tensor))
