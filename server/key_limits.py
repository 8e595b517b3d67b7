"""The limits of keys: one field each, with everything that depends on the limit.

From the fields of `KeyLimits` derive a key's record in the store, the body of the admin routes, the options of
`hotswap keys`, the x-ratelimit-* headers and all that lists them, what a gateway counts and refuses
(gateway/access/limits.py) and divides among gateways (gateway/access/sharing.py), the label of the metric, and the
tables in docs/gateway.md and docs/api.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Final, Literal, get_type_hints

from weightsync.control.strict_json import Record

MIN_PRIORITY, MAX_PRIORITY = -9, 9
MOST: Final = 10**12


@dataclass(frozen=True)
class Limit:
    """The rest of a limit, besides its field. `help` is that of the option, `meaning` the row of the documentation.

    A limit with a `counts` is enforced by counting: "minute" is the units taken in any 60 seconds, "month" those of the
    calendar month (UTC), "now" the requests that run. `units` are those that a request takes, by its tokens: those of
    its prompts, and those of its answers, which are the most it may get when it is admitted and the true ones when it
    has ended. Without it a request is one.

    `name` is in headers (RATE_HEADERS), codes of errors and metrics. A limit without one refuses nothing.
    """

    help: str
    meaning: str
    name: str = ""
    counts: Literal["", "minute", "month", "now"] = ""
    units: Callable[[int, int], int] | None = None
    least: int = 1
    most: int = MOST


@dataclass(frozen=True)
class KeyLimits(Record):
    """The limits of a key; None: no limit."""

    requests_per_min: Annotated[
        int | None,
        Limit(
            "requests in any 60 seconds",
            "POST requests to the inference routes, including those that fail later, in any 60 seconds. "
            "The window slides, so there is no double burst",
            name="requests",
            counts="minute",
        ),
    ] = None
    tokens_per_min: Annotated[
        int | None,
        Limit(
            "tokens of prompts and answers in any 60 seconds",
            "tokens of prompts and answers, in the same way",
            name="tokens",
            counts="minute",
            units=lambda prompt, answer: prompt + answer,
        ),
    ] = None
    tokens_per_month: Annotated[
        int | None,
        Limit(
            "tokens of prompts and answers in a calendar month",
            "a budget: tokens of prompts and answers in a calendar month (UTC). It outlives restarts; "
            "a request over it gets 429 `insufficient_quota`",
            name="month_tokens",
            counts="month",
            units=lambda prompt, answer: prompt + answer,
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        Limit(
            "requests at one time",
            "simultaneous requests, from admission to the last byte, including those in the queue",
            name="concurrency",
            counts="now",
        ),
    ] = None
    max_output_tokens: Annotated[
        int | None,
        Limit(
            "tokens of one answer",
            "tokens of one answer (of each of `n`). A request that asks for more gets 400 `max_output_exceeded`. "
            "Where the request names no length and the route would generate up to the end of the context, the gateway "
            "writes the limit into the body. Requests with such a key may contain only plain integers there. "
            "Keep the limit at or below the model's context length, since vLLM refuses more",
            name="max_output",
        ),
    ] = None
    priority: Annotated[
        int,
        Limit(
            "most urgent class it may ask for; lower goes first",
            "the most urgent class of its requests (lower goes first)",
            least=MIN_PRIORITY,
            most=MAX_PRIORITY,
        ),
    ] = 0
    weight: Annotated[
        int,
        Limit("its share of a class against other keys", "its share of a class, relative to other keys", most=1000),
    ] = 1

    @property
    def bounded(self) -> bool:
        """Whether anything is limited at all."""
        return any(getattr(self, field) is not None for field in NAMED.values())

    def of(self, name: str) -> int | None:
        """The limit of that name."""
        field = NAMED.get(name)
        return None if field is None else getattr(self, field)


_HINTS: Final = get_type_hints(KeyLimits, include_extras=True)
LIMITS: Final[dict[str, Limit]] = {field.name: _HINTS[field.name].__metadata__[0] for field in fields(KeyLimits)}
NAMED: Final = {limit.name: field for field, limit in LIMITS.items() if limit.name}  # name -> field

_TOLD: Final = {
    "limit": "the limit",
    "remaining": "what remains",
    "reset": "when the whole limit is available again if the key sends nothing more: `12s`, `1m1s`, `95h4m6s`",
}


def rate_headers(name: str) -> tuple[str, ...]:
    """The headers that tell of the limit of that name: its value, what remains, and when all of it does."""
    return tuple(f"x-ratelimit-{what}-{name.replace('_', '-')}" for what in _TOLD)


# All headers of limits that answers may have, with the limit that each tells of.
RATE_HEADERS: Final = {
    header: limit
    for limit in LIMITS.values()
    if limit.counts in ("minute", "month")
    for header in rate_headers(limit.name)
}


def header_table() -> str:
    """As docs/api.md lists them."""
    rows = []
    for what, meaning in _TOLD.items():
        names = [f"`{name}`" for name in RATE_HEADERS if name.startswith(f"x-ratelimit-{what}-")]
        rows.append(f"| {', '.join(names)} | {meaning} |")
    return "\n".join(["| header of a limit | |", "|---|---|", *rows])


def table() -> str:
    """As docs/gateway.md lists them."""
    rows = [f"| `{field}` | {limit.meaning} |" for field, limit in LIMITS.items()]
    return "\n".join(["| limit | meaning |", "|---|---|", *rows])
