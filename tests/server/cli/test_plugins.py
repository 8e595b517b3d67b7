"""Commands of other packages, which the command line finds by their entry points."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli.app import app

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
