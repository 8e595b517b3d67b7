"""The `hotswap` command."""

from __future__ import annotations

import sys

from server import missing
from server.errors import CliError


def main() -> None:
    """Entry point: errors a user can mend are one line on stderr and exit code 1 (2 for bad usage)."""
    try:
        from server.cli.app import app

        app()
    except CliError as error:
        print(f"hotswap: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if (said := missing.of(error)) is None:
            raise
        print(f"hotswap: {said}", file=sys.stderr)
        sys.exit(1)
