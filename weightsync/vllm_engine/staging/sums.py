"""Checksums of what was built, in terms of the words that were published; and how packed weights are read for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch

from weightsync.errors import TensorError, checksum_mismatch
from weightsync.format.fingerprint import Tile, TileSums, Words, add, device_rectangle, rectangle
from weightsync.format.manifest import TensorEntry
from weightsync.vllm_engine.model.layout import Entry, words_of
from weightsync.vllm_engine.model.linear import WORD
from weightsync.vllm_engine.model.placement import Box, Rect

DIGEST_COLS = 4096  # words in a row of what a digest is of
LOSSLESS = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}
Sum: TypeAlias = "int | torch.Tensor"  # on a device it stays there until the end: nothing waits for a piece


def compare(sums: TileSums, published: Mapping[str, TensorEntry]) -> None:
    """Where one worker holds all of a tensor it can tell which one is wrong. Raises TensorError."""
    for name, rows in sums.items():
        try:
            found = add(name, (Tile(*row) for row in rows))
        except TensorError as error:
            if error.code == "parts_mismatch":  # the rest is on other ranks: `fingerprint.combine` compares them
                continue
            raise
        if found != published[name].checksum:
            raise checksum_mismatch(name, published[name].checksum, found)


def crop(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A part of a matrix, in place."""
    return tensor[box.row : box.row + box.rows, box.col : box.col + box.cols]


def pieces(rect: Rect, row_nbytes: int, nbytes: int, lanes: int = 1) -> Iterator[Rect]:
    """`rect` in rows of some `nbytes`: whole blocks of `lanes` rows, then what is left."""
    step = max(lanes, nbytes // row_nbytes // lanes * lanes)
    whole = rect.target.rows // lanes * lanes
    for start in [*range(0, whole, step), *([whole] if whole < rect.target.rows else [])]:
        rows = min(step, (whole if start < whole else rect.target.rows) - start)
        target, source = (replace(box, row=box.row + start, rows=rows) for box in (rect.target, rect.source))
        yield Rect(target, source, rect.name)


def in_blocks(box: Box, entry: Entry) -> bool:
    """Whether `box` is made of whole blocks of the packed weight: whole rows, by `lanes` but for the last ones."""
    rows, cols = entry.shape
    by_blocks = box.row % entry.lanes == 0 and (box.rows % entry.lanes == 0 or box.row + box.rows == rows)
    return box.cols == cols and by_blocks


def packed_words(entry: Entry, box: Box, data: torch.Tensor) -> Words:
    """The blocks of a packed weight that hold `box`, in place: [blocks, words of a row, rows per block]."""
    row_nbytes = entry.nbytes // entry.shape[0]
    lanes = entry.lanes if box.rows % entry.lanes == 0 else box.rows
    begin = entry.offset + box.row * row_nbytes
    words: Words = (
        data[begin : begin + box.rows * row_nbytes].numpy().view(np.int32 if entry.word == WORD else np.int16)
    )
    return words.reshape(box.rows // lanes, row_nbytes // entry.word, lanes)


def unpacked(entry: Entry, data: torch.Tensor) -> torch.Tensor:
    """A packed weight (out, in) in its usual order; a copy."""
    rows, cols = entry.shape
    whole = rows // entry.lanes * entry.lanes
    boxes = [Box(0, 0, whole, cols), Box(whole, 0, rows - whole, cols)]
    packed = [packed_words(entry, box, data) for box in boxes if box.rows]
    blocks = [words.transpose(0, 2, 1).reshape(-1, words.shape[1]) for words in packed]
    return torch.from_numpy(np.ascontiguousarray(np.concatenate(blocks))).view(getattr(torch, entry.dtype))


def sum_of(tensor: torch.Tensor) -> Sum:
    """Over all words of a tensor, as rows of `DIGEST_COLS`."""
    words = words_of(tensor.contiguous().flatten()[None])[0]
    whole = words.numel() // DIGEST_COLS * DIGEST_COLS
    rows, rest = words[:whole].view(-1, DIGEST_COLS), words[whole:][None]
    total: Sum = sum_as(rows, rows.dtype, 0, 0) if rows.numel() else 0
    return total + sum_as(rest, rest.dtype, rows.shape[0], 0) if rest.numel() else total


def sum_as(view: torch.Tensor, dtype: torch.dtype, row: int, col: int) -> Sum:
    """The sum over the words that `view` has in `dtype`, the published type, which `view` is wider than or equal to."""
    if view.dtype is torch.float32 and dtype is torch.bfloat16:
        # By its halves, not by a cast, which would not keep a NaN's bits: the lower ones must be, and so add, zero.
        halves = [words_of(view)[:, 1::2], words_of(view)[:, ::2]]
    else:
        halves = [words_of(view if view.dtype is dtype else view.to(dtype))]
    total: Sum = 0
    for words in halves:
        if words.device.type != "cpu":
            total = total + device_rectangle(words, row, col)
        else:
            side_by_side = words.numpy() if words.stride(1) == 1 else np.ascontiguousarray(words.numpy())
            total = total + rectangle(side_by_side, row, col)
    return total
