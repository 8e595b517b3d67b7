"""The benchmarks of transfers, deltas, late joiners and feeding, on a few bytes and a tiny model. And what hosts leave
behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import orjson
import pytest
import typer
import xxhash

from loadtest import cli as bench
from loadtest.hosts import etcd
from loadtest.hosts.links import LinkUnavailable, shaped_link
from loadtest.hosts.namespaces import obstacle
from loadtest.measure.processes import pin
from loadtest.models.checkpoints import TINY_SHAPE
from loadtest.transfer import bench as transfer
from loadtest.transfer.delta import codec, through
from loadtest.transfer.delta_trainer import random_weights, step
from loadtest.transfer.delta_training import Phase, Taken, _figures
from loadtest.transfer.feeding.bench import GENERATED, LOADED, PARTS, figures_of, split, with_instances
from loadtest.transfer.feeding.reader import Reader
from loadtest.transfer.peer import RAW
from server.errors import CliError
from tests.lacking import unable
from tests.waiting import eventually
from weightsync.control.records import CopyRecord
from weightsync.format.manifest import TensorSpec, digest_of
from weightsync.peer.messages import Opened
from weightsync.transport import Transport, available, open_transport


@pytest.mark.broad
def test_it_measures_every_transport_that_is_there(tmp_path: Path) -> None:
    report = transfer.run(tmp_path / "transfer.json", small=True, parts=["reads"])
    assert report == orjson.loads((tmp_path / "transfer.json").read_bytes())
    there = {name for name, reason in available().items() if not reason}
    assert set(report["by_transport"]) == there | {RAW, transfer.TLS}
    assert set(report["by_receivers"]) == set(report["by_hosts"]) == {"1", "2"}
    assert report["by_hosts"]["1"]["from_source"] == 1.0
    assert all(found["best_gbps"] >= found["median_gbps"] > 0 for found in report["by_transport"].values())


@pytest.mark.broad
def test_a_version_comes_to_hosts_behind_links(tmp_path: Path) -> None:
    if reason := obstacle():
        unable(reason)
    report = transfer.run(tmp_path / "links.json", small=True, parts=["links"])
    found = report["by_links"]
    assert {key for key in found if key[0].isdigit()} == {"1", "2", "2 of 2 places", "2 from 2 writers"}
    assert 0.45 < found["2 of 2 places"]["read_by_each"] < 0.8  # chunks are large here
    assert min(found["1"]["of_a_link"], found["2"]["of_a_link"]) > 0.9  # nothing is faster than its link
    assert found["1"]["copies_from_source"] == 1.0
    assert found["2 from 2 writers"]["read_by_each"] < 0.95  # what it wrote it need not read


def test_a_step_changes_the_share_it_is_told() -> None:
    weights = random_weights(TINY_SHAPE)
    before = {name: tensor.copy() for name, tensor in weights.items()}
    step(weights, 0.03, seed=0)
    changed = sum(int((weights[name] != before[name]).sum()) for name in weights)
    assert changed / sum(t.size for t in weights.values()) == pytest.approx(0.03, rel=0.1)


def test_a_delta_of_a_hundredth_is_about_a_hundredth_of_the_bytes() -> None:
    found = codec(0.01, 1, small=True)
    assert 0.003 < found["delta_of_raw"] < 0.02
    assert min(found["encode_gbps_1"], found["encode_gbps_2"], found["apply_gbps"]) > 0


def taken(version: int, words: np.ndarray) -> Taken:  # type: ignore[type-arg]
    data = words.view(np.uint8)
    row = (TensorSpec("bfloat16", words.shape), digest_of(data.data))
    return Taken(version, f"{version:032x}", {"w": row}, {"w": data})


def test_only_versions_that_follow_each_other_are_compared() -> None:
    words = np.full(1000, 0x3F80, np.uint16)
    second, third = words.copy(), words.copy()
    second[:10] += 1
    third[:500] += 1
    versions = [taken(1, words), taken(2, second), taken(4, third)]
    found = _figures(Phase("x", "grpo", 1e-6, 3, "model"), versions)
    assert (found["steps_compared"], found["elements"], found["raw_bytes"]) == (1, 1000, 2000)
    assert found["changed_share"]["median"] == 0.01


@pytest.mark.broad
def test_versions_travel_between_namespaces() -> None:
    try:
        with shaped_link(None):
            pass
    except LinkUnavailable as error:
        unable(str(error))
    found = through(1.0, 0.01, 1, small=True)
    assert found["delta"]["as_meant"]
    assert found["full"]["as_meant"]
    assert found["delta"]["sent_bytes"] < found["full"]["sent_bytes"] / 5
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"hs{os.getpid()}" not in namespaces


# late joiners and feeding


def test_the_parts_of_a_late_start_add_up_to_all_of_it() -> None:
    at = {"copied": 4.0, "up": 16.0, "serving": 16.5, "token": 16.75}
    log = "2026-01-01 INFO hotswap.peer: 0123 (base) is here after 1.25 s\n"
    found = split(at, log, 250.0)
    assert (found["fetch"], found["staging_itself"], found["waited"]) == (1.25, 0.25, 0.0)
    late = split(at | {"copied": 16.25}, log, 250.0)
    assert (late["waited"], late["staged"]) == (0.25, 0.25)
    for parts in (found, late):
        assert sum(parts[name] for name in ("engine_up", "waited", "staged", "first_token")) == parts["total"] == 16.75


def test_what_engines_say_is_read() -> None:
    metrics = """
