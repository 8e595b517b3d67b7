"""The form that an instance is started with: the configuration of the versions that it is to run.

The form comes from the store, with the version (weightsync/control/forms.py), as the model directory may hold the
configuration of other tensors. vLLM gets it as a directory in the arena: config.json of the version, its
generation_config.json and chat template, and links to what else lies in the model directory but its weights. A swap
that has this instance restart is told if it cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from weightsync.control.arenas import ensure_arena
from weightsync.control.board import Board
from weightsync.control.forms import MOST_STARTS, check_config, differing, start_of
from weightsync.control.records import ErrorInfo, FormRecord, Keys, StartRecord, VersionRecord
from weightsync.errors import RecordError, StoreError, StoreRefused, WeightSyncError, config_mismatch
from weightsync.publish.checkpoint import read_config, write_config
from weightsync.store import Store, open_store

from .config import ITS_OWN, Form, InstanceConfig

log = logging.getLogger("hotswap.instance")
T = TypeVar("T")
UNKNOWN = Form("unknown")  # what no version has
OWN_FILES = frozenset({"config.json", "model.safetensors.index.json"})  # of a checkpoint, beside its *.safetensors


async def form_to_start_with(config: InstanceConfig) -> Form:
    """The form of the version that it is to run. Without the store it is not known: it starts, and once more when the
    store is back."""
    try:
        return await _with_store(config, lambda store: _choose(config, store))
    except (StoreError, RecordError) as error:
        log.warning("starting with the configuration of %s: %s", config.model_dir, error)
        return UNKNOWN


async def check_own(config: InstanceConfig, store: Store, version: VersionRecord) -> None:
    """Whether `version` is one for the engine's configuration, which may have been started before there was any.

    Raises PublishError, StoreError.
    """
    own = read_config(config.model_dir)
    if config.form.digest is not None or not version.form or own is None:
        return
    found = await store.get(Keys(config.model).form(version.form))
    wanted = FormRecord.from_json(found.value).config if found is not None else ""
    if wanted and (names := await asyncio.to_thread(differing, own, wanted)):
        raise config_mismatch(names[0], f"than {config.model_dir}, with which the instance was started")


async def tell_own(config: InstanceConfig, store: Store) -> None:
    """Tell publishers what versions without a configuration are computed with. Raises StoreError."""
    key, own = Keys(config.model).config, read_config(config.model_dir)
    found = await store.get(key)
    before = found.value.decode() if found is not None else ""
    if own is None or own == before:
        return
    with contextlib.suppress(WeightSyncError):  # what cannot be compared is replaced
        if before and (names := await asyncio.to_thread(differing, before, own)):
            told = f"{', '.join(names)} of {config.model_dir} are not those of the instances before it"
            log.warning("%s: versions without a config.json are computed otherwise here", told)
    try:
        await store.put(key, own.encode())
    except StoreRefused as error:  # a role of a release before; what has a config.json is another form then
        log.warning("publishers are not told the configuration of %s: %s", config.model_dir, error)


async def tell_failure(config: InstanceConfig, swap_id: str, error: Exception) -> None:
    """Have the swap end that asked for this start. Raises StoreError."""
    info = ErrorInfo.of(error, "start_failed")

    async def write(store: Store) -> None:
        await _say(store, config, StartRecord(swap_id, MOST_STARTS, info))

    await _with_store(config, write)


async def _with_store(config: InstanceConfig, work: Callable[[Store], Awaitable[T]]) -> T:
    store = open_store(config.store)
    try:
        return await work(store)
    finally:
        await store.close()


async def _say(store: Store, config: InstanceConfig, record: StartRecord) -> None:
    await store.put(Keys(config.model).start(config.instance_id), record.to_json())


async def _choose(config: InstanceConfig, store: Store) -> Form:
    name, keys = config.instance_id, Keys(config.model)
    more = [(prefix, "") for prefix in (keys.start(name), keys.forms, keys.schema)]
    async with Board.follow(store, keys, *keys.concerns, *more) as board:
        while True:
            start = start_of(board, name)
            if start is None:  # it has failed in the swap that is under way, and starts when that has ended
                await board.changed()
                continue
            record = board.form(start.form) if start.form else None
            if start.form is None or (start.form and record is None):
                return ITS_OWN
            swap_id = start.swap_id
            try:
                if swap_id is not None and not await _counted(config, store, board, swap_id):
                    await board.changed()
                    continue
                where = await _directory(config, store, record) if record is not None else None
            except WeightSyncError as error:
                if swap_id is None or isinstance(error, StoreError):
                    raise
                await _say(store, config, StartRecord(swap_id, MOST_STARTS, ErrorInfo.of(error)))
                await board.changed()
                continue
            tensors, text = (record.tensors, record.config) if record is not None else ("", "")
            return Form(start.form, where, tensors, swap_id, text)


async def _counted(config: InstanceConfig, store: Store, board: Board, swap_id: str) -> bool:
    """Note down one more start for the swap; where there were enough, that they failed, and it is False."""
    before = board.starts.get(config.instance_id)
    attempts = before.attempts if before is not None and before.swap_id == swap_id else 0
    info = ErrorInfo("start_failed", f"its process ended {attempts} times before it served; see its log")
    enough = attempts >= MOST_STARTS
    await _say(store, config, StartRecord(swap_id, MOST_STARTS if enough else attempts + 1, info if enough else None))
    return not enough


async def _directory(config: InstanceConfig, store: Store, form: FormRecord) -> Path | None:
    """A directory with the form's configuration; None if the model directory has that, or the form has none.

    Raises PublishError, ArenaError.
    """
    own = read_config(config.model_dir)
    if not form.config or form.config == own:
        return None
    if own is None:
        raise config_mismatch("config.json", f"{config.model_dir} has none")
    check_config(own, form.config)
    arena = await ensure_arena(store)
    target = arena.directory / f"config-{form.digest}-{config.instance_id}"
    made = Path(tempfile.mkdtemp(prefix=".config-", dir=arena.directory))
    try:
        for path in config.model_dir.iterdir():
            if path.suffix != ".safetensors" and path.name not in OWN_FILES:
                (made / path.name).symlink_to(path.resolve())
        write_config(form.config, made)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(made, target)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(made)
    return target
