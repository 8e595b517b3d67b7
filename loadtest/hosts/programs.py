"""Programs of ours on a host that are asked over their stdin."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from loadtest.hosts.namespaces import Hosts


class Program:
    """A `python -m MODULE` on a host, that prints lines and may be asked."""

    def __init__(self, hosts: Hosts, host: int, module: str, *arguments: object) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self.process = hosts.run(host, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """What it says next, "" when it has ended."""
        assert self.process.stdout is not None
        return str(self.process.stdout.readline()).strip()

    def ask(self, question: str) -> Any:
        print(question, file=self.process.stdin, flush=True)
        return json.loads(self.line())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
