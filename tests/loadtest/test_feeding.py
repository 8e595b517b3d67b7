"""Parts of the benchmark of late joiners and of feeding: how times are split, what is lost, which cores are used."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import xxhash

from loadtest import cli as bench
from loadtest.measure.cpu import pin
from loadtest.transfer import bench as transfer
from loadtest.transfer.feeding.bench import GENERATED, LOADED, PARTS, figures_of, forget, split, with_instances
from loadtest.transfer.feeding.reader import Reader
from server.errors import CliError
from tests.waiting import eventually
from weightsync.control.records import CopyRecord
from weightsync.peer.messages import Key, Opened
from weightsync.transport import Transport, open_transport

LOG = "2026-01-01 INFO hotswap.peer: 0123 (base) is here after 1.25 s\n"


def test_the_parts_of_a_late_start_add_up_to_all_of_it() -> None:
    at = {"copied": 4.0, "up": 16.0, "serving": 16.5, "token": 16.75}
    found = split(at, LOG, 250.0)
    assert (found["fetch"], found["staging_itself"], found["waited"]) == (1.25, 0.25, 0.0)
    late = split(at | {"copied": 16.25}, LOG, 250.0)
    assert (late["waited"], late["staged"]) == (0.25, 0.25)
    for parts in (found, late):
        assert sum(parts[name] for name in ("engine_up", "waited", "staged", "first_token")) == parts["total"] == 16.75


def test_what_engines_say_is_read() -> None:
    metrics = (
        'vllm:generation_tokens_total{engine="0",model_name="m"} 1234.0\nvllm:prompt_tokens_total{engine="0"} 7.0\n'
    )
    assert GENERATED.findall(metrics) == ["1234.0"]
    found = LOADED.search("(EngineCore) INFO [default_loader.py:1] Loading weights took 0.43 seconds")
    assert found is not None
    assert found[1] == "0.43"


def test_the_loss_is_of_medians_and_of_neighbours() -> None:
    found = figures_of([100.0, 120.0, 80.0], [90.0, 96.0, 80.0])
    assert (found["tokens_per_s"], found["tokens_per_s_fed"], found["lost"]) == (100.0, 90.0, 0.1)
    assert found["lost_by_pair"] == [0.1, 0.2, 0.0]


def test_a_window_without_tokens_says_that_nothing_can_be_said() -> None:
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


def test_files_are_dropped_from_memory_and_stay(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x" * 8192)
    forget(file)
    assert file.read_bytes() == b"x" * 8192


def test_only_known_parts_are_measured() -> None:
    assert list(transfer.PARTS) == ["reads", "links", *PARTS]
    assert with_instances(["reads"], small=True) == {}
    with pytest.raises(typer.BadParameter, match="nothing is none of reads, links, joiner, feeding"):
        bench.transfer(part=["nothing"])


class Holder:
    """What a reader asks over the control channel, with a copy in memory behind a real transport."""

    def __init__(self, transport: Transport, data: bytes, digests: tuple[str, ...] | None = None) -> None:
        self.data, self.told = bytearray(data), list[int]()
        region = transport.register(memoryview(self.data), writable=False)
        found = digests or tuple(xxhash.xxh3_128_hexdigest(data[n : n + CHUNK]) for n in range(0, len(data), CHUNK))
        self.opened = Opened(
            len(data), CHUNK, found, "all", 1, transport.name, transport.endpoint, region.descriptor, "ticket"
        )  # fmt: skip

    async def open(self, _host: str, _address: str, _key: Key) -> Opened:
        return self.opened

    async def close(self, _host: str, _address: str, _ticket: str, nbytes: int) -> None:
        self.told.append(nbytes)


CHUNK = 4096
DATA = bytes(range(256)) * 40
COPY = CopyRecord("source", "//source/slot", "d" * 32, len(DATA), "ready", "127.0.0.1:1", 0.0)


async def test_a_reader_reads_again_and_again_until_it_is_told_to_stop() -> None:
    with (
        open_transport("tcp", listen="127.0.0.1", tls=None) as theirs,
        open_transport("tcp", listen="127.0.0.1", tls=None) as ours,
    ):
        holder = Holder(theirs, DATA)
        reader: Any = Reader(ours, holder, COPY)  # type: ignore[arg-type]
        reading = asyncio.create_task(reader.run())
        await eventually(lambda: len(holder.told) >= 3, 60)
        reader.stopped = True
        await reading
        assert holder.told[:3] == [len(DATA)] * 3
        assert sum(holder.told) == reader.nbytes
        wrong = Holder(theirs, DATA, ("0" * 32,) * len(holder.opened.digests))
        with pytest.raises(ValueError, match=r"chunk \d has wrong bytes"):
            await Reader(ours, wrong, COPY).run()  # type: ignore[arg-type]
