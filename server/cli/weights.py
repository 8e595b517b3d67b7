"""`hotswap weights`: the admin API of a running gateway, from the shell; `verify` and `diff` read this host's slots,
`--bucket` a bucket, with credentials from the environment."""

from __future__ import annotations

import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from server.cli.admin import AdminClient, AsJson, Reason, StateDir, StoreUrl, for_model, percentages, with_options
from server.cli.output import console, show, table
from server.errors import CliError, as_cli_error
from server.up.paths import ServerInfo, default_state_dir
from weightsync.errors import BucketDamaged, VersionGone, WeightSyncError

if TYPE_CHECKING:
    from weightsync.versions import VerifyReport, VersionDiff


class SwapMode(StrEnum):
    """The way in which a fleet takes a version."""

    together = "together"
    rolling = "rolling"


app = typer.Typer(no_args_is_help=True)


class OnLost(StrEnum):
    """The effect on the swap of an instance that dies before the commit."""

    abort = "abort"
    go_on = "continue"


Lost = Annotated[OnLost, typer.Option("--on-lost", help="an instance dies before the commit: abort, or go on without")]
Mode = Annotated[SwapMode, typer.Option(help="the whole fleet at once, or one instance after the other")]
Drain = Annotated[float | None, typer.Option(help="rolling: seconds an instance may wait for its streams to end")]
Name = Annotated[str | None, typer.Option(help="the model's served name; needed with --store")]
BucketUrl = Annotated[
    str | None, typer.Option("--bucket", help="of a bucket instead, such as s3://BUCKET/RUN; any URL of fsspec's")
]
Deadline = Annotated[float | None, typer.Option(help="seconds to stage everywhere; default: the gateway's")]


def _how(mode: SwapMode, drain: float | None, on_lost: OnLost, deadline: float | None) -> dict[str, Any]:
    """Fields of a body that say how the fleet takes a version."""
    return {"mode": mode.value, "drain_s": drain, "deadline_s": deadline, "on_lost": on_lost.value}


SWAP = {"mode": Mode, "drain": Drain, "on_lost": Lost, "deadline": Deadline}
for_swap = with_options("how", SWAP, _how, mode=SwapMode.together, on_lost=OnLost.abort)


@app.command()
@for_model
@for_swap
def push(
    client: AdminClient,
    how: dict[str, Any],
    directory: Annotated[Path | None, typer.Argument(help="Hugging Face checkpoint directory")] = None,
    part: Annotated[str, typer.Option(help='what it is: "draft" or "lora/NAME" (default: the base model)')] = "",
    more: Annotated[list[str], typer.Option("--with", help="PART=DIR: one more part of the same version")] = [],  # noqa: B006
    without: Annotated[
        list[str], typer.Option("--without", help="draft or lora/NAME: a part to take away; then DIR may be left out")
    ] = [],  # noqa: B006
    activate: Annotated[bool, typer.Option(help="also swap it in")] = True,
    cast: Annotated[bool, typer.Option("--cast", help="convert floats to the dtypes that are served")] = False,
    strip: Annotated[str, typer.Option(help='what is taken away where a name begins with it: "module."')] = "",
    sign_key: Annotated[str, typer.Option(help="name of the gateway's --sign-key that signs it")] = "",
    reason: Reason = None,
) -> None:
    """Publish a checkpoint as a new version and, unless --no-activate, swap it in."""
    if directory is None and not without and not more:
        raise CliError("Name a checkpoint directory, or a part to take away with --without.")
    body: dict[str, Any] = {"activate": activate}
    body |= {"path": str(directory.expanduser().resolve())} if directory is not None else {}
    body |= {"without": without} if without else {}
    body |= ({"part": part} if part else {}) | ({"parts": dict(map(_part, more))} if more else {})
    body |= ({"sign_key": sign_key} if sign_key else {}) | ({"cast": True} if cast else {})
    body |= {"strip": strip} if strip else {}
    body |= how
    answer = client.call("POST", "/admin/weights", body, reason)
    show_swap(answer)
    if kept := answer.get("kept"):
        console().print(f"kept as served: {', '.join(kept)}")


def _part(argument: str) -> tuple[str, str]:
    name, found, directory = argument.partition("=")
    if not found:
        raise CliError(f"--with {argument}: write PART=DIR, such as draft=/models/small")
    return name, str(Path(directory).expanduser().resolve())


