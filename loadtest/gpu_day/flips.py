"""`flip`, `tied`, `undo`, `race`: what a commit does to weights whose addresses a captured graph holds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from loadtest.gpu_day import engine
from loadtest.gpu_day.device import Device, Replayed
from loadtest.gpu_day.report import Report, Skipped
from loadtest.gpu_day.stack import LLAMA_8B, SMALL, Shape, Stack

STEP_TOKENS = 16
FLIP_COPIES = 4.2  # the weights, two versions, and room for whoever else needs some
RACE_SHAPE = Shape(2, 4096, 14336, 1024, 32000)
RACES, HELD_MS = 2, 2000.0


class Observed:
    """A model whose graph gives its outputs, and whose second graph gives the sums of all of its tensors."""

    def __init__(self, shape: Shape, device: Device, way: str = "copy") -> None:
        """`way`: see `engine.placed`. Memory is taken, and weights move, before the capture."""
        self.device, self.live = device, Stack(shape, device.torch)
        self.place = engine.placed(self.live, device, way)
        self.tokens = torch.arange(STEP_TOKENS, device=device.torch) % shape.vocab
        self.live.load(1)  # random weights: a library may choose kernels by what it sees
        self.step = Replayed(device, lambda: self.live(self.tokens))
        self.sums = Replayed(device, self.live.sums)

    def look(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue a look at what runs: outputs and sums. Nothing is waited for."""
        return self.step.kept(), self.sums.kept()

    def loaded(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Load the version into the model, without any flip. Returns the outputs and sums that a look shows then."""
        self.live.load(number)
        seen = self.look()
        self.device.wait()
        return seen


def same(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """To the bit."""
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(a, b, strict=True))


def flip(report: Report, device: Device, small: bool) -> None:
    """By copies, and by remapping under names that begin with `remap_`."""
    shape = SMALL if small else LLAMA_8B.fitted(device.free_nbytes(), FLIP_COPIES)
    _flip(report, Observed(shape, device))
    gc.collect()  # a model and its graphs hold each other
    if device.cuda:
        torch.cuda.empty_cache()
    try:
        remapped = Observed(shape, device, "remap")
    except Skipped as why:
        report.say("remap_flips", reason=str(why))
    else:
        _flip(report, remapped, "remap_")


def _flip(report: Report, watched: Observed, prefix: str = "") -> None:
    device, live = watched.device, watched.live
    expected = {number: watched.loaded(number) for number in (1, 2)}
    differ = not same(expected[1], expected[2])
    report.say(f"{prefix}versions_differ", differ, layers=live.shape.layers, weights_gb=live_gb(live))
    unpublished = engine.Unpublished(live, watched.place)
    one, two = (unpublished.generation(number) for number in (1, 2))
    addresses = [tensor.data_ptr() for tensor in live.tensors().values()]
    live.clear()
    device.wait()
    seen = []
    for generation in (one, two, one, two):  # queued one behind the other: no host waits between step and flip
        generation.commit()
        seen.append(watched.look())
    device.wait()
    for index, (name, number) in enumerate([("first", 1), ("second", 2), ("rollback", 1), ("again", 2)]):
        report.say(f"{prefix}graph_sees_{name}", same(seen[index], expected[number]))
    report.say(f"{prefix}every_byte_is_right", not (wrong := live.wrong(2)), wrong=wrong[:5])
    kept = [tensor.data_ptr() for tensor in live.tensors().values()] == addresses
    report.say(f"{prefix}addresses_stay", kept, tensors=len(addresses))
    _flip_times(report, watched, one, two, prefix)


def _flip_times(report: Report, watched: Observed, one: Any, two: Any, prefix: str) -> None:
    """Of a copy the device tells the time, of a remapping the host."""
    device = watched.device
    nbytes = sum(tensor.nbytes for tensor in watched.live.tensors().values())
    step = device.timed(watched.step)
    report.say(f"{prefix}step", device_ms=step.device_ms, host_ms=step.host_ms)
    turns = iter([one, two] * 10)
    commit = device.timed(lambda: next(turns).commit(), rounds=10)
    report.say(
        f"{prefix}commit", device_ms=commit.device_ms, host_ms=commit.host_ms, weights_gb=nbytes / 1e9,
        copied_gbps=None if prefix else commit.gbps(nbytes), moved_gbps=None if prefix else commit.gbps(2 * nbytes),
    )  # fmt: skip
    turns = iter([one, two] * 10)

    def between() -> None:
        next(turns).commit()
        watched.step()

    both = device.timed(between, rounds=10)
    report.say(f"{prefix}commit_and_step", device_ms=both.device_ms, host_ms=both.host_ms, gap_ms=both.device_ms)


def live_gb(live: Stack) -> float:
    return sum(tensor.nbytes for tensor in live.tensors().values()) / 1e9


def tied(report: Report, device: Device, small: bool) -> None:
    """Always on small shapes: what is shown does not depend on sizes."""
    both, apart = replace(SMALL, tied=True), SMALL
    cases = {
        "both_tied": (both, both, {}),
        "tied_versions_in_a_model_with_two_tensors": (apart, both, {}),
        "tied_model_whose_versions_have_an_equal_head": (both, apart, {"head": "embed"}),
        "tied_model_whose_versions_have_another_head": (both, apart, {}),
    }
    for name, (running, published, equal) in cases.items():
        with engine.versions(published, device) as versions:
            _tied(report, device, versions, name, Stack(running, device.torch), published, equal)
    _buffers(report, device)


def _tied(
    report: Report, device: Device, versions: engine.Versions, name: str, live: Stack, shape: Shape, equal: Any
) -> None:
    """Two versions and back.

    A tied model cannot hold a version whose head is not its embedding: that must be refused.
    """
    generations, expected = [], []
    side = engine.Side(live, lambda: Stack(shape, engine.TWIN), device)
    for number in (1, 2):
        reference = Stack(shape, device.torch)
        reference.load(number)
        if equal:
            reference.head.weight.data.copy_(reference.embed.weight.data)
        expected.append(reference)
        instead = {"head": reference.embed.weight.data.cpu()} if equal else {}
        record = versions.publish(number, instead)
        try:
            generations.append(side.stage(record))
        except engine.StagingFailed as refusal:
            report.say(name, live.shape.tied and not shape.tied, refused=str(refusal))
            return
    wrong = []
    for index in (0, 1, 0):
        generations[index].commit()
        device.wait()
        for leaf in ("embed", "head"):
            ours, theirs = getattr(live, leaf).weight, getattr(expected[index], leaf).weight
            wrong += [] if torch.equal(ours, theirs) else [f"{leaf} of version {index + 1}"]
        kept = live.head.weight is live.embed.weight
        wrong += [] if kept == live.shape.tied else ["the head has come off the embedding"]
    impossible = live.shape.tied and not shape.tied and not equal
    report.say(name, not (wrong or impossible), wrong=wrong)


def _buffers(report: Report, device: Device) -> None:
    """One that versions fill, and one that no checkpoint has."""
    live = Stack(SMALL, device.torch)
    live.table.fill_(7)
    holder, address = live.layers[0].scale, live.layers[0].scale.data_ptr()
    with engine.versions(SMALL, device) as versions:
        side = engine.Side(live, lambda: Stack(SMALL, engine.TWIN), device)
        generations = [side.stage(versions.publish(number)) for number in (1, 2)]
        wrong = []
        for index in (0, 1, 0):
            generations[index].commit()
            device.wait()
            wrong += [name for name in live.wrong(index + 1) if name.endswith("scale")]
    report.say("buffers_that_versions_fill", not wrong, wrong=wrong)
    report.say("buffers_keep_their_addresses", holder is live.layers[0].scale and holder.data_ptr() == address)
    report.say("buffers_that_no_version_has", bool((live.table == 7).all()))


def undo(report: Report, device: Device, small: bool) -> None:
    shape = SMALL if small else LLAMA_8B.fitted(device.free_nbytes(), FLIP_COPIES)
    watched = Observed(shape, device)
    expected = {number: watched.loaded(number) for number in (1, 2)}
    watched.live.clear()
    unpublished, held = engine.Unpublished(watched.live, watched.place), engine.HeldBundles()
    held.commit(engine.bundle(1, unpublished.generation(1)), None)
    before = watched.look()
    broken = unpublished.generation(2)
    engine.breaks(broken)
    raised, failed = "", engine.bundle(2, broken)
    try:
        held.commit(failed, failed)
    except engine.FlipRefused as error:
        raised = str(error)
    after = watched.look()
    device.wait()
    live_version = held.live.version if held.live is not None else 0
    report.say("a_failed_flip_raises", bool(raised), weights_gb=live_gb(watched.live))
    report.say("the_old_version_is_what_held_names", live_version == 1, live_version=live_version)
    report.say("before_the_flip", same(before, expected[1]))
    report.say("the_graph_sees_the_old_version", same(after, expected[1]))
    report.say("every_byte_is_the_old_one", not (wrong := watched.live.wrong(1)), wrong=wrong[:5])
    freed, _ = held.sweep()
    report.say("its_buffer_is_given_back", len(freed) == 1 and freed[0] is broken)
    for generation in freed:
        generation.release()
    held.commit(engine.bundle(3, unpublished.generation(2)), None)
    seen = watched.look()
    device.wait()
    report.say("the_next_flip_goes_through", same(seen, expected[2]))
    assert held.previous is not None
    held.commit(held.previous, None)
    seen = watched.look()
    device.wait()
    report.say("and_can_be_rolled_back", same(seen, expected[1]))


def race(report: Report, device: Device, small: bool) -> None:
    """A commit is queued behind a long kernel; when it returns, a stream that waits for nothing must see the version.

    Its buffer may go to the next version from then on: a commit that did not wait would read that one. On CUDA a
    control, whose copies are queued and not waited for, must be seen unfinished: else the experiment shows nothing.
    """
    shape = SMALL if small else RACE_SHAPE
    hold, decoding, aside = device.holder(), device.stream(), device.stream()
    live = Stack(shape, device.torch)
    unpublished = engine.Unpublished(live, engine.placed(live, device, "copy", copies=1))
    live.load(1)
    expected = live.sums()
    generation = unpublished.generation(1)

    def seen_after(commit: Callable[[], object]) -> tuple[bool, bool, float]:
        """(Whether the kernel had ended when the commit returned, whether all was there, ms that the commit took)."""
        live.clear()
        device.wait()
        with device.on(decoding):
            hold(HELD_MS)
            held = torch.cuda.Event() if device.cuda else None
            if held is not None:
                held.record(decoding)
            begun = time.perf_counter()
            commit()
            took = (time.perf_counter() - begun) * 1e3
        over = held is None or held.query()
        with device.on(aside):
            seen = live.sums().cpu()
        device.wait()
        return over, torch.equal(seen, expected.cpu()), took

    for turn in range(RACES):
        over, whole, took = seen_after(generation.commit)
        report.say(f"commit_{turn + 1}_waits_for_the_device", over and whole, kernel_had_ended=over,
                   version_is_seen=whole, commit_ms=took, held_ms=HELD_MS if device.cuda else 0.0)  # fmt: skip
    if device.cuda:
        lives, staged = zip(*generation.flips.tensors, strict=True)
        copies = [tensor.data for tensor in lives]
        _, whole, took = seen_after(lambda: torch._foreach_copy_(copies, list(staged), non_blocking=True))
        report.say("the_experiment_can_fail", not whole, queued_ms=took)
    generation.release()
