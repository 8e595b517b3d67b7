"""Tools: what the model is told of them, what it gets for its calls, and what fails an episode; and an environment of
the package verifiers: prompts, tools, rewards, and what goes wrong.

verifiers asks for other releases of packages than Hotswap pins, so it lives in an environment of its own, which the
test makes unless HOTSWAP_VERIFIERS_PYTHON names one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.lacking import lacking
from tests.trainer.environments.functions import hosting
from trainer.config import FunctionTool, McpTools, PythonTool, ToolsEnvironment, VerifiersEnvironment
from trainer.config.environments import ToolConfig
from trainer.config.strict import build
from trainer.environments import EnvironmentHost, Observation, Task
from trainer.environments.tools import Tools, open_tools
from trainer.environments.verifiers_worker import Game, message_of
from trainer.errors import ConfigError, EnvironmentFailed, RewardError

HERE = "tests.trainer.environments.functions"
SERVER = McpTools(command=(sys.executable, str(Path(__file__).with_name("mcp_server.py"))))
TASK = Task("2+2?", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}])


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def said(answer: str, *tools: ToolConfig) -> list[str]:
    """The tools' replies to an answer."""
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
    assert await said('<tool_call>{"name": "add", "parameters": {"a": 4}}</tool_call>', *tools) == ["5"], (
        "as Llama does"
    )
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
    tool, hurried = (PythonTool(timeout_s=seconds) for seconds in (60.0, 6.0))  # both start a Python in that time
    try:
        assert await said(call("python", code="print(6 * 7)"), tool) == ["42\n"]
    except RewardError as error:
        if error.exit_code != 2:
            raise
        lacking(str(error))
    (text,) = await said(call("python", code="print(1)\nprint(x)"), tool)
    assert text == "1\nNameError: name 'x' is not defined\n"
    (text,) = await said(call("python", code="open('/etc/passwd').read()"), tool)
    assert "FileNotFoundError" in text
    (text,) = await said(call("python", code="while True: pass"), hurried)
    assert text.startswith("error: ")
    (text,) = await said(call("python", program="print(1)"), tool)
    assert "`code`" in text


async def test_the_tools_of_an_mcp_server() -> None:
    assert await said(call("multiply", a=6, b=7), SERVER) == ["42"]
    (text,) = await said(call("refuse"), SERVER)
    assert text.startswith("error: ")
    several = call("strict") + call("structured") + call("multiply", a=2, b=3)
    assert await said(several, SERVER) == ["error: Invalid arguments: `b` is missing", '{"sum": 5}', "6"]


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


@pytest.mark.parametrize("proxy", [False, True])
async def test_a_lost_session_is_no_answer_to_the_model_and_is_made_again(proxy: bool) -> None:
    async with hosting(ToolsEnvironment(tools=(SERVER,), workers=1)) as host:
        episode, _ = await host.begin(TASK)
        (before,) = (await episode.step(call("process"))).messages
        with pytest.raises(EnvironmentFailed, match="broke off a call of lose"):
            await episode.step(call("lose", proxy=proxy))
        (after,) = (await episode.step(call("process"))).messages
        assert after["content"].isdecimal()
        assert after["content"] != before["content"]


