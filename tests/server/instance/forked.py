"""A program for test_fork_server.py: forks a server, and starts processes as vLLM does. Prints what they say."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from server.instance.fork_server import fork_from_here

SAID_LATER = "HOTSWAP_TEST_SAID_LATER"


def said() -> dict[str, Any]:
    return {"pid": os.getpid(), "vllm": "vllm.v1.engine.core" in sys.modules, "later": os.environ.get(SAID_LATER)}


def nested(pipe: Any) -> None:
    from vllm.v1.executor.multiproc_executor import get_mp_context

    pipe.send(said())
    os.environ[SAID_LATER] = "by an engine"
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


def main(what: str) -> None:
    fork_from_here()
    from vllm.v1.engine.utils import get_mp_context

    os.environ[SAID_LATER] = "by the instance"
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # the server was forked before it
    context = get_mp_context()
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
    main(sys.argv[1])
