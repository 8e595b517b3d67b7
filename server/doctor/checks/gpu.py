"""GPUs, and whether their driver can run the CUDA that the installed torch was built with."""

from __future__ import annotations

from collections.abc import Iterator

from server.doctor.finding import Finding, fail, ok, skip, warn
from server.doctor.installed import torch_cuda
from server.doctor.registry import check
from server.doctor.world import World

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
# The oldest Linux driver for any minor release of a major one (CUDA release notes, "minor version compatibility").
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


@check("gpu", "GPUs, their driver, and the CUDA of the installed torch")
def gpu(world: World) -> Iterator[Finding]:
    yield from judge(world, torch_cuda())


def judge(world: World, cuda: str | None) -> Iterator[Finding]:
    """`cuda`: the release that torch was built with; None for its CPU build."""
    ran = world.run(QUERY)
    if ran.status is None:
        yield _no_driver(world, cuda)
    elif ran.status != 0 or not ran.said:
        yield fail(f"nvidia-smi: {ran.said or 'says nothing'}", "Load or reinstall the NVIDIA driver of this kernel")
    else:
        rows = [[cell.strip() for cell in line.split(",")] for line in ran.said.splitlines()]
        names = ", ".join(f"{name} ({memory})" for name, memory, *_ in rows)
        yield _fits(names, rows[0][-1], cuda)


def _no_driver(world: World, cuda: str | None) -> Finding:
    if world.path("/proc/driver/nvidia/version").exists():
        return fail("there is a driver, but no nvidia-smi on PATH", "Install nvidia-utils of the driver's release")
    if cuda is None:
        return skip("no NVIDIA driver here, and torch is its CPU build")
    mend = "Start the container with --gpus all, install the driver, or set up again with `make setup ACCEL=cpu`"
    return fail(f"torch is built for CUDA {cuda}, and there is no nvidia-smi here", mend)


def _fits(names: str, driver: str, cuda: str | None) -> Finding:
    if cuda is None:
        mend = "`make clean && make setup ACCEL=cuda` installs the builds for GPUs"
        return warn(f"{names}, driver {driver}; but torch is its CPU build", mend)
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    found = f"{names}, driver {driver}, torch for CUDA {cuda}"
    if oldest is None:
        return warn(found, f"No oldest driver for CUDA {cuda} is known here: look it up in NVIDIA's release notes")
    if _numbers(driver) < oldest:
        return fail(found, f"CUDA {cuda} needs driver {oldest[0]}.{oldest[1]} or later: renew the driver of the host")
    return ok(found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
