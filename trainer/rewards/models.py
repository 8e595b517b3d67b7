"""Reward models: a chat model that judges answers, and a classifier that scores them."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from typing import Any

import httpx

from trainer.config import GatewayConfig, JudgeReward
from trainer.connection import Bearer, verify
from trainer.errors import ConfigError, RewardError
from trainer.rewards.scorer import Reward, RewardRequest

_NUMBER = r"(?<![\w.])(-?\d+(?:\.\d+)?)(?![\w])[*_]*"
_OF = rf"{_NUMBER}(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?)|\s*(%))"
# How judges mark their rating, the surest way first.
_RATINGS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"\[\[\s*(?:{_OF}|{_NUMBER})\s*\]\]",
        rf"\b(?:rating|score|grade)\b[\"'*_\s]*[:=][\"'*_\s]*(?:{_OF}|{_NUMBER})",
        _OF,
        _NUMBER,
    )
]
TRIES = 3


class Judge(Reward):
    """A chat model's rating of an answer, through an OpenAI-compatible server: this run's gateway, or another one. The
    value is the rating in its reply (`rating_in`), scaled to 0..1."""

    def __init__(self, config: JudgeReward, gateway: GatewayConfig | None) -> None:
        self._config = config
        url = config.url or (gateway.url if gateway is not None else "")
        if not url:
            raise ConfigError("rewards.url", "missing, and there is no gateway", "Name the server of the judge")
        own = gateway if not config.url else None  # whose certificate and key are known already
        self._auth = Bearer(self._key if own is None or config.api_key_env is not None else own.api_key)
        self._verify = verify(own) if own is not None else True
        self._url = url.rstrip("/") + "/v1/chat/completions"

    async def open(self) -> None:
        c = self._config
        self._room = asyncio.Semaphore(c.workers)
        self._http = httpx.AsyncClient(auth=self._auth, verify=self._verify, timeout=c.timeout_s)

    async def __call__(self, request: RewardRequest, /) -> float:
        c = self._config
        expected = "\n".join((request.expected, *request.alternatives))
        words = {"prompt": request.prompt, "answer": request.answer, "expected": expected}
        # Not str.format: an answer with braces in it is no template.
        text = re.sub(r"\{(prompt|answer|expected)\}", lambda match: words[match[1]], c.template)
        async with self._room:
            reply = await self._ask(text)
        rating = rating_in(reply, c.lowest, c.highest)
        if rating is None:
            raise RewardError(f"the judge's reply has no number from {c.lowest:g} to {c.highest:g}: {reply[-80:]!r}.")
        return (rating - c.lowest) / (c.highest - c.lowest)

    async def close(self) -> None:
        if hasattr(self, "_http"):
            await self._http.aclose()

    def _key(self) -> str | None:
        name = self._config.api_key_env
        if name is not None and name not in os.environ:
            raise ConfigError("rewards.api_key_env", f"{name} is not set", "Export it")
        return os.environ[name] if name is not None else None

    async def _ask(self, text: str) -> str:
        c, problem = self._config, ""
        messages = [{"role": "user", "content": text}]
        body = {"model": c.model, "messages": messages, "temperature": 0.0, "max_tokens": c.max_tokens}
        for attempt in range(TRIES):
            try:
                answer = await self._http.post(self._url, json=body)
                if answer.status_code == 200:
                    return str(answer.json()["choices"][0]["message"]["content"] or "")
                problem = f"HTTP {answer.status_code}: {answer.text[:200]}"
                if answer.status_code not in (408, 429, 500, 502, 503, 504):
                    break
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            await asyncio.sleep(0.2 * 2**attempt)
        raise RewardError(f"the judge at {self._url} gave no answer ({problem}).")


def rating_in(reply: str, lowest: float, highest: float) -> float | None:
    """The last rating, marked in the surest way: `[[8]]`, `"score": 8`, `8/10` or `8 out of 10` or `80%`, or the number
    alone. None without one from `lowest` to `highest`. `4/5` is four fifths of `highest`."""
    for pattern in _RATINGS:
        for match in reversed(list(pattern.finditer(reply))):
            number, *rest = [group for group in match.groups() if group is not None]
            whole = 100.0 if rest == ["%"] else float(rest[0]) if rest else highest
            value = float(number) if whole == highest else float(number) * highest / (whole or 1.0)
            if lowest <= value <= highest:
                return value
    return None


class Classifier:
    """A Hugging Face sequence classifier: prompt and answer to a number. They are one text; if the prompt was given as
    messages and the classifier has a chat template of its own, it reads them in that. Only its worker loads it."""

    whole = True  # it takes requests (worker.py)

    def __init__(self, path: str, label: int, *, probability: bool, max_tokens: int, batch: int = 1) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            self._model = AutoModelForSequenceClassification.from_pretrained(path, local_files_only=True).eval()
        except (OSError, ValueError, KeyError) as error:
            problem = f"cannot load {path} ({error})"
            raise ConfigError("rewards.path", problem, "Name a sequence classification checkpoint") from None
        self._torch, self._label = torch, label
        self._probability, self._max_tokens = probability, min(max_tokens, self._tokenizer.model_max_length)
        # decoders find the end of a row by the id of padding: without one they take a row at a time
        padding = getattr(self._model.config, "pad_token_id", None)
        self._padding, self.batch = padding or 0, batch if padding is not None else 1
        self.nbytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        labels = self._model.config.num_labels
        if not -labels <= label < labels:
            raise ConfigError("rewards.label", f"{label}, but {path} has {labels} labels", "Name one of them")

    def __call__(self, request: dict[str, Any]) -> float:
        return self.many([request])[0]

    def many(self, asked: Sequence[dict[str, Any]]) -> list[float]:
        """The values of several, from one forward pass."""
        torch = self._torch
        with torch.no_grad():
            rows = [torch.tensor(self._tokens(request)) for request in asked]
            ids, mask = (
                torch.nn.utils.rnn.pad_sequence(padded, batch_first=True, padding_value=value)
                for padded, value in ((rows, self._padding), ([torch.ones_like(row) for row in rows], 0))
            )
            logits = self._model(input_ids=ids, attention_mask=mask).logits.float()
            return [self._value(row) for row in logits]

    def _tokens(self, request: dict[str, Any]) -> list[int]:
        text, rendered = request["prompt"] + request["answer"], False
        if request.get("messages") and self._tokenizer.chat_template:
            answer = request.get("turns") or [{"role": "assistant", "content": request["answer"]}]
            text, rendered = self._tokenizer.apply_chat_template([*request["messages"], *answer], tokenize=False), True
        options = {"truncation": True, "max_length": self._max_tokens, "add_special_tokens": not rendered}
        ids: list[int] = self._tokenizer(text, **options)["input_ids"]
        return ids

    def _value(self, logits: Any) -> float:
        torch = self._torch
        if len(logits) == 1:
            return float(torch.sigmoid(logits[0]) if self._probability else logits[0])
        chosen = torch.log_softmax(logits, 0)[self._label]
        return float(chosen.exp() if self._probability else chosen - torch.log(-torch.expm1(chosen)))
