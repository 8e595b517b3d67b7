"""`"routed_experts": true` in a request: the answer brings the experts that each layer of a mixture sent its tokens to.

    "routed_experts": "k05VTVBZ..."    per choice, on whole bodies and on the last chunk of a stream: base64 of an array
                                       in NumPy's .npy format, uint8 or uint16 [tokens, layers, experts per token]

The rows are those of the prompt, from token `routed_experts_prompt_start` on (0), and of the answer but its last token,
which no pass has read. vLLM records (weightsync/vllm_engine/routing.py) and encodes so itself in whole answers; it asks
for nothing in the request, so here an answer is rid of what nobody asked for, and of the work for its prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

FIELD = "routed_experts"
START = "--enable-return-routed-experts"


class Recording:
    """What one engine records. `config` is vLLM's."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def prepare(self, prompt: Any, params: Any, *, wanted: bool) -> None:
        """Before the engine is asked. Raises VLLMValidationError, a 400 on every route, if it cannot do what is
        wanted."""
        on: bool = self._config.aux_output_config.enabled
        if wanted and not on:
            from vllm.exceptions import VLLMValidationError

            how = f"start the server with {START}, or leave the field out"
            why = how if self._config.model_config.is_moe else "the model has no experts; leave the field out"
            raise VLLMValidationError(f"`{FIELD}`: this server records no routing: {why}", parameter=FIELD)
        if on and not wanted and isinstance(prompt, Mapping):
            params.routed_experts_prompt_start = len(prompt.get("prompt_token_ids") or ())


def strip(outputs: Iterable[Any]) -> None:
    """Take the routing out of an output of the engine."""
    for output in outputs:
        output.routed_experts = None


def encoded(experts: Any) -> str:
    """As vLLM's whole answers have it."""
    from vllm.utils.serial_utils import numpy2base64

    return numpy2base64(experts)
