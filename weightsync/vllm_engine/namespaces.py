"""Which prefix-cache blocks a request may share: those that one version of the weights has computed from end to end.

The cache salt of a request is `version|scope|salt`: the weights it runs on, who may share with whom (the gateway says),
and what the client asked for. vLLM mixes it into the hash of a request's first block, and every later hash builds on
that, so blocks of one version are found again when that version returns, and by nobody else in between.

A request that lives through a commit goes private: its full blocks stay what they are, and every later one gets a hash
that nobody can compute. When it is preempted nothing of it is left; it then starts over in the version's own namespace.
"""

from __future__ import annotations

import functools
import secrets
from typing import Any

HASH_BYTES = 32
PRIVATE = ""  # in place of the version


def namespace(version: str, salt: str | None) -> str:
    """The cache salt under `version` of a request that came with `salt` ("scope|client's own")."""
    return f"{version}|{salt or ''}"


def version_of(request: Any) -> str:
    """The version whose blocks the request shares; PRIVATE if it shares none."""
    return str(request.cache_salt or "").split("|", 1)[0]


def enter(request: Any, version: str) -> None:
    """Hash all of the request's blocks under `version`; nothing of it may be computed yet, or any more."""
    own = (request.cache_salt or "|").split("|", 1)[1]
    request.cache_salt = namespace(version, own)
    request._block_hasher = getattr(request, "_hotswap_hasher", request._block_hasher)
    request.block_hashes.clear()
    request.update_block_hashes()


def go_private(request: Any, block_size: int) -> None:
    """Keep the hashes of the blocks that are full; give all later ones hashes of their own. `block_size` in tokens."""
    if version_of(request) == PRIVATE:
        return
    full = min(request.num_computed_tokens, request.num_tokens) // block_size
    request.cache_salt = namespace(PRIVATE, request.cache_salt.split("|", 1)[1])
    if request._block_hasher is None:  # prefix caching is off
        return
    request._hotswap_hasher = request._block_hasher
    request._block_hasher = functools.partial(_unguessable, block_size)
    del request.block_hashes[full:]
    request.update_block_hashes()


def _unguessable(block_size: int, request: Any) -> list[bytes]:
    """Hashes for the full blocks that have none yet."""
    missing = request.num_tokens // block_size - len(request.block_hashes)
    return [secrets.token_bytes(HASH_BYTES) for _ in range(missing)]
