"""Training runs in real processes that start at once, forked from one that has imported Megatron (tests/warm.py).

Each is `trainer.main.main(arguments)` in a process of its own, to be killed at will: `python -m tests.trainer.zygote
ARGUMENTS`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from server.up.forks import Forked
from tests.trainer.faults.runs import SUMS, arguments, fine_tuning
from tests.warm import TRAINERS, warm

PATIENCE_S = 900.0


class Zygote:
    """Starts runs."""

    def __init__(self) -> None:
        self._runs: dict[int, Forked] = {}

    def start(self, arguments: list[str], said: Path, errors: Path | None = None, **environment: str) -> int:
        """The process id of `trainer.main ARGUMENTS`; what it says goes to a file, its errors to another if given."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        run = warm(TRAINERS).start(["tests.trainer.zygote", *arguments], env, said, errors=errors)
        self._runs[run.pid] = run
        return run.pid

    def run(self, arguments: list[str], root: Path, **environment: str) -> tuple[int, str, str]:
        """Exit status, standard output and standard error of `trainer.main ARGUMENTS`."""
        said, errors = root / "standard-output", root / "standard-error"
        for file in (said, errors):
            file.unlink(missing_ok=True)
        status = self.wait(self.start(arguments, said, errors, **environment))
        return status, said.read_text(), errors.read_text()

    def train(self, config: dict[str, Any], root: Path, name: str = "config", **environment: str) -> Path:
        """The metrics of a run, which must succeed."""
        config = {"metrics": str(root / f"{name}.jsonl")} | config
        status, _, errors = self.run(arguments(config, root, f"{name}.yaml"), root, **environment)
        assert status == 0, errors
        return Path(config["metrics"])

    def taught(self, model: str, directory: Path, **data: Any) -> str:
        """The model after fine-tuning on sums, in a new directory."""
        optimizer = {"lr": 2e-3, "warmup_steps": 10, "decay": "cosine"}
        more = {"data": SUMS | data, "batch": 64, "optimizer": optimizer, "save_to": str(directory)}
        self.train(fine_tuning(model, steps=80, **more), directory.parent, directory.name)
        return str(directory)

    def wait(self, pid: int) -> int:
        """Its exit status, negative for a signal."""
        return self._runs[pid].wait(PATIENCE_S)


if __name__ == "__main__":
    from tests.trainer.faults import patches
    from trainer.main import main

    patches.apply()
    sys.exit(main(sys.argv[1:]))
