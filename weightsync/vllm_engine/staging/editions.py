"""Editions of adapters in a worker: each is built on a thread of its own beside the running steps, and then loaded by
vLLM when a request needs it, as any adapter is. An edition never changes, so no commit has to do with it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from weightsync.errors import part_not_served
from weightsync.vllm_engine.staging.bundle import PartOrder, on_this_host
from weightsync.vllm_engine.staging.lora import LoraHost
from weightsync.vllm_engine.staging.stager import describe, use_one_core


@dataclass(frozen=True)
class EditionReport:
    """`sums` are those of its tensors as they lie in memory (fingerprint.py), once it is built."""

    running: bool = False
    error: dict[str, str | None] | None = None
    sums: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"running": self.running, "error": self.error, "sums": self.sums}


class Editions:
    """By full name (NAME@N). Calls come from the worker's thread."""

    def __init__(self, host: LoraHost | None) -> None:
        """`host`: None where vLLM was started without adapters."""
        self._host = host
        self._reports: dict[str, EditionReport] = {}

    def load(self, order: PartOrder) -> None:
        """Begin to build it, unless that is under way."""
        if self._reports.get(order.name, EditionReport()).running:
            return
        if self._host is None:
            missing = part_not_served(order.name, "start the instance with --enable-lora")
            self._reports[order.name] = EditionReport(error=describe(missing))
            return
        self._reports[order.name] = EditionReport(running=True)
        build = threading.Thread(target=self._build, args=(self._host, order), name="hotswap-edition", daemon=True)
        build.start()

    def report(self, name: str) -> EditionReport:
        return self._reports[name]

    def drop(self, name: str) -> None:
        """No request runs through it any more, and none will before it is loaded again."""
        self._reports.pop(name, None)
        if self._host is not None:
            self._host.drop_edition(name)

    def _build(self, host: LoraHost, order: PartOrder) -> None:
        use_one_core()
        try:
            generation, built = host.build(on_this_host(order))
        except Exception as error:  # reported to the instance, which refuses the request
            self._reports[order.name] = EditionReport(error=describe(error))
            return
        host.keep_edition(order.name, generation.model)
        self._reports[order.name] = EditionReport(sums=built["sums"])
