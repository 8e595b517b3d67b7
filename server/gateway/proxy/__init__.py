"""The hot path, below ASGI: client connections, the checks they are held to, and the splice to an instance."""

from server.gateway.compiled import search_path

__path__ = search_path(__name__, __path__)
