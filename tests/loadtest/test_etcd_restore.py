"""An etcd that is restored from a snapshot, as `hotswap bench chaos` does it: members on addresses of loopback."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.hosts import etcd
from loadtest.hosts.etcd import Etcd
from tests.etcd import require
from tests.lacking import lacking
from tests.weightsync.codes import refused
from weightsync import SyncStore


class Loopback:
    """The part of `Hosts` that `Etcd` uses."""

    def address(self, host: int) -> str:
        return f"127.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250 + 1}.{host + 1}"

    def run(self, _: int, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(argv, **popen)


def test_a_restored_etcd_has_what_the_snapshot_has_and_is_taken_for_another(tmp_path: Path) -> None:
    binary, hosts = require(), Loopback()
    if etcd.client() is None:
        lacking(etcd.NO_CLIENT)
    with contextlib.closing(Etcd(hosts, binary)) as members:  # type: ignore[arg-type]  # it takes no namespaces
        members.settle()
        with contextlib.closing(SyncStore(members.url("test"))) as store:
            store.put("kept", b"1")
            members.save(tmp_path / "snapshot")
            store.put("lost", b"2")
            members.stop()
            members.restore(tmp_path / "snapshot")
            members.start()
            members.settle()
            with refused("store_lost", match="another etcd is in its place"):
                store.get("kept")
        with contextlib.closing(SyncStore(members.url("test"))) as store:
            assert [kv.key for kv in store.list("")[0]] == ["kept"]
