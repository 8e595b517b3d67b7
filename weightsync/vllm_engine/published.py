"""A published version as a staging reads it: views by rectangle, digested along the way, each byte once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
import xxhash

from weightsync.errors import DigestMismatch, NotFinite
from weightsync.format.fingerprint import Part, Words, grid, is_finite, rectangle, word_type
from weightsync.format.manifest import Schema
from weightsync.memory.receiver import SlotReader

from .placement import Box, Rect, matrix

Pace = Callable[[int], None]


class Published:
    """`pace` is called with the bytes about to be read. What is read before `finish` is trusted only after it.

    Bytes that are NaN or infinite raise NotFinite as they are read, unless `allow_non_finite`.
    """

    def __init__(self, reader: SlotReader, pace: Pace, *, allow_non_finite: bool = False) -> None:
        self._reader, self._pace = reader, pace
        self.allow_non_finite = allow_non_finite
        self._entries = reader.manifest.tensors
        self._hashers = {name: xxhash.xxh3_128() for name in self._entries}
        self._digested = dict.fromkeys(self._entries, 0)
        self._words: dict[str, Words] = {}

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

    def part(self, rect: Rect, total: int) -> Part:
        """`total` as the sum over the rectangle of the published tensor that `rect` takes."""
        entry, box = self._entries[rect.name], rect.source
        first = self.first_word(rect.name, box)
        end = first + box.cols * self._words_per_element(rect.name)
        return Part(*grid(entry.dtype, entry.shape), box.row, box.row + box.rows, first, end, total)

    def read(self, name: str, box: Box) -> None:
        """Digest the tensor up to the end of `box`, which is about to be used, unless that was done.

        Raises NotFinite.
        """
        entry = self._entries[name]
        end = (
            entry.nbytes
            if box.row + box.rows == matrix(entry.shape)[0]
            else (box.row + box.rows) * self.row_nbytes(name)
        )
        begin = self._digested[name]
        self._pace(max(end - begin, 0))
        if end > begin:
            with self._reader.buffer(name) as view, view[begin:end] as piece:
                self._hashers[name].update(piece)
                if not (self.allow_non_finite or is_finite(piece, entry.dtype)):
                    raise NotFinite(name, entry.dtype)
            self._digested[name] = end

    def cast(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A part of the tensor in the type that it is served in. Raises NotFinite where it overflows there."""
        cast = tensor.to(dtype)
        if cast is not tensor and not (self.allow_non_finite or bool(torch.isfinite(cast).all())):
            raise NotFinite(name, str(dtype).removeprefix("torch."))
        return cast

    def finish(self) -> None:
        """Digest what was not read, and compare. Raises DigestMismatch, NotFinite."""
        for name, entry in self._entries.items():
            self.read(name, self.whole(name))
            if (found := self._hashers[name].hexdigest()) != entry.digest:
                raise DigestMismatch(name, entry.digest, found)

    def _words_per_element(self, name: str) -> int:
        return math.ceil(self.dtype(name).itemsize / 2)
