"""`"routed_experts": true` in a request: the answer brings the experts that each layer of a mixture sent its tokens to.

    "routed_experts": "k05VTVBZ..."    per choice, on whole bodies and on the last chunk of a stream: base64 of an array
                                       in NumPy's .npy format, uint8 or uint16 [tokens, layers, experts per token]

The rows are those of the prompt, from token `routed_experts_prompt_start` on (0), and of the answer but its last token,
which no pass has read. vLLM records (weightsync/vllm_engine/engine_core/routing.py) and encodes so itself in whole
answers; it asks for nothing in the request, so here an answer is rid of what nobody asked for, and of the work for its
prompt.

The engine's store of what was recorded is bounded, and may lack blocks of a prompt that is in the prefix cache. Such an
answer ends with the error `routing_lost`. The prompt is computed anew when it is asked again, and recorded with that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .inflight import Problem

FIELD = "routed_experts"
START = "--enable-return-routed-experts"
MOST_LOST = 4096  # prompts that are remembered


def routing_lost() -> Problem:
    """The engine has no more what it recorded of the prompt; when it is asked again, it will."""
    message = (
        "the server has lost the routing of a prompt in its prefix cache; send the request again, and if this "
        "happens often, start the server with a larger `max_bytes` in --aux-output-config"
    )
    return Problem(message, status=503, code="routing_lost", param=FIELD, retry_after_s=0)


class Recording:
    """The recording of one engine. `config` is vLLM's."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._lost: dict[int, None] = {}  # hashes of prompts, the oldest first

    def prepare(self, prompt: Any, params: Any, *, wanted: bool | None) -> None:
        """Before the engine is asked; `wanted` is None where vLLM's own code tells the routing. Raises
        VLLMValidationError, a 400 on every route, if the engine cannot do what is wanted."""
        on: bool = self._config.aux_output_config.enabled
        if wanted and not on:
            from vllm.exceptions import VLLMValidationError

            how = f"start the server with {START}, or leave the field out"
            why = how if self._config.model_config.is_moe else "the model has no experts; leave the field out"
            raise VLLMValidationError(f"`{FIELD}`: this server records no routing: {why}", parameter=FIELD)
        if not on or not isinstance(prompt, Mapping):
            return
        tokens = prompt.get("prompt_token_ids") or ()
        if wanted is False:
            params.routed_experts_prompt_start = len(tokens)
        elif self._lost and hash(tuple(tokens)) in self._lost:
            del self._lost[hash(tuple(tokens))]
            params.skip_reading_prefix_cache = True

    def check(self, output: Any, params: Any) -> None:
        """Of an output of the engine whose routing is wanted. Raises Problem (routing_lost) if an answer that is
        complete in it has fewer rows than it must."""
        prompt = output.prompt_token_ids or ()
        for answer in output.outputs:
            if answer.finish_reason is None or answer.routed_experts is None or not answer.weight_versions:
                continue
            written = answer.weight_versions[-1].end
            start = min(params.routed_experts_prompt_start, len(prompt))
            if len(answer.routed_experts) < len(prompt) - start + written - 1:
                self._lost[hash(tuple(prompt))] = None
                if len(self._lost) > MOST_LOST:
                    del self._lost[next(iter(self._lost))]
                raise routing_lost()


def strip(outputs: Iterable[Any]) -> None:
    """Take the routing out of an output of the engine."""
    for output in outputs:
        output.routed_experts = None


def encoded(experts: Any) -> str:
    """As vLLM's whole answers have it."""
    from vllm.utils.serial_utils import numpy2base64

    return numpy2base64(experts)
