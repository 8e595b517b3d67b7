"""Counts, logs, traces and histories of this gateway."""

from server.gateway.compiled import search_path

__path__ = search_path(__name__, __path__)
