"""Features that a machine may lack. Installed programs belong to CI, where a test without them fails; of a kernel or a
CPU nothing can be asked, and what they cannot do skips a test everywhere."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def lacking(reason: str) -> NoReturn:
    """On a developer's machine the test is skipped; where CI is set it fails."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def program(name: str) -> str:
    """Its path; what it lacks otherwise is Debian's package of that name."""
    return shutil.which(name) or lacking(f"no {name}: install Debian's {name}")


def unable(reason: str) -> NoReturn:
    """This kernel or this CPU cannot do it; CI's neither."""
    pytest.skip(reason)
