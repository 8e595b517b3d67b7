"""GPUs that a run takes, on hosts that are told of."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

from tests.server.nvml import seven
from trainer import devices
from trainer.devices import DEVICES_ENV, chosen, take
from trainer.errors import ConfigError
from weightsync.control.records import DeviceRecord, InstanceRecord, Keys
from weightsync.store import SyncStore
from weightsync.vllm_engine.gpus import Gpus

HOST = seven()
UUIDS = [gpu.uuid for gpu in HOST.devices]
HELD = {UUIDS[0]: "instance-0", UUIDS[1]: "instance-1"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host with seven GPUs, on which torch computes, and without a server."""
    monkeypatch.setattr(devices.gpus, "look", lambda: HOST)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("HOTSWAP_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv(DEVICES_ENV, "")  # which is undone at the end, whatever a test makes of it
    monkeypatch.delenv(DEVICES_ENV)

    return os.environ.get(DEVICES_ENV)


@pytest.mark.parametrize(
    ("asked", "ranks", "taken"),
    [(None, 1, [2]), (None, 2, [2, 3]), ("0,2,3", 2, [2, 3]), (f"{UUIDS[4]}, 0", 1, [4])],
)
def test_a_run_takes_what_no_server_has(asked: str | None, ranks: int, taken: list[int]) -> None:
    assert chosen(asked, ranks, HOST, HELD) == [UUIDS[index] for index in taken]


@pytest.mark.parametrize(
    ("asked", "ranks", "said"),
    [
        (None, 6, r"6 ranks want a GPU each, and 5 of 7 are free; instance-0 has 0; instance-1 has 1"),
        ("1", 1, r"0 of 1 are free; instance-1 has 1\. Name GPUs in devices"),
        ("", 1, r"0 of 0 are free\. .*set devices to cpu"),
        ("9", 1, r"no GPU here is called 9\. This host has 0 or GPU-"),
    ],
)
def test_what_cannot_be_taken_is_refused(asked: str | None, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen(asked, ranks, HOST, HELD)


def test_the_stores_say_what_servers_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs of all models of the servers are held. A GPU that the configuration names is shared, in phases too."""
    url = f"sqlite://{tmp_path}/store.db"
    with contextlib.closing(SyncStore(url)) as store:
        for model, uuid in (("a", UUIDS[0]), ("org/b", UUIDS[1])):
            record = InstanceRecord("instance-0", "http://127.0.0.1:1", devices=(DeviceRecord(uuid),))
            store.put(Keys(model).instance("instance-0"), record.to_json())
    take(None, 2, url)
    assert os.environ.get(DEVICES_ENV) == f"{UUIDS[2]},{UUIDS[3]}"
    monkeypatch.setenv(DEVICES_ENV, "1,2")
    take(None, 1, url)
    assert os.environ.get(DEVICES_ENV) == UUIDS[2]
    monkeypatch.delenv(DEVICES_ENV)
    take(None, 1, url, shared=True)
    assert os.environ.get(DEVICES_ENV) == UUIDS[0]
    take(1, 1, url)
    assert os.environ.get(DEVICES_ENV) == UUIDS[1]
    take(None, 1, f"sqlite://{tmp_path}/none.db", shared=True)


def test_a_run_on_a_cpu_beside_gpus_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"7 GPUs, and torch .* computes on none of them\. .*set devices to cpu"):
        take(None, 1, "")
    take("cpu", 1, "")
    assert os.environ.get(DEVICES_ENV) == ""


def test_without_gpus_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (None, Gpus((), why_none="NVML: Driver Not Loaded")):
        monkeypatch.setattr(devices.gpus, "look", lambda found=found: found)
        take(None, 4, "")
        take("cpu", 1, "")
        with pytest.raises(ConfigError, match="no GPU is seen here"):
            take("2,3", 1, "")


def test_ranks_of_another_launcher_keep_what_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    take(None, 8, "")
    assert os.environ.get(DEVICES_ENV) is None
