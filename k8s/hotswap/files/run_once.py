"""Runs a command in a container that is started anew whenever it ends: once it has succeeded, this waits to be stopped.

python run_once.py COMMAND [ARGUMENT...]

SIGTERM and SIGINT are passed on; a command that fails ends this with its status, for the kubelet to try again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType


def main(command: list[str]) -> int:
    """The command's exit status, or 0 when this was told to stop after its success."""
    told = False

    def tell(number: int, _: FrameType | None) -> None:
        nonlocal told
        told = True
        child.send_signal(number)

    numbers = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until there is somebody to pass them on to
    child = subprocess.Popen(command, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers))
    for number in numbers:
        signal.signal(number, tell)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    status = child.wait()
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # what comes from here on is waited for, and not missed
    if status == 0 and not told:
        print("done; waiting to be stopped", file=sys.stderr, flush=True)
        signal.sigwait(numbers)
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(str(__doc__))
    sys.exit(main(sys.argv[1:]))
