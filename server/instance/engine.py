"""The embedded vLLM engine: its start, the swap calls into it, and the adapters that it answers for by name."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import xxhash

from server.instance.grammars.guard import Backend, bounded, bounded_parser, tried
from server.instance.grammars.trials import DEFAULT, Limits, Trials
from server.instance.hosts import (
    Places,
    Ranks,
    Reads,
    Tethers,
    check_hosts,
    check_ranks,
    joined_reads,
    placed,
    rank_name,
    share_experts,
    worker_name,
)
from server.instance.inflight import Inflight
from server.instance.middleware import answer_faults
from server.instance.provenance import beamed, pooled, traced
from server.instance.requests import bound_renderer, bound_scoring, bounded_scores, known_ids
from server.instance.routed_experts import Recording
from weightsync.control.editions import EditionRecord
from weightsync.control.hosts import this_host
from weightsync.control.parts import EDITION_URL, LORA, LORA_URL, combined
from weightsync.control.records import DeviceRecord, VersionRecord
from weightsync.errors import EngineError
from weightsync.vllm_engine.device.pacing import Staging
from weightsync.vllm_engine.engine_core.prefixes import Changes

T = TypeVar("T")
WATCH_S = 0.1
EDITION_POLL_S = 0.02
FIRST_POLL_S, LAST_POLL_S = 0.002, 0.05  # whether workers have staged: each look interrupts the engine core
POLL_SHARE = 0.05  # of the time that the staging has taken so far
STOP_TIMEOUT_S = 10.0  # a staging stops with its next piece; a worker that hangs must not keep the instance from ending
FLIP_TIMEOUT_S = 10.0  # a flip takes milliseconds, and waits for at most one batch
COMMON_FLIP_TIMEOUT_S = 60.0  # ranks that share experts flip at their common steps alone


class Engine:
    """vLLM's `AsyncLLM` with the swap calls. `active` is (version, epoch) of the last commit, or None before it.

    `hosts`: the name of each rank's host, "" where there is one; `tethers` says when one of the others has ended.
    `devices`: the ranks' GPUs.
    """

    def __init__(self, client: Any, tethers: Tethers, grammars: Limits = DEFAULT) -> None:
        self.client, self.tethers = client, tethers
        self._ranks = Ranks(client)
        self._in_turn = asyncio.Lock()  # of calls that ranks which share experts answer together
        self.active: tuple[int, int] | None = None
        self.hosts: tuple[str, ...] = ("",)
        self.devices: tuple[DeviceRecord, ...] = ()
        self.adapters = Adapters()
        self.inflight = Inflight()
        vocabulary = client.model_config.get_vocab_size()
        backend = Backend(client.vllm_config)
        self.trials = Trials(grammars, backend.kit)
        generate = traced(tried(client.generate, backend, self.trials), self.inflight, Recording(client.vllm_config))
        client.generate = bounded(known_ids(generate, vocabulary))
        client.encode = known_ids(pooled(client.encode, self.inflight), vocabulary)

    @property
    def max_num_seqs(self) -> int:
        """How many requests it runs at one time, over all data-parallel ranks."""
        config = self.client.vllm_config
        scheduler = config.scheduler_config
        runs: int = scheduler.max_num_active_seqs or scheduler.max_num_seqs
        return runs * int(config.parallel_config.data_parallel_size)

    @property
    def holds_adapters(self) -> int:
        """Adapters that vLLM keeps in the host's memory, those on the device among them; 0 without `--enable-lora`."""
        lora = self.client.vllm_config.lora_config
        return int(lora.max_cpu_loras or lora.max_loras) if lora is not None else 0

    @property
    def dead(self) -> bool:
        """Whether it can serve no more: a process of it has ended, here or on another host."""
        return bool(self.client.errored) or self.tethers.lost is not None

    def active_version(self) -> int | None:
        return self.active[0] if self.active else None

    async def prepare(
        self,
        schema: list[list[Any]],
        tether: Mapping[str, object],
        *,
        allow_non_finite: bool = False,
        staging: Staging = "smooth",
    ) -> None:
        """Build the staging side in every worker. `schema`: [name, dtype, shape] of each tensor a version must have.

        `tether`: what workers on other hosts connect to, {} where there are none. `allow_non_finite`: versions with NaN
        or infinities are staged too. `staging`: as of `InstanceConfig`. Raises ConfigError when the hosts cannot be
        told apart or the ranks cannot flip together, EngineError.
        """
        config = self.client.vllm_config
        check_ranks(config)
        info = {"schema": schema, "allow_non_finite": allow_non_finite, "staging": staging}
        await self._answer(self._ranks.workers("init_weight_transfer_engine", info))
        hosts = await self._answer(self._ranks.workers("hotswap_attach", dict(tether)))
        self.hosts = tuple(itertools.chain.from_iterable(hosts))
        check_hosts(self.hosts, int(config.parallel_config.nnodes))
        devices = itertools.chain.from_iterable(await self._answer(self._ranks.workers("hotswap_device")))
        self.devices = tuple(
            DeviceRecord(device[0], device[1], host)
            for device, host in zip(devices, self.hosts, strict=True)
            if device is not None
        )

    async def reads(self, schema: list[list[Any]]) -> Reads | None:
        """The tensors of versions with this schema that each host's ranks read; None: not all say. Raises
        EngineError."""
        (answers,) = await self._answer(self._ranks.workers("hotswap_reads", schema))
        return joined_reads(schema, self.hosts, answers)

    async def stage(
        self, version: VersionRecord, timeout_s: float, places: Places | None = None, unread: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Stage base and parts on every worker while decoding goes on; the slowest worker's report.

        `places`: where `version` is on each host; `unread`: the tensors that no rank reads. "fingerprint" in the report
        is that of what all workers built ("" if they cannot say). Cancelled, it ends when every worker has stopped, and
        none offers `version` as staged. Raises EngineError, with the worker's own code and the tensor to blame when a
        worker refuses the version.
        """
        order = {
            "version": version.version,
            "slot": version.slot,
            "manifest_digest": version.manifest_digest,
            "base_version": version.base_version or version.version,
            "parts": self.adapters.orders(version),
        }
        if places is not None and len(places) > 1:
            order = placed(order, places, unread)
        try:
            async with asyncio.timeout(timeout_s):
                reports = await self._until_staged(self._ranks.workers("hotswap_stage", order))
        except (TimeoutError, asyncio.CancelledError, EngineError) as ended:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self.drop(version.version, previous=False)
                    await self._until_staged(self._ranks.workers("hotswap_report"))
            if isinstance(ended, TimeoutError):
                message = f"staging version {version.version} took longer than {timeout_s:.0f} s"
                raise EngineError(message, code="staging_failed") from None
            raise
        for data_parallel, rank in self._every(reports):
            if error := reports[data_parallel][rank]["error"]:
                name = worker_name((data_parallel, rank), reports, self.hosts)
                raise EngineError(name + error["message"], code=error["code"], tensor=error["tensor"])
        slowest: dict[str, Any] = max(itertools.chain.from_iterable(reports), key=lambda r: r["stage_ms"])
        fingerprint = await asyncio.to_thread(_one_fingerprint, reports, share_experts(self.client.vllm_config))
        flips = [r.get("expected_flip_ms") for r in itertools.chain.from_iterable(reports)]
        flip = max((ms for ms in flips if ms is not None), default=None)
        held = [r.get("copies") for r in itertools.chain.from_iterable(reports)]
        copies = min((number for number in held if number is not None), default=None)
        losses = [r.get("step_loss") for r in itertools.chain.from_iterable(reports)]
        return {
            **slowest,
            "fingerprint": fingerprint,
            "built": _one_build(reports),
            "expected_flip_ms": flip,
            "copies": copies,
            "step_loss": max((loss for loss in losses if loss is not None), default=None),
        }

    async def load_edition(self, edition: EditionRecord, places: Mapping[str, str]) -> None:
        """Have every worker build an edition beside the running steps, and vLLM's routes know it by its full name.
        `places`: the path of its slot on each host. Raises EngineError, with the worker's own code and the tensor to
        blame when a worker refuses it."""
        name, lora_id = edition.full_name, self.adapters.new_id()
        order = {
            "name": name,
            "version": edition.number,
            "slot": places[this_host()],
            "manifest_digest": edition.manifest_digest,
            "lora_id": lora_id,
            "places": dict(places) if len(places) > 1 else {},
        }
        begun = self._ranks.workers("hotswap_load_edition", order)
        reports = await self._until_built(begun, lambda: self._ranks.workers("hotswap_edition", name), EDITION_POLL_S)
        every = [report for workers in reports for report in workers]
        error = next((report["error"] for report in every if report["error"]), None)
        if error is None and edition.fingerprint and _sum_of(every) != edition.fingerprint:
            message = f"the adapter {name} was built from other bytes than were published"
            error = {"code": "fingerprint_mismatch", "message": message, "tensor": None}
        if error is not None:
            await self._answer(self._ranks.workers("hotswap_drop_edition", name))
            raise EngineError(error["message"], code=error["code"], tensor=error["tensor"])
        self.adapters.offer_edition(name, lora_id)

    async def drop_edition(self, name: str) -> None:
        """The inverse; no request runs through it any more."""
        self.adapters.withdraw_edition(name)
        await self._answer(self._ranks.workers("hotswap_drop_edition", name))

    def answers_to(self, name: str) -> bool:
        """Whether the name is that of an adapter which vLLM's routes know."""
        return self.adapters.has(name)

    async def _until_staged(self, call: Awaitable[list[list[Any]]]) -> list[list[Any]]:
        """The reports of all workers once none of them stages any more."""
        return await self._until_built(call, lambda: self._ranks.workers("hotswap_report"), FIRST_POLL_S)

    async def _until_built(
        self,
        call: Awaitable[list[list[Any]]],
        look: Callable[[], Awaitable[list[list[Any]]]],
        first_s: float,
    ) -> list[list[Any]]:
        began = time.monotonic()
        reports = await self._answer(call)
        while any(reports[i][j]["running"] for i, j in self._every(reports)):
            await asyncio.sleep(min(max(first_s, POLL_SHARE * (time.monotonic() - began)), LAST_POLL_S))
            reports = await self._answer(look())
        return reports

    @staticmethod
    def _every(answers: list[list[Any]]) -> list[tuple[int, int]]:
        return [(i, j) for i, workers in enumerate(answers) for j in range(len(workers))]

    async def commit(self, version: int, epoch: int, withdrawn: bool) -> dict[str, float]:
        """Flip between two batches, label and cache namespace included; {"flip_ms", "commit_ms"} of the slowest rank.

        `withdrawn`: nothing that the version before has computed is to go on. Waits first for the requests that must
        not cross it. Raises EngineError, also when a rank did not flip.
        """
        async with self.inflight.closing(version):
            self.adapters.withdraw(version)
            timeout_s = COMMON_FLIP_TIMEOUT_S if share_experts(self.client.vllm_config) else FLIP_TIMEOUT_S
            async with self._in_turn:
                flips = await self._answer(self._ranks.call("hotswap_commit", version, withdrawn), timeout_s)
            self.active, self.inflight.active = (version, epoch), version
            self.adapters.offer(version)
        return {name: max(flip[name] for flip in flips) for name in ("flip_ms", "commit_ms")}

    async def drop(self, version: int, *, previous: bool) -> None:
        """Have the workers build `version` anew when it is next asked for, unless it runs; one that builds it stops.

        `previous`: even if it is what a rollback flips to.
        """
        await self._answer(self._ranks.workers("hotswap_drop", version, previous))

    @property
    def follows_prefixes(self) -> bool:
        """Whether vLLM caches prefixes, and was told to record what its cache holds."""
        config = self.client.vllm_config
        events = config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events
        return bool(events and config.cache_config.enable_prefix_caching)

    async def prefixes(self) -> list[Changes]:
        """The changes of each data-parallel rank's cache since the last call: prefixes that it now holds, or no longer.
        Raises EngineError."""
        return [changes or [] for changes in await self._answer(self._ranks.call("hotswap_prefixes"))]

    async def pause(self) -> None:
        """Generate nothing until `resume`; requests stay where they are, and so do their KV blocks."""
        async with self._in_turn:
            await self._answer(self.client.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        """Generate on."""
        async with self._in_turn:
            await self._answer(self.client.resume_generation())

    @property
    def sleeps_in_place(self) -> bool:
        """Whether vLLM was started with `--enable-sleep-mode`: it can give its device memory up and stay."""
        return bool(self.client.vllm_config.model_config.enable_sleep_mode)

    async def sleep(self) -> None:
        """Weights to pinned host memory, KV cache dropped; requests that still run are aborted."""
        await self._answer(self._ranks.workers("hotswap_vacate"))
        async with self._in_turn:
            await self._answer(self.client.sleep(level=1))

    async def wake(self) -> None:
        """Everything back on the device; the weights are those it slept with."""
        async with self._in_turn:
            await self._answer(self.client.wake_up())

    async def died(self) -> None:
        """Return when the engine has ended behind our back."""
        while not self.dead:  # noqa: ASYNC110 - vLLM has a flag, and no event
            await asyncio.sleep(WATCH_S)

    async def _answer(self, call: Awaitable[T], timeout_s: float = float("inf")) -> T:
        """The answer of the engine. Raises EngineError (`engine_died`): vLLM leaves calls of a dead engine waiting."""
        task = asyncio.ensure_future(call)
        deadline = time.monotonic() + timeout_s
        while not task.done():
            try:
                await asyncio.wait({task}, timeout=WATCH_S)
            except asyncio.CancelledError:
                task.cancel()  # or it might be sent after what its caller sends next
                raise
            if not task.done() and (self.dead or time.monotonic() > deadline):
                task.cancel()
                if (lost := self.tethers.lost) is not None:
                    raise _died(f"{lost} has ended, and with it this instance; see the log there")
                silent = "" if self.dead else f" or is stuck: it has not answered for {timeout_s:g} s"
                raise _died(f"the engine has ended{silent}; see this log above")
        return task.result()


def _died(message: str) -> EngineError:
    """The engine's processes have ended, or answer no more; this instance cannot serve."""
    return EngineError(message, code="engine_died")


def _one_fingerprint(reports: list[list[dict[str, Any]]], shared: bool) -> str:
    """Of what every data-parallel rank built, or all of them together where they share experts. Raises EngineError
    when they differ, and as `combined`."""
    if shared:
        return combined(list(itertools.chain.from_iterable(reports)))
    fingerprints = [combined(workers) for workers in reports]
    for rank, found in enumerate(fingerprints):
        if found != fingerprints[0]:
            name = rank_name(rank, len(reports))
            message = f"{name}it built other weights than rank 0 ({found!r}, not {fingerprints[0]!r})"
            raise EngineError(message, code="staging_failed")
    return fingerprints[0]


def _sum_of(reports: list[dict[str, Any]]) -> str:
    from weightsync.format.fingerprint import combine  # numba: not before vLLM has started

    return combine([report["sums"] for report in reports])


def _one_build(reports: list[list[dict[str, Any]]]) -> str:
    """LAYOUT:DIGEST of what all workers made of the weights; "" where none made anything."""
    made = [report.get("built", "").partition(":") for workers in reports for report in workers]
    layout, _, digest = (xxhash.xxh3_64_hexdigest("|".join(part).encode()) for part in zip(*made, strict=True))
    return f"{layout}:{digest}" if any(found for _, _, found in made) else ""


@contextlib.asynccontextmanager
async def start_engine(args: Any, tethers: Tethers, grammars: Limits) -> AsyncIterator[Engine]:
    """vLLM's engine, started; shut down with all its processes on exit. `grammars`: what trying one out may take."""
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

    async with build_async_engine_client(args) as client:
        engine = Engine(client, tethers, grammars)
        try:
            yield engine
        finally:
            await engine.trials.close()


async def build_vllm_app(engine: Engine, args: Any) -> Any:
    """vLLM's own FastAPI application, with every route it offers for this model."""
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    search = BeamSearchOnlineMixin.beam_search
    BeamSearchOnlineMixin.beam_search = beamed(getattr(search, "__wrapped__", search), engine.inflight)
    importlib.import_module("server.instance.media")  # registers how images and the like are fetched
    tasks = await engine.client.get_supported_tasks()
    app = build_app(args, tasks, engine.client.model_config)
    await init_app_state(engine.client, app.state, args, tasks)
    answer_faults(app)
    model_len = engine.client.model_config.max_model_len
    bound_renderer(engine.client.renderer, model_len)
    if (scoring := getattr(app.state, "serving_generative_scoring", None)) is not None:
        bound_scoring(scoring, model_len)
    if (scores := getattr(app.state, "serving_scores", None)) is not None:
        app.state.serving_scores = bounded_scores(scores, model_len)
    # vLLM's handler of engine errors ends its own server here; the sidecar ends an instance whose engine has died.
    app.state.server = SimpleNamespace(should_exit=False)
    engine.adapters.bind(app.state.openai_serving_models.lora_requests, args.served_model_name)
    app.state.online_renderer.parser = bounded_parser(app.state.online_renderer.parser)
    return app


FIRST_ID = 1 << 20  # above the ids vLLM gives to adapters of its own


class Adapters:
    """vLLM's table of names, kept in step with the commits. A name keeps its id for the life of the process."""

    def __init__(self) -> None:
        self._table: MutableMapping[str, Any] = {}
        self._ids: dict[str, int] = {}
        self._free_ids = itertools.count(FIRST_ID)
        self._names: dict[int, set[str]] = {}
        self._served: Collection[str] = ()

    def bind(self, table: MutableMapping[str, Any], served: Collection[str] = ()) -> None:
        """`table`: vLLM's, of LoRA requests by name; its routes look adapters up there, and only then the model, which
        they know as `served`: no adapter is offered by such a name."""
        self._served = served
        table.update(self._table)
        self._table = table

    def find(self, name: str | None) -> Any:
        """The LoRARequest of an adapter that is served, or None."""
        return self._table.get(name) if name is not None else None

    def orders(self, version: VersionRecord) -> list[dict[str, Any]]:
        """The orders to the workers for the parts of `version` (backend.UpdateInfo), draft model included."""
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
            if name not in self._table and name not in self._served:
                self._table[name] = LoRARequest(name, self._id(part), f"{LORA_URL}{part}")
        self._names = {v: names for v, names in self._names.items() if v >= version - 64}

    def offer_edition(self, name: str, lora_id: int) -> None:
        """The edition is loaded, and answers by its full name."""
        from vllm.lora.request import LoRARequest

        self._table[name] = LoRARequest(name, lora_id, f"{EDITION_URL}{name}")

    def has(self, name: str) -> bool:
        return name in self._table

    def withdraw_edition(self, name: str) -> None:
        self._table.pop(name, None)

    def new_id(self) -> int:
        """An id that vLLM has for no adapter yet."""
        return next(self._free_ids)

    def _id(self, part: str) -> int:
        if part not in self._ids:
            self._ids[part] = self.new_id()
        return self._ids[part]
