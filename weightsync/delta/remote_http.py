"""The admin API of a gateway as a `RemotePublisher` uses it: http.client, so that a trainer needs nothing installed."""

from __future__ import annotations

import contextlib
import http.client
import select
import ssl
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import orjson

from weightsync.errors import RemoteError

CONNECT_TIMEOUT_S = 10.0
LARGE = 64 << 10  # pieces from here on are sent as they are, not copied into a frame first
MAX_ANSWER = 64 << 20


class Refused(Exception):
    """The server answered, and not with success. `fields` is the `error` object of the answer."""

    def __init__(self, status: int, fields: Mapping[str, Any], retry_after_s: float | None) -> None:
        self.status, self.fields, self.retry_after_s = status, fields, retry_after_s
        self.code = str(fields.get("code", ""))
        super().__init__(str(fields.get("message") or f"HTTP {status}"))


class Unreachable(Exception):
    """No connection, or one that was lost before the answer; what was asked may have been done."""


class AdminApi:
    """One connection a request: uploads are minutes apart. Raises Refused or Unreachable; RemoteError for a bad URL."""

    def __init__(self, url: str, admin_key: str, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RemoteError(f"{url!r} is not the URL of an admin port: pass http://HOST:PORT or https://HOST:PORT")
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._headers = {"authorization": f"Bearer {admin_key}", "accept": "application/json"}

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
        for piece in pieces:
            # Over TLS a readable socket may be about session tickets: there a refusal shows when sending fails.
            if self._tls is None and select.select([connection.sock], [], [], 0)[0]:
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
            yield connection
        except (OSError, http.client.HTTPException, orjson.JSONDecodeError) as error:
            raise Unreachable(f"{self.url}: {error or type(error).__name__}") from error
        finally:
            connection.close()


def _last_words(connection: http.client.HTTPConnection, lost: OSError) -> Any:
    """What the server said before it closed a connection that was still being sent to."""
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
