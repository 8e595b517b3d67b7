"""The router of a mixture: Megatron-Core's, with auxiliary losses that are the same in every layout, and with routing
that was recorded elsewhere.

Auxiliary losses, of each layer and micro-batch, over the tokens that are no padding (E experts, k of them for a token,
p the softmax over all experts):

    balance   E sum over experts i of f_i P_i    f_i: share of the k choices that fell on i, P_i: mean of p_i
              (Switch Transformer, arXiv 2101.03961)
    z         mean over tokens of (log sum exp of the logits)^2    (ST-MoE, 2202.08906)

A step's are the means over its micro-batches, times their coefficient. Megatron would weigh them by the number of all
tokens, prompts too, over what the algorithm's loss is a mean of.

Replay (R3, arXiv 2510.11370): a token goes to its recorded experts, weighted by the trainer's own logits; one without a
record is routed as ever. Megatron's own RouterReplay keeps its records in lists of the process, which neither pipeline
stages nor several models fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
    save_to_aux_losses_tracker,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from trainer.megatron.parallel import device

NAMES = {"load_balancing_loss": "router_balance_loss", "z_loss": "router_z_loss"}  # Megatron's, and the metrics'

_pass: ContextVar[tuple[Tensor | None, bool]] = ContextVar("routing_pass", default=(None, False))


@contextmanager
def routing_pass(experts_BTLk: Tensor | None, *, training: bool) -> Iterator[None]:
    """Within the body, routers follow `experts_BTLk`: for each token that this rank's layers see the k experts of every
    layer, plus 1; 0 where nothing was recorded. `training`: a backward pass will follow."""
    token = _pass.set((experts_BTLk, training))
    try:
        yield
    finally:
        _pass.reset(token)


class Router(TopKRouter):  # type: ignore[misc]
    """Reads its coefficients anew at every pass: the engine sets them for each step (`weigh`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calculate_per_token_loss = False  # of the auxiliary losses alone: `weigh` says what they count
        self._kept: deque[Tensor | None] = deque()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Megatron's, along what was recorded."""
        experts_Nk = self._of_this_pass()
        self.router_replay = None if experts_Nk is None else _Replay(experts_Nk)
        return super().routing(logits, padding_mask=padding_mask)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Megatron's takes the mean over each rank's tokens, and then over ranks, whose numbers of tokens differ."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        squares = logits.float().logsumexp(-1).square()
        valid = torch.ones_like(squares) if padding_mask is None else (~padding_mask).to(squares.dtype)
        count = valid.sum()
        dist.all_reduce(count, group=self.tp_cp_group)
        loss = (squares * valid).sum() / count.clamp(min=1)
        layers = self.config.num_layers
        save_to_aux_losses_tracker("z_loss", loss, self.layer_number, layers, reduce_group=self.tp_cp_group)
        result: Tensor = MoEAuxLossAutoScaler.apply(logits, coefficient * loss)
        return result

    def _of_this_pass(self) -> Tensor | None:
        """This layer's records [N, k]. A pass that recomputes runs later, when the context has others: those of the
        first pass are kept, since passes go backward in the order in which they went forward."""
        if torch._C._current_graph_task_id() != -1:
            return self._kept.popleft()
        recorded_BTLk, training = _pass.get()
        mine = None
        if recorded_BTLk is not None:
            mine = recorded_BTLk[:, :, self.layer_number - 1].transpose(0, 1).flatten(0, 1).long() - 1
        if training and not torch.is_grad_enabled():
            self._kept.append(mine)
        return mine


class _Replay:
    """The object that Megatron's top-k asks in place of itself."""

    def __init__(self, experts_Nk: Tensor) -> None:
        self._experts = experts_Nk

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: Any, group_topk: Any, own: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The scores of the recorded experts, and these."""
        _, chosen = own(scores, topk, groups, group_topk)
        experts = torch.where(self._experts >= 0, self._experts, chosen)
        return scores.gather(1, experts), experts


def weigh(config: TransformerConfig, balance: float, z: float, weight: float) -> None:
    """Set the coefficients for a step, the mean of whose micro-batches' denominators is `weight`: gradients will be
    divided by their sum. Forget what the step before reported."""
    config.moe_aux_loss_coeff = balance * weight
    config.moe_z_loss_coeff = z * weight if z else None
    clear_aux_losses_tracker()


def reported(layers: int, micro_batches: int) -> dict[str, float]:
    """The auxiliary losses of the step, without their coefficients: the mean over layers and micro-batches. Collective
    over all ranks."""
    tracker, result = get_moe_layer_wise_logging_tracker(), {}
    ranks = ps.get_data_parallel_world_size()
    for name, ours in NAMES.items():
        values = tracker[name]["values"].sum() if name in tracker else torch.zeros((), device=device())
        total = torch.as_tensor(values).double()
        for group in (ps.get_pipeline_model_parallel_group(), ps.get_tensor_and_context_parallel_group()):
            dist.all_reduce(total, group=group)
        dist.all_reduce(total, group=ps.get_data_parallel_group())
        result[ours] = total.item() / (layers * micro_batches * ranks)
    return result
