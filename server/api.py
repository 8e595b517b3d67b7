"""The routes that gateways forward and instances answer: one row each, with everything that depends on the route.

From ROUTES derive what the gateway forwards (gateway/routes.py), how it routes, meters, retries and traces a request,
what an instance counts, annotates and can continue, both OpenAPI documents, and the table in docs/api.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class Forwarded:
    """One route. `path` labels metrics; its parameter, if there is one, is written `{id}`.

    `works` is what a request occupies an instance with ("" if it never waits for room); `continued`: another instance
    can go on with its stream; `again`: a request whose connection was lost may be sent to another instance; `admin`: on
    the admin port alone. A POST carries a JSON object, unless `body` is False; only where `query` is set does a query
    string go upstream.

    `bounds` are the fields that bound an answer, the one that counts first, and `unbounded` is the most tokens of an
    answer where none is sent (None: the context's end). `nested` is the field in which those and `n` are, if they are
    not fields of the request itself. `prompt` are the fields that a prompt is made of, as they begin in the body.
    `prompts` is the field that may hold several prompts, each answered by itself, or token ids: one of
    `Fields` (gateway/wire/bodies.py). `pairs` are fields of which the first, one text, is computed anew with each
    element of the second. `operation` is OpenTelemetry's `gen_ai.operation.name`.

    For the documents: `what` in a few words, `tag`, the type of vLLM's whole answer (below vllm.entrypoints), and
    whether it may be a `stream`. `annotated`: vLLM's answer is rewritten to carry the versions of the weights.
    """

    method: Literal["GET", "POST"]
    path: str
    what: str
    works: Literal["", "prefill", "generate"] = ""
    continued: bool = False
    again: bool = True
    admin: bool = False
    body: bool = True
    query: bool = False
    bounds: tuple[str, ...] = ()
    unbounded: int | None = None
    nested: Literal["", "sampling_params"] = ""
    prompt: tuple[bytes, ...] = ()
    prompts: Literal["", "prompt", "prompt_token_ids", "token_ids", "messages", "input"] = ""
    pairs: tuple[tuple[str, str], ...] = ()
    operation: Literal["", "chat", "text_completion", "embeddings"] = ""
    tag: Literal["openai", "anthropic", "tokens", "health"] = "openai"
    answer: str | None = None
    stream: bool = False
    annotated: bool = False

    @property
    def at_instance(self) -> str:
        """vLLM's path of the route."""
        return self.path.replace("{id}", "{response_id}")


# The admin port's routes of SGLang, whose clients read `success` and `message` of refusals.
SGLANG: Final = frozenset({
    "/abort_request", "/begin_weight_update", "/continue_generation", "/destroy_weights_update_group",
    "/end_weight_update", "/flush_cache", "/get_model_info", "/health_generate",
    "/init_weights_send_group_for_remote_instance", "/init_weights_update_group", "/load_lora_adapter", "/model_info",
    "/pause_generation",
    "/release_memory_occupation", "/resume_memory_occupation", "/send_weights_to_remote_instance",
    "/update_weight_version", "/update_weights_from_disk", "/update_weights_from_distributed",
    "/update_weights_from_ipc", "/update_weights_from_tensor", "/unload_lora_adapter",
})  # fmt: skip
ROUTES: Final[tuple[Forwarded, ...]] = (
    Forwarded("GET", "/v1/models", "the served model and its adapters", answer="serve.engine.protocol:ModelList"),
    Forwarded(
        "POST", "/v1/chat/completions", "vLLM's chat completions",
        works="generate", continued=True, bounds=("max_completion_tokens", "max_tokens"), prompt=(b'"messages"',),
        operation="chat", answer="openai.chat_completion.protocol:ChatCompletionResponse", stream=True, annotated=True,
    ),
    Forwarded(
        "POST", "/v1/chat/completions/batch", "vLLM's batch of conversations, one answer to each",
        works="generate", bounds=("max_completion_tokens", "max_tokens"), prompts="messages", operation="chat",
        answer="openai.chat_completion.protocol:ChatCompletionResponse", annotated=True,
    ),
    Forwarded(
        "POST", "/v1/completions", "vLLM's completions",
        works="generate", continued=True, bounds=("max_tokens",), unbounded=16, prompt=(b'"prompt"',),
        prompts="prompt", operation="text_completion", answer="openai.completion.protocol:CompletionResponse",
        stream=True, annotated=True,
    ),
    Forwarded(
        "POST", "/v1/responses", "vLLM's responses",
        works="generate", bounds=("max_output_tokens",), prompt=(b'"instructions"', b'"input"'),
        again=False,  # a background response goes on after its connection has ended
        operation="chat", answer="openai.responses.protocol:ResponsesResponse", stream=True, annotated=True,
    ),
    Forwarded(
        "GET", "/v1/responses/{id}", "a stored response (where vLLM is configured to keep them; see limits)",
        query=True, answer="openai.responses.protocol:ResponsesResponse",
    ),
    Forwarded(
        "POST", "/v1/responses/{id}/cancel", "cancels a background response",
        body=False, answer="openai.responses.protocol:ResponsesResponse",
    ),
    Forwarded(
        "POST", "/v1/embeddings", "where the model allows",
        works="prefill", prompts="input", operation="embeddings", answer="pooling.embed.protocol:EmbeddingResponse",
    ),
    Forwarded(
        "POST", "/pooling", "vLLM's vectors as the model pools them, where the model allows",
        works="prefill", prompts="input", answer="pooling.pooling.protocol:PoolingResponse",
    ),
    Forwarded(
        "POST", "/classify", "vLLM's classes of texts, where the model allows; in vLLM's form or SGLang's (below)",
        works="prefill", prompts="input", answer="pooling.classify.protocol:ClassificationResponse",
    ),
    *(
        Forwarded(
            "POST", path, "vLLM's scores of pairs of texts, where the model allows",
            works="prefill", pairs=(
                ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"),
            ),
            answer="pooling.scoring.protocol:ScoreResponse",
        )
        for path in ("/score", "/v1/score")
    ),
    *(
        Forwarded(
            "POST", path, "documents by their relevance to a query, where the model allows",
            works="prefill", prompt=(b'"query"',), pairs=(("query", "documents"),),
            answer="pooling.scoring.protocol:RerankResponse",
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Forwarded(
        "POST", "/v1/messages", "the Anthropic messages shape, as vLLM offers it",
        works="generate", bounds=("max_tokens",), prompt=(b'"system"', b'"messages"'), operation="chat",
        tag="anthropic", answer="anthropic.protocol:AnthropicMessagesResponse", stream=True, annotated=True,
    ),
    Forwarded(
        "POST", "/v1/messages/count_tokens", "the prompt tokens of an Anthropic message",
        tag="anthropic", answer="anthropic.protocol:AnthropicCountTokensResponse",
    ),
    Forwarded(
        "POST", "/generative_scoring", "vLLM's probabilities that given tokens come next",
        works="prefill", pairs=(("query", "items"),), tag="tokens",
        answer="generate.generative_scoring.serving:GenerativeScoringResponse",
    ),
    Forwarded(
        "POST", "/tokenize", "text or messages to token ids",
        tag="tokens", answer="serve.tokenize.protocol:TokenizeResponse",
    ),
    Forwarded(
        "POST", "/detokenize", "token ids to text",
        tag="tokens", answer="serve.tokenize.protocol:DetokenizeResponse",
    ),
    Forwarded(
        "GET", "/tokenizer_info",
        "vLLM's tokenizer information, where vLLM runs with `--enable-tokenizer-info-endpoint`",
        tag="tokens", answer="serve.tokenize.protocol:TokenizerInfoResponse",
    ),
    Forwarded("GET", "/version", "vLLM's version", tag="health", answer=""),  # vLLM has no type of it
    Forwarded(
        "POST", "/generate", "tokens in, tokens out, each with its version; in its own form or SGLang's (below)",
        works="generate", continued=True, bounds=("max_tokens",), unbounded=16,
        prompt=(b'"prompt',),  # prompt, prompt_token_ids
        prompts="prompt_token_ids", operation="text_completion", tag="tokens", stream=True,
    ),
    # vLLM's routes between machines, which trainers use beside the admin routes.
    Forwarded(
        "POST", "/inference/v1/generate", "vLLM's tokens in, tokens out",
        works="generate", bounds=("max_tokens",), nested="sampling_params", prompts="token_ids",
        operation="text_completion", admin=True,
    ),
    Forwarded("POST", "/v1/completions/render", "a request as token ids", admin=True),
    Forwarded("POST", "/v1/completions/derender", "token ids as an answer", admin=True),
    Forwarded("POST", "/v1/chat/completions/render", "a request as token ids", admin=True),
    Forwarded("POST", "/v1/chat/completions/derender", "token ids as an answer", admin=True),
    Forwarded("POST", "/v1/messages/render", "a request as token ids", admin=True),
    Forwarded("POST", "/v1/responses/render", "a request as token ids", admin=True),
)  # fmt: skip


def table() -> str:
    """The public ones, as docs/api.md lists them."""
    rows = [f"| `{route.method} {route.path}` | {route.what} |" for route in ROUTES if not route.admin]
    return "\n".join(["| forwarded route | what |", "|---|---|", *rows])
