"""`python -m weightsync.bucket URL DIR --model NAME`: a Hugging Face checkpoint as the next version of a bucket.

With `--part draft` or `--part lora/NAME` DIR holds the draft model or a PEFT adapter. A version by this command is
always in full. Exit status 0, or 1 with what is wrong on standard error. `hotswap weights list --bucket URL` lists what
is there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from weightsync.bucket.publisher import BucketPublisher
from weightsync.control.parts import BASE
from weightsync.errors import WeightSyncError
from weightsync.publish.checkpoint import read_config
from weightsync.push import opened_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        checkpoint, metadata = opened_checkpoint(options.part, options.directory)
        publisher = BucketPublisher(options.url, model=options.model, keep=options.keep, sign=options.sign_key)
        noted: dict[str, Any] = {"step": options.step, "source": str(options.directory.resolve())}
        found = read_config(options.directory) if options.part == BASE else None
        noted |= {"config": orjson.loads(found) if found else None, "metadata": metadata, "part": options.part}
        publisher.publish(checkpoint.tensors(), **noted)
        print(orjson.dumps(publisher.last).decode())
    except WeightSyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m weightsync.bucket", description="Versions in an object store.")
    parser.add_argument("url", metavar="URL", help="such as s3://BUCKET/RUN; any URL of fsspec's")
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory with *.safetensors")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--part", default=BASE, help='what DIR is: "draft" or "lora/NAME" (default: the base model)')
    parser.add_argument("--step", type=int, help="training step to note down")
    parser.add_argument("--keep", type=int, default=3, help="versions that stay there (default: 3)")
    parser.add_argument("--sign-key", type=Path, help="private key in PEM that signs it (default: HOTSWAP_SIGN_KEY)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