@app.command("list")
@for_model
def list_versions(
    client: AdminClient,
    bucket: BucketUrl = None,
    retired: Annotated[bool, typer.Option("--all", help="also those that are no longer held")] = False,
    as_json: AsJson = False,
) -> None:
    """List the versions held."""
    if bucket is not None:
        show_versions(bucket, as_json=as_json)
        return
    answer = client.call("GET", "/admin/weights")
    if as_json:
        print(orjson.dumps(answer).decode())
        return
    shown = table("version", "state", "active", "step", "GB", "published", "source")
    active = answer.get("active") or {}
    percents = percentages(active)
    versions = [v for v in answer["versions"] if retired or v["state"] != "retired"]
    for v in versions:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(v["created_at"]))
        mark = "active" if v["version"] == active.get("version") else ""
        mark += f" {percents[v['version']]:g} %" if v["version"] in percents else ""
        size = f"{v['nbytes'] / 1e9:.3f}"
        step, source = str(v["step"] or ""), v.get("source") or ""
        shown.add_row(str(v["version"]), v["state"], mark.strip(), step, size, made, source)
    console().print(shown)
    if hidden := len(answer["versions"]) - len(versions):
        console().print(f"and {hidden} retired: no longer held (--keep-versions), listed with --all")


@app.command()
@for_model
@for_swap
def activate(
    client: AdminClient,
    how: dict[str, Any],
    version: Annotated[int, typer.Argument(help="a version from `hotswap weights list`")],
    reason: Reason = None,
) -> None:
    """Swap a published version in."""
    body = {"version": version, **how}
    show_swap(client.call("POST", "/admin/weights/activate", body, reason))


@app.command()
@for_model
@for_swap
def rollback(
    client: AdminClient,
    how: dict[str, Any],
    version: Annotated[int | None, typer.Argument(help="default: the one that served before the active one")] = None,
    reason: Reason = None,
) -> None:
    """Go back to the version that served before the active one, or to another that is still held."""
    body = {"version": version, **how}
    show_swap(client.call("POST", "/admin/weights/rollback", body, reason))


@app.command()
@for_model
@for_swap
def split(
    client: AdminClient,
    how: dict[str, Any],
    shares: Annotated[list[str] | None, typer.Argument(help="VERSION=PERCENT of each; together 100")] = None,
    sticky: Annotated[
        str, typer.Option(help="requests equal in it go to one version: key, session or header:NAME")
    ] = "",
    minimum: Annotated[int, typer.Option(min=1, help="instances of each version, at least")] = 1,
    shadow: Annotated[
        list[str],
        typer.Option(help="VERSION=PERCENT: requests of others that are repeated on it, unseen by clients"),
    ] = [],  # noqa: B006
    end: Annotated[bool, typer.Option("--end", help="all requests to the active version again")] = False,
    reason: Reason = None,
) -> None:
    """Divide requests between versions: 12=90 13=10. To give all of them to one, activate it."""
    if end == bool(shares):
        raise CliError("say which versions share the traffic, such as 12=90 13=10, or --end alone")
    if end:
        show_swap(client.call("DELETE", "/admin/weights/split", None, reason))
        return
    asked = {share["version"]: share for share in map(_share, shares or [])}
    if len(asked) < len(shares or []):
        raise CliError("a version is named twice; give it one share")
    for repeated in map(_share, shadow):
        if repeated["version"] not in asked:
            raise CliError(f"--shadow: give version {repeated['version']} a share, such as {repeated['version']}=0")
        asked[repeated["version"]]["shadow"] = repeated["percent"]
    body = {"shares": list(asked.values()), "sticky": sticky, "minimum": minimum}
    body |= how
    show_swap(client.call("POST", "/admin/weights/split", body, reason))


def _share(argument: str) -> dict[str, Any]:
    version, _, percent = argument.partition("=")
    try:
        return {"version": int(version), "percent": float(percent.removesuffix("%"))}
    except ValueError:
        raise CliError(f"{argument}: write VERSION=PERCENT, such as 13=10") from None


@app.command()
def verify(
    version: Annotated[int | None, typer.Argument(help="default: the active one")] = None,
    trust: Annotated[
        list[Path] | None, typer.Option("--trust", help="key or certificate that must have signed it; repeatable")
    ] = None,
    bucket: BucketUrl = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
    store: StoreUrl = None,
    name: Name = None,
) -> None:
    """Read every byte of a version on this host again, and compare what each instance runs. Status 1 on a mismatch.

    With --bucket: every byte of it in the bucket (default: the newest), of what it builds on and of its other parts.
    """
    if bucket is not None:
        if trust:
            raise CliError("--trust: the fleet that takes a version from a bucket checks its signature")
        verify_stored(bucket, version, as_json=as_json)
        return
    from weightsync.versions import verify as verify_version

    where = _records(state_dir, store, name)
    with as_cli_error(WeightSyncError):
        report = verify_version(*where, version, trust=trust or ())
    show_report(report, as_json=as_json)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def remove(
    version: Annotated[int, typer.Argument(help="a version from `hotswap weights list --bucket URL`")],
    bucket: Annotated[str, typer.Option("--bucket", help="such as s3://BUCKET/RUN; any URL of fsspec's")],
) -> None:
    """Remove a version from a bucket, unless another one needs it or it is the newest."""
    remove_version(bucket, version)


