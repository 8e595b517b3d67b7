"""The hot path, below ASGI: client connections, the checks they are held to, and the splice to an instance."""
