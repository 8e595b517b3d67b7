"""The compiled request path: used when it fits its sources, left alone when not, and the same in what it does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from server.gateway import compiled
from tests.lacking import program

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# Those that speak to a gateway in their own process without reaching into its modules.
SAME = (
    "access/test_keys",
    "access/test_limits",
    "fleet/test_failover",
    "fleet/test_hold",
    "hostile/test_hostile",
    "hostile/test_parsers_fuzz",
    "observe/test_usage",
    "wire/test_cancel",
    "wire/test_journal",
    "wire/test_proxy",
)
WHERE = "import server.gateway.wire.relay as r; print(r.__file__)"


def run(*arguments: str, timeout_s: float = 280, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if compiled.built_from() != compiled.digest():
        program("gcc")
        run("-m", "server.gateway.compiled")


def test_python_runs_the_sources_when_asked_to() -> None:
    assert run("-c", WHERE, HOTSWAP_PURE="1").strip().endswith("relay.py")


def test_it_is_used_until_a_source_is_edited(tmp_path: Path) -> None:
    copy = tmp_path / "server"
    shutil.copytree(ROOT / "server", copy)
    (tmp_path / "weightsync").symlink_to(ROOT / "weightsync")
    relay = copy / "gateway" / "wire" / "relay.py"
    assert run("-c", WHERE, cwd=tmp_path, PYTHONPATH=str(tmp_path)).strip().endswith(".so")
    relay.write_text(relay.read_text() + "\n# edited\n")
    place, *said = run("-c", WHERE, cwd=tmp_path, PYTHONPATH=str(tmp_path)).splitlines()
    assert place == str(relay)
    assert "make setup" in "".join(said)


@pytest.mark.parametrize("source", compiled.sources(), ids=lambda p: p.stem)
def test_nothing_is_in_it_that_mypyc_would_change(source: Path) -> None:
    """A msgspec structure loses its annotations there, a slotted dataclass its import."""
    text = source.read_text()
    assert "msgspec.Struct" not in text
    assert "slots=True" not in text


@pytest.mark.broad
@pytest.mark.timeout(900)
def test_it_does_what_the_sources_do() -> None:
    files = [str(HERE / f"{name}.py") for name in SAME]
    said = run("-m", "pytest", *files, "-m", "not engine and not slow", timeout_s=850, HOTSWAP_PURE="0")
    assert " passed" in said or "100%" in said