@app.command()
def diff(
    a: Annotated[int, typer.Argument(help="a version that is still held")],
    b: Annotated[int, typer.Argument(help="another one")],
    as_json: AsJson = False,
    state_dir: StateDir = None,
    store: StoreUrl = None,
    name: Name = None,
) -> None:
    """Show which tensors two versions on this host differ in, and by how much."""
    from weightsync.versions import diff as diff_versions

    where = _records(state_dir, store, name)
    with as_cli_error(WeightSyncError):
        found = diff_versions(*where, a, b)
    show_diff(found, as_json=as_json)


@app.command()
def export(
    version: Annotated[int, typer.Argument(help="a version from `hotswap weights list`, or one on disk")],
    directory: Annotated[Path, typer.Argument(help="made, or empty")],
    part: Annotated[str, typer.Option(help='"draft" or "lora/NAME" (default: the base model)')] = "",
    model_dir: Annotated[
        Path | None, typer.Option(help="where configuration and tokenizer are; default: what an instance was given")
    ] = None,
    state_dir: StateDir = None,
    store: StoreUrl = None,
    name: Name = None,
) -> None:
    """Write a version on this host as a Hugging Face checkpoint (an adapter as PEFT's)."""
    from weightsync.persist.export import export as export_version

    where = _records(state_dir, store, name)
    with as_cli_error(WeightSyncError):
        done = export_version(*where, version, directory.expanduser(), part=part, model_dir=model_dir)
    what = f"version {done.version}{f' ({done.part})' if done.part else ''}"
    console().print(f"{what}: {done.tensors} tensors, {done.nbytes:,} bytes in {done.directory}")


def _records(state_dir: Path | None, store: str | None, name: str | None) -> tuple[str, str]:
    """The store with a model's records, and the model's name. Raises CliError."""
    if store is not None and state_dir is None:
        if name is None:
            raise CliError("--store has the records of several models: say which one with --name")
        return store, name
    server = ServerInfo.read(state_dir or default_state_dir(name))
    return server.store, server.model


def show_swap(answer: dict[str, Any]) -> None:
    """Prints the outcome of a request: a swap, a publication alone, or that it waits for approval."""
    if answer.get("pending") is not None:
        waiting = answer["pending"]
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(waiting["until"]))
        what = f"{waiting['action']} of version {waiting['version']}"
        console().print(f"{what} waits until {until} for somebody else: hotswap approve {waiting['id']}")
        return
    swap = answer.get("swap") or answer
    if swap.get("prepare_ms") is None:
        console().print(f"published version {answer.get('version')}")
        return
    shares = swap.get("split") or {}
    for share in shares.get("shares", []):
        where = ", ".join(share["instances"])
        also = f", and {share['shadow']:g} % of the others repeated" if share.get("shadow") else ""
        console().print(f"version {share['version']} has {share['percent']:g} % of the requests{also}, on {where}")
    shared, before = bool(shares), swap.get("previous")
    about = ", with the other requests" if shared else f" (before: {before})" if before is not None else ""
    console().print(
        f"version {swap['version']} is active{about}; "
        f"staged in {swap['prepare_ms']:.0f} ms, committed in {swap['commit_ms']:.1f} ms"
    )
    if swap.get("not_flipped"):
        console().print(f"could not flip, and start anew with it: {', '.join(swap['not_flipped'])}")
    if swap.get("changes"):
        console().print(f"the instances restarted one by one, as its tensors differ: {swap['changes']}")


VERDICTS = {"same": "runs these weights", "differs": "runs other weights", "not told": "does not say what it runs"}


def show_report(report: VerifyReport, *, as_json: bool) -> None:
    """One line when all is well; otherwise every problem, with the tensor or instance to blame."""
    if as_json:
        print(orjson.dumps({**asdict(report), "ok": report.ok}).decode())
        return
    out = console(soft_wrap=True)
    for problem in report.problems:
        out.print(f"{problem.code}: {problem.message}", style="red")
    for name, verdict in report.instances.items():
        out.print(f"instance {name}: {VERDICTS[verdict]}")
    for part, key in report.signers.items():
        out.print(f"{part or 'base model'}: {f'signed by key {key}' if key else 'not signed'}")
    rate = report.nbytes / report.seconds / 1e9 if report.seconds else 0.0
    state = "is as published" if report.ok else f"has {len(report.problems)} problem(s)"
    out.print(
        f"version {report.version} {state}: {report.tensors} tensors, {report.nbytes:,} bytes read in "
        f"{report.seconds:.2f} s ({rate:.1f} GB/s)"
    )


