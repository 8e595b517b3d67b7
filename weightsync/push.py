"""`python -m weightsync.push --store URL --model NAME DIR`: publish a Hugging Face checkpoint, without torch.

Exit status 0 when the version is ready (and, unless told otherwise, active), 1 when not. With --json one JSON object
goes to standard output: {"version", "active", "tensors", "nbytes", "seconds", "gbps"} or {"error": {"code", "message",
"tensor", and what is known of DETAILS}, "version"} where `version` says which one is ready all the same, if one is.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from weightsync.checkpoint import Checkpoint
from weightsync.errors import WeightSyncError
from weightsync.publisher import STORE_ENV, Publisher

DETAILS = ("expected", "got", "file", "needed", "free")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    done: dict[str, Any] = {}
    try:
        push(
            options.directory,
            store=options.store,
            model=options.model,
            lineage=options.lineage,
            step=options.step,
            activate=not options.no_activate,
            timeout_s=options.timeout,
            done=done,
        )
    except WeightSyncError as error:
        known = {name: getattr(error, name) for name in DETAILS if getattr(error, name, None) is not None}
        done = {"error": {**error.to_json(), **known}, "version": done.get("version")}
    _print(done, as_json=options.json)
    return 1 if "error" in done else 0


def push(
    directory: Path,
    *,
    store: str | None,
    model: str,
    lineage: str = "push",
    step: int | None = None,
    activate: bool = True,
    timeout_s: float = 600.0,
    done: dict[str, Any] | None = None,
) -> int:
    """Publish the checkpoint in `directory`; returns its version. What is known so far is put into `done`.

    Raises CheckpointError before anything is claimed, and whatever `Publisher.publish` raises.
    """
    done = {} if done is None else done
    checkpoint = Checkpoint(directory)
    schema = checkpoint.schema
    nbytes = sum(spec.nbytes for spec in schema.tensors.values())
    with Publisher(store, model=model, lineage=lineage) as publisher:
        started = time.perf_counter()
        with publisher.begin(schema, step=step, source=str(directory.resolve())) as draft:
            for name, tensor in checkpoint.tensors():
                draft.write(name, tensor)
            version = draft.commit(activate=activate, timeout_s=timeout_s)
        seconds = time.perf_counter() - started
        done |= {"version": version, "active": False, "tensors": len(schema.tensors), "nbytes": nbytes}
        done |= {"seconds": round(seconds, 4), "gbps": round(nbytes / seconds / 1e9, 3)}
        if activate:
            publisher.wait_active(version, timeout_s)
            done["active"] = True
    return version


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m weightsync.push", description="Publish a Hugging Face checkpoint.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory with *.safetensors")
    parser.add_argument("--store", default=os.environ.get(STORE_ENV), help=f"store URL (default: {STORE_ENV})")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--lineage", default="push", help="who publishes; one at a time per name (default: push)")
    parser.add_argument("--step", type=int, help="training step to note down")
    parser.add_argument("--no-activate", action="store_true", help="make it ready, do not swap it in")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds the swap may take (default: 600)")
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
