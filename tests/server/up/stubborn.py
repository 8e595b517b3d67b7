"""A process that runs until it is killed, and ignores SIGTERM unless it is called with `gentle`."""

import signal
import sys

if "gentle" not in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("runs", flush=True)
while True:
    signal.pause()
