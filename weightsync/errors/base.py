"""The base of the tree."""

from __future__ import annotations

import re


class WeightSyncError(Exception):
    """Base of the tree. `code` is stable and meant for machines: the name of the class in snake case, unless the class
    says another one. `tensor` names the tensor to blame, if one is."""

    code = "weightsync_error"
    tensor: str | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.code = cls.__dict__.get("code") or re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def to_json(self) -> dict[str, str | None]:
        """The error as an instance record or the output of a command has it: code, message, tensor."""
        return {"code": self.code, "message": str(self), "tensor": self.tensor}
