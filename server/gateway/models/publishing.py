"""Weights on their way to a version: the process that publishes them, and updates that another system's trainer sends.

Publishing has a process of its own: reading gigabytes must not stop a single stream. After the first publication a
spare process waits, imports done, for the next one; each publishes once. One that makes no progress is ended, so that
it does not keep the others waiting. A publication belongs to the gateway, not to the request that asked for it: a
client that leaves changes nothing. Ended half-way (the gateway stops), it leaves a draft whose lease expires; nobody
ever sees it.

Another system's trainer writes into the engine tensor by tensor, and what it stops half-way stays half-way. Here its
requests only collect: files in a private directory, or the path of a checkpoint. Nothing of it is published before
every tensor of the served model is there, and then it is one version and one swap like any other (docs/adapters.md).
This process alone keeps an update: all requests of one trainer must reach the same gateway.
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
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, BinaryIO, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field

from server.errors import ConfigError, HttpError
from server.gateway.access.records import By
from server.gateway.config import GatewayConfig
from server.gateway.error_map import from_fields
from weightsync.control.parts import LORA, check_name

log = logging.getLogger("hotswap.gateway")

T = TypeVar("T")
STOP_GRACE_S = 5.0
MOST_PATH = 4096  # bytes, as Linux has it
STALLED_S = 60.0  # without a byte read or a moment of computing
SPARE_S = 900.0  # a spare nobody needs for so long gives its memory back


class Published(int):
    """The number of a version. `kept` names the files that its checkpoint lacks: those of the version before stay."""

    kept: tuple[str, ...]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Published:
        """Of what `weightsync.push` says."""
        made = cls(answer["version"])
        made.kept = tuple(answer.get("kept", ()))
        return made


class Publication(BaseModel):
    """Checkpoints on this host that become a version: in `path` the `part`, else the base model; in `parts` others, by
    part. `without` are parts of the version before that are taken away, for which no `path` is needed."""

    model_config = ConfigDict(extra="forbid", strict=True)
    path: str = Field(default="", max_length=4096)
    part: str = Field(default="", max_length=200)
    parts: dict[str, str] = Field(default={}, max_length=256)
    without: list[Annotated[str, Field(max_length=200)]] = Field(default=[], max_length=256)
    cast: Annotated[bool, Field(description="convert floating-point tensors to the dtypes that are served")] = False
    strip: Annotated[
        str, Field(pattern=r"^[\w.-]{0,200}$", description="taken away where a tensor's name begins with it")
    ] = ""
    sign_key: Annotated[str, Field(max_length=4096, description="name of a `--sign-key` of the gateway")] = ""
    upload_id: Annotated[
        str, Field(pattern="^([A-Za-z0-9_-]{8,64})?$", description="the same id again, the same version")
    ] = ""


class Edition(BaseModel):
    """An adapter's directory on the gateway's host, as PEFT saves one, to become an edition of `name`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(min_length=1, max_length=128)]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    percent: Annotated[float, Field(ge=0, le=100, description="of the requests for the name alone")] = 100.0
    keep: Annotated[int, Field(ge=1, le=10_000, description="its newest editions that stay")] = 3
    max_age_s: Annotated[float | None, Field(gt=0, description="after which older ones go")] = None
    step: Annotated[int | None, Field(ge=0, lt=2**63, description="training step to note down")] = None
    sign_key: Annotated[str, Field(max_length=4096, description="name of a `--sign-key` of the gateway")] = ""


