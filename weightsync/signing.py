"""Signatures of versions: who made the bytes of a slot, to be checked offline before they are staged.

A signature is a DSSE envelope (github.com/secure-systems-lab/dsse, v1) around an in-toto statement (v1), whose subject
is one part of a version: model and part by name, and the SHA-256 of its tensors with their names, dtypes, shapes and
metadata (`manifest.content_sha256`). Its predicate has the keys of the base model's config.json that an engine reads
(`config`: JSON, zlib, base64), where the version came with one. The statement leaves out the version's number, which
the store gives: so a publisher can sign tensors before they are sent. It says nothing of order: a client that writes
to the store can publish signed tensors again, as a later version. The digests in the manifest find faults; they would
not withstand an attacker, so they are not relied on here. Each part of a version has the signature with which it was
published, in the version's record: wherever the record goes, to disk, to other hosts, into later versions that carry
the part on, the signature goes along.

Keys are Ed25519 or ECDSA (P-256, P-384), in PEM. Trust is in public keys, or in certificates, which count for their key
while they are valid. A key's id is the SHA-256 of its public form (SubjectPublicKeyInfo, DER).
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import orjson
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from weightsync.control.forms import differing, meaning
from weightsync.control.parts import BASE, base_of
from weightsync.control.records import PartRecord, VersionRecord
from weightsync.errors import PublishError, signing_key_error, version_refused
from weightsync.memory.receiver import SlotReader

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:hotswap:tensors:v1"
SLOT_PREDICATE = "urn:hotswap:slot:v1"  # of older releases: the subject is the slot, the manifest too

PrivateKey = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
PublicKey = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey


class Signer:
    """Signs with the private key in a PEM file."""

    def __init__(self, path: Path | str) -> None:
        """Raises WeightSyncError."""
        try:
            key = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            problem = f"it cannot be read ({error}); name an unencrypted private key in PEM"
            raise signing_key_error(str(path), problem) from error
        if not isinstance(key, ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey):
            raise signing_key_error(str(path), "it must be an Ed25519 or an elliptic curve key")
        self._key: PrivateKey = key
        self.key_id = key_id(key.public_key())

    def sign(self, model: str, part: str, sha256: str, config: str = "") -> str:
        """The envelope, as JSON. `config`: the text of a config.json, "" without one. Raises PublishError."""
        statement = {
            "_type": STATEMENT,
            "subject": [{"name": _name(model, part), "digest": {"sha256": sha256}}],
            "predicateType": PREDICATE,
            "predicate": {"config": _packed(meaning(config))} if config else {},
        }
        return self.enveloped(statement)

    def enveloped(self, statement: Mapping[str, object]) -> str:
        """A statement of any kind, signed, as JSON."""
        payload = orjson.dumps(statement)
        message = _encoded(payload)
        if isinstance(self._key, ed25519.Ed25519PrivateKey):
            signature = self._key.sign(message)
        else:
            signature = self._key.sign(message, ec.ECDSA(hashes.SHA256()))
        envelope = {
            "payloadType": PAYLOAD_TYPE,
            "payload": base64.b64encode(payload).decode(),
            "signatures": [{"keyid": self.key_id, "sig": base64.b64encode(signature).decode()}],
        }
        return orjson.dumps(envelope).decode()


class Trust:
    """The keys whose signatures count. Without any, everything is admitted."""

    def __init__(self, paths: Iterable[Path | str] = ()) -> None:
        """Each file has one public key or one certificate, in PEM. Raises WeightSyncError."""
        self._keys = [_trusted(Path(path)) for path in paths]

    @property
    def key_ids(self) -> frozenset[str]:
        """Of the keys that count."""
        return frozenset(key_id(key) for key, _, _ in self._keys)

    def check(self, model: str, record: VersionRecord, config: str | None = None) -> None:
        """Whether every part of the version, whose slots are local paths, is signed with one of the keys and has the
        bytes that were signed. Reads all of it. `config`: the text of the config.json that it is to run with, and that
        must mean what was signed. Raises PublishError, ManifestError, SlotBusy."""
        if not self._keys:
            return
        base = base_of(record)
        assert base is not None
        for part in (base, *record.parts):
            self._check(model, record.version, part, config if part is base else None)

    def check_part(self, model: str, part: PartRecord) -> None:
        """The same of one part, the edition of an adapter."""
        if self._keys:
            self._check(model, part.version, part, None)

    def _check(self, model: str, version: int, part: PartRecord, config: str | None) -> None:
        what = f"version {version}{f' ({part.name})' if part.name else ''}"
        if not part.signature:
            raise version_refused(version, f"{what} is not signed")
        signed = self._opened(part.signature, version, what)
        if signed.get("name") != _name(model, part.name):
            raise version_refused(version, f"the signature of {what} is for {signed.get('name')!r}")
        with SlotReader.open(part.slot, manifest_digest=part.manifest_digest, populate=False) as slot:
            found = slot.sha256() if signed["of"] == PREDICATE else slot.whole_sha256()
        if found != signed.get("sha256"):
            raise version_refused(version, f"the bytes of {what} are not those that were signed")
        try:
            keys = differing(config, signed["config"]) if config and signed["config"] else ()
        except PublishError as error:
            raise version_refused(version, f"the config.json of {what} cannot be compared ({error})") from error
        if keys:
            raise version_refused(version, f"{', '.join(keys)} of {what} in config.json are not as they were signed")

    def _opened(self, envelope: str, version: int, what: str) -> dict[str, str]:
        """The statement of a good signature: name, digest, of what the digest is, and config.json ("": of none)."""
        try:
            found = orjson.loads(envelope)
            payload = base64.b64decode(found["payload"], validate=True)
            signatures = [(s["keyid"], base64.b64decode(s["sig"], validate=True)) for s in found["signatures"]]
            good = found["payloadType"] == PAYLOAD_TYPE
        except (ValueError, TypeError, KeyError, binascii.Error) as error:
            raise version_refused(version, f"the signature of {what} is no DSSE envelope") from error
        if not good or not any(self._holds(keyid, signature, _encoded(payload)) for keyid, signature in signatures):
            known = ", ".join(str(keyid)[:12] for keyid, _ in signatures)
            raise version_refused(version, f"{what} is not signed by a trusted key (it names {known or 'none'})")
        try:
            statement = orjson.loads(payload)
            (subject,) = statement["subject"]
            of = statement["predicateType"]
            if statement["_type"] != STATEMENT or of not in (PREDICATE, SLOT_PREDICATE):
                raise ValueError("another kind of statement")
            packed = base64.b64decode(statement["predicate"].get("config", ""))
            config = zlib.decompress(packed).decode() if packed else ""
            return {"name": subject["name"], "sha256": subject["digest"]["sha256"], "of": of, "config": config}
        except (ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
            raise version_refused(version, f"what was signed of {what} is no part of a version ({error})") from error

    def _holds(self, keyid: object, signature: bytes, message: bytes) -> bool:
        now = datetime.datetime.now(datetime.timezone.utc)
        key = next((key for key, since, until in self._keys if key_id(key) == keyid and since <= now < until), None)
        try:
            if isinstance(key, ed25519.Ed25519PublicKey):
                key.verify(signature, message)
            elif key is not None:
                key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return key is not None


def signers(record: VersionRecord) -> dict[str, str]:
    """The key that each part's signature names, "" where there is none; nothing is checked."""
    base = base_of(record)
    parts = [*([base] if base is not None else []), *record.parts]
    return {part.name: _named(part.signature) for part in parts}


