"""Layers whose weights vLLM processes after loading: experts, quantised weights, absorbed attention.

vLLM repacks such weights, quantises them, or builds kernels around them, in `process_weights_after_loading`. A twin
layer goes through the same code beside the running one, on the staging thread:

1. `begin` puts the twin's layer back to the state that it had before loading, with fresh memory.
2. The builder, or vLLM's loader, fills its parameters.
3. `process` calls vLLM's own processing.
4. `harvest` collects what differs from the state before loading: tensors, closures, kernels, scalars.

Objects from before loading are the layer's structure, which never moves: live and twin are walked side by side. Those
that loading and processing made belong to the version. There is no list of layer classes. A quantisation method of
another package works like vLLM's own.

`in_place` then compares what was made with what runs. If they differ in the contents of tensors and in scalars alone,
the live tensors get new contents, and every holder of them follows: a router, a kernel, a closure. The bytes lie in the
layout slot, where other instances map them. Otherwise the layer is private: its changes replace attributes of live
objects as a whole. Kernels that keep raw pointers to their tensors need that, such as oneDNN's for int8.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.vllm_engine.model.layout import extent
from weightsync.vllm_engine.model.placement import held, joined, layer_of, lives, shared_modules

SMALL = 65536  # elements: tensors up to this size keep the value that they were made with
MODULE_STATE = frozenset({"_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training"})
SCALAR = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum, type)
CONSTANT = (*SCALAR, types.BuiltinFunctionType, types.ModuleType)
GONE = object()


@dataclass(frozen=True)
class Change:
    """`holder[key]` of a live object becomes `value`; GONE removes the key."""

    path: str
    holder: dict[str, Any]
    key: str
    value: Any


@dataclass(frozen=True)
class Leaf:
    """A tensor of the running layer and the one that was made in its place."""

    path: str
    live: torch.Tensor
    made: torch.Tensor


class NotInPlace(Exception):
    """The made layer cannot be copied into the running one; the message says which tensor or attribute, and why."""


@dataclass(frozen=True)
class Blank:
    """A parameter as it was before loading, without its memory. `initial` is what it holds if nothing loads it."""

    meta: torch.Tensor
    initial: torch.Tensor | None

    @staticmethod
    def of(tensor: torch.Tensor, *, keep: bool = False) -> Blank:
        """`keep`: keep the value of a large one, too; a parameter's is whatever lay in its memory."""
        meta = tensor.data.to("meta")
        meta.__class__ = tensor.__class__
        meta.__dict__ = tensor.__dict__.copy()
        keep = not tensor.is_meta and (keep or tensor.numel() <= SMALL)
        return Blank(meta, tensor.data.clone() if keep else None)

    def fresh(self, device: torch.device) -> torch.Tensor:
        meta = self.meta
        tensor = torch.empty_strided(tuple(meta.size()), tuple(meta.stride()), dtype=meta.dtype, device=device)
        if self.initial is not None:
            tensor.copy_(self.initial)
        tensor.__class__ = meta.__class__
        tensor.__dict__ = meta.__dict__.copy()
        return tensor


@dataclass(frozen=True)
class Part:
    """One live object and its twin: a layer, or an object that a layer had before loading (a router, a kernel)."""

    root: str
    path: str
    live: Any
    twin: Any
    before: dict[str, Any]
    parameters: dict[str, Blank | torch.Tensor | None]
    buffers: dict[str, Blank | torch.Tensor | None]


@dataclass(frozen=True)
class Alias:
    """A tensor that another module holds, in the memory that `owner` had before loading: a view of its weight.

    Processing may give the owner new memory. The alias then stays what was loaded.
    """

    root: str
    path: str
    live: dict[str, Any]
    twin: dict[str, Any]
    key: str
    owner: nn.Module
    leaf: str
    meta: torch.Tensor
    offset: int

    def renew(self) -> None:
        """Turn the twin's to the memory that its owner has now."""
        tensor = held(self.owner, self.leaf)
        assert tensor is not None
        view = tensor.data.as_strided(self.meta.size(), self.meta.stride(), tensor.storage_offset() + self.offset)
        self.twin[self.key] = nn.Parameter(view, False) if isinstance(self.meta, nn.Parameter) else view


