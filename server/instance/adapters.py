"""The LoRA adapters an instance answers for by name: those of the version it runs, and no others."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from weightsync.parts import LORA, LORA_URL
from weightsync.records import VersionRecord

FIRST_ID = 1 << 20  # above the ids vLLM gives to adapters of its own


class Adapters:
    """vLLM's table of names, kept in step with the commits. A name keeps its id for the life of the process."""

    def __init__(self) -> None:
        self._table: MutableMapping[str, Any] = {}
        self._ids: dict[str, int] = {}
        self._names: dict[int, set[str]] = {}

    def bind(self, table: MutableMapping[str, Any]) -> None:
        """`table`: vLLM's, of LoRA requests by name; its routes look adapters up there."""
        table.update(self._table)
        self._table = table

    def find(self, name: str | None) -> Any:
        """The LoRARequest of an adapter that is served, or None."""
        return self._table.get(name) if name is not None else None

    def orders(self, version: VersionRecord) -> list[dict[str, Any]]:
        """What the workers are told of the parts of `version` (backend.UpdateInfo), draft model included."""
        names = {part.name for part in version.parts if part.name.startswith(LORA)}
        self._names[version.version] = names
        return [
            {
                "name": part.name,
                "version": part.version,
                "slot": part.slot,
                "manifest_digest": part.manifest_digest,
                "lora_id": self._id(part.name) if part.name in names else 0,
            }
            for part in version.parts
        ]

    def withdraw(self, version: int) -> None:
        """Before a commit: no new request gets an adapter that `version` does not have."""
        for part in self._ids.keys() - self._names.get(version, set()):
            self._table.pop(part.removeprefix(LORA), None)

    def offer(self, version: int) -> None:
        """After a commit: the adapters of `version` answer."""
        from vllm.lora.request import LoRARequest

        for part in self._names.get(version, set()):
            name = part.removeprefix(LORA)
            if name not in self._table:
                self._table[name] = LoRARequest(name, self._id(part), f"{LORA_URL}{part}")
        self._names = {v: names for v, names in self._names.items() if v >= version - 64}

    def _id(self, part: str) -> int:
        return self._ids.setdefault(part, FIRST_ID + len(self._ids))
