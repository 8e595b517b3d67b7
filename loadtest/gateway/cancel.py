"""How long after a client has left its request the upstream's connection is closed.

The upstream of the load is replaced, on the same port, by one that never finishes an answer, and looks at its sockets:

    connecting   it accepts nobody; the contender's half-open connection is found in /proc, and watched until it goes
    waiting      it has the request (of a stream) and has sent nothing
    streaming    it sends a chunk every 20 ms
    whole        it has a request without "stream" and has sent nothing
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from loadtest.gateway.contenders import KEY, Running, body, tree

STATES = ("connecting", "waiting", "streaming", "whole")
GIVE_UP_S = 2.0
SETTLE_S = 0.05
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"mock","choices":[{"index":0,'
EVENT += b'"delta":{"content":"x"},"finish_reason":null}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
PAGE = b'{"object":"list","data":[{"id":"mock","object":"model","created":1,"owned_by":"vllm"}]}'
_SYN_SENT = "02"


class Watched:
    """One request, as the upstream sees it."""

    def __init__(self, *, streams: bool) -> None:
        self.streams = streams
        self.asked = threading.Event()
        self.gone = threading.Event()
        self.gone_at = 0.0


class Observer:
    """An upstream that notices when it is left. One thread per connection; a few are open at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._next: Watched | None = None
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.listen()

    def listen(self) -> None:
        """Accepts, from now on."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Ends every connection and the listener."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for link in list(self._open):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def expect(self, *, streams: bool) -> Watched:
        """Watches the next request; what comes of those before is no longer of interest."""
        self._next = Watched(streams=streams)
        return self._next

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                self._open.add(link)
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            while (request := _read_request(link)) is not None:
                watched = self._next
                if watched is not None and b"POST /v1/chat/completions HTTP" in request:
                    self._next = None
                    _never_finish(link, watched)
                    return
                link.sendall(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(PAGE)
                )
                link.sendall(PAGE)
        except OSError:
            pass
        finally:
            self._open.discard(link)
            link.close()


def _never_finish(link: socket.socket, watched: Watched) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client = select.poll()
    client.register(link, select.POLLIN)
    if watched.streams:
        link.sendall(SSE_HEAD)
    watched.asked.set()
    with contextlib.suppress(OSError):
        while True:
            if watched.streams:
                link.sendall(CHUNK)
            if client.poll(20 if watched.streams else 60_000) and not link.recv(65536):
                break
    watched.gone_at = time.perf_counter()
    watched.gone.set()


@contextlib.contextmanager
def observing(port: int) -> Iterator[Observer]:
    """An observer in the place of the upstream."""
    observer = Observer(port)
    try:
        yield observer
    finally:
        observer.close()


def disconnect_ms(state: str, contender: Running, observer: Observer, upstream: int) -> float | None:
    """Leaves one request in `state`; milliseconds until the upstream saw it, None if over `GIVE_UP_S`."""
    if state == "connecting":
        return _leave_connecting(contender, observer, upstream)
    watched = observer.expect(streams=state == "streaming")
    client = _ask(contender.port, stream=state != "whole")
    try:
        if not watched.asked.wait(GIVE_UP_S) or (state == "streaming" and b"data: " not in _receive(client)):
            return None
        time.sleep(SETTLE_S)
        left = time.perf_counter()
    finally:
        client.close()
    return (watched.gone_at - left) * 1e3 if watched.gone.wait(GIVE_UP_S) else None


def _leave_connecting(contender: Running, observer: Observer, upstream: int) -> float | None:
    observer.close()
    try:
        with _full_listener(upstream):
            before = _half_open(upstream)
            client = _ask(contender.port, stream=True)
            try:
                held = _appears(contender, upstream, before)
                left = time.perf_counter()
            finally:
                client.close()
            while held and (elapsed := time.perf_counter() - left) < GIVE_UP_S:
                held = [(path, name) for path, name in held if _link(path) == name]
                if not held:
                    return elapsed * 1e3
            return None
    finally:
        observer.listen()


@contextlib.contextmanager
def _full_listener(port: int) -> Iterator[None]:
    """Listens on `port`, accepts nobody, and has no room for more."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=0))
        with contextlib.suppress(TimeoutError):
            while True:
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 0.2))
        yield


def _appears(contender: Running, port: int, before: set[str]) -> list[tuple[Path, str]]:
    """The descriptors under which `contender` holds connections to `port` that were half open only after `before`.

    Reading /proc/net/tcp takes milliseconds, a descriptor microseconds: so the latter is what is watched.
    """
    deadline = time.perf_counter() + GIVE_UP_S
    while time.perf_counter() < deadline and contender.pid is not None:
        new = _half_open(port) - before
        descriptors = (fd for pid in tree(contender.pid) for fd in Path(f"/proc/{pid}/fd").glob("*"))
        held = [(path, name) for path in descriptors if (name := _link(path)) in new]
        if held:
            return held
    return []


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _half_open(port: int) -> set[str]:
    """Connections to `port` whose SYN has not been answered, as descriptors name them."""
    remote = f"{struct.unpack('=I', socket.inet_aton('127.0.0.1'))[0]:08X}:{port:04X}"
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {f"socket:[{row[9]}]" for row in rows if row[2] == remote and row[3] == _SYN_SENT}


def _ask(port: int, *, stream: bool) -> socket.socket:
    ask = body(stream=stream)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {KEY}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(ask)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", port), GIVE_UP_S)
    client.sendall(head.encode() + ask)
    return client


def _receive(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(TimeoutError):
        while b"data: " not in data and (more := client.recv(65536)):
            data += more
    return data


def _read_request(link: socket.socket) -> bytes | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = link.recv(65536)
        if not more:
            return None
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    lines = [line.partition(b":") for line in head.lower().split(b"\r\n")]
    length = next((int(value) for name, _, value in lines if name == b"content-length"), 0)
    while len(rest) < length:
        rest += link.recv(65536)
    return head
