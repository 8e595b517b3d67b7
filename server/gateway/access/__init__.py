"""Access: API keys, their limits, and the prefix cache that each key may hit."""

from server.gateway.compiled import search_path

__path__ = search_path(__name__, __path__)