class _Pausing(TorchDispatchMode):
    """Has `pause` called before each operator of this thread: a layer takes vLLM up to a tenth of a second."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self._pause = pause

    def __torch_dispatch__(
        self, operator: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._pause()
        return operator(*args, **kwargs or {})


class Processing:
    """The processed layers of one model, by decoder layer.

    `elsewhere` holds ids of live modules that belong to another model too (a draft's embedding is the target's): that
    model's versions carry them. `shared` has their names.
    """

    def __init__(
        self,
        live: nn.Module,
        twin: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        elsewhere: Collection[int] = (),
    ) -> None:
        self._dtype, self._device = dtype, device
        self.shared = shared_modules(live, twin, elsewhere)
        running = lives(live)
        self.modules = {n: m for n, m in find(twin).items() if n not in self.shared}
        self.layers: dict[str, list[str]] = {}
        for name in self.modules:
            self.layers.setdefault(layer_of(name), []).append(name)
        inside = {id(m) for m in self.modules.values()}
        outside = [(n, m) for n, m in twin.named_modules() if id(m) not in inside]
        self._to_live: dict[int, Any] = {}
        self._aliases: dict[str, list[Alias]] = {}
        owners = {
            tensor.untyped_storage()._cdata: (root, module, leaf, tensor)
            for root, module in self.modules.items()
            for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is not None
        }
        for name, module in outside:
            self._find_aliases(name, running[name], module, owners)
        self.aliases = {alias.path for found in self._aliases.values() for alias in found}
        self._foreign: dict[int, Any] = {}  # tensors of layers that are not processed: those are swapped on their own
        for name, module in outside:
            for kind in ("_parameters", "_buffers"):
                for leaf, tensor in module.__dict__[kind].items():
                    if tensor is not None and joined(name, leaf) not in self.aliases:
                        self._foreign[id(tensor)] = (tensor, running[name].__dict__[kind].get(leaf))
        self._parts: dict[str, list[Part]] = {}
        for name, module in self.modules.items():
            self._pair(self._parts.setdefault(layer_of(name), []), name, name, running[name], module)
        for name, module in twin.named_modules():
            self._to_live.setdefault(id(module), running[name])
        self.drop(self.layers)

    def parameters(self) -> Iterator[tuple[str, nn.Module, str, bool]]:
        """(name, twin module, attribute, required) of each parameter and buffer of the processed layers' own.

        A small one that no checkpoint has keeps its value: a scale, a bias.
        """
        for name, module in self.modules.items():
            for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None and id(tensor) not in self._foreign:
                    required = leaf in module._parameters and tensor.numel() > SMALL
                    yield joined(name, leaf), module, leaf, required

    def _find_aliases(self, path: str, live: Any, twin: nn.Module, owners: dict[int, Any]) -> None:
        """`owners`: (root, module, attribute, tensor) of the processed layers' tensors by storage."""
        for kind in ("_parameters", "_buffers", "__dict__"):
            theirs, ours = (vars(m) if kind == "__dict__" else vars(m)[kind] for m in (live, twin))
            for key, tensor in ours.items():
                if not isinstance(tensor, torch.Tensor) or not isinstance(theirs.get(key), torch.Tensor):
                    continue
                root, module, leaf, owner = owners.get(tensor.untyped_storage()._cdata, ("", twin, "", tensor))
                (begin, end), (first, last) = extent(tensor), extent(owner)
                if tensor is not owner and tensor.dtype is owner.dtype and first <= begin < end <= last:
                    offset = tensor.storage_offset() - owner.storage_offset()
                    meta = tensor.detach().to("meta")
                    meta = nn.Parameter(meta, False) if isinstance(tensor, nn.Parameter) else meta
                    alias = Alias(root, joined(path, key), theirs, ours, key, module, leaf, meta, offset)
                    self._aliases.setdefault(layer_of(root), []).append(alias)

    # the state before loading -----------------------------------------------------------------------------------

    def _pair(self, parts: list[Part], root: str, path: str, live: Any, twin: Any) -> None:
        if id(twin) in self._to_live or live is twin:
            return
        self._to_live[id(twin)] = live
        parts.append(self._part(root, path, live, twin))
        for key, value in list(twin.__dict__.items()):
            if is_structure(value) and type(live.__dict__.get(key)) is type(value):
                self._pair(parts, root, f"{path}.{key}", live.__dict__[key], value)
        for key, value in twin.__dict__.get("_modules", {}).items():
            if is_method(value):  # some methods are modules themselves
                self._pair(parts, root, f"{path}.{key}", live._modules[key], value)

    def _part(self, root: str, path: str, live: Any, twin: Any) -> Part:
        before = {k: v for k, v in twin.__dict__.items() if k not in MODULE_STATE}
        parameters: dict[str, Blank | torch.Tensor | None] = {}
        buffers: dict[str, Blank | torch.Tensor | None] = {}
        if isinstance(twin, nn.Module):
            unwrap_online_loaders(twin)
            for held, blanks, keep in ((twin._parameters, parameters, False), (twin._buffers, buffers, True)):
                for name, tensor in held.items():
                    foreign = tensor is None or id(tensor) in self._foreign
                    blanks[name] = tensor if foreign else Blank.of(tensor, keep=keep)  # type: ignore[arg-type]
            before["_non_persistent_buffers_set"] = set(twin._non_persistent_buffers_set)
        return Part(root, path, live, twin, {k: own(v) for k, v in before.items()}, parameters, buffers)

    def begin(self, layers: Collection[str], device: torch.device) -> None:
        """Give the twin's layers the state that they had before loading, and memory."""
        self._restore(layers, lambda blank: blank.fresh(device))

    def drop(self, layers: Collection[str]) -> None:
        """Give the twin's layers the state that they had before loading, without memory."""
        self._restore(layers, lambda blank: blank.meta)

    def _restore(self, layers: Collection[str], tensor_of: Any) -> None:
        for layer in layers:
            for part in self._parts[layer]:
                state = part.twin.__dict__
                modules = {k: state[k] for k in ("_modules", "training") if k in state}
                state.clear()
                state.update(modules)
                state.update({k: own(v) for k, v in part.before.items()})
                if isinstance(part.twin, nn.Module):
                    for kind, blanks in (("_parameters", part.parameters), ("_buffers", part.buffers)):
                        state[kind] = {k: tensor_of(v) if isinstance(v, Blank) else v for k, v in blanks.items()}
            for alias in self._aliases.get(layer, ()):
                alias.renew()

    # processing -------------------------------------------------------------------------------------------------

    def process(self, layer: str, pause: Callable[[], None] = lambda: None) -> None:
        """Run vLLM's processing on a loaded layer of the twin, attention last, as vLLM's loaders do. `pause` is called
        before each operator."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        names = self.layers[layer]
        late = [n for n in names if is_deferred_attention_layer(self.modules[n])]
        with default_dtype(self._dtype), torch.no_grad(), self._device, _Pausing(pause):
            for name in [*(n for n in names if n not in late), *late]:
                module: Any = self.modules[name]
                method: Any = getattr(module, "quant_method", None)
                if is_method(method):
                    method.process_weights_after_loading(module)
                if name in late:
                    module.process_weights_after_loading(self._dtype)
                if hasattr(module, "update_param_tp_status"):
                    module.update_param_tp_status()

    def harvest(self, layer: str) -> dict[str, list[Change]]:
        """Return what loading and processing made of each module of the layer, and drop the twin's.

        It lists all that processing sets, also what equals the live value: a rollback must bring it back.
        """
        made: dict[str, list[Change]] = {}
        for part in self._parts[layer]:
            changes = made.setdefault(part.root, [])
            now = part.twin.__dict__
            if isinstance(part.twin, nn.Module):
                for kind, were in (("_parameters", part.parameters), ("_buffers", part.buffers)):
                    held = part.live.__dict__[kind]
                    for key, value in now[kind].items():
                        if id(value) not in self._foreign and not (value is None and held.get(key) is None):
                            changes.append(self._change(part, held, key, value))
                    gone = were.keys() - now[kind].keys()
                    changes += [Change(f"{part.path}.{k}", held, k, GONE) for k in sorted(gone)]
            for key, value in now.items():
                if key not in MODULE_STATE and self._is_made(value, part.before.get(key, GONE)):
                    changes.append(self._change(part, part.live.__dict__, key, value))
            gone = part.before.keys() - now.keys()
            changes += [Change(f"{part.path}.{k}", part.live.__dict__, k, GONE) for k in sorted(gone)]
        for alias in self._aliases.get(layer, ()):
            made[alias.root].append(Change(alias.path, alias.live, alias.key, alias.twin[alias.key]))
        self.drop([layer])
        return made

    def _is_made(self, value: Any, before: Any) -> bool:
        if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor) and 0 < value.numel() <= SMALL:
            return id(before) not in self._foreign  # it may have been written to in place
        if isinstance(value, (list, dict, set)):
            return not same(value, before)  # a copy that nothing was added to: the live object keeps its own
        return value is not before

    def _change(self, part: Part, holder: dict[str, Any], key: str, value: Any) -> Change:
        path = f"{part.path}.{key}"
        return Change(path, holder, key, self._rebind(value, set()))

    def _rebind(self, value: Any, seen: set[int]) -> Any:
        """Return `value` with its references to the twin turned to the live objects."""
        if (found := self._live_of(value)) is not value:
            return found
        if id(value) in seen:
            return value
        seen.add(id(value))
        if isinstance(value, types.MethodType):
            owner = self._rebind(value.__self__, seen)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                cell.cell_contents = self._rebind(cell.cell_contents, seen)
        elif isinstance(value, (torch.Tensor, nn.Module)) or is_structure(value):
            for key, held in list(value.__dict__.items()):
                if is_structure(held) or isinstance(held, (types.MethodType, types.FunctionType)) or self._knows(held):
                    value.__dict__[key] = self._rebind(held, seen)
        return value

    def _knows(self, value: Any) -> bool:
        return id(value) in self._to_live or id(value) in self._foreign

    def _live_of(self, value: Any) -> Any:
        if (found := self._foreign.get(id(value))) is not None:
            return found[1] if found[1] is not None else value
        return self._to_live.get(id(value), value)


def in_place(changes: list[Change]) -> tuple[list[Leaf], list[Change]]:
    """Split changes of a layer into tensors whose contents change and scalars that are set. Raises NotInPlace."""
    leaves: dict[int, Leaf] = {}
    scalars: list[Change] = []
    for change in changes:
        if change.value is GONE:
            if change.key in change.holder:
                raise NotInPlace(f"{change.path} is removed")
        elif change.key not in change.holder:
            raise NotInPlace(f"{change.path} is new")
        elif plain(change.value):
            scalars.append(change)
        else:
            _compare(change.holder[change.key], change.value, change.path, leaves, scalars, set())
    return list(leaves.values()), scalars


def _compare(old: Any, new: Any, path: str, leaves: dict[int, Leaf], scalars: list[Change], seen: set[int]) -> None:
    """Walk what runs and what was made side by side."""
    if old is new or id(new) in seen:
        return
    seen.add(id(new))
    if isinstance(new, torch.Tensor):
        if isinstance(old, torch.Tensor) and not old.numel() and not new.numel():
            return  # processing has emptied it; its type is an accident
        if _form(old) != _form(new):
            raise NotInPlace(f"{path} is {_form(new)}, and {_form(old)} runs")
        known = leaves.setdefault(id(old), Leaf(path, old, new))
        if known.made is not new and new.numel():
            raise NotInPlace(
                f"{path} is the same tensor as {known.path} in what runs, and another one in what was made"
            )
        return
    if type(old) is not type(new):
        raise NotInPlace(f"{path} is a {type(new).__name__}, and a {type(old).__name__} runs")
    inside: list[tuple[Any, Any, str]] = []
    if isinstance(new, CONSTANT):
        if not same(old, new):
            raise NotInPlace(f"{path} is {new!r}, and {old!r} runs")
    elif isinstance(new, (list, tuple)) and len(old) == len(new):
        inside = [(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(old, new, strict=True))]
    elif isinstance(new, dict) and old.keys() == new.keys():
        inside = [(old[k], new[k], f"{path}[{k!r}]") for k in new]
    elif isinstance(new, types.MethodType) and old.__func__ is new.__func__:
        inside = [(old.__self__, new.__self__, path)]
    elif isinstance(new, types.FunctionType) and old.__code__ is new.__code__:
        cells = zip(old.__closure__ or (), new.__closure__ or (), strict=True)
        inside = [(a.cell_contents, b.cell_contents, f"{path}()") for a, b in cells]
        inside.append((old.__defaults__, new.__defaults__, path))
    elif is_structure(new) and not has_native_state(new):
        _compare_structures(old.__dict__, new.__dict__, path, leaves, scalars, seen)
    elif not same(old, new):
        raise NotInPlace(f"{path} is a {type(new).__name__}, whose contents are its own")
    for a, b, where in inside:
        _compare(a, b, where, leaves, scalars, seen)


def _compare_structures(
    old: dict[str, Any], new: dict[str, Any], path: str, leaves: dict[int, Leaf], scalars: list[Change], seen: set[int]
) -> None:
    """Walk the attributes of two objects.

    The one that runs may have more of them: vLLM computes some when they are first asked for, and keeps them. They
    stay if they are constants but for numbers, which may come of a tensor's contents, and if no plain value changes
    that they may come of.
    """
    if missing := sorted(new.keys() - old.keys()):
        raise NotInPlace(f"{path}.{missing[0]} is new")
    known = len(scalars)
    for key, value in new.items():
        if plain(value) and plain(old[key]):
            scalars.append(Change(f"{path}.{key}", old, key, value))
        else:
            _compare(old[key], value, f"{path}.{key}", leaves, scalars, seen)
    for key in sorted(old.keys() - new.keys()):
        changed = [change.path for change in scalars[known:] if not same(change.holder[change.key], change.value)]
        if changed or not isinstance(old[key], CONSTANT) or isinstance(old[key], (int, float)):
            reason = f"and {changed[0]} changes" if changed else f"and holds a {type(old[key]).__name__}"
            raise NotInPlace(f"{path}.{key} was computed while it ran, {reason}")


def _form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} with strides {value.stride()}"


def plain(value: Any) -> bool:
    """Whether a slot's notes can carry this value."""
    return isinstance(value, (bool, int, float, str, type(None))) and not isinstance(value, Enum)


