"""Commands and their options; the work is done in the modules named beside each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from server.cli import doctor, instances, keys, store_roles, weights
from server.cli.errors import CliError
from server.cli.paths import default_state_dir
from server.errors import ConfigError
from weightsync.errors import TlsUnavailable


class Commands(TyperGroup):
    """Ours, and those of other packages: entry points of the group `hotswap.commands`, each a Typer application."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (ours := super().get_command(ctx, cmd_name)) is not None:
            return ours
        return next((_loaded(entry) for entry in _plugins() if entry.name == cmd_name), None)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(entry.name for entry in _plugins())]


def _plugins() -> Iterator[EntryPoint]:
    yield from entry_points(group="hotswap.commands")


def _loaded(entry: EntryPoint) -> Any:
    command = typer.main.get_command(entry.load())
    command.name = entry.name
    return command


app = typer.Typer(
    name="hotswap",
    cls=Commands,
    help="An LLM server whose weights can be replaced while it answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(weights.app, name="weights", help="Publish, activate, roll back, verify and compare weight versions.")
app.add_typer(keys.app, name="keys", help="Make, limit, rotate and revoke keys of a running gateway.")
app.add_typer(instances.app, name="instances", help="Show instances, take one out of routing, and back.")
app.add_typer(store_roles.app, name="store", help="Roles and users of an etcd.")
app.command()(doctor.doctor)

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=PASS_THROUGH)
def up(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="checkpoint directory, or the name of a model in the local cache or hub")],
    name: Annotated[str | None, typer.Option(help="name clients ask for; default: the directory's name")] = None,
    host: Annotated[str, typer.Option(help="address the gateway listens on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port the gateway listens on")] = 8000,
    state_dir: Annotated[Path | None, typer.Option(help="store, keys and logs; default: per model name")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="discard keys, versions and history of the state")] = False,
    persist: Annotated[str | None, typer.Option(help="directory for copies of versions, or off")] = None,
    persist_keep: Annotated[int, typer.Option(help="versions kept on disk")] = 2,
    persist_max_gib: Annotated[float | None, typer.Option(help="most that they may take, GiB")] = None,
    admin_key_file: Annotated[Path | None, typer.Option(help="file with the admin key; default: made on start")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="file with API keys, one a line; default: none asked")
    ] = None,
    require_key: Annotated[bool, typer.Option(help="ask for an API key even before there is one")] = False,
    train: Annotated[Path | None, typer.Option(help="also run this trainer configuration")] = None,
    kv_cache_gib: Annotated[float, typer.Option(help="KV cache on CPU, GiB, of each instance")] = 1.0,
    instances: Annotated[int, typer.Option(help="vLLM instances; they share the weights' memory")] = 1,
    store: Annotated[str | None, typer.Option(help="etcd://HOST:PORT/...; default: a SQLite file")] = None,
    keep_versions: Annotated[int, typer.Option(help="versions kept staged, the active one included")] = 2,
    probes: Annotated[Path | None, typer.Option(help="prompts that the canary of a rolling swap is asked")] = None,
    max_logprob_drift: Annotated[float | None, typer.Option(help="drift of its log-probabilities let pass")] = None,
    cache_scope: Annotated[str, typer.Option(help="who shares prefix cache blocks: key or shared")] = "key",
    hold: Annotated[float, typer.Option(help="seconds a request waits while no instance can be asked")] = 5.0,
    failover: Annotated[str, typer.Option(help="who goes on with a dead instance's streams: same, any, off")] = "same",
    max_queued: Annotated[int, typer.Option(help="requests that wait for room at an instance, at most")] = 1024,
    max_queue_wait: Annotated[float, typer.Option(help="longest such wait, seconds")] = 30.0,
    log_format: Annotated[
        str, typer.Option(help="of the gateway's lines: text, or json with a line a request")
    ] = "text",
    otlp_endpoint: Annotated[
        str | None, typer.Option(envvar="OTEL_EXPORTER_OTLP_ENDPOINT", help="trace requests to http://HOST:4318")
    ] = None,
    trace_sample_ratio: Annotated[float, typer.Option(help="share of the traces begun here")] = 1.0,
) -> None:
    """Start a gateway and vLLM instances on this host, where the last start with this state left off.

    Further options go to vLLM as they are.
    """
    from server.cli.up import UpConfig, run_up

    gateway_args = ["--keep-versions", str(keep_versions), "--cache-scope", cache_scope, "--hold", str(hold)]
    gateway_args += ["--failover", failover, "--max-queued", str(max_queued), "--max-queue-wait", str(max_queue_wait)]
    gateway_args += ["--require-key"] if require_key else []
    gateway_args += ["--probes", str(probes.resolve())] if probes is not None else []
    gateway_args += ["--max-logprob-drift", str(max_logprob_drift)] if max_logprob_drift is not None else []
    gateway_args += ["--log-format", log_format, "--trace-sample-ratio", str(trace_sample_ratio)]
    config = UpConfig(
        model=model, name=name, host=host, port=port, state_dir=state_dir, admin_key_file=admin_key_file,
        api_key_file=api_key_file, train=train, kv_cache_gib=kv_cache_gib, instances=instances, store=store,
        gateway_args=tuple(gateway_args), vllm_args=tuple(context.args), otlp_endpoint=otlp_endpoint, fresh=fresh,
        persist="off" if persist == "off" else Path(persist) if persist is not None else None,
        persist_keep=persist_keep, persist_max_gib=persist_max_gib,
    )  # fmt: skip
    run_up(config)


