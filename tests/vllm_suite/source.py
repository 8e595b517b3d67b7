"""vLLM's tests as its source distribution on PyPI has them, brought by pip and kept in the virtual environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
# What they ask for, as far as a tiny model of random weights and one server can answer it.
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
    root = directory / "vllm"
    shutil.copytree(_distribution() / "tests", root / "tests", ignore=shutil.ignore_patterns("conftest.py"))
    shutil.copy(_distribution() / "tests/entrypoints/conftest.py", root / "tests/entrypoints/conftest.py")
    responses = "tests/entrypoints/openai/responses/conftest.py"
    shutil.copy(_distribution() / responses, root / responses)
    for name in FILES:
        file = root / "tests/entrypoints" / name
        text = _MODEL.sub(rf'\1 = "{model}"', file.read_text()).replace("claude-3-7-sonnet-latest", model)
        file.write_text(_DOWNLOAD.sub('"no adapter"', text))
    return root


def _distribution() -> Path:
    """The unpacked distribution. pip checks its hash, and keeps it though it cannot be built here (`--no-clean`)."""
    kept = Path(sys.prefix) / f"vllm-{VERSION}-source"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=sys.prefix) as place:
            required = Path(place) / "requirements.txt"
            required.write_text(f"vllm=={VERSION} --hash=sha256:{SHA256}\n")
            command = [sys.executable, "-m", "pip", "download", "--no-clean", "--no-deps", "--no-build-isolation"]
            command += ["--no-binary", ":all:", "--require-hashes", "-r", str(required), "-d", place]
            done = subprocess.run(
                command, env=os.environ | {"TMPDIR": place}, capture_output=True, text=True, timeout=240
            )
            found = next(Path(place).glob("pip-*/vllm_*/tests"), None)
            if found is None:
                raise RuntimeError(f"pip did not bring vLLM's source distribution: {done.stderr[-1000:]}")
            partial = Path(place) / "whole"
            shutil.copytree(found, partial / "tests")
            partial.replace(kept)
    return kept
