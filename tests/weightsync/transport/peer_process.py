"""Serves bytes, and says where for every line of its input, until that ends: NAME SEED NBYTES TLS_DIRECTORY."""

from __future__ import annotations

import sys

from tests.weightsync.transport.peers import LISTEN, buffer, content
from weightsync.tls import ClusterTls
from weightsync.transport import open_transport


def main(name: str, seed: str, nbytes: str, tls: str) -> None:
    data = buffer(int(nbytes))
    data[:] = content(int(seed), int(nbytes))
    with open_transport(name, listen=LISTEN, tls=ClusterTls(tls) if tls else None) as transport:
        region = transport.register(data, writable=False)
        for _ in sys.stdin:
            print(transport.endpoint.hex(), region.descriptor.hex(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
