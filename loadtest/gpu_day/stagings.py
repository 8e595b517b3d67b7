"""`memory`, `stage`, `checksum`: what a staging takes of the device's memory, and of the steps that run beside it."""

from __future__ import annotations

import gc
import itertools
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from loadtest.gpu_day import engine, hardware
from loadtest.gpu_day.device import Device, Replayed
from loadtest.gpu_day.report import Report, Skipped
from loadtest.gpu_day.stack import LLAMA_8B, SMALL, Shape, Stack
from weightsync.format import fingerprint
from weightsync.format.fingerprint import MASK, torch_rectangle
from weightsync.vllm_engine.staging.stager import Garbage

SWAPS = 5
LAYERS = 4  # of the shape of 8 B, in what is published: the rest would show the same
COPIES = 6.0  # of the weights, at most, with the twin that is given up after the first staging
OTHER_SHARE = 0.02  # of the weights, and
OTHER_NBYTES = 64 << 20  # at least: outputs, sums, multipliers, libraries' workspaces
Block = tuple[int, int]  # address and size
ALONE_S = 2.0
ALONE, BESIDE = (2, 1), (3, 1)  # versions
PIECES_MIB = (4, 32)
STEP_TOKENS = 16
SMALLEST_STEPS = 20
SUMMED_ROWS, SUMMED_COLS = 128256, 4096  # the embedding of Llama 3


def memory(report: Report, device: Device, small: bool) -> None:
    """Five swaps as a worker does them, with a version to go back to; what lies on the device after each."""
    shape = SMALL if small else _layers(device)
    live, tokens = Stack(shape, device.torch), torch.zeros(STEP_TOKENS, dtype=torch.int64, device=device.torch)
    weights = sum(t.nbytes for t in live.tensors().values())
    step = Replayed(device, lambda: live(tokens))
    gc.collect()  # a version might get the very block that is garbage now
    before = set(_blocks(device))
    before -= {block for block in before if _owner(block, _ranges(device, {"live": _all_of(live)}))}
    report.say("graph_and_libraries", mb=sum(nbytes for _, nbytes in before) / 1e6 if device.cuda else 0.0)
    held, found = engine.HeldBundles(), []
    with engine.versions(shape, device) as versions:
        side = engine.Side(live, lambda: Stack(shape, engine.TWIN), device)
        for number in range(1, SWAPS + 1):
            record = versions.publish(number)
            device.wait()
            if device.cuda:
                torch.cuda.reset_peak_memory_stats(device.torch)
            generation = side.stage(record, Garbage(*held.sweep()))  # type: ignore[arg-type]
            staged = _allocator(device, weights)
            held.commit(engine.bundle(number, generation), None)
            del generation
            step()
            device.wait()
            census = _census(device, live, side, held, before)
            found.append(census)
            report.say(
                f"swap_{number}",
                not (wrong := live.wrong(number)),
                wrong=wrong[:5],
                weights_gb=weights / 1e9,
                in_weights={kind: nbytes / weights for kind, nbytes in sorted(census.items())},
                **{f"{name}_in_weights": value for name, value in _allocator(device, weights).items()},
                **{f"{name}_when_staged_in_weights": value for name, value in staged.items()},
            )
        _judge(report, found, weights)
        _give_back(report, device, side, held, versions)
        for kept in filter(None, (held.live, held.previous)):
            kept.pieces[engine.BASE].generation.release()


def _give_back(
    report: Report, device: Device, side: engine.Side, held: engine.HeldBundles, versions: engine.Versions
) -> None:
    """As before a worker sleeps: no buffer stays on the device, and what is held can still be committed, from the host;
    the next staging takes the buffers again."""
    buffers, allocated = side.buffers(), torch.cuda.memory_allocated(device.torch) if device.cuda else 0
    side.stager.place.vacate()
    freed = allocated - torch.cuda.memory_allocated(device.torch) if device.cuda else sum(buffers)
    gone = not side.buffers() and freed >= sum(buffers) > 0
    report.say("buffers_are_given_back", gone, buffers_mb=sum(buffers) / 1e6, freed_mb=freed / 1e6)
    assert held.previous is not None
    held.commit(held.previous, None)
    device.wait()
    report.say("rollback_from_the_host", not (wrong := side.live.wrong(SWAPS - 1)), wrong=wrong[:5])
    generation = side.stage(versions.publish(SWAPS + 1), Garbage(*held.sweep()))  # type: ignore[arg-type]
    held.commit(engine.bundle(SWAPS + 1, generation), None)
    device.wait()
    again: dict[str, Any] = {"buffers": len(side.buffers()), "wrong": (wrong := side.live.wrong(SWAPS + 1))[:5]}
    report.say("buffers_are_taken_again", not wrong and len(side.buffers()) == len(buffers), **again)