class Pusher:
    """Runs publications one after the other: two at once would fence each other off."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._turn = asyncio.Lock()
        self._comparing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._spare: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    async def push(
        self,
        what: Publication,
        then: Callable[[Published], Awaitable[T]],
        by: By | None = None,
        *,
        step: int | None = None,
        collected: bool = False,
    ) -> T:
        """Publishes `what` and hands its version to `then`, whether or not the caller waits.

        `step` is the training step to note down. `collected`: the gateway made `what.path` itself, of what the request
        held. Any other path of a request below the role `admin` must lie in a `--checkpoints` directory. Raises
        HttpError, PublishError.
        """
        named = [*([(what.part, str(Path(what.path)))] if what.path else []), *what.parts.items()]
        for name, where in named:
            check_name(name)
            _check_path(where)
        for name in what.without:
            check_name(name)
        signed = self._signed(what.sign_key)
        if by is not None and not by.admin and not collected:
            named = await asyncio.to_thread(self._permitted, named)

        async def version_only(answer: dict[str, Any]) -> T:
            return await then(Published.of(answer))

        noted = [*_named(by), f"--part={what.part}", *([] if step is None else [f"--step={step}"])]
        noted += signed
        noted += [f"--upload-id={what.upload_id}"] if what.upload_id else []
        main = [where for _, where in named[:1]] if what.path else []
        noted += [f"--with={name}={where}" for name, where in named[len(main) :]]
        noted += [f"--without={name}" for name in what.without]
        noted += [*(["--cast"] if what.cast else []), *([f"--strip={what.strip}"] if what.strip else [])]
        return await self.keep(self._push((*noted, *main), version_only))

    async def push_edition(self, what: Edition, by: By) -> dict[str, Any]:
        """Publishes an adapter's directory as an edition; the record of it. Paths as in `push`. Raises HttpError,
        PublishError."""
        check_name(LORA + what.name)
        _check_path(what.path)
        named, signed = [(what.name, str(Path(what.path)))], self._signed(what.sign_key)
        if not by.admin:
            named = await asyncio.to_thread(self._permitted, named)
        noted = [*_named(by), *signed, f"--edition={what.name}", f"--percent={what.percent}", f"--keep={what.keep}"]
        noted += [f"--max-age={what.max_age_s}"] if what.max_age_s is not None else []
        noted += [f"--step={what.step}"] if what.step is not None else []

        async def record(answer: dict[str, Any]) -> dict[str, Any]:
            return dict(answer["edition"])

        return await self.keep(self._push((*noted, named[0][1]), record))

    def _signed(self, name: str) -> list[str]:
        """Raises HttpError (400)."""
        try:
            return [f"--sign-key={self._config.named.find('--sign-key', name)}"] if name else []
        except ConfigError as error:
            raise HttpError(400, str(error), code="unknown_sign_key", param="sign_key") from error

    def _permitted(self, named: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The paths without symbolic links, so that what is read is what was looked at. Raises HttpError (403)."""
        homes = [os.path.realpath(directory) for directory in self._config.checkpoints]
        found = [(name, os.path.realpath(where)) for name, where in named]
        if not all(any(Path(where).is_relative_to(home) for home in homes) for _, where in found):
            message = (
                "A key below `admin` names checkpoints in the gateway's --checkpoints directories alone; add the "
                "directory there, send the tensors themselves, or use the admin key."
            )
            raise HttpError(403, message, code="path_not_allowed", param="path")
        return found

    async def prepare(self, file: BinaryIO, upload_id: str, by: By | None = None, onto: int | None = None) -> Prepared:
        """Starts the process that will publish what `file` is going to hold: it imports while the bytes arrive."""
        what = (f"--delta=/proc/self/fd/{file.fileno()}", f"--upload-id={upload_id}", "--when-told", *_named(by))
        what += () if onto is None else (f"--onto={onto}",)
        options = self._options(what)
        process = await self._start(options, stdin=asyncio.subprocess.PIPE, pass_fds=(file.fileno(),))
        return Prepared(process, file)

    async def push_delta(self, prepared: Prepared, then: Callable[[dict[str, Any]], Awaitable[T]]) -> T:
        """Publishes the version that the file holds now, and hands what `weightsync.push` says of it to `then`.

        Raises HttpError.
        """
        return await self.keep(self._push_prepared(prepared, then))

    async def diff(self, a: int, b: int) -> dict[str, Any]:
        """`weightsync.versions.VersionDiff` of two versions, one comparison at a time, in a process of its own.

        Raises HttpError.
        """
        within_s = self._config.push_timeout_s
        async with self._comparing:
            command = (self._config.store, self._config.model, str(a), str(b))
            process = await self._start(command, module="weightsync.versions")
            try:
                out, err = await asyncio.wait_for(process.communicate(), within_s)
            except TimeoutError:
                what = f"Comparing took over {within_s:g} s and was ended; run `hotswap weights diff` on this host."
                raise HttpError(504, what, code="diff_timeout") from None
            finally:
                await _end(process)
        return _answer_of(process.returncode, out, err, "tensors", "Comparing", code="diff_failed")

    async def close(self) -> None:
        """Ends what is running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._drop_spare()

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end even if the caller goes away; `close` ends it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _push(self, what: tuple[str, ...], then: Callable[[dict[str, Any]], Awaitable[T]]) -> T:
        async with self._turn:
            answer = await self._outcome(*await self._begin(what))
        self._keep_spare()
        return await then(answer)

    async def _begin(self, what: tuple[str, ...]) -> tuple[asyncio.subprocess.Process, bytes | None]:
        """The spare process and what to tell it; else a new one, which knows."""
        spare, self._spare = self._spare, None
        with contextlib.suppress(OSError):
            if spare is not None and (process := await spare).returncode is None:
                return process, orjson.dumps(self._options(what)) + b"\n"
        return await self._start(self._options(what)), None

    def _keep_spare(self) -> None:
        """Begin to start one for the next publication, to be ended after a while."""
        if self._spare is None:
            self._spare = asyncio.create_task(self._start(("--wait",), stdin=asyncio.subprocess.PIPE))
            loop = asyncio.get_running_loop()
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry = loop.call_later(SPARE_S, lambda: loop.create_task(self._drop_spare()))

    async def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if self._expiry is not None:
            self._expiry.cancel()
        if spare is not None:
            with contextlib.suppress(OSError):
                await _end(await spare)

    async def _push_prepared(self, prepared: Prepared, then: Callable[[dict[str, Any]], Awaitable[T]]) -> T:
        try:
            async with self._turn:
                answer = await self._outcome(prepared.process, b"go\n")
        finally:
            await prepared.discard()
        return await then(answer)

    def _options(self, what: tuple[str, ...]) -> tuple[str, ...]:
        """Each with its value in one word: what a client sent is never taken for an option."""
        return f"--store={self._config.store}", f"--model={self._config.model}", "--no-activate", "--json", *what

    async def _start(
        self,
        options: tuple[str, ...],
        *,
        module: str = "weightsync.push",
        stdin: int = asyncio.subprocess.DEVNULL,
        pass_fds: tuple[int, ...] = (),
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *options),
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the gateway's terminal is the gateway's to handle
            pass_fds=pass_fds,
        )

    async def _outcome(self, process: asyncio.subprocess.Process, told: bytes | None = None) -> dict[str, Any]:
        timeout_s = self._config.push_timeout_s
        answering = asyncio.create_task(process.communicate(told))
        stalled = asyncio.create_task(_stalled(process.pid))
        try:
            await asyncio.wait({answering, stalled}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and stalled.done():
                what = f"Publishing made no progress for {STALLED_S:g} s and was ended; nothing was published."
                raise HttpError(504, what, code="push_stalled")
            if not answering.done():
                what = f"Publishing took over {timeout_s:g} s and was ended; nothing was published."
                raise HttpError(504, what, code="push_timeout")
            out, err = answering.result()
        finally:
            stalled.cancel()
            await _end(process)
            answering.cancel()
            await asyncio.gather(answering, stalled, return_exceptions=True)
        return _answer_of(process.returncode, out, err, "version", "Publishing", code="push_failed")


@dataclass(frozen=True)
class Prepared:
    """A publishing process that waits to be told that its file is whole."""

    process: asyncio.subprocess.Process
    file: BinaryIO

    async def discard(self) -> None:
        """End the process and let go of the file; safe to call twice."""
        self.file.close()
        await _end(self.process)


def _named(by: By | None) -> tuple[str, ...]:
    """For the ledger."""
    return (f"--requested-by={by.who}", f"--reason={by.reason}") if by is not None else ()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_GRACE_S):
            await process.wait()
            return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await process.wait()
    except TimeoutError:
        log.error("process %d of a publication cannot be ended: it waits for a disk that does not answer", process.pid)


async def _stalled(pid: int) -> None:
    """Returns when the process has done nothing for STALLED_S."""
    seen, since = _work_done(pid), time.monotonic()
    while time.monotonic() - since < STALLED_S:
        await asyncio.sleep(STALLED_S / 20)
        now = _work_done(pid)
        if seen is None or now is None or now.has_gone_on(seen):
            seen, since = now, time.monotonic()


@dataclass(frozen=True)
class _Work:
    """A process's work: of its first thread, which publishes, in bytes and ticks, and of all threads in seconds."""

    first: tuple[bytes, ...]
    cpu_s: float

    def has_gone_on(self, since: _Work) -> bool:
        """Another thread keeps a lease alive, whatever the first waits for: of all others a moment is nothing."""
        return self.first != since.first or self.cpu_s - since.cpu_s > STALLED_S / 20


