"""Counts, logs and traces of this gateway, and the ledger as it passes."""

from server.gateway.compiled import search_path

__path__ = search_path(__name__, __path__)
