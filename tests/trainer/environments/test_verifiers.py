"""An environment of the package verifiers, played from the trainer: prompts, tools, rewards, and what goes wrong.

verifiers asks for other releases of packages than Hotswap pins, so it lives in an environment of its own, which the
test makes unless HOTSWAP_VERIFIERS_PYTHON names one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.lacking import lacking
from tests.trainer.environments.functions import hosting
from trainer.config import VerifiersEnvironment
from trainer.environments import EnvironmentHost, Observation, Task
from trainer.environments.verifiers_worker import Game, Unsupported, message_of
from trainer.errors import ConfigError, EnvironmentFailed

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


def said(seen: Observation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in seen.messages]


@pytest.mark.broad
@pytest.mark.timeout(900)
async def test_episodes_of_a_taskset_with_a_tool(host: EnvironmentHost) -> None:
    (right, first), (wrong, second) = await asyncio.gather(*(host.begin(Task("", (), "3")) for _ in range(2)))
    assert said(first) == said(second), "the same task begins alike"
    (role, system), user = said(first)
    assert role == "system"
    assert system.startswith("Be brief.\n")
    assert '"name": "adder_add"' in system
    assert "<tool_call>" in system
    assert user == ("user", "3+3?")

    seen = await right.step(CALL)
    assert (said(seen), seen.reward, seen.done) == ([("tool", "6")], 0.0, False)
    assert await right.step("6") == Observation((), 1.0, True)
    assert await wrong.step("7") == Observation((), 0.0, True), "no call: the answer was the last"
    for episode in (right, wrong):
        await episode.close()

    with pytest.raises(EnvironmentFailed, match="no task 9"):
        await host.begin(Task("", (), "9"))
    left, _ = await host.begin(Task("", (), "1"))
    await left.close()  # the trainer may leave in the middle
    again, first = await host.begin(Task("", (), "4"))
    assert said(first)[1] == ("user", "4+4?")
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


@pytest.mark.parametrize(
    ("options", "key"),
    [({"python": "p"}, "env"), ({"env": ENV}, "python"), ({"env": ENV, "python": "p", "call_end": ""}, "call_start")],
)
def test_the_configuration_names_a_taskset_and_an_interpreter(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        VerifiersEnvironment(**options)
    assert error.value.key == key


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
    with pytest.raises(Unsupported, match="anew"):
        game._new({"messages": [{"role": "user", "content": "a summary"}]})
    with pytest.raises(Unsupported, match="text"):
        game._new({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
