"""Commands that become what they start, those of other packages, those whose packages are missing; and how those that
only read start quickly, and are readable on a terminal of 80 columns."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server import missing
from server.cli.app import GROUPS, app
from server.cli.commands import UP
from server.errors import CliError
from server.key_limits import KeyLimits
from server.up.config import UpConfig
from tests.server.asking import answering
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
        wait_until(lambda: module.encode() in Path(f"/proc/{train.pid}/cmdline").read_bytes(), 120, process=train)
        train.terminate()
        assert train.wait(60) == -15
    finally:
        train.kill()
        train.wait()


# `hotswap up MODEL`, and the version


def up_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> UpConfig:
    """The configuration that these words make. Raises CliError."""
    made: list[UpConfig] = []
    monkeypatch.setattr("server.up.server.run_up", made.append)
    done = CliRunner().invoke(app, ["up", *words])
    if isinstance(done.exception, CliError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return made[0]


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (["m"], ()),
        (["--model", "m"], ()),
        (["m", "--max-model-len", "512", "--port", "9000"], ("--max-model-len", "512")),
        (["--port", "9000", "m", "--max-model-len", "512"], ("--max-model-len", "512")),
        (["--model", "m", "--max-model-len", "512"], ("--max-model-len", "512")),
    ],
)
def test_the_model_is_named_by_the_first_word_or_by_its_option(
    monkeypatch: pytest.MonkeyPatch, words: list[str], passed: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HOTSWAP_UP_MODEL", "of-the-environment")
    config = up_of(monkeypatch, *words)
    assert (config.model, config.vllm_args) == ("m", passed)


def test_the_gateway_is_told_what_up_was_told_and_no_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert up_of(monkeypatch, "m").gateway_args == ()
    (file := tmp_path / "up.yaml").write_text("hold: 2\nworkers: 3\nrequire-key: true\n")
    monkeypatch.setenv("HOTSWAP_UP_MAX_BODY", "1000")
    words = ["--config", str(file), "--workers", "2", "--no-coordinator", "--allow-origin", "a", "--allow-origin", "b"]
    config = up_of(monkeypatch, "m", *words, "--max-model-len", "512")
    passed = {"--hold": "2.0", "--workers": "2", "--max-body": "1000"}
    given = {flag: config.gateway_args[config.gateway_args.index(flag) + 1] for flag in passed}
    assert given == passed
    assert {"--require-key", "--no-coordinator", "--allow-origin", "a", "b"} < {*config.gateway_args}
    assert len(config.gateway_args) == 2 * len(passed) + 2 + 4
    assert config.vllm_args == ("--max-model-len", "512")


def test_a_member_s_certificate_is_for_the_instances_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_CLUSTER_TLS", "/of/before")
    assert up_of(monkeypatch, "m", "--cluster-tls", "/tls").gateway_args == ("--cluster-tls", "/tls")
    assert os.environ["HOTSWAP_CLUSTER_TLS"] == "/tls"


@pytest.mark.parametrize("words", [["a", "--model", "b"], ["--model", "b", "a"], ["a", "b"]])
def test_two_models_on_the_command_line_are_refused(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    with pytest.raises(CliError, match=r"(a and b|b and a): name one checkpoint"):
        up_of(monkeypatch, *words)


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"hotswap {version('hotswap')}\n"
    assert "[MODEL]" in CliRunner().invoke(app, ["up", "--help"]).stdout


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


# names that are misspelt, and what help says


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["weight", "list"], "weights"), (["wieghts"], "weights"), (["satus"], "status"), (["weights", "pus"], "push")],
)
def test_the_command_that_was_meant_is_named_without_importing_it(words: list[str], meant: str) -> None:
    _, said = imports_little(*words, status=2)
    assert re.search(f"Did you mean [^?]*'{meant}'", " ".join(said.replace("│", " ").split())), said


@pytest.mark.parametrize("group", GROUPS)
def test_options_of_the_shell_are_not_among_those_of_a_group(group: str) -> None:
    assert "completion" not in CliRunner().invoke(app, [group, "--help"]).stdout


def test_help_shows_what_an_option_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = CliRunner().invoke(app, ["up", "--help-all"]).stdout
    assert "[same|any|off]" in said
    assert "[SPREAD|PACK|STRICT_SPREAD|STRICT_PACK]" in said


def test_help_shows_what_is_needed_daily_and_help_all_every_option_by_its_whole_name() -> None:
    narrow = CliRunner(env={"COLUMNS": "80"})
    said = [narrow.invoke(app, ["up", flag]).stdout for flag in ("--help", "--help-all")]
    daily, every = ({*re.findall(r"^│ (--[\w-]+) ", text, re.MULTILINE)} for text in said)
    assert every - {"--config", "--help", "--help-all"} == {setting.flag for setting in UP}
    assert daily == every - {setting.flag for setting in UP if setting.option.panel}
    assert {"--model", "--port", "--instances", "--config", "--help-all"} <= daily
    assert len(daily) < len(every) / 2


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
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


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
    text = f"the package {without.partition(',')[0]} is not installed"
    [line] = [line for line in done.stderr.splitlines() if text in line]
    assert missing.setup() in line


def test_what_is_missing_is_installed_as_hotswap_was(tmp_path: Path) -> None:
    """In a checkout by make; of a package that pip installed there is no Makefile."""
    assert "pip install 'hotswap[cpu]'" in (said := missing.setup(root=tmp_path))
    assert "hotswap[cuda]" in said
    assert "wheels again, hotswap with the extra `cuda`" in missing.setup("cuda", anew=True, root=tmp_path)
    (tmp_path / "Makefile").touch()
    assert missing.setup(root=tmp_path) == missing.setup() == "`make setup`"
    assert missing.setup("cuda", anew=True, root=tmp_path) == "`make clean && make setup ACCEL=cuda`"


def test_what_make_sets_up_is_what_this_says() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert {"setup", "clean"} <= {*re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)}
    assert re.search(r"^ACCEL\b", makefile, re.MULTILINE)


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
    "opentelemetry", "ray", "numba", "pynvml", "transformers", "mypyc", "setuptools", "mypy", "peft",
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


# commands that only read

# Packages that take a second or more to import, or are absent where only the command line is installed.
HEAVY = {"torch", "transformers", "vllm", "megatron", "numpy", "fastapi", "uvicorn", "grpc", "huggingface_hub"}
READ = """
import runpy, sys
try:
    runpy.run_module("server.cli", run_name="__main__")
