"""The releases of Megatron-Core that this is written against (`MEGATRON_VERSIONS`), and every place where they differ.

0.16.1 is the newest for Python 3.11; 0.19 wants 3.12. Code asks here for what another release has elsewhere or in
another shape, and no other module looks at the version. `tests/contract/test_megatron.py` compares every name
that is used with the sources of both releases, installed or not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from trainer.errors import ModelError

MEGATRON_VERSIONS = ("0.16.1", "0.19.2")


@functools.cache
def release() -> str:
    """The installed release, of `MEGATRON_VERSIONS`. Raises ModelError."""
    found = installed()
    if found is None or found not in MEGATRON_VERSIONS:
        state = f"Megatron-Core {found} is installed" if found is not None else "Megatron-Core is not installed"
        advice = "install one of them (docs/install.md)"
        raise ModelError(f"{state}, and Hotswap works with {' or '.join(MEGATRON_VERSIONS)}: {advice}")
    return found


def installed() -> str | None:
    """The version of megatron-core; None where it is not installed."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


def feed_forward(layer: Any) -> Any:
    """The submodules of the feed-forward part in a layer's specification, to be changed in place: `linear_fc1` and
    `linear_fc2`, or of a mixture `router`. 0.19 has a partial call where 0.16 has a specification."""
    part = layer.submodules.mlp
    return part.submodules if release() == "0.16.1" else part.keywords["submodules"]


def load_strategies() -> tuple[Any, ...]:
    """The named strategies for `dist_checkpointing.load` to read with: the directory is not to choose among all that
    Megatron has. 0.19 keeps what is no tensor among the shards, and reads `common.pt` by itself where it finds one."""
    sharded = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    if release() != "0.16.1":
        return (sharded.TorchDistLoadShardedStrategy(),)
    common = importlib.import_module("megatron.core.dist_checkpointing.strategies.common")
    return sharded.TorchDistLoadShardedStrategy(), common.TorchCommonLoadStrategy()


@contextlib.contextmanager
def reading_with(reader: Callable[[Any], Any]) -> Iterator[None]:
    """Megatron reads checkpoints through `reader(directory)` within the body; it has no setting for that. 0.19 has the
    name in two modules."""
    places: list[Any] = [importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")]
    if release() != "0.16.1":
        places.append(importlib.import_module("megatron.core.dist_checkpointing.serialization"))
    original = [place._get_filesystem_reader for place in places]
    for place in places:
        place._get_filesystem_reader = lambda path, *_, **__: reader(path)
    try:
        yield
    finally:
        for place, plain in zip(places, original, strict=True):
            place._get_filesystem_reader = plain
