"""Publishes versions from a host that shares no memory with the server: over HTTP, as differences where that pays.

    with weightsync.RemotePublisher("http://gateway:8001", admin_key, model="demo") as pub:
        version = pub.publish(model.named_parameters(), step=10)

It keeps the tensors of its last version, and room for the next, in host memory until it is closed: twice the model, and
twice each other part that it publishes. The first version goes
in full; so does one whose base the server has retired meanwhile, and one where a difference would not be smaller.

`AdminApi` is the gateway's admin API over http.client, so that a trainer needs nothing installed.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import select
import socket
import ssl
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import orjson

from weightsync.control.parts import BASE, Adapter, own_digest
from weightsync.control.records import OnLost, SwapMode
from weightsync.errors import PublishError, publishing, store_closed, swap_aborted, swap_timeout
from weightsync.format.manifest import Schema, TensorSpec
from weightsync.publish.delta import Base, DeltaHeader, DeltaWriter
from weightsync.publish.publisher import NamedTensors, Version, check_names, signer_of
from weightsync.publish.succession import Succession

CONNECT_TIMEOUT_S = 10.0
LARGE = 64 << 10  # pieces from here on are sent as they are, not copied into a frame first
MAX_ANSWER = 64 << 20


class Refused(Exception):
    """The server answered, and not with success. `fields` is the `error` object of the answer."""

    def __init__(self, status: int, fields: Mapping[str, Any], retry_after_s: float | None) -> None:
        self.status, self.fields, self.retry_after_s = status, fields, retry_after_s
        self.code = str(fields.get("code", ""))
        super().__init__(str(fields.get("message") or f"HTTP {status}"))


class AdminApi:
    """One connection a request: uploads are minutes apart. Raises Refused, or ConnectionError without an answer: what
    was asked may have been done. WeightSyncError after `close` and for a bad URL."""

    def __init__(self, url: str, admin_key: str, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PublishError(
                f"{url!r} is not the URL of an admin port: pass http://HOST:PORT or https://HOST:PORT",
                code="remote_error",
            )
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._headers = {"authorization": f"Bearer {admin_key}", "accept": "application/json"}
        self._under_way: set[socket.socket] = set()
        self._closed = False

    def close(self) -> None:
        """End the requests that other threads have under way; safe to call twice."""
        self._closed = True
        for connected in tuple(self._under_way):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # TLS's own takes it from a thread that reads

    def require_open(self) -> None:
        """Raises StoreError."""
        if self._closed:
            raise store_closed("publisher")

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer."""
        raw = orjson.dumps(body) if body is not None else None
        kind = {"content-type": "application/json"} if body is not None else {}
        with self._connection() as connection:
            connection.request(method, self._prefix + path, raw, self._headers | kind)
            return _answer(connection.getresponse())

    def upload(self, path: str, query: Mapping[str, Any], pieces: Iterable[bytes]) -> Any:
        """POST `pieces`, as they are made, and return the JSON answer. Stops sending once the server refuses."""
        target = f"{self._prefix}{path}?{urlencode({k: _plain(v) for k, v in query.items() if v is not None})}"
        with self._connection() as connection:
            connection.putrequest("POST", target)
            headers = {"content-type": "application/octet-stream", "transfer-encoding": "chunked"}
            for name, value in (self._headers | headers).items():
                connection.putheader(name, value)
            connection.endheaders()
            try:
                self._send(connection, pieces)
            except (BrokenPipeError, ConnectionResetError) as lost:
                return _last_words(connection, lost)
            return _answer(connection.getresponse())

    def _send(self, connection: http.client.HTTPConnection, pieces: Iterable[bytes]) -> None:
        refusal = select.poll()  # not select(): a trainer may have more than 1,024 files open
        if self._tls is None:  # with TLS a readable socket may be about session tickets: a refusal shows in sending
            refusal.register(connection.sock, select.POLLIN)
        for piece in pieces:
            if refusal.poll(0):
                return
            frame = b"%x\r\n" % len(piece)
            if len(piece) < LARGE:
                connection.send(b"%b%b\r\n" % (frame, piece))
            else:
                for part in (frame, piece, b"\r\n"):
                    connection.send(part)
        connection.send(b"0\r\n\r\n")

    @contextlib.contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        self.require_open()
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        else:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_TIMEOUT_S, context=self._tls
            )
        try:
            connection.connect()
            connection.sock.settimeout(self._timeout_s)
            connected = connection.sock
            self._under_way.add(connected)
            try:
                self.require_open()  # `close` finds the socket, or its mark is found here
                yield connection
            finally:
                self._under_way.discard(connected)
        except (OSError, http.client.HTTPException, orjson.JSONDecodeError) as error:
            self.require_open()
            raise ConnectionError(f"{self.url}: {error or type(error).__name__}") from error
        finally:
            connection.close()


def _last_words(connection: http.client.HTTPConnection, lost: OSError) -> Any:
    """The answer of the server from before it closed a connection that was still being sent to."""
    try:
        response = connection.getresponse()
    except (OSError, http.client.HTTPException):
        raise lost from None
    return _answer(response)


