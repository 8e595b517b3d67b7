"""Time by phase, tokens per second, and the share of the hardware's arithmetic that training uses (MFU).

Model FLOPs utilisation, after PaLM (arXiv 2204.02311, appendix B): a trained token costs 6 N + 12 L H Q T operations,
for N weights (the input embedding is a look-up and counts only where it is the output layer too), L layers, H heads
of size Q, and T tokens in its sequence; where weights are frozen under an adapter 4 N in place of 6 N, for want of
their gradients. Operations that a recomputed activation repeats do not count, nor does padding.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from trainer.batch import MASK, Fields
from trainer.faults.heartbeat import progress
from trainer.megatron.hf_config import ModelShape

# Dense bf16 operations a second as the vendors publish them, by words of the device's name; the first that fits.
PEAKS: Mapping[str, float] = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "MI300X": 1307e12,
}
_EDGE, _ROUNDS = 1024, 3  # of the matrix product that stands for a peak nobody published


def flops_per_token(shape: ModelShape, length: float, *, frozen: bool = False) -> float:
    """Operations of forward and backward, for a token in a sequence of `length` tokens. Of a mixture of experts the
    active weights count. `frozen`: an adapter is trained in place of the weights."""
    looked_up = 0 if shape.tied else shape.vocab * shape.hidden
    idle = (shape.experts - shape.experts_per_token) * 3 * shape.hidden * shape.expert_ffn * shape.layers
    attention = 12 * shape.layers * shape.heads * shape.head_dim * length
    return (4.0 if frozen else 6.0) * (shape.parameters - looked_up - idle) + attention


@cache
def peak_flops() -> float:
    """Operations a second of this rank's device: the published bf16 figure of a GPU; of a CPU, or a GPU that is not
    listed, what a matrix product reaches now, on as many threads as torch may use."""
    published = published_peak(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return published or _measured()


def published_peak(name: str) -> float | None:
    """The peak of the GPU of that name. Whole words: an L40 is no L4, an A1000 no A100."""
    return next((peak for words, peak in PEAKS.items() if re.search(rf"\b{words}\b", name)), None)


def _measured() -> float:
    """Operations a second of a matrix product. On a CPU by the processor's own time: whoever else uses the machine does
    not lower it."""
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.process_time
    matrix, best = torch.ones(_EDGE, _EDGE, device="cuda" if on_gpu else "cpu"), float("inf")
    for _ in range(_ROUNDS):
        began = clock()
        total = (matrix @ matrix)[0, 0].item()  # reading a number waits for the device
        best = min(best, clock() - began)
        assert total == _EDGE
    return 2.0 * _EDGE**3 / best * (1 if on_gpu else torch.get_num_threads())


def lengths(fields: Fields) -> torch.Tensor:
    """Tokens of every sequence of a step, padding left out: of packed rows by segment, else up to a row's last trained
    token. float64 [number of sequences]."""
    if "segments" not in fields:
        mask_BT = fields[MASK] > 0
        places_T = torch.arange(1, mask_BT.shape[1] + 1, device=mask_BT.device)
        ends_B = (mask_BT * places_T).amax(1)
        return (ends_B + 1)[ends_B > 0].double()
    segments_BT = fields["segments"].long()
    width = int(segments_BT.max()) + 1
    rows_B1 = torch.arange(len(segments_BT), device=segments_BT.device)[:, None]
    counts = torch.bincount((segments_BT + rows_B1 * width).flatten(), minlength=width * len(segments_BT))
    used = counts.reshape(-1, width)[:, 1:].flatten()  # id 0 is padding
    return used[used > 0].double()


@dataclass(frozen=True)
class Throughput:
    """Rates of steps on `ranks` devices of `peak` operations a second each. `frozen` as above."""

    shape: ModelShape
    ranks: int
    peak: float
    frozen: bool = False

    def metrics(self, fields: Fields, train_ms: float, passes: int = 1) -> dict[str, float]:
        """The throughput of a step's `fields` (all of them, of every rank): `train_tokens_per_s` counts prompts too.
        `passes` is how often each sequence was trained on (epochs)."""
        found = lengths(fields)
        tokens = float(found.sum()) * passes
        if not tokens or train_ms <= 0:
            return {}
        mean = float((found * found).sum() / found.sum())  # of a token, not of a sequence
        flops = flops_per_token(self.shape, mean, frozen=self.frozen) * tokens / (train_ms / 1e3) / self.ranks
        return {
            "train_tokens_per_s": round(tokens / (train_ms / 1e3), 1),
            "train_tflops": flops / 1e12,
            "mfu": flops / self.peak,
        }


class Stopwatch:
    """Milliseconds by phase: `with watch("train"): ...` adds to `watch.ms["train_ms"]`. `elapsed_ms` runs from the
    watch's making: with phases that overlap it is less than their sum."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._made = time.perf_counter()

    def __call__(self, phase: str) -> _Phase:
        return _Phase(self, f"{phase}_ms")

    @property
    def elapsed_ms(self) -> float:
        return round((time.perf_counter() - self._made) * 1e3, 3)


class _Phase:
    def __init__(self, watch: Stopwatch, key: str) -> None:
        self._watch, self._key = watch, key

    def __enter__(self) -> None:
        progress(self._key.removesuffix("_ms"))
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = (time.perf_counter() - self._start) * 1e3
        self._watch.ms[self._key] = round(self._watch.ms.get(self._key, 0.0) + spent, 3)
