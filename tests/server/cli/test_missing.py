"""Where packages are missing, commands name them and the command that installs them; and what is declared is enough."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Runs the command line where the packages in the first argument cannot be imported.
RUN = """
import runpy, sys
class Without:
    names = sys.argv[1].split(",")
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in Without.names else find(name, *more)
sys.meta_path.insert(0, Without())
sys.argv = ["hotswap", *sys.argv[2:]]
runpy.run_module("server.cli", run_name="__main__")
"""


def hotswap(without: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, without, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("without", "command"),
    [
        ("vllm", ["up", "--model", "m"]),
        ("torch,vllm", ["up", "--model", "m"]),
        ("vllm", ["instance", "--model", "m", "--name", "m", "--store", "sqlite:///nowhere.db"]),
        ("fastapi", ["gateway", "--store", "sqlite:///nowhere.db", "--model", "m"]),
        ("httpx", ["status"]),
        ("rich", ["weights", "list"]),
    ],
)
def test_a_command_names_the_package_that_is_missing(without: str, command: list[str]) -> None:
    done = hotswap(without, *command)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    missing = f"the package {without.partition(',')[0]} is not installed"
    [line] = [line for line in done.stderr.splitlines() if missing in line]
    assert "pip install" in line


@pytest.mark.parametrize(("without", "check"), [("cryptography", "cluster-tls"), ("psutil", "ports")])
def test_doctor_finds_what_is_missing_and_goes_on(without: str, check: str) -> None:
    done = hotswap(without, "doctor", "--json", "--only", check, "--only", "open-files")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert f"the package {without} is not installed" in done.stdout
    assert "open-files" in done.stdout


# Imported where they are there, or by commands that name them where they are not; and what comes with vLLM.
OPTIONAL = {
    "vllm",
    "aiohttp",
    "pyarrow",
    "setproctitle",
    "llguidance",
    "xgrammar",
    "torch",
    "triton",
    "safetensors",
    "opentelemetry",
    "ray",
    "numba",
    "pynvml",
    "transformers",
    "mypyc",
    "setuptools",
    "mypy",
}


def test_what_the_server_imports_is_declared() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    declared = {re.split(r"[\[>=<]", name)[0].lower().replace("_", "-") for name in dependencies}
    distributions = packages_distributions()
    for package in ("server", "weightsync"):
        for file in (ROOT / package).rglob("*.py"):
            for name in _imported(file) - OPTIONAL - sys.stdlib_module_names:
                found = {each.lower().replace("_", "-") for each in distributions.get(name, [name])}
                assert found & declared, f"{file.relative_to(ROOT)} imports {name}"


def _imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    return names - {"server", "weightsync", "trainer", "loadtest"}
