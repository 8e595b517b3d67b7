"""The admin port of a running gateway, as commands reach it: where it is, the key to it, the authority that vouches
for it, and the options that say so.
"""

from __future__ import annotations

import functools
import inspect
import os
import ssl
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import httpx
import typer

from server.errors import RequestFailed
from server.up.paths import ServerInfo, default_state_dir
from weightsync.errors import TlsUnavailable
from weightsync.tls import ClusterTls, trusting

TIMEOUT_S = 900.0  # a push reads a whole checkpoint
KEY_ENV = "HOTSWAP_ADMIN_KEY"

StateDir = Annotated[Path | None, typer.Option(help="state directory of `up`; default: the latest server started here")]
Url = Annotated[
    str | None, typer.Option(envvar="HOTSWAP_ADMIN_URL", help="admin port; default: from the state directory")
]
StoreUrl = Annotated[
    str | None, typer.Option(envvar="HOTSWAP_STORE", help="URL of the records; default: from the state directory")
]
KeyFile = Annotated[Path | None, typer.Option(envvar="HOTSWAP_ADMIN_KEY_FILE", help="file with the admin key")]
Reason = Annotated[str | None, typer.Option(help="why; the ledger keeps it")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
Which = Annotated[
    str | None, typer.Option("--model", envvar="HOTSWAP_MODEL", help="which model, where the gateway has several")
]
WHERE = {"state_dir": StateDir, "url": Url, "admin_key_file": KeyFile}


class AdminClient:
    """The gateway's /admin routes; of a gateway with several models, those of `model`. The first request reads options
    that the command line and the environment leave out from the state directory of a server that was started here. The
    client reads them anew when there was no answer or the key was refused, as `up` may have begun again elsewhere.
    """

    def __init__(
        self, state_dir: Path | None, url: str | None = None, admin_key_file: Path | None = None, model: str = ""
    ) -> None:
        self._state_dir, self._url, self._key_file, self._model = state_dir, url, admin_key_file, model

    @functools.cached_property
    def _http(self) -> httpx.Client:
        """Raises CliError."""
        key, url, key_file = os.environ.get(KEY_ENV), self._url, self._key_file
        certificate = ""
        if url is None or (key_file is None and not key):
            info = ServerInfo.read(self._state_dir or default_state_dir(None))
            certificate = info.certificate if url is None else ""
            url, key_file = url or info.admin_url, key_file or Path(info.admin_key_file)
        headers = {"authorization": f"Bearer {key or _key_in(key_file)}"}
        which = {"model": self._model} if self._model else {}
        verify = admin_tls(url, certificate)
        return httpx.Client(base_url=url, headers=headers, params=which, verify=verify, timeout=TIMEOUT_S)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, reason: str | None = None) -> Any:
        """The JSON answer; RequestFailed carries the gateway's own message. `reason` is for the ledger."""
        return self._answer(method, path, {"reason": reason} if reason else {}, json=body)

    def upload(self, path: str, query: Mapping[str, str], pieces: Iterable[bytes], reason: str) -> Any:
        """POST `pieces`, as they are made; otherwise as `call`."""
        headers = {"content-type": "application/octet-stream"}
        return self._answer("POST", path, {**query, "reason": reason}, content=iter(pieces), headers=headers)

    def _answer(self, method: str, path: str, query: Mapping[str, str], **what: Any) -> Any:
        http = self._http
        try:
            answer = http.request(method, httpx.URL(path).copy_merge_params(query), **what)
        except httpx.TransportError as error:
            del self._http
            raise RequestFailed(f"no answer from {http.base_url}: {error}; is `hotswap up` running?") from error
        if answer.status_code == 401:
            del self._http
        try:
            payload = answer.json() if answer.content else {}
        except ValueError:
            problem = f"{http.base_url} answers HTTP {answer.status_code} and no JSON"
            raise RequestFailed(f"{problem}; is that the admin port of a gateway?", answer.status_code) from None
        if answer.is_error:
            told = payload.get("error", {})
            message = told.get("message") or f"{path}: HTTP {answer.status_code}"
            raise RequestFailed(message, answer.status_code, told.get("code") or "")
        return payload


def _key_in(file: Path | None) -> str:
    assert file is not None  # else there is one in the environment
    try:
        return file.read_text().strip()
    except OSError as error:
        raise RequestFailed(f"the admin key file {file} cannot be read ({error.strerror})") from error


CA_ENV = "HOTSWAP_ADMIN_CA"


def admin_tls(url: str, certificate: str = "") -> ssl.SSLContext | bool:
    """The authority in the file $HOTSWAP_ADMIN_CA; else the server's own certificate, where a state directory names it;
    else mutual TLS, where $HOTSWAP_CLUSTER_TLS is set; else the system's authorities. Raises RequestFailed."""
    if not url.startswith("https://"):
        return True
    try:
        if authority := os.environ.get(CA_ENV):
            return ssl.create_default_context(cafile=authority)
        if certificate:
            return trusting(certificate)
        member = ClusterTls.of_environment()
    except TlsUnavailable as error:
        raise RequestFailed(str(error)) from error
    except OSError as error:
        file = f"{CA_ENV}={os.environ[CA_ENV]}" if os.environ.get(CA_ENV) else certificate
        raise RequestFailed(f"{file} cannot be used ({error}): name a PEM file in {CA_ENV}") from error
    return member.client_context() if member is not None else True


Command = Callable[..., None]


def with_options(
    parameter: str, hints: Mapping[str, Any], make: Callable[..., Any], **defaults: Any
) -> Callable[[Command], Command]:
    """Of a function that takes `parameter`, a command with the options of `hints` instead, of whose values `make` makes
    it. An option is None by default, unless `defaults` say otherwise."""

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            function(**{parameter: make(**{name: given.pop(name) for name in hints})}, **given)

        own = {**get_type_hints(function, include_extras=True), **hints}
        kept = [each for each in inspect.signature(function).parameters.values() if each.name != parameter]
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name)) for name in hints]
        signed = [p.replace(annotation=own[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in [*kept, *added]]
        command.__signature__ = inspect.Signature(signed)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in signed}
        return command

    return decorate


for_gateway = with_options("client", WHERE, AdminClient)  # of a function that takes `client`
for_model = with_options("client", WHERE | {"model": Which}, AdminClient)  # which asks about that model


def served(record: dict[str, Any]) -> str:
    """The version of a swap or commit record in an answer, and those beside it with their percent of the requests."""
    others = (record.get("split") or {}).get("shares", [])
    if not others:
        return f"version {record['version']}"
    names = " and ".join(f"version {share['version']}" for share in others)
    percents = " and ".join(f"{share['percent']:g} %" for share in others)
    return f"{names} beside version {record['version']} ({percents} of the requests)"


def percentages(active: dict[str, Any]) -> dict[int, float]:
    """By version, from the commit record in an answer; empty where no versions share the traffic."""
    shares = (active.get("split") or {}).get("shares", [])
    others = {share["version"]: share["percent"] for share in shares}
    return {active["version"]: 100.0 - sum(others.values()), **others} if others else {}
