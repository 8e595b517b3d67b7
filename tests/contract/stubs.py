"""Client classes out of packages that cannot be imported here, and what stands in for what those import.

A stub is a part of the server's side, or asks for a GPU. The module of the client itself is the package's, unchanged.
"""

from __future__ import annotations

import base64
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import pickle
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Stubs = Mapping[str, Mapping[str, Any]]  # module -> its names


class ServerArgs:
    """SGLang's: the options of the server that an adapter starts, of which it reads where that server listens."""

    node_rank, tp_size, is_embedding = 0, 1, False

    def __init__(self, host: str, port: int, api_key: str) -> None:
        self.host, self.port, self.api_key = host, port, api_key

    def resolve_once(self) -> None: ...

    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def pickled(value: Any, output_str: bool) -> str:
    """Handles to device memory, as SGLang packs them."""
    return base64.b64encode(pickle.dumps(value)).decode()


# multiprocessing's, of a server that is there already.
PROCESS = types.SimpleNamespace(pid=0, start=lambda: None, is_alive=lambda: True)
SGLANG: Stubs = {
    "IPython.display": {"HTML": None, "display": None},
    "sglang.srt.arg_groups.overrides": {"resolving_view": lambda arguments: arguments},
    "sglang.srt.arg_groups.serving_hook": {"ssl_verify_of": lambda _: True},
    "sglang.srt.entrypoints.http_server": {"launch_server": None},
    "sglang.srt.server_args": {"ServerArgs": ServerArgs},
    "sglang.srt.utils": {
        "MultiprocessingSerializer": types.SimpleNamespace(serialize=pickled),
        "kill_process_tree": lambda *_, **__: None,
    },
}
TRL: Stubs = {"accelerate.logging": {"get_logger": logging.getLogger}}  # Accelerate's wants a trainer's ranks
# verl names the release of SGLang that it is for, an older one.
VERL: Stubs = SGLANG | {
    "sglang.srt.entrypoints.EngineBase": {"EngineBase": object},
    "sglang.srt.managers.io_struct": {"UpdateWeightsFromTensorReqInput": types.SimpleNamespace},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the packages `tops` below `root`, and stubs. A package's own __init__, which may import
    everything, is not run."""

    def __init__(self, root: Path, tops: set[str], stubs: Stubs) -> None:
        self._root, self._tops, self._stubs = root, tops, stubs

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        path = self._root.joinpath(*name.split("."))
        if name.partition(".")[0] not in self._tops:
            return None
        if name in self._stubs:
            return importlib.machinery.ModuleSpec(name, self)
        if path.with_suffix(".py").exists():
            return importlib.util.spec_from_file_location(name, path.with_suffix(".py"))
        if path.is_dir() or any(stub.startswith(f"{name}.") for stub in self._stubs):
            package = importlib.machinery.ModuleSpec(name, None, is_package=True)
            package.submodule_search_locations = [str(path)]
            return package
        return None

    def create_module(self, _: object) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self._stubs[module.__name__])


def load(root: Path, names: Sequence[str], stubs: Stubs) -> list[Any]:
    """The modules `names` of the package that is unpacked in `root`. Nothing of them stays in sys.modules."""
    tops = {name.partition(".")[0] for name in (*names, *stubs)}
    before, finder = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in tops}, _Finder(root, tops, stubs)
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        found: list[Any] = [importlib.import_module(name) for name in names]
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] in tops]:
            del sys.modules[name]
        sys.modules.update(before)
    for module in found:
        if hasattr(module, "multiprocessing"):
            module.multiprocessing = types.SimpleNamespace(Process=lambda **_: PROCESS)
    return found
