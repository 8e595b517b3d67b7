"""The one account of what is held: components by name, their states, their bytes, and the budget."""

from __future__ import annotations

import time

from trainer.errors import MemoryPlanError, OverBudget
from trainer.memory.components import Component, Verb
from trainer.memory.units import gib


class Ledger:
    """Every change of a component goes through here; none that would exceed the budget begins."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget = budget_bytes
        self._components: dict[str, Component] = {}
        self.ms: dict[str, float] = {}  # of the last change of each component

    def add(self, component: Component) -> None:
        """As it is, even over the budget: it is there. Raises MemoryPlanError for a second one of that name."""
        if component.name in self._components:
            raise MemoryPlanError(f"there are two components {component.name!r}. Give one another name.")
        self._components[component.name] = component

    def __getitem__(self, name: str) -> Component:
        if name not in self._components:
            known = ", ".join(self._components) or "none"
            raise MemoryPlanError(f"there is no component {name!r} (there are: {known}).")
        return self._components[name]

    def __contains__(self, name: str) -> bool:
        return name in self._components

    @property
    def components(self) -> list[Component]:
        """In the order they were added."""
        return list(self._components.values())

    @property
    def held(self) -> int:
        """Bytes of everything that is instantiated."""
        return sum(c.bytes for c in self._components.values() if c.state == "instantiated")

    @property
    def free(self) -> int:
        return self.budget - self.held

    def instantiate(self, name: str) -> None:
        self._check_room(self[name])
        self._do(name, "instantiate")

    def reload(self, name: str) -> None:
        self._check_room(self[name])
        self._do(name, "reload")

    def offload(self, name: str) -> None:
        self._do(name, "offload")

    def destroy(self, name: str) -> None:
        self._do(name, "destroy")

    def put_away(self, name: str) -> None:
        """Have it hold nothing, in the way that suits it."""
        self._do(name, self[name].leaves)

    def bring(self, name: str) -> None:
        """Have it instantiated, whatever became of it."""
        if self[name].state == "offloaded":
            self.reload(name)
        else:
            self.instantiate(name)

    def _do(self, name: str, verb: Verb) -> None:
        began = time.perf_counter()
        getattr(self[name], verb)()
        self.ms[name] = (time.perf_counter() - began) * 1e3

    def _check_room(self, component: Component) -> None:
        needed = self.held + component.bytes
        if component.state != "instantiated" and needed > self.budget:
            held = ", ".join(_told(c) for c in self.components if c.state == "instantiated") or "nothing"
            problem = f"{_told(component)} does not fit into {gib(self.budget)}: {held} is held"
            raise OverBudget(f"{problem}. Offload something first.", needed=needed, budget=self.budget)


def _told(component: Component) -> str:
    return f"{component.name} ({gib(component.bytes)})"
