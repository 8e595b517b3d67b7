"""The process that tries grammars out: python helper.py FD PARENT. It imports no vLLM and nothing of this project.

It speaks over the socket FD, in messages of four bytes of length and JSON. The first is the kit: tokenizers and limits.
It answers that with {"ready": true}, and then does one trial per message, several side by side:

    {"id": 1, "attempts": [["xgrammar", "json", "{...}"], ["guidance", "grammar", "{...}"]]}
    {"id": 1, "failed": "time" | "memory" | "crash" | "mask" | null, "errors": ["", "..."]}     one error per attempt

The libraries are imported once. Each trial runs in a forked child, whose memory and CPU time the kernel limits: what
happens to the child happens to nobody else, and to try the next one costs a fork.
"""

import collections
import contextlib
import ctypes
import json
import os
import random
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1
PAGE = os.sysconf("SC_PAGE_SIZE")
NICE = 5  # what decodes goes first
STARVED = 20  # how many times its CPU seconds a trial may take by the clock, on a host that has no time for it
PLACE = re.compile(r"^\[[\d:]+\] \S+: ")  # in xgrammar's own sources
STEPS = 64  # tokens for which a mask is made, as decoding would
BRANCHES = 4  # ways on from one mask that are followed
MOST_MASK_S = 0.1  # of CPU per token: every stream of the engine waits while it makes one


