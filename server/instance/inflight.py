"""The requests in flight here, what each asked of a swap, and the wait of a flip for those it must not cross."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from server.prefixes import SCOPE
from weightsync.control.state import CONFIRM_S

FINISH_S = 30.0
# A swap is over for those who have not flipped by CONFIRM_S, and they get no requests until they have: whatever a
# client asks for, a flip is done before that.
LONGEST_FINISH_S = CONFIRM_S - 5.0
PUBLIC = "public"
WITHIN_CLASS = 1000


class Problem(Exception):
    """Why a request gets no answer, or no more of it: what the client is told, whichever route it asked. With the
    defaults, it cannot be served as it is asked."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s
        other = "invalid_request_error" if status < 500 else "server_error"
        self.type = {409: "conflict_error", 429: "rate_limit_error"}.get(status, other)


def weights_changed() -> Problem:
    """The request was ended by a swap, as it asked, rather than answered by two versions."""
    message = "the weights changed before the answer was complete; send the request again"
    return Problem(message, status=409, code="weights_changed")


def version_mismatch(version: int | None) -> Problem:
    """The weights here are not among those the request is bound to; nothing was generated."""
    message = f"this instance runs version {version}; ask another one, or wait with x-hotswap-wait-s"
    return Problem(message, status=409, code="version_mismatch")


@dataclass(frozen=True)
class Wish:
    """The wish of a request, by the headers that the gateway sets. `finish_s` in seconds.

    `priority` is its class, which its key allows; the lowest goes first. `kv`: the KV cache that other weights computed
    may be reused, of so many versions and seconds at most, in the session of that name; empty: in the whole scope.
    """

    scope: str = PUBLIC
    policy: str = "keep"
    finish_s: float = FINISH_S
    version: int | None = None
    min_version: int | None = None
    priority: int = 0
    kv: tuple[int, float, str] | None = None

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]]) -> Wish:
        """Raises ValueError for a number that is none."""
        given = {k: v.decode("latin-1") for k, v in headers if k.startswith(b"x-hotswap-")}
        exact, least = given.get(b"x-hotswap-version"), given.get(b"x-hotswap-min-version")
        return cls(
            given.get(SCOPE, PUBLIC),
            given.get(b"x-hotswap-policy", "keep"),
            min(float(given.get(b"x-hotswap-finish-s", FINISH_S)), LONGEST_FINISH_S),
            int(exact) if exact is not None else None,
            int(least) if least is not None else None,
            int(given.get(b"x-hotswap-priority", 0)),
            _kv(given.get(b"x-hotswap-kv", "")),
        )

    def for_engine(self) -> dict[str, Any]:
        """As weightsync/vllm_engine/engine_core/requests.py reads it."""
        fields = {"version": self.version, "min_version": self.min_version}
        asked = {"scope": self.scope, "policy": self.policy, **{k: v for k, v in fields.items() if v is not None}}
        if self.kv is not None:
            asked["kv"] = dict(zip(("versions", "age_s", "session"), self.kv, strict=True))
        return asked

    def in_engine(self, own: int) -> int:
        """The priority for vLLM. `own` is what the client wrote into its body: it orders the requests of a class, from
        0 (at once) to `WITHIN_CLASS` - 1, and moves none into another.
        """
        return self.priority * WITHIN_CLASS + min(max(own, 0), WITHIN_CLASS - 1)

    def allows(self, version: int | None) -> bool:
        number = version or 0
        return self.version in (None, number) and (self.min_version is None or number >= self.min_version)

    def stops(self, version: int) -> bool:
        """Whether a flip to `version` has to wait for it."""
        return self.policy == "finish" or not self.allows(version)

    @property
    def bound(self) -> bool:
        """Whether it is held while a flip waits."""
        return self.policy == "finish" or self.version is not None or self.min_version is not None


def _kv(line: str) -> tuple[int, float, str] | None:
    """Raises ValueError for a line that no gateway writes."""
    if not line:
        return None
    session, versions, age_s = line.split()
    return int(versions), float(age_s), "" if session == "-" else session


class Inflight:
    """Counts the requests of one instance. `active` is the version that answers."""

    def __init__(self) -> None:
        self.active: int | None = None
        self._wishes: dict[object, Wish] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._changed = asyncio.Event()

    async def admit(self, wish: Wish) -> None:
        """Return when it may begin. Raises Problem (version_mismatch)."""
        while wish.bound and not self._open.is_set():
            await self._open.wait()
        if not wish.allows(self.active):
            raise version_mismatch(self.active)

    @contextlib.contextmanager
    def running(self, wish: Wish) -> Iterator[None]:
        """The request is in the engine."""
        key = object()
        self._wishes[key] = wish
        try:
            yield
        finally:
            del self._wishes[key]
            self._changed.set()

    @contextlib.asynccontextmanager
    async def closing(self, version: int) -> AsyncIterator[None]:
        """Enter when no request must end before a flip to `version`, or its patience (`finish_s`) is over."""
        self._open.clear()
        try:
            await self._wait(version)
            yield
        finally:
            self._open.set()

    async def _wait(self, version: int) -> None:
        started = time.monotonic()
        while True:
            self._changed.clear()
            waited = time.monotonic() - started
            left = [w.finish_s - waited for w in self._wishes.values() if w.stops(version) and w.finish_s > waited]
            if not left or version == self.active:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(left)):
                    await self._changed.wait()
