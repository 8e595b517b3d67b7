"""Starts containers of a rendered pod as processes of this machine: with their commands, variables and files alone.

Addresses, ports and directories are those of the test; whatever else the manifest says is taken as it stands.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from server.etcd_roles import NAMES
from server.ports import free_port
from tests.cluster_tls import Authority
from tests.etcd import Etcd, Tls
from tests.k8s.helm import CHART, Object, arguments, environment

ETCD_HOST = re.compile(r"hotswap-etcd-\d\.hotswap-etcd\.serving\.svc:2379")


class Kubelet:
    """One host. `directory` stands for what volumes would hold; etcd is a real one with TLS."""

    def __init__(self, directory: Path, model: Path) -> None:
        self._directory, self._model = directory, model
        tls = Tls(directory / "authority-of-etcd", client_certificates=True)
        self.etcd = Etcd(tls=tls)
        self._at("etcd-tls").mkdir()
        for name, source in (("ca.crt", tls.ca), ("tls.crt", tls.cert), ("tls.key", tls.key)):
            (self._at("etcd-tls") / name).symlink_to(source)
        Authority(directory / "authority").mount(self._at("cluster-tls"))
        (directory / "scripts").symlink_to(CHART / "files")
        self._at("etcd-auth").mkdir()
        for name in ("root", *NAMES):
            (self._at("etcd-auth") / name).write_text(f"password-of-{name}")
        self.arena = self._at("arena")
        self.ports = dict(zip(("8000", "8001", "8002", "8003"), (str(free_port()) for _ in range(4)), strict=True))

    def _at(self, name: str) -> Path:
        return self._directory / name

    def here(self, text: str) -> str:
        """`text` of a manifest with this machine's addresses and directories."""
        text = ETCD_HOST.sub(self.etcd.hosts[0], text).replace("/etc/hotswap", str(self._directory))
        text = text.replace("/models/model", str(self._model)).replace("/dev/shm/hotswap", str(self.arena))
        text = re.sub(r"\b(800[0-3])\b", lambda found: self.ports[found[0]], text)
        return text.replace("10.0.0.7", "127.0.0.1")

    def command(self, container: Object, given: list[str] | None = None) -> tuple[list[str], dict[str, str]]:
        """A container's command, or another in it, and its environment."""
        words = [self.here(word) for word in (arguments(container) if given is None else given)]
        if given is None and "command" not in container:
            words = ["hotswap", *words]  # the image's entry point
        env = {name: self.here(value) for name, value in environment(container).items()}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return words, {**env, "PATH": path, "PYTHONPATH": "", "LANG": "C.UTF-8"}

    def run(self, container: Object, given: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        words, env = self.command(container, given)
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=240)

    @contextlib.contextmanager
    def started(self, container: Object, **more: str) -> Iterator[subprocess.Popen[bytes]]:
        """While the context is open; its output goes to a file, which is shown when it has ended too early."""
        words, env = self.command(container)
        with self.log(container).open("wb") as log:
            process = subprocess.Popen(words, env={**env, **more}, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)  # without the time that a gateway takes to leave its service
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def log(self, container: Object) -> Path:
        return self._at(f"{container['name']}.log")

    def probed(self, container: Object, name: str) -> int:
        """The exit status of an exec probe."""
        return self.run(container, container[name]["exec"]["command"]).returncode
