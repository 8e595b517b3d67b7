"""An etcd URL: the members, the prefix of the keys, and the credentials.

etcd://host:port[,host2:port2,...][/namespace][?ca=PATH&cert=PATH&key=PATH&user=NAME&password_file=PATH]

A password stands in a file, never in the URL: URLs are logged and show in process lists.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from urllib.parse import parse_qsl

from weightsync.errors import StoreRefused, StoreUnavailable

DEFAULT_PORT = 2379
DEFAULT_NAMESPACE = "hotswap"
PASSWORD_FILE_ENV = "HOTSWAP_ETCD_PASSWORD_FILE"  # noqa: S105 - the name of a variable
OPTIONS = ("ca", "cert", "key", "user", "password_file")
FORM = "Write it as etcd://host:port[,host2:port2][/namespace], options as ?ca=/path&user=NAME&password_file=/path"


@dataclass(frozen=True, slots=True)
class EtcdUrl:
    """A parsed URL. `text` is what was parsed: free of secrets, and good for opening the store again."""

    text: str
    endpoints: tuple[tuple[str, int], ...]
    namespace: str  # ends with "/"
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> EtcdUrl:
        """Raises StoreUnavailable; nothing of a malformed URL but its hosts is repeated in the message."""
        place, _, query = text.removeprefix("etcd://").partition("?")
        hosts, _, path = place.partition("/")
        if "@" in hosts:
            problem = "a user or password before the host"
            _refuse(hosts.rpartition("@")[2], problem, "Use ?user=NAME&password_file=/path")
        pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)  # in a path "+" is no space
        options = dict(pairs)
        unknown = sorted(options.keys() - set(OPTIONS))
        if unknown or len(options) < len(pairs):
            problem = f"unknown option {unknown[0]!r}" if unknown else "an option given twice"
            _refuse(hosts, problem, f"There are {', '.join(OPTIONS)}")
        if ("cert" in options) != ("key" in options) or ("cert" in options and "ca" not in options):
            _refuse(hosts, "incomplete TLS options", "Give ca, or ca, cert and key together")
        endpoints = tuple(_endpoint(hosts, host) for host in hosts.split(","))
        return cls(text, endpoints, (path.strip("/") or DEFAULT_NAMESPACE) + "/", options)

    @property
    def user(self) -> str | None:
        return self.options.get("user")

    def tls_files(self) -> tuple[bytes, bytes | None, bytes | None] | None:
        """CA, key and certificate chain as gRPC takes them; None without TLS. Raises StoreUnavailable."""
        if "ca" not in self.options:
            return None
        ca, key, cert = (self._read(name) if name in self.options else None for name in ("ca", "key", "cert"))
        return ca or b"", key, cert

    def password(self) -> str:
        """Read anew each time, so that it can be changed under a running client. Raises StoreRefused."""
        path = self.options.get("password_file") or os.environ.get(PASSWORD_FILE_ENV)
        if not path:
            advice = f"Add &password_file=/path to its URL, or set {PASSWORD_FILE_ENV}"
            raise StoreRefused(self.text, f"no password for user {self.user!r}", advice)
        try:
            return Path(path).read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise StoreRefused(self.text, f"cannot read {path}: {_reason(error)}", "Check the password file") from error

    def _read(self, option: str) -> bytes:
        path = self.options[option]
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise StoreRefused(self.text, f"cannot read {path}: {_reason(error)}", f"Check {option}= in it") from error


def _endpoint(hosts: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or (":" in host and not host.startswith("[")):
        _refuse(hosts, f"{text!r} is not host:port", FORM)
    return host, int(port)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _refuse(hosts: str, problem: str, advice: str) -> NoReturn:
    raise StoreUnavailable(f"etcd://{hosts}", problem, advice)
