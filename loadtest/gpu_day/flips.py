"""`flip`, `tied`, `undo`, `race`: what a commit does to weights whose addresses a captured graph holds."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch

from loadtest.gpu_day import engine
from loadtest.gpu_day.device import Device, Replayed
from loadtest.gpu_day.report import Report, Skipped
from loadtest.gpu_day.stack import LLAMA_8B, SMALL, Shape, Stack
from weightsync.vllm_engine.staging.stager import Garbage

STEP_TOKENS = 16
FLIP_COPIES = 4.2  # the weights, two versions, and room for whoever else needs some
RACE_SHAPE = Shape(2, 4096, 14336, 1024, 32000)
RACES, HELD_MS = 10, 2000.0
CONTROL_NBYTES = 1 << 30


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
        """What a look shows when the version was loaded into the model, without any flip."""
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
    """A commit is queued behind a long kernel; its buffer is given up, and the next version staged meanwhile.

    What the commit read is looked at on its own stream, behind it. On CUDA a control without the generation's care has
    to be torn: else the experiment would show nothing.
    """
    shape = SMALL if small else RACE_SHAPE
    hold, decoding = device.holder(), device.stream()
    torn = overlapped = 0
    with engine.versions(shape, device) as versions:
        live = Stack(shape, device.torch)
        side = engine.Side(live, lambda: Stack(shape, engine.TWIN), device)
        live.load(1)
        expected = live.sums()
        records = [versions.publish(number) for number in (1, 2)]
        side.stage(records[1]).release()  # the loaders are learnt from: that takes longer than the stream is held
        for _ in range(RACES):
            generation = side.stage(records[0])
            live.clear()
            device.wait()
            with device.on(decoding):
                hold(HELD_MS)
                generation.commit()
                seen = live.sums()
                done = torch.cuda.Event() if device.cuda else None
                if done is not None:
                    done.record(decoding)
            side.start(records[1], Garbage([generation], []))
            del generation
            staged = side.staged(records[1])
            overlapped += done is not None and not done.query()
            device.wait()
            torn += not torch.equal(seen, expected)
            staged.release()
    report.say("what_is_read_is_not_overwritten", torn == 0, torn=torn, rounds=RACES, staged_during_commit=overlapped)
    if device.cuda:
        torn = sum(_control(device, hold) for _ in range(3))
        report.say("the_experiment_can_fail", torn > 0, torn_without_care=torn, rounds=3)


def _control(device: Device, hold: Any) -> bool:
    """Whether a copy is torn whose source is freed, and made anew on its own stream, before it has run."""
    staging, decoding = device.stream(), device.stream()
    live = torch.zeros(CONTROL_NBYTES, dtype=torch.uint8, device=device.torch)
    device.wait()
    with device.on(staging):
        buffer = torch.full((CONTROL_NBYTES,), 1, dtype=torch.uint8, device=device.torch)
    device.wait()
    with device.on(decoding):
        hold(HELD_MS)
        live.copy_(buffer)
    del buffer
    with device.on(staging):
        other = torch.full((CONTROL_NBYTES,), 2, dtype=torch.uint8, device=device.torch)
    device.wait()
    del other
    return not bool((live == 1).all())
