"""Errors between hosts: transfers, peers, certificates, Ray."""

from __future__ import annotations

from weightsync.errors.base import WeightSyncError


class TransferError(WeightSyncError):
    """A read from another host's memory did not happen; what arrived of it is not to be used."""


class TransportUnavailable(TransferError):
    """A transport cannot be used on this machine: not installed, broken, or not allowed as configured."""

    def __init__(self, transport: str, reason: str, advice: str) -> None:
        self.transport, self.reason, self.advice = transport, reason, advice
        super().__init__(f"transport {transport}: {reason}. {advice}")


class PeerUnreachable(TransferError):
    """No connection to a peer: it is down, somewhere else, or does not know this one."""

    def __init__(self, peer: str, reason: str) -> None:
        self.peer, self.reason = peer, reason
        super().__init__(f"peer {peer} cannot be reached: {reason}; read from another host, or look whether it is up")


class TransferFailed(TransferError):
    """A read ended before all its bytes were there; nothing more is written. Reading again, elsewhere, may work."""

    def __init__(self, peer: str, reason: str) -> None:
        self.peer, self.reason = peer, reason
        super().__init__(f"reading from {peer} failed: {reason}; read again, or from another host")


class TransferTimedOut(TransferError):
    """A read was not done in time and was given up; nothing more is written."""

    def __init__(self, peer: str, seconds: float) -> None:
        self.peer, self.seconds = peer, seconds
        super().__init__(f"reading from {peer} was not done after {seconds:g} s: read from another host")


class PeerError(WeightSyncError):
    """A version could not be had from another host."""


class CopyUnavailable(PeerError):
    """This host has no copy of a version; `cause` is the code of what kept its peer from fetching one, if known."""

    def __init__(self, version: int, host: str, reason: str, cause: str | None = None) -> None:
        self.version, self.host, self.cause = version, host, cause
        super().__init__(f"version {version} is not on host {host or '(unnamed)'}: {reason}")


class PeerRefused(PeerError):
    """Another host's peer does not serve what was asked for, or not now. `status` is HTTP's, `reason` the peer's."""

    def __init__(self, host: str, status: int, reason: str, message: str) -> None:
        self.host, self.status, self.reason, self.message = host, status, reason, message
        super().__init__(f"the peer of {host} answers {status} ({reason}): {message}")


class HostNameError(PeerError):
    """A host cannot be called so."""

    code = "host_name"

    def __init__(self, host: str) -> None:
        self.host = host
        super().__init__(
            f"no host can be called {host!r}: set HOTSWAP_HOST to lower-case letters, digits, dots and dashes, 63 at "
            "most, with a letter or digit at both ends"
        )


class TlsUnavailable(WeightSyncError):
    """The certificate, the key or the authority of a member of the cluster cannot be used, or is asked for."""

    def __init__(self, directory: str, reason: str, advice: str) -> None:
        self.directory, self.reason, self.advice = directory, reason, advice
        super().__init__(f"certificates in {directory or 'no directory'}: {reason}. {advice}")


class RayUnavailable(WeightSyncError):
    """The Ray cluster that was named cannot be used."""

    def __init__(self, address: str, reason: str, advice: str) -> None:
        self.address, self.reason, self.advice = address, reason, advice
        super().__init__(f"--ray {address}: {reason}. {advice}")