def _answer(response: http.client.HTTPResponse) -> Any:
    raw = response.read(MAX_ANSWER)
    if 200 <= response.status < 300:
        return orjson.loads(raw)
    fields: Any = {}
    with contextlib.suppress(orjson.JSONDecodeError, AttributeError):
        fields = orjson.loads(raw).get("error")
    after = response.headers.get("retry-after", "")
    raise Refused(
        response.status, fields if isinstance(fields, dict) else {}, float(after) if after.isdigit() else None
    )


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


ATTEMPTS = 6
T = TypeVar("T")
Sent = tuple[dict[str, Any], DeltaWriter | None]  # the answer, and what was sent
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
POLL_S = 0.2
# Refusals that another try may not meet: somebody else published meanwhile, the store or a slot was away for a moment.
PASSING = frozenset(
    {"upload_cut_off", "stale_publisher", "draft_lost", "lease_lost", "slot_busy", "store_unavailable", "overloaded"}
    | {"unknown_base"}  # the next try has none
)


class RemotePublisher:
    """Publishes to the server whose admin port is at `url`. One at a time per model, as with any publisher. Once it is
    closed, all that asks the server raises StoreError.

    `timeout_s` is how long the server may take for one answer; `tls` is for https with a certificate of your own;
    with `deltas` off every version goes in full, with `compress` off full ones go uncompressed (for fast links).
    Versions are signed with the private key in the PEM file `sign` (default: HOTSWAP_SIGN_KEY; none: by the server's
    host, where that has a key). Raises WeightSyncError.
    `last` says how the last version went: {"version", "sent" (bytes), "full", "attempts", "nbytes", "duplicate", ...}.
    """

    def __init__(
        self,
        url: str,
        admin_key: str,
        model: str,
        *,
        timeout_s: float = 600.0,
        tls: ssl.SSLContext | None = None,
        deltas: bool = True,
        compress: bool = True,
        threads: int | None = None,
        sign: Path | str | None = None,
    ) -> None:
        self.model = model
        self._signer = signer_of(sign)
        self.last: dict[str, Any] = {}
        self._api = AdminApi(url, admin_key, timeout_s=timeout_s, tls=tls)
        self._threads, self._deltas, self._compress = threads, deltas, compress
        self._successions: dict[str, Succession] = {}

    @publishing
    def publish(
        self,
        named_tensors: NamedTensors | Adapter,
        *,
        part: str = BASE,
        step: int | None = None,
        activate: bool = True,
        wait: bool = True,
        timeout_s: float = 60.0,
        mode: SwapMode = "together",
        drain_s: float | None = None,
        on_lost: OnLost = "abort",
        metadata: Mapping[str, str] | None = None,
        source: str = "",
        config: Mapping[str, Any] | None = None,
        cast: bool = False,
        strip: str = "",
    ) -> Version:
        """Send all tensors as a new version, have it swapped in with `activate`, and return its number.

        With `part` they are the draft model's ("draft") or an `Adapter` ("lora/NAME"), and the rest stays as it is.
        With `config`, the config.json of such a checkpoint, tensors and configuration may be others than before: see
        `Publisher.publish`. `cast` and `strip`, too: the tensors are converted here, to the dtypes that the server
        tells.

        A lost connection or a server that restarts is tried again; what was sent twice becomes one version. Returns,
        with `wait`, when the version is active. Raises PublishError; once the version is ready, SwapError.
        """
        self._api.require_open()
        if (versions := self._successions.get(part)) is None:
            versions = self._successions[part] = Succession(self.model, part, self._signer)
        about: dict[str, Any] = {"step": step, "metadata": metadata, "source": source, "config": config}
        about["strip"], about["cast_to"] = strip, self._schema(part) if cast and config is None else None
        header = versions.take(named_tensors, **about)
        query: dict[str, Any] = {"upload_id": uuid.uuid4().hex, "with_config": bool(header.config) or None}
        query |= {"part": part} if part else {}
        wish = {"deadline_s": timeout_s, "mode": mode, "on_lost": on_lost}
        wish |= {"drain_s": drain_s} if drain_s is not None else {}
        if activate and not wait:
            query |= {"activate": True, **wish}
        header = replace(header, base=self._useful_base(versions, header))

        def send() -> Sent:
            nonlocal header
            writer = versions.writer(header, compress=self._compress, threads=self._threads)
            try:
                return self._api.upload("/admin/weights/upload", query, writer), writer
            except Refused as refusal:
                if refusal.code == "unknown_base":
                    header = replace(header, base=None)
                raise

        answer = self._deliver(query["upload_id"], send)
        version = int(answer["version"])
        versions.advance(Base(version, own_digest(answer)), full=bool(self.last["full"]))
        return self._activate(version, wish) if activate and wait else Version(version)

    @publishing
    def take_away(
        self,
        without: Collection[str],
        *,
        activate: bool = True,
        timeout_s: float = 60.0,
        mode: SwapMode = "together",
        drain_s: float | None = None,
        on_lost: OnLost = "abort",
    ) -> Version:
        """Make a version that brings nothing and is without these parts ("draft", "lora/NAME"); the rest as `publish`,
        which it raises as. Returns, with `activate`, when the version is active."""
        names = sorted(check_names(without))
        upload_id = uuid.uuid4().hex
        body = {"without": names, "activate": False, "upload_id": upload_id}
        answer = self._deliver(upload_id, lambda: (self._api.call("POST", "/admin/weights", body), None))
        version = int(answer["version"])
        wish = {"deadline_s": timeout_s, "mode": mode, "on_lost": on_lost}
        wish |= {"drain_s": drain_s} if drain_s is not None else {}
        return self._activate(version, wish) if activate else Version(version)

    def close(self) -> None:
        """End a publication that another thread has under way, and let go of the memory; safe to call twice."""
        self._api.close()
        self._successions.clear()

    def __enter__(self) -> RemotePublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _schema(self, part: str) -> Schema | None:
        """Of the next version, as the server tells it. Raises PublishError."""
        path = f"/admin/weights/schema?{urlencode({'part': part})}"
        rows = _tried(lambda _: self._api.call("GET", path)["tensors"])
        return Schema({name: TensorSpec(dtype, tuple(shape)) for name, dtype, shape in rows}) if rows else None

    def _deliver(self, upload_id: str, send: Callable[[], Sent]) -> dict[str, Any]:
        """Send until it has arrived. Raises PublishError."""

        def once(attempt: int) -> dict[str, Any]:
            if attempt > 1 and (known := self._find(upload_id)) is not None:
                return self._note(known, None, attempt)
            return self._note(*send(), attempt)

        return _tried(once)

    def _useful_base(self, versions: Succession, header: DeltaHeader) -> Base | None:
        """The last version, if the server still has it and a difference from it is smaller than the whole."""
        if (base := versions.base) is None or not self._deltas or not versions.pays(header):
            return None
        try:
            ready = [v for v in self._versions() if v["state"] == "ready"]
        except (Refused, ConnectionError):
            return base  # the upload will find out
        held = {digest for v in ready for digest in (v["manifest_digest"], *(p["manifest_digest"] for p in v["parts"]))}
        return base if base.manifest_digest in held else None

    def _find(self, upload_id: str) -> dict[str, Any] | None:
        """The version an upload became whose answer was lost."""
        for found in self._versions():
            if found["state"] != "publishing" and str(found["source"]).startswith(f"upload {upload_id} "):
                return {**found, "duplicate": True}
        return None

    def _versions(self) -> list[dict[str, Any]]:
        return list(self._api.call("GET", "/admin/weights")["versions"])

    def _note(self, answer: dict[str, Any], writer: DeltaWriter | None, attempts: int) -> dict[str, Any]:
        sent = writer.stats.nbytes if writer is not None else 0
        full = writer.header.base is None if writer is not None else None
        self.last = {**answer, "sent": sent, "full": full, "attempts": attempts}
        return answer

    def _activate(self, version: int, wish: dict[str, Any]) -> Version:
        """Raises SwapError, PublishError."""
        for tries in _ticks(wish["deadline_s"]):
            try:
                if tries and self._api.call("GET", "/admin/weights/active")["version"] == version:
                    break  # an earlier request has arrived, and its answer was lost
                report = self._api.call("POST", "/admin/weights/activate", {"version": version, **wish})
                return Version(version, report.get("not_flipped", ()))
            except ConnectionError:
                continue
            except Refused as refusal:
                if refusal.code == "swap_aborted":
                    reason = str(refusal.fields.get("reason") or refusal)
                    raise swap_aborted(version, reason, refusal.fields.get("tensor")) from refusal
                if refusal.code == "swap_timeout":
                    raise swap_timeout(version, wish["deadline_s"]) from refusal
                if refusal.code not in PASSING:
                    raise _error(refusal) from refusal
        else:
            raise swap_timeout(version, wish["deadline_s"])
        return Version(version)


def _tried(ask: Callable[[int], T]) -> T:
    """The answer to `ask`, which is given the number of the attempt, from 1 on. Raises PublishError."""
    pause_s = FIRST_PAUSE_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return ask(attempt)
        except Refused as refusal:
            if refusal.code not in PASSING or attempt == ATTEMPTS:
                raise _error(refusal) from refusal
            pause_s = refusal.retry_after_s or pause_s
        except ConnectionError as fault:
            if attempt == ATTEMPTS:
                raise PublishError(
                    f"{fault}; gave up after {ATTEMPTS} attempts: is the server running?", code="remote_error"
                ) from fault
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _ticks(timeout_s: float) -> Iterator[int]:
    deadline = time.monotonic() + timeout_s
    for tries in itertools.count():
        yield tries
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_S)


def _error(refusal: Refused) -> PublishError:
    error = PublishError(
        f"the server refused the version: {refusal}",
        status=refusal.status,
        answer_code=refusal.code,
        code="remote_error",
    )
    error.tensor = refusal.fields.get("tensor")
    return error
