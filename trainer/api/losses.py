"""The losses of the Tinker protocol, by name. Each is a sum over the tokens of a batch.

    cross_entropy        -w log p
    importance_sampling  -r A,             r = exp(log p - log q), q the sampler's
    ppo                  -min(r A, clip(r) A)                                       (arXiv:1707.06347)
    cispo                -stop_gradient(clip(r)) A log p                            (arXiv:2506.13585)
    dro                  -(A log p - beta / 2 (log p - log q)^2)                    (arXiv:2405.19107)
    gspo                 -min(s A, clip(s) A),  s = exp(mean of log p - log q over the marked tokens of the sequence);
                         a token's gradient goes through its own log p (GSPO-token, arXiv:2507.18071, section 4.3)
    custom               computed by the SDK: a forward pass, then cross_entropy with the gradient as weights

Shapes: B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.api.errors import ApiError
from trainer.api.wire import Batch, Datum

TARGETS, WEIGHTS, SAMPLER, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
RATIO_MASK = "sequence_ratio_mask"
Function = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


@dataclass(frozen=True)
class Loss:
    """`function(logprobs_BT, fields, options)` is the loss of each token, [B, T]; `needs` are its fields, [B, T] too.
    One in `ones` may be left out: it is one everywhere."""

    function: Function
    needs: tuple[str, ...]
    options: Mapping[str, float] = field(default_factory=dict)
    ones: frozenset[str] = frozenset()


def _cross_entropy(logprobs_BT: Tensor, fields: Mapping[str, Tensor], _: Mapping[str, float]) -> Tensor:
    return -fields[WEIGHTS] * logprobs_BT


def _ratio(logprobs_BT: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(logprobs_BT - fields[SAMPLER])


def _importance_sampling(logprobs_BT: Tensor, fields: Mapping[str, Tensor], _: Mapping[str, float]) -> Tensor:
    return -_ratio(logprobs_BT, fields) * fields[ADVANTAGES]


def _clipped(ratio: Tensor, options: Mapping[str, float]) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


def _bounded(ratio: Tensor, fields: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    advantages = fields[ADVANTAGES]
    return -torch.minimum(ratio * advantages, _clipped(ratio, options) * advantages)


def _ppo(logprobs_BT: Tensor, fields: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    return _bounded(_ratio(logprobs_BT, fields), fields, options)


def _gspo(logprobs_BT: Tensor, fields: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    now_BT, marked_BT = logprobs_BT.detach(), fields[RATIO_MASK] != 0
    sums_B1 = torch.where(marked_BT, now_BT - fields[SAMPLER], 0.0).sum(-1, keepdim=True)
    mean_B1 = sums_B1 / marked_BT.sum(-1, keepdim=True).clamp(min=1)
    return _bounded(torch.exp(mean_B1 + logprobs_BT - now_BT), fields, options)


def _cispo(logprobs_BT: Tensor, fields: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    return -_clipped(_ratio(logprobs_BT, fields), options).detach() * fields[ADVANTAGES] * logprobs_BT


def _dro(logprobs_BT: Tensor, fields: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    distance = (logprobs_BT - fields[SAMPLER]) ** 2
    return -(logprobs_BT * fields[ADVANTAGES] - 0.5 * options["beta"] * distance)


_CLIP: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Final = {
    "cross_entropy": Loss(_cross_entropy, (WEIGHTS,), ones=frozenset({WEIGHTS})),
    "importance_sampling": Loss(_importance_sampling, (SAMPLER, ADVANTAGES)),
    "ppo": Loss(_ppo, (SAMPLER, ADVANTAGES), _CLIP),
    "cispo": Loss(_cispo, (SAMPLER, ADVANTAGES), {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(_dro, (SAMPLER, ADVANTAGES), {"beta": 0.05}),
    "gspo": Loss(
        _gspo, (SAMPLER, ADVANTAGES, RATIO_MASK), {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}
    ),
}


def check(batch: Batch, vocabulary: int, longest: int) -> tuple[Loss, dict[str, float]]:
    """The loss of a batch and its options. Raises ApiError (400) for what cannot be computed."""
    loss = LOSSES.get(batch.loss)
    if loss is None:
        known = ", ".join(LOSSES)
        raise ApiError(
            400,
            f"the loss {batch.loss!r} is not known here: use one of {known}, or forward_backward_custom",
            "unknown_loss",
        )
    if not batch.data:
        raise ApiError(400, "the batch is empty: give at least one datum")
    options = dict(loss.options)
    for name, value in batch.options.items():
        if name not in options or isinstance(value, str) or not np.isfinite(value):
            takes = f"it takes the numbers {', '.join(options)}" if options else "it takes no options"
            raise ApiError(400, f"loss_fn_config[{name!r}] = {value!r} is nothing that {batch.loss} can use: {takes}")
        options[name] = float(value)
    for number, datum in enumerate(batch.data):
        _check_datum(f"datum {number}", datum, loss, batch.loss, vocabulary, longest)
    return loss, options


def _check_datum(what: str, datum: Datum, loss: Loss, name: str, vocabulary: int, longest: int) -> None:
    length = len(datum.tokens)
    if not 0 < length <= longest:
        raise ApiError(400, f"{what} has {length} tokens: give 1 to {longest}, which is the model's context")
    fields = (TARGETS, *loss.needs)
    if missing := [key for key in fields if key not in datum.inputs and key not in loss.ones]:
        raise ApiError(400, f"{what} has no loss_fn_inputs[{missing[0]!r}], which {name} needs")
    if unknown := sorted(datum.inputs.keys() - set(fields)):
        raise ApiError(400, f"{what} has loss_fn_inputs[{unknown[0]!r}]: {name} reads {', '.join(fields)} alone")
    for key, values in datum.inputs.items():
        if values.shape != (length,):
            shape = tuple(values.shape)
            raise ApiError(
                400, f"{what}: {key} has the shape {shape}, but its input has {length} tokens: give one each"
            )
        if key != TARGETS and not np.isfinite(values).all():
            raise ApiError(400, f"{what}: {key} has a number that is not finite")
    for key, tokens in (("model_input", datum.tokens), (TARGETS, datum.inputs[TARGETS])):
        if tokens.dtype.kind != "i" or tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ApiError(400, f"{what}: {key} must be token ids, whole numbers from 0 to {vocabulary - 1}")


def column(loss: Loss, data: list[Datum], key: str, width: int, dtype: Any) -> Tensor:
    """[B, T] of one field, zero after the end of each sequence."""
    found: NDArray[Any] = np.zeros((len(data), width), dtype)
    for row, datum in zip(found, data, strict=True):
        length = len(datum.tokens)
        row[:length] = datum.inputs[key] if key in datum.inputs or key not in loss.ones else 1
    return torch.from_numpy(found)
