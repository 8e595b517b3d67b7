"""The code inside the sandbox: model-written programs, one process for each test case. Standard library only.

`python -I -S sandboxed.py` reads a job, one line of JSON on standard input, and writes a line of JSON for each case:
`{"value": TEXT}` as `canonical` spells it, `{"output": TEXT}` or `{"error": TEXT}`. A case with `errors` has what was
raised in its output. It knows no expected results: whoever asked compares. A program may end, kill or flood anything in
here; at worst its own cases fail.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

CHUNK = 1 << 16
LOOK_S = 0.02  # how often memory is looked at
KINDS: tuple[Any, ...] = (int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)


def main() -> None:
    """Do the job on standard input."""
    job = json.loads(sys.stdin.buffer.readline())
    if job["uid"]:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    set_dumpable = 4  # with 0, programs of the same user cannot open our descriptors under /proc
    ctypes.CDLL(None).prctl(set_dumpable, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # number one gets no signal from inside that it has no handler for
    os.chdir(job["directory"])
    for number, case in enumerate(job["cases"]):
        outcome = run_case(job, case)
        try:
            os.write(job["replies"], json.dumps({"case": number, **outcome}).encode() + b"\n")
        except BrokenPipeError:
            return  # whoever asked has died


def run_case(job: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """One case in a process of its own."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        run_program(job, case, write_end)
    os.close(write_end)
    memory = job["memory_bytes"] if job["alone"] else None  # elsewhere nobody can say which processes are the case's
    data, problem = collect(read_end, job["case_timeout_s"], job["output_bytes"], job["replies"], memory)
    os.close(read_end)
    end(child, alone=job["alone"])
    if problem:
        return {"error": problem}
    if "input" in case:
        return {"output": base64.b64encode(data).decode()}
    text = data.decode(errors="replace")
    return {"value": text[1:]} if text.startswith("v") else {"error": text[1:] or "it ended without a result"}


def collect(source: int, seconds: float, limit: int, replies: int, memory: int | None) -> tuple[bytes, str]:
    """The bytes from a pipe until its end, and the problem with them. `memory`: of all processes together."""
    pieces: list[bytes] = []
    size, deadline = 0, time.monotonic() + seconds
    ready = select.poll()
    ready.register(source, select.POLLIN)
    ready.register(replies, 0)  # an error there is that nobody reads them any more
    look_at = time.monotonic()
    while True:
        now = time.monotonic()
        if memory is not None and now >= look_at:
            if memory_of_others() > memory:
                return b"", f"its processes took over {memory} bytes of memory together"
            look_at = now + LOOK_S
        found = dict(ready.poll(max(0.0, min(deadline, look_at if memory is not None else deadline) - now) * 1e3))
        if not found:
            if time.monotonic() >= deadline:
                return b"", f"it took over {seconds:g} s"
            continue
        if replies in found:
            return b"", "whoever asked has died"
        piece = os.read(source, CHUNK)
        if not piece:
            return b"".join(pieces), ""
        size += len(piece)
        if size > limit:
            return b"", f"it wrote over {limit} bytes"
        pieces.append(piece)


def memory_of_others() -> int:
    """Bytes that all other processes in here hold, without the pages that each has from us by its birth."""
    mine = memory_of("self")
    return sum(max(0, memory_of(name) - mine) for name in os.listdir("/proc") if name.isdecimal() and name != "1")


def memory_of(process: str) -> int:
    """Bytes that a process holds and that no file holds; 0 for one that has ended."""
    try:
        with open(f"/proc/{process}/status", "rb") as status:
            lines = status.read().split(b"\n")
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"RssAnon:", b"RssShmem:")))


def end(child: int, *, alone: bool) -> None:
    """Kill what the case has left, and wait for it: in a process namespace of our own, where we are number one,
    everybody else. The dead count as processes until then."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL) if alone else os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
        while alone:
            os.waitpid(-1, 0)


def run_program(job: dict[str, Any], case: dict[str, Any], channel: int) -> None:
    """In the child; does not return."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 2)
    if "input" in case:
        source, sink = os.pipe()
        if os.fork() == 0:  # feeds it, as a pipe holds no more than 64 KB
            os.close(source)
            os.close(channel)
            feed(sink, case["input"].encode())
        os.close(sink)
        os.dup2(source, 0)
        os.dup2(channel, 1)  # in the place of the replies
        os.close(channel)
    else:
        os.dup2(null, 0)
        os.dup2(null, 1)
    limit(job)
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(job["program"], "program.py", "exec"), namespace)  # noqa: S102 - what the sandbox is for
        if "input" not in case:
            exec(compile(case["setup"], "tests.py", "exec"), namespace)  # noqa: S102
            value = eval(compile(case["expression"], "tests.py", "eval"), namespace)  # noqa: S307
            os.write(channel, b"v" + canonical(value, tuples=case.get("tuples", True)).encode())
    except SystemExit:
        pass
    except BaseException as error:
        if "input" not in case:
            os.write(channel, f"e{type(error).__name__}: {error}".encode(errors="replace")[:CHUNK])
        elif case.get("errors"):
            with contextlib.suppress(BaseException):
                print(f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(BaseException):  # the program may have closed it
            sys.stdout.flush()
        os._exit(0)


def canonical(value: Any, *, tuples: bool = True) -> str:
    """A text that two values share exactly if they are equal, so that whoever asked reads no value that a program made.

    `tuples`: whether a tuple differs from a list. A value of a subclass (Counter, a named tuple) is written as its base
    type writes it. Raises TypeError for what equals no literal, RecursionError.
    """
    kind: Any = next((base for base in KINDS if issubclass(type(value), base)), type(value))
    if kind is int or (kind is float and float.is_integer(value)):
        return int.__repr__(value if kind is int else float.__int__(value))
    if kind is complex and not value.imag:
        return canonical(value.real)
    if kind in (float, complex, str, bytes):
        return kind.__repr__(value)
    if value is None or value is ...:
        return repr(value)
    if kind is bytearray:
        return bytes.__repr__(bytes(value))
    if kind in (list, tuple):
        inside = ",".join(canonical(item, tuples=tuples) for item in kind.__iter__(value))
        return f"({inside})" if kind is tuple and tuples else f"[{inside}]"
    if kind in (set, frozenset):
        return "{" + ",".join(sorted(canonical(item) for item in kind.__iter__(value))) + "}"
    if kind is dict:
        pairs = (f"{canonical(key)}:{canonical(item, tuples=tuples)}" for key, item in dict.items(value))
        return "{:" + ",".join(sorted(pairs)) + "}"
    if hasattr(value, "as_integer_ratio"):  # a Decimal or a Fraction
        above, below = value.as_integer_ratio()
        if (above / below).as_integer_ratio() == (above, below):
            return canonical(above / below)
    raise TypeError(f"a {kind.__name__} is no literal")


def feed(sink: int, data: bytes) -> None:
    """Write a case's input, and end."""
    with contextlib.suppress(BaseException):  # the program does not read it
        while data:
            data = data[os.write(sink, data) :]
    os._exit(0)


def limit(job: dict[str, Any]) -> None:
    """Resource limits of the program."""
    seconds = int(job["case_timeout_s"]) + 1
    for what, value in (
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, job["disk_bytes"]),
        (resource.RLIMIT_NPROC, job["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


if __name__ == "__main__":
    main()
