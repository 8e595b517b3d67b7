"""The rules of the stand-in and of torch's operators on it: what it must not forgive, and what it must do right."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.gpu_emulated import operators, standin
from tests.gpu_emulated.forks import ProcessDied, WorkFailed, forked

CUDA = torch.device("cuda", 0)


def test_an_operator_computes_what_a_cpu_does() -> None:
    def work() -> list[bool]:
        torch.manual_seed(0)
        x, y = torch.randn(7, 5), torch.randn(5, 3)
        on_device = (x.to(CUDA) @ y.to(CUDA)).softmax(-1)
        z = torch.zeros(4, device=CUDA)
        z[1:3].add_(2)
        picked = x.to(CUDA)[x.to(CUDA) > 0]  # as many as there are: its shape depends on values
        return [
            torch.equal(on_device.cpu(), (x @ y).softmax(-1)),
            z.tolist() == [0, 2, 2, 0],
            torch.equal(picked.cpu(), x[x > 0]),
            standin.ask("kernels") == 0,
        ]

    for late in (0, 1):
        assert forked(work, late=late, poison=1) == [True] * 4


def test_a_read_without_a_wait_finds_old_bytes() -> None:
    def read(waits: bool) -> int:
        source = torch.full((1024,), 7).pin_memory()
        target = torch.zeros(1024, dtype=torch.int64, device=CUDA)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        return int(target.sum().cpu()) // 1024

    assert forked(lambda: [read(False), read(True)], late=1) == [0, 7]
    assert forked(lambda: read(False)) == 7, "in order, it has happened"


def test_pinned_memory_is_read_when_the_copy_runs_and_pageable_memory_when_it_is_queued() -> None:
    def work() -> list[int]:
        found = []
        for source in (torch.full((8,), 1).pin_memory(), torch.full((8,), 1)):
            target = torch.zeros(8, dtype=torch.int64, device=CUDA)
            target.copy_(source, non_blocking=source.is_pinned())
            source.fill_(2)
            found.append(int(target[0]))
        return found

    assert forked(work, late=1) == [2, 1]


def test_memory_that_was_given_back_is_rubbish_for_other_streams_alone() -> None:
    def work() -> list[bool]:
        values = torch.arange(1 << 16, device=CUDA)
        kept = values.clone()
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        here = values + 0  # queued on the stream that it was allocated on: that goes well
        with torch.cuda.stream(side):
            there = values + 0
        del values
        torch.cuda.synchronize()
        return [torch.equal(here, kept), torch.equal(there, kept)]

    assert forked(work, late=1, poison=1) == [True, False]


def test_new_memory_is_rubbish() -> None:
    assert forked(lambda: torch.empty(4, dtype=torch.uint8, device=CUDA).tolist(), poison=1) == [0xA5] * 4


def test_an_address_that_was_freed_or_unmapped_ends_the_process() -> None:
    def freed() -> int:
        values = torch.ones(1 << 24, device=CUDA)
        address = values.data_ptr()
        del values
        torch.cuda.empty_cache()
        return ctypes.c_int.from_address(address).value

    with pytest.raises(ProcessDied) as died:
        forked(freed)
    assert died.value.signal == signal.SIGSEGV


def test_memory_runs_out() -> None:
    def work() -> list[int]:
        standin.hold(0, 60 << 20)
        free, total = torch.cuda.mem_get_info()
        try:
            torch.empty(8 << 20, dtype=torch.uint8, device=CUDA)
        except torch.OutOfMemoryError:
            standin.hold(0, 0)
            return [free, total, torch.empty(8 << 20, dtype=torch.uint8, device=CUDA).numel()]
        return []

    assert forked(work, mib=64) == [4 << 20, 64 << 20, 8 << 20]


class Captured:
    """y = x * 2, captured."""

    def __init__(self) -> None:
        self.x = torch.ones(1 << 20, device=CUDA)
        self.y = torch.zeros(1 << 20, device=CUDA)
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.y.copy_(self.x * 2)

    def answer(self) -> float:
        self.graph.replay()
        return float(self.y[5])


def test_a_graph_computes_when_it_is_replayed() -> None:
    def work() -> list[float]:
        captured = Captured()
        before = float(captured.y[5])
        first = captured.answer()
        captured.x.fill_(3)
        return [before, first, captured.answer(), standin.ask("captured"), standin.ask("replayed")]

    for late in (0, 1):
        assert forked(work, late=late, poison=1) == [0, 2, 6, 1, 2]


@pytest.mark.parametrize("returned", [False, True], ids=["to torch", "to the driver"])
def test_a_graph_whose_memory_was_freed_is_refused(returned: bool) -> None:
    def work() -> str:
        captured = Captured()
        del captured.x
        if returned:
            torch.cuda.empty_cache()
        return str(captured.answer())

    with pytest.raises(WorkFailed, match="illegal memory access"):
        forked(work)


def test_values_of_the_device_are_refused_while_a_graph_is_captured() -> None:
    def work() -> None:
        x = torch.ones(8, device=CUDA)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.nonzero()

    with pytest.raises(WorkFailed, match="CaptureUnsupported"):
        forked(work)


def test_devices_have_memory_of_their_own() -> None:
    def work() -> list[int]:
        second = torch.ones(16 << 20, dtype=torch.uint8, device="cuda:1")
        moved = (second * 3).to("cuda:0")
        return [torch.cuda.device_count(), second.device.index, int(moved[9]), standin.ask("used1") >> 24]

    for late in (0, 1):
        assert forked(work, devices=2, late=late) == [2, 1, 3, 2]


HOST = torch.ones(2, 2)
MIXED: dict[str, tuple[Callable[[torch.Tensor], object], bool]] = {
    "sum": (lambda x: x + HOST, True),
    "product": (lambda x: x @ HOST, True),
    "written on the host": (lambda x: HOST.clone().add_(x), True),
    "rows of the host": (lambda x: F.embedding(torch.zeros(2, dtype=torch.int64), x), True),
    "number of the host in a list": (lambda x: torch.stack([x.sum(), torch.tensor(1.0)]), True),
    "second device": (lambda x: x + HOST.to("cuda:1"), True),
    "number of the host": (lambda x: x * torch.tensor(2.0), False),
    "places of the host": (lambda x: x[torch.tensor([1, 0])], False),
    "copy": (lambda x: x.copy_(HOST), False),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_devices_is_refused_where_cuda_refuses_it(name: str) -> None:
    mix, refused = MIXED[name]

    def work() -> bool:
        return mix(torch.ones(2, 2, device=CUDA)) is not None

    for late in (0, 1):
        if not refused:
            assert forked(work, devices=2, late=late)
            continue
        with pytest.raises(WorkFailed, match="Expected all tensors to be on the same device"):
            forked(work, devices=2, late=late)


def test_what_goes_by_the_operators_is_counted() -> None:
    def work() -> bool:
        with torch.utils._python_dispatch._disable_current_modes():
            torch.ones(8, device=CUDA)
        return standin.ask("kernels") > 0

    assert forked(work)


def test_an_error_of_queued_work_is_raised_by_the_next_wait() -> None:
    def work() -> None:
        operators._queue(lambda: [][0], CUDA, [])
        torch.ones(2, device=CUDA).tolist()

    with pytest.raises(WorkFailed, match="IndexError"):
        forked(work, late=1)


def test_settings_that_are_not_known_are_refused() -> None:
    with pytest.raises(ProcessDied, match="no setting 'speed'"):
        forked(lambda: None, speed=1)
