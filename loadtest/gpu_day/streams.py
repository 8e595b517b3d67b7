"""`streams-small`, `streams-8b`: a whole server under 16 streams while weights are swapped, beside vLLM's own reload.

vLLM's own server starts while Hotswap's does, and waits idle until it is measured: the device holds both.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from loadtest.gpu_day.device import Device
from loadtest.gpu_day.models import LLAMA, PROMPTS, QWEN, TOKENIZED, Model, checkpoints, nbytes_of
from loadtest.gpu_day.report import Report
from loadtest.gpu_day.serving import GRAPHS, STREAMS, require_vllm, sleeps_here
from weightsync.vllm_engine.device.room import COPIES_ENV

ANSWER = 32
SWAPS = 2
WARM_UP = 1  # the first version and this one: the slot of the next swap is new
KV_GIB = 5  # all answers at once: 16 of 2,048 tokens take 4 GiB in the shape of 8 B, and a step waits for none
SHARE = "0.2"  # of the device, asked to be free by each of the two servers
STEPS_NBYTES = 8 << 30  # what both servers need besides weights and KV cache, at most
MOST_COPIES = 3
WAIT_S = 300.0
LARGEST = 48  # gaps of a swap that are told: each stall is one of each stream


def streams_small(report: Report, device: Device, small: bool) -> None:
    require_vllm()
    _under_streams(report, device, QWEN, small, each_s=9.0)


def streams_8b(report: Report, device: Device, small: bool) -> None:
    require_vllm()
    _under_streams(report, device, LLAMA, small, each_s=9.0 if small else 14.0)


def _arguments(device: Device) -> tuple[str, ...]:
    """Of both servers. Instances on CPUs are eager by themselves, and vLLM's own server is told so here.

    Without a prefix cache the same prompt is computed in the same way each time.
    """
    common = ("--max-model-len", "2048", "--max-num-seqs", str(STREAMS), "--no-enable-prefix-caching")
    if not device.cuda:
        return (*common, "--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager")
    memory = ("--gpu-memory-utilization", SHARE, "--kv-cache-memory-bytes", str(KV_GIB << 30))
    return (*common, *memory, "--compilation-config", json.dumps(GRAPHS))


def copies_beside(nbytes: int, free: int) -> int:
    """Versions of weights of `nbytes` that fit on the device beside both servers."""
    left = free - 2 * nbytes - 2 * (KV_GIB << 30) - STEPS_NBYTES
    return max(0, min(MOST_COPIES, left // nbytes))


def _under_streams(report: Report, device: Device, model: Model, small: bool, *, each_s: float) -> None:
    """Gaps between tokens while versions are staged and flipped to; then faults, a rollback, and sleep."""
    from loadtest.swaps import stall
    from loadtest.workload.stock_vllm import StockVllm
    from server.up import interrupts
    from server.up.config import UpConfig
    from server.up.server import Server

    interrupts.install()  # at the limit of time the servers are stopped with all of their processes
    begun = time.monotonic()
    models = checkpoints(model, device, report.work, small=small)
    nbytes = nbytes_of(models[0])
    report.say("checkpoints", seconds=time.monotonic() - begun, weights_gb=nbytes / 1e9)
    arguments, state = _arguments(device), report.work / "state"
    sleeps = not model.large and (not device.cuda or sleeps_here(report, device, nbytes))
    config = UpConfig(
        model=str(models[0]), name=stall.MODEL, port=0, throwaway=True, state_dir=state,
        vllm_args=(*arguments, *(("--enable-sleep-mode",) if sleeps and device.cuda else ())),
    )  # fmt: skip
    swaps, streams = (1, 4) if small else (SWAPS, STREAMS)
    stock = StockVllm(models[0], stall.MODEL, report.logs / f"{report.phase}-stock.log", arguments, engine_apart=True)
    copies = copies_beside(nbytes, device.free_nbytes()) if device.cuda else 0
    more = {COPIES_ENV: str(copies)} if device.cuda else {}
    with contextlib.ExitStack() as at_end:
        at_end.callback(_keep_logs, state / "logs", report)
        at_end.enter_context(stock.started())
        begun = time.monotonic()
        with patch.dict(os.environ, more), Server(config) as server:
            report.say("hotswap_is_ready", seconds=time.monotonic() - begun, copies=copies)
            stock.wait()
            report.say("stock_is_ready", seconds=time.monotonic() - begun)
            ours = stall.on_hotswap(server, models, streams, swaps, warm_up=WARM_UP, each_s=each_s)
            report.say("no_stream_is_lost", not any(ours[2].values()), **ours[2])
            _say_gaps(report, "hotswap", ours)
            operated = Operated(server, models)
            operated.roll_back(report)
            if not model.large or small:
                operated.kill_a_publisher(report, swaps % 2)  # the last swap was to the other checkpoint
            if sleeps:
                operated.sleep(report, device, (KV_GIB << 30) + (1 + min(1, copies)) * nbytes if device.cuda else 0)
        theirs = stall.of_stock(stock, models, streams, max(1, swaps - 1), each_s=each_s)
    _say_gaps(report, "vllm", theirs)
    figures = stall.figures_of(ours, theirs)
    wanted = ("stall_ms", "stall_ratio", "commit_ms", "commit_ms_max", "staging_gbps", "stage_ms", "publish_ms",
              "goodput_kept", "goodput_kept_vllm", "longest_by_phase_ms", "tokens_per_s", "kernels")  # fmt: skip
    report.say("stalls", streams=streams, swaps=swaps, **{name: figures[name] for name in wanted})


def _keep_logs(logs: Path, report: Report) -> None:
    """The state directory of the next phase is this one's: its logs go there."""
    for log in logs.glob("*"):
        shutil.copy(log, report.logs / f"{report.phase}-{log.name}")


