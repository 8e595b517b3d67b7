"""Who goes next when there is more work than the instances can run: a bounded, fair line in front of routing."""

from server.gateway.compiled import search_path

__path__ = search_path(__name__, __path__)
