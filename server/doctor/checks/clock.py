"""How far this host's clock is from those of etcd's members.

etcd tells no time, but its HTTP side dates every answer, to the second. An answer that was asked for at `sent`, came
at `received` and says `date` was written when etcd's clock was in [date, date + 1) and ours in [sent, received]; so
the difference is in (date - received, date + 1 - sent). Every answer is true, so the truth lies in what all have in
common, and two answers around a tick of the second leave little more than the time between them.
"""

from __future__ import annotations

import email.utils
import http.client
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from server.doctor.finding import Finding, fail, ok, skip, warn
from server.doctor.registry import check
from server.doctor.world import World
from weightsync.errors import StoreError
from weightsync.store.etcd_url import EtcdUrl

NARROW_S = 0.1
SAMPLING_S = 1.5
EVERY_S = 0.03
TIMEOUT_S = 2.0
WARN_S, FAIL_S = 1.0, 10.0
MEND = "Run chrony or systemd-timesyncd on both hosts: swaps' deadlines and certificates go by the clock"


@dataclass(frozen=True, slots=True)
class Sample:
    """Unix seconds: our clock before asking and after the answer, and what the answer was dated."""

    sent: float
    received: float
    date: float


@check("clock", "this host's clock against those of etcd's members")
def clock(world: World) -> Iterator[Finding]:
    if world.store is None or not world.store.startswith("etcd://"):
        yield skip("no etcd is named by --store: there is no other clock to compare with")
        return
    try:
        url = EtcdUrl.parse(world.store)
        context = _context(url)
    except (StoreError, OSError) as error:
        yield skip(f"{error} (see `store`)")
        return
    for host, port in url.endpoints:
        yield _compare(host, port, context)


def _compare(host: str, port: int, context: ssl.SSLContext | None) -> Finding:
    try:
        low, high = bounds(_samples(host.strip("[]"), port, context))
    except (OSError, http.client.HTTPException) as error:
        return skip(f"{host}:{port} tells no time over HTTP: {error} (see `store`)")
    return judge(f"{host}:{port}", low, high)


def judge(who: str, low: float, high: float) -> Finding:
    """`low`, `high`: bounds of the other clock less ours, seconds."""
    if low > high:
        return warn(f"{who}: one of the two clocks was set while they were compared", MEND)
    least = max(low, -high, 0.0)  # how far apart they are for certain
    text = f"{who} is {(low + high) / 2:+.2f} s from this host, to {(high - low) / 2:.2f} s"
    return fail(text, MEND) if least > FAIL_S else warn(text, MEND) if least > WARN_S else ok(text)


def bounds(samples: Iterable[Sample]) -> tuple[float, float]:
    """What all samples say of the other clock less ours; taken until it is narrow or they end. At least one."""
    low, high = float("-inf"), float("inf")
    for sample in samples:
        low, high = max(low, sample.date - sample.received), min(high, sample.date + 1 - sample.sent)
        if high - low < NARROW_S:
            break
    return low, high


def _samples(host: str, port: int, context: ssl.SSLContext | None) -> Iterator[Sample]:
    """For a second and a half, so that a tick is among them."""
    connection = (
        http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        if context is None
        else http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
    )
    try:
        connection.connect()
        until = time.monotonic() + SAMPLING_S
        while time.monotonic() < until:
            yield _sample(connection, time.time)
            time.sleep(EVERY_S)
    finally:
        connection.close()


def _sample(connection: http.client.HTTPConnection, now: Callable[[], float]) -> Sample:
    sent = now()
    connection.request("GET", "/version")
    answer = connection.getresponse()
    received = now()
    answer.read()
    try:
        dated = email.utils.parsedate_to_datetime(answer.headers["date"] or "")
    except (TypeError, ValueError) as error:
        raise http.client.HTTPException("its answers have no date") from error
    return Sample(sent, received, dated.timestamp())


def _context(url: EtcdUrl) -> ssl.SSLContext | None:
    if "ca" not in url.options:
        return None
    context = ssl.create_default_context(cafile=url.options["ca"])
    if "cert" in url.options:
        context.load_cert_chain(url.options["cert"], url.options["key"])
    return context
