"""The account of what is held: components, their states, their bytes, and the budget.

A component holds memory. This is its life:

                  .--------- destroy ----------.
                  v                            |
    destroyed --instantiate--> instantiated --offload--> offloaded
                                    ^                       |
                                    `------- reload --------'

`bytes` is what it holds of the device while instantiated. Offloaded, its content is kept elsewhere; destroyed, it is
gone, and only a component that knows where it comes from can be instantiated again.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch

from trainer.errors import MemoryPlanError

State = Literal["instantiated", "offloaded", "destroyed"]
Verb = Literal["instantiate", "offload", "reload", "destroy"]
FROM: dict[Verb, frozenset[State]] = {
    "instantiate": frozenset({"destroyed"}),
    "offload": frozenset({"instantiated"}),
    "reload": frozenset({"offloaded"}),
    "destroy": frozenset({"instantiated", "offloaded"}),
}
AFTER: dict[Verb, State] = {
    "instantiate": "instantiated",
    "offload": "offloaded",
    "reload": "instantiated",
    "destroy": "destroyed",
}
GIB = 2**30


@runtime_checkable
class Component(Protocol):
    """One owner of device memory. A change that fails raises and leaves the component as it was."""

    @property
    def name(self) -> str: ...

    @property
    def bytes(self) -> int:
        """The bytes of the device that the component holds, or will hold, when it is instantiated."""
        ...

    @property
    def state(self) -> State: ...

    @property
    def leaves(self) -> Verb:
        """`offload` or `destroy`: how it makes room."""
        ...

    def instantiate(self) -> None: ...

    def offload(self) -> None: ...

    def reload(self) -> None: ...

    def destroy(self) -> None: ...


class Base(ABC):
    """The state machine of a component; subclasses do the work that their components are capable of."""

    leaves: Verb = "offload"

    def __init__(self, name: str, state: State = "instantiated") -> None:
        self.name = name
        self.state: State = state

    def instantiate(self) -> None:
        self._change("instantiate", self._instantiate)

    def offload(self) -> None:
        self._change("offload", self._offload)

    def reload(self) -> None:
        self._change("reload", self._reload)

    def destroy(self) -> None:
        self._change("destroy", self._destroy)

    def _change(self, verb: Verb, work: Callable[[], None]) -> None:
        if self.state not in FROM[verb]:
            allowed = " or ".join(sorted(FROM[verb]))
            raise MemoryPlanError(f"cannot {verb} {self.name}: it is {self.state}, not {allowed}.")
        work()
        self.state = AFTER[verb]

    def _instantiate(self) -> None:
        raise MemoryPlanError(f"{self.name} cannot be made again; offload it instead of destroying it.")

    def _offload(self) -> None:
        raise MemoryPlanError(f"{self.name} has nowhere to go; destroy it instead of offloading it.")

    def _reload(self) -> None:
        raise MemoryPlanError(f"{self.name} is kept nowhere; instantiate it instead of reloading it.")

    @abstractmethod
    def _destroy(self) -> None:
        """Give up all memory."""


class Restartable(Base):
    """A component that is started and stopped whole, such as the processes of a reward model."""

    leaves = "destroy"

    def __init__(
        self, name: str, nbytes: int, start: Callable[[], object], stop: Callable[[], object], state: State
    ) -> None:
        super().__init__(name, state)
        self.bytes, self._start, self._stop = nbytes, start, stop

    def _instantiate(self) -> None:
        self._start()

    def _destroy(self) -> None:
        self._stop()


class Ledger:
    """Every change of a component goes through here; none that would exceed the budget begins."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget = budget_bytes
        self._components: dict[str, Component] = {}
        self.ms: dict[str, float] = {}  # of the last change of each component

    def add(self, component: Component) -> None:
        """Count a component that is there, even over the budget. Raises MemoryPlanError for a second one of that
        name."""
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
        """All components, in the order they were added."""
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
        """Offload or destroy the component, as it prefers."""
        self._do(name, self[name].leaves)

    def bring(self, name: str) -> None:
        """Reload or instantiate the component, as its state asks."""
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
            raise MemoryPlanError(f"{problem}. Offload something first.", exit_code=2)


def _told(component: Component) -> str:
    return f"{component.name} ({gib(component.bytes)})"


def gib(nbytes: int) -> str:
    """Bytes in words: in GiB, or in MiB below a tenth of one."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes / 2**20:.1f} MiB"


def private_bytes(pid: int | None = None) -> int:
    """Anonymous resident memory of a process (RssAnon): what it alone keeps in RAM."""
    for line in Path(f"/proc/{pid or os.getpid()}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def device_bytes() -> int:
    """The bytes of this rank's GPU that are free or held by this process; without a GPU, the memory of this host, or of
    the container if that is less."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return int(free) + int(torch.cuda.memory_reserved())
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total
