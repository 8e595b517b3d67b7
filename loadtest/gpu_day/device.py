"""The device that the phases run on: CUDA, or a CPU in its place, on which nothing is asynchronous."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

Step = Callable[[], torch.Tensor]
WARM_UP = 3  # runs before a capture, on another stream: libraries make their handles and workspaces then


@dataclass(frozen=True)
class Times:
    """Medians. `device_ms` is between two events on the stream that did the work, `host_ms` what the call took."""

    device_ms: float
    host_ms: float

    def gbps(self, nbytes: int) -> float:
        return nbytes / 1e6 / self.device_ms


class Device:
    """`cuda` says whether there is one; `torch` is the device of its tensors."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.torch = torch.device("cuda:0" if self.cuda else "cpu")

    def wait(self) -> None:
        """For everything on every stream."""
        if self.cuda:
            torch.cuda.synchronize(self.torch)

    def stream(self) -> Any:
        """A new stream that begins behind what the current one has to do; None on a CPU."""
        if not self.cuda:
            return None
        stream = torch.cuda.Stream(self.torch)
        stream.wait_stream(torch.cuda.current_stream(self.torch))
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if self.cuda else contextlib.nullcontext()

    def timed(self, work: Callable[[], Any], rounds: int = 5) -> Times:
        """Times of `work`, which is run once before, on the current stream."""
        work()
        on_device, on_host = [], []
        for _ in range(rounds):
            self.wait()
            begin, end = (torch.cuda.Event(enable_timing=True) if self.cuda else None for _ in range(2))
            if begin is not None:
                begin.record()
            started = time.perf_counter()
            work()
            on_host.append((time.perf_counter() - started) * 1e3)
            if begin is not None and end is not None:
                end.record()
                end.synchronize()
                on_device.append(begin.elapsed_time(end))
        host = statistics.median(on_host)
        return Times(statistics.median(on_device) if self.cuda else host, host)

    def holder(self) -> Callable[[float], None]:
        """Returns a function that keeps the current stream busy for so many milliseconds, and the host not at all."""
        if not self.cuda:
            return lambda _: None
        cycles = 10_000_000
        per_ms = cycles / self.timed(lambda: torch.cuda._sleep(cycles), rounds=3).device_ms
        return lambda ms: torch.cuda._sleep(int(ms * per_ms))

    def free_nbytes(self) -> int:
        """Of the device's memory; of the host's on a CPU."""
        if self.cuda:
            return int(torch.cuda.mem_get_info(self.torch)[0])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Replayed:
    """A step that was captured once and is replayed, at the addresses that it had then; on a CPU it is run again.

    `output` is where the last replay left its result: work that reads it is queued behind, on the same stream.
    """

    def __init__(self, device: Device, step: Step) -> None:
        self._step, self._graph = step, None
        if not device.cuda:
            self.output = step()
            return
        with device.on(aside := device.stream()):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream(device.torch).wait_stream(aside)
        device.wait()  # a capture refuses work of other streams that is not done
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.output = step()

    def __call__(self) -> torch.Tensor:
        """Queue one step on the current stream."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.output = self._step()
        return self.output

    def kept(self) -> torch.Tensor:
        """Queue one step, and a copy of its result that later ones leave alone."""
        return self().clone()
