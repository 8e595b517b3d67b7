"""Errors of one tensor, or of what tensors are made of."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.errors.base import WeightSyncError


class TensorError(WeightSyncError):
    """One tensor is to blame; `tensor` names it."""

    def __init__(self, tensor: str, message: str) -> None:
        self.tensor: str = tensor
        super().__init__(message)


OTHER_FORM = ", or give the config.json of a checkpoint that is so (config=, `hotswap weights push DIR`)"


class TensorMismatch(TensorError):
    """A tensor is not what the reference schema says; `expected` and `got` are what they say of it."""

    def __init__(self, tensor: str, expected: object, got: object, message: str) -> None:
        self.expected, self.got = expected, got
        super().__init__(tensor, message)


class MissingTensor(TensorMismatch):
    """A tensor of the schema was not delivered."""

    def __init__(self, tensor: str, expected: object = None) -> None:
        super().__init__(tensor, expected, None, f"tensor {tensor!r} is missing: publish every tensor{OTHER_FORM}")


class UnexpectedTensor(TensorMismatch):
    """A tensor that the schema does not have. `advice`: what else to do than to leave it out."""

    def __init__(self, tensor: str, got: object = None, advice: str = "") -> None:
        remedy = f"; {advice}" if advice else f": leave it out{OTHER_FORM}"
        message = f"tensor {tensor!r} is not part of the served model{remedy}"
        super().__init__(tensor, None, got, message)


class ShapeMismatch(TensorMismatch):
    """A tensor has another shape than the schema says."""

    def __init__(self, tensor: str, expected: Sequence[int], got: Sequence[int]) -> None:
        message = (
            f"tensor {tensor!r} has shape {list(got)}, the served model has {list(expected)}: check it{OTHER_FORM}"
        )
        super().__init__(tensor, tuple(expected), tuple(got), message)


class DtypeMismatch(TensorMismatch):
    """A tensor has another dtype than the schema says."""

    def __init__(self, tensor: str, expected: str, got: str) -> None:
        message = f"tensor {tensor!r} is {got}, the served model has {expected}: convert it (`cast=True`){OTHER_FORM}"
        super().__init__(tensor, expected, got, message)


class DigestMismatch(TensorError):
    """The bytes of a tensor are not those that were published."""

    def __init__(self, tensor: str, expected: str, got: str) -> None:
        self.expected, self.got = expected, got
        super().__init__(
            tensor, f"tensor {tensor!r} has digest {got}, published was {expected}: its bytes changed; publish it again"
        )


class NotFinite(TensorError):
    """A tensor has NaN or infinities, as it was published or in the type that it is served in."""

    def __init__(self, tensor: str, dtype: str) -> None:
        super().__init__(
            tensor,
            f"tensor {tensor!r} has NaN or infinite values in {dtype}: publish weights that are finite, or start "
            "instances with --allow-non-finite",
        )


class ChecksumMismatch(TensorError):
    """A built tensor, or one of two copies of a tensor, does not have the checksum it must have."""

    def __init__(self, tensor: str, expected: int, got: int) -> None:
        self.expected, self.got = expected, got
        super().__init__(
            tensor, f"tensor {tensor!r} has checksum {got:08x} as built, {expected:08x} as published: stage it again"
        )


class PartsMismatch(TensorError):
    """The parts of a tensor on all ranks overlap or leave a gap."""

    def __init__(self, tensor: str, covered: int, words: int) -> None:
        self.covered, self.words = covered, words
        super().__init__(
            tensor,
            f"the ranks hold {covered:,} words of tensor {tensor!r}, which has {words:,}: restart the instance",
        )


class UnsupportedDtype(TensorError):
    """The element type of a tensor cannot be carried."""

    def __init__(self, tensor: str, dtype: str) -> None:
        self.dtype = dtype
        super().__init__(tensor, f"tensor {tensor!r} is {dtype}, which cannot be carried: convert it before publishing")


class QuantizationError(WeightSyncError):
    """Weights cannot be quantised as asked, or not in the form in which the model is served."""

    def __init__(self, message: str, tensor: str | None = None) -> None:
        self.tensor = tensor
        super().__init__(message)
