"""The ledger's keeper at the gateway that leads: it tells traces of new entries, moves older ones to files, and tells
webhooks.

It posts each new entry of the ledger, signed as Standard Webhooks 1.0.0 has it.

    gateway/webhooks/{model}/{url, digested}   HookRecord: the last entry that was delivered there, or given up

Each URL gets the entries in their order, each at least once: the record moves when the receiver has said 2xx, so who
leads next goes on from it, and what both have sent has one `webhook-id`. A URL that is new begins with what comes next.
The ledger waits for nobody: entries are read out of it, one at a time, and those that have left the store are lost to a
URL that did not answer for so long.

The signature is HMAC-SHA256 over `id.timestamp.body`, once for each secret in the file
(github.com/standard-webhooks/standard-webhooks, spec/standard-webhooks.md).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import orjson

from server.errors import ConfigError
from server.gateway.access.key_sources import read_private
from server.gateway.config import WebhookSettings
from server.gateway.observe.stats import HookCounts
from server.ledger import archive
from weightsync.control import chain
from weightsync.control.chain import ArchiveRecord, HeadRecord, LedgerEntry
from weightsync.control.strict_json import Record
from weightsync.errors import Conflict, RecordError, StoreError, WeightSyncError
from weightsync.store import MISSING, Store
from weightsync.tls import stamp

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("hotswap.gateway")

TIMEOUT_S = 20.0  # until the receiver has answered
LOOK_S = 1.0  # between two looks, where nobody tells of an entry
RETRY_S, MAX_RETRY_S = 1.0, 3600.0  # after the first failure, and at most: each wait is twice the one before
EVERY = 100  # entries after which it looks whether older ones should leave the store
KEEPER_RETRY_S = 0.5
GIVE_UP_S = 3 * 86_400.0  # after so long an entry is given up, for those after it
SECRET = "whsec_"  # noqa: S105 - what a secret begins with


@dataclass(frozen=True)
class HookRecord(Record):
    """The last entry that a URL has got."""

    number: int


def read_secrets(path: Path) -> tuple[bytes, ...]:
    """The secrets in a private file, one a line. Raises ConfigError."""
    found = []
    for line in filter(None, map(str.strip, read_private(path).splitlines())):
        try:
            secret = base64.b64decode(line.removeprefix(SECRET), validate=True)
        except (binascii.Error, ValueError):
            secret = b""
        if not line.startswith(SECRET) or not 24 <= len(secret) <= 64:
            raise ConfigError(
                f"--webhook-key-file {path}: each line must be whsec_ and 24 to 64 bytes in base64, "
                "such as echo whsec_$(openssl rand -base64 32) makes."
            )
        found.append(secret)
    if not found:
        advice = "echo whsec_$(openssl rand -base64 32) makes one"
        raise ConfigError(f"--webhook-key-file {path}: holds no secret; {advice}.")
    return tuple(found)


def signed(message_id: str, timestamp: int, body: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """The headers of a message."""
    content = f"{message_id}.{timestamp}.".encode() + body
    each = (hmac.new(secret, content, hashlib.sha256).digest() for secret in secrets)
    signature = " ".join(f"v1,{base64.b64encode(made).decode()}" for made in each)
    return {"webhook-id": message_id, "webhook-timestamp": str(timestamp), "webhook-signature": signature}


def message(entry: LedgerEntry) -> bytes:
    """The body that tells of an entry."""
    at = datetime.fromtimestamp(entry.at, UTC).isoformat().replace("+00:00", "Z")
    return orjson.dumps({"type": f"ledger.{entry.action}", "timestamp": at, "data": asdict(entry)})


def shown(url: str) -> str:
    """Without what may be secret in it: user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class Webhooks:
    """Delivers while `leads`. `counts` by URL as it is shown. Raises ConfigError without a good secret."""

    def __init__(
        self,
        store: Store,
        model: str,
        settings: WebhookSettings,
        leads: Callable[[], bool],
        serves: Callable[[str], bool],
    ) -> None:
        """`model` names its records; entries about models that this gateway does not `serve` are passed over."""
        self._file, self._seen = settings.key_file, stamp(settings.key_file) if settings.key_file is not None else None
        self._secrets = read_secrets(settings.key_file) if settings.key_file is not None else ()
        self._hooks = [_Hook(store, model, url, leads, serves, self.secrets) for url in settings.urls]
        self.counts: dict[str, HookCounts] = {shown(hook.url): hook.counts for hook in self._hooks}

    async def run(self) -> None:
        """For ever, whatever the receivers and the store do."""
        async with asyncio.TaskGroup() as tasks:
            for hook in self._hooks:
                tasks.create_task(hook.run())

    def told(self, entry: LedgerEntry) -> None:
        """There is a new entry."""
        for hook in self._hooks:
            hook.counts.behind = max(0, entry.number - hook.number) if hook.number is not None else 0
            hook.news.set()

    def secrets(self) -> tuple[bytes, ...]:
        """As the file has them now; those of before while it cannot be read."""
        if self._file is not None and (now := stamp(self._file)) != self._seen:
            self._seen = now
            try:
                self._secrets = read_secrets(self._file)
            except ConfigError as error:
                log.error("webhooks go on with the secrets of before: %s", error)
        return self._secrets


