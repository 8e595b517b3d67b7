"""Checks of hardware and kernel, each in every state it tells apart."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from server.doctor import world as worlds
from server.doctor.checks.memory import need_of, pinned_nbytes
from server.doctor.checks.software import judge_caches, judge_compiled, judge_gpu, judge_sandbox, judge_transports
from server.doctor.registry import Status
from server.doctor.world import cuda_in, run_command
from server.gpus import DEVICES_ENV
from server.instance.kernels import SAMPLER_ENV, caches
from tests.server.doctor.worlds import checkpoint, findings, host, only, says, statuses
from tests.server.nvml import of
from weightsync.vllm_engine.device.cuda import COPIES_ENV
from weightsync.vllm_engine.device.mapping import FLIP_ENV
from weightsync.vllm_engine.gpus import Gpu, Gpus


@pytest.mark.parametrize(
    ("driver", "cuda", "expected", "hint"),
    [
        ("580.95.05", "13.0", "ok", ""),
        ("570.86.10", "13.0", "fail", "580.65"),
        ("535.54.03", "12.8", "ok", ""),
        ("580.95.05", None, "warn", "ACCEL=cuda"),
        ("580.95.05", "14.1", "warn", "release notes"),
    ],
)
def test_a_driver_must_run_the_cuda_of_torch(
    tmp_path: Path, driver: str, cuda: str | None, expected: Status, hint: str
) -> None:
    found = only(judge_gpu(host(tmp_path, gpus=lambda: of("GPU-8a", driver=driver)), cuda), expected)
    assert hint in found.mend
    assert "0: NVIDIA H100 80GB HBM3, 80.0 GiB" in found.found


DRIVER = {"/proc/driver/nvidia/version": "NVRM version"}


@pytest.mark.parametrize(
    ("files", "seen", "cuda", "expected", "told"),
    [
        ({}, Gpus((), why_none="NVML: Driver Not Loaded"), "13.0", "fail", ["Driver Not Loaded", "--gpus all"]),
        (DRIVER, Gpus((), why_none="the driver has no GPU"), "13.0", "fail", ["has no GPU", "reinstall"]),
        ({}, None, "13.0", "fail", ["nvidia-ml-py", "ACCEL=cuda"]),
        ({}, None, None, "skip", ["CPU build"]),
        (DRIVER, None, None, "warn", ["CPU build", "ACCEL=cuda"]),
    ],
)
def test_a_host_where_no_gpu_is_seen(
    tmp_path: Path, files: dict[str, str], seen: Gpus | None, cuda: str | None, expected: Status, told: list[str]
) -> None:
    found = only(judge_gpu(host(tmp_path, files, gpus=lambda: seen), cuda), expected)
    assert all(text in f"{found.found} {found.mend}" for text in told), found


@pytest.mark.parametrize(
    ("instances", "ranks", "names", "told"),
    [
        (2, 1, None, ""),
        (2, 2, None, "2 instance(s) of 2 rank(s) need 4 GPUs, and 2 are visible (0, 1)"),
        (2, 1, "GPU-51", "need 2 GPUs, and 1 are visible (GPU-51)"),
        (2, 1, "1,1", ""),
        (1, 1, "GPU-99", "cannot be used"),
        (1, 1, "", "cannot be used"),
    ],
)
def test_each_rank_needs_a_gpu(tmp_path: Path, instances: int, ranks: int, names: str | None, told: str) -> None:
    environ = {DEVICES_ENV: names} if names is not None else {}
    given = {"instances": instances, "tensor_parallel_size": ranks, "environ": environ}
    found = list(judge_gpu(host(tmp_path, gpus=lambda: of("GPU-8a", "GPU-51"), **given), "13.0"))
    assert statuses(found) == (["ok", "fail"] if told else ["ok"])
    assert told in found[-1].found


def test_a_gpu_that_others_fill_is_told_if_it_is_to_be_used(tmp_path: Path) -> None:
    def seen() -> Gpus:
        free, full = (of("GPU-8a", "GPU-51", free=nbytes).devices for nbytes in (79 << 30, 40 << 30))
        return Gpus((free[0], full[1]), "580.95.05")

    assert statuses(judge_gpu(host(tmp_path, gpus=seen), "13.0")) == ["ok"]
    found = list(judge_gpu(host(tmp_path, gpus=seen, instances=2), "13.0"))
    assert statuses(found) == ["ok", "warn"]
    assert "40.0 GiB of 80.0 GiB are free on 1 (GPU-51)" in found[1].found
    assert "--gpu-memory-utilization" in found[1].mend


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'\n", "13.0"),
        ("cuda = '12.8'\n", "12.8"),
        ("cuda: str = None\n", None),
        ("(", None),
    ],
)
def test_torchs_cuda_is_read_without_importing_it(tmp_path: Path, text: str, cuda: str | None) -> None:
    (tmp_path / "version.py").write_text(f"from typing import Optional\n__version__ = '2'\n{text}")
    assert cuda_in(tmp_path / "version.py") == cuda
    assert cuda_in(tmp_path / "absent.py") is None


@pytest.mark.parametrize(
    "files",
    [
        {"/proc/self/cgroup": "0::/pod/c", "/sys/fs/cgroup/pod/memory.max": "5242880",
         "/sys/fs/cgroup/memory.max": "max"},
        {"/proc/self/cgroup": "4:memory:/far/away", "/sys/fs/cgroup/memory/memory.limit_in_bytes": "5242880"},
    ],
)  # fmt: skip
def test_the_smallest_memory_limit_above_this_process_counts(tmp_path: Path, files: dict[str, str]) -> None:
    files |= {"/proc/meminfo": "MemTotal: 4194304 kB\n"}
    assert "5 MiB" in only(findings("memory-limit", host(tmp_path, files)), "ok").found
    small, large = checkpoint(tmp_path / "small", 0), checkpoint(tmp_path / "large", 1)
    only(findings("memory-limit", host(tmp_path, files, model_dir=small)), "ok")
    assert "6 MiB" in only(findings("memory-limit", host(tmp_path, files, model_dir=large)), "fail").found


def test_without_a_limit_the_hosts_memory_counts(tmp_path: Path) -> None:
    files = {"/proc/self/cgroup": "0::/\n4:memory:/x", "/sys/fs/cgroup/memory.max": "max"}
    files["/proc/meminfo"] = "MemTotal: 4096 kB\n"
    files |= {"/sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(2**63 - 4096)}
    assert "no limit" in only(findings("memory-limit", host(tmp_path, files)), "ok").found
    only(findings("memory-limit", host(tmp_path, files, model_dir=checkpoint(tmp_path / "m", 1))), "fail")
    only(findings("memory-limit", host(tmp_path / "bare")), "skip")


@pytest.mark.parametrize(("limit", "expected"), [(-1, "ok"), (65_536, "ok"), (4096, "warn"), (256, "fail")])
def test_open_files(tmp_path: Path, limit: int, expected: Status) -> None:
    only(findings("open-files", host(tmp_path, limit=lambda which: limit)), expected)


def test_locked_memory_matters_where_there_is_an_rdma_device(tmp_path: Path) -> None:
    limits = {resource.RLIMIT_MEMLOCK: 65_536}
    only(findings("locked-memory", host(tmp_path, limit=lambda which: limits[which])), "ok")
    host(tmp_path, {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE"})
    assert "unlimited" in only(findings("locked-memory", host(tmp_path, limit=limits.__getitem__)), "fail").mend
    limits[resource.RLIMIT_MEMLOCK] = resource.RLIM_INFINITY
    only(findings("locked-memory", host(tmp_path, limit=limits.__getitem__)), "ok")


def test_workers_of_gpus_pin_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring each, of 128 MiB, and the versions without room on the device: with this limit of none, or all three."""
    monkeypatch.setattr(worlds, "torch_cuda", lambda: "13.0")
    given = {"gpus": lambda: of("GPU-8a", "GPU-51"), "limit": lambda which: 129 << 20}
    assert "pin 128 MiB" in only(findings("locked-memory", host(tmp_path, **given)), "ok").found
    assert "pin 256 MiB" in only(findings("locked-memory", host(tmp_path, **given, instances=2)), "warn").found
    given |= {"model_dir": checkpoint(tmp_path / "m", 1)}
    assert "pin 128 MiB" in only(findings("locked-memory", host(tmp_path, **given)), "ok").found
    crowded = host(tmp_path, **given, environ={COPIES_ENV: "0"})
    assert "pin 131 MiB" in only(findings("locked-memory", crowded), "warn").found


