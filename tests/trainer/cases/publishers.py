"""Cases about publishing, for the ranks of tests/trainer/ranks.py: into a bucket; and by ranks that are told that they
are on several hosts, so that they share no memory, and publish together.

Changes of the code by the latter are not undone: a case has its own processes.
"""

from __future__ import annotations

import contextlib
import os
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy
import torch.distributed as dist

import trainer.several_hosts
import weightsync.format.manifest
from tests.trainer.batches import random_batch
from tests.trainer.cases import publishing
from tests.trainer.cases.lora import write_adapter
from trainer.errors import TrainerError
from trainer.megatron.hf_files import write_shards
from weightsync.bucket.publisher import BucketPublisher
from weightsync.errors import PublishError, StoreUnavailable, TransportUnavailable
from weightsync.publish.session import PublishSession
from weightsync.publish.spread import Gatherer, HostShare
from weightsync.publish.writer import SlotWriter
from weightsync.transport import open_transport

BUCKET: dict[str, Any] = {"model": "toy", "timeout_s": 100}


def publish_to_bucket(
    path: str,
    parallel: dict[str, int],
    url: str,
    steps: int,
    directory: str,
    store: str = "",
    lora: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The initial weights, then those after each of `steps` steps, each once the bucket has the one before; the last as
    a checkpoint in `directory`. The outcome of each is returned."""
    outcomes: list[dict[str, Any]] = []
    section = BUCKET | ({"model": "tiny"} if store else {})
    with publishing(path, parallel, store, "float32", lora, **section, bucket={"url": url}) as (built, publisher):
        for step in range(steps + 1):
            if step:
                built.step(random_batch(built.shape.vocab, seed=step))
            outcomes += publisher.publish(step).carried
            outcomes += publisher.finish()
        if lora:
            write_adapter(built, directory)
        else:
            write_shards(directory, built.export("float32"), built.part)
    return outcomes


def publish_beside_another(path: str, url: str) -> list[Any]:
    """The message to a publisher once another one has published there."""
    with publishing(path, {}, "", "float32", **BUCKET, bucket={"url": url}) as (_, publisher):
        BucketPublisher(url, model="toy").publish({"x": numpy.zeros(3, "float32")})
        publisher.publish(0)
        (outcome,) = publisher.finish()
        return [outcome["error"], outcome["code"]]


def bucket_metrics(path: str, url: str, listen: str) -> str:
    """The page that Prometheus reads when a version has been carried."""
    with publishing(path, {}, "", "float32", **BUCKET, bucket={"url": url, "metrics": listen}) as (_, publisher):
        publisher.publish(0)
        publisher.finish()
        with urllib.request.urlopen(f"http://{listen}/metrics", timeout=30) as page:
            text: str = page.read().decode()
            return text


@contextlib.contextmanager
def on_hosts(hosts: list[str], **arguments: Any) -> Iterator[Any]:
    """An engine and its publisher, on the host that is named for each rank."""
    os.environ["HOTSWAP_HOST"] = hosts[dist.get_rank()]
    weightsync.format.manifest.CHUNK = 4 << 10  # of models of 100 KB
    with publishing(dtype="float32", **arguments) as found:
        yield found


def publish_from_hosts(hosts: list[str], steps: int, **arguments: Any) -> dict[str, Any]:
    """One version and one after each of `steps` steps; whether this rank's host has held a share in memory (on its
    first rank), and its region after each step; and how many bytes it read from others for each version."""
    gathered, gather, regions = list[int](), Gatherer.gather, list[list[str]]()

    def counted(*given: Any) -> int:
        gathered.append(gather(*given))
        return gathered[-1]

    Gatherer.gather = counted  # type: ignore[method-assign]
    with on_hosts(hosts, **arguments) as (built, publisher):
        versions = [publisher.publish(0).version]
        for step in range(steps):
            built.step(random_batch(built.shape.vocab, seed=step))
            versions.append(publisher.publish(step + 1).version)
            regions.append(_region(publisher._hosts))
        part = publisher._hosts.part or {"sums": {}, "slices": {}}
        held = bool(part["sums"] or part["slices"])
        return {"versions": versions, "held": held, "regions": regions, "gathered": gathered}


def _region(hosts: trainer.several_hosts.SeveralHosts) -> str:
    """That of the slot in memory of this rank, "" if there is none."""
    if hosts._memory is None or hosts._slot is None:
        return ""
    return hosts._regions.of(hosts._slot._lock.path, hosts._slot._lock.fd, writable=True).region.descriptor.hex()


def no_room(writer: SlotWriter, *given: Any) -> Any:
    if writer.rank:
        raise PublishError("made to have no memory")
    return TARGET(writer, *given)


def ended(*_: Any) -> Any:
    """The library of the transport does not start any more."""
    raise TransportUnavailable("nixl", "made to have ended", "Start it again")


def unreachable(*given: Any) -> Any:
    """An offer whose holder has gone meanwhile."""
    with open_transport("tcp", listen="127.0.0.1", tls=None) as gone:
        endpoint = msgspec.to_builtins(gone.endpoint)
    part, offer = SETTLE(*given)
    return part, offer | {"endpoint": endpoint}


def other_bytes(share: HostShare, *given: Any) -> Any:
    """An offer of what is not in the memory any more."""
    part, offer = SETTLE(share, *given)
    share._mapping[offer["strips"][0][0]] ^= 1
    return part, offer


def not_kept(_share: HostShare, _raw: bytes) -> None:
    raise PublishError("made to refuse")


async def unanswered(*given: Any) -> int:
    """A commit that the store applies without saying so."""
    await MAKE_READY(*given)
    raise StoreUnavailable("test", "made not to answer", "Wait")


TARGET, SETTLE, MAKE_READY = SlotWriter._target, HostShare.settle, PublishSession.make_ready
BROKEN: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "memory": (SlotWriter, "_target", no_room),
    "transport": (HostShare, "settle", ended),
    "holder": (HostShare, "settle", unreachable),
    "bytes": (HostShare, "settle", other_bytes),
    "share": (HostShare, "accept", not_kept),
    "answer": (PublishSession, "make_ready", unanswered),
}


def publish_broken(broken: str, hosts: list[str], **arguments: Any) -> list[str]:
    """The error of a version; and then, when each that there is all the same is active, that the next one is
    published."""
    owner, name, instead = BROKEN[broken]
    whole = getattr(owner, name)
    with on_hosts(hosts, **arguments) as (_, publisher):
        setattr(owner, name, instead)
        try:
            publisher.publish(0)
        except TrainerError as error:
            said = [type(error).__name__, str(error)]
        setattr(owner, name, whole)
        if publisher._publisher is not None:
            for version in publisher._publisher.versions():
                publisher._publisher.wait_active(version.version)
        return [*said, str(publisher.publish(1).version)]


def publish_towards(master: str, address: str | None, **arguments: Any) -> None:
    """From hosts that find the first one at `master`, and are told that they are reached at `address`."""
    _reached(master if dist.get_rank() else "127.0.0.1", address)
    with on_hosts(parallel={"data": 2}, **arguments):
        pass


def address_towards(master: str, address: str | None) -> str:
    _reached(master, address)
    return trainer.several_hosts.address()


def _reached(master: str, address: str | None) -> None:
    os.environ.pop("HOTSWAP_ADDRESS", None)
    os.environ |= {"MASTER_ADDR": master} | ({"HOTSWAP_ADDRESS": address} if address else {})
