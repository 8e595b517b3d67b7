"""Bytes and HTTP/1.1, and nothing of what they are for: heads, bodies, answers on their way through, connections."""

from server.gateway.compiled import search_path

__path__ = search_path(__name__, __path__)
