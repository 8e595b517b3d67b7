"""The gateway's `/generate` over a real transformers model, for tests that have no vLLM engine.

It implements the contract's streaming half: token ids in; token ids, log-probs and version spans out. Samples depend on
nothing but the weights and the request. Weights are replaced through `load`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers import AutoModelForCausalLM


class GenerateServer:
    """One model behind `/generate`. `failures` are status codes to answer first, with the error's `code`; no answer
    begins unless `ready`. `break_after`: for each of the next streams, after how many tokens of each answer it breaks
    off, with an error event of that `code`, or (`cut`) without a word. `fewest`: an answer does not stop before."""

    def __init__(self, directory: str | Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.eos = self.model.config.eos_token_id
        self.version = 0
        self.failures: list[int] = []
        self.code = "test"
        self.ready: Callable[[], bool] = lambda: True
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answered = 0
        self.break_after: list[int] = []
        self.cut = False
        self.fewest = 0
        self._lock = threading.Lock()
        self.app = FastAPI()
        self.app.post("/generate")(self.generate)
        self.url = ""

    def load(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Replace the weights between two answers."""
        own = self.model.state_dict()
        with self._lock:
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
            self.version = version

    def swap(self, version: int) -> bool:
        """The same weights under another number."""
        self.version = version
        return True

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.failures:
            status = self.failures.pop(0)
            error = {"message": f"made to fail with {status}", "type": "test", "code": self.code, "param": None}
            return JSONResponse({"error": error}, status_code=status, headers={"retry-after": "0"})
        while not self.ready():  # noqa: ASYNC110 - what is waited for happens on another thread
            await asyncio.sleep(0.001)
        with self._lock:
            answer = self._answer(body)
        self.answered += 1
        return StreamingResponse(self._events(answer["choices"], body), media_type="text/event-stream")

    async def _events(self, choices: list[dict[str, Any]], body: dict[str, Any]) -> AsyncIterator[str]:
        """At most `stream_interval` tokens an event, the choices by turns; then what is said of all of them."""
        step, breaks = body["stream_interval"], self.break_after.pop(0) if self.break_after else None
        for start in range(0, max(len(choice["token_ids"]) for choice in choices), step):
            for choice in choices:
                end = start + step if breaks is None else min(start + step, breaks)
                tokens, whole = choice["token_ids"][start:end], len(choice["token_ids"])
                if not tokens:
                    continue
                event = {
                    "index": choice["index"],
                    "token_ids": tokens,
                    "logprobs": choice["logprobs"][start:end],
                    "weight_version": choice["weight_versions"][-1]["version"],
                }
                said = {k: choice[k] for k in ("finish_reason", "routed_experts") if k in choice}
                last = said if start + len(tokens) == whole else {}
                yield _event("token", event | last)
            if breaks is not None and start + step >= breaks:
                if self.cut:
                    raise ConnectionResetError
                yield _event("error", {"error": {"message": "made to break", "type": "test", "code": self.code}})
                return
        yield _event(
            "done", {"choices": [{k: c[k] for k in ("index", "finish_reason", "weight_versions")} for c in choices]}
        )

    @torch.no_grad()
    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = torch.tensor([body["prompt_token_ids"]] * body["n"])
        start, generator = tokens.shape[1], torch.Generator().manual_seed(body.get("seed", 0))
        done = torch.zeros(len(tokens), dtype=torch.bool)
        logprobs = torch.zeros(len(tokens), 0)
        for _ in range(body["max_tokens"]):
            distribution = torch.log_softmax(self.model(tokens).logits[:, -1], dim=-1)
            if body["temperature"] == 0:
                chosen = distribution.argmax(dim=-1, keepdim=True)
            else:
                chosen = torch.multinomial(distribution.exp(), 1, generator=generator)
            logprobs = torch.cat([logprobs, distribution.gather(1, chosen)], dim=1)
            tokens = torch.cat([tokens, torch.where(done[:, None], self.eos, chosen)], dim=1)
            done |= (chosen[:, 0] == self.eos) & (tokens.shape[1] - start >= self.fewest)
            if done.all():
                break
        choices = [self._choice(i, row[start:].tolist(), logprobs[i].tolist()) for i, row in enumerate(tokens)]
        if body.get("routed_experts"):
            for choice in choices:
                places = range(body["routed_experts_prompt_start"], start + len(choice["token_ids"]) - 1)
                choice["routed_experts"] = routed([[[place, self.version]] for place in places])
        return {"id": "gen-1", "model": "tiny", "choices": choices, "usage": {}}

    def _choice(self, index: int, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        stopped = self.eos in ids[max(self.fewest - 1, 0) :]
        length = ids.index(self.eos, max(self.fewest - 1, 0)) + 1 if stopped else len(ids)
        return {
            "index": index,
            "text": "",
            "token_ids": ids[:length],
            "logprobs": logprobs[:length],
            "finish_reason": "stop" if stopped else "length",
            "weight_versions": [{"version": self.version, "start": 0, "end": length}],
        }


def routed(rows: list[Any]) -> str:
    """Experts as the server writes them; the fake ones of this server are a token's place and the version."""
    with io.BytesIO() as file:
        np.save(file, np.array(rows, dtype=np.uint16))
        return base64.b64encode(file.getvalue()).decode()


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


class Unmoved(GenerateServer):
    """It takes every version and goes on answering with the weights it began with, so that an answer depends on its
    request alone, whenever that comes."""

    def load(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        self.version = version


@contextlib.contextmanager
def serve(server: GenerateServer) -> Iterator[GenerateServer]:
    """Serve on a free loopback port, from a thread, for the body's duration."""
    with serve_app(server.app) as server.url:
        yield server


@contextlib.contextmanager
def serve_app(app: FastAPI) -> Iterator[str]:
    """Its URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    instance = uvicorn.Server(config)
    thread = threading.Thread(target=instance.run, daemon=True)
    thread.start()
    started = threading.Event()
    while not instance.started and thread.is_alive():
        started.wait(0.01)
    try:
        yield f"http://127.0.0.1:{instance.servers[0].sockets[0].getsockname()[1]}"
    finally:
        instance.should_exit = True
        thread.join(10)
