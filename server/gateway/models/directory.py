"""The model that a request is for: names of models, aliases that lead to them, adapters that a model serves.

One table, made anew at once when the file of models changes; requests that were placed by the one before are answered
by what they found there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from server.errors import HttpError
from server.gateway.models.served import Served
from weightsync.control.editions import MARK, split_name
from weightsync.control.parts import LORA
from weightsync.control.records import VersionRecord

MOST_SHOWN: Final = 200  # characters of a name that is repeated in an error


class Directory:
    """The models of a gateway, the default one first, and its aliases."""

    def __init__(self) -> None:
        self.models: Mapping[str, Served] = {}
        self.aliases: Mapping[str, tuple[str, ...]] = {}
        self.default: Served  # of requests that name none
        self.main: Served  # the one of ours that stands for all
        self.only: tuple[Served, ...] = ()  # the default, as `find` returns it
        self.several = False  # a name must be looked up; with one model and no alias the instance knows its names

    def use(self, models: Sequence[Served], aliases: Mapping[str, tuple[str, ...]]) -> None:
        """From now on requests find these. The first is the default. One at least is ours."""
        self.models = {served.name: served for served in models}
        self.aliases = dict(aliases)
        self.default = models[0]
        self.only = (models[0],)
        self.main = next(served for served in models if served.upstream is None)
        self.several = len(models) > 1 or bool(aliases)

    def find(self, name: str | None, allowed: frozenset[str] | None) -> tuple[Served, ...]:
        """The models that answer a request for `name`, the first choice first; None: the request names none. `allowed`:
        the names that its key may ask for, None if any. Raises HttpError (404)."""
        if not name:
            name = self.default.name
        if allowed is not None and name not in allowed and split_name(name)[0] not in allowed:
            raise unknown(name)
        found = self.models.get(name)
        if found is not None:
            return (found,)
        targets = self.aliases.get(name)
        if targets is not None:
            return tuple([self.models[target] for target in targets])
        if not self.several:
            return self.only  # an adapter, perhaps
        for served in self.models.values():
            if name in served.fleet.adapters or served.fleet.editions.knows(name):
                return (served,)
        raise unknown(name)

    def is_edition(self, name: str) -> bool:
        """Whether it is the full name of an adapter's edition."""
        return MARK in name and any(served.fleet.editions.knows(name) for served in self.models.values())

    def refuses(self, version: VersionRecord) -> str:
        """Why the version may not be swapped in: an adapter that it brings is called as a model or an alias is. "" if
        none is. Adapters that it takes over from others are served already."""
        own = {part.name for part in version.parts if part.version == version.version}
        for what, names in (("a model", self.models), ("an alias", self.aliases)):
            if taken := [name for name in names if LORA + name in own]:
                return f"there is {what} {taken[0]!r} already: publish the adapter {LORA + taken[0]} under another name"
        return ""


def unknown(name: str) -> HttpError:
    """The answer to a name that leads nowhere, or not with this key; which of both is not said."""
    shown = name if len(name) <= MOST_SHOWN else f"{name[:MOST_SHOWN]}..."
    message = f"The model `{shown}` does not exist or you do not have access to it; GET /v1/models lists yours."
    return HttpError(404, message, code="model_not_found", param="model")
