"""Flips on an accelerator that copy no weights: other memory is mapped at the addresses of the live ones.

The live weights lie in a range of addresses that is reserved for them, and each version in physical memory of its own.
A commit unmaps what is behind the range and maps the memory of the other version there. Captured graphs keep their
addresses, and no byte moves, so the time does not depend on the size. HOTSWAP_DEVICE_FLIP=remap chooses this way
instead of the copies of cuda.py.

Moving in. When the worker has loaded its model, before the KV cache and the graphs, each storage of a parameter or
buffer moves into the range once, and every tensor over it is pointed there. Python's collector finds these tensors,
also views that a layer keeps for itself. A storage on the host, or one that something outside of Python holds as well,
stays where it is. It has its place in the range, too: what a version gives it lies there, and a commit copies it. A
version that would flip a tensor of which nothing was known then is refused, by its name. An address that a kernel took
down as a number before that is not noticed.

Arrangement. The memory of a version has the arrangement of the range, so the builder's layout is rearranged to it
(`Remap.arranged`). Bytes that versions do not fill belong to the model: a commit carries them from the memory that ran.

Sets. HOTSWAP_DEVICE_COPIES says how many versions lie on the device, 2 or 3, and the live one is among them: that is
one less in all than with copies. When a version is staged and no set is free, the one that was committed longest ago
moves to the host. A commit of a version that lies there exchanges its bytes with those of the live one.
"""

from __future__ import annotations

import gc
import inspect
import logging
import math
import os
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weightsync.vllm_engine.device.cuda import (
    ALIGN,
    PIECE_NBYTES,
    CopyGeneration,
    Cuda,
    DeviceBuffer,
    DevicePool,
)
from weightsync.vllm_engine.device.mapping import (
    FLIP_ENV,
    LARGEST_HANDLE,
    CudaDriver,
    Driver,
    Memory,
    Range,
    handle_sizes,
    remap_unavailable,
)
from weightsync.vllm_engine.device.pool import Notes
from weightsync.vllm_engine.device.room import COPIES_ENV, MOST_COPIES, UTILIZATION, Room
from weightsync.vllm_engine.model.layout import Layout, extent

log = logging.getLogger(__name__)

WAYS = ("copy", "remap")
FEWEST_SETS = 2  # the live version, and one to flip to
KINDS = ("_parameters", "_buffers", "_modules")
Span = tuple[int, int]  # bytes of the range: [begin, end)
Pair = tuple[torch.Tensor, torch.Tensor]  # live and staged


