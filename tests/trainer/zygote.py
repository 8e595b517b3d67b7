"""Training runs in real processes that start at once: forked from one that has imported Megatron, which takes seconds.

Each is `trainer.main.main(arguments)` in a process of its own, to be killed at will.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


class Zygote:
    """Starts runs. Use as a context."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.zygote"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, arguments: list[str], said: Path, errors: Path | None = None, **environment: str) -> int:
        """The process id of `trainer.main ARGUMENTS`; what it says goes to a file, its errors to another if given."""
        files = {"said": str(said), "errors": str(errors or said)}
        started: int = self._ask({"arguments": arguments, "environment": environment, **files})
        return started

    def run(self, arguments: list[str], root: Path) -> tuple[int, str, str]:
        """Exit status, standard output and standard error of `trainer.main ARGUMENTS`."""
        said, errors = root / "standard-output", root / "standard-error"
        for file in (said, errors):
            file.unlink(missing_ok=True)
        status = self.wait(self.start(arguments, said, errors))
        return status, said.read_text(), errors.read_text()

    def wait(self, pid: int) -> int:
        """Its exit status, negative for a signal."""
        status: int = self._ask({"pid": pid})
        return status

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()


def serve() -> None:
    from trainer.launch import die_with_parent
    from trainer.main import _quiet, main
    from trainer.megatron import shim

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _quiet()
    die_with_parent()
    shim.install()
    import trainer.faults.supervision
    import trainer.loop  # noqa: F401 - imported before runs are forked

    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])
        elif (answer := os.fork()) == 0:
            for descriptor, file in ((1, request["said"]), (2, request["errors"])):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
            os.environ |= request["environment"]
            os._exit(_status(main, request["arguments"]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _status(main: Any, arguments: list[str]) -> int:
    import traceback

    from tests.trainer.faults import patches

    die_with_zygote()
    patches.apply()
    try:
        return int(main(arguments))
    except BaseException:
        traceback.print_exc()
        return 99


def die_with_zygote() -> None:
    from trainer.launch import die_with_parent

    die_with_parent()


if __name__ == "__main__":
    serve()
