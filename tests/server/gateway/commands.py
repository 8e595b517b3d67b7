"""The command line against a gateway under test."""

from __future__ import annotations

from typer.testing import CliRunner

from server.cli.app import app
from tests.server.gateway.harness import ADMIN_KEY, RunningGateway


def command(gateway: RunningGateway, *words: object, key: str = ADMIN_KEY) -> str:
    """The output of `hotswap WORDS`. Raises the error of the command."""
    env = {"HOTSWAP_ADMIN_URL": gateway.admin_url, "HOTSWAP_ADMIN_KEY": key, "COLUMNS": "250", "TERM": "dumb"}
    done = CliRunner().invoke(app, [str(word) for word in words], env=env)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout
