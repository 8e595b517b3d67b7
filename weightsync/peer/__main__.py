import sys

from weightsync.peer.main import main

sys.exit(main())
