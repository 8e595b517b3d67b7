"""Who may ask for what: keys, and whose prefix cache a key may hit."""

from server.gateway.compiled import search_path

__path__ = search_path(__name__, __path__)
