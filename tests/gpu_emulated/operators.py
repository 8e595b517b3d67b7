"""torch's operators on the stand-in's tensors, computed on the CPU over the same memory.

Late (`standin.Settings`), an operator is queued on the current stream of its device, and its results have their memory
at once. It runs when a wait reaches it. Pageable memory is read when a copy is queued, pinned memory when it runs.
Nothing keeps the memory alive that queued work reads. Memory that torch gives back to its allocator is poisoned behind
the work of the stream that it was allocated on: other streams that still read there read rubbish.

While a stream is captured, an operator is queued into the graph, and computes with each replay.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # each process would import it with its first operator: here, before they fork
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu_emulated import kernels, standin

aten = torch.ops.aten
NATIVE = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten._local_scalar_dense.default, aten.detach.default, aten.alias.default,
    aten.set_.source_Tensor, aten.set_.source_Storage_storage_offset, aten.set_.source_Storage, aten.lift_fresh.default,
    aten.is_pinned.default, aten._pin_memory.default, aten._resize_output_.default,
    aten.is_same_size.default, aten.record_stream.default,
}  # fmt: skip
"""They compute nothing, or read one number, for which torch waits itself; so do those that change shapes in place."""
COPIES = {aten.copy_.default, aten._to_copy.default}
RESIZES = {aten.resize_, aten._resize_output_}
Call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

failures: list[BaseException] = []
"""Of work that was queued: the next wait raises them."""
_numbers = itertools.count(1)
_works: dict[int, Callable[[], None]] = {}
_captured: set[int] = set()
_watched: dict[int, Any] = {}  # what tells the stand-in that a storage is gone, by storage


class CaptureUnsupported(RuntimeError):
    """An operator needs values of the device while a graph is captured."""


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of one of the stand-in's device."""
    nbytes = tensor.untyped_storage().nbytes()
    if not nbytes:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * nbytes).from_address(tensor.untyped_storage().data_ptr())
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def everywhere() -> None:
    """Compute operators so in this thread, and in all that it or another one starts, until the process ends."""
    run = threading.Thread.run

    def emulated(self: threading.Thread) -> None:
        torch.autograd.set_multithreading_enabled(False)
        with Operators():
            run(self)

    threading.Thread.run = emulated  # type: ignore[method-assign]
    torch.autograd.set_multithreading_enabled(False)  # a backward pass in this thread, and not in one of torch's own
    Operators().__enter__()


