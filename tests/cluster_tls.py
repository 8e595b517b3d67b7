"""Certificates of a cluster's members, as cert-manager writes them and the kubelet mounts them."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

from tests.etcd import Tls
from weightsync.tls import ClusterTls


class Authority(Tls):
    _numbers = itertools.count()

    def mount(self, directory: Path, name: str = ClusterTls.NAME, **more: Any) -> Path:
        """A new certificate for `name`, in place of the one that `directory` had: at once, by the symlink ..data."""
        directory.mkdir(parents=True, exist_ok=True)
        certificate, key = self.issue(name, **more)
        data = directory / f"..{next(self._numbers)}"
        data.mkdir()
        for source, target in ((certificate, "tls.crt"), (key, "tls.key"), (self.ca, "ca.crt")):
            shutil.copy(source, data / target)
            if not (directory / target).is_symlink():
                (directory / target).symlink_to(Path("..data") / target)
        (directory / "..next").symlink_to(data.name)
        (directory / "..next").rename(directory / "..data")
        return directory
