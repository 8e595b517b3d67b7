"""A stock vLLM server and its own way to change weights: pause, reload, resume."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from server.ports import free_port
from server.up.processes import Child


class StockVllm:
    """`python -m vllm...api_server` with its development routes on, on loopback."""

    def __init__(
        self, model: Path, name: str, log: Path, arguments: tuple[str, ...], *, engine_apart: bool = False
    ) -> None:
        """`engine_apart`: the engine has a process of its own, as it is by default."""
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        args = ["vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", name]
        args += ["--host", "127.0.0.1", "--port", str(self.port), *arguments]
        self._args, self._log = args, log
        self._switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
        self._switches |= {} if engine_apart else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

    @contextlib.contextmanager
    def running(self) -> Iterator[StockVllm]:
        with self.started():
            self.wait()
            yield self

    @contextlib.contextmanager
    def started(self) -> Iterator[StockVllm]:
        """Started, and not ready before `wait` has returned."""
        self._child = Child("stock vLLM", self._args, self._log, self._switches)
        self.pid = self._child.process.pid
        try:
            transport = httpx.HTTPTransport(retries=0)
            with httpx.Client(base_url=self.url, timeout=300, transport=transport) as self._http:
                yield self
        finally:
            self._child.stop()

    def wait(self) -> None:
        """Until it answers. Raises RuntimeError with the end of its log if it has ended."""
        while self._child.alive:
            with contextlib.suppress(httpx.TransportError):
                if self._http.get("/health").status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"stock vLLM did not start:\n{self._child.tail()}")

    def swap(self, checkpoint: Path) -> None:
        """Pause without dropping running requests or their KV cache, reload every weight, resume."""
        self._post("/pause?mode=keep&clear_cache=false")
        try:
            self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}})
        finally:
            self._post("/resume")

    def _post(self, path: str, body: dict[str, object] | None = None) -> None:
        answer = self._http.post(path, json=body)
        answer.raise_for_status()
