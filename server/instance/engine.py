"""The embedded vLLM engine: its start, and the swap calls into it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from weightsync.errors import WeightSyncError

from .config import InstanceConfig
from .provenance import traced


class StagingFailed(WeightSyncError):
    """A worker refused a version; nothing changed. `code` and `tensor` are the worker's own."""

    def __init__(self, message: str, code: str = "staging_failed", tensor: str | None = None) -> None:
        super().__init__(message)
        self.code, self.tensor = code, tensor


class Engine:
    """vLLM's `AsyncLLM` with the swap calls. `active` is (version, epoch) of the last commit, or None before it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.active: tuple[int, int] | None = None
        client.generate = traced(client.generate)

    def active_version(self) -> int | None:
        return self.active[0] if self.active else None

    async def prepare(self, schema: list[list[Any]]) -> None:
        """Build the staging side in every worker. `schema`: [name, dtype, shape] of each tensor a version must have."""
        await self.client.collective_rpc("init_weight_transfer_engine", args=({"schema": schema},))

    async def stage(self, version: int, slot: str, manifest_digest: str, timeout_s: float) -> dict[str, Any]:
        """Stage on every worker while decoding goes on; the slowest worker's report.

        Raises StagingFailed with the tensor to blame when a worker refuses the version.
        """
        order = {"version": version, "slot": slot, "manifest_digest": manifest_digest}
        reports = await self.client.collective_rpc("hotswap_stage", args=(order,))
        deadline = time.monotonic() + timeout_s
        while any(r["running"] for r in reports):
            if time.monotonic() > deadline:
                raise StagingFailed(f"staging version {version} took longer than {timeout_s:.0f} s")
            await asyncio.sleep(0.002)
            reports = await self.client.collective_rpc("hotswap_report")
        for report in reports:
            if error := report["error"]:
                raise StagingFailed(error["message"], error["code"], error["tensor"])
        slowest: dict[str, Any] = max(reports, key=lambda r: r["stage_ms"])
        return slowest

    async def commit(self, version: int, epoch: int) -> dict[str, float]:
        """Flip between two batches, label and cache namespace included; {"flip_ms", "commit_ms"}."""
        times: dict[str, float] = await self.client.engine_core.call_utility_async("hotswap_commit", version, epoch)
        self.active = (version, epoch)
        return times


def parse_vllm_args(config: InstanceConfig, port: int) -> Any:
    """vLLM's own namespace of settings for this instance; it exits with its usual message on bad ones."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="hotswap instance"))
    args = parser.parse_args(config.vllm_argv(cpu=current_platform.is_cpu(), port=port))
    validate_parsed_serve_args(args)
    return args


@contextlib.asynccontextmanager
async def start_engine(args: Any) -> AsyncIterator[Engine]:
    """vLLM's engine, started; shut down with all its processes on exit."""
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

    async with build_async_engine_client(args) as client:
        yield Engine(client)


async def build_vllm_app(engine: Engine, args: Any) -> Any:
    """vLLM's own FastAPI application, with every route it offers for this model."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    tasks = await engine.client.get_supported_tasks()
    app = build_app(args, tasks, engine.client.model_config)
    await init_app_state(engine.client, app.state, args, tasks)
    return app
