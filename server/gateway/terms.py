"""The terms of a request: the weights that may answer it, and its place in the queue. The gateway reads and checks
them, and tells them to the instance.

By header (`x-hotswap-policy`, `-finish-s`, `-version`, `-min-version`, `-wait-s`, `-kv`, `-priority`, ...) or by the
body's field `hotswap` with the same names. Neither is passed on as it came: the field is taken out of the body, and the
headers that go upstream are written here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from server.errors import HttpError
from server.gateway.access.keys import Principal
from server.gateway.config import Failover, Kv
from server.gateway.fleet.routing import Need
from server.gateway.wire.bodies import raw_fields
from server.gateway.wire.head import WISH
from server.key_limits import MAX_PRIORITY, MIN_PRIORITY
from weightsync.control.state import CONFIRM_S

MAX_FINISH_S = CONFIRM_S - 5.0  # a flip that waited longer would be too late for its swap
MAX_WAIT_S = 600

Version = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
Finish = Annotated[float, Meta(gt=0, le=MAX_FINISH_S)]
Wait = Annotated[float, Meta(ge=0, le=MAX_WAIT_S)]
Deadline = Annotated[float, Meta(gt=0, le=MAX_WAIT_S)]


class Wish(msgspec.Struct, forbid_unknown_fields=True):
    """The wishes of a request about swaps and the queue; taken out before vLLM sees the body."""

    policy: Annotated[
        Literal["keep", "recompute", "finish", "abort"] | None,
        Meta(description="What a change of the weights in the middle of the answer does to it."),
    ] = None
    finish_s: Annotated[
        Finish | None, Meta(description="Seconds a swap waits for this request; with policy finish, or a version.")
    ] = None
    version: Annotated[
        Version | None,
        Meta(description="Only this version of the weights may answer; not with policy keep or recompute."),
    ] = None
    min_version: Annotated[Version | None, Meta(description="Only this version or a later one may answer.")] = None
    wait_s: Annotated[
        Wait | None, Meta(description="Seconds to wait for such a version; with version or min_version.")
    ] = None
    kv: Annotated[
        Kv | None,
        Meta(description="KV cache that the prompt may reuse: of its version, of any version in its session, of any."),
    ] = None
    priority: Annotated[
        Priority | None,
        Meta(description="Class in the queue; the lowest goes first, and the key says what is the lowest allowed."),
    ] = None
    deadline_s: Annotated[
        Deadline | None, Meta(description="Seconds in which the request must get to an instance.")
    ] = None
    failover: Annotated[
        Failover | None,
        Meta(description="Instance that may resume this stream if its own dies: of the same version, any, or none."),
    ] = None


@dataclass(frozen=True, slots=True)
class Asked:
    """`lines` are for the instance; `need` is None if any version will do.

    `priority` (None: its key's) and `deadline_s`, in which it must get to an instance, are for the queue. `failover` is
    None if the gateway's setting holds, and so is `kv`; `uncrossed`: one version must give the whole answer.
    """

    lines: bytes
    need: Need | None
    priority: int | None
    deadline_s: float
    failover: Failover | None
    uncrossed: bool
    kv: Kv | None

    def failover_or(self, mode: Failover) -> Failover:
        """The instances that may continue its stream, where the gateway is set to `mode`."""
        chosen = self.failover or mode
        return "same" if chosen == "any" and self.uncrossed else chosen


# Headers that are read, with the fields that they set; everything else with the prefix is refused.
HEADERS = {b"x-hotswap-" + name.replace("_", "-").encode(): name for name in Wish.__struct_fields__}
_NAMES = {name: header.decode() for header, name in HEADERS.items()}
_TEXTS = ("policy", "failover", "kv")
_INTEGER = re.compile(rb"-?[0-9]{1,19}")
_SECONDS = re.compile(rb"[0-9]{1,5}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?")  # what JSON writes
_wishes = msgspec.json.Decoder(Wish)


def read(headers: Mapping[bytes, bytes], body: bytes, *, in_body: bool) -> tuple[Asked, bytes]:
    """The terms that are asked for, and the body without the field. `in_body`: it is a JSON object with the field.

    Raises HttpError (400).
    """
    wish = _from_headers(headers)
    if in_body:
        other, body = _from_body(body)
        wish = _merged(wish, other)
    _check(wish)
    constrained = wish.version is not None or wish.min_version is not None
    need = Need(wish.version, wish.min_version, wish.wait_s or 0.0) if constrained else None
    deadline_s = wish.deadline_s if wish.deadline_s is not None else math.inf
    return Asked(_lines(wish), need, wish.priority, deadline_s, wish.failover, _uncrossed(wish), wish.kv), body


def priority_within(asked: Asked, principal: Principal) -> int:
    """The class of a request: its key's, or a less urgent one it asks for; 403 (HttpError) for a more urgent one."""
    if asked.priority is None:
        return principal.priority
    if asked.priority < principal.priority:
        message = f"This key's requests have priority {principal.priority}; only higher numbers can be asked for."
        raise HttpError(403, message, code="priority_not_allowed", param="priority")
    return asked.priority


def _from_headers(headers: Mapping[bytes, bytes]) -> Wish:
    found: dict[str, Any] = {}
    for header, value in headers.items():
        name, text = HEADERS[header], value.decode("latin-1")
        if name in _TEXTS:
            found[name] = text
            continue
        seconds = name.endswith("_s")
        if not (_SECONDS if seconds else _INTEGER).fullmatch(value):
            raise _bad(f"{header.decode()}: {text!r} is not a number in its range.", header.decode())
        found[name] = float(text) if seconds else int(text)
    try:
        return msgspec.convert(found, Wish)
    except msgspec.ValidationError as exc:
        raise _bad(f"A x-hotswap header cannot be used: {exc}.", _place(exc, _NAMES)) from exc


def _from_body(body: bytes) -> tuple[Wish, bytes]:
    """Values at the top stay the bytes they are: nothing is built of a large body, and no number changes its form."""
    fields = raw_fields(body)
    try:
        wish = _wishes.decode(fields.pop("hotswap"))
    except msgspec.DecodeError as exc:  # ValidationError is one
        raise _bad(f"`hotswap`: {exc}.", _place(exc, {n: f"hotswap.{n}" for n in _NAMES}) or "hotswap") from exc
    return wish, msgspec.json.encode(fields)


def _merged(a: Wish, b: Wish) -> Wish:
    for name in _NAMES:
        mine, other = getattr(a, name), getattr(b, name)
        if mine is not None and other is not None and mine != other:
            raise _contradiction(f"{_NAMES[name]} says {mine}, and `hotswap.{name}` {other}; send one.", name)
        if mine is None:
            setattr(a, name, other)
    return a


def _check(wish: Wish) -> None:
    exact, least = wish.version, wish.min_version
    if exact is not None and least is not None and exact < least:
        raise _contradiction(f"version {exact} is before min_version {least}.", "min_version")
    if exact is not None and wish.policy in ("keep", "recompute"):
        raise _contradiction(f"policy {wish.policy} goes on with other weights than version {exact}.", "policy")
    constrained = exact is not None or least is not None
    if wish.finish_s is not None and wish.policy != "finish" and not constrained:
        raise _contradiction("finish_s bounds the policy finish, or a version; ask for one of them.", "finish_s")
    if wish.wait_s is not None and not constrained:
        raise _contradiction("wait_s waits for a version; say which (version, min_version).", "wait_s")
    if wish.failover == "any" and _uncrossed(wish):
        raise _contradiction("failover any goes on with other weights; leave it out, or ask for same.", "failover")


def _uncrossed(wish: Wish) -> bool:
    return wish.policy in ("finish", "abort") or wish.version is not None


def _lines(wish: Wish) -> bytes:
    values = {b"policy": wish.policy, b"finish-s": wish.finish_s, b"version": wish.version}
    values[b"min-version"] = wish.min_version
    lines = [b"%b%b: %b\r\n" % (WISH, n, str(v).encode()) for n, v in values.items() if v is not None]
    return b"".join(lines)


def _place(error: Exception, names: Mapping[str, str]) -> str | None:
    """The name of the parameter msgspec complains of."""
    at = re.search(r"\$\.(\w+)", str(error))
    return names.get(at[1]) if at is not None else None


def _bad(message: str, param: str | None) -> HttpError:
    return HttpError(400, message, code="invalid_parameter", param=param)


def _contradiction(message: str, param: str) -> HttpError:
    return HttpError(400, message, code="contradictory_parameters", param=param)