@pytest.mark.parametrize(
    ("tools", "key", "says"),
    [
        ((FunctionTool(target=f"{HERE}:nothing"),), "environment.tools.target", "nothing"),
        ((McpTools(command=("/bin/false",)),), "environment.tools", "false"),
        ((McpTools(command=SERVER.command, only=("divide",)),), "environment.tools.only", "divide"),
        ((FunctionTool(target=f"{HERE}:add"),) * 2, "environment.tools", "given twice"),
    ],
    ids=["function", "server", "tool", "name"],
)
async def test_what_cannot_be_used_is_said_before_the_run(tools: tuple[ToolConfig, ...], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        async with open_tools(tools):
            pass
    assert error.value.key == key


ENV = {"taskset": {"id": "sums_taskset"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
CALL = 'I add. <tool_call>{"name": "adder_add", "arguments": {"a": 3, "b": 3}}</tool_call>'


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    if found := os.environ.get("HOTSWAP_VERIFIERS_PYTHON"):
        return found
    root = tmp_path_factory.mktemp("verifiers")
    subprocess.run([sys.executable, "-m", "venv", root], check=True)
    pip = [str(root / "bin" / "pip"), "install", "--quiet", "verifiers==0.4.0", "uv"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        lacking(f"verifiers cannot be installed: {done.stderr[-300:]}")
    return str(root / "bin" / "python")


@pytest.fixture
async def host(python: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EnvironmentHost]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("PATH", f"{Path(python).parent}:{os.environ['PATH']}")  # the null harness asks for uv
    async with hosting(VerifiersEnvironment(env=ENV, python=python, workers=1, max_observation_tokens=4)) as made:
        yield made


def turns(seen: Observation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in seen.messages]


@pytest.mark.broad
@pytest.mark.timeout(900)
async def test_episodes_of_a_taskset_with_a_tool(host: EnvironmentHost) -> None:
    (right, first), (wrong, second) = await asyncio.gather(*(host.begin(Task("", (), "3")) for _ in range(2)))
    assert turns(first) == turns(second), "the same task begins alike"
    (role, system), user = turns(first)
    assert role == "system"
    assert system.startswith("Be brief.\n")
    assert '"name": "adder_add"' in system
    assert "<tool_call>" in system
    assert user == ("user", "3+3?")

    seen = await right.step(CALL)
    assert (turns(seen), seen.reward, seen.done) == ([("tool", "6")], 0.0, False)
    assert await right.step("6") == Observation((), 1.0, True)
    assert await wrong.step("7") == Observation((), 0.0, True), "no call: the answer was the last"
    for episode in (right, wrong):
        await episode.close()

    with pytest.raises(EnvironmentFailed, match="no task 9"):
        await host.begin(Task("", (), "9"))
    left, _ = await host.begin(Task("", (), "1"))
    await left.close()  # the trainer may leave in the middle
    again, first = await host.begin(Task("", (), "4"))
    assert turns(first)[1] == ("user", "4+4?")
    await again.close()


@pytest.mark.broad
@pytest.mark.timeout(900)
async def test_a_taskset_that_is_missing_is_said_before_the_run(python: str) -> None:
    env = ENV | {"taskset": {"id": "no_such_taskset"}}
    host = EnvironmentHost(VerifiersEnvironment(env=env, python=python, workers=1))
    with pytest.raises(ConfigError, match="no_such_taskset") as error:
        await host.open()
    assert error.value.key == "environment.env"


async def test_an_interpreter_without_verifiers_is_said_before_the_run() -> None:
    for python, key in ((sys.executable, "environment.env"), ("/no/such/python", "environment.python")):
        with pytest.raises(ConfigError) as error:
            await EnvironmentHost(VerifiersEnvironment(env=ENV, python=python, workers=1)).open()
        assert error.value.key == key


CALL_END: dict[str, Any] = {"env": ENV, "python": "p", "call_end": ""}


@pytest.mark.parametrize(
    ("options", "key"),
    [({"python": "p"}, "env"), ({"env": {}, "python": "p"}, "env"), ({"env": ENV}, "python"), (CALL_END, "call_end")],
)
def test_the_configuration_names_a_taskset_and_an_interpreter(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(VerifiersEnvironment, options, "environment")
    assert error.value.key == f"environment.{key}"


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ("It is 6.", "It is 6.", []),
        ('so [{"name": "add", "arguments": {"a": 1}}]', "so ", [("add", '{"a": 1}')]),
        ('[{"name": "add"}][{"name": "sub", "arguments": {}}', "", [("add", "{}"), ("sub", "{}")]),
        ("[add(1)]", "[add(1)]", []),
        ('[{"name": "add"}] [5]', '[{"name": "add"}] [5]', []),
    ],
)
def test_calls_in_an_answer(answer: str, content: str, calls: list[tuple[str, str]]) -> None:
    message = message_of(answer, "[", "]")
    assert message["content"] == content
    found = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    assert found == calls


def test_a_conversation_that_is_written_anew_is_refused() -> None:
    game = Game({"max_observation_tokens": 1})
    first = [{"role": "user", "content": [{"type": "text", "text": "3+3?"}]}]
    assert game._new({"messages": first}) == [{"role": "user", "content": "3+3?"}]
    game._known.append(("assistant", ""))
    asked = [*first, {"role": "assistant", "content": None, "tool_calls": []}]
    seen = game._new({"messages": [*asked, {"role": "tool", "content": "6" * 100}]})
    assert seen == [{"role": "tool", "content": "6" * 64}], "what floods is cut"
    with pytest.raises(NotImplementedError, match="anew"):
        game._new({"messages": [{"role": "user", "content": "a summary"}]})
    with pytest.raises(NotImplementedError, match="text"):
        game._new({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
