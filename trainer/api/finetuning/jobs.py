"""Fine-tuning jobs: what is asked for, what state they are in, and whose turn it is.

    validating_files -> queued -> running -> succeeded       from each before it: failed, cancelled
    queued, running  -> paused -> queued

One job runs at a time. The next one is of the key whose last turn is longest ago, its oldest first. A job's record
changes together with what is said about it: events, checkpoints and models are on disk when the change is.
"""

from __future__ import annotations

import asyncio
import csv
import io
import itertools
import logging
import re
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, ConfigDict, Field

from trainer.api.errors import ApiError, Ended
from trainer.api.finetuning.examples import PREFERENCE, SUPERVISED, Bad, Lines, Reader
from trainer.api.finetuning.files import RESULTS, Files
from trainer.api.finetuning.run import At, Checkpoint, Run
from trainer.api.finetuning.steps import Plan
from trainer.api.journal import Journal, Record
from trainer.api.sampling import Client
from trainer.api.service import MODEL, SESSION, Service
from trainer.api.tenants import seed_of
from trainer.api.wire import Body
from trainer.data.parse import BadRecord
from trainer.data.tokenizer import model_tokenizer
from trainer.errors import TrainerError

log = logging.getLogger(__name__)
JOB, EVENT, CHECKPOINT, TUNED = "job", "job_event", "job_checkpoint", "tuned_model"  # kinds of records
VALIDATING, QUEUED, RUNNING, PAUSED = "validating_files", "queued", "running", "paused"
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
OPEN: Final = {VALIDATING, QUEUED, RUNNING, PAUSED}
AUTO_EPOCHS, AUTO_BETA, MOST_AUTO_BATCH = 3, 0.1, 32
COLUMNS: Final = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
_SUFFIX: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


_AUTO: Final = BeforeValidator(lambda value: None if value == "auto" else value)
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(Body):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Hyperparameters(_Strict):
    """None: chosen by the number of examples."""

    n_epochs: Annotated[Annotated[int, Field(ge=1, le=50)] | None, _AUTO] = None
    batch_size: Annotated[Annotated[int, Field(ge=1, le=256)] | None, _AUTO] = None
    learning_rate_multiplier: Annotated[_Positive | None, _AUTO] = None


class DpoHyperparameters(Hyperparameters):
    beta: Annotated[_Positive | None, _AUTO] = None


class Supervised(_Strict):
    hyperparameters: Hyperparameters | None = None


class Preferences(_Strict):
    hyperparameters: DpoHyperparameters | None = None


class Method(_Strict):
    type: str
    supervised: Supervised | None = None
    dpo: Preferences | None = None
    reinforcement: dict[str, Any] | None = None


_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class CreateJob(_Strict):
    model: str
    training_file: str
    validation_file: str | None = None
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None
    suffix: str | None = None
    seed: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    metadata: Annotated[dict[_Key, _Value] | None, Field(max_length=16)] = None
    integrations: list[dict[str, Any]] | None = None

    def chosen(self) -> tuple[str, Hyperparameters]:
        """The method and its hyperparameters. Raises ApiError (400)."""
        if self.method is None:
            return SUPERVISED, self.hyperparameters or Hyperparameters()
        if self.hyperparameters is not None:
            raise ApiError(400, "give hyperparameters in the method, or without one, not both", param="hyperparameters")
        kind = self.method.type
        if kind not in (SUPERVISED, PREFERENCE):
            advice = "use supervised or dpo; `hotswap train` and the tinker SDK learn from rewards"
            raise ApiError(400, f"the method {kind!r} is nothing here: {advice}", "unknown_method", "method.type")
        for other in {"supervised", "dpo", "reinforcement"} - {kind}:
            if getattr(self.method, other) is not None:
                raise ApiError(
                    400, f"the method is {kind}, so nothing reads this: leave it out", param=f"method.{other}"
                )
        if kind == SUPERVISED:
            return SUPERVISED, (self.method.supervised or Supervised()).hyperparameters or Hyperparameters()
        return PREFERENCE, (self.method.dpo or Preferences()).hyperparameters or DpoHyperparameters()


