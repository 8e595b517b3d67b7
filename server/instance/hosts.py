"""One instance on several ranks and hosts: options, calls to every rank, where a version is, and who has ended.

vLLM's `AsyncLLM.collective_rpc` and `call_utility_async` reach every engine core, and return what the first answers. A
swap must hear all of them. `_call_utility_async` is vLLM's own, and private: it is used here only.

The workers on other hosts each hold a connection to the leader, by which each end notices that the other has ended.
The messages on the connection are described beside the other end, `weightsync/vllm_engine/tether.py`.

An instance on one host needs all tensors of a version there. Where its ranks are on several hosts, the workers say what
they read, before the first version if the tensors are known by then, and the union of each host's ranks goes into a
record in the store (`Saying`), so that peers fetch no more. Tensors that no rank reads count for the host of rank 0,
which sums them for the fingerprint.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, TypeVar

from server.errors import ConfigError
from server.instance.config import InstanceConfig, parse_vllm_args
from weightsync.control.hosts import HOST_ENV, this_host
from weightsync.control.lease import LeaseKeeper
from weightsync.control.records import Keys, VersionRecord
from weightsync.errors import EngineError, StoreUnavailable, WeightSyncError
from weightsync.format.manifest import schema_of
from weightsync.format.slices import Slices
from weightsync.peer.copies import wait_for_slots
from weightsync.peer.slices import SlicesRecord, slices_prefix
from weightsync.store import Store
from weightsync.tls import ENVIRONMENT, ClusterTls, is_loopback
from weightsync.vllm_engine.tether import HELD, Tether, watch_for_loss


def check_nodes(args: Any, *, headless: bool) -> None:
    """`args`: vLLM's. Raises ConfigError: options that do not make one instance of several hosts."""
    if headless and (args.nnodes < 2 or args.node_rank == 0):
        raise ConfigError(
            "--headless is for the hosts beside the leader's: give --nnodes N, --node-rank R from 1 on, and "
            "--master-addr with the leader's address (docs/multinode.md)."
        )
    if not headless and args.node_rank != 0:
        raise ConfigError(f"--node-rank {args.node_rank}: the host of rank 0 leads; give --headless on all others.")
    if args.nnodes > 1 and args.data_parallel_size > 1:
        raise ConfigError("--data-parallel-size with --nnodes: run an instance for each of them instead.")
    if args.nnodes > 1 and not this_host():
        raise ConfigError(f"--nnodes {args.nnodes}: set {HOST_ENV} on each host, and run `hotswap peer` there.")


def run_follower(config: InstanceConfig) -> NoReturn:
    """vLLM's workers of this host until SIGTERM, or until they or the leader end, which is an exit with status 1.

    Raises ConfigError, TlsUnavailable.
    """
    if config.cluster_tls is not None:  # where the workers, processes of their own, look for it
        ClusterTls(config.cluster_tls)
        os.environ[ENVIRONMENT] = str(config.cluster_tls)
    from vllm.entrypoints.cli.serve import run_headless

    args = parse_vllm_args(config, config.port)
    check_nodes(args, headless=True)
    args.api_server_count = 0
    run_headless(args)
    raise SystemExit("the workers of this host have ended, and with them their instance: start all of its hosts anew")


T = TypeVar("T")
Places = Mapping[str, VersionRecord]  # by host: the version with the paths of its slots there


def check_hosts(hosts: Sequence[str], nodes: int) -> None:
    """`hosts`: what each rank calls its host. `nodes`: how many vLLM was told of (1 with Ray). Raises ConfigError."""
    names = set(hosts)
    if (nodes > 1 and len(names) != nodes) or (len(names) > 1 and "" in names):
        said = ", ".join(f"rank {rank}: {host or '(no name)'}" for rank, host in enumerate(hosts))
        raise ConfigError(
            f"the hosts of this instance cannot be told apart ({said}): set {HOST_ENV} on each host, to the name "
            "that its `hotswap peer` has, before vLLM's workers start there (docs/multinode.md)."
        )


async def located(
    store: Store,
    keys: Keys,
    version: VersionRecord,
    hosts: Iterable[str],
    timeout_s: float,
    slices: Mapping[str, str] | None = None,
) -> Places:
    """`version` as each of `hosts` has it, once all do: their peers fetch it as for an instance of their own.

    `slices`: the digests of what this instance needs on hosts where that is not everything. Raises PeerError, which
    names the host, when the first of them cannot have it; StoreUnavailable.
    """
    needs = slices or {}
    return await on_all(hosts, lambda host: wait_for_slots(store, keys, version, host, timeout_s, needs.get(host, "")))


