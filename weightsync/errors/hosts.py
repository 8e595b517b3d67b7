"""Errors between hosts: transfers, peers, certificates, Ray."""

from __future__ import annotations

from weightsync.errors.base import WeightSyncError


class TransferError(WeightSyncError):
    """A read from another host's memory did not happen; what arrived of it is not to be used."""


def transfer_failed(peer: str, reason: str) -> TransferError:
    """A read ended before all its bytes were there; nothing more is written. Reading again, elsewhere, may work."""
    message = f"reading from {peer} failed: {reason}; read again, or from another host"
    return TransferError(message, code="transfer_failed", reason=reason)


def transfer_timed_out(peer: str, seconds: float) -> TransferError:
    """A read was not done in time and was given up; nothing more is written."""
    message = f"reading from {peer} was not done after {seconds:g} s: read from another host"
    return TransferError(message, code="transfer_timed_out")


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


class PeerError(WeightSyncError):
    """A version could not be had from another host."""


def copy_unavailable(version: int, host: str, reason: str, cause: str | None = None) -> PeerError:
    """This host has no copy of a version; `cause` is the code of what kept its peer from fetching one, if known."""
    message = f"version {version} is not on host {host or '(unnamed)'}: {reason}"
    return PeerError(message, code="copy_unavailable", version=version, cause=cause)


def bad_host_name(host: str) -> PeerError:
    """A host cannot be called so."""
    message = (
        f"no host can be called {host!r}: set HOTSWAP_HOST to lower-case letters, digits, dots and dashes, 63 at "
        "most, with a letter or digit at both ends"
    )
    return PeerError(message, code="host_name")


class PeerRefused(PeerError):
    """Another host's peer does not serve what was asked for, or not now. `status` is HTTP's, `reason` the peer's."""

    def __init__(self, host: str, status: int, reason: str, message: str) -> None:
        self.host, self.status, self.reason, self.message = host, status, reason, message
        super().__init__(f"the peer of {host} answers {status} ({reason}): {message}")


class TlsUnavailable(WeightSyncError):
    """The certificate, the key or the authority of a member of the cluster cannot be used, or is asked for."""

    def __init__(self, directory: str, reason: str, advice: str) -> None:
        self.directory, self.reason, self.advice = directory, reason, advice
        super().__init__(f"certificates in {directory or 'no directory'}: {reason}. {advice}")


def ray_unavailable(address: str, reason: str, advice: str) -> WeightSyncError:
    """The Ray cluster that was named cannot be used."""
    return WeightSyncError(f"--ray {address}: {reason}. {advice}", code="ray_unavailable")