class Jobs:
    """Bound to the event loop it is started on."""

    def __init__(self, service: Service, files: Files) -> None:
        self._service, self.files = service, files
        self.journal: Journal = service.journal
        self._config = service.config
        self._lock = asyncio.Lock()  # one change of a job at a time
        self._open: dict[str, Record] = {}
        self._turns, self._turn = Counter[str](), itertools.count(1)  # when each key had its last one
        self._woken = {VALIDATING: asyncio.Event(), QUEUED: asyncio.Event()}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Go on with the jobs that had not ended."""
        for job in await asyncio.to_thread(self.journal.all, JOB):
            if job.about["status"] in OPEN:
                self._open[job.id] = job
            else:
                await self._tidy(job.id)
        self._tasks = [
            asyncio.create_task(self._serve(VALIDATING, self._validate)),
            asyncio.create_task(self._serve(QUEUED, self._run)),
        ]

    async def close(self) -> None:
        """The running jobs go on after the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # The requests of clients.

    async def create(self, client: Client, body: CreateJob) -> Record:
        """Raises ApiError (400, 404, 429)."""
        method, asked = body.chosen()
        if body.suffix is not None and not _SUFFIX.fullmatch(body.suffix):
            raise ApiError(
                400, f"the suffix {body.suffix!r} is none: use up to 64 letters, digits and . _ -", param="suffix"
            )
        if body.integrations:
            advice = "leave it out; the events and the result file have the metrics"
            raise ApiError(400, f"no integration is connected here: {advice}", param="integrations")
        base = self._base(client, body.model)
        identity = f"ftjob-{uuid.uuid4().hex}"
        about: dict[str, Any] = {
            "status": VALIDATING,
            "model": body.model,
            "method": method,
            "hyperparameters": asked.model_dump(),
            "training_file": body.training_file,
            "validation_file": body.validation_file,
            "suffix": body.suffix,
            "seed": seed_of(identity) % 2**31 if body.seed is None else body.seed,
            "metadata": body.metadata,
            "name": f"ft:{self._config.name}:{body.suffix or ''}:{identity[6:16]}",
            "fine_tuned_model": None,
            "finished": None,
            "error": None,
            "result_files": [],
            "at": asdict(At()),
            "last": {},
            **base,
        }
        async with self._lock:
            for name in ("training_file", "validation_file"):
                if about[name] is not None:
                    self._check_file(client, about[name], method, name)
            most = self._config.limits.jobs
            if sum(job.owner == client.owner for job in self._open.values()) >= most:
                raise ApiError(429, f"{most} jobs of this key have not ended: wait for one, or cancel one")
            if len(self.journal.of_owner(MODEL, client.owner)) >= self._config.limits.models:
                advice = "delete a model (DELETE /v1/models/NAME), or have limits.models raised"
                raise ApiError(400, f"this key has as many models as it may: {advice}", "too_many_models", "model")
            job = Record(JOB, identity, client.owner, about=about)
            named = " and ".join(about[n] for n in ("training_file", "validation_file") if about[n])
            events = [_event(job, f"Created fine-tuning job: {identity}"), _event(job, f"Validating: {named}")]
            await asyncio.to_thread(self.journal.put, job, *events)
            self._open[identity] = job
        self._wake()
        return job

    def find(self, client: Client, identity: str) -> Record:
        """One of the key's own. Raises ApiError (404)."""
        found = self.journal.get(JOB, identity)
        if found is None or found.owner != client.owner:
            raise ApiError(404, f"there is no fine-tuning job {identity!r} of this key: create one, or list them")
        return found

    async def cancel(self, client: Client, identity: str) -> Record:
        """Between two steps. Raises ApiError (404; 400 for one that has ended)."""
        return await self._move(client, identity, OPEN, CANCELLED, "Fine-tuning job cancelled", finished=time.time())

    async def pause(self, client: Client, identity: str) -> Record:
        """Between two steps. Raises ApiError (404; 400 for one that has nothing to pause)."""
        return await self._move(client, identity, {QUEUED, RUNNING}, PAUSED, "Fine-tuning job paused")

    async def resume(self, client: Client, identity: str) -> Record:
        """Raises ApiError (404; 400 for one that is not paused)."""
        return await self._move(client, identity, {PAUSED}, QUEUED, "Fine-tuning job resumed")

    async def delete_file(self, client: Client, identity: str) -> None:
        """Raises ApiError (404; 400 for one that a job still reads)."""
        async with self._lock:
            for job in self._open.values():
                if job.owner == client.owner and identity in (job.about["training_file"], job.about["validation_file"]):
                    advice = "wait until it has ended, or cancel it"
                    raise ApiError(400, f"the job {job.id} uses {identity}: {advice}", "file_in_use", "file_id")
            await asyncio.to_thread(self.files.delete, client.owner, identity)

    def tuned(self, client: Client, name: str) -> Record:
        """A model that a job has trained, by name. Raises ApiError (404)."""
        found = self.journal.get(TUNED, name)
        if found is None or found.owner != client.owner:
            base = self._config.name
            raise ApiError(
                404, f"there is no model {name!r} of this key: use {base!r}, or train one", "model_not_found", "model"
            )
        return found

    async def delete_model(self, client: Client, name: str) -> None:
        """Raises ApiError (404; 400 for one that a job still needs)."""
        async with self._lock:
            found = self.tuned(client, name)
            job = found.about["job"]
            for other in self._open.values():
                if other.id == job or (other.about["from"] is not None and other.about["from"] == found.about["state"]):
                    advice = "wait until it has ended, or cancel it"
                    raise ApiError(400, f"the job {other.id} needs {name}: {advice}", "model_in_use", "model")
            for path in filter(None, (found.about["adapter"], found.about["state"])):
                await asyncio.to_thread(self._service.delete_checkpoint, client, path)
            await asyncio.to_thread(self.journal.remove, TUNED, name)
        await self._tidy(job)

    def _base(self, client: Client, name: str) -> dict[str, Any]:
        """The start of a job: the base model and a rank, or a state to go on from. Raises ApiError (400, 404)."""
        if name == self._config.name:
            return {"from": None, "rank": self._config.job_rank}
        found = self.tuned(client, name)
        if found.about["state"] is None:
            raise ApiError(
                400, f"{name} is of an epoch within a job: train the job's last model further", param="model"
            )
        return {"from": found.about["state"], "rank": None}

    def _check_file(self, client: Client, identity: str, method: str, param: str) -> None:
        file = self.files.find(client.owner, identity, param)
        if file.about["purpose"] == RESULTS:
            raise ApiError(400, f"{identity} has results of a job: give a file of examples", param=param)
        if file.about["method"] != method:
            wrong = file.about["method"]
            raise ApiError(
                400, f"the examples in {identity} are for {wrong}, the job's method is {method}", param=param
            )

    async def _move(
        self, client: Client, identity: str, states: set[str], to: str, message: str, **changes: Any
    ) -> Record:
        job = self.find(client, identity)
        changed = await self._change(identity, states, _event(job, message), status=to, **changes)
        if changed is None:
            status = self.find(client, identity).about["status"]
            possible = ", ".join(sorted(states))
            raise ApiError(400, f"the job is {status}; it must be one of {possible} for that", "wrong_status")
        self._wake()
        return changed

    # The course of a job.

    async def _change(self, identity: str, states: set[str], *also: Record, **changes: Any) -> Record | None:
        """The job's record as it is then, on disk; None, and nothing has changed, in another state."""
        async with self._lock:
            job = self._open.get(identity)
            if job is None or job.about["status"] not in states:
                return None
            now = replace(job, about={**job.about, **changes})
            while True:
                try:
                    await asyncio.to_thread(self.journal.put, now, *also)
                    break
                except sqlite3.Error as error:
                    log.error("cannot write what the job %s has come to (%s); trying again", identity, error)
                    await asyncio.sleep(1)
            if now.about["status"] in OPEN:
                self._open[identity] = now
            else:
                del self._open[identity]
        return now

    def _wake(self) -> None:
        for event in self._woken.values():
            event.set()

    async def _serve(self, status: str, do: Callable[[Record], Awaitable[None]]) -> None:
        while True:
            self._woken[status].clear()
            if (job := self._next(status)) is None:
                await self._woken[status].wait()
                continue
            try:
                await do(job)
            except Ended:  # it goes on after the next start
                return
            except TrainerError as error:
                code, param = (error.code, error.param) if isinstance(error, ApiError) else ("training_failed", None)
                await self._fail(job, {"code": code, "message": str(error), "param": param})
            except Exception as error:
                log.exception("the job %s failed", job.id)
                said = f"the server failed ({error or type(error).__name__}); its log says where"
                await self._fail(job, {"code": "server_error", "message": said, "param": None})
            if job.id not in self._open:
                await self._tidy(job.id)

    def _next(self, status: str) -> Record | None:
        """One that ran when the server ended; else of the key whose turn it is, the oldest."""
        states = {VALIDATING} if status == VALIDATING else {QUEUED, RUNNING}
        found = [job for job in self._open.values() if job.about["status"] in states]
        order = lambda job: (job.about["status"] != RUNNING, self._turns[job.owner], job.made)  # noqa: E731
        return min(found, key=order, default=None)

    async def _validate(self, job: Record) -> None:
        rows = await asyncio.to_thread(self._examined, job)
        asked = job.about["hyperparameters"]
        found = {
            "n_epochs": asked["n_epochs"] or AUTO_EPOCHS,
            "batch_size": asked["batch_size"] or max(1, min(MOST_AUTO_BATCH, rows // MOST_AUTO_BATCH)),
            "learning_rate_multiplier": asked["learning_rate_multiplier"] or 1.0,
        }
        if job.about["method"] == PREFERENCE:
            found["beta"] = asked["beta"] or AUTO_BETA
        event = _event(job, "Files validated, moving job to queued state")
        await self._change(job.id, {VALIDATING}, event, status=QUEUED, hyperparameters=found)
        self._woken[QUEUED].set()

    def _examined(self, job: Record) -> int:
        """How many examples it trains on. Raises ApiError (400), which names the bad lines, DataError."""
        reader = self._reader()
        for name in ("validation_file", "training_file"):
            if job.about[name] is None:
                continue
            lines, bad = Lines(self.files.path(job.about[name])), Bad(job.about[name], name, f"invalid_{name}")
            for index in range(len(lines)):
                try:
                    reader.sequences(lines.read(index))
                except BadRecord as error:
                    bad.add(int(lines.numbers[index]), error)
            bad.refuse()
        return len(lines)

    async def _run(self, job: Record) -> None:
        self._turns[job.owner] = next(self._turn)
        if job.about["status"] == QUEUED:
            started = _event(job, "Fine-tuning job started")
            if await self._change(job.id, {QUEUED}, started, status=RUNNING) is None:
                return
        job = self._open[job.id]
        about = {"user_metadata": None, "display_name": job.id, "tags": ["fine-tuning job"]}
        await asyncio.to_thread(self.journal.put, Record(SESSION, job.id, job.owner, about=about))
        files = [
            None if job.about[name] is None else await asyncio.to_thread(Lines, self.files.path(job.about[name]))
            for name in ("training_file", "validation_file")
        ]
        training, validation = files
        assert training is not None  # every job has one
        asked, c = job.about["hyperparameters"], self._config.jobs
        rate = c.dpo_learning_rate if job.about["method"] == PREFERENCE else c.learning_rate
        rate *= asked["learning_rate_multiplier"]
        plan = Plan(len(training), asked["n_epochs"], asked["batch_size"], rate, job.about["seed"])

        async def report(at: At, measured: Mapping[str, Any], left: Checkpoint | None) -> bool:
            return await self._reached(job, plan, at, measured, left)

        await Run(self._service, job, plan, self._reader(), (training, validation)).go(report)

    async def _reached(
        self, job: Record, plan: Plan, at: At, measured: Mapping[str, Any], left: Checkpoint | None
    ) -> bool:
        """Whether the job is to run on."""
        said = {"step": at.step, "total_steps": plan.steps, **measured}
        event = _event(job, _told(said), said)
        if left is None:
            return await self._change(job.id, {RUNNING}, event, at=asdict(at), last=dict(measured)) is not None
        last = left.state is not None
        name = job.about["name"] + ("" if last else f":ckpt-step-{left.step}")
        tuned = {"job": job.id, "adapter": left.adapter, "state": left.state}
        metrics = {"model": name, "step": left.step, "metrics": {"step": left.step, **left.metrics}}
        records = [
            *([event] if "valid_loss" in measured else []),  # the step has said all else
            Record(TUNED, name, job.owner, f"{job.id}:train:0", tuned),
            Record(CHECKPOINT, f"ftckpt-{uuid.uuid4().hex}", job.owner, job.id, metrics),
            _event(job, f"Checkpoint created at step {left.step} as {name}"),
        ]
        changes: dict[str, Any] = {"at": asdict(at)}
        if last:
            results = await asyncio.to_thread(self._results, job, event)
            records += [results, _event(job, f"New fine-tuned model created: {name}")]
            records.append(_event(job, "The job has successfully completed"))
            changes |= {"status": SUCCEEDED, "fine_tuned_model": name, "finished": time.time()}
            changes["result_files"] = [results.id]
        return await self._change(job.id, {RUNNING}, *records, **changes) is not None

    def _results(self, job: Record, last: Record) -> Record:
        """The metrics of all steps as CSV, a file of the key."""
        rows: dict[int, dict[str, Any]] = {}
        for event in [*self.journal.below(EVENT, job.id), last]:
            if (data := event.about["data"]) is not None:
                rows.setdefault(data["step"], {}).update({k: v for k, v in data.items() if k in COLUMNS})
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())
        identity = f"file-{job.id.removeprefix('ftjob-')}"
        return self.files.write_results(job.owner, identity, "step_metrics.csv", text.getvalue().encode())

    async def _fail(self, job: Record, error: Mapping[str, Any]) -> None:
        event = _event(job, f"Fine-tuning job failed: {error['message']}", level="error")
        await self._change(job.id, OPEN, event, status=FAILED, error=dict(error), finished=time.time())

    async def _tidy(self, identity: str) -> None:
        """Of a job that has ended nothing stays but the training client that its models are of."""
        for model in self.journal.below(MODEL, identity):
            if not self.journal.below(TUNED, model.id):
                await self._service.delete_model(model)

    def _reader(self) -> Reader:
        return Reader(model_tokenizer(self._config.model), self._service.tenants.shape.max_positions)


def _event(job: Record, message: str, data: Mapping[str, Any] | None = None, level: str = "info") -> Record:
    """`data` makes it one of metrics."""
    about = {"level": level, "message": message, "data": None if data is None else dict(data)}
    return Record(EVENT, f"ftevent-{uuid.uuid4().hex}", job.owner, job.id, about)


def _told(measured: Mapping[str, Any]) -> str:
    names = {"train_loss": "training loss", "full_valid_loss": "full validation loss"}
    said = [f"{name}={measured[key]:.4f}" for key, name in names.items() if key in measured]
    return f"Step {measured['step']}/{measured['total_steps']}: {', '.join(said)}"
