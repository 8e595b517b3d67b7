"""What the doctor says of a commit's pause, on GPUs whose figures are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from server.doctor import world as worlds
from server.doctor.checks.swap_pause import judge_pause
from server.doctor.registry import Status
from server.doctor.world import Accelerator, World, find_accelerator
from tests.server.doctor.worlds import checkpoint, findings, host, only
from tests.server.nvml import of
from weightsync.vllm_engine.device.mapping import FLIP_ENV
from weightsync.vllm_engine.device.room import COPIES_ENV, Room

GPU = Accelerator("GPU", 80_000, 1.0, 20.0)  # bytes, and ms for each


def world(tmp_path: Path, ranks: int = 1, **environ: str) -> World:
    return host(tmp_path, tensor_parallel_size=ranks, environ=environ)


@pytest.mark.parametrize(
    ("nbytes", "status", "told"),
    [
        (10_000, "ok", ["3 copies", "the previous", "about 10000.0 ms"]),
        (15_000, "ok", ["2 copies", "about 15000.0 ms", "while a version is staged for 300000 ms"]),
        (29_000, "ok", ["1 copies", "about 29000.0 ms", "a rollback for 580000 ms"]),
        (40_000, "warn", ["0 copies", "pinned host memory", "about 800000 ms, and so does a rollback"]),
        (70_000, "fail", ["do not fit"]),
    ],
)
def test_the_pause_follows_from_where_versions_fit(
    tmp_path: Path, nbytes: int, status: Status, told: list[str]
) -> None:
    found = only([judge_pause(GPU, nbytes, world(tmp_path))], status).found
    assert all(text in found for text in told), found
    if status != "fail":
        assert f"{Room.of(GPU.nbytes, GPU.nbytes).copies(nbytes)} copies" in found, "as a worker counts"


def test_the_pause_is_that_of_the_part_that_an_instance_is_given(tmp_path: Path) -> None:
    """Another process on the device, a share of it, and a KV cache of a fixed size."""
    half = host(tmp_path, gpu_memory_utilization=0.45)
    assert "1 copies" in only([judge_pause(GPU, 12_000, half)], "ok").found
    held = Accelerator("GPU", 80_000, 1.0, 20.0, free=36_000)
    assert "1 copies" in only([judge_pause(held, 12_000, host(tmp_path))], "ok").found
    fixed = host(tmp_path, kv_cache_memory_bytes=30_000)
    assert "2 copies" in only([judge_pause(GPU, 12_000, fixed)], "ok").found
    asked = host(tmp_path, kv_cache_memory_bytes=30_000, environ={COPIES_ENV: "3"})
    assert "--kv-cache-memory-bytes" in only([judge_pause(GPU, 12_000, asked)], "fail").mend


@pytest.mark.parametrize(
    ("environ", "status", "told"),
    [
        ({COPIES_ENV: "0"}, "warn", "about 200000 ms"),
        ({COPIES_ENV: "1"}, "ok", "a rollback for 200000 ms"),
        ({COPIES_ENV: "7"}, "fail", "say auto"),
        ({FLIP_ENV: "remap"}, "ok", "3 versions lie on the device"),
        ({FLIP_ENV: "remap", COPIES_ENV: "2"}, "ok", "2 versions lie on the device"),
        ({FLIP_ENV: "remap", COPIES_ENV: "1"}, "fail", "no memory to flip to"),
        ({FLIP_ENV: "swap"}, "fail", "copy or remap"),
    ],
)
def test_the_settings_count(tmp_path: Path, environ: dict[str, str], status: Status, told: str) -> None:
    assert told in only([judge_pause(GPU, 10_000, world(tmp_path, **environ))], status).found


def test_copies_that_were_asked_for_and_do_not_fit(tmp_path: Path) -> None:
    assert "auto" in only([judge_pause(GPU, 30_000, world(tmp_path, **{COPIES_ENV: "3"}))], "fail").mend
    assert "more ranks" in only([judge_pause(GPU, 40_000, world(tmp_path, **{FLIP_ENV: "remap"}))], "fail").mend


def test_the_checkpoint_and_the_ranks_give_the_size(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", 4)
    gpu = Accelerator("GPU", 80 << 20, 1e-6, 2e-5)
    given: dict[str, Any] = {"model_dir": model, "accelerator": lambda: gpu}
    assert "weights of 4 MiB on each of 1 rank" in only(findings("swap-pause", host(tmp_path, **given)), "ok").found
    found = only(findings("swap-pause", host(tmp_path, **given, tensor_parallel_size=4)), "ok").found
    assert "weights of 1 MiB on each of 4 rank" in found
    assert "about 1.0 ms" in found


def test_on_a_cpu_references_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(findings("swap-pause", host(tmp_path)), "skip")
    only(findings("swap-pause", host(tmp_path, model_dir=tmp_path / "absent")), "skip")
    monkeypatch.setattr(worlds, "torch_cuda", lambda: None)
    found = only(findings("swap-pause", host(tmp_path, model_dir=checkpoint(tmp_path / "m"))), "ok")
    assert "does not depend on its size" in found.found


def test_a_gpu_that_cannot_be_measured_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def occupied() -> Accelerator:
        raise torch.OutOfMemoryError("no memory left")

    model = checkpoint(tmp_path / "m")
    found = only(findings("swap-pause", host(tmp_path, model_dir=model, accelerator=occupied)), "skip")
    assert "no memory left" in found.found
    monkeypatch.setattr(worlds, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no GPU" in only(findings("swap-pause", host(tmp_path, model_dir=model)), "skip").found


def test_a_gpu_that_a_server_fills_is_judged_by_its_size(tmp_path: Path) -> None:
    """Its times cannot be measured, and where versions wait can be told."""

    def occupied() -> Accelerator:
        raise torch.OutOfMemoryError("no memory left. GPU 0 has a total capacity of 1 GiB")

    given: dict[str, Any] = {"model_dir": checkpoint(tmp_path / "m"), "accelerator": occupied}
    found = only(findings("swap-pause", host(tmp_path, **given, gpus=lambda: of("GPU-8a", free=0))), "ok").found
    assert "room for 3 copies" in found
    assert "stalls decoding for an unknown time" in found
    assert found.endswith("(times could not be measured: no memory left)")


@pytest.mark.gpu
def test_this_gpu_is_measured() -> None:
    found = find_accelerator()
    assert found is not None
    assert found.ms_per_byte is not None
    assert found.ms_per_byte_from_host is not None
    assert 0 < found.ms_per_byte < found.ms_per_byte_from_host
