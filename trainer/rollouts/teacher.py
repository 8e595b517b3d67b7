"""The teacher of on-policy distillation: the log-probs that another model gives to the tokens that this one sampled,
from any server with OpenAI's completions that says them of a prompt.

The prompt and all that follows go there as one prompt of token ids, once for each trajectory, and nothing is generated.
Ids only mean the same on both sides if the tokenizers are the same, which is checked before the first sample.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import httpx
import orjson

from trainer.config import TeacherConfig
from trainer.connection import Bearer, verify
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError, RolloutError
from trainer.rollouts.generate import FIRST_DELAY_S, LONGEST_DELAY_S, RETRYABLE, error_part, retry_after
from trainer.trajectory import Trajectory

log = logging.getLogger(__name__)
KEY = "algorithm.teacher"
UNFIT = frozenset({400, 413, 422})  # this prompt is refused, for its length for example; others may not be
TRIAL_TOKENS = 8


class Teacher:
    """Asked for one trajectory at a time, up to `concurrency` at once. Bound to the event loop that opens it."""

    def __init__(self, config: TeacherConfig, tokenizer: Tokenizer) -> None:
        """Raises ConfigError when a key or certificates are missing."""
        self._config, self._tokenizer = config, tokenizer
        self._room = asyncio.Semaphore(config.concurrency)
        self._http = httpx.AsyncClient(
            base_url=config.url,
            headers={"content-type": "application/json"},
            auth=Bearer(config.api_key),
            verify=verify(config),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency),
            timeout=httpx.Timeout(config.timeout_s, connect=5.0, pool=None),
        )

    async def open(self) -> None:
        """Check that it has the student's tokenizer, and gives log-probs. Raises ConfigError, RolloutError."""
        await self._check_tokenizer()
        trial = self._tokenizer.plain(self._tokenizer.texts()[0])[:TRIAL_TOKENS]
        try:
            found = await self._of(trial)
        except RolloutError as error:
            if error.status == 0:  # it does not answer
                raise
            raise ConfigError(KEY, f"gives no log-probs of a prompt: {error}", _OTHER_FORM) from None
        if found is None:
            raise ConfigError(KEY, f"refuses a prompt of {len(trial)} tokens with log-probs", _OTHER_FORM)

    async def logprobs(self, prompt_ids: Sequence[int], trajectory: Trajectory) -> tuple[float, ...] | None:
        """Those of all tokens after the prompt, 0 on the environment's; None if the teacher cannot take this one.

        A request that may succeed later (connection lost, 429, 5xx) is sent again for `retry_s` seconds. Raises
        RolloutError after that, for a refusal that others would meet too, or for no answer."""
        if not trajectory.policy_tokens:
            return (0.0,) * len(trajectory.token_ids)
        found = await self._of((*prompt_ids, *trajectory.token_ids))
        if found is None:
            return None
        of_answer = found[len(prompt_ids) - 1 :]
        return tuple(p * of_policy for p, of_policy in zip(of_answer, trajectory.mask, strict=True))

    async def close(self) -> None:
        await self._http.aclose()

    async def _of(self, token_ids: Sequence[int]) -> list[float] | None:
        """Of all tokens but the first; None if this prompt is refused."""
        c = self._config
        body: dict[str, Any] = {"model": c.model, "prompt": list(token_ids), "temperature": 0}
        if c.form == "echo":
            body |= {"max_tokens": 0, "echo": True, "logprobs": 0}
        else:
            body |= {"max_tokens": 1, "prompt_logprobs": 0}
        async with self._room:
            response = await self._post("/v1/completions", body)
        if response.status_code in UNFIT:
            log.warning("the teacher refuses a prompt of %d tokens: %s", len(token_ids), _said(response))
            return None
        if response.status_code != 200:
            raise RolloutError(f"the teacher at {c.url} refused ({_said(response)}).", status=response.status_code)
        try:
            found = self._read(orjson.loads(response.content)["choices"][0], token_ids)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            problem = f"the teacher at {c.url} answered something else than log-probs of the prompt ({error!r})"
            raise RolloutError(f"{problem}. {_OTHER_FORM}.", status=response.status_code) from None
        return [max(p, c.min_logprob) for p in found]

    def _read(self, choice: dict[str, Any], token_ids: Sequence[int]) -> list[float]:
        if self._config.form == "echo":
            rows = choice["logprobs"]["token_logprobs"]
            found = [float(p) for p in rows[1 : len(token_ids)]]
        else:
            rows = choice["prompt_logprobs"]
            pairs = zip(rows[1:], token_ids[1:], strict=True)
            found = [float(row[str(token)]["logprob"]) for row, token in pairs]
        if len(found) != len(token_ids) - 1 or any(math.isnan(p) or p > 1e-3 for p in found):
            raise ValueError(f"{len(rows)} log-probs of {len(token_ids)} tokens")
        return found

    async def _post(self, route: str, body: dict[str, Any]) -> httpx.Response:
        c, delay, deadline = self._config, FIRST_DELAY_S, time.monotonic() + self._config.retry_s
        while True:
            wait: float | None = None
            try:
                response = await self._http.post(route, content=orjson.dumps(body))
                if response.status_code not in RETRYABLE:
                    return response
                problem, wait = _said(response), retry_after(response.headers)
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            wait = delay if wait is None else max(wait, delay)
            if time.monotonic() + wait > deadline:
                raise RolloutError(
                    f"no log-probs from the teacher at {c.url} within {c.retry_s:g} s; last: {problem}. Start it, or "
                    f"set {KEY}.url."
                )
            await asyncio.sleep(wait)
            delay = min(2 * delay, LONGEST_DELAY_S)

    async def _check_tokenizer(self) -> None:
        """Against the teacher's own, if its directory is here; else by what the server makes of texts that need tokens
        from all over the vocabulary, and every special one."""
        c, mine = self._config, self._tokenizer
        advice = "Distil from a model with the student's tokenizer"
        if c.tokenizer is not None:
            theirs = Tokenizer(c.tokenizer).vocabulary
            if different := {t for t, i in mine.vocabulary.items() if theirs.get(t) != i}:
                problem = f"{len(different)} of the student's tokens are others there, such as {min(different)!r}"
                raise ConfigError(f"{KEY}.tokenizer", problem, advice)
            return
        for text in mine.texts():
            body = {"model": c.model, "prompt": text, "add_special_tokens": False}
            response = await self._post("/tokenize", body)
            if response.status_code != 200:
                problem = f"missing, and the teacher's server does not say how it tokenises ({_said(response)})"
                raise ConfigError(f"{KEY}.tokenizer", problem, "Name a directory with the teacher's tokenizer.json")
            if tuple(response.json()["tokens"]) != mine.plain(text):
                raise ConfigError(KEY, f"{c.model} has another tokenizer: it reads {text[:40]!r} as other ids", advice)


_OTHER_FORM = f"Set {KEY}.form to what the server knows: prompt_logprobs (vLLM) or echo"


def _said(response: httpx.Response) -> str:
    return f"HTTP {response.status_code}: {error_part(response.content, 'message')}"
