"""Commands that become what they start, commands of other packages, and commands whose packages are missing."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli.app import app
from tests.waiting import wait_until

# `hotswap train` and its like, where a signal for one is one for the other


@pytest.mark.parametrize(
    ("command", "module"),
    [("train", "trainer.main"), ("train-server", "trainer.api"), ("reward-server", "trainer.rewards.server")],
)
def test_the_process_that_was_started_is_the_trainer(tmp_path: Path, command: str, module: str) -> None:
    config = tmp_path / "config.yaml"
    os.mkfifo(config)  # the trainer waits in reading it
    train = subprocess.Popen([sys.executable, "-m", "server.cli", command, "--config", str(config)])
    try:
        wait_until(lambda: module.encode() in Path(f"/proc/{train.pid}/cmdline").read_bytes(), 60, process=train)
        train.terminate()
        assert train.wait(60) == -15
    finally:
        train.kill()
        train.wait()


# found by their entry points


GREETS = """
import typer
app = typer.Typer(help="Greets.")

@app.command()
def someone(name: str) -> None:
    print("hello", name)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "greets-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: greets\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[hotswap.commands]\ngreet = greets:app\n")
    (tmp_path / "greets.py").write_text(GREETS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed")
def test_a_command_of_another_package_runs_and_is_listed() -> None:
    assert CliRunner().invoke(app, ["greet", "you"]).stdout == "hello you\n"
    assert "greet" in CliRunner().invoke(app, ["--help"]).stdout


def test_a_command_that_nobody_has_is_refused() -> None:
    assert CliRunner().invoke(app, ["greet", "you"]).exit_code == 2


# packages that are missing; and what is declared is enough


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
    "vllm", "aiohttp", "pyarrow", "setproctitle", "llguidance", "xgrammar", "torch", "triton", "safetensors",
    "opentelemetry", "ray", "numba", "pynvml", "transformers", "mypyc", "setuptools", "mypy",
}  # fmt: skip


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
