"""The work that the training API's requests ask for: sessions, training clients, checkpoints and samplers.

A training client's requests are numbered, written into the journal and executed by the queue. Everything they do on the
model runs on one thread. A client whose tenant is not in memory (after a restart, or because others were used since) is
read from its state file, and the batches since its last step are run again for the gradient.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trainer.api import wire
from trainer.api.config import ApiConfig
from trainer.api.errors import ApiError, Ended
from trainer.api.journal import Answer, Done, Journal, Record, Request
from trainer.api.queue import Queue
from trainer.api.sampling import Client, Snapshots
from trainer.api.states import described, lora_of
from trainer.api.tenants import ATTENTION, FEED_FORWARD, Tenants, seed_of
from trainer.config import LoraConfig
from trainer.errors import CheckpointError, TrainerError

SESSION, MODEL, CHECKPOINT, SAMPLER = "session", "model", "checkpoint", "sampler"
FORWARD, FORWARD_BACKWARD, STEP = "forward", "forward_backward", "optim_step"
CREATE, LOAD, SAVE, SAVE_FOR_SAMPLER = "create_model", "load_weights", "save_weights", "save_weights_for_sampler"
WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"  # the two kinds of checkpoints, as in their paths
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH: Final = re.compile(r"tinker://([^/]+)/([^/]+)/([^/]+)")
_Handler = Callable[[Request, Record | None], Done]
FAULT, MOST_FAULTS = "fault", 3  # a request that is tried no more
SHORTEST_S, LONGEST_S = 3600, 10 * 365 * 86_400  # that a checkpoint is told to live, as in the SDK
ABSENT_S: Final = 60.0  # that a session may be silent, whose client has all weights; the SDK speaks every 10


class Service:
    """Bound to the event loop it is started on. `tenants` is used on the thread of `work` alone."""

    def __init__(
        self, config: ApiConfig, journal: Journal, tenants: Tenants, work: ThreadPoolExecutor, snapshots: Snapshots
    ) -> None:
        self.config, self.journal, self.tenants = config, journal, tenants
        self.queue = Queue(journal, self._execute, config.limits.pending)
        self._work, self._snapshots = work, snapshots
        self._directory = Path(config.directory)
        self._holder: tuple[str, str] | None = None  # the client (and its session) that has all weights
        self._heard: dict[str, float] = {}  # when each session was last heard of
        self._handlers: dict[str, _Handler] = {
            CREATE: self._create,
            LOAD: self._load,
            FORWARD: self._run,
            FORWARD_BACKWARD: self._run,
            STEP: self._step,
            SAVE: self._save,
            SAVE_FOR_SAMPLER: self._save_for_sampler,
        }

    # A refusal before the request has a number comes at once. After that a refusal has to be a result: the SDK has
    # given the next number away.

    async def create(self, client: Client, body: wire.CreateModel) -> str:
        """The model's id; its request 0 makes it. Raises ApiError (404; 400, also for all weights that
        another client has)."""
        self.record(SESSION, body.session_id, client)
        self._check_base(body.base_model)
        _check_optimizer(body.optimizer_config)
        self._lora(body.lora_config)
        model = self._new_model(client, body.session_id, body.model_seq_id)
        self._take(model, body.session_id)
        await self._submit(client, model, 0, CREATE, body.model_dump_json().encode(), body.digest())
        return model

    async def load(self, client: Client, body: wire.LoadWeights) -> tuple[str, int]:
        """Of a new model, or onto one: its id and the request's number."""
        if body.session_id is not None and body.model_seq_id is not None:
            self.record(SESSION, body.session_id, client)
            self._check_base(body.base_model or self.config.name)
            _check_optimizer(body.optimizer_config)
            self._checkpoint(body.path, client.owner)
            model, seq = self._new_model(client, body.session_id, body.model_seq_id), 0
            self._take(model, body.session_id)
        elif body.model_id is not None and body.seq_id is not None:
            model, seq = self.record(MODEL, body.model_id, client).id, body.seq_id
        else:
            raise ApiError(400, "load_weights needs model_id with seq_id, or session_id with model_seq_id")
        await self._submit(client, model, seq, LOAD, body.model_dump_json().encode(), body.digest())
        return model, seq

    async def batch(self, client: Client, content: bytes) -> tuple[str, int]:
        """Takes a `forward_backward`, or a `forward`."""
        found = await asyncio.to_thread(wire.read_batch, content)
        kind = FORWARD if found.forward_only else FORWARD_BACKWARD
        self.record(MODEL, found.model_id, client)
        await self._submit(client, found.model_id, found.seq_id, kind, content, await asyncio.to_thread(found.digest))
        return found.model_id, found.seq_id

    async def numbered(self, client: Client, kind: str, body: wire.OptimStep | wire.SaveWeights) -> tuple[str, int]:
        """Takes a step, or one of the two ways to save."""
        self.record(MODEL, body.model_id, client)
        await self._submit(client, body.model_id, body.seq_id, kind, body.model_dump_json().encode(), body.digest())
        return body.model_id, body.seq_id

    async def result(self, client: Client, model: str, seq: int) -> Answer | None:
        """None if there is none yet, after a long wait. Raises ApiError (404, 410)."""
        if await asyncio.to_thread(self.journal.owner, model) != client.owner:
            raise ApiError(404, f"there is no training client {model!r} of this key")
        return await self.queue.result(model, seq)

    async def delete_model(self, model: Record) -> None:
        """With its checkpoints. Requests that wait are given up."""
        await self.queue.give_up(model.id)

        def remove() -> None:
            self.tenants.drop(model.id)
            if self._holder is not None and self._holder[0] == model.id:
                self._holder = None
            self.journal.forget(model.id)
            _remove(self._directory / "models" / model.id)

        await asyncio.get_running_loop().run_in_executor(self._work, remove)

    def heard(self, session: str, *, over: bool = False) -> None:
        """A session is there, or `over`: then others may have the weights that its client has."""
        if over:
            self._heard.pop(session, None)
        else:
            self._heard[session] = time.monotonic()

    def _take(self, model: str, session: str) -> None:
        """Have all weights for a client; those of one session take turns. Raises ApiError (400) while another
        session has them and is there."""
        if not self.config.full or (held := self._holder) == (model, session):
            return
        if (
            held is not None
            and held[1] != session
            and time.monotonic() - self._heard.get(held[1], -ABSENT_S) < ABSENT_S
        ):
            raise ApiError(
                400,
                f"another client trains all weights, one at a time may: wait until its session ends, or delete it "
                f"(DELETE /api/v1/training_runs/{held[0]})",
                "weights_taken",
            )
        self._holder = model, session

    def record(self, kind: str, identity: str, client: Client) -> Record:
        """One of the client's own. Raises ApiError (404)."""
        found = self.journal.get(kind, identity)
        if found is None or found.owner != client.owner:
            raise ApiError(404, f"there is no {kind} {identity!r} of this key: create one first")
        return found

    def sampler(self, client: Client, body: wire.CreateSampler) -> str:
        """The id of a new sampler. Raises ApiError (400, 404)."""
        self.record(SESSION, body.session_id, client)
        directory = None
        if body.model_path is not None:
            directory = str(self.snapshot(client, body.model_path))
        elif body.base_model is None:
            raise ApiError(400, "a sampler needs base_model, or model_path with what save_weights_for_sampler returned")
        else:
            self._check_base(body.base_model)
            directory = self.config.model.path if self.config.full else None
        made = self._sampler(client.owner, body.session_id, body.sampling_session_seq_id, directory, body.model_path)
        self.journal.put(made)
        return made.id

    def snapshot(self, client: Client, path: str) -> Path:
        """The directory of an adapter that was saved for sampling. Raises ApiError (400, 404)."""
        return Path(self._checkpoint(path, client.owner, SAMPLER_WEIGHTS).about["directory"])

    def delete_checkpoint(self, client: Client, path: str) -> None:
        """Raises ApiError (404)."""
        found = self._checkpoint(path, client.owner)
        self.journal.remove(CHECKPOINT, found.id)
        _remove(Path(found.about["directory"]))

    def keep_checkpoint(self, client: Client, path: str, seconds: int | None) -> None:
        """Let it expire in so many seconds, or never. Raises ApiError (400, 404)."""
        if seconds is not None and not SHORTEST_S <= seconds <= LONGEST_S:
            raise ApiError(400, f"ttl_seconds {seconds} is out of range: use {SHORTEST_S} (an hour) to {LONGEST_S}")
        found = self._checkpoint(path, client.owner)
        self.journal.put(replace(found, about={**found.about, "expires": _expiry(seconds)}))

    def checkpoints_of(self, client: Client) -> list[Record]:
        """Those of a client that have not expired, oldest first."""
        return [found for found in self.journal.of_owner(CHECKPOINT, client.owner) if not _expired(found)]

    def checkpoints(self, model: str) -> list[Record]:
        """Those of a model that have not expired."""
        return [found for found in self.journal.below(CHECKPOINT, model) if not _expired(found)]

    def lora_of_checkpoint(self, client: Client, path: str) -> Mapping[str, Any] | None:
        """The settings of the checkpoint's adapter; None: all weights. Raises ApiError (400, 404)."""
        found = self._checkpoint(path, client.owner)
        lora: Mapping[str, Any] | None = self.record(MODEL, found.parent, client).about["lora"]
        return lora

    async def _submit(self, client: Client, model: str, seq: int, kind: str, body: bytes, digest: str) -> None:
        if seq < 0:
            raise ApiError(400, f"seq_id {seq} is no number of a request: count from 1")
        await self.queue.submit(Request(model, seq, client.owner, kind, body, f"{kind} {digest}"))

    def _new_model(self, client: Client, session: str, number: int) -> str:
        """Its id, which a repeated request gets again. Raises ApiError (400)."""
        model = f"{session}:train:{number}"  # the SDK counts on this form
        most = self.config.limits.models
        if self.journal.get(MODEL, model) is None and len(self.journal.of_owner(MODEL, client.owner)) >= most:
            raise ApiError(
                400,
                f"this key has {most} training clients, which is the limit: delete one (DELETE "
                "/api/v1/training_runs/ID), or have limits.models raised",
                "too_many_models",
            )
        return model

    def _check_base(self, name: str) -> None:
        if name != self.config.name:
            raise ApiError(
                400, f"the base model {name!r} is not served here: use {self.config.name!r}", "unknown_model"
            )

    def _lora(self, asked: wire.Lora | None) -> LoraConfig | None:
        """None: all weights, which is a rank of 0 in the SDK. Raises ApiError (400)."""
        most, full = self.config.limits.rank, asked is None or asked.rank == 0
        if full and not self.config.full:
            raise ApiError(
                400,
                "adapters alone are trained here: create the client with a rank, or have the server's configuration "
                "say `full: true`",
                "full_training_unsupported",
            )
        if asked is None or full:
            return None
        if self.config.full:
            raise ApiError(400, "all weights are trained here: create the client with rank=0", "adapters_unsupported")
        if not 1 <= asked.rank <= most:
            raise ApiError(400, f"rank {asked.rank} is out of range: use 1 to {most}", "rank_out_of_range")
        targets = (ATTENTION if asked.train_attn else ()) + (FEED_FORWARD if asked.train_mlp else ())
        if not targets:
            raise ApiError(400, "nothing would be trained: set train_attn or train_mlp (the head has no adapter here)")
        return LoraConfig(rank=asked.rank, alpha=self.config.alpha, target_modules=targets)

    def _checkpoint(self, path: str, owner: str, kind: str = "") -> Record:
        """Raises ApiError (400, 404)."""
        parts = _PATH.fullmatch(path)
        if parts is None or parts[2] not in (WEIGHTS, SAMPLER_WEIGHTS) or (kind and parts[2] != kind):
            of = kind or WEIGHTS
            raise ApiError(400, f"{path!r} is no checkpoint of this kind: give tinker://RUN/{of}/NAME", "wrong_path")
        found = self.journal.get(CHECKPOINT, path)
        if found is None or found.owner != owner or _expired(found):
            raise ApiError(
                404, f"there is no checkpoint {path} of this key: it was not saved, was deleted or has expired"
            )
        return found

    # Executed by the queue.

    async def _execute(self, request: Request) -> Done:
        if (faults := self._faults(request)) >= MOST_FAULTS:
            raise TrainerError(f"{request.kind} was begun {faults} times, and the server's ranks did not outlive it")
        together = self.tenants.ended is None
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._work, self._on_thread, request)
        except Ended:
            if together:  # it was this one's turn
                put = Record(FAULT, request.id, request.owner, request.model, {"times": faults + 1})
                await asyncio.to_thread(self.journal.put, put)
            raise
        if request.kind == SAVE_FOR_SAMPLER and not done.answer.failed:
            async with self._snapshots.held(self._snapshot_of(request)):
                pass  # it serves
        return done

    def _faults(self, request: Request) -> int:
        """How often its turn has ended with the ranks."""
        found = self.journal.get(FAULT, request.id)
        return 0 if found is None else int(found.about["times"])

    def _on_thread(self, request: Request) -> Done:
        model = self.journal.get(MODEL, request.model)
        if model is None and request.kind not in (CREATE, LOAD):
            raise ApiError(404, f"the training client {request.model} could not be created, so it takes no requests")
        known = request.model in self.tenants
        try:
            if model is not None:
                self._take(model.id, model.parent)
            return self._handlers[request.kind](request, model)
        except Ended:
            raise
        except Exception as error:
            if not (known and isinstance(error, ApiError) and error.user):
                self.tenants.drop(request.model)  # whatever it had begun: read it again
            raise

    def _create(self, request: Request, _: Record | None) -> Done:
        body = wire.CreateModel.model_validate_json(request.body)
        lora, seed = self._lora(body.lora_config), None if body.lora_config is None else body.lora_config.seed
        seed = seed_of(f"{self.config.seed} {request.model}") if seed is None else seed
        self.tenants.make(request.model, described(lora), str(seed))
        return self._made(request, body.session_id, body.user_metadata, lora)

    def _made(
        self, request: Request, session: str, metadata: Mapping[str, Any] | None, lora: LoraConfig | None
    ) -> Done:
        about = {"lora": described(lora), "session": session, "user_metadata": metadata}
        model = Record(MODEL, request.model, request.owner, session, about)
        answer = {"type": request.kind, "model_id": request.model}
        return self._settle(request, model, Answer.json(answer))

    def _load(self, request: Request, model: Record | None) -> Done:
        body = wire.LoadWeights.model_validate_json(request.body)
        found = self._checkpoint(body.path, request.owner, WEIGHTS)
        directory = found.about["directory"]
        lora = lora_of(Path(directory))
        if model is None:
            assert body.session_id is not None  # `load` has looked
            if (lora is None) != self.config.full:
                trained = "all weights are" if self.config.full else "adapters are"
                raise ApiError(400, f"{trained} trained here, and {body.path} is of something else", "other_adapter")
            self.tenants.make(request.model, described(lora), "0")
            self.tenants.read(request.model, directory, body.optimizer)
            done = self._made(request, body.session_id, body.user_metadata, lora)
        else:
            own = self._in_memory(model, request.seq)
            if described(lora) != own:
                raise ApiError(
                    400,
                    f"{body.path} is of {_named(described(lora))}; this client trains {_named(own)}: create a client "
                    "from the checkpoint instead (create_training_client_from_state)",
                    "other_adapter",
                )
            self.tenants.read(model.id, directory, body.optimizer)
            done = self._settle(request, model, Answer(b""))
        answer = {"type": LOAD, "path": body.path, "model_id": request.model}
        return Done(Answer.json(answer), done.records, settled=True)

    def _run(self, request: Request, model: Record | None) -> Done:
        assert model is not None  # looked at in _on_thread
        self._in_memory(model, request.seq)
        answer = Answer(wire.output(*self.tenants.run(model.id, wire.read_batch(request.body))), wire.PROTOBUF)
        return Done(answer, keep=request.kind == FORWARD_BACKWARD)

    def _step(self, request: Request, model: Record | None) -> Done:
        assert model is not None  # looked at in _on_thread
        body = wire.OptimStep.model_validate_json(request.body)
        if body.adam_params is None:
            raise ApiError(400, "the optimizer here is AdamW: pass AdamParams", "unsupported_optimizer")
        self._in_memory(model, request.seq)
        try:
            metrics = self.tenants.step(model.id, body.adam_params.model_dump())
        except ApiError as error:
            if error.status != 400:  # which took the gradient: that is not to come back after a crash
                raise
            answer = Answer.json({"error": str(error), "category": "user"}, failed=True)
        else:
            answer = Answer.json({"metrics": metrics})
        return self._settle(request, model, answer)

    def _save(self, request: Request, model: Record | None) -> Done:
        assert model is not None  # looked at in _on_thread
        body = wire.SaveWeights.model_validate_json(request.body)
        path = self._new_path(request, body, WEIGHTS)
        directory = self._directory / "models" / request.model / WEIGHTS / str(request.seq)
        self._in_memory(model, request.seq)
        self.tenants.write(model.id, str(directory))
        record = _checkpoint_record(request, path, directory, body)
        return Done(Answer.json({"type": SAVE, "path": path}), (record,))

    def _save_for_sampler(self, request: Request, model: Record | None) -> Done:
        assert model is not None  # looked at in _on_thread
        body = wire.SaveForSampler.model_validate_json(request.body)
        path = None if body.path is None else self._new_path(request, body, SAMPLER_WEIGHTS)
        if path is None and body.sampling_session_seq_id is None:
            raise ApiError(400, "save_weights_for_sampler needs a path, or sampling_session_seq_id")
        directory = self._snapshot_of(request)
        self._in_memory(model, request.seq)
        self.tenants.export(model.id, self.config.publish.dtype, str(directory))
        answer: dict[str, Any] = {"type": SAVE_FOR_SAMPLER, "path": path}
        if path is not None:
            return Done(Answer.json(answer), (_checkpoint_record(request, path, directory, body),))
        self._forget_old_snapshots(request.model)
        assert body.sampling_session_seq_id is not None
        session = str(model.about["session"])
        made = self._sampler(request.owner, session, body.sampling_session_seq_id, str(directory), None)
        return Done(Answer.json(answer | {"sampling_session_id": made.id}), (made,))

    def _new_path(self, request: Request, body: wire.SaveWeights, kind: str) -> str:
        name = body.path or f"step-{request.seq}"
        if not _NAME.fullmatch(name):
            advice = "use up to 128 letters, digits and . _ -"
            raise ApiError(400, f"{name!r} is no name for a checkpoint: {advice}", "bad_name")
        path = f"tinker://{request.model}/{kind}/{name}"
        if (found := self.journal.get(CHECKPOINT, path)) is not None and not (body.overwrite or _expired(found)):
            advice = "choose another name, or set overwrite"
            raise ApiError(400, f"there is a checkpoint {path} already: {advice}", "name_taken")
        return path

    def _snapshot_of(self, request: Request) -> Path:
        named = wire.SaveForSampler.model_validate_json(request.body).path is not None
        kind = SAMPLER_WEIGHTS if named else "snapshots"
        return self._directory / "models" / request.model / kind / str(request.seq)

    def _forget_old_snapshots(self, model: str) -> None:
        """Those without a name but for the newest ones."""
        directory = self._directory / "models" / model / "snapshots"
        numbers = sorted((int(path.name) for path in directory.iterdir()), reverse=True)
        for number in numbers[self.config.limits.served :]:
            _remove(directory / str(number))

    def _sampler(self, owner: str, session: str, number: int, directory: str | None, path: str | None) -> Record:
        about = {"directory": directory, "model_path": path}
        return Record(SAMPLER, f"{session}:sample:{number}", owner, session, about)

    def _settle(self, request: Request, model: Record, answer: Answer) -> Done:
        """Write the tenant's state to disk, so that what came before needs not be done again."""
        directory = self._directory / "models" / model.id / "states"
        self.tenants.write(model.id, str(directory / str(request.seq)))
        for other in directory.iterdir():
            if other.name not in (str(request.seq), str(model.about.get("applied"))):
                _remove(other)  # of before the state that counts until this one does
        record = Record(MODEL, model.id, model.owner, model.parent, {**model.about, "applied": request.seq}, model.made)
        return Done(answer, (record,), settled=True)

    def _in_memory(self, model: Record, seq: int) -> dict[str, Any] | None:
        """Have its tenant as it is before the request `seq`; what its adapter is like."""
        lora: dict[str, Any] | None = model.about["lora"]
        if model.id not in self.tenants:
            applied = int(model.about["applied"])
            self.tenants.make(model.id, lora, "0")
            try:
                self.tenants.read(model.id, str(self._directory / "models" / model.id / "states" / str(applied)), True)
            except CheckpointError as error:
                raise TrainerError(f"the state of {model.id} is lost: {error}. Load a checkpoint") from error
            for earlier in self.journal.replayed(model.id, applied):
                if earlier.seq < seq:
                    self.tenants.run(model.id, wire.read_batch(earlier.body))
        return lora


def _named(lora: Mapping[str, Any] | None) -> str:
    return f"an adapter of rank {lora['rank']} on {', '.join(lora['targets'])}" if lora else "all weights"


def _checkpoint_record(request: Request, path: str, directory: Path, body: wire.SaveWeights) -> Record:
    expires = _expiry(body.ttl_seconds)
    size = sum(file.stat().st_size for file in directory.iterdir())
    about = {"directory": str(directory), "expires": expires, "bytes": size, "user_metadata": body.user_metadata}
    return Record(CHECKPOINT, path, request.owner, request.model, about)


def _check_optimizer(asked: Mapping[str, Any] | None) -> None:
    if asked is not None and asked.get("type") != "adamw":
        raise ApiError(
            400, f"the optimizer {asked.get('type')!r} is not known here: use AdamW", "unsupported_optimizer"
        )


def _expiry(seconds: int | None) -> float | None:
    return None if seconds is None else time.time() + seconds


def _expired(record: Record) -> bool:
    expires = record.about["expires"]
    return expires is not None and expires <= time.time()


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
