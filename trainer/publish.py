"""Publishing the engine's weights as a version, by all ranks together.

Rank 0 opens a draft; its ticket goes to the other ranks; every rank writes the slices it speaks for straight into the
slot: each pipeline stage its layers, each expert-parallel rank its experts, one of the replicas of each. Ranks on other
hosts keep theirs in memory, from where ranks beside the slot read it (trainer/several_hosts.py). The digests come back
to rank 0, which commits and activates. The old version goes on serving until the whole fleet has the new one,
and stays if anything fails.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import weightsync
from trainer.config import PublishConfig
from trainer.errors import PublishError
from trainer.megatron.engine import Engine
from trainer.megatron.parallel import broadcast_json, gather_json, lead
from trainer.several_hosts import SeveralHosts
from weightsync.errors import StalePublisher, WeightSyncError


@dataclass(frozen=True)
class Published:
    """`write_ms` from the start of the draft to the committed record, `swap_ms` until the fleet serves it."""

    version: int
    write_ms: float
    swap_ms: float


class WeightPublisher:
    """Holds the lineage (rank 0) for as long as the run lasts. All methods are collective."""

    def __init__(self, config: PublishConfig, engine: Engine) -> None:
        """Raises PublishError when the store does not let it, ConfigError for hosts that cannot reach each other."""
        self._config, self._engine = config, engine
        self._schema = engine.shape.schema(config.dtype)
        self._shapes = {name: shape for name, _, shape in self._schema}
        self._hosts = SeveralHosts(config, weightsync.as_schema(self._schema))
        self._publisher: Any = lead(self._open)

    def publish(self, step: int) -> Published:
        """Publish the current weights and wait until they serve. Raises PublishError on every rank (see `lead`)."""
        began = time.perf_counter()
        draft: Any = lead(lambda: _typed(self._publisher.begin, self._schema, step=step))
        outcomes = gather_json(self._write(draft))
        published: dict[str, Any] | None = lead(lambda: self._commit(draft, outcomes, began))
        return Published(**broadcast_json(published))

    def close(self) -> None:
        """Give the lineage up."""
        self._hosts.close()
        if self._publisher is not None:
            self._publisher.close()

    def _open(self) -> Any:
        c = self._config
        return _typed(weightsync.Publisher, c.store_url, model=c.model, lineage=c.lineage)

    def _write(self, draft: Any) -> dict[str, Any]:
        """This rank's share into the slot: what `seal` says of it, or what went wrong."""
        alone, writer, problem = dist.get_world_size() == 1, draft, ""
        ticket: dict[str, Any] = {} if alone else broadcast_json(draft.ticket if draft is not None else None)
        slices = self._engine.slices(self._config.dtype)
        try:
            writer = draft or self._writer(ticket)
            for name, tensor, dim, start in slices:
                if tensor.shape == self._shapes[name]:
                    writer.write(name, tensor)
                else:
                    writer.write_slice(name, tensor, start, dim)
        except WeightSyncError as error:
            deque(slices, maxlen=0)  # other ranks may be gathering with this one (see Engine.slices)
            problem = str(error)
        if not self._hosts.one:
            problem = self._hosts.bring(writer, problem)
        return {"problem": problem, "part": self._sealed(writer, problem)}

    def _writer(self, ticket: dict[str, Any]) -> Any:
        if self._hosts.share is not None:
            return self._hosts.share
        return weightsync.join(ticket | {"slot": Path(ticket["slot"])}, dist.get_rank())

    def _sealed(self, writer: Any, problem: str) -> Any:
        """What a rank beside the slot wrote there, and lets go of; rank 0's draft stays open."""
        if not isinstance(writer, weightsync.SlotWriter):
            return None
        return writer.release() if problem else writer.seal()

    def _commit(self, draft: Any, outcomes: list[dict[str, Any]], began: float) -> dict[str, Any]:
        for rank, outcome in enumerate(outcomes):
            if outcome["problem"]:
                draft.abort()
                raise PublishError(f"rank {rank} could not write its share: {outcome['problem']}")
        parts = [outcome["part"] for outcome in outcomes if outcome["part"] is not None]
        timeout_s = self._config.timeout_s
        version = _typed(draft.commit, parts, activate=True, timeout_s=timeout_s)
        committed = time.perf_counter()
        _typed(self._publisher.wait_active, version, timeout_s)
        swapped = time.perf_counter()
        return {
            "version": version,
            "write_ms": round((committed - began) * 1e3, 3),
            "swap_ms": round((swapped - committed) * 1e3, 3),
        }


def _typed(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call into weightsync; its errors become PublishError. A lost lineage is final, so it says so."""
    try:
        return function(*args, **kwargs)
    except StalePublisher as error:
        raise PublishError(f"another trainer has taken over this lineage: {error}", final=True) from error
    except WeightSyncError as error:
        raise PublishError(str(error)) from error
