"""Checkpoints: directories that are whole or are not used, which of them stay, and shares written in the background.

`directory.py` and `retention.py` know files only; `share.py` says what one rank wrote; `background.py` is the thread
that writes it; `checkpoints.py` puts them together with the engine, and is the only one that imports torch.
"""

from trainer.checkpoint.directory import MANIFEST, CheckpointDir
from trainer.checkpoint.files import writing
from trainer.checkpoint.retention import Retention

__all__ = ["MANIFEST", "CheckpointDir", "Retention", "writing"]
