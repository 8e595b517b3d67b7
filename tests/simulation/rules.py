"""Rules of the code that are taken away: a schedule must find what each of them is for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from loadtest.histories.rules import Violation
from loadtest.simulation.schedules import World, explore


def without(name: str, found: str, *taken: tuple[Any, str, Any], broad: bool = False) -> Any:
    """A case of a table. `taken`: an owner, its attribute, and what stands there instead: a value, or a function that
    is given the real one before its arguments. The name must not match `found`: a violation names its test."""
    assert not re.search(found, name)
    return pytest.param(taken, found, id=name, marks=[pytest.mark.broad] * broad)


def check_found(
    world: type[World], taken: tuple[tuple[Any, str, Any], ...], found: str, schedules: int, patch: pytest.MonkeyPatch
) -> None:
    for owner, attribute, instead in taken:
        patch.setattr(owner, attribute, _before(getattr(owner, attribute), instead) if callable(instead) else instead)
    with pytest.raises(Violation, match=found):
        explore(world, range(schedules), "rules")


def _before(real: Any, instead: Any) -> Any:
    return lambda *args, **more: instead(real, *args, **more)


def check_happened(seen: Counter[str], least: Mapping[str, int]) -> None:
    missing = {what: count for what, count in least.items() if seen[what] < count}
    assert not missing, f"the schedules hardly try {missing}: {seen}"
