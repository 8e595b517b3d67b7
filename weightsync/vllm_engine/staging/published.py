"""A published slot as the builder reads it: views and words of rectangles, each byte digested once.

Bytes are digested, and looked through for values that are not finite, just before they are used, while they are in the
cache; or, where a device copies them itself, on threads beside. Bytes used before `finish` are trusted only after it.
Bytes of a slot of which this host has a part are digested chunk by chunk and compared at once: those that are not here
cannot be taken for the version's.
"""

from __future__ import annotations

import math
import threading
import warnings
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
import xxhash

from weightsync.errors import digest_mismatch, not_finite
from weightsync.format.fingerprint import Tile, Words, grid, is_finite, rectangle, word_type
from weightsync.format.manifest import Schema, digest_of, parts_of
from weightsync.memory.receiver import SlotReader
from weightsync.vllm_engine.device.generation import Pace
from weightsync.vllm_engine.model.placement import Box, Rect, matrix

LOOKED_NBYTES = 32 << 20  # by a thread beside at once: each call takes the interpreter's lock, which steps wait for
WAIT_S = 0.01


def all_finite(tensor: torch.Tensor) -> bool:
    """torch knows no `isfinite` of float8."""
    return bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())


class Published:
    """`pace` is called with the bytes about to be read. Bytes read before `finish` are trusted only after it.

    Bytes that are NaN or infinite raise TensorError as they are read, unless `allow_non_finite`. `share`: (index, of
    how many): workers on one host look at every so many-th tensor each, as an instance stages a version only if all do.
    Of a part of a slot each worker looks at all that it reads itself, and nobody at the rest.

    `threads`: how many look at whole slots, from now on; 0: the one that calls `read` does. They end with the context.
    """

    def __init__(
        self,
        reader: SlotReader,
        pace: Pace,
        *,
        allow_non_finite: bool = False,
        share: tuple[int, int] = (0, 1),
        threads: int = 0,
    ) -> None:
        self._reader, self._pace = reader, pace
        self.allow_non_finite = allow_non_finite
        self._entries = reader.manifest.tensors
        index, shares = share
        self.is_part = reader.is_part
        self._parts = parts_of(reader.manifest) if self.is_part else {}
        mine = () if self.is_part else (n for i, n in enumerate(self._entries) if i % shares == index)
        self._hashers = {name: xxhash.xxh3_128() for name in mine}
        self._digested = dict.fromkeys(self._entries, 0)
        self._words: dict[str, Words] = {}
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(threads, "hotswap-digests") if threads and self._hashers else None
        self._looked: list[Future[None]] = []
        if self._pool is not None:
            self._looked = [self._pool.submit(self._look, name) for name in self._hashers]

    def __enter__(self) -> Published:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def schema(self) -> Schema:
        return self._reader.manifest.schema

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in the published slot itself; not to be written to."""
        entry = self._entries[name]
        dtype = getattr(torch, entry.dtype)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the mapping is read-only
            return torch.frombuffer(self._reader.buffer(name), dtype=dtype).view(entry.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.tensor(name) for name in self._entries}

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._entries[name].dtype)
        return dtype

    def row_nbytes(self, name: str) -> int:
        entry = self._entries[name]
        return max(1, entry.nbytes // max(1, matrix(entry.shape)[0]))

    def whole(self, name: str) -> Box:
        return Box(0, 0, *matrix(self._entries[name].shape))

    def words(self, name: str, box: Box) -> Words:
        """The 16-bit words (uint8 for types of 1 byte) of a rectangle, in place."""
        if name not in self._words:
            entry = self._entries[name]
            flat = np.frombuffer(self._reader.buffer(name), word_type(entry.dtype))
            self._words[name] = flat.reshape(grid(entry.dtype, entry.shape))
        first, wide = self.first_word(name, box), self._words_per_element(name)
        return self._words[name][box.row : box.row + box.rows, first : first + box.cols * wide]

    def first_word(self, name: str, box: Box) -> int:
        return box.col * self._words_per_element(name)

    def sum(self, rect: Rect) -> int:
        """Of the published bytes themselves."""
        return rectangle(self.words(rect.name, rect.source), rect.source.row, self.first_word(rect.name, rect.source))

    def part(self, rect: Rect, total: int) -> Tile:
        """`total` as the sum over the rectangle of the published tensor that `rect` takes."""
        entry, box = self._entries[rect.name], rect.source
        first = self.first_word(rect.name, box)
        end = first + box.cols * self._words_per_element(rect.name)
        return Tile(*grid(entry.dtype, entry.shape), box.row, box.row + box.rows, first, end, total)

    def read(self, name: str, box: Box) -> None:
        """Digest the tensor up to the end of `box`, which is about to be used, unless that was done. Of a part of a
        slot only the chunks that have the rows of `box` are.

        Raises TensorError.
        """
        entry = self._entries[name]
        end = (
            entry.nbytes
            if box.row + box.rows == matrix(entry.shape)[0]
            else (box.row + box.rows) * self.row_nbytes(name)
        )
        if self.is_part:
            return self._read_parts(name, box.row * self.row_nbytes(name), end)
        begin = self._digested[name]
        self._pace(max(end - begin, 0))
        if end > begin and name in self._hashers and self._pool is None:
            self._digest(name, begin, end)
        self._digested[name] = max(begin, end)
        return None

    def pause(self) -> None:
        """Between two pieces of work in which nothing is read."""
        self._pace(0)

    def _digest(self, name: str, begin: int, end: int) -> None:
        dtype = self._entries[name].dtype
        with self._reader.buffer(name) as view, view[begin:end] as piece:
            self._hashers[name].update(piece)
            if not (self.allow_non_finite or is_finite(piece, dtype)):
                raise not_finite(name, dtype)

    def _look(self, name: str) -> None:
        """Digest a tensor, on a thread beside."""
        for begin in range(0, nbytes := self._entries[name].nbytes, LOOKED_NBYTES):
            if self._ended.is_set():
                return
            self._digest(name, begin, min(begin + LOOKED_NBYTES, nbytes))

    def _read_parts(self, name: str, begin: int, end: int) -> None:
        """Digest the chunks that have the bytes [begin, end) of a tensor, and forget that they were to be."""
        entry, left = self._entries[name], []
        for start, stop, digest in self._parts[name]:
            if stop <= begin or start >= end:
                left.append((start, stop, digest))
                continue
            self._pace(stop - start)
            with self._reader.buffer(name) as view, view[start:stop] as piece:
                if (found := digest_of(piece)) != digest:
                    raise digest_mismatch(name, digest, found)
                if not (self.allow_non_finite or is_finite(piece, entry.dtype)):
                    raise not_finite(name, entry.dtype)
        self._parts[name] = left

    def cast(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A part of the tensor in the type that it is served in. Raises TensorError where it overflows there."""
        cast = tensor.to(dtype)
        if cast is not tensor and not (self.allow_non_finite or all_finite(cast)):
            raise not_finite(name, str(dtype).removeprefix("torch."))
        return cast

    def finish(self) -> None:
        """Digest what was not read, and compare. Raises TensorError."""
        for looked in self._looked:
            while not looked.done():
                self.pause()  # the staging may have been cancelled
                wait([looked], WAIT_S)
            looked.result()
        for name, hasher in self._hashers.items():
            self.read(name, self.whole(name))
            if (found := hasher.hexdigest()) != (expected := self._entries[name].digest):
                raise digest_mismatch(name, expected, found)

    def _words_per_element(self, name: str) -> int:
        return math.ceil(self.dtype(name).itemsize / 2)
