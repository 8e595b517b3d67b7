"""Weights that another system's trainer sends in several requests, kept apart until they are whole.

Such a trainer writes into the engine tensor by tensor, and what it stops half-way stays half-way. Here its requests
only collect: files in a private directory, or the path of a checkpoint. Nothing of it is published before every tensor
of the served model is there, and then it is one version and one swap like any other (docs/adapters.md).

An update is kept by this process alone: all requests of one trainer must reach the same gateway.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import filecmp
import importlib
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import ModuleType

import orjson

from server.errors import BadRequest, Conflict, PayloadTooLarge, Unprocessable

log = logging.getLogger("hotswap.gateway")

IDLE_S = 300.0  # an update that nobody has touched for so long makes way for another trainer's
MAX_PARTS = 4096
PREFIX = "hotswap-update-"


class WeightUpdate:
    """One update under way. `family` says whose routes it came by, `label` what the trainer calls its weights."""

    def __init__(self, family: str, label: str | None = None) -> None:
        self.family, self.label = family, label
        self.touched_at = time.monotonic()
        self._checkpoint: Path | None = None
        self._directory: Path | None = None
        self._files: dict[str, frozenset[str]] = {}  # file -> the tensors in it
        self._writing = asyncio.Lock()

    @property
    def names(self) -> set[str]:
        """The tensors that came as bytes."""
        return {name for names in self._files.values() for name in names}

    def use(self, checkpoint: str) -> None:
        """A checkpoint directory or file on the gateway's host; it is all of the update. Raises HttpError."""
        if not Path(checkpoint).is_absolute():
            raise BadRequest("The checkpoint must be an absolute path on the gateway's host.", code="bad_path")
        if self._files or self._checkpoint not in (None, Path(checkpoint)):
            raise Conflict(
                "This update has other weights already; a checkpoint must be all of one.", code="mixed_update"
            )
        self._checkpoint = Path(checkpoint)

    async def add(self, encoded: str, room: int | None) -> None:
        """Takes in safetensors, base64; `room` is what all of it may have, bytes. Raises HttpError, CheckpointError.

        The same bytes once more change nothing: a trainer may repeat a request whose answer it lost.
        """
        if self._checkpoint is not None:
            raise Conflict("This update is a checkpoint already; it cannot have tensors besides.", code="mixed_update")
        if len(self._files) >= MAX_PARTS:
            raise PayloadTooLarge(f"An update may have {MAX_PARTS} parts; send larger ones.", code="too_many_parts")
        async with self._writing:
            path = await asyncio.to_thread(self._write, encoded, room)
            try:
                self._admit(path, frozenset(await asyncio.to_thread(_checkpoint().read_header, path)))
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def seal(self) -> Path:
        """Where the whole of it is: a checkpoint directory or file. Raises Conflict when nothing was sent."""
        if self._checkpoint is not None:
            return self._checkpoint
        if self._directory is None or not self._files:
            raise Conflict("Nothing was sent since this update began; send weights first.", code="empty_update")
        home = {name: file for file, names in self._files.items() for name in names}
        (self._directory / _checkpoint().INDEX).write_bytes(orjson.dumps({"metadata": {}, "weight_map": home}))
        return self._directory

    def drop(self) -> None:
        """Frees what was collected."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._checkpoint, self._directory, self._files = None, None, {}

    def _write(self, encoded: str, room: int | None) -> Path:
        try:
            data = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadRequest(f"This is not base64 ({error}).", code="bad_encoding") from error
        if data[:1] == b"\x80":  # the opcode every pickle since protocol 2 begins with
            raise refused_pickle()
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        held = sum(file.stat().st_size for file in self._directory.iterdir())
        if room is not None and held + len(data) > room:
            raise PayloadTooLarge(
                "These are more bytes than a version of the served model has.", code="update_too_large"
            )
        with tempfile.NamedTemporaryFile(dir=self._directory, suffix=".safetensors", delete=False) as file:
            file.write(data)
        return Path(file.name)

    def _admit(self, path: Path, names: frozenset[str]) -> None:
        for file, known in self._files.items():
            if known == names and filecmp.cmp(path.parent / file, path, shallow=False):
                path.unlink()
                return
            if both := known & names:
                raise Conflict(
                    f"Tensor {min(both)!r} came before, with other bytes; send each once.",
                    code="duplicate_tensor",
                    details={"tensor": min(both)},
                )
        self._files[path.name] = names


class Updates:
    """The update under way in this gateway, if there is one."""

    def __init__(self) -> None:
        self._current: WeightUpdate | None = None
        _sweep()

    def begin(self, family: str, label: str | None = None) -> WeightUpdate:
        """A new, empty one. Raises Conflict while another one is under way."""
        before = self._current
        if before is not None:
            idle = time.monotonic() - before.touched_at
            if idle < IDLE_S:
                raise Conflict(
                    "Another weight update is under way here; finish it, or wait: it is given up when nothing was sent "
                    f"for {IDLE_S:g} s.",
                    code="update_in_progress",
                )
            log.warning("a weight update of %s is given up: nothing was sent for %.0f s", before.family, idle)
        self.drop()
        self._current = WeightUpdate(family, label)
        return self._current

    def find(self, family: str) -> WeightUpdate | None:
        """The one of this family."""
        current = self._current
        if current is None or current.family != family:
            return None
        current.touched_at = time.monotonic()
        return current

    def take(self, family: str) -> WeightUpdate:
        """The one of this family, which is the caller's from now on. Raises Conflict when there is none."""
        current = self.find(family)
        if current is None:
            raise Conflict("No weight update is under way here; begin one first.", code="no_update")
        self._current = None
        return current

    def drop(self) -> None:
        """Gives up what is under way."""
        if self._current is not None:
            self._current.drop()
            self._current = None


def _sweep() -> None:
    """Removes what gateways that were killed have left."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = left.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                shutil.rmtree(left)


def refused_pickle() -> Unprocessable:
    """The answer to tensors in a form that runs code when it is read."""
    return Unprocessable(
        "Pickled tensors are refused: reading a pickle runs the code in it. Send safetensors, base64 "
        '(SGLang: in the same field, with "load_format": "safetensors"), or the path of a checkpoint.',
        code="pickle_refused",
    )


def _checkpoint() -> ModuleType:
    """Imported when the first update comes: it brings numpy along, which no other gateway needs."""
    return importlib.import_module("weightsync.checkpoint")
