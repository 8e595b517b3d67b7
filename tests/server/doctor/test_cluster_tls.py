"""Certificates really made: expired, early, of another authority, with another key or name."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from server.doctor.registry import Status
from server.doctor.world import World
from tests.server.doctor.worlds import findings, only, statuses
from weightsync.tls import ENVIRONMENT

DAY = datetime.timedelta(days=1)
BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
PEM = serialization.Encoding.PEM


class Authority:
    """Signs."""

    def __init__(self, name: str = "authority", days: int = 365) -> None:
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self.sign(self.name, self.key, -400, days, ca=True)

    def sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, first: int, last: int, *, ca: bool = False,
        name: str = "hotswap", usages: tuple[x509.ObjectIdentifier, ...] = BOTH,
    ) -> bytes:  # fmt: skip
        """Valid from day `first` to day `last`, counted from now."""
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now + first * DAY).not_valid_after(now + last * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        if not ca:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(PEM)


def issue(
    directory: Path, authority: Authority, first: int = -1, last: int = 90, *, name: str = "hotswap",
    usages: tuple[x509.ObjectIdentifier, ...] = BOTH,
) -> Path:  # fmt: skip
    """tls.crt, tls.key and ca.crt of a member."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "member")])
    directory.mkdir(exist_ok=True)
    (directory / "ca.crt").write_bytes(authority.certificate)
    (directory / "tls.crt").write_bytes(authority.sign(subject, key, first, last, name=name, usages=usages))
    private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "tls.key").write_bytes(private)
    (directory / "tls.key").chmod(0o600)
    return directory


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.mark.parametrize(
    ("first", "last", "expected", "said"),
    [
        (-1, 90, "ok", "valid until"),
        (-90, 3, "warn", "valid until"),
        (-90, -1, "fail", "expired on"),
        (1, 90, "fail", "valid from"),
    ],
)
def test_how_long_a_certificate_lasts(
    tmp_path: Path, authority: Authority, first: int, last: int, expected: Status, said: str
) -> None:
    issue(tmp_path, authority, first, last)
    assert said in only(findings("cluster-tls", World(environ={ENVIRONMENT: str(tmp_path)})), expected).found


def test_an_expired_authority(tmp_path: Path) -> None:
    found = findings("cluster-tls", World(cluster_tls=issue(tmp_path, Authority(days=-2))))
    assert (statuses(found), "ca.crt expired" in found[1].found) == (["ok", "fail"], True)


def test_files_that_do_not_belong_together(tmp_path: Path, authority: Authority) -> None:
    issue(tmp_path / "a", authority)
    (tmp_path / "a" / "tls.key").write_bytes((issue(tmp_path / "b", authority) / "tls.key").read_bytes())
    (tmp_path / "a" / "ca.crt").write_bytes(Authority().certificate)
    found = findings("cluster-tls", World(cluster_tls=tmp_path / "a"))
    assert statuses(found) == ["ok", "fail", "fail"]
    assert "is not the key" in found[1].found
    assert "is not signed" in found[2].found


def test_while_an_authority_is_replaced_ca_crt_holds_two(tmp_path: Path, authority: Authority) -> None:
    issue(tmp_path, authority)
    (tmp_path / "ca.crt").write_bytes(Authority("new").certificate + authority.certificate)
    only(findings("cluster-tls", World(cluster_tls=tmp_path)), "ok")


def test_names_and_usages(tmp_path: Path, authority: Authority) -> None:
    issue(tmp_path, authority, name="pod-1", usages=(ExtendedKeyUsageOID.SERVER_AUTH,))
    found = findings("cluster-tls", World(cluster_tls=tmp_path))
    assert statuses(found) == ["ok", "fail", "fail"]
    assert "pod-1" in found[1].found
    assert "client auth" in found[2].found


def test_a_key_that_others_may_read(tmp_path: Path, authority: Authority) -> None:
    (issue(tmp_path, authority) / "tls.key").chmod(0o644)
    found = findings("cluster-tls", World(cluster_tls=tmp_path))
    assert (statuses(found), "chmod 600" in found[1].mend) == (["ok", "warn"], True)


def test_files_that_are_missing_or_something_else(tmp_path: Path, authority: Authority) -> None:
    only(findings("cluster-tls", World(environ={})), "skip")
    assert "ca.crt" in only(findings("cluster-tls", World(cluster_tls=tmp_path)), "fail").mend
    (issue(tmp_path, authority) / "tls.key").write_text("no key")
    assert "PEM" in only(findings("cluster-tls", World(cluster_tls=tmp_path)), "fail").mend
