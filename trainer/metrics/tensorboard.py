"""TensorBoard event files: `tensorboard --logdir DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.metrics.tags import tagged


class TensorBoard:
    """Scalars of steps and evaluations by step. A resumed run hides what an earlier one wrote past its checkpoint."""

    def __init__(self, directory: str) -> None:
        """The directory is made; nothing is written before the run starts."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._writer: Any = None

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Queued; a thread of TensorBoard's writes it."""
        writer = self._opened(values.get("step", 0) if event == "start" else 0)
        if event == "start":
            writer.add_text("run", "\n\n".join(f"{name}: {value}" for name, value in values.items()))
        elif event in ("step", "eval"):
            for tag, value in tagged(event, values).items():
                writer.add_scalar(tag, value, values["step"])
        if event in ("eval", "done"):
            writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _opened(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._directory, purge_step=step + 1 if step else None)
        return self._writer