def show_diff(found: VersionDiff, *, as_json: bool) -> None:
    """A row per tensor that differs, the largest change first."""
    if as_json:
        print(orjson.dumps(found.to_json()).decode())
        return
    numbers = ("elements", "changed", "share", "max abs", "max rel", "mean abs", "not finite")
    shown = table("tensor", "dtype", *numbers, whole=True)
    differing = [t for t in found.tensors if t.state != "same"]
    for t in differing:
        sizes = [f"{t.changed:,}", f"{t.changed / max(1, t.elements):.3%}"]
        sizes += [f"{value:.3g}" for value in (t.max_abs, t.max_rel, t.mean_abs)]
        cells = [*sizes, str(t.not_finite or "")] if t.state == "changed" else [t.state]
        shown.add_row(t.name, t.dtype, f"{t.elements:,}", *cells)
    if differing:
        show(shown)
    share = found.changed / max(1, found.elements)
    console().print(
        f"versions {found.a} and {found.b}: {len(differing)} of {len(found.tensors)} tensors differ, "
        f"{found.changed:,} of {found.elements:,} elements ({share:.3%})"
    )


def show_versions(url: str, *, as_json: bool) -> None:
    """A row for each version: what it is, what it builds on, its size. Status 1 if a record cannot be read."""
    rows: list[dict[str, Any]] = []
    with as_cli_error(WeightSyncError):
        bucket = _opened(url)
        for number in bucket.numbers():
            try:
                rows.append(_described(bucket.read(number)))
            except BucketDamaged as error:
                rows.append({"number": number, "error": str(error)})
            except VersionGone:  # removed meanwhile
                continue
    if as_json:
        print(orjson.dumps(rows).decode())
    else:
        shown = table("version", "part", "kind", "base", "step", "GB", "of", "signed", "digest")
        for row in rows:
            if "error" in row:
                shown.add_row(str(row["number"]), "", "damaged")
                continue
            sizes = [f"{row[name] / 1e9:.3f}" for name in ("nbytes", "model_nbytes")]
            cells = [str(row["base"] or ""), "" if row["step"] is None else str(row["step"]), *sizes]
            signed = "yes" if row["signed"] else ""
            shown.add_row(str(row["number"]), row["part"] or "base", row["kind"], *cells, signed, row["digest"])
        console().print(shown)
    damaged = [row["error"] for row in rows if "error" in row]
    if damaged:
        raise CliError("; ".join(damaged))


def verify_stored(url: str, version: int | None, *, as_json: bool) -> None:
    """Every object of a version, of those that it builds on, and of its other parts. Raises CliError."""
    from weightsync.bucket import reader

    began = time.perf_counter()
    with as_cli_error(WeightSyncError):
        bucket = _opened(url)
        number = _newest(url, bucket.numbers()) if version is None else version
        read, nbytes = reader.verify(bucket, bucket.read(number))
    numbers, seconds = [one.number for one in read], time.perf_counter() - began
    if as_json:
        print(orjson.dumps({"number": number, "read": numbers, "nbytes": nbytes, "seconds": seconds}).decode())
        return
    told = ", ".join(map(str, numbers))
    console().print(f"version {number} is as published: {nbytes:,} bytes of versions {told} read in {seconds:.2f} s")


def remove_version(url: str, version: int) -> None:
    """Raises CliError for one that another needs."""
    with as_cli_error(WeightSyncError):
        _opened(url).remove(version)
    console().print(f"version {version} is removed")


def _opened(url: str) -> Any:
    from weightsync.bucket.objects import Bucket  # and with it fsspec

    return Bucket(url)


def _newest(url: str, numbers: list[int]) -> int:
    from weightsync.bucket.objects import redacted

    if not numbers:
        raise CliError(f"{redacted(url)} has no version yet")
    return numbers[-1]


def _described(version: Any) -> dict[str, Any]:
    header = version.header
    return {
        "number": version.number,
        "part": version.part,
        "kind": "full" if version.base is None else "delta",
        "base": version.base,
        "others": dict(version.others),
        "step": header.step,
        "nbytes": version.nbytes,
        "model_nbytes": header.nbytes,
        "tensors": len(header.tensors),
        "objects": len(version.parts),
        "digest": header.target_digest,
        "signed": bool(header.signature),
        "model": header.model,
        "source": header.source,
    }