class _Hook:
    """One URL. `number` is the last entry that it has got; None while nobody has looked."""

    def __init__(
        self,
        store: Store,
        model: str,
        url: str,
        leads: Callable[[], bool],
        serves: Callable[[str], bool],
        secrets: Callable[[], Sequence[bytes]],
    ) -> None:
        self._store, self._leads, self._serves, self._secrets = store, leads, serves, secrets
        self._key = f"gateway/webhooks/{model}/{hashlib.sha256(url.encode()).hexdigest()[:32]}"
        self._revision = MISSING
        self.url, self.counts, self.news = url, HookCounts(), asyncio.Event()
        self.number: int | None = None

    async def run(self) -> None:
        """For ever."""
        import httpx

        away = False
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            while True:
                try:
                    await self._step(client)
                    away = False
                except StoreError as error:
                    if not away:
                        log.warning("webhooks of %s wait until the store answers: %s", shown(self.url), error)
                    self.number, away = None, True
                    await asyncio.sleep(LOOK_S)

    async def _step(self, client: httpx.AsyncClient) -> None:
        if not self._leads():
            self.number, self.counts.behind = None, 0
            await asyncio.sleep(LOOK_S)
            return
        if self.number is None:
            self.number = await self._begin()
        self.news.clear()
        last = await self._last()
        self.counts.behind = max(0, last - self.number)
        if self.number >= last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.news.wait()
        elif (found := await self._store.get(chain.entry_key(self.number + 1))) is not None:
            await self._pass_on(client, self.number + 1, found.value)
        else:
            await self._skip(last)

    async def _last(self) -> int:
        """The number of the ledger's last entry."""
        found = await self._store.get(chain.HEAD)
        return HeadRecord.from_json(found.value).number if found is not None else 0

    async def _begin(self) -> int:
        """The number in the record, which is made if it is not there."""
        found = await self._store.get(self._key)
        if found is not None:
            self._revision = found.mod_revision
            return HookRecord.from_json(found.value).number
        last = await self._last()
        self._revision = await self._store.compare_and_swap(self._key, MISSING, HookRecord(last).to_json())
        return last

    async def _skip(self, last: int) -> None:
        """On to the oldest entry that is still in the store."""
        assert self.number is not None
        found = await self._store.get(chain.ARCHIVED)
        archived = ArchiveRecord.from_json(found.value).number if found is not None else 0
        to = archived if archived > self.number else last
        which = (self.number + 1, to, shown(self.url))
        log.error("entries %d to %d of the ledger left the store before %s took them", *which)
        self.counts.outcomes["lost"] += to - self.number
        await self._move(to)

    async def _pass_on(self, client: httpx.AsyncClient, number: int, raw: bytes) -> None:
        """Deliver an entry; return when the receiver has it, when it is given up, or when another gateway leads."""
        try:
            entry = LedgerEntry.from_json(raw)
        except RecordError as error:
            log.error("no webhook tells of entry %d of the ledger: %s", number, error)
            self.counts.outcomes["lost"] += 1
            await self._move(number)
            return
        if entry.model and not self._serves(entry.model):
            await self._move(number)
            return
        began, wait_s, said, about = time.monotonic(), RETRY_S, "", (shown(self.url), number)
        while self._leads():
            problem, asked_s = await self._post(client, entry)
            if not problem:
                self.counts.outcomes["delivered"] += 1
                await self._move(number)
                return
            self.counts.outcomes["failed"] += 1
            if problem != said:
                log.warning("%s did not take entry %d of the ledger; it is sent again: %s", *about, problem)
            said = problem
            if time.monotonic() - began > GIVE_UP_S:
                log.error("%s does not get entry %d of the ledger, which is given up: %s", *about, problem)
                self.counts.outcomes["lost"] += 1
                await self._move(number)
                return
            await asyncio.sleep(min(max(wait_s, asked_s), MAX_RETRY_S) * random.uniform(1.0, 1.2))  # noqa: S311
            wait_s = min(2 * wait_s, MAX_RETRY_S)

    async def _post(self, client: httpx.AsyncClient, entry: LedgerEntry) -> tuple[str, float]:
        """The error ("": none), and for how many seconds the receiver asks to be left alone."""
        import httpx

        body = message(entry)
        headers = signed(f"msg_{entry.digest[:32]}", int(time.time()), body, self._secrets())
        try:
            async with client.stream(
                "POST", self.url, content=body, headers={"content-type": "application/json", **headers}
            ) as answer:
                status, after = answer.status_code, answer.headers.get("retry-after", "")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return str(error) or type(error).__name__, 0.0
        if 200 <= status < 300:
            return "", 0.0
        return f"HTTP {status}", MAX_RETRY_S if status == 410 else float(after) if after.isdecimal() else 0.0

    async def _move(self, number: int) -> None:
        try:
            self._revision = await self._store.compare_and_swap(self._key, self._revision, HookRecord(number).to_json())
        except Conflict:  # another gateway has led meanwhile
            self.number = None
            return
        self.counts.behind = max(0, self.counts.behind - (number - (self.number or 0)))
        self.number = number


