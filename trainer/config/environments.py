"""The configuration of environments: one struct per kind; its tag, `kind`, chooses it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from trainer.config.strict import Count, FunctionName, Kind, NonNegative, Positive, Text
from trainer.errors import ConfigError


class SingleTurnEnvironment(Kind, frozen=True, tag="single_turn"):
    """One answer to each prompt, and nothing after it."""


class EnvironmentOptions(Kind, frozen=True):
    """The options of every environment of several turns.

    An episode ends after `max_turns` answers at the latest. `timeout_s` is how long one `reset` or `step` may take
    before its process is killed; the environments run in `workers` processes. An episode that fails (the environment
    raises, hangs, dies or answers nonsense) is played again up to `attempts` times in all, and then left out of the
    step: nothing is trained on it. What the environment says in a turn is cut after `max_observation_tokens`. `weight`
    is the factor of the environment's own rewards in the trajectory's.
    """

    max_turns: Count = 8
    timeout_s: Positive = 30.0
    workers: Count = 2
    attempts: Count = 2
    max_observation_tokens: Count = 1024
    weight: NonNegative = 1.0


class CallableEnvironment(EnvironmentOptions, frozen=True, kw_only=True, tag="callable"):
    """`target` is `package.module:name`, a class or function that makes an `Environment` (trainer/environments), called
    with `options` as keyword arguments."""

    target: FunctionName
    options: dict[str, Any] = field(default_factory=dict)


class FunctionTool(Kind, frozen=True, tag="function"):
    """A Python function `package.module:name`. Its name, docstring and annotated parameters are what the model is
    told. It runs with the trainer's rights: for functions that you wrote."""

    target: FunctionName


class PythonTool(Kind, frozen=True, tag="python"):
    """`python(code)`: what a program prints that the model wrote. It runs in the sandbox of the code reward, with
    nothing kept between calls (docs/trainer/rewards.md says what the sandbox covers)."""

    timeout_s: Positive = 5.0
    memory_mb: Annotated[int, Meta(ge=64)] = 256
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"


class McpTools(Kind, frozen=True, tag="mcp"):
    """All tools of an MCP server: a `command` that talks over its standard input and output, or the `url` of one that
    talks over HTTP. `only` names those that the model is told of; left out, all."""

    command: tuple[str, ...] = ()
    url: str = ""
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError("command", "an MCP server has either a command or a url", "Give exactly one of them")


ToolConfig = FunctionTool | PythonTool | McpTools


class ToolsEnvironment(EnvironmentOptions, frozen=True, kw_only=True, tag="tools"):
    """The model calls tools, and reads what they answer, until an answer has no call in it. A call is a JSON object
    `{"name": ..., "arguments": {...}}` between `call_start` and `call_end`. What cannot be read as one is told to the
    model as an error, as is a tool that raises. `describe` puts the tools' schemas into a system message."""

    tools: Annotated[tuple[ToolConfig, ...], Meta(min_length=1, description="Name one or more: - {kind: python}")]
    call_start: Text = "<tool_call>"
    call_end: Text = "</tool_call>"
    describe: bool = True


class VerifiersEnvironment(EnvironmentOptions, frozen=True, kw_only=True, tag="verifiers"):
    """An environment of the package `verifiers`. `env` is its configuration as verifiers itself takes it (`taskset`,
    the agents with their `harness` and `runtime`); a record's answer is the number of its task in the taskset. `python`
    runs it: an interpreter that has verifiers and the taskset, since verifiers asks for other releases of packages than
    the trainer. What a task's rewards give is the environment's reward, on the last answer."""

    env: dict[str, Any]
    python: Text
    call_start: Text = "<tool_call>"
    call_end: Text = "</tool_call>"
    timeout_s: Positive = 120.0

    def __post_init__(self) -> None:
        taskset = self.env.get("taskset")
        if not isinstance(taskset, dict) or not taskset.get("id"):
            raise ConfigError("env", "names no taskset", "Write env: {taskset: {id: ...}}, as verifiers takes it")


EnvironmentConfig = SingleTurnEnvironment | CallableEnvironment | ToolsEnvironment | VerifiersEnvironment
