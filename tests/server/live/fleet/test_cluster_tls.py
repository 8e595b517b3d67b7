"""A real vLLM instance that listens on every address, over mutual TLS alone."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.cluster_tls import Authority
from tests.live import VLLM_ARGS, LiveServer
from tests.waiting import wait_until
from weightsync.tls import ClusterTls, is_loopback

pytestmark = pytest.mark.broad

ADDRESS = "127.0.0.2"  # another one of this machine than the gateway listens on
LONG = {"prompt_token_ids": [3, 4, 5], "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.mark.engine
def test_an_instance_behind_mutual_tls(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    ours, its = (authority.mount(tmp_path / name) for name in ("gateway", "instance"))
    listening = ("--host", "0.0.0.0", "--advertise", ADDRESS, "--cluster-tls", str(its))
    server = LiveServer(
        checkpoints["a"],
        tmp_path / "state",
        vllm_args=(*VLLM_ARGS, *listening),
        gateway_args=("--cluster-tls", str(ours)),
    )
    with server.running() as live:
        address = live.instance()["address"]
        assert address.startswith(f"https://{ADDRESS}:")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{address}/health", verify=False)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{address}/health".replace("https", "http"))
        member = ClusterTls(ours).client_context()
        assert httpx.get(f"{address}/health", verify=member).status_code == 200
        assert listening_beyond_loopback(live) == {urlsplit(address).port}
        before = live.generate([3, 4, 5], 8)
        live.push(checkpoints["b"])
        assert live.generate([3, 4, 5], 8)["choices"][0]["token_ids"] != before["choices"][0]["token_ids"]
        with live.client.stream("POST", "/generate", json=LONG) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: token"
            for directory in (ours, its):
                authority.mount(directory)
            wait_until(lambda: shown(address, member) == der(its), 30)
            assert "event: done" in list(lines)
        assert live.generate([3, 4, 5], 8)["choices"]


def listening_beyond_loopback(live: LiveServer) -> set[int]:
    """Ports of the instance's processes that other hosts reach, whatever this host's name leads to."""
    found = [c for process in live.tree() for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {c.laddr.port for c in found if not is_loopback(c.laddr.ip)}


def shown(address: str, context: ssl.SSLContext) -> bytes:
    """The certificate that a new connection is shown."""
    url = urlsplit(address)
    assert url.hostname is not None
    with (
        socket.create_connection((url.hostname, url.port or 0), 30) as plain,
        context.wrap_socket(plain) as connection,
    ):
        return connection.getpeercert(binary_form=True) or b""


def der(directory: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert((directory / "tls.crt").read_text())
