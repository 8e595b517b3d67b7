"""What ranks on other hosts than the slot's have of a version: held in their memory, read from there into the slot."""

from __future__ import annotations

from weightsync.shares.collector import Collector
from weightsync.shares.share import Share

__all__ = ["Collector", "Share"]
