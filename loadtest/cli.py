"""`hotswap bench`, which the command line finds as a plug-in (`hotswap.commands` in pyproject.toml)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(no_args_is_help=True, help="Benchmarks; each prints a table and writes JSON.")
Json = Annotated[Path | None, typer.Option("--json", help="write the figures here as JSON")]
ModelKind = Annotated[Literal["dense", "moe", "w8a8", "awq", "mla"], typer.Option(help="what is swapped")]
Against = Annotated[
    Path | None, typer.Option(help="only this checkout and another one, in pairs; the other's root directory")
]
Pairs = Annotated[int, typer.Option(min=2, help="with --against: visits to each of the two")]
Small = Annotated[bool, typer.Option(help="a tiny model: checks the benchmark, says nothing of speed")]


@app.callback()
def interruptible() -> None:
    """A benchmark that is told to stop (SIGTERM too) takes the processes it started with it."""
    from server.up import interrupts

    interrupts.install()


@app.command()
def swap(
    json: Json = None,
    streams: Annotated[int, typer.Option(help="concurrent streams")] = 16,
    swaps: Annotated[int, typer.Option(help="swaps measured per way")] = 6,
    model_kind: ModelKind = "dense",
    against: Against = None,
    pairs: Pairs = 4,
    small: Small = False,
) -> None:
    """Client-visible token gaps with no swap, with hotswap, and with vLLM's own pause, update and resume."""
    from loadtest.swaps import against as paired
    from loadtest.swaps.stall import run

    if against is not None:
        paired.run(against, json, pairs=pairs, streams=streams, small=small, kind=model_kind)
    else:
        run(json, streams=streams, swaps=swaps, small=small, kind=model_kind)


@app.command()
def restart(
    json: Json = None, kills: Annotated[int, typer.Option(help="of the instance")] = 5, small: Small = False
) -> None:
    """From the death of an instance to the next one's first token, beside stock vLLM's start."""
    from loadtest.serving.restarts import run

    run(json, kills=kills, small=small)


@app.command()
def phases(
    json: Json = None,
    level: Annotated[int, typer.Option(min=1, max=2, help="how deep the server sleeps while the trainer trains")] = 2,
    steps: Annotated[int, typer.Option(help="training steps")] = 4,
    small: Small = False,
) -> None:
    """Time that a trainer and a server lose, and memory that they gain, when they share their memory by turns."""
    from loadtest.training.phase_switch import run

    run(json, level=level, steps=steps, small=small)


@app.command()
def logprobs(json: Json = None, small: Small = False) -> None:
    """Log-probs over a vocabulary of 150,000, in chunks and over whole logits: peak memory, CPU time."""
    from loadtest.training.logprobs import run

    run(json, small=small)


@app.command()
def soak(
    json: Json = None,
    swaps: Annotated[int, typer.Option(help="how many")] = 10_000,
    instances: Annotated[int, typer.Option(help="vLLM instances")] = 2,
) -> None:
    """Thousands of swaps under load: wrong tokens, failed requests, leaked memory."""
    from loadtest.swaps.soak import run

    run(json, swaps=swaps, instances=instances)


@app.command()
def upgrade(
    json: Json = None,
    since: Annotated[
        str | None, typer.Option(help="revision of this repository that all processes are of before the upgrade")
    ] = None,
    instances_first: Annotated[
        bool, typer.Option("--instances-first", help="with --since: replace instances before gateways")
    ] = False,
) -> None:
    """Gateways and instances replaced one by one under load: failed requests (status 1 if any), token gaps, seconds.
    With --since also peers and the publisher, and swaps of every kind in each state between two releases."""
    from loadtest.upgrade import bench, releases

    if since is not None:
        order: releases.Order = "instances" if instances_first else "gateways"
        failed = releases.failures(releases.run(json, since=since, order=order))
    else:
        failed = bench.failures(bench.run(json))
    if failed:
        raise typer.Exit(1)


