"""The certificate, key and authority with which the members of a cluster know each other."""

from __future__ import annotations

import datetime
import stat
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from server.doctor.registry import Finding, check, fail, ok, skip, warn
from server.doctor.world import World
from weightsync.tls import ENVIRONMENT, ClusterTls

SOON = datetime.timedelta(days=7)
RENEW = "Have it issued anew (cert-manager does so by itself); running processes read the new files"
NEEDED = {ExtendedKeyUsageOID.SERVER_AUTH: "server auth", ExtendedKeyUsageOID.CLIENT_AUTH: "client auth"}


@check("cluster-tls", "certificate, key and authority of the cluster: expiry, and that they belong together")
def cluster_tls(world: World) -> Iterator[Finding]:
    configured = world.cluster_tls or world.environ.get(ENVIRONMENT)
    if not configured:
        yield skip(f"no directory is named: pass --cluster-tls DIR, or set {ENVIRONMENT}; one host needs none")
        return
    yield from judge_certificates(Path(configured), datetime.datetime.now(datetime.UTC))


def judge_certificates(directory: Path, now: datetime.datetime) -> Iterator[Finding]:
    """`now` decides what has expired."""
    try:
        certificate = x509.load_pem_x509_certificate((directory / "tls.crt").read_bytes())
        key = serialization.load_pem_private_key((directory / "tls.key").read_bytes(), None)
        authorities = x509.load_pem_x509_certificates((directory / "ca.crt").read_bytes())
    except OSError as error:
        yield fail(f"{error.filename}: {error.strerror}", "Name a directory with tls.crt, tls.key and ca.crt")
        return
    except (ValueError, TypeError) as error:
        mend = "tls.crt, tls.key and ca.crt must be PEM, the key without a password"
        yield fail(f"{directory}: one of the files cannot be read: {error}", mend)
        return
    yield _lasts("tls.crt", certificate, now)
    yield from (finding for ca in authorities if (finding := _lasts("ca.crt", ca, now)).status != "ok")
    if key.public_key() != certificate.public_key():
        yield fail("tls.key is not the key of tls.crt", "Write both files from the same issue")
    if not any(_issued(certificate, authority) for authority in authorities):
        yield fail("tls.crt is not signed by ca.crt", "Have it issued by the cluster's authority, or renew ca.crt")
    yield from _names(certificate)
    yield from _readable_key(directory / "tls.key")


def _lasts(name: str, certificate: x509.Certificate, now: datetime.datetime) -> Finding:
    begin, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        return fail(f"{name} is valid from {begin:%Y-%m-%d %H:%M} UTC on", "Set the clock, or wait")
    if now >= until:
        return fail(f"{name} expired on {until:%Y-%m-%d %H:%M} UTC", RENEW)
    text = f"{name} is valid until {until:%Y-%m-%d %H:%M} UTC"
    return warn(text, RENEW) if until - now < SOON else ok(text)


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _names(certificate: x509.Certificate) -> Iterator[Finding]:
    """Members are known by one name, whatever their address, and are servers and clients both."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        known = names.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        known = []
    if ClusterTls.NAME not in known:
        mend = f"Issue it with the DNS name {ClusterTls.NAME!r}, which all members expect"
        yield fail(f"tls.crt is for {', '.join(known) or 'no DNS name'}, not for {ClusterTls.NAME!r}", mend)
    try:
        usages = set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return
    if missing := [text for usage, text in NEEDED.items() if usage not in usages]:
        yield fail(f"tls.crt may not be used for {' and '.join(missing)}", "Issue it for both: members do both")


def _readable_key(path: Path) -> Iterator[Finding]:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        yield warn(f"{path} has mode {mode:03o}: others may read it", "chmod 600 (a secret's defaultMode: 0400)")
