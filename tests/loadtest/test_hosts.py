"""What hosts made of namespaces leave behind. No namespace is made here."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from loadtest.hosts import etcd


class Host:
    """In place of Hosts: this machine, on which a member is a process that does nothing."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def run(self, host: int, argv: list[str], **popen: Any) -> subprocess.Popen[bytes]:
        self.started.append(subprocess.Popen(["sleep", "600"], **popen))
        return self.started[-1]


def test_an_etcd_that_does_not_come_up_leaves_nothing_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_vain(*_: object) -> None:
        raise TimeoutError

    host, data = Host(), tmp_path / "data"
    monkeypatch.setattr(etcd.tempfile, "mkdtemp", lambda **_: data.mkdir() or str(data))  # type: ignore[func-returns-value]
    monkeypatch.setattr(etcd, "until", in_vain)
    with pytest.raises(TimeoutError):
        etcd.Etcd(host, "etcd", on=(0, 1))  # type: ignore[arg-type]
    assert [process.poll() is not None for process in host.started] == [True, True]
    assert not data.exists()
