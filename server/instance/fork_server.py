"""vLLM's processes, and instances: forked from one that has imported vLLM, instead of new ones that import it again.

vLLM's server starts its engine and workers as new Pythons, each of which takes seconds of a core to import what the
instance has imported. So an instance that has imported vLLM forks the fork server of Python's `multiprocessing`, before
it has a second thread, and that one forks engines and workers. On CPUs some libraries must be loaded before all others
(LD_PRELOAD), and a fork has what its parent has: there an instance begins with those libraries itself. On accelerators
a process that has asked for a device cannot be forked: where the instance has, or VLLM_WORKER_MULTIPROC_METHOD says
"spawn", or vLLM has a reason of its own, vLLM starts its processes itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import context, forkserver, util
from pathlib import Path
from typing import Any, NoReturn

from weightsync.dying import die_with
from weightsync.vllm_engine.openmp import openmp_setters
from weightsync.vllm_engine.releases import for_cpus

log = logging.getLogger("hotswap.instance")
ENGINE = (
    "vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm", "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor", "vllm.v1.executor.uniproc_executor", "weightsync.vllm_engine.backend",
    "weightsync.vllm_engine.engine_core.core", "weightsync.vllm_engine.loader",
)  # fmt: skip
ON_CPUS = ("vllm.v1.worker.cpu_worker",)
ON_GPUS = ("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner")
INSTANCE = (
    "server.cli.app", "server.instance.engine", "server.instance.generate", "server.instance.grammars.guard",
    "server.instance.hosts", "server.instance.media", "server.instance.middleware", "server.instance.openapi",
    "server.instance.replay", "server.instance.sidecar", "transformers", "weightsync.vllm_engine.staging.stager",
)  # fmt: skip
OPENMP = ("libgomp", "libiomp", "libomp")
AS_IMPORTED = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
END_S = 2.0


def libraries() -> str:
    """The LD_PRELOAD that vLLM gives to its processes on CPUs. Imports neither vLLM nor PyTorch."""
    named = os.environ.get("LD_PRELOAD", "")
    if not any(name in named for name in OPENMP):
        named = ":".join(filter(None, [named, _first("torch", "libgomp*.so*", "../torch.libs", "lib")]))
    if "libtcmalloc" not in named:
        found = _first("vllm", "libtcmalloc_minimal*.so*", "libs") or _first("vllm", "libtcmalloc.so*", "libs")
        named = ":".join(filter(None, [found, named]))
    return named


def _first(package: str, pattern: str, *folders: str) -> str:
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    found = [
        p for folder in folders for root in places or () for p in (Path(root).parent / package / folder).glob(pattern)
    ]
    return os.path.normpath(found[0]) if found else ""


def begin_with_libraries() -> None:
    """Become the same command with `libraries` loaded, where vLLM needs them, unless they are, or it is too late."""
    if for_cpus() and "torch" not in sys.modules and (wanted := libraries()) != os.environ.get("LD_PRELOAD", ""):
        environment = {**os.environ, "LD_PRELOAD": wanted}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - our own argv
    with contextlib.suppress(ImportError):
        import setproctitle  # what vLLM names its processes with; it is optional there, too

        setproctitle.getproctitle()  # it finds the memory of the title only while the environment is what it was


class Process(context.ForkServerProcess):
    """Has the environment of whoever starts it, as it is then."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        if not for_cpus() and (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
            for set_threads in openmp_setters():  # OpenMP read the variable as it was when it was loaded
                set_threads(int(threads))
        super().run()


class Context(context.ForkServerContext):
    """The context that vLLM gets where it asks for a way to start processes."""

    Process = Process


class Ways:
    """Gives vLLM its way to start processes: vLLM's own function decides until this process has forked a server."""

    def __init__(self, own: Callable[[], Any]) -> None:
        self.own, self.forks = own, False

    def __call__(self) -> Any:
        return Context() if self.forks else self.own()


def import_engine() -> Ways:
    """Import what an engine and its API need, so that vLLM's modules ask the `Ways` returned how to start processes."""
    if for_cpus():
        os.environ.update(AS_IMPORTED)
    from vllm.utils import system_utils

    ways: Any = system_utils.get_mp_context
    if not isinstance(ways, Ways):
        system_utils.get_mp_context = ways = Ways(ways)  # type: ignore[assignment]
    for name in (*ENGINE, *(ON_CPUS if for_cpus() else ON_GPUS)):
        try:
            importlib.import_module(name)
        except ImportError as error:  # the start itself will say what is wrong
            log.warning("could not import %s ahead: %s", name, error)
    assert isinstance(ways, Ways)
    return ways


def prepare() -> None:
    """In the process that `hotswap up` forks instances from (server/up/forks.py): import what each would import. On an
    accelerator it never has a context, which no fork could use."""
    begin_with_libraries()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    importlib.import_module("server.instance.main").prepare_environment()
    import_engine()
    for name in INSTANCE:
        importlib.import_module(name)


def fork_from_here() -> None:
    """Fork the server that vLLM's processes, and those that they start in turn, come from. It ends when they have."""
    ways = import_engine()
    if not (for_cpus() or _forks_have_devices(ways)):
        return
    ways.forks = True
    gc.freeze()  # a collection would write to pages that all of them share
    server: Any = forkserver._forkserver
    server.ensure_running = lambda: None  # whoever starts a process through it asks first, and would start another one
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(util.get_temp_dir(), "fork-server"))  # in a folder that is this user's alone
        listener.listen()
        read, alive = os.pipe()
        us = os.getpid()
        if not (pid := os.fork()):
            os.close(alive)
            _serve(listener.detach(), read, us)
        os.close(read)
        server._forkserver_address, server._forkserver_alive_fd = listener.getsockname(), alive
    atexit.register(_end, pid, alive)


def _forks_have_devices(ways: Ways) -> bool:
    """Whether vLLM may fork here (before its server's command line asks for another way), and a fork of this process
    could use an accelerator."""
    import torch

    if ways.own().get_start_method() != "fork":
        return False
    if not (trial := os.fork()):
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return not os.waitpid(trial, 0)[1]


def _serve(listener: int, alive: int, parent: int) -> NoReturn:
    die_with(parent, signal.SIGKILL)
    try:
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)


def _end(pid: int, alive: int) -> None:
    """Wait for the server, which ends with the last process that it has forked."""
    os.close(alive)
    deadline = time.monotonic() + END_S
    with contextlib.suppress(ChildProcessError):
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
            time.sleep(0.01)
