"""OpenAI's completions over a real transformers model, as far as a teacher is asked: log-probs of a prompt, in vLLM's
form and in the older one, and how text becomes tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from transformers import AutoModelForCausalLM

from trainer.data.tokenizer import Tokenizer


@torch.no_grad()
def logprobs(model: AutoModelForCausalLM, ids: list[int]) -> list[float]:
    """The log-probabilities that a model gives all tokens but the first."""
    distributions = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)
    found: list[float] = distributions.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found


class TeacherServer:
    """`failures` are status codes to answer first. `longest`: longer prompts are refused. `broken` changes an answer.
    Without `tokenizes` there is no /tokenize."""

    def __init__(self, directory: str | Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer(directory)
        self.failures: list[int] = []
        self.longest = 1000
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.broken: dict[str, Any] | None = None
        self.tokenizes = True
        self.url = ""
        self.app = FastAPI()
        self.app.post("/v1/completions")(self.completions)
        self.app.post("/tokenize")(self.tokenize)

    def logprobs(self, ids: list[int]) -> list[float]:
        return logprobs(self.model, ids)

    async def tokenize(self, request: Request) -> Response:
        if not self.tokenizes:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        body = await request.json()
        return JSONResponse({"tokens": self.tokenizer.plain(body["prompt"])})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        ids = body["prompt"]
        status = self.failures.pop(0) if self.failures else 400 if len(ids) > self.longest else 200
        if status != 200:
            error = {"message": f"made to fail with {status}", "code": "test"}
            return JSONResponse({"error": error}, status_code=status, headers={"retry-after": "0"})
        if self.broken is not None:
            return JSONResponse({"choices": [self.broken]})
        found = self.logprobs(ids)
        if body.get("echo"):
            return JSONResponse({"choices": [{"text": "", "logprobs": {"token_logprobs": [None, *found]}}]})
        rows = [None, *({str(i): {"logprob": p, "rank": 1}} for i, p in zip(ids[1:], found, strict=True))]
        return JSONResponse({"choices": [{"text": "", "prompt_logprobs": rows}]})
