"""Signed versions: what is not signed, or was altered since, is refused before it is staged, and the old one serves."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from tests.weightsync.codes import refused
from tests.weightsync.tensors import flip, model
from weightsync import Publisher
from weightsync.control.forms import BOOKKEEPING
from weightsync.control.parts import BASE, Adapter
from weightsync.control.records import FormRecord, VersionRecord
from weightsync.control.records import Keys as Names
from weightsync.errors import WeightSyncError
from weightsync.format.manifest import Layout
from weightsync.memory.receiver import SlotReader
from weightsync.publish.succession import Succession
from weightsync.signing import Signer, Trust, key_id, signers
from weightsync.store import SyncStore
from weightsync.versions import verify

CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
PEM = serialization.Encoding.PEM
Keys = dict[str, tuple[Path, Path]]  # files of private and public keys


def pair(directory: Path, name: str, key: Any = None) -> tuple[Path, Path]:
    """Files of a private and a public key."""
    key = key or ed25519.Ed25519PrivateKey.generate()
    private, public = directory / f"{name}.key", directory / f"{name}.pub"
    plain = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return {name: pair(tmp_path, name) for name in ("ours", "next", "other")}


def published(url: str, sign: Path | None, value: float = 1.0, **more: Any) -> VersionRecord:
    with Publisher(url, model="demo", sign=sign) as publisher:
        version = publisher.publish(model(value), activate=False, **more)
        return next(v for v in publisher.versions() if v.version == version)


def refusal(trust: Trust, record: VersionRecord, config: str | None = None) -> str:
    with refused("version_refused") as caught:
        trust.check("demo", record, config)
    assert (caught.value.version, f"version {record.version}" in str(caught.value)) == (record.version, True)
    return str(caught.value)


@pytest.mark.parametrize("kind", [ed25519.Ed25519PrivateKey.generate, lambda: ec.generate_private_key(ec.SECP256R1())])
def test_a_signed_version_is_admitted(store_url: str, tmp_path: Path, kind: Callable[[], Any]) -> None:
    private, public = pair(tmp_path, "k", kind())
    record = published(store_url, private)
    Trust([public]).check("demo", record)
    Trust().check("demo", replace(record, signature=""))  # without a policy anything goes
    assert signers(record) == {"": Signer(private).key_id}


def signed_as_before(record: VersionRecord, private: Path) -> VersionRecord:
    """With the signature that a release which signed whole slots gave it."""
    signer, name = Signer(private), orjson.loads(base64.b64decode(orjson.loads(record.signature)["payload"]))["subject"]
    with SlotReader.open(record.slot) as slot:
        signed = Path(record.slot).read_bytes()[: Layout.of(slot.manifest.schema).total_nbytes]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name[0]["name"], "digest": {"sha256": hashlib.sha256(signed).hexdigest()}}],
        "predicateType": "urn:hotswap:slot:v1",
        "predicate": {"version": record.version},
    }
    return replace(record, signature=signer.enveloped(statement))


def test_what_an_older_release_has_signed_is_admitted(store_url: str, keys: Keys) -> None:
    trust = Trust([keys["ours"][1]])
    record = published(store_url, keys["ours"][0])
    before = signed_as_before(record, keys["ours"][0])
    trust.check("demo", before)
    other = published(store_url, keys["ours"][0], 2.0)
    assert "not those that were signed" in refusal(trust, replace(other, signature=before.signature))
    flip(record.slot, -4000)
    assert "not those that were signed" in refusal(trust, before)


def test_what_is_unsigned_or_altered_or_of_another_is_refused(store_url: str, keys: Keys) -> None:
    trust = Trust([keys["ours"][1]])
    assert "is not signed:" in refusal(trust, published(store_url, None))
    assert "not signed by a trusted key" in refusal(trust, published(store_url, keys["other"][0]))
    good, later = published(store_url, keys["ours"][0]), published(store_url, keys["ours"][0], 2.0)
    trust.check("demo", good)
    assert "not those that were signed" in refusal(trust, replace(good, signature=later.signature))
    forged = orjson.loads(good.signature)  # the same signature over another statement
    statement = orjson.loads(base64.b64decode(forged["payload"]))
    statement["subject"][0]["digest"]["sha256"] = "0" * 64
    forged["payload"] = base64.b64encode(orjson.dumps(statement)).decode()
    assert "not signed by a trusted key" in refusal(trust, replace(good, signature=orjson.dumps(forged).decode()))
    assert "no DSSE envelope" in refusal(trust, replace(good, signature="{}"))
    with refused("version_refused", match="is for 'demo/base'"):
        trust.check("another model", good)
    renamed = orjson.loads(published(store_url, keys["other"][0]).signature)
    renamed["signatures"][0]["keyid"] = Signer(keys["ours"][0]).key_id  # the id alone is no proof
    assert "not signed by a trusted key" in refusal(trust, replace(good, signature=orjson.dumps(renamed).decode()))


SERVED: dict[str, Any] = {
    "model_type": "unheard-of", "architectures": ["One"], "rope_theta": 1e4, "eos_token_id": [1, 2], "scale": math.inf,
    "rope_scaling": {"factor": 8.0, "kind": "yarn"}, "tie_word_embeddings": False, "transformers_version": "5.19",
    "torch_dtype": "float32", "use_cache": True, "id2label": {str(i): f"LABEL_{i}" for i in range(2_000)},
}  # fmt: skip


def altered() -> Iterator[tuple[dict[str, Any], bool]]:
    """SERVED with one key another, away, or new; whether an engine reads the key."""
    for key in SERVED:
        counts = key not in BOOKKEEPING
        yield SERVED | {key: "another"}, counts
        yield {name: value for name, value in SERVED.items() if name != key}, counts
    yield SERVED | {"rope_scaling": {"factor": 8.0, "kind": "linear"}}, True
    yield SERVED | {"new": 1}, True
    yield SERVED | {"new": None}, False


def test_every_key_of_the_configuration_is_signed_that_an_engine_reads(store_url: str, keys: Keys) -> None:
    """Whether the publisher of the fleet signs, or the trainer before it sends."""
    trust = Trust([keys["ours"][1]])
    record = published(store_url, keys["ours"][0], config=SERVED)
    sent = Succession("demo", BASE, Signer(keys["ours"][0])).take(model(1.0), config=SERVED)
    told = [orjson.loads(base64.b64decode(orjson.loads(it.signature)["payload"])) for it in (record, sent)]
    assert told[0]["predicate"] == told[1]["predicate"] != {}
    trust.check("demo", record, json.dumps(SERVED))
    for config, counts in altered():
        if counts:
            assert "not as they were signed" in refusal(trust, record, json.dumps(config))
        else:
            trust.check("demo", record, json.dumps(config))
    assert "cannot be compared" in refusal(trust, record, "[]")
    trust.check("demo", published(store_url, keys["ours"][0]), json.dumps(SERVED))  # it came with none


def test_another_configuration_in_the_store_is_noticed(store_url: str, keys: Keys) -> None:
    record = published(store_url, keys["ours"][0], config=SERVED)
    assert verify(store_url, "demo", trust=[keys["ours"][1]]).ok
    key = Names("demo").form(record.form)
    with contextlib.closing(SyncStore(store_url)) as store:
        found = store.get(key)
        assert found is not None
        form = FormRecord.from_json(found.value)
        store.put(key, replace(form, config=json.dumps(SERVED | {"rope_theta": 1e6})).to_json())
    (problem,) = verify(store_url, "demo", trust=[keys["ours"][1]]).problems
    assert (problem.code, "rope_theta" in problem.message) == ("version_refused", True)


@pytest.mark.parametrize("at", [70, -4000])
def test_a_byte_of_manifest_or_tensor_that_is_another_is_noticed(store_url: str, keys: Keys, at: int) -> None:
    record = published(store_url, keys["ours"][0])
    flip(record.slot, at)
    with pytest.raises(WeightSyncError):  # of the manifest its own digest tells before
        Trust([keys["ours"][1]]).check("demo", record)


def test_a_part_is_signed_by_who_published_it_and_is_carried_on_with_that(store_url: str, keys: Keys) -> None:
    published(store_url, keys["ours"][0])
    adapter = Adapter({"q.lora_A.weight": np.full((2, 8), 1.0, np.float32)}, CONFIG)
    with Publisher(store_url, model="demo", sign=keys["next"][0]) as publisher:
        version = publisher.publish(adapter, part="lora/x", onto=1, activate=False)
        record = next(v for v in publisher.versions() if v.version == version)
    assert signers(record) == {"": Signer(keys["ours"][0]).key_id, "lora/x": Signer(keys["next"][0]).key_id}
    Trust([keys["ours"][1], keys["next"][1]]).check("demo", record)
    assert "(lora/x)" in refusal(Trust([keys["ours"][1]]), record)
    swapped = replace(record, parts=(replace(record.parts[0], signature=record.signature),))
    assert "is for 'demo/base'" in refusal(Trust([keys["ours"][1]]), swapped)


def test_a_certificate_counts_while_it_is_valid(store_url: str, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    private, _ = pair(tmp_path, "k", key)
    record = published(store_url, private)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "publisher")])
    now = datetime.datetime.now(datetime.UTC)

    def certified(since: int, until: int) -> Path:
        made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        made = made.serial_number(7).not_valid_before(now + datetime.timedelta(since))
        certificate = made.not_valid_after(now + datetime.timedelta(until)).sign(key, hashes.SHA256())
        file = tmp_path / f"{until}.crt"
        file.write_bytes(certificate.public_bytes(PEM))
        return file

    valid, expired, later = certified(-9, 1), certified(-9, -1), certified(2, 9)
    Trust([valid]).check("demo", record)
    for wrong in (expired, later):
        refusal(Trust([wrong]), record)
        Trust([wrong, valid, wrong]).check("demo", record)


def test_files_that_are_no_keys(tmp_path: Path, keys: Keys) -> None:
    private, public = pair(tmp_path, "rsa", rsa.generate_private_key(65537, 2048))
    for wrong in (tmp_path / "none", keys["ours"][1], private):
        with refused("signing_key_error"):
            Signer(wrong)
    for wrong in (tmp_path / "none", keys["ours"][0], public):
        with refused("signing_key_error"):
            Trust([wrong])
    assert key_id(ed25519.Ed25519PrivateKey.generate().public_key()) != Signer(keys["ours"][0]).key_id


def test_verify_says_who_signed_and_whether_they_are_trusted(store_url: str, keys: Keys) -> None:
    published(store_url, keys["ours"][0])
    report = verify(store_url, "demo", 1, trust=[keys["ours"][1]])
    assert (report.ok, report.signers) == (True, {"": Signer(keys["ours"][0]).key_id})
    report = verify(store_url, "demo", 1, trust=[keys["other"][1]])
    assert [problem.code for problem in report.problems] == ["version_refused"]
    published(store_url, None, 2.0)
    assert (verify(store_url, "demo", 2).ok, verify(store_url, "demo", 2).signers) == (True, {"": ""})
