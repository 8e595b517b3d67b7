"""What vLLM and this server really take and answer, held against the document they publish."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.gateway.proxy.routes import public_names
from tests.live import LiveServer
from tests.schemathesis.run import schemathesis

pytestmark = pytest.mark.engine
# Their schemas refer to hundreds of others, of OpenAI's: fewer examples of them take as long.
LARGE = "^/v1/(chat/completions|responses|messages)$"


def test_the_document_describes_what_is_served(live: LiveServer) -> None:
    told = live.client.get("/openapi.json").json()
    assert set(public_names()) - set(told["paths"]) == {"/v1/embeddings"}  # the model does not embed
    schemas = told["components"]["schemas"]
    assert "messages" in schemas["ChatCompletionRequest"]["required"]
    for choice in ("ChatCompletionResponseChoice", "CompletionResponseChoice", "GeneratedChoice"):
        assert {"weight_versions", "prompt_weight_versions"} <= set(schemas[choice]["properties"])
    assert schemas["GenerateRequest"]["additionalProperties"] is False


@pytest.mark.parametrize(("which", "examples"), [("--exclude-path-regex", "20"), ("--include-path-regex", "5")])
def test_schemathesis_finds_nothing(live: LiveServer, checkpoints: dict[str, Path], which: str, examples: str) -> None:
    """No 5xx, only documented statuses, content types, headers and bodies; what breaks the schema is refused."""
    live.push(checkpoints["a"])
    report = schemathesis(
        live.url + "/openapi.json", "public.toml", which, LARGE, "--phases", "fuzzing", "--max-examples", examples,
        model=live.name,
    )  # fmt: skip
    assert " passed" in report
    assert live.client.get("/readyz").status_code == 200