def _work_done(pid: int) -> _Work | None:
    """None where the kernel does not tell."""
    try:
        first, process = Path(f"/proc/{pid}/task/{pid}"), Path(f"/proc/{pid}/stat")
        io = (first / "io").read_bytes().split()
        ticks = [int(n) for n in _times(process)]
        return _Work((*_times(first / "stat"), io[1], io[3]), sum(ticks) / os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError):
        return None


def _times(stat: Path) -> list[bytes]:
    """User and system time."""
    return stat.read_bytes().rpartition(b")")[2].split()[11:13]


def _check_path(path: str) -> None:
    """Raises HttpError (400) for what can be no absolute path."""
    try:
        good = Path(path).is_absolute() and "\0" not in path and len(os.fsencode(path)) <= MOST_PATH
    except UnicodeEncodeError:
        good = False
    if not good:
        raise HttpError(400, "`path` must be an absolute path on the gateway's host.", code="bad_path", param="path")


def _answer_of(status: int | None, out: bytes, err: bytes, field: str, work: str, *, code: str) -> dict[str, Any]:
    """The answer of the process, which has `field`. Raises the error that the process tells; if none, with `code`."""
    answer = _last_json(out) or _last_json(err)
    if status == 0 and field in answer:
        return answer
    if isinstance(answer.get("error"), dict):
        raise from_fields(answer["error"])
    log.error("%s ended with status %s: %s", work, status, err.decode(errors="replace")[-2000:])
    raise HttpError(500, f"{work} failed (status {status}); the gateway's log has its output.", code=code)


