"""Asks a process of this pod whether it is well; the kubelet cannot, where only members of the cluster are answered.

python probe.py started|alive|ready PORT PATH [VARIABLE]

VARIABLE has the address; default: POD_IP.

started  it answers
alive    it answers, or does not listen: an instance that sleeps does not, and one that has ended ends its container
ready    an instance that runs a committed version
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
import sys
from pathlib import Path

TIMEOUT_S = 8.0
NAME = "hotswap"  # in every member's certificate (weightsync/tls.py)
ACTIVE = re.compile(r"^hotswap_instance_active_version(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


def main(what: str, port: str, path: str, variable: str = "POD_IP") -> str:
    """What is wrong; empty if nothing is."""
    try:
        host = os.environ.get(variable, "127.0.0.1")
        status, _ = ask(host, int(port), path)
        if status != 200:
            return f"{path} answers {status}"
        return "" if what != "ready" else unready(ask(host, int(port), "/metrics")[1])
    except ConnectionRefusedError:
        return "" if what == "alive" else "it does not listen"
    except (OSError, http.client.HTTPException) as error:
        return f"it does not answer: {error or type(error).__name__}"


def unready(metrics: str) -> str:
    """What keeps requests from an instance."""
    found = ACTIVE.search(metrics)
    return "" if found is not None and float(found[1]) > 0 else "it does not run a committed version yet"


def ask(host: str, port: int, path: str) -> tuple[int, str]:
    """Status and body of a GET. Raises OSError and HTTPException."""
    connection = http.client.HTTPConnection(NAME, port, timeout=TIMEOUT_S)
    connection.sock = connect(host, port)
    try:
        connection.request("GET", path, headers={"connection": "close"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def connect(host: str, port: int) -> socket.socket:
    """A connection; mutual TLS where HOTSWAP_CLUSTER_TLS names a directory."""
    plain = socket.create_connection((host, port), TIMEOUT_S)
    directory = os.environ.get("HOTSWAP_CLUSTER_TLS")
    if not directory:
        return plain
    files = Path(directory)
    context = ssl.create_default_context(cafile=files / "ca.crt")
    context.load_cert_chain(files / "tls.crt", files / "tls.key")
    return context.wrap_socket(plain, server_hostname=NAME)


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5) or sys.argv[1] not in ("started", "alive", "ready") or not sys.argv[2].isdecimal():
        sys.exit(str(__doc__))
    sys.exit(main(*sys.argv[1:]) or 0)
