"""Staging on an accelerator: a version waits in a buffer on the device, and a commit copies it into the live weights.

Captured graphs hold the addresses of the live weights, so their contents change and nothing is replaced. A commit is
one way: buffers of staged versions never change, so a rollback copies the buffer of the version before, and a flip that
failed halfway is undone by copying the old one again.

Device memory. The buffers are taken when the worker has loaded its model, before vLLM gives the rest to the KV cache.
HOTSWAP_DEVICE_COPIES says how many versions they hold, from 0 to 3 (live, previous, staged); left out, as many as leave
the KV cache its room (room.py) in the part of the device that the instance was given. A buffer that cannot be
had is asked for again at each staging. A version without a buffer there waits in pinned host memory, which is taken
when the first version is staged. When one is staged and no buffer is free, the version that was committed longest ago
moves to the host. So with one buffer every commit is a copy on the device, and a rollback one from the host; with none
both come from the host.

A staging needs memory on the device besides, for its checksums and for a layer while vLLM processes it. It is taken
together with the buffers, in a pool of its own: torch gives back what it keeps elsewhere whenever vLLM measures.

The way there. The device reads published bytes out of the slot itself, in pieces and on a stream of its own, so that
steps and copies do not wait for each other; threads beside digest them meanwhile. Bytes that the device cannot read so
(columns of a matrix, other types, slots that are not pinned) go through a ring of pinned memory. The model's twin has
no memory on the device: it is made on the host, where memory that is never touched is not taken.

All of this runs on a CPU, too, but for streams, events and pinning: the tests drive it there.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightsync.format.fingerprint import Words, device_rectangle
from weightsync.memory.pinned import PinnedMap, PinnedMaps, pinned
from weightsync.memory.receiver import SlotReader
from weightsync.vllm_engine.device.generation import Flips, Generation, Memory
from weightsync.vllm_engine.device.pacing import Staging, Unpaced
from weightsync.vllm_engine.device.pool import Notes
from weightsync.vllm_engine.device.room import COPIES_ENV, MOST_COPIES, SCRATCH, UTILIZATION, Room, wanted_copies
from weightsync.vllm_engine.model.layout import Layout, words_of
from weightsync.vllm_engine.model.placement import layer_of
from weightsync.vllm_engine.model.processing import find

log = logging.getLogger(__name__)

PIECE_NBYTES = 32 << 20
PIECES = 4  # of the ring: one is filled while others are under way
MOST_DIGESTING = 16  # threads
ALIGN = 256
ROW_NBYTES = 8192  # of the words that are summed to try the checksums
SUM_NBYTES = 6 * PIECE_NBYTES  # what sums of a piece take at most: by torch, where Triton does not
SPARE = 32  # a buffer leaves a 32nd of the device to whatever else wants memory: cuBLAS, graphs, steps


@dataclass
class DeviceBuffer:
    """Stands in for a layout slot: uint8 [nbytes] on the device, or on the host, owned by one worker."""

    data: torch.Tensor
    pool: DevicePool
    built: bool = False
    notes: Notes = field(default_factory=Notes)
    committed: int = 0  # when, in the pool's count; 0: never
    generation: weakref.ref[CopyGeneration] | None = None

    @property
    def on_device(self) -> bool:
        return self.pool.is_slab(self.data)

    def move(self, data: torch.Tensor) -> None:
        """Have the version lie in `data`, which holds the same bytes."""
        generation = self.generation() if self.generation is not None else None
        if generation is not None:
            generation.move(data)
        self.data = data

    def seal(self, _key: str, _notes: Notes) -> None:
        """Its copies may be on their way: a version is offered when its staging has ended, which waits for them."""
        self.built = True

    def release(self) -> None:
        self.pool.give_back(self)


class CopyGeneration(Generation):
    """A generation whose commit copies its contents into the live tensors, whose addresses stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.slot, DeviceBuffer):
            self.slot.generation = weakref.ref(self)

    def commit(self) -> list[Any]:
        """Returns when the device is through: only then is it known whether the copies went well.

        Steps that were queued before run first, on the weights before, and steps queued from now on find the new ones.
        """
        buffer = self.slot if isinstance(self.slot, DeviceBuffer) else None
        with buffer.pool.commits if buffer is not None else contextlib.nullcontext():
            on_device = buffer is not None and buffer.on_device
            took = self._copy()
            replaced = self._change()
        if buffer is not None:
            buffer.committed = buffer.pool.count()
            if took:
                buffer.pool.ms_per_byte[on_device] = took / max(1, buffer.data.numel())
        return replaced

    def _copy(self) -> float:
        """Returns how long the copies took, in ms."""
        if not self.flips.tensors:
            return 0.0
        started = time.perf_counter()
        lives, staged = zip(*self.flips.tensors, strict=True)
        device = lives[0].device
        begin = _mark(device) if device.type == "cuda" else None
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            torch._foreach_copy_([live.data for live in lives], list(staged), non_blocking=True)
        if begin is None:
            return (time.perf_counter() - started) * 1e3
        end = _mark(device)
        end.synchronize()
        took = begin.elapsed_time(end)
        self.waited_ms = max(0.0, (time.perf_counter() - started) * 1e3 - took)
        return took

    def move(self, data: torch.Tensor) -> None:
        """Have the staged tensors lie in `data`, which holds the same bytes."""
        tensors = [(live, _in(data, staged)) for live, staged in self.flips.tensors]
        self.flips = Flips(tensors, self.flips.changes)


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _in(data: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """`view` of another memory, as a view of `data`."""
    empty = torch.empty(0, dtype=view.dtype, device=data.device)
    return empty.set_(data.untyped_storage(), view.storage_offset(), view.size(), view.stride())


class DevicePool:
    """Buffers for `copies` versions on the device, all of one size, and for others on the host.

    One thread stages and gives buffers back, another one commits.
    """

    def __init__(self, device: torch.device, copies: int) -> None:
        self._device, self._copies = device, copies
        self._slabs: list[torch.Tensor] = []
        self._spare: list[torch.Tensor] = []  # on the host
        self._held: list[DeviceBuffer] = []
        self._counter = itertools.count(1)
        self._lacking = False
        self.scratch = 0  # bytes that torch keeps for what is built on the device
        self.commits = threading.Lock()  # held by a commit, and while a version changes its memory
        self.ms_per_byte: dict[bool, float] = {}  # of copies onto the live weights, from the device (True) or the host

    def count(self) -> int:
        return next(self._counter)

    def is_slab(self, data: torch.Tensor) -> bool:
        return any(data is slab for slab in self._slabs)

    @property
    def _free(self) -> list[torch.Tensor]:
        """The slabs in which no version lies."""
        taken = [buffer.data for buffer in self._held]
        return [s for s in self._slabs if not (self._runs(s) or any(s is data for data in taken))]

    def _runs(self, _slab: torch.Tensor) -> bool:
        """Whether the live weights lie in it: never, they are copies of what does."""
        return False

    @property
    def _apart(self) -> int:
        """Of what torch keeps, the bytes that no slab can lie in."""
        return self.scratch

    def _new_slab(self, nbytes: int) -> torch.Tensor:
        """Raises torch.OutOfMemoryError."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _new_buffer(self, data: torch.Tensor) -> DeviceBuffer:
        return DeviceBuffer(data, self)

    def reserve(self, nbytes: int) -> None:
        """Take the memory for the copies, in buffers of at least `nbytes`; what cannot be had is left to the host."""
        small = [slab for slab in self._free if slab.numel() < nbytes]
        self._slabs = [slab for slab in self._slabs if not any(slab is s for s in small)]
        del small
        lacked, self._lacking = self._lacking, False
        while len(self._slabs) < self._copies and not self._lacking:
            try:
                require_memory(self._device, nbytes, self._apart)
                self._slabs.append(self._new_slab(nbytes))
            except torch.OutOfMemoryError:
                self._lacking = True
        if self._lacking and not lacked:
            log.warning(
                "the device has no %d MB for another copy of the weights: versions wait in host memory, and commits "
                "take longer, until it has. Lower --gpu-memory-utilization, or set %s",
                nbytes >> 20,
                COPIES_ENV,
            )

    @property
    def size(self) -> int:
        """How many versions have room on the device."""
        return len(self._slabs)

    def measure_host(self) -> None:
        """Measure copies from the host, before any step runs on the device. Their time stays unknown where there is no
        memory left to copy to."""
        with contextlib.suppress(torch.OutOfMemoryError):
            require_memory(self._device, PIECES * PIECE_NBYTES)
            self.ms_per_byte[False] = ms_per_byte_from_host(self._device)

    def measure(self) -> None:
        """Measure copies on the device, before any step runs on it."""
        if self._slabs:
            self.ms_per_byte[True] = ms_per_byte_on_device(self._slabs[0])

    def acquire(self, nbytes: int) -> DeviceBuffer:
        """A buffer to stage in: on the device if one of `copies` can be had there."""
        self.reserve(nbytes)
        if not self._held:
            self._take_host(nbytes)
        if not any(slab.numel() >= nbytes for slab in self._free):
            self._move_one_to_host()
        large = next((slab for slab in self._free if slab.numel() >= nbytes), None)
        buffer = self._new_buffer(large if large is not None else self._on_host(nbytes))
        self._held.append(buffer)
        return buffer

    def _take_host(self, nbytes: int) -> None:
        """Take the host memory of the versions that have no slab before the first version, while no request is served:
        the driver pins 16 GB in one call of 1.4 s, and no step is launched meanwhile."""
        nbytes = max([nbytes, *(slab.numel() for slab in self._slabs)])
        self._spare = [spare for spare in self._spare if spare.numel() >= nbytes]
        while len(self._spare) < MOST_COPIES - len(self._slabs):
            self._spare.append(on_host(nbytes, self._device))

    def give_back(self, buffer: DeviceBuffer) -> None:
        if not any(buffer is held for held in self._held):
            return
        self._held = [held for held in self._held if held is not buffer]
        if not buffer.on_device:
            self._spare.append(buffer.data)
        buffer.data = buffer.data.new_empty(0)

    def vacate(self) -> None:
        """Give all device memory back; versions that are held move to the host. `reserve` takes it again."""
        self.scratch = 0
        for buffer in self._held:
            if buffer.on_device:
                self._to_host(buffer)
        self._slabs = [slab for slab in self._slabs if self._runs(slab)]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _move_one_to_host(self) -> None:
        committed = [b for b in self._held if b.on_device and b.committed and not self._runs(b.data)]
        if committed:
            self._to_host(min(committed, key=lambda buffer: buffer.committed))

    def _to_host(self, buffer: DeviceBuffer) -> None:
        slab = buffer.data
        if self._runs(slab):
            return
        host = self._on_host(slab.numel())
        for begin in range(0, slab.numel(), PIECE_NBYTES):  # the tokens of a step pass between two of them
            piece = slab[begin : begin + PIECE_NBYTES]
            host[begin : begin + piece.numel()].copy_(piece)  # `host` may be larger; this waits for the device
        with self.commits:
            if self._runs(slab):  # a rollback committed it meanwhile
                self._spare.append(host)
            else:
                buffer.move(host)

    def _on_host(self, nbytes: int) -> torch.Tensor:
        for index, spare in enumerate(self._spare):
            if spare.numel() >= nbytes:
                return self._spare.pop(index)
        self._spare.clear()
        return on_host(nbytes, self._device)


def require_memory(device: torch.device, nbytes: int, apart: int = 0) -> None:
    """Raises torch.OutOfMemoryError where the device cannot spare so much. `apart`: of what torch keeps, the bytes that
    are for something else.

    Torch is not asked: before it gives up it returns all that it has kept, and the steps ask the driver again.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    kept = max(0, torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - apart)
    if free + kept - nbytes < total // SPARE:
        raise torch.OutOfMemoryError(f"{nbytes >> 20} MB are asked of {free >> 20} MB that are free")


def on_host(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] in pinned memory, or in any where that is refused."""
    data, status = pinned(nbytes, device)
    if status:
        log.warning("%d MB of host memory cannot be pinned (see `ulimit -l`): copies are slower", nbytes >> 20)
    return data


class Ring:
    """Pinned memory through which bytes go to the device, `PIECES` pieces under way at once."""

    def __init__(self, device: torch.device, nbytes: int = PIECE_NBYTES) -> None:
        self._device, self._nbytes = device, nbytes
        self._pieces: list[torch.Tensor] = []
        self._done: list[torch.cuda.Event | None] = [None] * PIECES
        self._next = 0

    def copy(self, target: torch.Tensor, source: Words) -> None:
        """Queue a copy of words on the host, [rows, cols], onto a matrix of as many on the device.

        `source` may change as soon as this returns.
        """
        words = words_of(target)
        rows = max(1, self._nbytes // max(1, words.shape[1] * words.element_size()))
        cols = max(1, self._nbytes // words.element_size())
        for row in range(0, words.shape[0], rows):
            for col in range(0, words.shape[1], cols):
                self._copy(words[row : row + rows, col : col + cols], source[row : row + rows, col : col + cols])

    def _copy(self, target: torch.Tensor, source: Words) -> None:
        if not self._pieces:
            whole = on_host(PIECES * self._nbytes, self._device)
            self._pieces = [whole[i * self._nbytes : (i + 1) * self._nbytes] for i in range(PIECES)]
        index, self._next = self._next, (self._next + 1) % PIECES
        if (done := self._done[index]) is not None:
            done.synchronize()
        staged = self._pieces[index][: source.nbytes].view(target.dtype).view(target.shape)
        np.copyto(staged.numpy(), source)
        target.copy_(staged, non_blocking=True)
        if self._device.type == "cuda":
            done = self._done[index] or torch.cuda.Event(blocking=True)
            done.record(torch.cuda.current_stream(self._device))
            self._done[index] = done


class Cuda:
    """Buffers on the device, and commits that copy contents."""

    twin = torch.device("cpu")
    piece_nbytes = PIECE_NBYTES
    generation: type[CopyGeneration] = CopyGeneration

    @property
    def digesting_threads(self) -> int:
        """Half of the cores: a thread digests 3 GB in a second, and the device reads 50."""
        return max(1, min(MOST_DIGESTING, (os.cpu_count() or 1) // 2))

    def __init__(
        self,
        device: torch.device,
        copies: int | None = None,
        *,
        share: float = UTILIZATION,
        kv_cache: int | None = None,
    ) -> None:
        """`copies`: versions that lie on the device. `share`: the part of the device that the instance was given;
        `kv_cache`: the bytes of it that its KV cache is to have, None: whatever is left.

        Raises ValueError.
        """
        self.device, self._share, self._kv_cache = device, share, kv_cache
        self.replaces = device.type == "cpu"  # captured graphs hold addresses and scalars; there are none on a CPU
        self._wanted = copies if copies is not None else wanted_copies()
        self._pool: DevicePool | None = None
        self._ring = Ring(device)
        self._maps = PinnedMaps(device)
        self._slot: PinnedMap | None = None
        self._stream: torch.cuda.Stream | None = None
        self._scratch: torch.cuda.MemPool | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def pacer(self, _model: torch.nn.Module, _staging: Staging) -> Unpaced:
        """Copies on a stream of their own leave the steps alone."""
        return Unpaced()

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        """On a stream of its own; however a staging ends, no work of it is left there."""
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                if self._stream is not None:
                    self._stream.synchronize()

    @contextlib.contextmanager
    def reading(self, reader: SlotReader) -> Iterator[None]:
        """The device reads the slot itself, if it takes that memory."""
        self._slot = None if reader.is_part else self._maps.of(reader.mapping)  # pinning would fill what is not there
        try:
            yield
        finally:
            self._slot = None
            if self._stream is not None:
                self._stream.synchronize()

    @contextlib.contextmanager
    def scratch(self) -> Iterator[None]:
        """Tensors that are made on the device meanwhile lie in the memory that was taken for them."""
        if self._stream is None:
            yield
            return
        if self._scratch is None:
            self._scratch = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._scratch, self.device):
            yield

    @property
    def copies(self) -> int:
        """Versions that lie on the device now, or have room there."""
        return self._pool.size if self._pool is not None else 0

    def reserve(self, model: torch.nn.Module) -> None:
        nbytes = storage_nbytes(model)
        copies = self._wanted
        if copies is None:
            copies = self._room(nbytes).copies(nbytes, self._scratch_nbytes(model))
        self._pool = DevicePool(self.device, copies)
        if self._stream is not None:
            self._pool.scratch = self._take_scratch(self._scratch_nbytes(model))
            self._pool.measure_host()
        self._pool.reserve(nbytes)
        if self._stream is not None:
            self._pool.measure()
        self._tell(nbytes)

    def _tell(self, nbytes: int) -> None:
        """Write it into this process's log, whatever level vLLM gives its loggers."""
        if self._stream is not None:
            say = f"hotswap: {self.copies} versions of {nbytes >> 20} MB have room on {self.device} for swaps"
            print(say, file=sys.stderr, flush=True)

    def _room(self, nbytes: int) -> Room:
        """For weights of `nbytes`, which are there, and the rest."""
        if self._stream is None:
            return Room(0)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return Room.of(total, free, nbytes, utilization=self._share, kv_cache=self._kv_cache)

    def _scratch_nbytes(self, model: torch.nn.Module) -> int:
        return scratch_nbytes(model) if self._stream is not None else 0

    def _take_scratch(self, nbytes: int) -> int:
        """Have it on the device, with the tables and the kernel of checksums, before the KV cache takes what is left.

        It stays in its pool when it is free again. Returns what torch keeps there, in bytes.
        """
        before = torch.cuda.memory_reserved(self.device)
        try:
            with self.staging(), self.scratch():
                require_memory(self.device, nbytes)
                layer = torch.empty(
                    nbytes, dtype=torch.uint8, device=self.device
                )  # is there while its pieces are summed
                piece = torch.zeros(PIECE_NBYTES // ROW_NBYTES, ROW_NBYTES // 2, dtype=torch.int16, device=self.device)
                device_rectangle(piece)
                del layer, piece
        except torch.OutOfMemoryError:
            log.warning(
                "the device has no %d MB for what a staging makes there: it may be refused beside running steps. Lower "
                "--gpu-memory-utilization",
                (nbytes + SUM_NBYTES) >> 20,
            )
        return torch.cuda.memory_reserved(self.device) - before

    def arranged(self, layout: Layout, _running: Mapping[str, Sequence[torch.Tensor]]) -> Layout:
        """As it is: what is copied may lie anywhere."""
        return layout

    def acquire(self, _directory: Path, layout: Layout, _key: str) -> Memory:
        if self._pool is None:
            self._pool = DevicePool(self.device, self._wanted or 0)
        return self._pool.acquire(layout.nbytes)

    def prepare_swaps(self) -> None:
        """Nothing: the buffers are there."""

    def copy(self, target: torch.Tensor, source: Words) -> None:
        if target.device != self.device:
            np.copyto(words_of(target).numpy(), source)
        elif self._slot is None or not self._slot.copy(target, source):
            self._ring.copy(target, source)

    def expected_flip_ms(self, memory: Memory) -> float | None:
        assert isinstance(memory, DeviceBuffer)
        rate = memory.pool.ms_per_byte.get(memory.on_device)
        return rate * memory.data.numel() if rate is not None else None

    def vacate(self) -> None:
        """Give the device memory back, and the ring; the next staging takes them again."""
        self._scratch = None
        if self._pool is not None:
            self._pool.vacate()
        self._ring = Ring(self.device)


def ms_per_byte_from_host(device: torch.device) -> float:
    """Of a copy out of pinned memory, measured now. Raises torch.OutOfMemoryError."""
    host = on_host(PIECES * PIECE_NBYTES, device)
    return _ms_per_byte(host, torch.empty_like(host, device=device))


def ms_per_byte_on_device(data: torch.Tensor) -> float:
    """Of a copy from one half of `data`, on the device, to the other one, measured now."""
    half = max(1, data.numel() // 2)
    return _ms_per_byte(data[:half], data[-half:])


def _ms_per_byte(source: torch.Tensor, target: torch.Tensor) -> float:
    times = []
    for _ in range(3):  # the first one is slower
        begin = _mark(target.device)
        target.copy_(source, non_blocking=True)
        end = _mark(target.device)
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times) / source.numel()


def scratch_nbytes(model: torch.nn.Module) -> int:
    """The bytes that the largest of the layers that vLLM processes takes while it is staged."""
    layers: dict[str, int] = {}
    for name, module in find(model).items():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        nbytes = sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)
        layers[layer_of(name)] = layers.get(layer_of(name), 0) + nbytes
    return SCRATCH * max(layers.values(), default=0)


def storage_nbytes(model: torch.nn.Module) -> int:
    """The bytes that parameters and buffers take, tied ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
    return sum(-(-nbytes // ALIGN) * ALIGN for nbytes in storages.values())
