"""How much shared memory a model needs, from the headers of its checkpoint; see docs/doctor.md for what is counted."""

from __future__ import annotations

from dataclasses import dataclass

from server.doctor.world import World, size
from weightsync.format.manifest import Layout
from weightsync.publish.checkpoint import Checkpoint

LAYOUTS_OF_ONE = 3  # live, previous and staged
LAYOUTS_OF_MORE = 5  # instances that are not at the same version for a moment hold more


@dataclass(frozen=True)
class Need:
    """Bytes in shared memory on one host. `layouts` is 0 on GPUs, where they lie in device memory."""

    slot_nbytes: int
    slots: int
    layout_nbytes: int
    layouts: int

    @property
    def nbytes(self) -> int:
        return self.slot_nbytes * self.slots + self.layout_nbytes * self.layouts

    def __str__(self) -> str:
        text = f"{self.slots} slots of {size(self.slot_nbytes)}"
        return text + (f" and {self.layouts} layouts of {size(self.layout_nbytes)}" if self.layouts else "")


def need_of(world: World) -> Need | None:
    """None without a model. Raises CheckpointError."""
    if world.model_dir is None:
        return None
    schema = Checkpoint(world.model_dir).schema
    layouts = 0 if world.has_gpu_build else LAYOUTS_OF_ONE if world.instances == 1 else LAYOUTS_OF_MORE
    return Need(Layout.of(schema).total_nbytes, world.keep_versions + 1, schema.nbytes, layouts)
