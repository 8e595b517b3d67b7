"""A process that only beats: RANK WORLD WHAT, with its store in the environment. WHAT is `stop`: the test stops one;
`hang`: none gets any further; `fault`: rank 1 says that the disk is full; `done`: rank 1 ends at once. The first beats
when all are there."""

from __future__ import annotations

import sys
import time

from trainer.config import FaultsConfig
from trainer.faults.heartbeat import Heartbeat, StoreBoard, progress


def main(rank: int, world: int, what: str) -> None:
    hangs = what == "hang"
    silent_s = {"stop": 5.0, "done": 3.0}.get(what, 60.0)
    config = FaultsConfig(heartbeat_s=0.1, heartbeat_timeout_s=silent_s, hang_s=1.5 if hangs else 0.0)
    progress("publish" if (hangs, rank) == (True, 1) else "train", 7)
    board = StoreBoard(0)
    print("there", flush=True)
    board._store.add("there", 1)
    while board._store.add("there", 0) < world:
        time.sleep(0.01)
    heartbeat = Heartbeat(config, board, rank, world)
    if what == "done" and rank == 1:
        heartbeat.stop()
        return
    if what == "fault" and rank == 1:
        heartbeat.failed("the disk is full")
    time.sleep(4 if what == "done" else 100)
    heartbeat.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
