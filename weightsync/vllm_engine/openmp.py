"""The OpenMP runtimes of a process: each library may have brought one of its own."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path


def openmp_setters() -> list[Callable[[int], None]]:
    """`omp_set_num_threads` of every OpenMP runtime in the process; it acts on the calling thread alone."""
    maps = Path("/proc/self/maps").read_text()
    paths = sorted(set(re.findall(r"(/\S*lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)", maps)))
    return [ctypes.CDLL(path).omp_set_num_threads for path in paths]
