"""The message of a command whose package is not installed."""

from __future__ import annotations

import importlib.util

from server.errors import CliError

INSTALL = 'pip install ./client ".[cpu]" (.[cuda] for GPUs) in a checkout of Hotswap; docs/install.md has the traps'
NO_VISION = "pip uninstall -y torchvision torchaudio torchcodec: they are of another torch, and are not needed"
OURS = frozenset({"server", "weightsync", "trainer"})


def told(package: str) -> CliError:
    """The error that names `package` and the command that installs it."""
    return CliError(f"the package {package} is not installed. This brings all that is needed: {INSTALL}")


def require(*packages: str) -> None:
    """Raises CliError for the first that cannot be found; imports none of them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise told(package)


def of(error: ModuleNotFoundError) -> CliError | None:
    """The error to show for `error`; None if a module of our own is missing, which is a fault of ours."""
    package = (error.name or "").partition(".")[0]
    return told(package) if package and package not in OURS else None
