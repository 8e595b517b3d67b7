"""Calls to every engine core of an instance, one for each data-parallel rank, and to the workers of each.

vLLM's `AsyncLLM.collective_rpc` and `call_utility_async` reach every engine core, and return what the first answers. A
swap must hear all of them. `_call_utility_async` is vLLM's own, and private: it is used here only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from server.errors import ConfigError
from weightsync.errors import WeightSyncError


class RankFailed(WeightSyncError):
    """An engine core raised in a call; what the others did stands."""

    code = "engine_call_failed"


class Ranks:
    """The engine cores behind one `AsyncLLM`, in the order of their data-parallel ranks."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def call(self, method: str, *args: Any) -> list[Any]:
        """What `method` of each engine core answers, when all have. Raises RankFailed, naming the ranks that raised."""
        core = self._client.engine_core
        calls = [core._call_utility_async(method, *args, engine=engine) for engine in core.core_engines]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, BaseException)}
        if failed:
            said = "; ".join(f"{rank_name(rank, len(answers))}{error}" for rank, error in failed.items())
            raise RankFailed(said) from next(iter(failed.values()))
        return answers

    async def workers(self, method: str, *args: Any) -> list[list[Any]]:
        """What `method` of each worker answers, by data-parallel rank. Raises as `call`."""
        return await self.call("collective_rpc", method, None, args, {})


def check_ranks(vllm_config: Any) -> None:
    """Raises ConfigError when the data-parallel ranks compute one batch together: they would flip in different ones."""
    if vllm_config.parallel_config.data_parallel_size > 1 and vllm_config.model_config.is_moe:
        raise ConfigError(
            "--data-parallel-size with a mixture of experts: the ranks use each other's experts in every batch, and "
            "each flips between batches of its own. Run an instance for each rank instead."
        )


def rank_name(rank: int, ranks: int) -> str:
    """How an error names a data-parallel rank; nothing where there is one."""
    return f"data-parallel rank {rank}: " if ranks > 1 else ""


def worker_name(of: tuple[int, int], answers: Sequence[Sequence[Any]], hosts: Sequence[str]) -> str:
    """How an error names the worker `of` (data-parallel rank, rank in it); nothing that goes without saying."""
    data_parallel, rank = of
    index = sum(len(workers) for workers in answers[:data_parallel]) + rank
    host = f"rank {rank} on host {hosts[index]}: " if len(set(hosts)) > 1 else ""
    return rank_name(data_parallel, len(answers)) + host
