"""An engine with `--trust` serves what a trusted key has signed; what is unsigned never gets to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.live import VLLM_ARGS, LiveServer
from tests.weightsync.test_signing import pair
from weightsync import Publisher, RemotePublisher, SyncStore
from weightsync.control.records import Keys, VersionRecord
from weightsync.publish.publisher import SIGN_ENV
from weightsync.signing import Signer, signers

pytestmark = [pytest.mark.engine, pytest.mark.broad]


@pytest.fixture(scope="module")
def trainer_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its public half is trainer.pub, beside it."""
    return pair(tmp_path_factory.mktemp("trainer"), "trainer")[0]


@pytest.fixture(scope="module")
def trusting(
    checkpoints: dict[str, Path], trainer_key: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Its instance trusts two keys: `up` signs its first version with one, a trainer has the other."""
    ours, ours_public = pair(tmp_path_factory.mktemp("ours"), "ours")
    trusted = ("--trust", str(ours_public), "--trust", str(trainer_key.with_suffix(".pub")))
    server = LiveServer(checkpoints["a"], tmp_path_factory.mktemp("state"), (*VLLM_ARGS, *trusted))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIGN_ENV, str(ours))
        with server.running():
            patch.delenv(SIGN_ENV)
            yield server


@pytest.fixture
def other(checkpoints: dict[str, Path]) -> dict[str, torch.Tensor]:
    return load_file(checkpoints["b"] / "model.safetensors")


def answer(live: LiveServer) -> list[int]:
    return list(live.generate([9, 8, 7, 6], 12)["choices"][0]["token_ids"])


def test_what_a_remote_trainer_has_signed_is_served(
    trusting: LiveServer, trainer_key: Path, other: dict[str, torch.Tensor]
) -> None:
    before, processes = answer(trusting), trusting.processes
    remote = RemotePublisher(processes.admin_url, processes.admin_key, trusting.name, sign=trainer_key)
    version = remote.publish(other)
    with contextlib.closing(SyncStore(processes.store)) as store:
        found = store.get(Keys(trusting.name).version(version))
    assert found is not None
    assert signers(VersionRecord.from_json(found.value)) == {"": Signer(trainer_key).key_id}
    assert trusting.active() == version
    assert answer(trusting) != before


def test_what_nobody_has_signed_is_refused_and_the_old_version_serves_on(
    trusting: LiveServer, other: dict[str, torch.Tensor]
) -> None:
    """It is refused before it is staged."""
    with Publisher(trusting.processes.store, model=trusting.name, lineage="push") as publisher:
        version = publisher.publish(other, activate=False)
    serving, said, staged = trusting.active(), answer(trusting), trusting.instance()["staged_version"]
    told = trusting.activate(version)
    assert told.status_code == 409, told.text
    assert "is not signed" in told.json()["error"]["message"]
    assert (trusting.active(), trusting.instance()["state"], answer(trusting)) == (serving, "SERVING", said)
    assert trusting.instance()["staged_version"] == staged
