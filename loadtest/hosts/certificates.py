"""A certificate for benchmarks that leave loopback: a cluster of one member, which is its own authority."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from weightsync.tls import ClusterTls


def self_signed(directory: Path) -> Path:
    """`directory`, made, with tls.crt, tls.key and ca.crt in it, good for a day."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ClusterTls.NAME)])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(ClusterTls.NAME)]), critical=False)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    directory.mkdir(mode=0o700)
    (directory / "tls.crt").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    (directory / "tls.key").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    shutil.copy(directory / "tls.crt", directory / "ca.crt")
    return directory
