"""`python -m weightsync.peer` in a hurry: a host that is away with chunks that only it has is given up after three
seconds, one more than the lease of a peer lasts here, and a fetch that failed is tried again after half a second."""

import sys

from weightsync.peer import holders, service
from weightsync.peer.__main__ import main

if __name__ == "__main__":
    holders.SHARE_S = 3.0
    service.FIRST_PAUSE_S = 0.5
    sys.exit(main())
