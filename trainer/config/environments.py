"""The configuration of environments: one struct per kind; its tag chooses it (docs/trainer/environments.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from trainer.config.strict import Count, FunctionName, Kind, NonNegative, Positive, Text
from trainer.errors import ConfigError


class SingleTurnEnvironment(Kind, frozen=True, tag="single_turn"):
    """One answer to each prompt, and nothing after it."""


class EnvironmentOptions(Kind, frozen=True):
    """The options of every environment of several turns. `timeout_s` is how long one `reset` or `step` may take before
    its process is killed. `weight` is the factor of the environment's own rewards in the trajectory's."""

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
    """The model calls tools, and reads what they answer, until an answer has no call in it: a JSON object `{"name":
    ..., "arguments": {...}}` between `call_start` and `call_end`."""

    tools: Annotated[tuple[ToolConfig, ...], Meta(min_length=1, description="Name one or more: - {kind: python}")]
    call_start: Text = "<tool_call>"
    call_end: Text = "</tool_call>"
    describe: bool = True


class VerifiersEnvironment(EnvironmentOptions, frozen=True, kw_only=True, tag="verifiers"):
    """An environment of the package `verifiers`. `env` is its configuration as verifiers itself takes it; a record's
    answer is the number of its task in the taskset. `python` is an interpreter that has verifiers and the taskset,
    since verifiers asks for other releases of packages than the trainer."""

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
