"""The embedded vLLM engine: its start, and the swap calls into it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

from weightsync.errors import WeightSyncError
from weightsync.parts import combined
from weightsync.records import VersionRecord

from .adapters import Adapters
from .inflight import Inflight
from .places import Places, check_hosts, placed
from .provenance import pooled, traced
from .tether import Tethers

T = TypeVar("T")
WATCH_S = 0.1
FLIP_TIMEOUT_S = 10.0  # a flip takes milliseconds, and waits for at most one batch


class StagingFailed(WeightSyncError):
    """A worker refused a version; nothing changed. `code` and `tensor` are the worker's own."""

    def __init__(self, message: str, code: str = "staging_failed", tensor: str | None = None) -> None:
        super().__init__(message)
        self.code, self.tensor = code, tensor


class EngineDied(WeightSyncError):
    """The engine's processes have ended, or answer no more; this instance cannot serve."""

    code = "engine_died"


class Engine:
    """vLLM's `AsyncLLM` with the swap calls. `active` is (version, epoch) of the last commit, or None before it.

    `hosts`: the name of each rank's host, "" where there is one; `tethers` says when one of the others has ended.
    """

    def __init__(self, client: Any, tethers: Tethers) -> None:
        self.client, self.tethers = client, tethers
        self.active: tuple[int, int] | None = None
        self.hosts: tuple[str, ...] = ("",)
        self.adapters = Adapters()
        self.inflight = Inflight()
        client.generate = traced(client.generate, self.inflight)
        client.encode = pooled(client.encode, self.inflight)

    @property
    def max_num_seqs(self) -> int:
        """How many requests it runs at one time, over all data-parallel ranks."""
        config = self.client.vllm_config
        scheduler = config.scheduler_config
        runs: int = scheduler.max_num_active_seqs or scheduler.max_num_seqs
        return runs * int(config.parallel_config.data_parallel_size)

    @property
    def dead(self) -> bool:
        """Whether it can serve no more: a process of it has ended, here or on another host."""
        return bool(self.client.errored) or self.tethers.lost is not None

    def active_version(self) -> int | None:
        return self.active[0] if self.active else None

    async def prepare(self, schema: list[list[Any]], tether: Mapping[str, object]) -> None:
        """Build the staging side in every worker. `schema`: [name, dtype, shape] of each tensor a version must have.

        `tether`: what workers on other hosts connect to, {} where there are none. Raises ConfigError when the hosts
        cannot be told apart, EngineDied.
        """
        await self._answer(self.client.collective_rpc("init_weight_transfer_engine", args=({"schema": schema},)))
        attach = self.client.collective_rpc("hotswap_attach", args=(tether,))
        self.hosts = tuple(await self._answer(attach))
        check_hosts(self.hosts, int(self.client.vllm_config.parallel_config.nnodes))

    async def stage(self, version: VersionRecord, timeout_s: float, places: Places | None = None) -> dict[str, Any]:
        """Stage base and parts on every worker while decoding goes on; the slowest worker's report.

        `places`: where `version` is on each host. "fingerprint" in the report is that of what all workers built ("" if
        they cannot say). Raises StagingFailed with the tensor to blame when a worker refuses the version.
        """
        order = {
            "version": version.version,
            "slot": version.slot,
            "manifest_digest": version.manifest_digest,
            "base_version": version.base_version or version.version,
            "parts": self.adapters.orders(version),
        }
        if places is not None and len(places) > 1:
            order = placed(order, places)
        reports = await self._answer(self.client.collective_rpc("hotswap_stage", args=(order,)))
        deadline = time.monotonic() + timeout_s
        while any(r["running"] for r in reports):
            if time.monotonic() > deadline:
                raise StagingFailed(f"staging version {version.version} took longer than {timeout_s:.0f} s")
            await asyncio.sleep(0.002)
            reports = await self._answer(self.client.collective_rpc("hotswap_report"))
        for rank, report in enumerate(reports):
            if error := report["error"]:
                raise StagingFailed(self._of(rank) + error["message"], error["code"], error["tensor"])
        slowest: dict[str, Any] = max(reports, key=lambda r: r["stage_ms"])
        return {**slowest, "fingerprint": await asyncio.to_thread(combined, reports)}

    async def commit(self, version: int, epoch: int) -> dict[str, float]:
        """Flip between two batches, label and cache namespace included; {"flip_ms", "commit_ms"}.

        Waits first for the requests that must not cross it. Raises EngineDied.
        """
        async with self.inflight.closing(version):
            self.adapters.withdraw(version)
            flip = self.client.engine_core.call_utility_async("hotswap_commit", version)
            times: dict[str, float] = await self._answer(flip, FLIP_TIMEOUT_S)
            self.active, self.inflight.active = (version, epoch), version
            self.adapters.offer(version)
        return times

    async def drop(self, version: int, *, previous: bool) -> None:
        """Have the workers build `version` anew when it is next asked for, unless it runs.

        `previous`: even if it is what a rollback flips to.
        """
        await self._answer(self.client.collective_rpc("hotswap_drop", args=(version, previous)))

    async def pause(self) -> None:
        """Generate nothing until `resume`; requests stay where they are, and so do their KV blocks."""
        await self.client.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Generate on."""
        await self.client.resume_generation()

    @property
    def sleeps_in_place(self) -> bool:
        """Whether vLLM was started with `--enable-sleep-mode`: it can give its device memory up and stay."""
        return bool(self.client.vllm_config.model_config.enable_sleep_mode)

    async def sleep(self) -> None:
        """Weights to pinned host memory, KV cache dropped; requests that still run are aborted."""
        await self._answer(self.client.sleep(level=1))

    async def wake(self) -> None:
        """Everything back on the device; the weights are those it slept with."""
        await self._answer(self.client.wake_up())

    async def died(self) -> None:
        """Return when the engine has ended behind our back."""
        while not self.dead:  # noqa: ASYNC110 - vLLM has a flag, and no event
            await asyncio.sleep(WATCH_S)

    def _of(self, rank: int) -> str:
        return f"rank {rank} on host {self.hosts[rank]}: " if len(set(self.hosts)) > 1 else ""

    async def _answer(self, call: Awaitable[T], timeout_s: float = float("inf")) -> T:
        """What the engine answers. Raises EngineDied: vLLM leaves the calls of a dead engine waiting for ever."""
        task = asyncio.ensure_future(call)
        deadline = time.monotonic() + timeout_s
        while not task.done():
            await asyncio.wait({task}, timeout=WATCH_S)
            if not task.done() and (self.dead or time.monotonic() > deadline):
                task.cancel()
                if (lost := self.tethers.lost) is not None:
                    raise EngineDied(f"{lost} has ended, and with it this instance; see the log there")
                silent = "" if self.dead else f" or is stuck: it has not answered for {timeout_s:g} s"
                raise EngineDied(f"the engine has ended{silent}; see this log above")
        return task.result()


@contextlib.asynccontextmanager
async def start_engine(args: Any, tethers: Tethers) -> AsyncIterator[Engine]:
    """vLLM's engine, started; shut down with all its processes on exit."""
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

    async with build_async_engine_client(args) as client:
        yield Engine(client, tethers)


async def build_vllm_app(engine: Engine, args: Any) -> Any:
    """vLLM's own FastAPI application, with every route it offers for this model."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    tasks = await engine.client.get_supported_tasks()
    app = build_app(args, tasks, engine.client.model_config)
    await init_app_state(engine.client, app.state, args, tasks)
    engine.adapters.bind(app.state.openai_serving_models.lora_requests)
    return app