async def on_all(hosts: Iterable[str], wait: Callable[[str], Coroutine[Any, Any, T]]) -> dict[str, T]:
    """The results of `wait` for each of `hosts`, once all do; the first error ends it."""
    tasks = {host: asyncio.create_task(wait(host)) for host in sorted(set(hosts))}
    try:
        found = await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return dict(zip(tasks, found, strict=True))


def placed(order: dict[str, Any], places: Places, unread: Sequence[str] = ()) -> dict[str, Any]:
    """`order` (backend.UpdateInfo) with the paths on all hosts, for workers that look for their own."""
    parts = {host: {part.name: part.slot for part in record.parts} for host, record in places.items()}
    return {
        **order,
        "places": {host: record.slot for host, record in places.items()},
        "unread": list(unread),
        "parts": [
            {**part, "places": {host: slots[part["name"]] for host, slots in parts.items()}} for part in order["parts"]
        ],
    }


class Ranks:
    """The engine cores behind one `AsyncLLM`, in the order of their data-parallel ranks."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def call(self, method: str, *args: Any) -> list[Any]:
        """The answers of all engine cores to `method`, by rank. Raises EngineError, naming the ranks that raised:
        what the others did stands."""
        core = self._client.engine_core
        calls = [core._call_utility_async(method, *args, engine=engine) for engine in core.core_engines]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, BaseException)}
        if failed:
            said = "; ".join(f"{rank_name(rank, len(answers))}{error}" for rank, error in failed.items())
            raise EngineError(said, code="engine_call_failed") from next(iter(failed.values()))
        return answers

    async def workers(self, method: str, *args: Any) -> list[list[Any]]:
        """The answers of all workers to `method`, by data-parallel rank. Raises as `call`."""
        return await self.call("collective_rpc", method, None, args, {})


def share_experts(vllm_config: Any) -> bool:
    """Whether the data-parallel ranks have parts of the same experts, and step together."""
    return bool(vllm_config.parallel_config.data_parallel_size > 1 and vllm_config.model_config.is_moe)


def check_ranks(vllm_config: Any) -> None:
    """Raises ConfigError for ranks that share experts and are not all of this instance, or in a way that no test has
    swapped."""
    if not share_experts(vllm_config):
        return
    parallel, draft = vllm_config.parallel_config, vllm_config.speculative_config
    if parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb:
        raise ConfigError(
            "a mixture of experts with data-parallel ranks in several instances: they cannot flip together. Start all "
            "ranks in one instance, without --data-parallel-rank, -external-lb and -hybrid-lb."
        )
    if draft is not None and "mtp" not in draft.method and getattr(draft.draft_model_config, "is_moe", False):
        raise ConfigError("--data-parallel-size with a draft model that is a mixture of experts: take a dense one.")


def rank_name(rank: int, ranks: int) -> str:
    """How an error names a data-parallel rank; nothing where there is one."""
    return f"data-parallel rank {rank}: " if ranks > 1 else ""


def worker_name(of: tuple[int, int], answers: Sequence[Sequence[Any]], hosts: Sequence[str]) -> str:
    """How an error names the worker `of` (data-parallel rank, rank in it); nothing that goes without saying."""
    data_parallel, rank = of
    index = sum(len(workers) for workers in answers[:data_parallel]) + rank
    host = f"rank {rank} on host {hosts[index]}: " if len(set(hosts)) > 1 else ""
    return rank_name(data_parallel, len(answers)) + host


log = logging.getLogger("hotswap.instance")
HELLO_S = 10.0  # for a worker to say who it is, from the connection on


class Tethers:
    """The connected hosts. `lost` names the first one that was connected and is not any more."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self.held: set[str] = set()
        self._token = secrets.token_hex(16)
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self, nodes: int, tls: ClusterTls | None) -> AsyncIterator[dict[str, object]]:
        """The options for the workers, {} on one host; while the context is open they can connect.

        The address is the one where vLLM's own queues are reached. Raises ConfigError.
        """
        if nodes == 1:
            yield {}
            return
        address = own_address()
        if tls is None and not is_loopback(address):
            raise ConfigError(
                f"workers on other hosts reach this one at {address}, beyond loopback: give --cluster-tls DIR on every "
                "host of the instance (docs/multinode.md)."
            )
        server = await self._listen(address, tls)
        try:
            port = int(server.sockets[0].getsockname()[1])
            yield asdict(Tether(this_host(), address, port, tls is not None, self._token))
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, address: str, tls: ClusterTls | None) -> asyncio.Server:
        """Raises ConfigError."""
        context = tls.server_context() if tls is not None else None
        try:
            return await asyncio.start_server(self._accept, address, 0, ssl=context)
        except OSError as error:
            raise ConfigError(
                f"workers on other hosts could not reach this one at {address} ({error.strerror or error}): set "
                "VLLM_HOST_IP to an address of this host (docs/multinode.md)."
            ) from error

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._hold(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                who = self._name(await reader.readline())
            if who is None:
                return
            watch_for_loss(writer.get_extra_info("socket"))
            self.held.add(who)
            writer.write(HELD)
            with contextlib.suppress(OSError):
                await reader.read()
            self.held.discard(who)
            log.error("%s has ended, or cannot be reached", who)
            self.lost = self.lost or who
        except (TimeoutError, ValueError, OSError, RecursionError) as error:  # the last one: brackets without end
            log.warning("a connection that is no worker's was closed: %s", error or type(error).__name__)
        finally:
            writer.close()

    def _name(self, line: bytes) -> str | None:
        """The host that says `line`; None if it does not have the token. Raises ValueError."""
        said = json.loads(line or b"{}")
        if not isinstance(said, dict) or not hmac.compare_digest(str(said.get("token")).encode(), self._token.encode()):
            return None
        return f"rank {said.get('rank')} on host {said.get('host')}"


def own_address() -> str:
    """This host's address as vLLM tells it to the others: $VLLM_HOST_IP, or that of the way out."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


LEASE_TTL_S = 30.0  # a record that outlives its instance for a while does no harm; one that goes while it is busy does
RETRY_S = 1.0


@dataclass(frozen=True)
class Reads:
    """The tensors of one schema's versions that an instance's ranks read, by host, and those that none reads."""

    slices: Mapping[str, Slices]
    unread: tuple[str, ...]


def joined_reads(
    schema: Sequence[Sequence[Any]], hosts: Sequence[str], answers: Sequence[Sequence[str] | None]
) -> Reads | None:
    """From what each rank answers (`hotswap_reads`), in the order of `hosts`; None: one of them cannot say."""
    said = [answer for answer in answers if answer is not None]
    if len(said) < len(hosts):
        return None
    names = sorted(name for name, _, _ in schema)
    idle = functools.reduce(int.__and__, (int(unread, 16) for _, unread in said))
    unread = tuple(name for n, name in enumerate(names) if idle >> n & 1)
    shapes = schema_of((name, dtype, shape) for name, dtype, shape in schema)
    found = {hosts[0]: Slices.of(shapes, [(name, 0, shapes.tensors[name].nbytes) for name in unread])}
    for host, (text, _) in zip(hosts, said, strict=True):
        slices = Slices.from_text(text)
        found[host] = found[host].joined(slices) if host in found else slices
    return Reads(found, unread)


class Saying:
    """The records of one instance, under a lease of their own: they are there before it takes part in swaps."""

    def __init__(self, keys: Keys, instance: str) -> None:
        self._keys, self._instance = keys, instance
        self._hosts: tuple[str, ...] = ()
        self._reads: Reads | None = None
        self._changed = asyncio.Event()

    def say(self, hosts: Sequence[str], reads: Reads | None, everything: str | None = None) -> None:
        """`reads`, or everything on all `hosts` (None). `everything`: a host that needs all the same. Hosts without a
        name have no peer."""
        self._hosts = tuple(sorted({host for host in hosts if host}))
        if reads is not None:
            reads = Reads({h: s for h, s in reads.slices.items() if h != everything}, reads.unread)
        self._reads = reads if len(self._hosts) > 1 else None
        self._changed.set()

    @property
    def digests(self) -> Mapping[str, str]:
        """By host, of what is needed there; none where that is everything."""
        return {host: slices.digest for host, slices in self._reads.slices.items()} if self._reads is not None else {}

    @property
    def unread(self) -> tuple[str, ...]:
        """The tensors that no rank reads."""
        return self._reads.unread if self._reads is not None else ()

    async def run(self, store: Store) -> None:
        """Keep the records in the store, for ever. Cancelled, it takes them away."""
        told = ""
        while True:
            try:
                await self._session(store)
            except WeightSyncError as error:  # also where the role in etcd is of a release that has no such records
                if told != (told := str(error)):
                    log.warning("peers are not told what this instance needs, and fetch everything: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _session(self, store: Store) -> None:
        lease = await LeaseKeeper.grant(store, LEASE_TTL_S)
        try:
            while not lease.lost.is_set():
                self._changed.clear()
                for host in self._hosts:
                    slices = self._reads.slices.get(host) if self._reads is not None else None
                    text = slices.to_text() if slices is not None else ""
                    record = SlicesRecord(host, self._instance, text)
                    key = slices_prefix(self._keys, host) + self._instance
                    await store.put(key, record.to_json(), lease.id)
                await _either(self._changed, lease.lost)
        finally:
            try:
                await lease.end()
            except StoreUnavailable as error:
                log.debug("the records go with their lease: %s", error)


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