@pytest.mark.parametrize(
    ("environ", "instances", "ranks", "nbytes"),
    [
        ({}, 1, 1, 0),
        ({COPIES_ENV: "1"}, 1, 1, 200),
        ({COPIES_ENV: "0"}, 1, 1, 300),
        ({COPIES_ENV: "0"}, 2, 1, 600),
        ({COPIES_ENV: "0"}, 1, 2, 300),
        ({FLIP_ENV: "remap", COPIES_ENV: "2"}, 1, 1, 100),
        ({COPIES_ENV: "nonsense"}, 1, 1, 300),
    ],
)
def test_versions_without_room_on_the_device_are_in_the_hosts_memory(
    tmp_path: Path, environ: dict[str, str], instances: int, ranks: int, nbytes: int
) -> None:
    given = {"environ": environ, "instances": instances, "tensor_parallel_size": ranks}
    world = host(tmp_path, gpus=lambda: of("GPU-8a", "GPU-51"), **given)
    assert pinned_nbytes(world, 100) == instances * ranks * (128 << 20) + nbytes


def test_what_a_staging_takes_leaves_copies_less_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker counts: the version without room is in the host's memory."""
    monkeypatch.setattr(worlds, "torch_cuda", lambda: "13.0")
    model, gpu = checkpoint(tmp_path / "m", 1), Gpu(0, "GPU-8a", "NVIDIA H100", 10 << 20, 10 << 20)
    world = host(tmp_path, model_dir=model, gpus=lambda: Gpus((gpu,)))
    for config, mib in (("{}", 128), ('{"quantization_config": {}}', 129)):
        (model / "config.json").write_text(config)
        need = need_of(world)
        assert need is not None
        assert need.pinned_nbytes == mib << 20


