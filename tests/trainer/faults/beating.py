"""A process that only beats: RANK WORLD WHAT, with its store in the environment. WHAT is `stop`: the test stops one;
`hang`: none gets any further; `fault`: rank 1 says that the disk is full; `done`: rank 1 ends at once."""

from __future__ import annotations

import sys
import time

from trainer.config import FaultsConfig
from trainer.faults.heartbeat import Heartbeat, StoreBoard, progress


def main(rank: int, world: int, what: str) -> None:
    hangs = what == "hang"
    config = FaultsConfig(heartbeat_s=0.1, heartbeat_timeout_s=60.0 if hangs else 1.5, hang_s=1.5 if hangs else 0.0)
    progress("publish" if (hangs, rank) == (True, 1) else "train", 7)
    heartbeat = Heartbeat(config, StoreBoard(0), rank, world)
    print("beating", flush=True)
    if what == "done" and rank == 1:
        heartbeat.stop()
        return
    if what == "fault" and rank == 1:
        heartbeat.failed("the disk is full")
    time.sleep(4 if what == "done" else 100)
    heartbeat.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