def _named(envelope: str) -> str:
    try:
        return str(orjson.loads(envelope)["signatures"][0]["keyid"]) if envelope else ""
    except (ValueError, TypeError, KeyError, IndexError):
        return "unreadable"


def key_id(key: PublicKey) -> str:
    """SHA-256, hexadecimal."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def _trusted(path: Path) -> tuple[PublicKey, datetime.datetime, datetime.datetime]:
    """A key, and from when until when it counts; without a certificate, always."""
    key: object
    since, until = (end.replace(tzinfo=datetime.timezone.utc) for end in (datetime.datetime.min, datetime.datetime.max))
    try:
        data = path.read_bytes()
        if b"-----BEGIN CERTIFICATE-----" in data:
            certificate = x509.load_pem_x509_certificate(data)
            key = certificate.public_key()
            since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        else:
            key = serialization.load_pem_public_key(data)
    except (OSError, ValueError) as error:
        problem = f"it cannot be read ({error}); name a public key or a certificate in PEM"
        raise signing_key_error(str(path), problem) from error
    if not isinstance(key, ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey):
        raise signing_key_error(str(path), "it must be an Ed25519 or an elliptic curve key")
    return key, since, until


def _packed(text: str) -> str:
    """Configurations name each label or layer of a model, and a signature is one text of a record."""
    return base64.b64encode(zlib.compress(text.encode())).decode()


def _name(model: str, part: str) -> str:
    return f"{model}/{part or 'base'}"


def _encoded(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


assert BASE == "", "`_name` calls it base"
