"""The instances as this gateway sees them, and the choice among them."""

from server.gateway.compiled import search_path

__path__ = search_path(__name__, __path__)
