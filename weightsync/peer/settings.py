"""The settings of a peer's command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from weightsync.format.manifest import CHUNK


@dataclass(frozen=True)
class Pace:
    """The size of a read, and the time it may take."""

    per_holder: int = 2
    total: int = 8
    read_timeout_s: float = 30.0
    limit_bytes_per_s: float | None = None


@dataclass(frozen=True)
class PeerSettings:
    """One peer: `host` is its name in the records; it listens on `listen` and is reached at `advertise`.

    Both are ADDRESS:PORT; `advertise` may lack the port, and without it the address listened on is used. The data of
    the TCP transport comes from the same address and `data_port` (0: any). Chunks must be of the same size everywhere.
    `readers` is how many other hosts may read here at a time; `rack` is where the host is ("": not known).
    """

    store: str
    model: str
    host: str
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    transport: str = "auto"
    cluster_tls: Path | None = None
    chunk_nbytes: int = CHUNK
    readers: int = 8
    lease_ttl_s: float = 5.0
    data_port: int = 0
    rack: str = ""
    pace: Pace = field(default_factory=Pace)