finally:
    print("modules:", *{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""
INSTANCE = {
    "id": "gpu-host-17-8000-instance-0", "state": "SERVING", "eligible": True, "draining": False, "active_version": 12,
    "active_epoch": 31, "fingerprint": "0123456789abcdef", "load": 3.0, "circuit": "closed", "answering": True,
    "stage_ms": 1758.31, "commit_ms": 53.07, "error": None,
}  # fmt: skip
VERSION = {
    "version": 12, "state": "ready", "step": 1200, "nbytes": 16_060_522_496, "created_at": 1.8e9,
    "source": "/var/lib/checkpoints/a-run-with-a-long-name/step-1200",
}  # fmt: skip
KEY = {
    "id": "k-0123456789abcdef", "name": "[ml] evaluation-team", "scopes": ["infer", "admin"], "state": "active",
    "models": [], "expires_at": 1.9e9, "limits": asdict(KeyLimits(requests_per_min=600, tokens_per_min=4_000_000)),
}  # fmt: skip


SWAP = {"version": 12, "mode": "rolling", "outcome": "aborted", "opened_at": 5.0, "ended_at": 7.5, "reason": "has NaN"}
ANSWERS: dict[str, Any] = {
    "/admin/instances": {"instances": [INSTANCE, INSTANCE | {"id": "b", "answering": False, "eligible": False}]},
    "/admin/weights": {"active": {"version": 12}, "versions": [VERSION]},
    "/admin/weights/active": {"version": 12, "epoch": 31, "previous": 11, "split": None},
    "/admin/swaps": {"swaps": [SWAP]},
    "/admin/sleep": {"asleep": [{"id": "instance-7"}]},
    "/admin/keys": {"inference": "keys", "keys": [KEY]},
}


@pytest.fixture(scope="module")
def admin_url() -> Iterator[str]:
    """An admin port with one of everything."""
    with answering(lambda path, _: (200, json.dumps(ANSWERS[path]).encode())) as url:
        yield url


def imports_little(*words: str, status: int = 0, **more: str) -> tuple[str, str]:
    """Words on the two channels of a command that ends with `status`."""
    environment = {"HOTSWAP_ADMIN_KEY": "any", "COLUMNS": "80", "PATH": "", **more}
    command = [sys.executable, "-c", READ, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == status, done.stderr
    said, _, modules = done.stderr.rpartition("modules:")
    assert "typer" in modules.split()
    assert not HEAVY & set(modules.split())
    return done.stdout, said


def read(*words: str, **more: str) -> str:
    """The output of a command on a terminal of 80 columns, for which it imports little and cuts nothing off."""
    said, _ = imports_little(*words, **more, TTY_COMPATIBLE="1", TERM="dumb")
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
    return said


COMMANDS = {
    "--help": [],
    "status --help": ["--state-dir", "--url", "--admin-key-file"],
    "instances list": [
        "gpu-host-17-8000-instance-0",
        "SERVING",
        "1758.31",
        "53.07",
        "b: does not answer",
        "wake instance-7",
    ],
    "weights list": ["16.061", "active", "2027"],
    "keys list": ["k-0123456789abcdef", "evaluation", "600", "4000000"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_it_imports_little_and_cuts_nothing_off(command: str, admin_url: str) -> None:
    said = read(*command.split(), HOTSWAP_ADMIN_URL=admin_url)
    assert [shown for shown in COMMANDS[command] if shown not in said] == [], said
    assert "--install-completion" not in said


def test_a_pipe_gets_whole_lines_with_text_as_it_is(admin_url: str) -> None:
    said, _ = imports_little("keys", "list", HOTSWAP_ADMIN_URL=admin_url)
    limits = "600 requests/min, 4000000 tokens/min"
    assert [line for line in said.splitlines() if "[ml] evaluation-team" in line and limits in line], said


def test_status_is_the_list_of_instances_and_swaps(admin_url: str, tmp_path: Path) -> None:
    info = {"url": admin_url, "admin_url": admin_url, "model": "m", "store": "", "admin_key_file": "", "pid": 1}
    (tmp_path / "server.json").write_text(json.dumps(info))
    said = read("status", "--state-dir", str(tmp_path))
    assert "active: version 12" in said
    assert "swap to version 12, rolling: aborted in 2.50 s" in said
