"""A bounded, fair queue in front of routing, for more work than the instances can run."""

from server.gateway.compiled import search_path

__path__ = search_path(__name__, __path__)
