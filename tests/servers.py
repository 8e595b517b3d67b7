"""Other projects' servers on loopback, each a process group of its own: MLflow, and moto's S3 (tests/packages.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from server.ports import free_port
from tests.packages import servers
from tests.waiting import wait_until

MLFLOW_USER, MLFLOW_PASSWORD = "admin", "a-password-of-the-tests"


@dataclass
class Server:
    """One that answers at `url`; `stop` and `start` are what happens to servers."""

    url: str
    port: int
    command: list[str]
    env: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            options: Any = {"stdout": log, "stderr": log, "cwd": self.log.parent, "start_new_session": True}
            self.process = subprocess.Popen(self.command, env=os.environ | self.env, **options)
        wait_until(self._answers, 400.0, lambda: self.log.read_text()[-2000:], self.process)

    def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.url, timeout=10.0).status_code > 0
        return False


@contextlib.contextmanager
def _running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def mlflow_server(directory: Path) -> Iterator[Server]:
    """With SQLite, artifacts that the server itself serves, and MLFLOW_USER as its only user."""
    port = free_port()
    command = [str(servers()), "-m", "mlflow", "server", "--app-name", "basic-auth", "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{directory}/mlflow.db", "--serve-artifacts"]
    command += ["--artifacts-destination", str(directory / "artifacts"), "--host", "127.0.0.1", "--port", str(port)]
    env = {"MLFLOW_AUTH_ADMIN_PASSWORD": MLFLOW_PASSWORD, "MLFLOW_FLASK_SERVER_SECRET_KEY": "of the tests"}
    env |= {"MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONPATH": "", "MLFLOW_TRACKING_URI": ""}
    env |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # of which nothing here asks: seven processes
    (auth := directory / "auth.ini").write_text(
        "[mlflow]\ndefault_permission = READ\nadmin_username = admin\n"
        f"database_uri = sqlite:///{directory}/auth.db\nauthorization_function = "
        "mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    env |= {"MLFLOW_AUTH_CONFIG_PATH": str(auth)}
    with _running(Server(f"http://127.0.0.1:{port}", port, command, env, directory / "mlflow.log")) as server:
        yield server


@contextlib.contextmanager
def s3_server(directory: Path) -> Iterator[Server]:
    """moto: what is in its buckets is gone when it stops."""
    port = free_port()
    command = [str(servers()), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    moto = Server(f"http://127.0.0.1:{port}", port, command, {"PYTHONPATH": ""}, directory / "moto.log")
    with _running(moto) as server:
        yield server


def s3_variables(server: Server) -> dict[str, str]:
    """The environment by which fsspec reaches it."""
    named = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests"}
    return named | {"AWS_ENDPOINT_URL": server.url, "AWS_DEFAULT_REGION": "us-east-1"}
