"""Tools: the model asks for one by name, and reads the tool's reply, until an answer asks for none.

The model is told its own mistakes (a call that is no JSON, a tool that does not exist, arguments that do not fit, a
function that raises), as a text that begins with `error:`. A fault of something else (an MCP server that is away, a
sandbox that does not start) fails the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call

from trainer.config.environments import FunctionTool, McpTools, PythonTool, ToolConfig, ToolsEnvironment
from trainer.config.strict import load_target
from trainer.environments.base import Environment, Message, Observation, Task
from trainer.errors import ConfigError, EnvironmentFailed, RewardError
from trainer.rewards.sandbox import Limits, Sandbox

INSTRUCTIONS = """You may call these tools:
{tools}

To call one, write a JSON object between the tags, and wait for its answer:
{start}{{"name": "...", "arguments": {{...}}}}{end}"""


@dataclass(frozen=True)
class Tool:
    """One tool. `schema` is the JSON schema of its arguments; `call` returns what the model is told, a fault too."""

    name: str
    description: str
    schema: Mapping[str, Any]
    call: Callable[[dict[str, Any]], Awaitable[str]]

    def described(self) -> dict[str, Any]:
        """As OpenAI's clients describe a function."""
        return {"name": self.name, "description": self.description, "parameters": dict(self.schema)}


class Tools(Environment):
    """Episodes of one model with `tools`. See `ToolsEnvironment`."""

    def __init__(self, config: ToolsEnvironment, tools: Mapping[str, Tool]) -> None:
        self._config, self._tools = config, tools

    def reset(self, task: Task) -> Observation:
        if not self._config.describe:
            return Observation()
        described = "\n".join(json.dumps(tool.described(), ensure_ascii=False) for tool in self._tools.values())
        c = self._config
        text = INSTRUCTIONS.format(tools=described, start=c.call_start, end=c.call_end)
        messages = list(task.messages)
        if messages and messages[0].get("role") == "system":
            first = messages.pop(0)
            text = f"{first['content']}\n\n{text}"
        return Observation([{"role": "system", "content": text}, *messages])

    async def step(self, answer: str) -> Observation:
        calls = self._calls(answer)
        if not calls:
            return Observation(done=True)
        said = await asyncio.gather(*(self._answer(call) for call in calls))
        return Observation([_reply(text) for text in said])

    def _calls(self, answer: str) -> list[str]:
        """The texts between the tags. The end tag may be missing, where it was a stop token."""
        pieces = answer.split(self._config.call_start)[1:]
        return [piece.split(self._config.call_end)[0].strip() for piece in pieces]

    async def _answer(self, call: str) -> str:
        try:
            found = json.loads(call)
        except ValueError as error:
            return f"error: the call is not JSON ({error})"
        named = found if isinstance(found, dict) else {"arguments": None}
        arguments = named.get("arguments", named.get("parameters", {}))  # the second is Llama's name for them
        if not isinstance(arguments, dict):
            return 'error: write a call as {"name": "...", "arguments": {...}}'
        tool = self._tools.get(str(named.get("name")))
        if tool is None:
            return f"error: there is no tool {named.get('name')!r}; there are {', '.join(self._tools)}"
        return await tool.call(arguments)


def _reply(text: str) -> Message:
    return {"role": "tool", "content": text}


@contextlib.asynccontextmanager
async def open_tools(configs: Sequence[ToolConfig]) -> AsyncIterator[dict[str, Tool]]:
    """The tools by name, for the time of the block. Raises ConfigError for one that cannot be used."""
    async with contextlib.AsyncExitStack() as stack:
        tools: dict[str, Tool] = {}
        for config in configs:
            if isinstance(config, McpTools):
                found = await stack.enter_async_context(_mcp_tools(config))
            else:
                found = [_function_tool(config) if isinstance(config, FunctionTool) else await _python_tool(config)]
            for tool in found:
                if tool.name in tools:
                    raise ConfigError("environment.tools", f"{tool.name} is given twice", "Leave one of them out")
                tools[tool.name] = tool
        yield tools


# functions and programs -----------------------------------------------------------------------------------------------


def _function_tool(config: FunctionTool) -> Tool:
    function = load_target(config.target, "environment.tools.target")
    try:
        schema = TypeAdapter(function).json_schema()
    except Exception as error:
        problem = f"{config.target} cannot be described ({error})"
        raise ConfigError("environment.tools.target", problem, "Annotate its parameters with JSON types") from None
    checked = validate_call(function)

    async def call(arguments: dict[str, Any]) -> str:
        try:
            if inspect.iscoroutinefunction(function):
                return _text(await checked(**arguments))
            return _text(await asyncio.to_thread(checked, **arguments))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return f"error: the arguments do not fit: {problems}"
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"

    return Tool(function.__name__, inspect.getdoc(function) or "", schema, call)