def _say_gaps(report: Report, name: str, measured: Any) -> None:
    from loadtest.measure.gaps import summary

    gaps, windows, _ = measured
    for kind, chosen in (("quiet", windows.quiet), ("swapping", windows.swapping)):
        found: dict[str, Any] = {f"gap_{key}_ms": value for key, value in summary(gaps.within(chosen)).items()}
        longest = [value * 1e3 for value in gaps.longest(chosen)]
        report.say(f"{name}_{kind}", **found, longest_ms=longest, tokens_per_s=gaps.tokens_per_s(chosen))
    for number, (begin, end) in enumerate(windows.swapping):
        spans = [*windows.publishing, *windows.staging]
        phases = [(at - begin, until - begin) for at, until in spans if begin <= at < end]
        report.say(f"{name}_swap_{number}", phases_s=phases, gaps=gaps.largest((begin, end), LARGEST))


class Operated:
    """A running server, and what an operator does to it."""

    def __init__(self, server: Any, models: list[Path]) -> None:
        from server.cli.admin import AdminClient

        self._server, self._models = server, models
        self._admin = AdminClient(server.state_dir)
        self._said: dict[int, list[list[int]]] = {}

    def active(self) -> int:
        return int(self._admin.call("GET", "/admin/weights/active")["version"])

    def said(self) -> list[list[int]]:
        """Its greedy answers, one after the other."""
        with httpx.Client(base_url=self._server.url, timeout=WAIT_S) as client:
            found = []
            for prompt in PROMPTS:
                body = {"prompt_token_ids": [token % TOKENIZED for token in prompt], "max_tokens": ANSWER}
                more = {"temperature": 0, "ignore_eos": True, "stream": False}
                answer = client.post("/generate", json=body | more).raise_for_status().json()
                found.append(answer["choices"][0]["token_ids"])
        return found

    def kill_a_publisher(self, report: Report, checkpoint: int) -> None:
        """Its version is ready, and the instance stages it. The slot outlives the publisher: the swap goes through."""
        from loadtest.swaps import stall as stall
        from loadtest.workload.children import publishing

        before = self.active()
        before_said = self.said()
        with ThreadPoolExecutor(1) as pool:
            with publishing(self._server.store, stall.MODEL, self._models) as publish:
                version = int(publish(checkpoint)["version"])
                swap = pool.submit(self._admin.call, "POST", "/admin/weights/activate", {"version": version})
                phase = self._wait_for_swap(version)
            swap.result(WAIT_S)  # the publisher has been killed by now
        report.say("a_killed_publisher", self.active() == version, before=before, version=version, phase_at_kill=phase)
        report.say("its_version_answers", len(self.said()) == len(PROMPTS), before_differs=self.said() != before_said)

    def _wait_for_swap(self, version: int) -> str:
        """Until the swap to it is open; its phase."""
        deadline = time.monotonic() + WAIT_S
        with self._client() as client:
            while time.monotonic() < deadline:
                swap = client.get("/admin/swap").raise_for_status().json()
                found = swap.get("swap") or swap
                if found and found.get("target") == version:
                    return str(found.get("phase"))
                threading.Event().wait(0.002)
        raise TimeoutError(f"no swap to version {version} was opened within {WAIT_S:g} s; see the gateway's log")

    @contextlib.contextmanager
    def _client(self) -> Iterator[httpx.Client]:
        key = {"authorization": f"Bearer {self._server.admin_key}"}
        with httpx.Client(base_url=self._server.admin_url, headers=key, timeout=WAIT_S) as client:
            yield client

    def roll_back(self, report: Report) -> None:
        """And forward: the answers of both are what they were."""
        there, now = self.active(), self.said()
        begun = time.monotonic()
        self._admin.call("POST", "/admin/weights/rollback", {})
        seconds = time.monotonic() - begun
        back, then = self.active(), self.said()
        self._admin.call("POST", "/admin/weights/activate", {"version": there})
        again = self.said()
        report.say("rollback", back < there, version=back, round_trip_ms=seconds * 1e3, answers_differ=then != now)
        report.say("forward_again", again == now, version=self.active())

    def sleep(self, report: Report, device: Device, least: int) -> None:
        """It gives the device's memory back, in place on CUDA, and wakes with what was active.

        `least`: bytes that must be free then: of the KV cache, the weights and one buffer of a version.
        """
        before, free = self.said(), device.free_nbytes()
        begun = time.monotonic()
        order = {"level": 1 if device.cuda else 2, "drain_s": 5.0, "wait_s": WAIT_S}
        state = self._admin.call("POST", "/admin/instances/instance-0/sleep", order)["state"]
        slept, freed = time.monotonic() - begun, device.free_nbytes() - free if device.cuda else 0
        gone = state == "asleep" and freed >= least
        report.say("asleep", gone, seconds=slept, freed_gb=freed / 1e9, least_gb=least / 1e9)
        begun = time.monotonic()
        state = self._admin.call("POST", "/admin/instances/instance-0/wake", {"wait_s": WAIT_S})["state"]
        report.say("awake", state == "serving", seconds=time.monotonic() - begun)
        report.say("it_wakes_with_the_same_weights", self.said() == before, version=self.active())
