"""The stand-in's own functions, which CUDA does not have: settings, counters, and what torch tells it."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from typing import Any

LIBRARY = "libcudart.so.13"
Settings = Mapping[str, int]
"""`late`: streams are adversarial; `poison`: memory that is new or was given back holds rubbish; `devices`; `mib` of
memory of each; `pin`: 0 where host memory cannot be registered; `trace`."""


def is_loaded() -> bool:
    """Whether this process has the stand-in in place of CUDA's runtime."""
    return LIBRARY in os.environ.get("LD_PRELOAD", "")


@functools.cache
def library() -> Any:
    found = ctypes.CDLL(LIBRARY)
    found.standin_get.restype = ctypes.c_long
    return found


def configure(settings: Settings) -> None:
    """To be called before torch asks for a device. Raises ValueError."""
    for name, value in settings.items():
        if library().standin_set(name.encode(), ctypes.c_long(value)):
            raise ValueError(f"the stand-in has no setting {name!r}")


def ask(name: str) -> int:
    """A setting or a counter: `captured` and `replayed` graphs, `kernels` that were launched and did nothing, `queued`
    work, bytes of the `largest_to_host` copy, bytes `used0` of the first device. Raises ValueError."""
    found = int(library().standin_get(name.encode()))
    if found < 0:
        raise ValueError(f"the stand-in counts no {name!r}")
    return found


def hold(device: int, nbytes: int) -> None:
    """Another process holds so much of the device from now on."""
    library().standin_hold(device, ctypes.c_size_t(nbytes))


def hold_all_but(device: int, nbytes: int) -> None:
    """Another process takes all that is free of the device, but `nbytes`."""
    hold(device, 0)
    hold(device, max(0, (ask("mib") << 20) - ask(f"used{device}") - nbytes))


def copied_to_host(nbytes: int) -> None:
    """For `largest_to_host`; 0 counts anew."""
    library().standin_to_host(ctypes.c_size_t(nbytes))
