"""Errors of one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsync.errors.publishing import PublishError

OTHER_FORM = ", or give the config.json of a checkpoint that is so (config=, `hotswap weights push DIR`)"


class TensorError(PublishError):
    """One tensor is to blame; `tensor` names it. `expected` and `got`, where there are such, say what is wrong."""

    tensor: str
    expected: Any = None
    got: Any = None


def missing_tensor(tensor: str, expected: object = None) -> TensorError:
    """A tensor of the schema was not delivered."""
    message = f"tensor {tensor!r} is missing: publish every tensor{OTHER_FORM}"
    return TensorError(message, tensor=tensor, code="missing_tensor", expected=expected)


def unexpected_tensor(tensor: str, got: object = None, advice: str = "") -> TensorError:
    """A tensor that the schema does not have. `advice`: what else to do than to leave it out."""
    remedy = f"; {advice}" if advice else f": leave it out{OTHER_FORM}"
    message = f"tensor {tensor!r} is not part of the served model{remedy}"
    return TensorError(message, tensor=tensor, code="unexpected_tensor", got=got)


def shape_mismatch(tensor: str, expected: Sequence[int], got: Sequence[int]) -> TensorError:
    """A tensor has another shape than the schema says."""
    message = f"tensor {tensor!r} has shape {list(got)}, the served model has {list(expected)}: check it{OTHER_FORM}"
    return TensorError(message, tensor=tensor, code="shape_mismatch", expected=tuple(expected), got=tuple(got))


def dtype_mismatch(tensor: str, expected: str, got: str) -> TensorError:
    """A tensor has another dtype than the schema says."""
    message = f"tensor {tensor!r} is {got}, the served model has {expected}: convert it (`cast=True`){OTHER_FORM}"
    return TensorError(message, tensor=tensor, code="dtype_mismatch", expected=expected, got=got)


def digest_mismatch(tensor: str, expected: str, got: str) -> TensorError:
    """The bytes of a tensor are not those that were published."""
    message = f"tensor {tensor!r} has digest {got}, published was {expected}: its bytes changed; publish it again"
    return TensorError(message, tensor=tensor, code="digest_mismatch", expected=expected, got=got)


def not_finite(tensor: str, dtype: str) -> TensorError:
    """A tensor has NaN or infinities, as it was published or in the type that it is served in."""
    message = (
        f"tensor {tensor!r} has NaN or infinite values in {dtype}: publish weights that are finite, or start "
        "instances with --allow-non-finite"
    )
    return TensorError(message, tensor=tensor, code="not_finite")


def checksum_mismatch(tensor: str, expected: int, got: int) -> TensorError:
    """A built tensor, or one of two copies of a tensor, does not have the checksum it must have."""
    message = f"tensor {tensor!r} has checksum {got:08x} as built, {expected:08x} as published: stage it again"
    return TensorError(message, tensor=tensor, code="checksum_mismatch", expected=expected, got=got)


def unsupported_dtype(tensor: str, dtype: str) -> TensorError:
    """The element type of a tensor cannot be carried."""
    message = f"tensor {tensor!r} is {dtype}, which cannot be carried: convert it before publishing"
    return TensorError(message, tensor=tensor, code="unsupported_dtype")
