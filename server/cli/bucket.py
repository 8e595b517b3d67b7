"""`hotswap weights ... --bucket URL`: a bucket from the shell. Credentials come from the environment."""

from __future__ import annotations

import time
from typing import Annotated, Any

import orjson
import typer

from server.cli.output import console, table
from server.errors import CliError, as_cli_error
from weightsync.errors import BucketDamaged, VersionGone, WeightSyncError

BucketUrl = Annotated[
    str | None, typer.Option("--bucket", help="of a bucket instead, such as s3://BUCKET/RUN; any URL of fsspec's")
]


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