def _last_json(output: bytes) -> dict[str, Any]:
    for line in reversed(output.splitlines()):
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(line)
            if isinstance(value, dict):
                return value
    return {}


IDLE_S = 300.0  # an update that nobody has touched for so long makes way for another trainer's
MAX_PARTS = 4096
PREFIX = "hotswap-update-"


class WeightUpdate:
    """One update under way. `family` says whose routes it came by, `label` what the trainer calls its weights.
    `session`: the trainer has begun it, and says when it is complete."""

    def __init__(self, family: str, label: str | None = None, *, session: bool = False) -> None:
        self.family, self.label, self.session = family, label, session
        self.touched_at = time.monotonic()
        self._checkpoint: Path | None = None
        self._directory: Path | None = None
        self._files: dict[str, frozenset[str]] = {}  # file -> the tensors in it
        self._writing = asyncio.Lock()

    @property
    def collected(self) -> bool:
        """The update came as bytes, and not as the path of a checkpoint."""
        return self._checkpoint is None

    @property
    def names(self) -> set[str]:
        """The tensors that came as bytes."""
        return {name for names in self._files.values() for name in names}

    def use(self, checkpoint: str) -> None:
        """A checkpoint directory or file on the gateway's host; it is all of the update. Raises HttpError."""
        if not Path(checkpoint).is_absolute():
            raise HttpError(400, "The checkpoint must be an absolute path on the gateway's host.", code="bad_path")
        if self._files or self._checkpoint not in (None, Path(checkpoint)):
            raise HttpError(
                409, "This update has other weights already; a checkpoint must be all of one.", code="mixed_update"
            )
        self._checkpoint = Path(checkpoint)

    async def add(self, encoded: str, room: int | None) -> None:
        """Takes in safetensors, base64; `room` is what all of it may have, bytes. Raises HttpError, CheckpointError.

        The same bytes once more change nothing: a trainer may repeat a request whose answer it lost.
        """
        if self._checkpoint is not None:
            raise HttpError(
                409, "This update is a checkpoint already; it cannot have tensors besides.", code="mixed_update"
            )
        if len(self._files) >= MAX_PARTS:
            raise HttpError(413, f"An update may have {MAX_PARTS} parts; send larger ones.", code="too_many_parts")
        async with self._writing:
            path = await asyncio.to_thread(self._write, encoded, room)
            try:
                self._admit(path, frozenset(await asyncio.to_thread(_checkpoint().read_header, path)))
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def seal(self) -> Path:
        """Where the whole of it is: a checkpoint directory or file. Raises HttpError (409) when nothing was sent."""
        if self._checkpoint is not None:
            return self._checkpoint
        if self._directory is None or not self._files:
            raise HttpError(409, "Nothing was sent since this update began; send weights first.", code="empty_update")
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
            raise HttpError(400, f"This is not base64 ({error}).", code="bad_encoding") from error
        if data[:1] == b"\x80":  # the opcode every pickle since protocol 2 begins with
            raise refused_pickle()
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        held = sum(file.stat().st_size for file in self._directory.iterdir())
        if room is not None and held + len(data) > room:
            raise HttpError(
                413, "These are more bytes than a version of the served model has.", code="update_too_large"
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
                raise HttpError(
                    409,
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

    def begin(self, family: str, label: str | None = None, *, session: bool = False) -> WeightUpdate:
        """A new, empty one. Raises HttpError (409) while another one is under way."""
        before = self._current
        if before is not None:
            idle = time.monotonic() - before.touched_at
            if idle < IDLE_S:
                raise HttpError(
                    409,
                    "Another weight update is under way here; finish it, or wait: it is given up when nothing was sent "
                    f"for {IDLE_S:g} s.",
                    code="update_in_progress",
                )
            log.warning("a weight update of %s is given up: nothing was sent for %.0f s", before.family, idle)
        self.drop()
        self._current = WeightUpdate(family, label, session=session)
        return self._current

    def find(self, family: str) -> WeightUpdate | None:
        """The one of this family."""
        current = self._current
        if current is None or current.family != family:
            return None
        current.touched_at = time.monotonic()
        return current

    def take(self, family: str) -> WeightUpdate:
        """The one of this family, which is the caller's from now on. Raises HttpError (409) when there is none."""
        current = self.find(family)
        if current is None:
            raise HttpError(409, "No weight update is under way here; begin one first.", code="no_update")
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


def refused_pickle() -> HttpError:
    """The answer to tensors in a form that runs code when it is read."""
    return HttpError(
        422,
        "Pickled tensors are refused: reading a pickle runs the code in it. Send safetensors, base64 "
        '(SGLang: in the same field, with "load_format": "safetensors"), or the path of a checkpoint.',
        code="pickle_refused",
    )


def _checkpoint() -> ModuleType:
    """Imported when the first update comes: it brings numpy along, which no other gateway needs."""
    return importlib.import_module("weightsync.publish.checkpoint")
