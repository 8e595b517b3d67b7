"""Faults: ranks that die, stop or hang; numbers that are no longer sane; SIGTERM.

progress.py   where this rank is                   board.py      words left for other ranks
heartbeat.py  the thread that beats and watches    watch.py      what it concludes
stopping.py   SIGTERM                              restarts.py   launcher and ranks
guard.py      a step's numbers                     serving.py    the fleet back to an older version
faults.py     one rank's share of all of it, built when the process group exists
"""

from trainer.faults.guard import Guard
from trainer.faults.progress import progress

__all__ = ["Guard", "progress"]