@app.command()
def chaos(
    json: Json = None,
    minutes: Annotated[float, typer.Option(help="how long")] = 30.0,
    seed: Annotated[int, typer.Option(help="of what breaks, in which order, and of the questions")] = 0,
    clients: Annotated[int, typer.Option(help="that ask all the time")] = 4,
    hostile: Annotated[int, typer.Option(help="clients that attack all the time")] = 2,
    second: Annotated[int, typer.Option(help="hosts with an instance of the second model")] = 2,
) -> None:
    """Processes killed and frozen, links cut, instances that join and leave, bad versions and hostile clients, on three
    hosts with two models: what clients see."""
    from loadtest.chaos.bench import run

    if run(json, minutes=minutes, seed=seed, clients=clients, hostile=hostile, second=second)["violations"]:
        raise typer.Exit(1)


@app.command()
def gateway(
    json: Json = None,
    rounds: Annotated[int, typer.Option(help="how often each contender is asked in every way")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="contenders whose name contains this; may be repeated")] = None,
    against: Annotated[
        Path | None, typer.Option(help="only this gateway and that of another checkout, in pairs; its directory")
    ] = None,
    splits: Annotated[
        bool, typer.Option("--splits", help="only this gateway, with two versions that share the traffic and with one")
    ] = False,
    pairs: Annotated[int, typer.Option(min=2, help="in pairs: loads of each kind for each of the two")] = 25,
) -> None:
    """The gateway beside vllm-router, smg and LiteLLM, one core each: requests/s, CPU, added latency, disconnects."""
    from loadtest.gateway import against as paired
    from loadtest.gateway.bench import run

    if splits:
        paired.run(paired.splits(), json, pairs=pairs)
    elif against is not None:
        paired.run(paired.checkouts(against), json, pairs=pairs)
    else:
        run(json, rounds=rounds, only=only or ())


@app.command()
def serve(json: Json = None, small: Small = False) -> None:
    """Open-loop load on real vLLM: goodput up to three times saturation, fairness between keys, urgent requests."""
    from loadtest.serving.bench import run

    run(json, small=small)


@app.command()
def prefixes(json: Json = None, small: Small = False) -> None:
    """Prompt tokens found in the caches, by what a gateway knows of them; simulated."""
    from loadtest.gateway.prefix_knowledge import run

    run(json, small=small)


@app.command()
def delta(json: Json = None, small: Small = False) -> None:
    """Versions as differences: what real training changes, and how long they take over shaped links."""
    from loadtest.transfer.delta import run

    run(json, small=small)


@app.command()
def fleet(
    json: Json = None,
    streams: Annotated[int, typer.Option(help="concurrent streams")] = 8,
    swaps: Annotated[int, typer.Option(help="single swaps measured per case")] = 6,
    small: Small = False,
) -> None:
    """Swaps of 1, 2 and 4 instances and of two ranks, together and rolling; goodput with a swap every second."""
    from loadtest.swaps.fleet import run

    run(json, streams=streams, swaps=swaps, small=small)


@app.command()
def sessions(json: Json = None, small: Small = False) -> None:
    """Conversations with a swap after every turn, with and without the KV cache of the versions before."""
    from loadtest.swaps.sessions import run

    run(json, small=small)


@app.command()
def adapters(
    json: Json = None,
    streams: Annotated[int, typer.Option(min=2, help="concurrent streams")] = 8,
    windows: Annotated[int, typer.Option(min=2, help="of 6 s, with and without publications each")] = 6,
    small: Small = False,
) -> None:
    """A thousand adapters, and a new edition of one every 0.3 s: the gaps of streams that have no part in it."""
    from loadtest.swaps.adapters import run

    run(json, streams=streams, windows=windows, small=small)


@app.command()
def transfer(
    json: Json = None,
    small: Small = False,
    part: Annotated[
        list[str] | None, typer.Option(help="reads, links, joiner or feeding alone; may be repeated")
    ] = None,
) -> None:
    """Reads by each transport beside memcpy and a raw socket, and by 1 to 8 receivers at once; a version on its way to
    8 hosts behind links of their own; a late joiner's first token; what an instance loses while its host feeds another.
    """
    from loadtest.transfer.bench import PARTS, run

    if unknown := set(part or ()) - set(PARTS):
        raise typer.BadParameter(f"{min(unknown)} is none of {', '.join(PARTS)}")
    run(json, small=small, parts=part or PARTS)


