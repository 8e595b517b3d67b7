"""A program for test_fork_server.py: forks a server, and starts processes as vLLM does. Prints what they say.

`python -m tests.server.instance.forked WHAT [BUILD]`. BUILD "cuda": as with vLLM's build for GPUs; "used": as where an
import has asked for a device.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import torch

from server.instance import fork_server

SAID_LATER = "HOTSWAP_TEST_SAID_LATER"


def said() -> dict[str, Any]:
    imported = "vllm.v1.engine.core" in sys.modules and fork_server.ON_GPUS[0] in sys.modules
    later, threads = os.environ.get(SAID_LATER), torch.get_num_threads()
    return {"pid": os.getpid(), "vllm": imported, "later": later, "threads": threads}


def nested(pipe: Any) -> None:
    from vllm.v1.executor.multiproc_executor import get_mp_context

    pipe.send(said())
    os.environ |= {SAID_LATER: "by an engine", "OMP_NUM_THREADS": "3"}
    reader, writer = get_mp_context().Pipe(duplex=False)
    worker = get_mp_context().Process(target=lone, args=(writer,))
    worker.start()
    pipe.send(reader.recv())
    worker.join()
    pipe.send(worker.exitcode)


def lone(pipe: Any) -> None:
    pipe.send(said())
    sys.exit(7)


def wait(pipe: Any) -> None:
    pipe.send(said())
    time.sleep(600)


def main(what: str, build: str = "cpu") -> None:
    if build != "cpu":
        fork_server.for_cpus = lambda: False
        torch.cuda._is_in_bad_fork = lambda: build == "used"
    fork_server.fork_from_here()
    from vllm.v1.engine.utils import get_mp_context

    os.environ[SAID_LATER] = "by the instance"
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # the server was forked before it
    context = get_mp_context()
    if what == "way":
        print(context.get_start_method())
        return
    reader, writer = context.Pipe(duplex=False)
    engine = context.Process(target={"nested": nested, "wait": wait}[what], args=(writer,), name="EngineCore")
    engine.start()
    print(reader.recv(), flush=True)
    if what == "wait":
        engine.join()
    print(reader.recv(), reader.recv(), sep="\n", flush=True)
    engine.join()
    print(engine.exitcode, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
