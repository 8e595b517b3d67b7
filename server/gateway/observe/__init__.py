"""What this gateway counts, and how it is read."""

from server.gateway.compiled import search_path

__path__ = search_path(__name__, __path__)
