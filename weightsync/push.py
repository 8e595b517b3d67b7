"""`python -m weightsync.push --store URL --model NAME DIR`: publish a Hugging Face checkpoint, without torch.

With `--part draft` or `--part lora/NAME` DIR holds the draft model or a PEFT adapter, and the base stays as it is;
`--with PART=DIR` adds one to the same version.

With `--edition NAME` DIR holds a PEFT adapter that becomes an edition of NAME, which no swap brings; `--percent`,
`--keep` and `--max-age` are as in `Publisher.publish_edition`.

With `--delta FILE --upload-id ID` instead of DIR: a version sent by a `RemotePublisher`; `-` is standard input. With an
`--upload-id`, of DIR too, the same id again gives the version that it gave before.

With `--wait` alone: one that has imported what it needs, reads the other options from standard input (a JSON list of
strings, one line) and goes on as if it had been started with them; at the end of the input it ends.

Exit status 0 when the version is ready (and, unless told otherwise, active), 1 when not. With --json one JSON object
goes to standard output: {"version", "manifest_digest", "base_version", "parts" (as the record has them), "active",
"tensors", "nbytes", "seconds", "gbps"}, of DIR also "kept" (files that DIR lacks: the version has what was
served before), with an upload id also "duplicate", of a delta "received" (its bytes); or
{"error": {"code", "message", "tensor", and what is known of DETAILS}, "version"} where `version` says which one is
ready all the same, if one is.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from weightsync.control.parts import BASE, LORA, Adapter, check_name, part_of
from weightsync.control.records import VersionRecord
from weightsync.errors import (
    CheckpointError,
    ManifestError,
    PublishError,
    SlotBusy,
    WeightSyncError,
    delta_error,
    unknown_base,
)
from weightsync.format import fingerprint
from weightsync.memory.receiver import SlotReader
from weightsync.peer.copies import local_slot
from weightsync.publish.cast import cast_schema, converted
from weightsync.publish.checkpoint import INDEX, Checkpoint, read_config, read_inside
from weightsync.publish.delta import DeltaHeader, DeltaReader, apply_delta
from weightsync.publish.draft import commit_all
from weightsync.publish.publisher import Publisher
from weightsync.running import STORE_ENV


@dataclass(frozen=True)
class Applied:
    """A version made of a delta. `received` counts the bytes of the delta, 0 when the version was here already."""

    record: VersionRecord
    received: int
    duplicate: bool = False


def publish_delta(stream: BinaryIO, publisher: Publisher, *, upload_id: str, onto: int | None = None) -> Applied:
    """Make the version that `stream` holds ready, under the next number; the same `upload_id` again gives the same one.
    Parts that the version does not bring come from version `onto`, as in `Publisher.publish`.

    The publisher holds its lineage, so of two processes that were given one upload only the later can commit, and it
    looks here first. Raises PublishError, and what `Publisher.begin_all` raises.
    """
    reader = DeltaReader(stream)
    header = reader.header
    if header.model != publisher.model:
        raise delta_error(f"it is for model {header.model!r}, this server has {publisher.model!r}")
    if (made := _made_before(publisher, upload_id)) is not None:
        return Applied(made, 0, duplicate=True)
    base = header.base.version if header.base is not None else None
    source = f"{_mark(upload_id)}{header.source}"
    about: dict[str, Any] = {"step": header.step, "base": base, "source": source, "config": header.config or None}
    about["onto"] = onto
    pieces = {header.part: (header.schema, header.metadata)}
    with _base_slot(publisher, header) as slot, publisher.begin_all(pieces, **about)[0] as draft:
        apply_delta(reader, slot, draft)
        draft.signature = header.signature
        version = draft.commit()
    record = next(v for v in publisher.versions() if v.version == version)
    return Applied(record, reader.nbytes)


@contextlib.contextmanager
def _base_slot(publisher: Publisher, header: DeltaHeader) -> Iterator[SlotReader | None]:
    """The slot of the base, held against reuse for as long as it is read. Raises PublishError."""
    wanted = header.base
    if wanted is None:
        yield None
        return
    ready = [v for v in publisher.versions() if v.state == "ready"]
    same = [
        p for v in ready if (p := part_of(v, header.part)) and p.manifest_digest == wanted.manifest_digest
    ]  # whichever version carries it on
    if not same:
        found = next((v.manifest_digest for v in ready if v.version == wanted.version), None)
        raise unknown_base(wanted.version, wanted.manifest_digest, found)
    path = local_slot(same[0], publisher.host, publisher.copies())
    if path is None:  # on other hosts only
        raise unknown_base(wanted.version, wanted.manifest_digest, None)
    try:
        slot = SlotReader.open(path, manifest_digest=wanted.manifest_digest, populate=False)
    except (ManifestError, SlotBusy) as error:  # retired and reused since it was looked up
        raise unknown_base(wanted.version, wanted.manifest_digest, None) from error
    with slot:
        yield slot


def _made_before(publisher: Publisher, upload_id: str) -> VersionRecord | None:
    publisher.hold()  # before the look: a process that looked earlier with this upload cannot commit it any more
    made = [v for v in publisher.versions() if v.state != "publishing" and v.source.startswith(_mark(upload_id))]
    return made[0] if made else None


def _mark(upload_id: str) -> str:
    return f"upload {upload_id} "


MAX_CONFIG = 1 << 20
WAIT = "--wait"
DETAILS = ("expected", "got", "file", "needed", "free")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    if list(sys.argv[1:] if arguments is None else arguments) == [WAIT]:
        if not (line := sys.stdin.readline()):
            return 0
        arguments = orjson.loads(line)
    options = _parser().parse_args(arguments)
    done: dict[str, Any] = {}
    common = {"store": options.store, "model": options.model, "lineage": options.lineage, "done": done}
    common |= {"activate": not options.no_activate, "timeout_s": options.timeout}
    common |= {"requested_by": options.requested_by, "reason": options.reason, "sign": options.sign_key}
    try:
        if options.delta is not None:
            if options.when_told and not _told_to_go():
                return 1
            with _opened(options.delta) as stream:
                push_delta(stream, upload_id=options.upload_id or uuid.uuid4().hex, onto=options.onto, **common)
        elif options.edition is not None:
            how = {"percent": options.percent, "keep": options.keep, "max_age_s": options.max_age, "step": options.step}
            del common["activate"], common["timeout_s"]
            push_edition(options.directory, options.edition, **how, **common)
        else:
            what = {"part": options.part, "parts": dict(options.more), "without": options.without}
            what |= {"step": options.step, "cast": options.cast, "strip": options.strip}
            push(options.directory, upload_id=options.upload_id or "", **what, **common)
    except WeightSyncError as error:
        known = {name: getattr(error, name) for name in DETAILS if getattr(error, name, None) is not None}
        done = {"error": {**error.to_json(), **known}, "version": done.get("version")}
    _print(done, as_json=options.json)
    return 1 if "error" in done else 0


def push(
    directory: Path | None,
    *,
    part: str = BASE,
    parts: Mapping[str, Path] | None = None,
    without: Sequence[str] = (),
    upload_id: str = "",
    store: str | None,
    model: str,
    lineage: str = "push",
    step: int | None = None,
    cast: bool = False,
    strip: str = "",
    activate: bool = True,
    timeout_s: float = 600.0,
    requested_by: str = "",
    reason: str = "",
    sign: Path | None = None,
    done: dict[str, Any] | None = None,
) -> int:
    """Publish the checkpoint in `directory`; returns its version. The facts known so far are put into `done`.

    `part` says what it is ("draft", "lora/NAME"; the base by default), `parts` what else belongs to the version, and
    `without` what it takes away of the version before, for which no directory is needed. The same `upload_id` again
    gives the same version, and publishes nothing. `cast` and `strip` as in `Publisher.publish`. Raises CheckpointError
    before anything is claimed, and whatever `Publisher.publish` raises.
    """
    done = {} if done is None else done
    places = {**({part: directory} if directory is not None else {}), **(parts or {})}
    contents = {check_name(name): opened_checkpoint(name, place, strip) for name, place in places.items()}
    how: dict[str, Any] = {"lineage": lineage, "requested_by": requested_by, "reason": reason, "sign": sign}
    with Publisher(store, model=model, new_model=True, **how) as publisher:
        started = time.perf_counter()
        source = f"{_mark(upload_id) if upload_id else ''}{directory.resolve() if directory is not None else ''}"
        pieces = {
            name: (cast_schema(checkpoint.schema, publisher.schema(name) if cast else None), metadata)
            for name, (checkpoint, metadata) in contents.items()
        }
        made = _made_before(publisher, upload_id) if upload_id else None
        config = read_config(directory) if part == BASE and directory is not None else None
        if made is not None:
            version = made.version
            if activate:
                publisher.activate(version, wait=False, timeout_s=timeout_s)
        elif BASE in contents and (strays := contents[BASE][0].strays(publisher.schema())):
            problem = f"holds {', '.join(strays)} besides the model: move such files away, or write an index ({INDEX})"
            raise CheckpointError(str(contents[BASE][0].path), problem)
        elif not pieces:
            within_s = timeout_s if activate else None
            version = publisher.take_away(without, step=step, source=source, within_s=within_s)
        else:
            with contextlib.ExitStack() as stack:
                about: dict[str, Any] = {"step": step, "source": source, "config": config, "without": without}
                drafts = [stack.enter_context(d) for d in publisher.begin_all(pieces, **about)]
                for draft in drafts:
                    specs = pieces[draft.part][0].tensors
                    for name, tensor in contents[draft.part][0].tensors():
                        draft.write(name, converted(tensor, specs[name]))
                version = commit_all(drafts, [], within_s=timeout_s if activate else None)
        record = next(v for v in publisher.versions() if v.version == version)
        nbytes = sum(schema.nbytes for schema, _ in pieces.values())
        done["kept"] = publisher.kept_files(record, config) if BASE in contents else []
        done |= _told(record, time.perf_counter() - started) | ({"duplicate": made is not None} if upload_id else {})
        done |= {"nbytes": nbytes, "tensors": sum(len(schema.tensors) for schema, _ in pieces.values())}
        done |= {"gbps": round(nbytes / done["seconds"] / 1e9, 3) if done["seconds"] else 0.0}
        if activate:
            done |= {"active": True, "not_flipped": publisher.wait_active(version, timeout_s).not_flipped}
    return version


def push_edition(
    directory: Path,
    name: str,
    *,
    store: str | None,
    model: str,
    lineage: str = "push",
    requested_by: str = "",
    reason: str = "",
    sign: Path | None = None,
    done: dict[str, Any] | None = None,
    **terms: Any,
) -> int:
    """Publish the adapter in `directory` as an edition; returns its number. `done` as in `push`, `terms` and errors as
    in `Publisher.publish_edition`; CheckpointError before anything is claimed."""
    done, started = {} if done is None else done, time.perf_counter()
    checkpoint, metadata = opened_checkpoint(LORA + name, directory)
    how: dict[str, Any] = {"lineage": lineage, "requested_by": requested_by, "reason": reason, "sign": sign}
    with Publisher(store, model=model, **how) as publisher:
        about = {"source": str(directory.resolve()), **terms}
        with publisher.begin_edition(name, checkpoint.schema, metadata, **about) as draft:
            for each, tensor in checkpoint.tensors():
                draft.write(each, tensor)
            number = draft.commit_edition()
        (record,) = [edition for edition in publisher.editions(name) if edition.number == number]
    seconds, tensors = time.perf_counter() - started, len(checkpoint.schema.tensors)
    done |= {"version": number, "edition": dataclasses.asdict(record), "active": False, "tensors": tensors}
    done |= {"nbytes": record.nbytes, "seconds": round(seconds, 4), "gbps": round(record.nbytes / seconds / 1e9, 3)}
    return number


def opened_checkpoint(part: str, directory: Path, strip: str = "") -> tuple[Checkpoint, dict[str, str]]:
    """A directory and what goes into its manifest. Raises CheckpointError."""
    checkpoint = Checkpoint(directory, strip="" if part.startswith(LORA) else strip)
    adapter_config = directory / "adapter_config.json"
    if not part.startswith(LORA):
        if adapter_config.exists() and not (directory / "config.json").exists():
            raise CheckpointError(str(directory), "holds an adapter: push it with --part lora/NAME")
        return checkpoint, {}
    raw = read_inside(adapter_config, MAX_CONFIG)
    try:
        return checkpoint, Adapter((), orjson.loads(raw)).metadata
    except (orjson.JSONDecodeError, PublishError):
        raise CheckpointError(
            str(directory), "its adapter_config.json is not a JSON object: save it with PEFT"
        ) from None


def push_delta(
    stream: BinaryIO,
    *,
    upload_id: str,
    onto: int | None = None,
    store: str | None,
    model: str,
    lineage: str = "push",
    activate: bool = True,
    timeout_s: float = 600.0,
    requested_by: str = "",
    reason: str = "",
    sign: Path | None = None,
    done: dict[str, Any] | None = None,
) -> int:
    """Publish the version that `stream` holds (publish/delta.py); returns its number. `done` as in `push`, `onto` as in
    `publish_delta`.

    Raises PublishError, and whatever `Publisher.begin` raises.
    """
    done = {} if done is None else done
    how: dict[str, Any] = {"lineage": lineage, "requested_by": requested_by, "reason": reason, "sign": sign}
    with Publisher(store, model=model, new_model=True, **how) as publisher:
        started = time.perf_counter()
        applied = publish_delta(stream, publisher, upload_id=upload_id, onto=onto)
        version = applied.record.version
        done |= _told(applied.record, time.perf_counter() - started)
        done |= {"received": applied.received, "duplicate": applied.duplicate}
        if activate:
            done |= {"active": True, "not_flipped": publisher.activate(version, timeout_s=timeout_s).not_flipped}
    return version


def _told_to_go() -> bool:
    """Get everything ready, then wait for the line that says that the file is whole; False if it never comes."""
    fingerprint.warm()
    return sys.stdin.readline() == "go\n"


def _told(record: VersionRecord, seconds: float) -> dict[str, Any]:
    return {
        "version": record.version,
        "manifest_digest": record.manifest_digest,
        "base_version": record.base_version,
        "parts": [dataclasses.asdict(part) for part in record.parts],
        "active": False,
        "tensors": record.tensors,
        "nbytes": record.nbytes,
        "seconds": round(seconds, 4),
        "gbps": round(record.nbytes / seconds / 1e9, 3),
    }


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """Raises PublishError."""
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as stream:
            yield stream
    except OSError as error:
        raise delta_error(f"{path} cannot be read ({error.strerror})") from error


def _named(argument: str) -> tuple[str, Path]:
    part, found, directory = argument.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{argument!r} is not PART=DIR")
    return part, Path(directory)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m weightsync.push", description="Publish a Hugging Face checkpoint.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="directory with *.safetensors")
    what.add_argument("--delta", metavar="FILE", help="a version sent by a RemotePublisher; - is standard input")
    parser.add_argument("--part", default=BASE, help='what DIR is: "draft" or "lora/NAME" (default: the base model)')
    parser.add_argument(
        "--with", dest="more", action="append", default=[], type=_named, metavar="PART=DIR", help="one more part of it"
    )
    parser.add_argument("--edition", metavar="NAME", help="DIR holds an adapter: an edition of it, without a swap")
    parser.add_argument("--percent", type=float, default=100.0, help="with --edition: its share of the requests")
    parser.add_argument("--keep", type=int, default=3, help="with --edition: newest editions that stay (default: 3)")
    parser.add_argument("--max-age", type=float, help="with --edition: seconds after which older ones go")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="PART",
        help="a part that it takes away; then DIR may be left out",
    )
    parser.add_argument(
        "--cast", action="store_true", help="convert floating-point tensors to the dtypes that are served"
    )
    parser.add_argument("--strip", default="", metavar="PREFIX", help="taken away where a tensor's name begins with it")
    parser.add_argument("--when-told", action="store_true", help="read the delta after the line `go` on standard input")
    parser.add_argument("--upload-id", help="the same id again gives the same version")
    parser.add_argument(
        "--onto", type=int, help="with --delta: the version that it carries on (default: the active one)"
    )
    parser.add_argument(
        "--store",
        default=os.environ.get(STORE_ENV),
        help=f"store URL (default: {STORE_ENV}, or that of the server here)",
    )
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--lineage", default="push", help="who publishes; one at a time per name (default: push)")
    parser.add_argument("--step", type=int, help="training step to note down")
    parser.add_argument("--requested-by", default="", help="who is named in the ledger (default: the lineage)")
    parser.add_argument("--reason", default="", help="why, for the ledger")
    parser.add_argument("--sign-key", type=Path, help="private key in PEM that signs it (default: HOTSWAP_SIGN_KEY)")
    parser.add_argument("--no-activate", action="store_true", help="make it ready, do not swap it in")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds the swap may take (default: 600)")
    parser.add_argument(WAIT, action="store_true", help="alone: read the options from standard input")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    return parser


def _print(done: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(orjson.dumps(done).decode())
    elif "error" in done:
        print(f"error: {done['error']['message']}", file=sys.stderr)
    else:
        state = "active" if done["active"] else "ready"
        print(
            f"version {done['version']} is {state}: {done['tensors']} tensors, {done['nbytes']:,} bytes in "
            f"{done['seconds']:.2f} s ({done['gbps']:.2f} GB/s)"
        )


if __name__ == "__main__":
    sys.exit(main())
