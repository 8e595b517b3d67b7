"""What is installed, read without importing it: torch alone would take seconds."""

from __future__ import annotations

import ast
import importlib.util
from importlib import metadata
from pathlib import Path


def version_of(package: str) -> str | None:
    """Without the local part ("+cpu"); None if it is not installed."""
    try:
        return metadata.version(package).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """The CUDA release that the installed torch was built with, such as "13.0"; None for a CPU build or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return cuda_in(Path(spec.origin).with_name("version.py"))


def cuda_in(version_file: Path) -> str | None:
    """The value of `cuda` in torch's version.py."""
    try:
        tree = ast.parse(version_file.read_text())
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Constant):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
            return None if node.value.value is None else str(node.value.value)
    return None
