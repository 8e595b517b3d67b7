"""An engine with `--trust` serves what a trusted key has signed; what is unsigned or altered never gets to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests.live import VLLM_ARGS, LiveServer
from tests.weightsync.format.test_signing import pair
from weightsync import Publisher, RemotePublisher, SyncStore
from weightsync.control.records import Keys, VersionRecord
from weightsync.format.signing import Signer, signers
from weightsync.publish.publisher import SIGN_ENV

pytestmark = [pytest.mark.engine, pytest.mark.broad]
PROMPT = [9, 8, 7, 6]
Tensors = dict[str, torch.Tensor]


class Trusting:
    """A server whose instance trusts two keys: `up` signs its first version with one, a trainer has the other."""

    def __init__(self, live: LiveServer, trainer_key: Path) -> None:
        self.live, self.trainer_key = live, trainer_key

    def remote(self, sign: Path | None = None) -> RemotePublisher:
        processes = self.live.processes
        return RemotePublisher(processes.admin_url, processes.admin_key, self.live.name, sign=sign)

    def record(self, version: int) -> VersionRecord:
        store = SyncStore(self.live.processes.store)
        try:
            found = store.get(Keys(self.live.name).version(version))
            assert found is not None
            return VersionRecord.from_json(found.value)
        finally:
            store.close()

    def answer(self) -> list[int]:
        return list(self.live.generate(PROMPT, 12)["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def trusting(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trusting]:
    keys = tmp_path_factory.mktemp("keys")
    (ours, ours_public), (trainers, trainers_public) = pair(keys, "ours"), pair(keys, "trainer")
    trusted = ("--trust", str(ours_public), "--trust", str(trainers_public))
    server = LiveServer(checkpoints["a"], tmp_path_factory.mktemp("state"), (*VLLM_ARGS, *trusted))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIGN_ENV, str(ours))
        with server.running():
            patch.delenv(SIGN_ENV)
            yield Trusting(server, trainers)


@pytest.fixture
def other(checkpoints: dict[str, Path]) -> Tensors:
    return load_file(checkpoints["b"] / "model.safetensors")


def test_what_a_remote_trainer_has_signed_is_served(trusting: Trusting, other: Tensors) -> None:
    before = trusting.answer()
    version = trusting.remote(trusting.trainer_key).publish(other)
    assert signers(trusting.record(version)) == {"": Signer(trusting.trainer_key).key_id}
    assert trusting.live.active() == version
    assert trusting.answer() != before


def refused(trusting: Trusting, version: int, problem: str) -> None:
    """The version is refused before it is staged; the one before serves on, as it did."""
    live = trusting.live
    serving, answer, staged = live.active(), trusting.answer(), live.instance()["staged_version"]
    told: httpx.Response = live.activate(version)
    assert told.status_code == 409, told.text
    assert problem in told.json()["error"]["message"]
    assert (live.active(), live.instance()["state"], trusting.answer()) == (serving, "SERVING", answer)
    assert live.instance()["staged_version"] == staged


def test_what_nobody_has_signed_is_refused_and_the_old_version_serves_on(trusting: Trusting, other: Tensors) -> None:
    with Publisher(trusting.live.processes.store, model=trusting.live.name, lineage="push") as publisher:
        version = publisher.publish(other, activate=False)
    refused(trusting, version, "is not signed")


def test_what_was_altered_since_it_was_signed_is_refused(trusting: Trusting, other: Tensors) -> None:
    version = trusting.remote(trusting.trainer_key).publish(other, activate=False)
    with Path(trusting.record(version).slot).open("r+b") as slot:
        slot.seek(-20_000, 2)
        byte = slot.read(1)
        slot.seek(-1, 1)
        slot.write(bytes([byte[0] ^ 1]))
    refused(trusting, version, "are not those that were signed")
