"""An MCP server over standard input and output: `python mcp_server.py`."""

from __future__ import annotations

import os

from mcp.server import MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, CallToolResult

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
def die() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    server.run()