def _judge(report: Report, found: list[dict[str, int]], weights: int) -> None:
    """From the third swap on nothing more is held, and all of it has an owner."""
    totals = [sum(census.values()) for census in found]
    grown = max(totals[2:]) - totals[2]
    report.say("memory_does_not_grow", grown <= OTHER_NBYTES, grown_mb=grown / 1e6, totals_mb=[t / 1e6 for t in totals])
    other = max(census.get("other", 0) for census in found)
    allowed = max(OTHER_NBYTES, int(OTHER_SHARE * weights))
    report.say("everything_has_an_owner", other <= allowed, other_mb=other / 1e6, allowed_mb=allowed / 1e6)


def _census(
    device: Device, live: Stack, side: engine.Side, held: engine.HeldBundles, before: set[Block]
) -> dict[str, int]:
    """Bytes of the device's blocks that were not there `before`, by what owns them."""
    owners: dict[str, Iterable[torch.Tensor]] = {"live": _all_of(live)}
    for name, bundle in (("live version", held.live), ("previous version", held.previous)):
        pieces = bundle.pieces.values() if bundle is not None else ()
        owners[name] = [t for piece in pieces for t in engine.staged_tensors(piece.generation)]  # type: ignore[arg-type]
    owners["garbage"] = [t for g in held.garbage for t in engine.staged_tensors(g)]  # type: ignore[arg-type]
    owners["reserved"] = engine.reserved_tensors(side)
    owners["twin"] = _all_of(side.twin) if side.twin is not None else ()
    ranges = _ranges(device, owners)
    census: dict[str, int] = {}
    for block in set(_blocks(device)) - before:
        kind = _owner(block, ranges) or "other"
        census[kind] = census.get(kind, 0) + block[1]
    return census


def _all_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _ranges(device: Device, owners: Mapping[str, Iterable[torch.Tensor]]) -> list[tuple[str, int, int]]:
    """(owner, address, size) of each storage on the device."""
    return [
        (kind, storage.data_ptr(), storage.nbytes())
        for kind, tensors in owners.items()
        for tensor in tensors
        if tensor.device.type == device.torch.type and (storage := tensor.untyped_storage()).nbytes()
    ]


def _owner(block: Block, ranges: list[tuple[str, int, int]]) -> str:
    """The first whose memory it is; "" if there is none."""
    address, nbytes = block
    return next((kind for kind, at, size in ranges if at < address + nbytes and address < at + size), "")


def _blocks(device: Device) -> Iterator[Block]:
    """Address and size of each block that is in use; on a CPU the storages of tensors that Python knows."""
    if not device.cuda:
        found = (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor))
        tensors = [t for t in found if t.device.type == "cpu" and t.layout is torch.strided]
        yield from {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors}
        return
    for segment in torch.cuda.memory_snapshot():
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                yield address, block["size"]
            address += block["size"]


def _allocator(device: Device, weights: int) -> dict[str, float]:
    """The figures of torch's allocator, in multiples of the weights."""
    if not device.cuda:
        return {}
    figures = {
        "allocated": torch.cuda.memory_allocated(device.torch),
        "peak": torch.cuda.max_memory_allocated(device.torch),
        "reserved": torch.cuda.memory_reserved(device.torch),
    }
    return {name: value / weights for name, value in figures.items()}


def _layers(device: Device) -> Shape:
    return replace(LLAMA_8B, layers=LAYERS).fitted(device.free_nbytes(), COPIES)


class Decoding:
    """A thread that runs a step again and again on a stream of its own, as an engine does.

    A step copies its tokens to the device, replays a graph, and copies what was sampled back: small copies, which may
    have to wait behind a piece of what is staged.
    """

    def __init__(self, device: Device, live: Stack) -> None:
        self._device, self._stream = device, device.stream()
        self._given = torch.arange(STEP_TOKENS, pin_memory=device.cuda) % live.shape.vocab
        self._sampled = torch.zeros(STEP_TOKENS, dtype=torch.int64, pin_memory=device.cuda)
        self._tokens = torch.zeros(STEP_TOKENS, dtype=torch.int64, device=device.torch)
        self._step = Replayed(device, lambda: live(self._tokens).argmax(-1))
        self._stop = threading.Event()
        self.ends: list[float] = []
        self.failed: BaseException | None = None

    def __enter__(self) -> Decoding:
        self.ends.clear()
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="decoding")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.failed is not None:
            raise self.failed

    def _run(self) -> None:
        try:
            with self._device.on(self._stream):
                while not self._stop.is_set():
                    self._tokens.copy_(self._given, non_blocking=True)
                    self._sampled.copy_(self._step(), non_blocking=True)
                    if self._stream is not None:
                        self._stream.synchronize()
                    self.ends.append(time.perf_counter())
        except BaseException as error:
            self.failed = error

    def within(self, begin: float, end: float) -> list[float]:
        """Milliseconds of each step that ran in that time, or in a part of it."""
        return [(b - a) * 1e3 for a, b in itertools.pairwise(list(self.ends)) if b >= begin and a <= end]

    def wait(self, steps: int) -> None:
        """Until so many more are done."""
        wanted = len(self.ends) + steps
        while len(self.ends) < wanted and self.failed is None:
            self._stop.wait(0.001)


