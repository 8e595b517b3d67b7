"""An MCP server over standard input and output: `python mcp_server.py`."""

from __future__ import annotations

import os

from mcp.server import MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, INVALID_REQUEST, CallToolResult

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
def strict() -> str:
    """Answers with an error of the protocol, as some servers do where an argument is missing."""
    raise MCPError(INVALID_PARAMS, "Invalid arguments: `b` is missing")


@server.tool()
def structured() -> CallToolResult:
    """Has no text."""
    return CallToolResult(content=[], structured_content={"sum": 5})


@server.tool()
def lose(proxy: bool) -> str:
    """Answers as the SDK's client does where a session is lost, or where a proxy answers for the server."""
    raise MCPError(INTERNAL_ERROR if proxy else INVALID_REQUEST, "Session terminated")


@server.tool()
def process() -> str:
    """The number of the server's process."""
    return str(os.getpid())


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    server.run()
