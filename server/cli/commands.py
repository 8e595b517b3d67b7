"""The commands that start processes, and `doctor`: their options are those of the configurations that they make."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from server import options
from server.cli.output import console, table
from server.doctor import registry
from server.doctor.world import World
from server.errors import ConfigError, as_cli_error
from server.follow.config import FollowConfig
from server.gateway.config import OPTIONS, GatewayConfig
from server.instance.config import InstanceConfig
from server.options import Option, Setting
from server.up.config import GATEWAY as OF_THE_GATEWAY
from server.up.config import UpConfig
from server.up.paths import resolve_model
from weightsync.errors import CheckpointError, TlsUnavailable
from weightsync.tls import ENVIRONMENT as CLUSTER_TLS_ENV

app = typer.Typer()
Work = Callable[[typer.Context, dict[str, Any]], None]
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


def _passed_on(setting: Setting) -> Setting:
    """Under a heading for its group; switches have one of their own, as their second flags make a wide column."""
    heading = f"{OF_THE_GATEWAY}: {setting.path[0]}" if len(setting.path) > 1 else OF_THE_GATEWAY
    heading = "Gateway, on or off" if setting.option.negatable else heading
    return replace(setting, option=replace(setting.option, panel=heading))


UP_ITSELF = options.settings("up", UpConfig)
PASSED_ON = tuple(
    _passed_on(setting)
    for setting in options.settings("up", GatewayConfig)
    if setting.flag not in {"--check", *(own.flag for own in UP_ITSELF)}
)
UP = (*UP_ITSELF, *PASSED_ON)
GATEWAY = OPTIONS
INSTANCE = options.settings("instance", InstanceConfig)
FOLLOW = options.settings("follow", FollowConfig)
OWN: dict[str, Any] = {"config": None, "help_all": False}  # what a command takes beside its settings
ALL = "show the other options too, by subject"


@dataclass(frozen=True)
class DoctorReport:
    """The options of `hotswap doctor`, beside those of the host that it looks at."""

    only: Annotated[tuple[str, ...], Option("run this check alone; may be given again")] = ()
    skip: Annotated[tuple[str, ...], Option("leave this check out; may be given again")] = ()
    as_json: Annotated[bool, Option("print JSON instead of a table", "--json")] = False
    plan: Annotated[bool, Option("check nothing: print what copies of --model take from a GPU's KV cache")] = False
    gpu_gib: Annotated[float | None, Option("memory of the GPU that --plan counts with; default: the first one's")] = (
        None
    )
    sequence_tokens: Annotated[int, Option("tokens of a sequence that --plan counts with")] = 4096


COLOURS: dict[registry.Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
DOCTOR = (*options.settings("doctor", World), *options.settings("doctor", DoctorReport))


def takes(
    declared: Sequence[Setting],
) -> Callable[[Callable[[typer.Context, dict[str, Any]], None]], Callable[..., None]]:
    """Of a function of the context and of values by flag, one that Typer makes a command with these options of."""

    def decorate(function: Callable[[typer.Context, dict[str, Any]], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(context: typer.Context, config: Path | None = None, help_all: bool = False, **given: Any) -> None:
            with as_cli_error(ConfigError, TlsUnavailable):
                values = {s.flag: s.value(given[_parameter(s)]) for s in declared if given[_parameter(s)] is not None}
                function(context, values)

        def from_file(context: typer.Context, file: Path | None) -> Path | None:
            if file is not None:
                with as_cli_error(ConfigError):
                    found = options.from_file(file, declared)
                context.default_map = {_parameter(s): found[s.flag] for s in declared if s.flag in found}
            return file

        config = typer.Option(help=options.CONFIG_HELP, metavar="FILE", is_eager=True, callback=from_file)
        hints = {"context": typer.Context, **{_parameter(s): _hint(s) for s in declared}}
        hints["config"] = Annotated[Path | None, config]
        if any(s.option.panel for s in declared):
            hints["help_all"] = Annotated[bool, typer.Option("--help-all", is_eager=True, callback=_help_all, help=ALL)]
        defaults = {_parameter(s): inspect.Parameter.empty if s.required else _default(s) for s in declared}
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)
                for name, hint in hints.items()
                for default in [(defaults | OWN).get(name, inspect.Parameter.empty)]
            ]
        )
        command.__annotations__ = hints
        return command

    return decorate


def _help_all(context: typer.Context, asked: bool) -> None:
    if asked:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


def _parameter(setting: Setting) -> str:
    return setting.name.replace("-", "_")


def _source(context: typer.Context, parameter: str) -> str:
    """Whether its value is of the command line, the environment, a file or the default."""
    source = context.get_parameter_source(parameter)
    return source.name if source is not None else ""


def _hint(setting: Setting) -> Any:
    flag = f"{setting.flag}/--no-{setting.name}" if setting.option.negatable else setting.flag
    shared = bool(setting.option.env)  # the others are in docs/options.md
    about: dict[str, Any] = {"help": setting.option.help, "envvar": setting.env, "show_envvar": shared}
    about |= {"metavar": f"[{'|'.join(setting.choices)}]"} if setting.choices else {}
    about |= {"rich_help_panel": setting.option.panel, "hidden": True} if setting.option.panel else {}
    how = typer.Argument(**about) if setting.option.positional else typer.Option(flag, **about)
    kind = str if setting.option.read is not None else setting.type
    return Annotated[list[kind] | None if setting.repeated else kind | None, how]  # type: ignore[valid-type]


def _default(setting: Setting) -> Any:
    if setting.repeated:
        return setting.default or None
    return not setting.default if setting.inverted else setting.default


@app.command(context_settings=PASS_THROUGH, options_metavar="[MODEL] [OPTIONS]")
@takes(UP)
def up(context: typer.Context, given: dict[str, Any]) -> None:
    """Start a gateway and vLLM instances on this host, where the last start with this state left off.

    MODEL may also be given with --model. Further options go to vLLM as they are.
    """
    from server.up.server import run_up

    named = [*itertools.takewhile(lambda word: not word.startswith("-"), context.args)]
    vllm_args = tuple(context.args[len(named) :])
    if named and _source(context, "model") == "COMMANDLINE":
        named.append(given["--model"])
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)}: name one checkpoint, as MODEL or with --model.")
    given |= {"--model": named[0]} if named else {}
    if (member := given.get("--cluster-tls")) is not None:
        os.environ[CLUSTER_TLS_ENV] = str(member)  # for the instances too, here and on nodes of Ray
    told = [setting for setting in PASSED_ON if _source(context, _parameter(setting)) != "DEFAULT"]
    gateway_args = tuple(options.flags(told, given))  # HOTSWAP_GATEWAY_* says the rest, or the gateway's defaults
    run_up(options.build(UpConfig, given, gateway_args=gateway_args, vllm_args=vllm_args))


@app.command(context_settings=PASS_THROUGH)
@takes(INSTANCE)
def instance(context: typer.Context, given: dict[str, Any]) -> None:
    """Run one vLLM instance. Further options go to vLLM as they are."""
    from server.instance.fork_server import begin_with_libraries

    begin_with_libraries()
    from server.instance.main import run_instance

    run_instance(options.build(InstanceConfig, given, vllm_args=tuple(context.args)))


@app.command(context_settings=PASS_THROUGH, add_help_option=False)
def gateway(context: typer.Context) -> None:
    """Run the gateway (`hotswap gateway --help` for its options)."""
    from server.gateway.__main__ import main

    main(context.args)


@app.command()
@takes(FOLLOW)
def follow(context: typer.Context, given: dict[str, Any]) -> None:
    """Watch a place for new checkpoints; publish and release each."""
    from server.cli.follow import run_follow

    run_follow(options.build(FollowConfig, given))


@app.command(context_settings=PASS_THROUGH, add_help_option=False)
def peer(context: typer.Context) -> None:
    """Carry versions between this host and others (`hotswap peer --help` for its options)."""
    from weightsync.peer.__main__ import main

    raise typer.Exit(main(context.args))


@app.command(context_settings=PASS_THROUGH)
def train(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="trainer configuration (YAML)")],
) -> None:
    """Run the trainer: this process becomes it, so that signals reach it. --set, --plan and --report are its own."""
    command = [sys.executable, "-m", "trainer.main", "--config", str(config), *context.args]
    os.execv(sys.executable, command)  # noqa: S606 - nothing of it goes through a shell


@app.command("train-server", context_settings=PASS_THROUGH)
def train_server(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="configuration of the training API (YAML)")],
) -> None:
    """Serve the training API for the tinker SDK: this process becomes it. --set is its own."""
    command = [sys.executable, "-m", "trainer.api", "--config", str(config), *context.args]
    os.execv(sys.executable, command)  # noqa: S606 - nothing of it goes through a shell


@app.command("reward-server", context_settings=PASS_THROUGH)
def reward_server(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="configuration of the rewards (YAML)")],
) -> None:
    """Score answers over HTTP with the trainer's rewards, for release policies: this process becomes it. --set is its
    own."""
    command = [sys.executable, "-m", "trainer.rewards.server", "--config", str(config), *context.args]
    os.execv(sys.executable, command)  # noqa: S606 - nothing of it goes through a shell


@app.command()
@takes(DOCTOR)
def doctor(context: typer.Context, given: dict[str, Any]) -> None:
    """Check this host, its store and its certificates, and say how to mend each. Exit status 1 if a check fails."""
    asked = options.build(DoctorReport, {s.flag: given[s.flag] for s in DOCTOR if s.flag in given})
    with as_cli_error(ConfigError):
        checks = registry.chosen(asked.only, asked.skip)
    if (model := given.get("--model")) is not None:
        given["--model"] = resolve_model(str(model))
    if asked.plan:
        _show_plan(options.build(World, given), asked)
        return
    with _quiet("hotswap.gateway"):  # what it says of its machine code is in the findings
        results = registry.diagnose(options.build(World, given), checks)
    if asked.as_json:
        print(registry.to_json(results))
    else:
        show_results(results, console())
    raise typer.Exit(1 if registry.failed(results) else 0)


def show_results(results: list[registry.Result], to: Console) -> None:
    """A row for each finding, and a line that counts them."""
    shown = table("check", "", "found", "how to mend")
    for result in results:
        finding = result.finding
        status = Text(finding.status, style=COLOURS[finding.status])
        shown.add_row(result.check, status, Text(finding.found), Text(finding.mend))
    to.print(shown)
    counts = {status: sum(r.finding.status == status for r in results) for status in COLOURS}
    to.print(", ".join(f"{count} {status}" for status, count in counts.items() if count) or "nothing was checked")


def _show_plan(world: World, asked: DoctorReport) -> None:
    """The memory that copies on the device take, for `--model` on each rank."""
    from server.doctor import plan

    with as_cli_error(ConfigError, CheckpointError):
        if world.model_dir is None:
            raise ConfigError("--plan: say with --model of which checkpoint.")
        model = plan.Model.of(world.model_dir, world.tensor_parallel_size)
        first = next(iter(world.gpus_taken()), None)
        total = int(asked.gpu_gib * 2**30) if asked.gpu_gib else first.nbytes if first is not None else 0
        if not total:
            raise ConfigError("--plan: no GPU is seen here; say with --gpu-gib how much memory it is to have.")
        found = plan.rows(model, world.room(total), asked.sequence_tokens)
    if asked.as_json:
        print(json.dumps([asdict(row) for row in found]))
    else:
        console().print(plan.table(found, asked.sequence_tokens))


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Errors only from `logger` meanwhile."""
    target = logging.getLogger(logger)
    before = target.level
    target.setLevel(logging.ERROR)
    try:
        yield
    finally:
        target.setLevel(before)
