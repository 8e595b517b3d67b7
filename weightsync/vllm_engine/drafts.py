"""The speculative draft model of a worker: a model beside the target's, with a stager of its own.

Only `method: draft_model` has weights that are all its own. EAGLE, MTP and their like share the target's embedding or
head as the same modules, so staging one would flip the other; n-gram and suffix speculation have no weights.
"""

from __future__ import annotations

from typing import Any

import torch

from weightsync.errors import PartNotServed

from .stager import Stager

DRAFT = "draft"


def draft_stager(runner: Any, device: torch.device, *, allow_non_finite: bool = False) -> Stager:
    """A stager over the draft model of vLLM's model runner. Raises PartNotServed where it has none of its own."""
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    drafter = getattr(runner, "drafter", None)
    if drafter is None:
        raise PartNotServed(DRAFT, 'start the instance with --speculative-config \'{"method": "draft_model", ...}\'')
    if not isinstance(drafter, DraftModelProposer):
        raise PartNotServed(
            DRAFT,
            f"{type(drafter).__name__} has no weights that are its own alone (it shares modules with the target model, "
            'or has none); use --speculative-config \'{"method": "draft_model", ...}\'',
        )
    model = runner.get_draft_model()
    config = drafter._create_draft_vllm_config()
    return Stager(model, config, config.model_config, device, allow_non_finite=allow_non_finite)
