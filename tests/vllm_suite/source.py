"""vLLM's tests, of the release that is installed, as its source distribution has them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.packages import unpacked
from weightsync.vllm_engine.releases import release

# Files of tests, as far as a tiny model of random weights and one server can answer them.
FILES = (
    "anthropic/test_messages.py",
    "generate/generative_scoring/test_generative_scoring_e2e.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_completion_text_offset.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_errors.py",
    "openai/responses/test_simple.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/test_stop_token_ids.py",
    "serve/instrumentator/test_basic.py",
    "serve/tokenize/test_tokenization.py",
)
_MODEL = re.compile(r'^(MODEL_NAME\w*) = ".*"', re.MULTILINE)
_DOWNLOAD = re.compile(r"hf_api\(\)\.snapshot_download\(.*?\)", re.DOTALL)


def tests(directory: Path, model: str) -> Path:
    """A copy in `directory` that asks for `model`; the folder with vLLM's package `tests`."""
    root, source = directory / "vllm", unpacked("vllm", release()) / "tests"
    shutil.copytree(source, root / "tests", ignore=shutil.ignore_patterns("conftest.py"))
    for name in ("entrypoints/conftest.py", "entrypoints/openai/responses/conftest.py"):
        shutil.copy(source / name, root / "tests" / name)
    for name in FILES:
        file = root / "tests/entrypoints" / name
        text = _MODEL.sub(rf'\1 = "{model}"', file.read_text()).replace("claude-3-7-sonnet-latest", model)
        file.write_text(_DOWNLOAD.sub('"no adapter"', text))
    return root
