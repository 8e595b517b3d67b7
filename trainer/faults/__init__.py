"""Faults: ranks that die, stop or hang; numbers that are no longer sane; SIGTERM.

supervision.py  what watches over one rank, built when the process group exists
heartbeat.py    where this rank is, the thread that tells the others and watches the next one
guard.py        whether a step's numbers are sane

The launcher starts failed ranks anew and passes SIGTERM on (trainer/launch.py). After a step whose numbers are not sane
the run goes back to a checkpoint (trainer/run.py).
"""
