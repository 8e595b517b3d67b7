"""The message of a command whose package is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from server.errors import CliError

ROOT = Path(__file__).parents[1]  # a checkout, or where pip puts packages
NO_VISION = "pip uninstall -y torchvision torchaudio torchcodec: they are of another torch, and are not needed"
OURS = frozenset({"server", "weightsync", "trainer"})


def in_checkout(root: Path = ROOT) -> bool:
    """Whether Hotswap runs from a checkout, which has a Makefile, and not from where pip has put it."""
    return (root / "Makefile").is_file()


def setup(accel: str = "", *, anew: bool = False, root: Path = ROOT) -> str:
    """The command that installs all that Hotswap needs, as this package was installed: `make` in a checkout, else pip,
    which finds hotswap there and adds the packages of the extra. `accel`: cpu or cuda, where only one will do; `anew`:
    nothing of what is installed can stay, and no index has hotswap."""
    if in_checkout(root):
        return f"`{'make clean && ' if anew else ''}make setup{f' ACCEL={accel}' if accel else ''}`"
    if anew:
        return f"in a new virtual environment install this release's wheels again, hotswap with the extra `{accel}`"
    return f"`pip install 'hotswap[{accel or 'cpu'}]'`" + ("" if accel else " (hotswap[cuda] for GPUs)")


def told(package: str) -> CliError:
    """The error that names `package` and the command that installs it."""
    return CliError(f"the package {package} is not installed. This brings all that is needed: {setup()}")


def require(*packages: str) -> None:
    """Raises CliError for the first that cannot be found; imports none of them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise told(package)


def of(error: ModuleNotFoundError) -> CliError | None:
    """The error to show for `error`; None if a module of our own is missing, which is a fault of ours."""
    package = (error.name or "").partition(".")[0]
    return told(package) if package and package not in OURS else None
