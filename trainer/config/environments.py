"""The configuration of environments: one dataclass per kind; its first field, `kind`, chooses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.config.strict import in_range, names_code, positive
from trainer.errors import ConfigError


@dataclass(frozen=True)
class SingleTurnEnvironment:
    """One answer to each prompt, and nothing after it."""

    kind: Literal["single_turn"] = "single_turn"


@dataclass(frozen=True)
class EnvironmentOptions:
    """The options of every environment of several turns.

    An episode ends after `max_turns` answers at the latest. `timeout_s` is how long one `reset` or `step` may take
    before its process is killed; the environments run in `workers` processes. An episode that fails (the environment
    raises, hangs, dies or answers nonsense) is played again up to `attempts` times in all, and then left out of the
    step: nothing is trained on it. What the environment says in a turn is cut after `max_observation_tokens`. `weight`
    is the factor of the environment's own rewards in the trajectory's.
    """

    kind: str = ""
    max_turns: int = 8
    timeout_s: float = 30.0
    workers: int = 2
    attempts: int = 2
    max_observation_tokens: int = 1024
    weight: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "max_turns", "timeout_s", "workers", "attempts", "max_observation_tokens")
        in_range(self, "weight", 0.0, 1e6)


@dataclass(frozen=True)
class CallableEnvironment(EnvironmentOptions):
    """`target` is `package.module:name`, a class or function that makes an `Environment` (trainer/environments), called
    with `options` as keyword arguments."""

    kind: Literal["callable"] = "callable"
    target: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        names_code(self, "target", "class")


@dataclass(frozen=True)
class FunctionTool:
    """A Python function `package.module:name`. Its name, docstring and annotated parameters are what the model is
    told. It runs with the trainer's rights: for functions that you wrote."""

    kind: Literal["function"] = "function"
    target: str = ""

    def __post_init__(self) -> None:
        names_code(self, "target", "function")


@dataclass(frozen=True)
class PythonTool:
    """`python(code)`: what a program prints that the model wrote. It runs in the sandbox of the code reward, with
    nothing kept between calls (docs/trainer/rewards.md says what the sandbox covers)."""

    kind: Literal["python"] = "python"
    timeout_s: float = 5.0
    memory_mb: int = 256
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"

    def __post_init__(self) -> None:
        positive(self, "timeout_s")
        in_range(self, "memory_mb", 64, 2**20)


@dataclass(frozen=True)
class McpTools:
    """All tools of an MCP server: a `command` that talks over its standard input and output, or the `url` of one that
    talks over HTTP. `only` names those that the model is told of; left out, all."""

    kind: Literal["mcp"] = "mcp"
    command: tuple[str, ...] = ()
    url: str = ""
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError("command", "an MCP server has either a command or a url", "Give exactly one of them")


ToolConfig = FunctionTool | PythonTool | McpTools


@dataclass(frozen=True)
class ToolsEnvironment(EnvironmentOptions):
    """The model calls tools, and reads what they answer, until an answer has no call in it. A call is a JSON object
    `{"name": ..., "arguments": {...}}` between `call_start` and `call_end`. What cannot be read as one is told to the
    model as an error, as is a tool that raises. `describe` puts the tools' schemas into a system message."""

    kind: Literal["tools"] = "tools"
    tools: tuple[ToolConfig, ...] = ()
    call_start: str = "<tool_call>"
    call_end: str = "</tool_call>"
    describe: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tools:
            raise ConfigError("tools", "empty", "Name at least one: {kind: python}, {kind: function, target: ...}")
        if not self.call_start or not self.call_end:
            raise ConfigError("call_start", "a call must have a beginning and an end", "Give both tags")


@dataclass(frozen=True)
class VerifiersEnvironment(EnvironmentOptions):
    """An environment of the package `verifiers`. `env` is its configuration as verifiers itself takes it (`taskset`,
    the agents with their `harness` and `runtime`); a record's answer is the number of its task in the taskset. `python`
    runs it: an interpreter that has verifiers and the taskset, since verifiers asks for other releases of packages than
    the trainer. What a task's rewards give is the environment's reward, on the last answer."""

    kind: Literal["verifiers"] = "verifiers"
    env: dict[str, Any] = field(default_factory=dict)
    python: str = ""
    call_start: str = "<tool_call>"
    call_end: str = "</tool_call>"
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        taskset = self.env.get("taskset")
        if not isinstance(taskset, dict) or not taskset.get("id"):
            raise ConfigError("env", "names no taskset", "Write env: {taskset: {id: ...}}, as verifiers takes it")
        if not self.python:
            raise ConfigError("python", "missing", "Name an interpreter that has verifiers: /path/of/venv/bin/python")
        if not self.call_start or not self.call_end:
            raise ConfigError("call_start", "a call must have a beginning and an end", "Give both tags")


EnvironmentConfig = SingleTurnEnvironment | CallableEnvironment | ToolsEnvironment | VerifiersEnvironment