class Compilers:
    """The libraries, set up as vLLM sets them up. Each method raises what its library raises."""

    def __init__(self, kit: dict[str, Any]) -> None:
        self._kit = kit
        self._xgrammar: Any = None
        self._guidance: Any = None
        if kit.get("xgrammar") is not None:
            import xgrammar

            info = xgrammar.TokenizerInfo.deserialize_json(kit["xgrammar"])
            # Each way on in a grammar begins with some byte, so tokens of one byte reach all of them.
            self._bytewise = {token for token, word in enumerate(info.decoded_vocab) if len(word) == 1}
            self._xgrammar = xgrammar.GrammarCompiler(info, max_threads=kit["threads"], cache_enabled=False)
        if kit.get("guidance") is not None:
            import llguidance

            made = kit["guidance"]
            with contextlib.suppress(ValueError):  # some decoders of tokenizers are unknown to it
                self._guidance = llguidance.LLTokenizer(
                    made["tokenizer"], n_vocab=made["n_vocab"], eos_token=made["eos"]
                )

    def try_out(self, backend: str, kind: str, text: str) -> None:
        """Compile `text`, and make the masks of a few tokens. TimeoutError: each token would take longer
        than all other streams may wait."""
        if backend == "xgrammar":
            self._try_masks(self.xgrammar(kind, text))
        else:
            self.guidance(text)

    def xgrammar(self, kind: str, text: str) -> Any:
        """As vLLM's XgrammarBackend.compile_grammar; the compiled grammar."""
        compiler = self._xgrammar
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "lark":
            return compiler.compile_lark(text)
        if kind == "grammar":
            return compiler.compile_grammar(text)
        if kind == "structural_tag":
            return self._structural_tag(json.loads(text), text)
        spaces, separators = self._kit["any_whitespace"], self._kit["separators"]
        return compiler.compile_json_schema(text, any_whitespace=spaces, separators=separators and tuple(separators))

    def _structural_tag(self, tag: dict[str, Any], text: str) -> Any:
        import xgrammar

        compiler = self._xgrammar
        if "structures" not in tag:
            return compiler.compile_structural_tag(text)
        items = [
            xgrammar.StructuralTagItem(begin=s["begin"], schema=json.dumps(s["schema"]), end=s["end"])
            for s in tag["structures"]
        ]
        return compiler.compile_structural_tag(items, tag["triggers"])

    def guidance(self, text: str) -> None:
        """As vLLM's GuidanceBackend.compile_grammar: `text` is a grammar of llguidance's own."""
        import llguidance

        if self._guidance is None:
            raise ValueError("llguidance cannot work with the tokenizer of this model")
        matcher = llguidance.LLMatcher(self._guidance, text, log_level=0)
        if error := matcher.get_error():
            raise ValueError(error)

    def _try_masks(self, compiled: Any) -> None:
        """Makes the masks of `STEPS` tokens: one by one of the oldest branch that has none, and of the newest."""
        import numpy as np
        import xgrammar

        branches = collections.deque([xgrammar.GrammarMatcher(compiled)])
        mask = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
        chance = random.Random(0)  # noqa: S311 - the same branches in each run
        for step in range(STEPS):
            if not branches:
                return
            matcher = branches.pop() if step % 2 else branches.popleft()
            began = time.process_time()
            matcher.fill_next_token_bitmask(mask)
            if time.process_time() - began > MOST_MASK_S:
                raise TimeoutError
            allowed = np.flatnonzero(np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little"))
            bytewise = [token for token in allowed.tolist() if token in self._bytewise]
            tokens = chance.sample(bytewise, min(len(bytewise), BRANCHES))
            tokens += chance.sample(allowed.tolist(), min(len(allowed), 1))
            for token in dict.fromkeys(tokens):
                branch = matcher.fork()
                if branch.accept_token(token) and not branch.is_terminated():
                    branches.append(branch)


class Helper:
    """Serves `channel` until its other end is closed."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        kit = self._receive()
        self._seconds, self._nbytes = kit["seconds"], kit["nbytes"]
        self._compilers = Compilers(kit)
        self._trials: dict[int, tuple[int, int]] = {}  # by the pipe that the child writes to: its process, the trial
        self._send({"ready": True})

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self._channel.fileno():
                    trial = self._receive()
                    poller.register(self._begin(trial), select.POLLIN)
                else:
                    poller.unregister(fd)
                    self._end(fd)

    def _begin(self, trial: dict[str, Any]) -> int:
        readable, writable = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _die_with(parent)
                self._limit()
                verdict = json.dumps(self._judge(trial["attempts"])).encode()
                os.write(writable, verdict[: 1 << 15])  # less than a pipe holds
                status = 0
            finally:
                os._exit(status)
        os.close(writable)
        self._trials[readable] = pid, trial["id"]
        return readable

    def _limit(self) -> None:
        """Of CPU time and of memory beyond what it was born with. The kernel enforces both."""
        os.nice(NICE)
        with open("/proc/self/statm") as f:
            born_with = int(f.read().split()[0]) * PAGE
        resource.setrlimit(resource.RLIMIT_AS, (born_with + self._nbytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        signal.setitimer(signal.ITIMER_REAL, self._seconds * STARVED)

    def _judge(self, attempts: list[list[str]]) -> dict[str, Any]:
        errors = []
        for backend, kind, text in attempts:
            try:
                self._compilers.try_out(backend, kind, text)
                errors.append("")
            except TimeoutError:
                return {"failed": "mask"}
            except MemoryError:
                return {"failed": "memory"}
            except Exception as error:  # whatever a library says of a grammar
                if "bad_alloc" in str(error):
                    return {"failed": "memory"}
                errors.append(PLACE.sub("", str(error)).strip()[:500] or type(error).__name__)
        return {"failed": None, "errors": errors}

    def _end(self, readable: int) -> None:
        pid, number = self._trials.pop(readable)
        said = os.read(readable, 1 << 16)
        os.close(readable)
        _, status = os.waitpid(pid, 0)
        if not said or status:
            by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            timed = {signal.SIGPROF: "time", signal.SIGALRM: "starved"}
            # A library that cannot allocate aborts, where it does not raise.
            said = json.dumps({"failed": timed.get(by, "memory" if by == signal.SIGABRT else "crash")}).encode()  # type: ignore[call-overload]
        self._send({"id": number, **json.loads(said)})

    def _receive(self) -> Any:
        (length,) = struct.unpack("!I", self._exactly(4))
        return json.loads(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._channel.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self._channel.sendall(struct.pack("!I", len(data)) + data)


def _die_with(parent: int) -> None:
    """Be killed when the process `parent`, which began this one, has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    _die_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the instance
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # before the instance itself
    with contextlib.suppress(EOFError, ConnectionError):  # the instance is gone
        Helper(channel).run()


if __name__ == "__main__":
    main()
