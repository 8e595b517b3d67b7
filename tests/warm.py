"""Processes forked from one that has imported their libraries once, which saves each its imports.

There are four such warm processes, which all workers share: ENGINES has vLLM, GATEWAYS the gateway (compiled where that
was built), TRAINERS has Megatron-Core, SYNC has what peers and processes that publish import of weightsync. (BARE has
nothing: test_forks.py starts one to see what becomes of orders.) They are what `hotswap up` forks instances from
(server/up/forks.py), but for this: they listen, and the libraries that an instance begins with are not loaded.
`install()` has every `hotswap instance` and every gateway that this process starts (server/up/processes.py) forked from
the first two.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from server.up import processes
from server.up.forks import Forked, Forks
from tests.started.experts import DIRECTORY
from tests.started.sitecustomize import TEST
from tests.waiting import wait_until
from weightsync.dying import with_me
from weightsync.format import fingerprint

ENGINES, GATEWAYS, TRAINERS, SYNC, BARE = "engines", "gateways", "trainers", "sync", "bare"
MODULES = {
    ENGINES: (
        "server.cli.app", "server.instance.engine", "server.instance.generate", "server.instance.grammars.guard",
        "server.instance.main", "server.instance.media", "server.instance.middleware", "server.instance.openapi",
        "server.instance.replay", "server.instance.sidecar", "server.instance.hosts", "transformers",
        "vllm.entrypoints.openai.api_server", "vllm.model_executor.models.llama", "vllm.model_executor.models.qwen2",
        "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor",
        "vllm.v1.executor.uniproc_executor", "vllm.v1.spec_decode.draft_model", "vllm.v1.worker.cpu_model_runner",
        "vllm.v1.worker.cpu_worker", "weightsync.vllm_engine.backend", "weightsync.vllm_engine.engine_core.core",
        "weightsync.vllm_engine.staging.stager",
    ),
    GATEWAYS: ("server.gateway.app", "server.gateway.main"),
    TRAINERS: (
        "trainer.faults.supervision", "trainer.loop", "trainer.main", "trainer.api.finetuning.routes",
        "tests.trainer.cases", "torch.distributed._composable.fsdp", "transformers.models.auto.tokenization_auto",
        "transformers.models.qwen2.tokenization_qwen2", "transformers.utils.chat_template_utils",
    ),
    SYNC: (
        "weightsync.publish.delta", "weightsync.peer.__main__", "weightsync.peer.copies",
        "weightsync.publish.checkpoint", "weightsync.publish.publisher", "weightsync.store.sqlite",
        "weightsync.transport.tcp",
    ),
    BARE: (),
}  # fmt: skip
_ADDRESS = "HOTSWAP_TEST_WARM_"


def shared(kind: str) -> str:
    """Where the warm process of this kind listens. The first who asks starts it, and it ends with that process; all
    processes that one starts from then on share it. It imports nothing before somebody connects."""
    variable = _ADDRESS + kind.upper()
    if variable not in os.environ:
        address = os.path.join(tempfile.mkdtemp(prefix="hotswap-warm-"), "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()
            fd, ours = listener.fileno(), f"tests.warm:prepare_{kind}"
            command = [sys.executable, "-m", "server.up.forks", str(fd), ours, str(int(signal.SIGKILL))]
            subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL, preexec_fn=with_me())
        os.environ[variable] = address
        atexit.register(shutil.rmtree, os.path.dirname(address), ignore_errors=True)
    return os.environ[variable]


@functools.cache
def warm(kind: str) -> Forks:
    return connected(kind)


def connected(kind: str) -> Forks:
    """Forks over a connection of their own. Processes that they have started are killed when the connection ends.

    Returns when the warm process has imported what it is to import, which no time limit of a test is meant for.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(shared(kind))
    forks = Forks(connection)
    wait_until(lambda: forks.look() or forks.ready, 600, f"the warm process of {kind} has imported")
    return forks


def piped(kind: str, args: Sequence[str], stdin: int | None = None) -> tuple[Forked, IO[bytes]]:
    """A process `python -m ARGS` of this kind, and what it prints. Its errors go where those of this process do."""
    read_end, write_end = os.pipe()
    given = {1: write_end, 2: 2} | ({0: stdin} if stdin is not None else {})
    try:
        return warm(kind).start(args, os.environ, Path(os.devnull), given), open(read_end, "rb")
    finally:
        os.close(write_end)


def install() -> None:
    """Instances and gateways that this process starts are forked from now on."""
    cold = processes.Child._process

    def process(self: Any) -> Any:
        changed = DIRECTORY in os.environ  # what changes vLLM as it is imported
        if self._args[:2] == ["server.cli", "instance"] and "--headless" not in self._args and not changed:
            env = self._env | {TEST: os.environ.get(TEST, "")}  # of the test that has it started again
            return warm(ENGINES).start(self._args, env, self.log, self._inherited)
        if self._args[0] == "server.gateway":
            return warm(GATEWAYS).start(self._args, self._env, self.log, self._inherited)
        return cold(self)

    processes.Child._process = process  # type: ignore[method-assign]


def prepare_engines() -> None:
    from server.instance.fork_server import import_engine
    from server.instance.main import prepare_environment

    prepare_environment()
    import_engine()
    _import(ENGINES)


def prepare_gateways() -> None:
    _import(GATEWAYS)


def prepare_trainers() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # CUDA must not start before a fork
    from trainer.main import quiet
    from trainer.megatron import shim

    quiet()
    shim.install()
    _import(TRAINERS)


def prepare_sync() -> None:
    _import(SYNC)
    fingerprint._kernels()  # numba, whose import takes longer than all else that a push does


def prepare_bare() -> None:
    """Nothing."""


def _import(kind: str) -> None:
    for name in MODULES[kind]:
        importlib.import_module(name)