def stage(report: Report, device: Device, small: bool) -> None:
    """Versions staged in turn, by small and by large pieces: with nothing beside, then beside steps, the first of those
    out of a slot that was never read before; what was built, byte for byte."""
    shape = SMALL if small else _layers(device)
    live = Stack(shape, device.torch)
    live.load(0)
    with engine.versions(shape, device) as versions:
        decoding = Decoding(device, live)  # captures before there are other threads
        begun = time.perf_counter()
        records = [versions.publish(number) for number in (1, 2, 3)]
        report.say("published", weights_gb=shape.nbytes / 1e9, seconds=time.perf_counter() - begun)
        for mib in PIECES_MIB:
            _stage_by(report, device, decoding, live, records, mib, small)


def _stage_by(
    report: Report, device: Device, decoding: Decoding, live: Stack, records: list[Any], mib: int, small: bool
) -> None:
    side = engine.Side(live, lambda: Stack(live.shape, engine.TWIN), device, piece_nbytes=mib << (10 if small else 20))
    previous: list[Any] = []

    def staged(number: int) -> tuple[int, Any, float, float]:
        """Its number, the version, and when its staging began and ended."""
        record = records[number - 1]
        garbage, previous[:] = Garbage(previous[:], []), []
        begun = time.perf_counter()
        generation = side.stage(record, garbage)  # raises where a sum is not the published one
        previous.append(generation)
        return number, generation, begun, time.perf_counter()

    def gbps(times: list[float]) -> float:
        return live.shape.nbytes / 1e9 / statistics.median(times)

    staged(1)  # the loaders are learnt from: it takes longer
    idle = [end - begun for _, _, begun, end in (staged(number) for number in ALONE)]
    report.say(f"alone_by_{mib}_mib", gbps=gbps(idle), seconds=idle)
    beside, alone, during = [], [], []
    with decoding:
        for turn in BESIDE:
            before = time.perf_counter()
            decoding.wait(SMALLEST_STEPS)
            while time.perf_counter() - before < (ALONE_S if not small else 0.0):
                decoding.wait(1)
            alone += decoding.within(before, time.perf_counter())
            number, generation, begun, end = staged(turn)
            decoding.wait(1)
            beside.append(end - begun)
            during += decoding.within(begun, end)
    figures: dict[str, Any] = {f"alone_{k}": v for k, v in _steps(alone).items()}
    figures |= {f"staging_{k}": v for k, v in _steps(during).items()}
    report.say(f"beside_steps_by_{mib}_mib", gbps=gbps(beside), seconds=beside, **figures)
    generation.commit()
    device.wait()
    wrong = live.wrong(number)
    report.say(f"every_byte_is_right_by_{mib}_mib", not wrong, wrong=wrong[:5], version=number)
    for kept in previous:
        kept.release()
    side.stager.place.vacate()


def _steps(ms: list[float]) -> dict[str, float | int]:
    if not ms:
        return {"steps": 0}
    ordered = sorted(ms)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    figures = {f"step_{k}_ms": ordered[min(len(ordered) - 1, int(q * len(ordered)))] for k, q in at.items()}
    return {"steps": len(ms), **figures}


def checksum(report: Report, device: Device, small: bool) -> None:
    """Triton's checksum of words, in one launch, against torch's."""
    if not device.cuda or not hardware.there("triton"):
        raise Skipped("the kernel runs on CUDA, with Triton")
    from weightsync.format import checksum_triton

    report.say("instances_take_it", fingerprint._triton_kernel(device.torch) is checksum_triton.rectangle)
    for name, words in _summed(device):
        a = torch.from_numpy(fingerprint.row_multipliers(0, words.shape[0]).copy()).to(device.torch)
        b = torch.from_numpy(fingerprint.column_multipliers(0, words.shape[1]).copy()).to(device.torch)
        found, expected = (int(f(words, a, b)) & MASK for f in (checksum_triton.rectangle, torch_rectangle))
        ours, theirs = (device.timed(partial(f, words, a, b)) for f in (checksum_triton.rectangle, torch_rectangle))
        report.say(name, found == expected, gb=words.nbytes / 1e9, triton_gbps=ours.gbps(words.nbytes),
                   torch_gbps=theirs.gbps(words.nbytes))  # fmt: skip


def _summed(device: Device) -> Iterator[tuple[str, torch.Tensor]]:
    """Words as a model's tensors have them: a matrix, a part of one, the halves of fp32, a vector, bytes."""
    words = torch.randint(-(1 << 15), 1 << 15, (SUMMED_ROWS, SUMMED_COLS), dtype=torch.int16, device=device.torch)
    yield "matrix", words
    yield "part_of_a_matrix", words[3:-5, 7:-9]
    yield "every_other_word", words[:, 1::2]
    yield "vector", words.view(1, -1)[:, :SUMMED_COLS]
    yield "odd", words.view(-1)[: 33 * 17].view(33, 17)
    yield "bytes", words.view(torch.uint8)
