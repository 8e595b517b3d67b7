"""Hosts to look at: files for the kernel's, commands that say what a test wants, checkpoints of a known size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from server.doctor.registry import Finding, Status, all_checks
from server.doctor.world import Ran, World


def host(root: Path, files: Mapping[str, str] = {}, **given: Any) -> World:
    """A world whose /proc and /sys hold `files` and nothing else, without an environment."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    settings: dict[str, Any] = {"root": root, "environ": {}, "run": says(None, "No such file or directory")}
    settings["gpus"] = lambda: None
    return World(**settings | given)


def says(status: int | None, said: str = "") -> Callable[[Sequence[str]], Ran]:
    """A runner all of whose commands end so."""
    return lambda command: Ran(status, said)


def findings(name: str, world: World) -> list[Finding]:
    """Of the check of that name."""
    return list(next(check for check in all_checks() if check.name == name).function(world))


def only(found: Iterable[Finding], status: Status) -> Finding:
    """The one finding there is. It must stand so, and say how to mend what is not well."""
    (finding,) = found
    assert finding.status == status, finding
    assert bool(finding.mend) == (status in ("warn", "fail")), finding
    return finding


def statuses(found: Iterable[Finding]) -> list[Status]:
    return [finding.status for finding in found]


def checkpoint(directory: Path, mebibytes: int = 1) -> Path:
    """A checkpoint directory with one tensor."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    save_file({"a.weight": np.zeros(mebibytes << 18, np.float32)}, directory / "model.safetensors")
    return directory
