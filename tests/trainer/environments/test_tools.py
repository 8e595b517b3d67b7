"""Tools: what the model is told of them, what it gets for its calls, and what fails an episode."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.lacking import lacking
from tests.trainer.environments.functions import hosting
from trainer.config import FunctionTool, McpTools, PythonTool, ToolsEnvironment
from trainer.config.environments import ToolConfig
from trainer.environments import Observation, Task
from trainer.environments.tools import Tools, open_tools
from trainer.errors import ConfigError, EnvironmentFailed, SandboxUnavailable

HERE = "tests.trainer.environments.functions"
SERVER = McpTools(command=(sys.executable, str(Path(__file__).with_name("mcp_server.py"))))
TASK = Task("2+2?", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}])


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def said(answer: str, *tools: ToolConfig) -> list[str]:
    """What the tools say to an answer."""
    async with open_tools(tools) as found:
        environment = Tools(ToolsEnvironment(tools=tools), found)
        environment.reset(TASK)
        seen = await environment.step(answer)
    assert isinstance(seen, Observation)
    assert all(message["role"] == "tool" for message in seen.messages)
    return [message["content"] for message in seen.messages]


async def test_the_model_is_told_names_descriptions_and_schemas() -> None:
    config = ToolsEnvironment(tools=(FunctionTool(target=f"{HERE}:add"),))
    async with open_tools(config.tools) as found:
        first, *rest = Tools(config, found).reset(TASK).messages
    assert rest == [{"role": "user", "content": "2+2?"}]
    assert first["role"] == "system"
    assert first["content"].startswith("Be brief.\n")
    described = json.loads(next(line for line in first["content"].splitlines() if line.startswith('{"name": "add"')))
    assert described["description"] == "The sum of two numbers."
    assert described["parameters"]["required"] == ["a"]
    assert described["parameters"]["properties"]["a"]["type"] == "integer"


async def test_calls_are_answered_in_their_order_and_without_one_the_episode_ends() -> None:
    tools = (FunctionTool(target=f"{HERE}:add"), FunctionTool(target=f"{HERE}:slow_add"))
    assert await said(f"I add. {call('add', a=1, b=2)}{call('slow_add', a=9)}", *tools) == ["3", "10"]
    assert await said('<tool_call>{"name": "add", "arguments": {"a": 4}}', *tools) == ["5"], "the end was a stop token"
    async with open_tools(tools) as found:
        assert (await Tools(ToolsEnvironment(tools=tools), found).step("It is 4.")).done


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("<tool_call>add(1, 2)</tool_call>", "not JSON"),
        ('<tool_call>["add"]</tool_call>', "write a call as"),
        ('<tool_call>{"name": "add", "arguments": 5}</tool_call>', "write a call as"),
        (call("divide"), "there are add, fails"),
        (call("add", a="one"), "do not fit"),
        (call("add", a=1, c=2), "do not fit"),
        (call("add"), "do not fit"),
        (call("fails", text="luck"), "no luck"),
    ],
)
async def test_the_model_is_told_what_it_did_wrong(answer: str, problem: str) -> None:
    (text,) = await said(answer, FunctionTool(target=f"{HERE}:add"), FunctionTool(target=f"{HERE}:fails"))
    assert text.startswith("error: ")
    assert problem in text


async def test_programs_run_in_the_sandbox() -> None:
    tool = PythonTool(timeout_s=2.0)
    try:
        assert await said(call("python", code="print(6 * 7)"), tool) == ["42\n"]
    except SandboxUnavailable as error:
        lacking(str(error))
    (text,) = await said(call("python", code="print(1)\nprint(x)"), tool)
    assert text == "1\nNameError: name 'x' is not defined\n"
    (text,) = await said(call("python", code="open('/etc/passwd').read()"), tool)
    assert "FileNotFoundError" in text
    (text,) = await said(call("python", code="while True: pass"), tool)
    assert text.startswith("error: ")
    (text,) = await said(call("python", program="print(1)"), tool)
    assert "`code`" in text


async def test_the_tools_of_an_mcp_server() -> None:
    assert await said(call("multiply", a=6, b=7), SERVER) == ["42"]
    (text,) = await said(call("refuse"), SERVER)
    assert text.startswith("error: ")


async def test_floods_and_dead_servers_seen_from_the_trainer() -> None:
    """A tool that says more than a line of the worker may have is cut there; a server that dies is started again."""
    tools = (FunctionTool(target=f"{HERE}:floods"), SERVER)
    async with hosting(ToolsEnvironment(tools=tools, workers=1, max_observation_tokens=10)) as host:
        episode, _ = await host.begin(TASK)
        seen = await episode.step(call("floods", megabytes=65) + call("multiply", a=6, b=7))
        assert [message["content"] for message in seen.messages] == ["7" * 320, "42"]
        with pytest.raises(EnvironmentFailed, match="broke off a call of die"):
            await episode.step(call("die"))
        seen = await episode.step(call("multiply", a=2, b=3))
        assert [message["content"] for message in seen.messages] == ["6"]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (FunctionTool(target=f"{HERE}:nothing"), "environment.tools.target"),
        (McpTools(command=("/bin/false",)), "environment.tools"),
        (McpTools(command=SERVER.command, only=("divide",)), "environment.tools.only"),
    ],
    ids=["function", "server", "tool"],
)
async def test_what_cannot_be_used_is_said_before_the_run(config: ToolConfig, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        async with open_tools((config,)):
            pass
    assert error.value.key == key


async def test_two_tools_of_one_name_are_refused() -> None:
    twice = FunctionTool(target=f"{HERE}:add")
    with pytest.raises(ConfigError, match="given twice"):
        async with open_tools((twice, twice)):
            pass
