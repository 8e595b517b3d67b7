"""`python -m weightsync.bucket URL`: list the versions there; with DIR, publish a Hugging Face checkpoint as the next.

A version by this command is always in full. Exit status 0, or 1 with what is wrong on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from weightsync.bucket.objects import Bucket
from weightsync.bucket.publisher import BucketPublisher
from weightsync.errors import WeightSyncError
from weightsync.publish.checkpoint import Checkpoint, read_config


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.directory is None:
            for number in (bucket := Bucket(options.url)).numbers():
                version = bucket.read(number)
                about = {"number": number, "base": version.base, "step": version.header.step, "nbytes": version.nbytes}
                print(orjson.dumps(about | {"signed": bool(version.header.signature)}).decode())
            return 0
        checkpoint = Checkpoint(options.directory)
        publisher = BucketPublisher(options.url, model=options.model, keep=options.keep, sign=options.sign_key)
        noted: dict[str, Any] = {"step": options.step, "source": str(options.directory.resolve())}
        config = orjson.loads(found) if (found := read_config(options.directory)) else None
        publisher.publish(checkpoint.tensors(), config=config, **noted)
        print(orjson.dumps(publisher.last).decode())
    except WeightSyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m weightsync.bucket", description="Versions in an object store.")
    parser.add_argument("url", metavar="URL", help="such as s3://BUCKET/RUN; any URL of fsspec's")
    parser.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="directory with *.safetensors")
    parser.add_argument("--model", default="", help="served model name; needed with DIR")
    parser.add_argument("--step", type=int, help="training step to note down")
    parser.add_argument("--keep", type=int, default=3, help="versions that stay there (default: 3)")
    parser.add_argument("--sign-key", type=Path, help="private key in PEM that signs it (default: HOTSWAP_SIGN_KEY)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
