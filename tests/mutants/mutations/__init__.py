"""The list, by subject. Each mutation changes what the code means; the tests beside it must fail. One that no test can
notice says why in one line."""

from __future__ import annotations

from . import gateway, server, trainer, weightsync
from .base import Mutation

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS: list[Mutation] = [*gateway.MUTATIONS, *server.MUTATIONS, *trainer.MUTATIONS, *weightsync.MUTATIONS]