@app.command()
def learning(
    json: Json = None,
    docs: Annotated[Path | None, typer.Option(help="put the table into this page, and the chart beside it")] = None,
    seed: Annotated[int, typer.Option(help="of data, samples and initial weights")] = 0,
    task: Annotated[list[str] | None, typer.Option(help="only this task; may be repeated")] = None,
    way: Annotated[list[str] | None, typer.Option(help="only this algorithm; may be repeated")] = None,
) -> None:
    """Whether SFT, DPO, GRPO and PPO raise held-out accuracy: on sums, on code run in the sandbox, and with a tool."""
    from loadtest.training.learning.bench import run

    found = run(json, seed=seed, tasks=task or (), ways=way or (), docs=docs)
    if not all(one.get("learned") for each in found["tasks"].values() for one in each["runs"].values()):
        raise typer.Exit(1)


@app.command(name="rl-step")
def rl_step(
    json: Json = None,
    lora: Annotated[bool, typer.Option(help="train and publish an adapter; TRL with PEFT")] = False,
    steps: Annotated[int, typer.Option(min=1, help="that are measured of each")] = 10,
    against: Against = None,
    pairs: Pairs = 4,
    small: Small = False,
) -> None:
    """One GRPO step under each schedule and by TRL: seconds by phase, tokens/s, memory, what a slow reward costs."""
    from loadtest.training.rl_step import against as paired
    from loadtest.training.rl_step.bench import run

    steps = 3 if small else steps
    if against is not None:
        paired.run(against, json, pairs=pairs, small=small, lora=lora, steps=steps)
    else:
        run(json, small=small, lora=lora, steps=steps)


@app.command(name="partial-rollouts")
def partial_rollouts(json: Json = None, small: Small = False) -> None:
    """Where a few answers are ten times as long as the rest: steps with and without a budget of tokens, accuracy."""
    from loadtest.training.partial_rollouts import run

    run(json, small=small)


@app.command()
def scale(
    json: Json = None,
    hosts: Annotated[int, typer.Option(min=0, help="simulate so many instead of the standard cases")] = 0,
    params: Annotated[float, typer.Option(help="of the model, two bytes each")] = 1e12,
    hosts_per_instance: Annotated[int, typer.Option(min=1, help="over which a version is divided")] = 1,
    sources: Annotated[int, typer.Option(min=1, help="hosts that publish, each a part")] = 1,
    chunk_mib: Annotated[int, typer.Option(min=1, help="larger ones are simulated faster")] = 1024,
    nic_gbit: Annotated[float, typer.Option(help="of each host, in each direction")] = 400.0,
    oversubscription: Annotated[float, typer.Option(help="of racks' uplinks; 0: they are no limit")] = 0.0,
    seed: int = 0,
    live: Annotated[bool, typer.Option(help="instead: real agents on a real etcd of this machine")] = False,
    agents: Annotated[list[int] | None, typer.Option(help="with --live: so many instead of 100, 300 and 1,000")] = None,
) -> None:
    """Simulated clusters with the real planner: fan-out of a version, bytes per NIC, writes and events of the store."""
    from loadtest.scale import live as live_agents
    from loadtest.scale.bench import run
    from loadtest.scale.network import Scenario, ScenarioError

    try:
        asked = Scenario(
            hosts, params, hosts_per_instance=hosts_per_instance, sources=sources, chunk_nbytes=chunk_mib << 20,
            nic_gbit=nic_gbit, oversubscription=oversubscription, seed=seed,
        ) if hosts else None  # fmt: skip
    except ScenarioError as error:
        raise typer.BadParameter(str(error)) from error
    if live:
        live_agents.run(json, tuple(agents or live_agents.AGENTS))
    else:
        run(json, asked)


@app.command(name="releases")
def releases(
    json: Json = None,
    count: Annotated[int, typer.Option(min=1, help="releases of each kind")] = 1000,
    small: Small = False,
) -> None:
    """Releases by simulation: false alarms, and how soon harm is found."""
    from loadtest.serving.releases import run

    run(json, releases=20 if small else count)


@app.command()
def rollback(
    json: Json = None, count: Annotated[int, typer.Option(min=1, help="releases that are taken back")] = 8
) -> None:
    """How soon a release takes a bad version back, from the answer that made the evidence sufficient."""
    from loadtest.swaps.rollback import run

    run(json, releases=count)