@app.command(context_settings=PASS_THROUGH)
def instance(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="checkpoint directory: config and tokenizer; weights come by version")],
    name: Annotated[str, typer.Option(help="model name in the store and for clients")],
    store: Annotated[str, typer.Option(envvar="HOTSWAP_STORE", help="store URL, e.g. sqlite:///path/store.db")],
    host: Annotated[str, typer.Option(help="address to listen on; beyond loopback with --cluster-tls")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port")] = 0,
    advertise: Annotated[str, typer.Option(help="address that gateways connect to; default: --host")] = "",
    cluster_tls: Annotated[
        Path | None, typer.Option(envvar="HOTSWAP_CLUSTER_TLS", help="directory with tls.crt, tls.key and ca.crt")
    ] = None,
    instance_id: Annotated[str | None, typer.Option(help="default: host name and process id")] = None,
    kv_cache_gib: Annotated[float, typer.Option(help="KV cache on CPU, GiB")] = 1.0,
    headless: Annotated[
        bool, typer.Option("--headless", help="the workers of this host alone, for an instance that another host leads")
    ] = False,
    allow_non_finite: Annotated[
        bool, typer.Option("--allow-non-finite", help="stage versions with NaN or infinite weights, which are refused")
    ] = False,
    grammar_seconds: Annotated[float, typer.Option(help="CPU time to compile one schema, pattern or grammar")] = 30.0,
    grammar_mib: Annotated[int, typer.Option(help="memory to compile one, MiB")] = 512,
    grammar_at_once: Annotated[int, typer.Option(help="how many are tried out at one time")] = 4,
    grammar_waiting: Annotated[int, typer.Option(help="how many more may wait for that")] = 32,
    grammar_verdicts: Annotated[int, typer.Option(help="how many verdicts are kept")] = 4096,
) -> None:
    """Run one vLLM instance. Further options go to vLLM as they are."""
    from server.instance.config import InstanceConfig, default_instance_id
    from server.instance.grammars.trials import Limits
    from server.instance.main import run_instance

    try:
        config = InstanceConfig(
            model_dir=model,
            model=name,
            store=store,
            host=host,
            port=port,
            advertise=advertise,
            cluster_tls=cluster_tls,
            kv_cache_gib=kv_cache_gib,
            headless=headless,
            allow_non_finite=allow_non_finite,
            grammars=Limits(grammar_seconds, grammar_mib, grammar_at_once, grammar_waiting, grammar_verdicts),
            vllm_args=tuple(context.args),
            instance_id=instance_id or default_instance_id(),
        )
        run_instance(config)
    except (ConfigError, TlsUnavailable) as error:
        raise CliError(str(error)) from error


@app.command(context_settings=PASS_THROUGH, add_help_option=False)
def gateway(context: typer.Context) -> None:
    """Run the gateway (`hotswap gateway --help` for its options)."""
    from server.gateway.__main__ import main

    main(context.args)


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
    import sys

    command = [sys.executable, "-m", "trainer.main", "--config", str(config), *context.args]
    os.execv(sys.executable, command)  # noqa: S606 - nothing of it goes through a shell


@app.command()
def status(
    state_dir: Annotated[Path | None, typer.Option(help="state directory of `up`")] = None,
    name: Annotated[str | None, typer.Option(help="model name, if several run here")] = None,
) -> None:
    """Show the instances and the active version of a running server."""
    instances.show_instances(state_dir or default_state_dir(name))