class Operators(TorchDispatchMode):
    """Takes all operators that have a tensor or the name of the stand-in's device among their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._late = bool(standin.ask("late"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = _device_of(args, kwargs)
        if func.namespace == "c10d" and self._late:
            _wait(*_devices_of(args, kwargs))  # gloo reads at addresses, and not on a stream
        if (
            device is None
            or _is_view(func)
            or func.namespace not in ("aten", "prims")
            or _goes_to(func, kwargs, "meta")
        ):
            return func(*args, **kwargs)
        if func in NATIVE or torch.Tag.inplace_view in func.tags:
            return _native(func, args, kwargs)
        kernels.refuse_mixed(func, args, kwargs)
        if _goes_to(func, kwargs, "cpu") or (func is aten.copy_.default and not args[0].is_cuda):
            standin.copied_to_host(args[1].nbytes if func is aten.copy_.default else args[0].nbytes)
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing or self._late:
            try:
                return _queued(func, args, kwargs, device)
            except _NeedsValues as reason:
                if capturing:
                    raise CaptureUnsupported(f"{func} needs values of the device: {reason}") from None
            _wait(*_devices_of(args, kwargs))
        return _computed(func, args, kwargs, device)


class _NeedsValues(Exception):
    """The result of an operator cannot be said before it has run."""


def _native(func: Any, args: Any, kwargs: Any) -> Any:
    before = args[0].untyped_storage() if func.overloadpacket in RESIZES else None
    address = before.data_ptr() if before is not None else 0
    out = func(*args, **kwargs)
    if before is not None and before.data_ptr() != address and (watch := _watched.pop(before._cdata, None)):
        watch()
    for made in tree_leaves(out):
        if isinstance(made, torch.Tensor) and made.is_cuda:
            _watch(made)
    if func is aten._local_scalar_dense.default:
        _raise_failures()
    return out


def _computed(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Now, as nothing is queued."""
    given: dict[int, torch.Tensor] = {}
    kept = []

    def on_cpu(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.is_cuda:
            kept.append(alias(x))
            given[id(kept[-1])] = x
            return kept[-1]
        return _as_cpu(x)

    a, k = tree_map(on_cpu, (args, _unpinned(kwargs)))
    out = kernels.ON_CPU.get(func, func)(*a, **k)
    if _goes_to(func, kwargs, "cpu"):
        return out

    def back(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu" or any(x is y for y in args):
            return x
        if id(x) in given:
            return given[id(x)]
        made = _made(x, device)
        if x.numel():
            alias(made).copy_(x)
        return made

    return tree_map(back, out)


def _queued(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Queue the work of `func`. Returns the result that it will have. Raises _NeedsValues."""
    devices = _devices_of(args, kwargs)
    if len(devices) > 1 or _goes_to(func, kwargs, "cpu"):
        raise _NeedsValues("it copies to another device, or to memory of torch's own choice")
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves((args, kwargs))):
        raise _NeedsValues("an argument has no data")
    target = args[0] if args and isinstance(args[0], torch.Tensor) else None
    onto_host = func is aten.copy_.default and target is not None and not target.is_cuda
    waits = func in COPIES and not _is_non_blocking(args, kwargs) and any(not x.is_cuda for x in _tensors(args))
    if onto_host and not (target is not None and target.is_pinned()):
        raise _NeedsValues("a copy to pageable memory returns when it is done")
    result, outs = _foreseen(func, args, kwargs, device)
    spans: list[int] = []

    def on_cpu(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return _as_cpu(x)
        if x.is_cuda:
            spans.extend(_span(x))
            return alias(x)
        return x if x is target or x.is_pinned() else x.clone()

    a, k = tree_map(on_cpu, (args, _unpinned(kwargs)))
    targets = [on_cpu(x) for x in outs]

    def work() -> None:
        out = kernels.ON_CPU.get(func, func)(*a, **k)
        for place, found in zip(targets, tree_leaves(out) if targets else [], strict=True):
            if place.numel() and place.data_ptr() != found.data_ptr():
                place.copy_(found)

    _queue(work, device, spans)
    if waits:
        _wait(device)
    return result


def _foreseen(func: Any, args: Any, kwargs: Any, device: torch.device) -> tuple[Any, list[torch.Tensor]]:
    """The result of `func` with its memory, as torch's meta kernels say it, and its tensors. Raises _NeedsValues."""
    shadows: dict[int, torch.Tensor] = {}
    given: dict[int, torch.Tensor] = {}

    def shadow(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("meta")
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in shadows:
            shadows[id(x)] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            given[id(shadows[id(x)])] = x
        return shadows[id(x)]

    try:
        said = func(*tree_map(shadow, args), **tree_map(shadow, _unpinned(kwargs)))
    except Exception as reason:  # of a meta kernel: its shapes depend on values, or it has none
        raise _NeedsValues(str(reason)) from None
    leaves = tree_leaves(said) if said is not None else []  # None: of an operator that only writes
    if not all(isinstance(x, torch.Tensor) for x in leaves):
        raise _NeedsValues("its result is no tensor")
    if said is None:
        return None, []
    result = tree_map(lambda x: given[id(x)] if id(x) in given else _made(x, device), said)
    return result, tree_leaves(result)


# what is asked of arguments -------------------------------------------------------------------------------------------


def _devices_of(args: Any, kwargs: Any) -> list[torch.device]:
    found: dict[torch.device, None] = {}
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, torch.Tensor) and x.is_cuda:
            found[x.device] = None
        elif isinstance(x, torch.device) and x.type == "cuda":
            found[x if x.index is not None else torch.device("cuda", torch.cuda.current_device())] = None
    return list(found)


def _device_of(args: Any, kwargs: Any) -> torch.device | None:
    """Where the results lie, and on whose stream the work goes on."""
    if (said := kwargs.get("device")) is not None and (found := _devices_of((), {"device": torch.device(said)})):
        return found[0]
    return next(iter(_devices_of(args, kwargs)), None)


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _goes_to(func: Any, kwargs: Any, kind: str) -> bool:
    """Whether a copy is made in memory of torch's own choice on another kind of device."""
    device = kwargs.get("device")
    return func is aten._to_copy.default and device is not None and torch.device(device).type == kind


def _is_non_blocking(args: Any, kwargs: Any) -> bool:
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))


def _tensors(args: Any) -> list[torch.Tensor]:
    return [x for x in args if isinstance(x, torch.Tensor)]


def _unpinned(kwargs: Any) -> dict[str, Any]:
    return {**kwargs, **({"pin_memory": False} if "pin_memory" in kwargs else {})}


def _as_cpu(x: Any) -> Any:
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device("cpu")
    return None if isinstance(x, torch.Generator) else x


def _made(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    _watch(made)
    return made


def _span(x: torch.Tensor) -> list[int]:
    """[address, bytes] of all that its elements lie in."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return [x.data_ptr(), (last + 1) * x.element_size()] if x.numel() else []


# work that is queued, and memory that is given back -------------------------------------------------------------------


@Call
def _run(number: int) -> None:
    try:
        with _disable_current_modes():
            (_works[number] if number in _captured else _works.pop(number))()
    except BaseException as error:
        failures.append(error)


def _queue(work: Callable[[], None], device: torch.device, spans: list[int]) -> None:
    number = next(_numbers)
    _works[number] = work
    with _on(device):
        if torch.cuda.is_current_stream_capturing():
            _captured.add(number)
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        addresses = (ctypes.c_size_t * len(spans))(*spans)
        standin.library().standin_call(
            stream, _run, ctypes.c_void_p(number), addresses, ctypes.c_size_t(len(spans) // 2)
        )


def _wait(*devices: torch.device) -> None:
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    _raise_failures()


def _raise_failures() -> None:
    if failures:
        raise failures.pop()


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    before = torch.cuda.current_device()
    if before == device.index:
        yield
        return
    torch.cuda.set_device(device)
    try:
        yield
    finally:
        torch.cuda.set_device(before)


def _watch(tensor: torch.Tensor) -> None:
    """Tell the stand-in when torch gives its memory back. Memory allocated under a capture belongs to the graph."""
    storage = tensor.untyped_storage()
    if not storage.nbytes() or storage._cdata in _watched or torch.cuda.is_current_stream_capturing():
        return
    key, stream = storage._cdata, torch.cuda.current_stream(tensor.device).cuda_stream
    gone = weakref.finalize(storage, _gone, key, storage.data_ptr(), storage.nbytes(), stream, tensor.device.index)
    gone.atexit = False
    _watched[key] = gone


def _gone(key: int, address: int, nbytes: int, stream: int, device: int) -> None:
    _watched.pop(key, None)
    with _on(torch.device("cuda", device)):
        standin.library().standin_give_back(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))
