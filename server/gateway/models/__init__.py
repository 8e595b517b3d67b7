"""The models behind one gateway: each one's fleet and control, how a request finds its model, and the file that names
them."""

from server.gateway.compiled import search_path

__path__ = search_path(__name__, __path__)
