"""On the path of every process of a test run: runs at the beginning of each.

- With HOTSWAP_TEST_CPU=avx2|avx512|avx512_bf16, torch, oneDNN, MKL and vLLM take this CPU for one of that kind.
- A process that builds one of vLLM's models adds a line to $HOTSWAP_TEST_STARTS, which tests/starts.py reads.
- With HOTSWAP_TEST_EXPERTS=DIRECTORY, data-parallel ranks share experts on a CPU (experts.py).
- What an actor on a test's Ray node starts is forked (actors.py).

Most processes import neither torch nor vLLM, so nothing is imported here that Python has not imported yet. The process
of the tests imports this module before torch.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

TOLD, STARTS = "HOTSWAP_TEST_CPU", "HOTSWAP_TEST_STARTS"
TEST = "PYTEST_CURRENT_TEST"  # a process has it from the test that started it
BUILDERS = "vllm.model_executor.model_loader.utils"
# By kind: the greatest instructions of ATen and MKL, those of oneDNN, and the beginnings of the flags that it lacks.
KINDS = {
    "avx2": ("AVX2", "AVX2", ("avx512", "avx10", "amx")),
    "avx512": ("AVX512", "AVX512_CORE", ("avx512_bf16", "avx512_fp16", "avx512_vnni", "avx10", "amx")),
    "avx512_bf16": ("AVX512", "AVX512_CORE_BF16", ("avx512_fp16", "avx10", "amx")),
}


class Changing:
    """Finds one module, and has it changed once it is loaded."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any = None, _target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == self._name else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def tell(general: str, onednn: str, lacks: tuple[str, ...]) -> None:
    """In this process, which has not imported torch yet, and in those that inherit its environment."""
    os.environ.update(ATEN_CPU_CAPABILITY=general.lower(), MKL_ENABLE_INSTRUCTIONS=general, ONEDNN_MAX_CPU_ISA=onednn)

    def leave_out(torch_cpu: Any) -> None:  # vLLM asks it
        flags = {flag: has for flag, has in torch_cpu.get_capabilities().items() if not flag.startswith(lacks)}
        torch_cpu.get_capabilities = lambda: flags

    sys.meta_path.insert(0, Changing("torch.cpu", leave_out))  # type: ignore[arg-type]


def count(builders: Any) -> None:
    builders.initialize_model = counted(builders.initialize_model)


def counted(build: Callable[..., Any]) -> Callable[..., Any]:
    import functools
    import json

    told: set[int] = set()  # a fork has its parent's, and a number of its own

    @functools.wraps(build)
    def built(*args: Any, **options: Any) -> Any:
        if (pid := os.getpid()) not in told and STARTS in os.environ:
            told.add(pid)
            line = json.dumps({"pid": pid, "test": os.environ.get(TEST, ""), "command": sys.orig_argv[1:]})
            with open(os.environ[STARTS], "ab", buffering=0) as file:
                file.write(line.encode() + b"\n")
        return build(*args, **options)

    return built


if told := KINDS.get(os.environ.get(TOLD, "")):
    tell(*told)
sys.meta_path.insert(0, Changing(BUILDERS, count))  # type: ignore[arg-type]
if "HOTSWAP_TEST_EXPERTS" in os.environ:
    import experts  # beside this file, which is on the path where the checkout is not

    sys.meta_path.insert(0, Changing(experts.COMMUNICATOR, experts.share))  # type: ignore[arg-type]
    sys.meta_path.insert(0, Changing(experts.BACKEND, experts.follow))  # type: ignore[arg-type]
    sys.meta_path.insert(0, Changing(experts.EXPERTS, experts.map_experts))  # type: ignore[arg-type]
if any(word.endswith("default_worker.py") for word in sys.orig_argv):
    import subprocess

    from tests.started import actors

    subprocess.Popen = actors.Popen  # type: ignore[misc]
