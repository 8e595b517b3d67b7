"""Who holds the device's memory now, through one ledger with a byte budget.

components.py  the protocol and the life of a component     storages.py  components made of tensors
serving.py     the fleet as a component                      vault.py     where offloaded bytes lie
ledger.py      what is held, and the budget                  plan.py      what each phase needs, what makes room
manager.py     phase switches, on all ranks together         build.py     the components of a run
phases.py      what the loop sees of it
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.memory.build import build_memory
    from trainer.memory.components import Component, Restartable
    from trainer.memory.ledger import Ledger
    from trainer.memory.manager import Memory, NothingShared, SharedMemory
    from trainer.memory.plan import Phase, Plan
    from trainer.memory.storages import StorageComponent

__all__ = [
    "Component",
    "Ledger",
    "Memory",
    "NothingShared",
    "Phase",
    "Plan",
    "Restartable",
    "SharedMemory",
    "StorageComponent",
    "build_memory",
]
_HOME = {
    **dict.fromkeys(("Component", "Restartable"), "components"),
    **dict.fromkeys(("Memory", "NothingShared", "SharedMemory"), "manager"),
    **dict.fromkeys(("Phase", "Plan"), "plan"),
    **{"Ledger": "ledger", "StorageComponent": "storages", "build_memory": "build"},
}


def __getattr__(name: str) -> Any:
    """Names are loaded when they are first used: only some of them need Megatron."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
