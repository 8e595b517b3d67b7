"""What commands check the certificate of an admin port with."""

from __future__ import annotations

import os
import ssl

from server.cli.errors import RequestFailed
from weightsync.errors import TlsUnavailable
from weightsync.tls import ClusterTls

CA_ENV = "HOTSWAP_ADMIN_CA"


def admin_tls(url: str) -> ssl.SSLContext | bool:
    """The authority in the file $HOTSWAP_ADMIN_CA; else mutual TLS, where $HOTSWAP_CLUSTER_TLS is set; else the
    system's authorities. Raises RequestFailed."""
    if not url.startswith("https://"):
        return True
    try:
        if authority := os.environ.get(CA_ENV):
            return ssl.create_default_context(cafile=authority)
        member = ClusterTls.of_environment()
    except TlsUnavailable as error:
        raise RequestFailed(str(error)) from error
    except OSError as error:
        raise RequestFailed(f"{CA_ENV}={os.environ[CA_ENV]} cannot be used ({error}): name a PEM file") from error
    return member.client_context() if member is not None else True
