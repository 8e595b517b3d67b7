"""GPUs that NVML sees of a host, their names in an environment, and the ones that each instance gets."""

from __future__ import annotations

import re
import sys

import pytest

from server.errors import ConfigError
from server.gpus import DEVICES_ENV, devices_asked, devices_of_each, visible_devices
from tests.server.nvml import GIB, Nvml, of, seven
from weightsync.vllm_engine import gpus
from weightsync.vllm_engine.gpus import Gpu, Gpus

PARTED = Nvml(["GPU-8a-1", "GPU-51-2"], [["MIG-c0-3", "MIG-0f-4"], []])


@pytest.fixture
def parted(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """A host with two GPUs, the first of which is divided."""
    monkeypatch.setitem(sys.modules, "pynvml", PARTED)
    found = gpus.look()
    assert found is not None
    return found


def test_a_host_is_seen_without_cuda(parted: Gpus) -> None:
    assert [(gpu.index, gpu.uuid) for gpu in parted.devices] == [
        (0, "GPU-8a-1"), (0, "MIG-c0-3"), (0, "MIG-0f-4"), (1, "GPU-51-2"),
    ]  # fmt: skip
    assert parted.devices[0] == Gpu(0, "GPU-8a-1", "NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB)
    assert (parted.driver, parted.why_none) == ("580.95.05", "")
    assert PARTED.opened == 0
    assert [gpu and gpu.uuid for gpu in map(parted.named, ("0", "1", "MIG-0f-4", "GPU-51-2", "2", "GPU-51"))] == [
        "GPU-8a-1", "GPU-51-2", "MIG-0f-4", "GPU-51-2", None, None,
    ]  # fmt: skip
    assert [gpu and gpu.uuid for gpu in map(parted.by_uuid, ("51-2", "0f-4", "9"))] == ["GPU-51-2", "MIG-0f-4", None]


@pytest.mark.parametrize(
    ("nvml", "seen"),
    [
        (Nvml(why_none="Driver Not Loaded"), Gpus((), why_none="NVML: Driver Not Loaded")),
        (Nvml(), Gpus((), "580.95.05", "the driver has no GPU")),
        (
            Nvml(["GPU-8a-1"], sized=False),
            Gpus((Gpu(0, "GPU-8a-1", "NVIDIA H100 80GB HBM3", 0, 0),), "580.95.05"),
        ),
        (None, None),
    ],
    ids=["no driver", "no GPU", "memory of the host", "no module"],
)
def test_what_is_not_seen_is_told(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None, seen: Gpus | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpus.look() == seen


@pytest.mark.parametrize(
    ("args", "count"),
    [
        ((), 1),
        (("-tp", "2"), 2),
        (("--tensor-parallel-size=2", "--pipeline_parallel_size", "3"), 6),
        (("-tp", "2", "-pcp", "2"), 4),
        (("-pp=2", "-dp", "2"), 4),
        (("--data-parallel-size", "8", "--data-parallel-size-local", "2", "-tp=2"), 4),
        (("-tp", "16", "--nnodes", "2"), 8),
        (("-tp", "2", "--tensor-parallel-size", "4"), 4),
        (("-tp", "2", "--distributed-executor-backend=ray"), 0),
        (("-tp", "2", "--data-parallel-backend", "ray"), 0),
    ],
)
def test_how_many_devices_an_engine_takes(args: tuple[str, ...], count: int) -> None:
    assert devices_asked(args) == count


@pytest.mark.parametrize(
    ("asked", "devices", "shares"),
    [
        ([1, 1], None, ["0", "1"]),
        ([2, 1], "GPU-8a,GPU-51,GPU-03", ["GPU-8a,GPU-51", "GPU-03"]),
        ([1, 2, 1], "4,5,6,3", ["4", "5,6", "3"]),
        ([1, 1], "3,3", ["3", "3"]),
        ([2, 2], "0,1,2,3,4", ["0,1", "2,3"]),
        ([1], "0,1", [None]),
        ([0, 0], "", [None, None]),
    ],
)
def test_each_instance_has_devices_of_its_own(asked: list[int], devices: str | None, shares: list[str | None]) -> None:
    env = {DEVICES_ENV: devices} if devices is not None else {}
    assert [share.get(DEVICES_ENV) for share in devices_of_each(asked, env, seven())] == shares


def test_a_part_of_a_gpu_is_one_device(parted: Gpus) -> None:
    env = {DEVICES_ENV: "MIG-c0-3,MIG-0f-4,MIG-GPU-8a-1/7/0"}
    assert [share[DEVICES_ENV] for share in devices_of_each([1, 1, 1], env, parted)] == env[DEVICES_ENV].split(",")


@pytest.mark.parametrize(
    ("asked", "devices", "said"),
    [
        ([1, 1], "GPU-8a", "needed 2 (1 + 1), visible 1 (GPU-8a)"),
        ([2, 1], "0,1", "needed 3 (2 + 1), visible 2 (0, 1)"),
        ([8], None, "needed 8 (8), visible 7 (0, 1, 2, 3, 4, 5, 6)"),
        ([1, 1], "0,-1,1", "visible 1 (0)"),
        ([1, 1], "0,7", "no GPU here is called 7; this host has 0 or GPU-8a, 1 or GPU-51"),
        ([1], "GPU-8", "no GPU here is called GPU-8;"),
        ([2, 1], "3,3,1", "would have 3, 3"),
        ([1], "", f"{DEVICES_ENV}= hides them. Start"),
        ([1], "-1", f"{DEVICES_ENV}=-1 hides them. Start"),
    ],
)
def test_devices_that_cannot_be_given_are_refused(asked: list[int], devices: str | None, said: str) -> None:
    env = {DEVICES_ENV: devices} if devices is not None else {}
    with pytest.raises(ConfigError, match=re.escape(said)):
        devices_of_each(asked, env, seven())


def test_parts_of_gpus_do_not_make_one_instance(parted: Gpus) -> None:
    with pytest.raises(ConfigError, match=re.escape("MIG-c0-3, MIG-0f-4 together")):
        devices_of_each([2], {DEVICES_ENV: "MIG-c0-3,MIG-0f-4"}, parted)


@pytest.mark.parametrize("env", [{}, {DEVICES_ENV: "0"}])
def test_a_host_without_a_gpu_is_told_with_the_reason(env: dict[str, str]) -> None:
    seen = Gpus((), why_none="NVML: Driver Not Loaded")
    with pytest.raises(ConfigError, match=r"no GPU is seen here \(NVML: Driver Not Loaded\).*--gpus all.*--only gpu"):
        visible_devices(env, seen)


def test_what_cannot_be_asked_is_left_to_the_environment() -> None:
    assert visible_devices({}, None) is None
    assert devices_of_each([1, 1], {}, None) == [{}, {}]
    assert visible_devices({DEVICES_ENV: " GPU-8a, 9"}, None) == ["GPU-8a", "9"]
    assert visible_devices({}, of("GPU-8a", "GPU-51")) == ["0", "1"]
