"""Answers of a fresh, stock vLLM engine: the reference that swapped and rolled back weights are held against.

One process of a run has them all, one after the other: each is made for a question, and gone when it is answered.
"""

from __future__ import annotations

import functools
import gc
import io
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson

from tests.warm import ENGINES, warm

SWITCHES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}
ROUNDING = 0.3  # nats; bf16 kernels round by the shape of a batch, and other weights are several nats off
Ids = list[int]


def answers(model: Path, prompts: list[Ids], tokens: int, *, adapter: Path | None = None, **options: Any) -> list[Ids]:
    """Its greedy answers, after it has loaded `model` from disk itself. `options` are vLLM's.

    `adapter`: a LoRA adapter that they go through.
    """
    through = {} if adapter is None else {"adapter": str(adapter)}
    return list(_asked(model, {"prompts": prompts, "tokens": tokens, **through}, options))


def chats(model: Path, conversations: list[Any], tokens: int, **options: Any) -> list[Ids]:
    """Its greedy answers to conversations as /v1/chat/completions takes them, each asked alone."""
    return list(_asked(model, {"chats": conversations, "tokens": tokens}, options))


def embeddings(model: Path, inputs: list[Ids], **options: Any) -> list[list[float]]:
    """Its vectors, as a model that pools."""
    return list(_asked(model, {"inputs": inputs}, {"runner": "pooling", **options}))


def behind(model: Path, asked: list[tuple[Ids, Ids]], **options: Any) -> list[float]:
    """For each (prompt, answer): by how many nats any token of the answer is less likely than what it prefers."""
    return list(_asked(model, {"asked": asked}, options))


def _asked(model: Path, what: dict[str, Any], options: dict[str, Any]) -> Any:
    pipe, directory = _process()
    here = {**os.environ, **SWITCHES}
    try:
        pipe.write(orjson.dumps({**what, "model": str(model), "options": options, "environment": here}) + b"\n")
        pipe.flush()
        line = pipe.readline()
        assert line, (Path(directory.name) / "log").read_text()
    except BaseException:  # an answer that is not read would be the next question's
        _process.cache_clear()
        raise
    return orjson.loads(line)


@functools.cache
def _process() -> tuple[io.BufferedRWPair[Any, Any], tempfile.TemporaryDirectory[str]]:
    """Questions and answers of the process, and the folder with its log."""
    directory = tempfile.TemporaryDirectory(prefix="hotswap-stock-")
    ours, its = socket.socketpair()
    ours.settimeout(550)
    with its:
        log, pipe = Path(directory.name) / "log", its.fileno()
        warm(ENGINES).start(["tests.stock", str(pipe)], {**os.environ, **SWITCHES}, log, (pipe,))
    return ours.makefile("rwb"), directory


def main(pipe: io.BufferedRWPair[Any, Any]) -> None:
    from server.instance.fork_server import fork_from_here

    fork_from_here()
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
    from vllm.v1.engine.core import EngineCore

    assert not hasattr(EngineCore, "hotswap_commit"), "this engine is not a stock one"
    for line in pipe:
        what = orjson.loads(line)
        os.environ.clear()
        os.environ.update(what["environment"])
        found = _answered(what)
        destroy_model_parallel()
        destroy_distributed_environment()
        gc.collect()
        pipe.write(orjson.dumps(found) + b"\n")
        pipe.flush()


def _answered(what: dict[str, Any]) -> list[Any]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    common = {"enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
    adapter = what.get("adapter")
    llm = LLM(what["model"], enable_lora=adapter is not None, **common, **what["options"])
    lora = LoRARequest("adapter", 1, adapter) if adapter is not None else None

    def generated(prompts: list[Ids], **more: Any) -> Any:
        params = SamplingParams(temperature=0, **more)
        asked = [{"prompt_token_ids": p} for p in prompts]
        return llm.generate(asked, params, lora_request=lora, use_tqdm=False)

    def worst(output: Any, prompt: Ids, said: Ids) -> float:
        places = [(output.prompt_logprobs[len(prompt) + i], token) for i, token in enumerate(said)]
        return float(
            max(max(seen.logprob for seen in place.values()) - place[token].logprob for place, token in places)
        )

    if "inputs" in what:
        outputs = llm.embed([{"prompt_token_ids": ids} for ids in what["inputs"]], use_tqdm=False)
        return [list(output.outputs.embedding) for output in outputs]
    if "chats" in what:
        greedy = SamplingParams(temperature=0, max_tokens=what["tokens"], ignore_eos=True)
        outputs = [o for messages in what["chats"] for o in llm.chat(messages, greedy, use_tqdm=False)]
        return [list(output.outputs[0].token_ids) for output in outputs]
    if "prompts" in what:
        outputs = [o for p in what["prompts"] for o in generated([p], max_tokens=what["tokens"], ignore_eos=True)]
        return [list(output.outputs[0].token_ids) for output in outputs]
    outputs = generated([p + said for p, said in what["asked"]], max_tokens=1, prompt_logprobs=1)
    return [worst(output, *asked) for output, asked in zip(outputs, what["asked"], strict=True)]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])).makefile("rwb"))