vllm:generation_tokens_total{engine="0",model_name="m"} 1234.0
vllm:prompt_tokens_total{engine="0"} 7.0
"""
    assert GENERATED.findall(metrics) == ["1234.0"]
    said = "(EngineCore) INFO [default_loader.py:1] Loading weights took 0.43 seconds"
    assert LOADED.findall(said) == ["0.43"]


def test_the_loss_is_of_medians_and_of_neighbours() -> None:
    """A window without tokens says that nothing can be said."""
    found = figures_of([100.0, 120.0, 80.0], [90.0, 96.0, 80.0])
    assert (found["tokens_per_s"], found["tokens_per_s_fed"], found["lost"]) == (100.0, 90.0, 0.1)
    assert found["lost_by_pair"] == [0.1, 0.2, 0.0]
    with pytest.raises(CliError, match="too slow"):
        figures_of([100.0, 0.0], [90.0, 0.0])


def test_a_process_is_kept_to_cores_with_its_threads_and_children() -> None:
    """Also what it starts later."""
    core = min(os.sched_getaffinity(0))
    script = """
import os, subprocess, sys, threading
hold = threading.Event()
threading.Thread(target=hold.wait, daemon=True).start()
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
sys.stdin.readline()
tids = [int(t) for t in os.listdir("/proc/self/task")]
tell = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
later = subprocess.run(tell, capture_output=True, text=True)
print([os.sched_getaffinity(t) for t in (*tids, child.pid)], later.stdout.strip(), flush=True)
child.kill()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pin(process.pid, [core])
        output, _ = process.communicate("go\n", timeout=60)
    assert output.strip() == f"{[{core}] * 3} {{{core}}}"


def test_only_known_parts_are_measured() -> None:
    assert list(transfer.PARTS) == ["reads", "links", *PARTS]
    assert with_instances(["reads"], small=True) == {}
    with pytest.raises(typer.BadParameter, match="nothing is none of reads, links, joiner, feeding"):
        bench.transfer(part=["nothing"])


CHUNK = 4096
DATA = bytes(range(256)) * 40
COPY = CopyRecord("source", "//source/slot", "d" * 32, len(DATA), "ready", "127.0.0.1:1", 0.0)
DIGESTS = tuple(xxhash.xxh3_128_hexdigest(DATA[n : n + CHUNK]) for n in range(0, len(DATA), CHUNK))


class Holder:
    """Stands for a peer's control channel, with a copy in memory behind a real transport."""

    def __init__(self, transport: Transport, digests: tuple[str, ...]) -> None:
        self.data, self.told = bytearray(DATA), list[int]()
        region = transport.register(memoryview(self.data), writable=False).descriptor
        where = transport.name, transport.endpoint, region
        self.opened = Opened(len(DATA), CHUNK, digests, "all", 1, *where, "ticket")

    async def open(self, _host: str, _address: str, _digest: str) -> Opened:
        return self.opened

    async def close(self, _host: str, _address: str, _ticket: str, nbytes: int) -> None:
        self.told.append(nbytes)


async def test_a_reader_reads_again_and_again_until_it_is_told_to_stop() -> None:
    with (
        open_transport("tcp", listen="127.0.0.1", tls=None) as theirs,
        open_transport("tcp", listen="127.0.0.1", tls=None) as ours,
    ):
        holder = Holder(theirs, DIGESTS)
        reader = Reader(ours, holder, COPY)  # type: ignore[arg-type]
        reading = asyncio.create_task(reader.run())
        await eventually(lambda: len(holder.told) >= 3, 60)
        reader.stopped = True
        await reading
        assert holder.told[:3] == [len(DATA)] * 3
        assert sum(holder.told) == reader.nbytes
        wrong = Holder(theirs, ("0" * 32,) * len(DIGESTS))
        with pytest.raises(ValueError, match=r"chunk \d has wrong bytes"):
            await Reader(ours, wrong, COPY).run()  # type: ignore[arg-type]


# hosts


def test_an_etcd_that_does_not_come_up_leaves_nothing_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, data = list[subprocess.Popen[bytes]](), tmp_path / "data"

    def run(_host: int, _argv: list[str], **popen: Any) -> subprocess.Popen[bytes]:
        """In place of a member, a process that does nothing."""
        started.append(subprocess.Popen(["sleep", "600"], **popen))
        return started[-1]

    here: Any = SimpleNamespace(address=lambda _: "127.0.0.1", run=run)
    monkeypatch.setattr(etcd.tempfile, "mkdtemp", lambda **_: data.mkdir() or str(data))  # type: ignore[func-returns-value]
    monkeypatch.setattr(etcd, "until", Mock(side_effect=TimeoutError))
    with pytest.raises(TimeoutError):
        etcd.Etcd(here, "etcd", on=(0, 1))
    assert [process.poll() is not None for process in started] == [True, True]
    assert not data.exists()
