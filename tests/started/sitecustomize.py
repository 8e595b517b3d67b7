"""On the path of processes that tests start: runs at the beginning of each.

With HOTSWAP_TEST_CPU=avx2|avx512|avx512_bf16, torch, oneDNN, MKL and vLLM take this CPU for one of that kind in
the process and in all that inherit its environment. The process of the tests imports this module before torch.

What an actor on a test's Ray node starts is forked from a warm process (tests/warm.py).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

TOLD = "HOTSWAP_TEST_CPU"
# By kind: the greatest instructions of ATen and MKL, those of oneDNN, and the beginnings of the flags that it lacks.
KINDS = {
    "avx2": ("AVX2", "AVX2", ("avx512", "avx10", "amx")),
    "avx512": ("AVX512", "AVX512_CORE", ("avx512_bf16", "avx512_fp16", "avx512_vnni", "avx10", "amx")),
    "avx512_bf16": ("AVX512", "AVX512_CORE_BF16", ("avx512_fp16", "avx10", "amx")),
}
WARM = {"instance": "engines", "trainer.main": "trainers"}


def tell(general: str, onednn: str, lacks: tuple[str, ...]) -> None:
    """In this process, which has not imported torch yet, and in those that inherit its environment."""
    os.environ |= {"ATEN_CPU_CAPABILITY": general.lower(), "MKL_ENABLE_INSTRUCTIONS": general}
    os.environ["ONEDNN_MAX_CPU_ISA"] = onednn
    path = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    sys.meta_path.insert(0, TellingTorch(lacks))  # type: ignore[arg-type]


class TellingTorch:
    """Has `torch.cpu.get_capabilities`, which vLLM asks, leave out flags."""

    def __init__(self, lacks: tuple[str, ...]) -> None:
        self._lacks = lacks

    def find_spec(self, name: str, path: Any = None, _target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "torch.cpu" else None
        if spec is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(self._load, loader.exec_module)
        return spec

    def _load(self, load: Callable[[ModuleType], None], module: Any) -> None:
        load(module)
        flags = {flag: has for flag, has in module.get_capabilities().items() if not flag.startswith(self._lacks)}
        module.get_capabilities = lambda: flags


class Starting(type):
    """Makes a `subprocess.Popen`, but of the processes that a test waits for what `forked` returns."""

    def __call__(cls, args: Any, *more: Any, **how: Any) -> Any:
        words = list(args[2:4]) if isinstance(args, list) and args[1:2] == ["-m"] else []
        kind = next((WARM[word] for word in words if word in WARM), None)
        return super().__call__(args, *more, **how) if kind is None else forked(kind, args[2:], how["env"])


class Popen(subprocess.Popen, metaclass=Starting):  # type: ignore[type-arg]
    """In place of the one that Ray and actors of ours start processes with."""


def forked(kind: str, args: list[str], env: dict[str, str]) -> Any:
    """Its output comes through pipes, as an actor expects it; they end with it."""
    from tests import warm

    class Forked(warm.WarmProcess):
        def __init__(self) -> None:
            (out, self._out), (err, self._err) = os.pipe(), os.pipe()
            self.stdout, self.stderr = os.fdopen(out, "rb"), os.fdopen(err, "rb")
            log, errors = (f"/proc/{os.getpid()}/fd/{fd}" for fd in (self._out, self._err))
            started = warm.warm(kind).start(args, env, log, errors=errors)  # type: ignore[arg-type]
            super().__init__(warm.warm(kind), started.pid, args)

        def poll(self) -> int | None:
            ran = self.returncode is None
            if super().poll() is not None and ran:
                os.close(self._out)
                os.close(self._err)
            return self.returncode

    return Forked()


if told := KINDS.get(os.environ.get(TOLD, "")):
    tell(*told)
if any(word.endswith("default_worker.py") for word in sys.orig_argv):
    subprocess.Popen = Popen  # type: ignore[misc]
