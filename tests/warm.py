"""Processes forked from one that has imported their libraries once, which saves each its imports.

There are three such warm processes, which all workers share: ENGINES has vLLM, TRAINERS has Megatron-Core, SYNC has
what peers and processes that publish import of weightsync. (BARE has nothing: test_warm.py starts one to see what
becomes of orders.) `install()` has every `hotswap instance` that this process starts (server/up/processes.py) forked
from the first. A forked process is a process of its own as it is otherwise: a group, a log, an environment and
descriptors of its own, killed with this process. Two things are not as they are otherwise: the libraries that an
instance begins with are not loaded (server/instance/fork_server.py), and OMP_NUM_THREADS is that of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from server.up import processes
from tests.started.sitecustomize import TEST

ENGINES, TRAINERS, SYNC, BARE = "engines", "trainers", "sync", "bare"
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
    TRAINERS: (
        "trainer.faults.supervision", "trainer.loop", "trainer.main", "trainer.api.finetuning.routes",
        "tests.trainer.cases",
    ),
    SYNC: (
        "weightsync.format.delta", "weightsync.peer.__main__", "weightsync.peer.copies",
        "weightsync.publish.checkpoint", "weightsync.publish.publisher", "weightsync.store.sqlite",
        "weightsync.transport.tcp",
    ),
    BARE: (),
}  # fmt: skip
MOST = 1 << 20
_ADDRESS = "HOTSWAP_TEST_WARM_"


class WarmProcess:
    """What `Child` and tests use of a subprocess.Popen, of a process that a warm one has forked."""

    def __init__(self, warm: Warm, pid: int, args: list[str]) -> None:
        self._warm, self.pid, self.args, self.returncode = warm, pid, args, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._warm.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """A connection to a warm process, which kills what it forked for this one when the connection ends.

    An answer has its order's number. Who is interrupted while it waits (by the time limit of a test, say) leaves an
    answer that the next one reads: it is passed over, and a process that was started for nobody is killed.
    """

    def __init__(self, kind: str) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(shared(kind))
        self._number = 0

    def ask(self, what: dict[str, Any], descriptors: tuple[int, ...] = ()) -> Any:
        with self._lock:
            self._number += 1
            socket.send_fds(self._socket, [json.dumps({"number": self._number, **what}).encode()], descriptors)
            while (answer := self._receive())["number"] != self._number:
                if "started" in answer:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(answer["started"], signal.SIGKILL)
        if "problem" in answer:
            raise RuntimeError(answer["problem"])
        return answer["started"] if "started" in answer else answer["status"]

    def _receive(self) -> dict[str, Any]:
        raw = self._socket.recv(MOST)
        if not raw:
            raise RuntimeError("the warm process has ended; its last words are above")
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def start(
        self,
        args: list[str],
        env: dict[str, str],
        log: Path,
        inherited: tuple[int, ...] = (),
        errors: Path | None = None,
    ) -> WarmProcess:
        """Starts `python -m ARGS`. Its errors go to the log as well, unless `errors` is given."""
        files = {"log": str(log), "errors": str(errors or log)}
        order = {"args": args, "env": env, "cwd": os.getcwd(), "inherited": inherited, **files}
        return WarmProcess(self, self.ask(order, inherited), args)


def shared(kind: str) -> str:
    """Where the warm process of this kind listens. The first who asks starts it, and it ends with that process; all
    processes that one starts from then on share it. It imports nothing before somebody connects."""
    variable = _ADDRESS + kind.upper()
    if variable not in os.environ:
        address = os.path.join(tempfile.mkdtemp(prefix="hotswap-warm-"), "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()
            command = [sys.executable, "-m", "tests.warm", kind, str(listener.fileno())]
            subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)
        os.environ[variable] = address
        atexit.register(shutil.rmtree, os.path.dirname(address), ignore_errors=True)
    return os.environ[variable]


@functools.cache
def warm(kind: str) -> Warm:
    return Warm(kind)


def install() -> None:
    """Instances that this process starts are forked from now on."""
    cold = processes.Child.start

    def start(self: Any) -> None:
        if self._args[:2] == ["server.cli", "instance"] and "--headless" not in self._args:
            env = self._env | {TEST: os.environ.get(TEST, "")}  # of the test that has it started again
            self.process = warm(ENGINES).start(self._args, env, self.log, self._inherited)
        else:
            cold(self)

    processes.Child.start = start  # type: ignore[method-assign]


def _serve(kind: str, listener: socket.socket) -> None:
    """In a warm process: forks what is ordered until it is killed."""
    connection, _ = listener.accept()
    {ENGINES: _prepare_engines, TRAINERS: _prepare_trainers}.get(kind, lambda: None)()
    for name in MODULES[kind]:
        importlib.import_module(name)
    gc.freeze()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(connection, selectors.EVENT_READ, {})
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                selector.register(listener.accept()[0], selectors.EVENT_READ, {})
            elif not _answer(key.fileobj, key.data, selector):  # type: ignore[arg-type]
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]


def _answer(orders: socket.socket, ended: dict[int, int | None], selector: selectors.BaseSelector) -> bool:
    """Follow one order; False if whoever gave them is gone, and with it what it had ordered."""
    try:
        raw, descriptors, _, _ = socket.recv_fds(orders, MOST, 16)
    except ConnectionResetError:  # it was killed before it had read an answer
        raw = b""
    if not raw:
        for pid in (pid for pid, status in ended.items() if status is None):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        return False
    order = json.loads(raw)
    answer: dict[str, Any] = {"number": order["number"]}
    pid = order.get("poll")
    if "poll" not in order:
        pid = answer["started"] = os.fork()
        if not pid:
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            selector.close()
            _become(order, descriptors)
        ended[pid] = None
    elif pid in ended:
        answer["status"] = ended[pid] = _status(pid, ended[pid])
    else:
        answer["problem"] = f"this connection has started no process {pid}"
    for descriptor in descriptors:
        os.close(descriptor)
    with contextlib.suppress(BrokenPipeError):
        orders.send(json.dumps(answer).encode())
    return True


def _status(pid: int, known: int | None) -> int | None:
    if known is not None:
        return known
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _prepare_engines() -> None:
    from server.instance.fork_server import import_engine
    from server.instance.main import prepare_environment

    prepare_environment()
    import_engine()


def _prepare_trainers() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # CUDA must not start before a fork
    from trainer.main import quiet
    from trainer.megatron import shim

    quiet()
    shim.install()


def _become(order: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """In the fork: the process that was ordered."""
    processes.die_with_parent()
    os.setsid()
    for descriptor, file in ((1, order["log"]), (2, order["errors"])):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    for here, there in zip(descriptors, order["inherited"], strict=True):
        os.dup2(here, there, inheritable=True)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    setproctitle.setproctitle(" ".join([sys.executable, "-m", *order["args"]]))
    sys.argv = list(order["args"])
    sys.orig_argv = [sys.executable, "-m", *order["args"]]  # with which an instance that wakes or restarts begins anew
    status = 0
    try:
        runpy.run_module(order["args"][0], run_name="__main__", alter_sys=True)
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
    setproctitle.getproctitle()  # it finds the memory of the title only while the environment is what it was
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