def has_native_state(value: Any) -> bool:
    """Whether the object frees memory of its own: what it points to is not in its attributes."""
    return hasattr(type(value), "__del__")


def find(twin: nn.Module) -> dict[str, nn.Module]:
    """The modules that vLLM processes after loading, but for those that the layout runs itself (`runs_here`)."""
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer

    found: dict[int, nn.Module] = {}
    for module in twin.modules():
        if is_method(getattr(module, "quant_method", None)) and not runs_here(module):
            found[id(module)] = module
        elif is_deferred_attention_layer(module) and type(module) is not Attention:
            # It absorbs projections of its own, which must be whole when it is processed.
            found |= {id(m): m for m in module.modules() if m is not module and m._parameters}
            found[id(module)] = module
    return {n: m for n, m in twin.named_modules() if id(m) in found}


def runs_here(module: nn.Module) -> bool:
    """Whether this is an unquantised matrix, whose kernel `layout.py` chooses."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method, weight = getattr(module, "quant_method", None), module._parameters.get("weight")
    return (
        type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        and weight is not None
        and weight.ndim == 2
        and not getattr(module, "_cpu_skip_gemm_dispatch", False)
    )


def is_method(value: Any) -> bool:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    return isinstance(value, QuantizeMethodBase)


def is_structure(value: Any) -> bool:
    """Whether live and twin are compared attribute by attribute inside of this object."""
    if is_method(value):
        return not isinstance(value, nn.Module)  # of whatever package
    kind = type(value)
    if not kind.__module__.startswith("vllm.") or kind.__module__.startswith("vllm.config"):
        return False
    leaf = isinstance(value, (nn.Module, Enum, type, torch.Tensor, types.FunctionType))
    return hasattr(value, "__dict__") and not leaf


def unwrap_online_loaders(module: nn.Module) -> None:
    """Undo vLLM's wrapping for online quantisation, which would process a layer as soon as it is loaded."""
    from vllm.model_executor.model_loader.reload import layerwise

    info = layerwise.LAYERWISE_INFO.get(module)
    if info is not None and info.can_load():
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.weight_loader = layerwise._get_original_loader(parameter)  # type: ignore[attr-defined]
        info.reset()


def own(value: Any) -> Any:
    """A copy of what a layer changes in place: containers and small tensors."""
    if isinstance(value, (list, dict, set)):
        return value.copy()
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and 0 < value.numel() <= SMALL:
        return value.clone()
    return value


def same(a: Any, b: Any) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except (RuntimeError, ValueError, TypeError):  # of tensors, say
        return False


_thread = threading.local()
_default_dtype = torch.get_default_dtype


def _thread_default_dtype() -> torch.dtype:
    return getattr(_thread, "dtype", None) or _default_dtype()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set what `torch.get_default_dtype` says in this thread. torch's own setting is the process's."""
    torch.get_default_dtype = _thread_default_dtype
    _thread.dtype = dtype
    try:
        yield
    finally:
        _thread.dtype = None
