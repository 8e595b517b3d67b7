"""Ranks that are told that they are on several hosts, so that they share no memory, and publish together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch.distributed as dist

import trainer.several_hosts
from tests.trainer.batches import random_batch
from trainer.errors import TrainerError
from weightsync import Share
from weightsync.errors import PublishError, StoreUnavailable, TransportUnavailable
from weightsync.memory.ledger import Ledger
from weightsync.publish.shares import Offer
from weightsync.publish.spread import Gatherer, HostShare
from weightsync.transport import open_transport


@contextlib.contextmanager
def on_hosts(hosts: list[str], **arguments: Any) -> Iterator[Any]:
    """An engine and its publisher, on the host that is named for each rank."""
    from tests.trainer.cases import publishing

    os.environ["HOTSWAP_HOST"] = hosts[dist.get_rank()]
    with publishing(dtype="float32", **arguments) as found:
        yield found


def publish_from_hosts(hosts: list[str], steps: int, **arguments: Any) -> dict[str, Any]:
    """One version and one after each of `steps` steps; whether this rank has held a share, in which memory."""
    with on_hosts(hosts, **arguments) as (built, publisher):
        versions, regions = [publisher.publish(0).version], []
        for step in range(steps):
            built.step(random_batch(built.shape.vocab, seed=step))
            versions.append(publisher.publish(step + 1).version)
            regions.append([block.region.descriptor.hex() for block in _blocks(publisher)])
        return {"versions": versions, "held": bool(_blocks(publisher)), "regions": regions}


def _blocks(publisher: Any) -> list[Any]:
    share = publisher._hosts._share
    return share._blocks if share is not None else []


CHUNK = 4 << 10  # of models of 100 KB


def publish_shares(hosts: list[str], steps: int, **arguments: Any) -> dict[str, Any]:
    """As `publish_from_hosts`, in small chunks. How many bytes this rank read from others for each version."""
    import weightsync.format.manifest

    gathered, read, whole = [], Gatherer.gather, weightsync.format.manifest.CHUNK

    def counted(*given: Any) -> int:
        gathered.append(read(*given))
        return gathered[-1]

    weightsync.format.manifest.CHUNK, Gatherer.gather = CHUNK, counted  # type: ignore[method-assign]
    try:
        with on_hosts(hosts, **arguments) as (built, publisher):
            versions = [publisher.publish(0).version]
            for step in range(steps):
                built.step(random_batch(built.shape.vocab, seed=step))
                versions.append(publisher.publish(step + 1).version)
            return {"versions": versions, "gathered": gathered, "held": bool(_blocks(publisher))}
    finally:
        weightsync.format.manifest.CHUNK, Gatherer.gather = whole, read  # type: ignore[method-assign]


def publish_refused_share(hosts: list[str], **arguments: Any) -> list[str]:
    """The error of a version whose other host does not keep its share, and then that the next one is published."""
    import weightsync.format.manifest

    def broken(_share: HostShare, _raw: bytes) -> None:
        raise PublishError("made to refuse")

    whole, accept = weightsync.format.manifest.CHUNK, HostShare.accept
    weightsync.format.manifest.CHUNK = CHUNK
    try:
        with on_hosts(hosts, **arguments) as (_, publisher):
            HostShare.accept = broken  # type: ignore[method-assign]
            said = []
            try:
                publisher.publish(0)
            except TrainerError as error:
                said = [type(error).__name__, str(error)]
            HostShare.accept = accept  # type: ignore[method-assign]
            return [*said, str(publisher.publish(1).version)]
    finally:
        weightsync.format.manifest.CHUNK, HostShare.accept = whole, accept  # type: ignore[method-assign]


def publish_unanswered(hosts: list[str], **arguments: Any) -> list[str]:
    """The error of a version whose commit the store applies without saying so, and then, when that is active, that the
    next one is published."""
    import weightsync.format.manifest

    async def unanswered(*given: Any) -> int:
        await make_ready(*given)
        raise StoreUnavailable("test", "made not to answer", "Wait")

    ledger: Any = Ledger
    whole, make_ready = weightsync.format.manifest.CHUNK, ledger.make_ready
    weightsync.format.manifest.CHUNK = CHUNK
    try:
        with on_hosts(hosts, **arguments) as (_, publisher):
            ledger.make_ready = unanswered
            said = []
            try:
                publisher.publish(0)
            except TrainerError as error:
                said = [type(error).__name__, str(error)]
            ledger.make_ready = make_ready
            if publisher._publisher is not None:
                publisher._publisher.wait_active(publisher._publisher.versions()[-1].version)
            return [*said, str(publisher.publish(1).version)]
    finally:
        weightsync.format.manifest.CHUNK, ledger.make_ready = whole, make_ready


def no_room(_share: Share, *_: Any) -> Any:
    raise PublishError("made to have no memory")


def ended(share: Share) -> dict[str, Any]:
    """The library of the transport does not start any more."""
    share.discard()
    raise TransportUnavailable("nixl", "made to have ended", "Start it again")


def unreachable(share: Share) -> dict[str, Any]:
    """An offer whose holder has gone meanwhile."""
    with open_transport("tcp", listen="127.0.0.1", tls=None) as gone:
        endpoint = gone.endpoint
    return msgspec.structs.replace(Offer.from_json(SEAL(share)), endpoint=endpoint).to_json()


def other_bytes(share: Share) -> dict[str, Any]:
    """An offer of what is not in the memory any more."""
    offer = SEAL(share)
    share._blocks[0].view[0] ^= 1
    return offer


SEAL = Share.seal
BROKEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "memory": ("_place", no_room),
    "transport": ("seal", ended),
    "holder": ("seal", unreachable),
    "bytes": ("seal", other_bytes),
}


def publish_broken(broken: str, **arguments: Any) -> list[str]:
    """The error of a version whose other half does not come, and then that the next one is published."""
    name, instead = BROKEN[broken]
    whole = getattr(Share, name)
    with on_hosts(["", "b"], parallel={"tensor": 2}, **arguments) as (_, publisher):
        setattr(Share, name, instead)
        try:
            publisher.publish(0)
        except TrainerError as error:
            said = [type(error).__name__, str(error)]
        setattr(Share, name, whole)
        return [*said, str(publisher.publish(1).version)]


def publish_without_certificates(**arguments: Any) -> list[str]:
    """The error of a run whose hosts reach each other beyond loopback."""
    os.environ["HOTSWAP_ADDRESS"] = "0.0.0.0"
    try:
        with on_hosts(["", "b"], parallel={"data": 2}, **arguments):
            return []
    except TrainerError as error:
        return [type(error).__name__, str(error)]


def publish_from_nowhere(hosts: list[str], master: str, **arguments: Any) -> list[str]:
    """The error of a run one of whose hosts has an impossible name, or does not find the first one."""
    os.environ.pop("HOTSWAP_ADDRESS", None)
    if dist.get_rank():
        os.environ["MASTER_ADDR"] = master
    try:
        with on_hosts(hosts, parallel={"data": 2}, **arguments):
            return []
    except TrainerError as error:
        return [type(error).__name__, str(error)]


def address_towards(master: str, told: str) -> str:
    os.environ.pop("HOTSWAP_ADDRESS", None)
    os.environ["MASTER_ADDR"] = master
    if told:
        os.environ["HOTSWAP_ADDRESS"] = told
    return trainer.several_hosts.address()