class LedgerKeeper:
    """Follows the ledger while `leads`. `on_entry` is told of every new entry; older ones leave for `place`."""

    def __init__(self, store: Store, place: str, leads: Callable[[], bool], on_entry: Callable[[LedgerEntry], None]):
        self._store, self._place, self._leads, self._on_entry = store, place, leads, on_entry

    async def run(self) -> None:
        """Runs for ever. Errors of the store and of files are logged, and swaps go on."""
        away = False
        while True:
            try:
                _, revision = await self._store.list(chain.HEAD)
                away = False
                async for event in self._store.watch(chain.ENTRIES, revision + 1):
                    if event.kind == "put" and self._leads():
                        await self._take(event.kv.value)
            except StoreError as exc:
                if not away:
                    log.warning("the ledger is not followed until the store answers: %s", exc)
                away = True
                await asyncio.sleep(KEEPER_RETRY_S)

    async def _take(self, line: bytes) -> None:
        try:
            entry = LedgerEntry.from_json(line)
        except RecordError as exc:
            log.error("ignoring an entry of the ledger: %s", exc)
            return
        self._on_entry(entry)
        if entry.number % EVERY:
            return
        try:
            if moved := await archive(self._store, self._place):
                log.info("%d entries of the ledger left the store for %s", moved, self._place or "nowhere")
        except WeightSyncError as exc:
            if exc.code != "ledger_unavailable":
                raise
            log.error("older entries of the ledger stay in the store: %s", exc)