async def _python_tool(config: PythonTool) -> Tool:
    limits = Limits(config.timeout_s, config.timeout_s + 1.0, config.memory_mb << 20)
    sandbox = Sandbox(limits, isolated=config.sandbox == "bubblewrap")
    await sandbox.check()

    async def call(arguments: dict[str, Any]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str):
            return "error: python takes the argument `code`, a text"
        try:
            return await sandbox.output(code)
        except RewardError as error:
            if error.code == "timeout":
                return f"error: {error}"
            raise EnvironmentFailed(str(error)) from None

    schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    return Tool("python", "Runs a Python program and returns what it prints.", schema, call)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# MCP ------------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _mcp_tools(config: McpTools) -> AsyncIterator[list[Tool]]:
    server = McpServer(config)
    try:
        yield await server.tools()
    finally:
        await server.close()


def _refused(error: Exception) -> bool:
    """Whether the server answered so to the call, as to arguments that the model left out. Other errors may be those
    of a connection: the SDK gives a lost session and a proxy's answer the codes of bad requests and internal errors."""
    from mcp.shared.exceptions import MCPError
    from mcp_types import INVALID_PARAMS, METHOD_NOT_FOUND

    return isinstance(error, MCPError) and error.code in (INVALID_PARAMS, METHOD_NOT_FOUND)


class McpServer:
    """A connection to an MCP server, through the official SDK, which is made anew when it was lost.

    The SDK wants a connection closed by the task that opened it: so a task of its own holds it.
    """

    def __init__(self, config: McpTools) -> None:
        self._config = config
        self._name = config.url or " ".join(config.command)
        self._client: Any = None
        self._holder: asyncio.Task[None] | None = None
        self._enough = asyncio.Event()
        self._lock = asyncio.Lock()

    async def tools(self) -> list[Tool]:
        """Those that are wanted. Raises ConfigError when it cannot be reached, or lacks one."""
        try:
            listed = (await (await self._connected()).list_tools()).tools
        except EnvironmentFailed as error:
            raise ConfigError("environment.tools", str(error), "Start the server, or correct the command") from None
        found = {tool.name: tool for tool in listed}
        if missing := set(self._config.only) - found.keys():
            problem = f"{self._name} has no tool {min(missing)!r}; it has {', '.join(found)}"
            raise ConfigError("environment.tools.only", problem, "Name one of them")
        wanted = self._config.only or tuple(found)
        return [self._tool(found[name]) for name in wanted]

    async def close(self) -> None:
        self._enough.set()
        if self._holder is not None:
            await asyncio.gather(self._holder, return_exceptions=True)

    def _tool(self, listed: Any) -> Tool:
        async def call(arguments: dict[str, Any]) -> str:
            client = await self._connected()
            try:
                result = await client.call_tool(listed.name, arguments)
            except Exception as error:
                if _refused(error):
                    return f"error: {error or listed.name + ' failed'}"
                await self._drop()
                raise EnvironmentFailed(
                    f"the MCP server {self._name} broke off a call of {listed.name} ({error or type(error).__name__})."
                ) from None
            text = "\n".join(block.text for block in result.content if getattr(block, "type", "") == "text")
            if not result.content and result.structured_content is not None:
                text = json.dumps(result.structured_content, ensure_ascii=False)
            if result.is_error:
                return f"error: {text or f'{listed.name} failed'}"
            return text

        return Tool(listed.name, listed.description or "", listed.input_schema, call)

    async def _connected(self) -> Any:
        """Raises EnvironmentFailed."""
        async with self._lock:
            if self._client is None:
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._enough = asyncio.Event()
                self._holder = asyncio.create_task(self._hold(ready, self._enough))
                self._client = await ready
            return self._client

    async def _drop(self) -> None:
        async with self._lock:
            holder, self._client, self._holder = self._holder, None, None
            self._enough.set()
        if holder is not None:
            await asyncio.gather(holder, return_exceptions=True)

    async def _hold(self, ready: asyncio.Future[Any], enough: asyncio.Event) -> None:
        from mcp import Client, StdioServerParameters

        c = self._config
        target: Any = c.url or StdioServerParameters(command=c.command[0], args=list(c.command[1:]))
        try:
            async with Client(target) as client:
                ready.set_result(client)
                await enough.wait()
        except Exception as error:
            if not ready.done():
                problem = f"the MCP server {self._name} does not answer ({error or type(error).__name__})."
                ready.set_exception(EnvironmentFailed(problem))
