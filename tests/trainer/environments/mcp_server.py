"""An MCP server over standard input and output: `python mcp_server.py`."""

from __future__ import annotations

import os

from mcp.server import MCPServer

server = MCPServer("tests")


@server.tool()
def multiply(a: int, b: int) -> str:
    """The product of two numbers."""
    return str(a * b)


@server.tool()
def refuse() -> str:
    """Always fails."""
    raise ValueError("not today")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    server.run()
