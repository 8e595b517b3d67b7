"""Every process of a test run that builds one of vLLM's models adds a line to a file, which tests/starts reads.

Python imports this module by its name when it starts, because its folder is on PYTHONPATH. Most processes never import
vLLM, so nothing is imported here that Python has not imported yet.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

FILE = "HOTSWAP_TEST_STARTS"
TEST = "PYTEST_CURRENT_TEST"  # a process has it from the test that started it
BUILDERS = "vllm.model_executor.model_loader.utils"


class Finder:
    """Finds the module that has vLLM's function that builds models, and wraps the function."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != BUILDERS or (spec := PathFinder.find_spec(name, path, target)) is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            module.initialize_model = counted(module.initialize_model)  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def counted(build: Callable[..., Any]) -> Callable[..., Any]:
    import functools
    import json

    told: set[int] = set()  # a fork has its parent's, and a number of its own

    @functools.wraps(build)
    def built(*args: Any, **options: Any) -> Any:
        if (pid := os.getpid()) not in told and FILE in os.environ:
            told.add(pid)
            line = json.dumps({"pid": pid, "test": os.environ.get(TEST, ""), "command": sys.orig_argv[1:]})
            with open(os.environ[FILE], "ab", buffering=0) as file:
                file.write(line.encode() + b"\n")
        return build(*args, **options)

    return built


def install() -> None:
    if not any(type(finder).__name__ == Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]


install()
