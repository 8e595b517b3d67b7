"""A real Ray cluster of several nodes on this machine, whose resources are only said to be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import warm
from tests.waiting import wait_until

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # others fill the memory, and Ray kills
HERE = Path(__file__).parent
HEAD = "127.0.0.2"  # at 127.0.0.1 Ray would look for another address of this machine


class RayCluster:
    """A head without resources for others, and nodes by their addresses, all of loopback. This process is no member."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        for kind in (warm.ENGINES, warm.TRAINERS):
            warm.shared(kind)
        self._path = os.environ.get("PYTHONPATH")
        ours = [str(HERE.parent), *([self._path] if self._path else [])]
        os.environ["PYTHONPATH"] = os.pathsep.join(ours)
        self._cluster = Cluster()
        self._nodes: dict[str, Any] = {}
        self.add(HEAD, cpus=0, include_dashboard=False)
        self.address = str(self._cluster.address)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()
        del os.environ["PYTHONPATH"]
        os.environ |= {"PYTHONPATH": self._path} if self._path else {}

    def add(self, address: str, cpus: int = 1, **more: Any) -> None:
        settings = {"node_ip_address": address, "num_cpus": cpus, "object_store_memory": 80 << 20}
        self._nodes[address] = self._cluster.add_node(wait=False, **settings, **more)

    def remove(self, address: str) -> None:
        """Kill a node with all that runs on it."""
        self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)

    def whole(self) -> float:
        return float(len(self._nodes) - 1)

    def free(self) -> float:
        """The CPUs that nobody has taken, once as many are free as ever will be."""
        code = f"import ray; ray.init({self.address!r}, log_to_driver=False); print(ray.available_resources()['CPU'])"

        def ask() -> float:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            return float(done.stdout or 0)

        wait_until(lambda: ask() == self.whole(), 240, lambda: f"{ask()} of {self.whole()} CPUs are free")
        return ask()