def test_what_workers_of_gpus_pin_counts_against_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slots of 1 MiB, beside a ring, fit; three versions more do not."""
    monkeypatch.setattr(worlds, "torch_cuda", lambda: "13.0")
    files = {"/proc/meminfo": f"MemTotal: {133 << 10} kB\n"}
    given = {"model_dir": checkpoint(tmp_path / "m", 1), "gpus": lambda: of("GPU-8a")}
    only(findings("memory-limit", host(tmp_path, files, **given)), "ok")
    found = only(findings("memory-limit", host(tmp_path, files, **given, environ={COPIES_ENV: "0"})), "fail").found
    assert "131 MiB that workers of GPUs pin" in found


@pytest.mark.parametrize(
    ("built", "pure", "compiler", "expected", "hint"),
    [
        ("now", "", "/usr/bin/cc", "ok", ""),
        ("now", "1", "/usr/bin/cc", "warn", "HOTSWAP_PURE"),
        ("before", "0", "/usr/bin/cc", "warn", "make setup"),
        ("", "", None, "warn", "gcc"),
    ],
)
def test_the_compiled_gateway(built: str, pure: str, compiler: str | None, expected: Status, hint: str) -> None:
    assert hint in only([judge_compiled(built, "now", pure, compiler)], expected).mend


def test_the_sandbox_is_tried(tmp_path: Path) -> None:
    assert "bubblewrap" in only([judge_sandbox(host(tmp_path), None, as_root=True)], "warn").mend
    refuses = tmp_path / "bwrap"
    refuses.write_text("#!/bin/sh\necho setting up uid map: Permission denied >&2\nexit 1\n")
    refuses.chmod(0o755)
    files = {"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"}
    world = host(tmp_path, files, run=run_command)
    found = only([judge_sandbox(world, str(refuses), as_root=False)], "warn")
    assert "AppArmor" in found.mend
    assert "uid map" in found.found
    assert "seccomp" in only([judge_sandbox(world, str(refuses), as_root=True)], "warn").mend
    only([judge_sandbox(host(tmp_path, run=says(0)), str(refuses), as_root=False)], "ok")


def test_transports() -> None:
    assert statuses(judge_transports({"tcp": "", "nixl": ""})) == ["ok"]
    assert statuses(judge_transports({"tcp": "", "nixl": "not installed"})) == ["ok", "skip"]
    assert "not installed" in only(judge_transports({"nixl": "not installed"}), "warn").found


def program(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("compiler", "jit_cache", "sampler", "expected", "told"),
    [
        (True, True, None, "ok", "C compiler"),
        (False, True, None, "fail", "no C compiler"),
        (True, False, None, "warn", "vLLM's own"),
        (True, False, "0", "ok", "C compiler"),
        (True, False, "1", "fail", "ends an engine"),
    ],
)
def test_what_is_compiled_at_the_first_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: bool, jit_cache: bool, sampler: str | None,
    expected: Status, told: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(worlds, "torch_cuda", lambda: "13.0")
    for package in ("flashinfer", *(["flashinfer_jit_cache"] if jit_cache else [])):
        (tmp_path / "packages" / package).mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    bin_ = program(tmp_path / "bin" / "gcc").parent if compiler else tmp_path
    environ = {"PATH": str(bin_), "HOME": str(tmp_path)} | ({SAMPLER_ENV: sampler} if sampler is not None else {})
    first, *kept = findings("kernels", host(tmp_path, environ=environ))
    assert first.status == expected
    assert told in first.found
    assert statuses(kept) == ["ok"] * 4
    assert f"vLLM keeps what it compiles in {tmp_path}/.cache/vllm" in kept[0].found


def test_where_what_was_compiled_is_kept(tmp_path: Path) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    for place in (disk, memory):
        place.mkdir()
    program(tmp_path / "file")
    mounts = {"/proc/mounts": f"root {tmp_path} ext4 rw 0 0\ntmp {memory} tmpfs rw 0 0\n"}
    places = {"a": disk / "new" / "one", "b": memory, "c": tmp_path / "file" / "below"}
    found = list(judge_caches(host(tmp_path / "root", mounts), places))
    assert statuses(found) == ["ok", "warn", "fail"]
    assert "b keeps what it compiles in memory" in found[1].found


def test_on_a_cpu_no_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "torch_cuda", lambda: None)
    only(findings("kernels", host(tmp_path)), "skip")


@pytest.mark.parametrize(
    ("env", "name", "place"),
    [
        ({}, "vLLM", "/home/u/.cache/vllm"),
        ({"XDG_CACHE_HOME": "/c"}, "vLLM", "/c/vllm"),
        ({"VLLM_CACHE_ROOT": "/v", "XDG_CACHE_HOME": "/c"}, "vLLM", "/v"),
        ({}, "Triton", "/home/u/.triton/cache"),
        ({"TRITON_HOME": "/t"}, "Triton", "/t/.triton/cache"),
        ({"TRITON_CACHE_DIR": "/d", "TRITON_HOME": "/t"}, "Triton", "/d"),
        ({"FLASHINFER_WORKSPACE_BASE": "/f"}, "FlashInfer", "/f/.cache/flashinfer"),
        ({"TILELANG_CACHE_DIR": "/l"}, "TileLang", "/l"),
    ],
)
def test_the_directories_are_those_that_each_would_take(env: dict[str, str], name: str, place: str) -> None:
    assert caches({"HOME": "/home/u", **env})[name] == Path(place)
