"""The base of the tree."""

from __future__ import annotations

import re
from typing import Any

from weightsync.errors.codes import CODES


class WeightSyncError(Exception):
    """Base of the tree. `code` is stable and meant for machines: one of CODES, without another one the name of the
    class in snake case. `tensor` names the tensor to blame, if one is; `details` are further attributes."""

    code = "weightsync_error"
    tensor: str | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.code = re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, message: str, /, *, code: str | None = None, **details: Any) -> None:
        """Raises ValueError for a `code` that is not in CODES."""
        super().__init__(message)
        if code is not None:
            if code not in CODES:
                raise ValueError(f"no error has the code {code!r}: add it to weightsync.errors.codes")
            self.code = code
        vars(self).update(details)

    def to_json(self) -> dict[str, str | None]:
        """The error as an instance record or the output of a command has it: code, message, tensor."""
        return {"code": self.code, "message": str(self), "tensor": self.tensor}