def flips_by_remapping(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether HOTSWAP_DEVICE_FLIP chooses this way. Raises ValueError."""
    way = environ.get(FLIP_ENV, WAYS[0])
    if way not in WAYS:
        raise ValueError(f"{FLIP_ENV}={way!r}: say {' or '.join(WAYS)}")
    return way == "remap"


def sets_that_fit(nbytes: int, room: Room, wanted: int | None = None, *, scratch: int = 0) -> int:
    """How many versions of `nbytes` lie on the device, with the live one. Raises EngineError."""
    if wanted is not None and wanted < FEWEST_SETS:
        raise remap_unavailable(f"{COPIES_ENV}={wanted} leaves no memory to flip to; say 2 or 3")
    sets = wanted or min(1 + room.copies(nbytes, scratch), MOST_COPIES)
    if sets < FEWEST_SETS:
        raise remap_unavailable("the weights take too much of the device for a second version; use more ranks")
    return sets


# moving in ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Home:
    """A storage of the running model, and its bytes in the range."""

    storage: torch.UntypedStorage
    begin: int

    @property
    def span(self) -> Span:
        return self.begin, self.begin + self.storage.nbytes()


def homes_of(model: torch.nn.Module) -> list[Home]:
    """One for each storage of its tensors, tightly packed."""
    found: dict[int, Home] = {}
    end = 0
    for tensor in tensors_of(model):
        storage = tensor.untyped_storage()
        if not tensor.is_meta and storage.nbytes() and storage._cdata not in found:
            found[storage._cdata] = Home(storage, end)
            end += math.ceil(storage.nbytes() / ALIGN) * ALIGN
    return list(found.values())


def tensors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, then buffers, then what layers keep besides: in lists, methods, closures and objects of vLLM's."""
    yield from model.parameters()
    yield from model.buffers()
    seen = set[int]()
    for module in model.modules():
        for key, value in vars(module).items():
            if key not in KINDS:
                yield from _inside(value, seen)


def _inside(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen or isinstance(value, (torch.nn.Module, type)):
        return
    seen.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        inside = value
    elif isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, types.MethodType):
        inside = [value.__self__]
    elif isinstance(value, types.FunctionType):
        inside = inspect.getclosurevars(value).nonlocals.values()
    elif type(value).__module__.startswith("vllm.") and not type(value).__module__.startswith("vllm.config"):
        inside = getattr(value, "__dict__", {}).values()
    for one in inside:
        yield from _inside(one, seen)


def move_in(homes: list[Home], data: torch.Tensor) -> tuple[list[Home], list[Home]]:
    """Copy storages into `data` and point all tensors over them there; returns those that moved, and those that stay.

    Something else than Python's tensors would go on with the old bytes: what that holds stays.
    """
    over: dict[int, list[torch.Tensor]] = {home.storage._cdata: [] for home in homes}
    alone = _holders(torch.empty(1, device=data.device).untyped_storage())
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for tensor in _tensors(data.device):
            if (found := over.get(tensor.untyped_storage()._cdata)) is not None:
                found.append(tensor)
        moved, stay = [], []
        for home in homes:
            if home.storage.device != data.device:
                stay.append(home)
                continue
            begin, end = home.span
            tensors = over.pop(home.storage._cdata)
            flat = torch.empty(0, dtype=torch.uint8, device=data.device)
            data[begin:end].copy_(flat.set_(home.storage, 0, (end - begin,), (1,)))
            del flat
            _point(tensors, data.untyped_storage(), begin)
            if _holders(home.storage) > alone:
                _point(tensors, home.storage, -begin)
                stay.append(home)
            else:
                moved.append(home)
    return moved, stay


def _tensors(device: torch.device) -> Iterator[torch.Tensor]:
    """All that Python knows there."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.layout is torch.strided and found.device == device:
            yield found


def _holders(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


def _point(tensors: list[torch.Tensor], storage: torch.UntypedStorage, nbytes: int) -> None:
    """Have them lie in `storage`, so many bytes further than now."""
    for tensor in tensors:
        offset = tensor.storage_offset() + nbytes // tensor.element_size()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = empty.set_(storage, offset, tensor.size(), tensor.stride())


# versions -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrangement:
    """Spans of the range with bytes that the layout of a version does not fill.

    `carried`: filled by no version; they belong to the model. `around`: between the elements of a tensor.
    `echoes`: (from, to) where a second running tensor gets the same contents.
    """

    carried: tuple[Span, ...] = ()
    around: tuple[Span, ...] = ()
    echoes: tuple[tuple[Span, Span], ...] = ()


@dataclass
class RemapBuffer(DeviceBuffer):
    """The memory of one version, arranged as the live range."""

    arrangement: Arrangement = field(default_factory=Arrangement)

    def seal(self, key: str, notes: Notes) -> None:
        for (begin, end), (first, last) in self.arrangement.echoes:
            self.data[first:last].copy_(self.data[begin:end])
        super().seal(key, notes)


class RemapGeneration(CopyGeneration):
    """A generation whose commit has its memory mapped at the addresses of the live weights."""

    def _copy(self) -> float:
        buffer = self.slot
        assert isinstance(buffer, RemapBuffer)
        assert isinstance(buffer.pool, RemapPool)
        self.waited_ms, took = buffer.pool.show(buffer)
        for live, staged in buffer.pool.strays(self.flips.tensors):
            live.data.copy_(staged)
        return took


class RemapPool(DevicePool):
    """The live range, and sets of memory for it: one of them is mapped there.

    Versions beyond the sets lie on the host. The caller of `show` holds `commits`.
    """

    def __init__(self, device: torch.device, driver: Driver, sizes: Sequence[int], sets: int) -> None:
        """Raises torch.OutOfMemoryError."""
        super().__init__(device, sets)
        self._driver, self._sizes = driver, sizes
        self._sets: dict[int, Memory] = {}  # by address
        self._shown = self._new_slab(0)
        self._slabs.append(self._shown)
        # Of an exchange, taken now: one that is refused when half of the bytes have changed places leaves torn weights.
        self._former = torch.empty(min(PIECE_NBYTES, sum(sizes)), dtype=torch.uint8, device=device)
        self.live = Range(driver, self._memory(self._shown))
        self.arrangement = Arrangement()  # of what is staged

    @property
    def _apart(self) -> int:
        """All of it: the memory of a set comes from the driver."""
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

    def _new_slab(self, _nbytes: int) -> torch.Tensor:
        memory = Memory(self._driver, self._sizes)
        self._sets[memory.data.data_ptr()] = memory
        return memory.data

    def vacate(self) -> None:
        """Give back all sets but the one that runs."""
        super().vacate()
        self._sets = {slab.data_ptr(): self._memory(slab) for slab in self._slabs}

    def _memory(self, slab: torch.Tensor) -> Memory:
        return self._sets[slab.data_ptr()]

    def _runs(self, slab: torch.Tensor) -> bool:
        return slab is self._shown

    def _new_buffer(self, data: torch.Tensor) -> DeviceBuffer:
        with self.commits:
            for begin, end in self.arrangement.around:
                data[begin:end].copy_(self._shown[begin:end])
        return RemapBuffer(data, self, arrangement=self.arrangement)

    def strays(self, tensors: list[Pair]) -> Iterator[Pair]:
        """Those whose live tensor did not move: their contents are copied."""
        within = self.live.data.untyped_storage()._cdata
        return ((live, staged) for live, staged in tensors if live.untyped_storage()._cdata != within)

    def show(self, buffer: RemapBuffer) -> tuple[float, float]:
        """Have the live weights be this version's; returns the ms that queued steps took, and those of the rest."""
        started = time.perf_counter()
        self._driver.wait()  # a step must not run on addresses that are taken away
        idle = time.perf_counter()
        if self._runs(buffer.data):
            return (idle - started) * 1e3, 0.0
        if not buffer.on_device:
            self._exchange(buffer)
        else:
            self._carry(self._shown, buffer)
            self._driver.wait()
            self.live.show(self._memory(buffer.data), self._memory(self._shown))
            self._shown = buffer.data
        return (idle - started) * 1e3, (time.perf_counter() - idle) * 1e3

    def _carry(self, source: torch.Tensor, buffer: RemapBuffer) -> None:
        for begin, end in buffer.arrangement.carried:
            buffer.data[begin:end].copy_(source[begin:end], non_blocking=True)

    def _exchange(self, buffer: RemapBuffer) -> None:
        """Swap the bytes of a version on the host with those of the live one, piece by piece and in place.

        If a copy raises, both are what they were: the pieces that have changed places change them again.
        """
        shown, host = self._shown, buffer.data
        self._carry(shown, buffer)
        done = []
        try:
            for piece in zip(*(data[: self.live.nbytes].split(PIECE_NBYTES) for data in (shown, host)), strict=True):
                self._exchange_piece(*piece)
                done.append(piece)
        except BaseException:
            for piece in done:
                self._exchange_piece(*piece)
            raise
        for other in self._held:
            if other.data is shown:
                other.move(host)
        buffer.move(shown)

    def _exchange_piece(self, live: torch.Tensor, host: torch.Tensor) -> None:
        former = self._former[: live.numel()].copy_(live)
        try:
            live.copy_(host, non_blocking=True)
            try:
                host.copy_(former)  # which waits for the device
            except BaseException:
                host.copy_(live)
                raise
        except BaseException:
            live.copy_(former)
            raise

    def measure_host(self) -> None:
        """Measure the copies of an exchange: from the host, and back."""
        super().measure_host()
        self.ms_per_byte |= {on: 2 * ms for on, ms in self.ms_per_byte.items() if not on}

    def measure(self) -> None:
        """Measure a flip, by one to the memory that is mapped now, before any step runs on the device."""
        memory, started = self._memory(self._shown), time.perf_counter()
        self._driver.wait()
        self.live.show(memory, memory)
        self.ms_per_byte[True] = (time.perf_counter() - started) * 1e3 / self.live.nbytes


class Remap(Cuda):
    """Versions in memory that is mapped at the addresses of the live weights when they are committed."""

    generation = RemapGeneration

    def __init__(
        self,
        device: torch.device,
        copies: int | None = None,
        *,
        share: float = UTILIZATION,
        kv_cache: int | None = None,
        driver: Driver | None = None,
        largest_handle: int = LARGEST_HANDLE,
    ) -> None:
        """`copies`: versions on the device, with the live one. Raises EngineError, ValueError."""
        super().__init__(device, copies, share=share, kv_cache=kv_cache)
        self._driver = driver if driver is not None else CudaDriver(device)
        self._largest_handle = largest_handle
        self._moved: list[Span] = []
        self._stay: dict[int, Home] = {}  # by storage
        self._mapped: RemapPool | None = None

    def reserve(self, model: torch.nn.Module) -> None:
        """Move the weights of `model` into the range, too. Raises EngineError."""
        homes = homes_of(model)
        nbytes = max((home.span[1] for home in homes), default=0)
        sizes = handle_sizes(max(nbytes, 1), self._driver.granularity, self._largest_handle)
        scratch = self._scratch_nbytes(model)
        sets = sets_that_fit(sum(sizes), self._room(nbytes), self._wanted, scratch=scratch)
        try:
            pool = RemapPool(self.device, self._driver, sizes, sets)
        except torch.OutOfMemoryError:
            raise remap_unavailable(f"{nbytes >> 20} MB of device memory are missing to move the weights to") from None
        moved, stay = move_in(homes, pool.live.data)
        self._driver.wait()
        self._moved = [home.span for home in moved]
        self._stay = {home.storage._cdata: home for home in stay}
        del homes, moved
        if self._stream is not None:
            torch.cuda.empty_cache()
            pool.scratch = self._take_scratch(scratch)
            pool.measure_host()
        pool.reserve(sum(sizes))
        if len(pool._slabs) < FEWEST_SETS:
            raise remap_unavailable("the device has no memory for a second version; take smaller weights or more ranks")
        pool.measure()
        self._pool = self._mapped = pool
        self._tell(nbytes)

    def arranged(self, layout: Layout, running: Mapping[str, Sequence[torch.Tensor]]) -> Layout:
        """`layout` as the live range is. Raises EngineError, by the name of a tensor that cannot flip so."""
        assert self._mapped is not None, "nothing was reserved"
        entries, views, owners = [], {}, dict[Span, str]()
        taken, around, echoes = list[Span](), list[Span](), list[tuple[Span, Span]]()
        for entry in layout.entries:
            alike = [t for t in running.get(entry.source, ()) if t.is_contiguous() and t.dtype is _dtype(entry.dtype)]
            if entry.packed or not alike or len(alike) < len(running[entry.source]):
                raise remap_unavailable(f"{entry.source!r} is not served as it is published; restart on this version")
            first, *others = (self._span(entry.source, tensor) for tensor in alike)
            if (owner := owners.setdefault(first, entry.source)) != entry.source:
                raise remap_unavailable(f"{owner!r} and {entry.source!r} are one tensor here; publish one of them")
            entries.append(replace(entry, offset=first[0]))
            echoes += [(first, other) for other in others if other != first]
            taken += [first, *others]
        for path, view in layout.views.items():
            (live,) = running[path]
            span = self._span(path, live) if live.numel() else (0, 0)
            views[path] = replace(view, offset=span[0])
            taken.append(span)
            around += [span] if live.nbytes < span[1] - span[0] else []
        self._mapped.arrangement = Arrangement(tuple(without(self._moved, taken)), tuple(around), tuple(echoes))
        return replace(layout, entries=tuple(entries), views=views, nbytes=self._mapped.live.nbytes)

    def _span(self, name: str, live: torch.Tensor) -> Span:
        """Where a version has what this tensor gets."""
        assert self._mapped is not None
        storage, (begin, end) = live.untyped_storage()._cdata, extent(live)
        if storage == self._mapped.live.data.untyped_storage()._cdata:
            return begin, end
        if (home := self._stay.get(storage)) is None:
            raise remap_unavailable(f"no layer held {name!r} when the model was loaded; take another kernel")
        return home.begin + begin, home.begin + end


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def without(spans: Iterable[Span], taken: Iterable[Span]) -> Iterator[Span]:
    """The parts of `spans` outside of `taken`, neighbours joined."""
    cuts = sorted(taken)
    joined: list[Span] = []
    for begin, end in sorted(spans):
        at = begin
        for first, last in [*(cut for cut in cuts if cut[0] < end and cut[1] > begin), (end, end)]:
            if first > at:
                near = joined and at - joined[-1][1] < ALIGN
                joined[-1:] = [(joined[-1][0], first)] if near else [*joined[-1:], (at, first)]
            at = max(at, last)
    yield from joined
