"""Checks of hardware and kernel, each in every state it tells apart."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from server.doctor.checks.memory import judge_numa
from server.doctor.checks.network import judge_transports
from server.doctor.checks.software import judge_compiled, judge_gpu, judge_sandbox
from server.doctor.registry import Status
from server.doctor.world import cuda_in, run_command
from tests.server.doctor.worlds import checkpoint, findings, host, only, says, statuses

H100 = "NVIDIA H100 80GB HBM3, 81559 MiB, {}"


@pytest.mark.parametrize(
    ("status", "said", "cuda", "expected", "hint"),
    [
        (0, H100.format("580.95.05"), "13.0", "ok", ""),
        (0, H100.format("570.86.10"), "13.0", "fail", "580.65"),
        (0, H100.format("535.54.03"), "12.8", "ok", ""),
        (0, H100.format("580.95.05"), None, "warn", "ACCEL=cuda"),
        (0, H100.format("580.95.05"), "14.1", "warn", "release notes"),
        (9, "couldn't communicate with the NVIDIA driver", "13.0", "fail", "reinstall"),
        (None, "no such file", "13.0", "fail", "--gpus all"),
        (None, "no such file", None, "skip", ""),
    ],
)
def test_a_driver_must_run_the_cuda_of_torch(
    tmp_path: Path, status: int | None, said: str, cuda: str | None, expected: Status, hint: str
) -> None:
    assert hint in only(judge_gpu(host(tmp_path, run=says(status, said)), cuda), expected).mend


def test_a_driver_without_its_tools_is_told(tmp_path: Path) -> None:
    world = host(tmp_path, {"/proc/driver/nvidia/version": "NVRM version"})
    assert "no nvidia-smi" in only(judge_gpu(world, None), "fail").found


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


MEMINFO = "MemTotal: 4096 kB\nHugePages_Free: {}\nHugepagesize: 2048 kB\n"


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
    files |= {"/sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(2**63 - 4096), "/proc/meminfo": MEMINFO}
    assert "no limit" in only(findings("memory-limit", host(tmp_path, files)), "ok").found
    only(findings("memory-limit", host(tmp_path, files, model_dir=checkpoint(tmp_path / "m", 1))), "fail")
    only(findings("memory-limit", host(tmp_path / "bare")), "skip")


@pytest.mark.parametrize(("limit", "expected"), [(-1, "ok"), (65_536, "ok"), (4096, "warn"), (256, "fail")])
def test_open_files(tmp_path: Path, limit: int, expected: Status) -> None:
    only(findings("open-files", host(tmp_path, limit=lambda which: limit)), expected)


def test_locked_memory_matters_where_there_is_an_rdma_device(tmp_path: Path) -> None:
    limits = {resource.RLIMIT_MEMLOCK: 65_536}
    only(findings("locked-memory", host(tmp_path, limit=lambda which: limits[which])), "ok")
    rdma_device(tmp_path)
    assert "unlimited" in only(findings("locked-memory", host(tmp_path, limit=limits.__getitem__)), "fail").mend
    limits[resource.RLIMIT_MEMLOCK] = resource.RLIM_INFINITY
    only(findings("locked-memory", host(tmp_path, limit=limits.__getitem__)), "ok")


def rdma_device(root: Path, state: str = "4: ACTIVE", *, verbs: bool = True, node: bool = True) -> None:
    port = {"state": state, "link_layer": "Ethernet", "rate": "100 Gb/sec (4X EDR)"}
    files = {f"/sys/class/infiniband/mlx5_0/ports/1/{name}": text for name, text in port.items()}
    files["/sys/class/infiniband/mlx5_0/device/numa_node"] = "1"
    files |= {"/sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0\n"} if verbs else {}
    files |= {"/dev/infiniband/uverbs0": ""} if node else {}
    host(root, files)


def test_no_rdma_device_is_no_fault(tmp_path: Path) -> None:
    assert "TCP" in only(findings("rdma", host(tmp_path)), "skip").found


def test_rdma_ports_and_access(tmp_path: Path) -> None:
    rdma_device(tmp_path / "well")
    found = findings("rdma", host(tmp_path / "well"))
    assert statuses(found) == ["ok", "ok"]
    assert "mlx5_0: port 1 ACTIVE Ethernet 100 Gb/sec (4X EDR)" in found[0].found
    rdma_device(tmp_path / "down", "1: DOWN", node=False)
    found = findings("rdma", host(tmp_path / "down"))
    assert statuses(found) == ["warn", "fail"]
    assert "cable" in found[0].mend
    assert "container" in found[1].mend
    rdma_device(tmp_path / "bare", verbs=False)
    assert "modprobe" in findings("rdma", host(tmp_path / "bare"))[1].mend


THP = "/sys/kernel/mm/transparent_hugepage"


def test_huge_pages(tmp_path: Path) -> None:
    only(findings("huge-pages", host(tmp_path / "old")), "skip")
    files = {f"{THP}/enabled": "always [madvise] never", f"{THP}/shmem_enabled": "[never]"}
    well = only(findings("huge-pages", host(tmp_path / "well", files)), "ok")
    assert "madvise for processes, never for shared memory" in well.found
    files = {f"{THP}/enabled": "always madvise [never]", "/proc/meminfo": MEMINFO.format(512)}
    found = findings("huge-pages", host(tmp_path / "off", files))
    assert statuses(found) == ["warn", "warn"]
    assert "1.0 GiB" in found[1].found


def test_numa(tmp_path: Path) -> None:
    only(judge_numa(host(tmp_path / "none"), {0}), "skip")
    nodes = {"online": "0-1", "node0/cpulist": "0-3", "node1/cpulist": "4-7"}
    files = {f"/sys/devices/system/node/{name}": text for name, text in nodes.items()}
    only(judge_numa(host(tmp_path, files), {4, 7}), "ok")
    rdma_device(tmp_path)
    assert "mlx5_0 is at node 1" in only(judge_numa(host(tmp_path), {0, 5}), "warn").found
    files = {"/proc/sys/vm/zone_reclaim_mode": "1"}
    assert statuses(judge_numa(host(tmp_path, files), {0})) == ["ok", "warn"]


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
