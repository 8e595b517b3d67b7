"""What a rank says of its share, as JSON: where its blocks can be read, and what lies in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from weightsync.errors import PublishError
from weightsync.manifest import TensorSpec

WHOLE = -1  # the `dim` of a tensor that is not cut


class Held(msgspec.Struct, frozen=True):
    """A tensor, or `shape[dim]` rows of one from `start` on along `dim`, from byte `offset` of its block on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim: int
    start: int
    offset: int
    digest: str

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape)


class OfferedBlock(msgspec.Struct, frozen=True):
    """`region` is the descriptor of its memory, of which `nbytes` are used."""

    region: bytes
    nbytes: int
    held: tuple[Held, ...]


class Offer(msgspec.Struct, frozen=True):
    """`endpoint` is the holder's transport's. Both may hold a token: whoever has the offer may read the share."""

    endpoint: bytes
    blocks: tuple[OfferedBlock, ...]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Offer:
        """Raises PublishError for what is no offer, or names bytes beyond a block."""
        try:
            offer = msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise PublishError(f"a rank's offer cannot be read: {error}") from error
        for block in offer.blocks:
            for held in block.held:
                if held.offset < 0 or held.offset + held.spec.nbytes > block.nbytes:
                    raise PublishError(f"a rank's offer of tensor {held.name!r} reaches beyond its block")
        return offer
