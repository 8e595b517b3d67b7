"""The messages of peers on the control channel: small JSON bodies, refused unless they are just these.

POST /v1/open?TOLD         Open -> Opened        a ticket: the slot is held for the reader until it is closed
POST /v1/have/{ticket}     Ask -> Have           what can be read by now; also keeps the ticket; with ?tree=0 or 1 the
                                                 answer may wait a while for an even or an odd chunk of which the
                                                 reader was not told
GET  /v1/manifest/{ticket} -> canonical JSON     its digest is the one that was asked for
POST /v1/close/{ticket}    Close -> {}

`digest` names a slot by the digest of its manifest. With TOLD the reader checks chunks by the manifest, where that has
what it takes. Without, it is of a release that wants the digests of all chunks from the holder.

Every refusal is a `Refusal` with its HTTP status: 404 unknown_copy, unknown_ticket; 409 no_common_transport; 503 busy;
400 bad_request.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

ALL = "all"  # instead of a bitmap
TOLD = "digests=manifest"


class Open(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`reader` is the host that asks, `transports` are those that it can read with. `delta_of`: a peer
    of the release before may ask for the difference from that slot instead. No peer of this release has one: the peer
    that asks is refused, and reads the slot."""

    model: str
    digest: str
    reader: str
    transports: tuple[str, ...]
    delta_of: str = ""


class Opened(msgspec.Struct, frozen=True):
    """`digests`: xxh3_128 of each chunk, or none (see TOLD); `have`: ALL or a bitmap in base64; `active`: readers there
    now."""

    nbytes: int
    chunk_nbytes: int
    digests: tuple[str, ...]
    have: str
    active: int
    transport: str
    endpoint: bytes
    region: bytes
    ticket: str


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`taken`: any bitmap; a holder of the release before wants one, and passes over the query."""

    taken: str = ""


class Have(msgspec.Struct, frozen=True):
    """As in `Opened`."""

    have: str
    active: int


class Close(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`nbytes`: how much was read on the ticket, for the holder's own account: it does not see one-sided reads.
    `bytes_per_s`: the release before says it, and nobody looks at it.
    """

    nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    bytes_per_s: float = 0.0


class Refusal(msgspec.Struct, frozen=True):
    """Why not; `code` is stable."""

    code: str
    message: str
