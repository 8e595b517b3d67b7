"""How long a commit will stall decoding, and where versions will wait: known before a server is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from server.doctor.plan import scratch_of
from server.doctor.registry import Finding, check, fail, ok, skip, warn
from server.doctor.world import Accelerator, World, size
from weightsync.errors import CheckpointError
from weightsync.publish.checkpoint import Checkpoint, read_config
from weightsync.vllm_engine.device.room import COPIES_ENV, wanted_copies

WAITING = {
    3: "the live, the previous and the staged version are copied to buffers on the device",
    2: "two versions are copied to buffers on the device",
    1: "the version staged last is copied to a buffer on the device",
    0: "versions wait in pinned host memory",
}
LESS_CACHE = "lower --kv-cache-memory-bytes"
MORE_ROOM = "Use more ranks (--tensor-parallel-size), or quantised weights"


@check("swap-pause", "how long a commit of `--model` will stall decoding, and where versions wait")
def swap_pause(world: World) -> Iterator[Finding]:
    if world.model_dir is None:
        yield skip("--model says of which model")
        return
    try:
        checkpoint = Checkpoint(world.model_dir)
        nbytes = -(-checkpoint.schema.nbytes // world.tensor_parallel_size)
        config = json.loads(read_config(world.model_dir) or "{}")
        scratch = scratch_of(checkpoint.schema, config) // world.tensor_parallel_size
        found = world.accelerator()
    except CheckpointError as error:
        yield skip(str(error))
    except RuntimeError as error:  # torch's: an occupied device above all
        yield _unmeasured(world, nbytes, scratch, error)
    else:
        if found is not None:
            yield judge_pause(found, nbytes, world, scratch)
        elif world.has_gpu_build:
            yield skip("torch sees no GPU to measure (see `gpu`)")
        else:
            yield ok("on a CPU a commit points references at the staged version, which does not depend on its size")


def _unmeasured(world: World, nbytes: int, scratch: int, error: RuntimeError) -> Finding:
    """Where versions wait follows from sizes, which the driver tells of a device that others fill."""
    why = f"times could not be measured: {str(error).partition('. ')[0]}"
    first = next(iter(world.gpus_taken()), None)
    if first is None or not first.nbytes:
        return skip(why)
    found = judge_pause(Accelerator(first.name, first.nbytes), nbytes, world, scratch)
    return replace(found, found=f"{found.found} ({why})")


def _ms(nbytes: int, per_byte: float | None, digits: int = 0) -> str:
    return f"{nbytes * per_byte:.{digits}f} ms" if per_byte is not None else "an unknown time"


def judge_pause(gpu: Accelerator, nbytes: int, world: World, scratch: int = 0) -> Finding:
    """`nbytes`: of the weights on each rank; `scratch`: what a staging takes besides."""
    from weightsync.vllm_engine.device import mapping, remap

    given = world.room(gpu.nbytes, gpu.free)
    text = f"{gpu.name}, {size(gpu.nbytes)}, of which an instance gets {size(given.nbytes)}; "
    text += f"weights of {size(nbytes)} on each of {world.tensor_parallel_size} rank(s)"
    if given.left(nbytes, 0, scratch) <= (given.kv_cache or 0):
        return fail(f"{text} do not fit", MORE_ROOM)
    try:
        wanted = wanted_copies(world.environ)
        if remap.flips_by_remapping(world.environ):
            sets = remap.sets_that_fit(nbytes, given, wanted, scratch=scratch)
            return ok(
                f"{text}; {sets} versions lie on the device, the live one included. A commit remaps addresses, which "
                "does not depend on the size: an instance measures it when it starts (`expected_flip_ms`). To exchange "
                f"the live version with one on the host takes {_ms(2 * nbytes, gpu.ms_per_byte_from_host)}"
            )
    except ValueError as error:
        return fail(str(error), "Set the variable so, or unset it")
    except mapping.RemapUnavailable as error:
        return fail(f"{text}; {error}", MORE_ROOM)
    copies = wanted if wanted is not None else given.copies(nbytes, scratch)
    if given.left(nbytes, copies, scratch) < (given.kv_cache or 0):
        return fail(f"{text}; {copies} copies of them do not fit", f"Set {COPIES_ENV}=auto, or fewer, or {LESS_CACHE}")
    about = "about " if gpu.ms_per_byte is not None else ""
    here, there = _ms(nbytes, gpu.ms_per_byte, 1), _ms(nbytes, gpu.ms_per_byte_from_host)
    text += f"; room for {copies} copies: {WAITING[copies]}. A commit stalls decoding for {about}"
    if copies == 0:
        return warn(f"{text}{there}, and so does a rollback", MORE_ROOM)
    rollback = {1: f"; a rollback for {there}", 2: f"; a rollback while a version is staged for {there}", 3: ""}[copies]
    return ok(f"{text}{here}{rollback}")
