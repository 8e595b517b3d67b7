"""The base of the tree."""

from __future__ import annotations


class WeightSyncError(Exception):
    """Base of the tree. `code` is stable and meant for machines; `tensor` names the tensor to blame, if one is."""

    code = "weightsync_error"
    tensor: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """What goes into an instance record or the output of a command: code, message, tensor."""
        return {"code": self.code, "message": str(self), "tensor": self.tensor}
