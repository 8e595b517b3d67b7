"""What holds memory: the protocol of a component, and its life.

                  .--------- destroy ----------.
                  v                            |
    destroyed --instantiate--> instantiated --offload--> offloaded
                                    ^                       |
                                    `------- reload --------'

`bytes` is what it holds of the device while instantiated. Offloaded, its content is kept elsewhere; destroyed, it is
gone, and only a component that knows where it comes from can be instantiated again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

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


@runtime_checkable
class Component(Protocol):
    """One owner of device memory. A change that fails raises and leaves the component as it was."""

    @property
    def name(self) -> str: ...

    @property
    def bytes(self) -> int:
        """What it holds, or will hold, of the device when it is instantiated."""
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
        """Hold nothing any more."""


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
