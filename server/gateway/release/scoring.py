"""Scores of answers by a reward server, and the evaluation of a candidate before it gets any traffic.

An evaluation set is a file of JSON lines. Each line has `messages` (of a chat) or `prompt` (text), and may have
`expected` and `extra`, which go to the reward as they are. The candidate answers at its own instance's address, where
no user is sent to; where the policy compares, an instance of the stable version answers the same.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from server.errors import ConfigError, ServerError
from server.gateway.access.key_sources import read_private
from server.gateway.config import NamedSettings
from server.gateway.release.policy import Evaluation, Policy, Reward
from weightsync.control.records import InstanceRecord

if TYPE_CHECKING:
    import httpx

CONCURRENT: Final = 8  # questions that the candidate answers at a time
ANSWER_S: Final = 300.0
MOST: Final = 10_000  # questions of one set


class Question(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One line of an evaluation set."""

    prompt: str = ""
    messages: list[dict[str, Any]] = []
    expected: str = ""
    extra: dict[str, Any] = {}

    @property
    def text(self) -> str:
        """The text of the prompt that the reward is shown."""
        return self.prompt or "\n".join(str(message.get("content", "")) for message in self.messages)


class RewardClient:
    """Asks the reward servers of the gateway's settings."""

    def __init__(self, client: httpx.AsyncClient, named: NamedSettings) -> None:
        self._client, self.named = client, named
        self._servers: dict[str, tuple[str, dict[str, str]]] = {}  # of a reward: where, and the headers with its key

    async def score(
        self, name: str, reward: Reward, prompt: str, answer: str, expected: str, extra: Mapping[str, Any]
    ) -> float:
        """The score by the reward called `name`. Raises ServerError."""
        import httpx

        body = {"prompt": prompt, "answer": answer, "expected": expected, "extra": dict(extra), "rewards": [name]}
        url, headers = self._server(name)
        try:
            said = await self._client.post(url, json=body, headers=headers, timeout=reward.timeout_s)
            found = said.json()
            if said.status_code != 200:
                raise ServerError(f"reward {name}: {found['error']['message']}")
            if name in found["scores"]:
                return float(found["scores"][name])
            raise ServerError(f"reward {name} failed: {found['failures'][name]}")
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise ServerError(f"reward {name}: its server does not answer ({why})") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"reward {name}: its server does not answer as a reward server does") from error

    def _server(self, name: str) -> tuple[str, dict[str, str]]:
        if name not in self._servers:
            try:
                url, file = self.named.find("--reward", name), self.named.of("--reward-key").get(name)
                headers = {"authorization": f"Bearer {read_private(Path(file)).strip()}"} if file is not None else {}
            except ConfigError as error:
                raise ServerError(f"reward {name}: {error}") from error
            self._servers[name] = f"{url.rstrip('/')}/score", headers
        return self._servers[name]


def check_names(policy: Policy, named: NamedSettings) -> None:
    """Raises ConfigError for a policy that names what the gateway's settings do not have."""
    for reward in policy.rewards:
        named.find("--reward", reward)
    for evaluation in policy.evaluation:
        named.find("--evaluation", evaluation.name)


def needed(reward: Reward, metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The `expected` and `extra` of a request for this reward, from its metadata; None where that lacks any."""
    if any(name is not None and name not in metadata for name in (reward.expected, *reward.extra)):
        return None
    expected = str(metadata[reward.expected]) if reward.expected is not None else ""
    return expected, {name: metadata[name] for name in reward.extra}


def read_set(name: str, named: NamedSettings) -> list[Question]:
    """Raises ConfigError, which names the line."""
    where, file = f"evaluation {name}", named.find("--evaluation", name)
    try:
        lines = [line for line in Path(file).read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror}).") from error
    if not 0 < len(lines) <= MOST:
        raise ConfigError(f"{where}: must have 1 to {MOST} lines, and has {len(lines)}.")
    questions, decode = [], msgspec.json.Decoder(Question).decode
    for number, line in enumerate(lines, 1):
        try:
            question = decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where}, line {number}: {error}.") from error
        if bool(question.prompt) == bool(question.messages):
            raise ConfigError(f"{where}, line {number}: give either `prompt` or `messages`.")
        questions.append(question)
    return questions


@dataclass
class Evaluator:
    """Asks instances the questions of a policy's evaluation sets, and rewards for the scores."""

    client: httpx.AsyncClient
    rewards: RewardClient
    model: str
    policy: Policy
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENT))

    async def verdict(self, candidate: InstanceRecord, stable: InstanceRecord | None) -> str:
        """Why the candidate does not pass; "" if it does. Raises ServerError."""
        problems = [await self._of(evaluation, candidate, stable) for evaluation in self.policy.evaluation]
        return "; ".join(problem for problem in problems if problem)

    async def _of(self, evaluation: Evaluation, candidate: InstanceRecord, stable: InstanceRecord | None) -> str:
        questions = read_set(evaluation.name, self.rewards.named)
        what = f"{evaluation.name}: {evaluation.by}"
        mean = await self._mean(evaluation, questions, candidate)
        if evaluation.min is not None and mean < evaluation.min:
            return f"{what} {mean:.4g}, which is below {evaluation.min:g}"
        if evaluation.max_decrease is None:
            return ""
        if stable is None:
            raise ServerError(f"{what}: no instance runs the stable version, so there is nothing to compare with")
        before = await self._mean(evaluation, questions, stable)
        if mean < before - evaluation.max_decrease:
            return f"{what} {mean:.4g}, and {before:.4g} of the stable version: over {evaluation.max_decrease:g} less"
        return ""

    async def _mean(self, evaluation: Evaluation, questions: Sequence[Question], instance: InstanceRecord) -> float:
        reward = self.policy.rewards[evaluation.by]

        async def scored(question: Question) -> list[float]:
            async with self._room:
                answers = await self._answers(evaluation, question, instance)
                of = partial(self.rewards.score, evaluation.by, reward, question.text)
                return [await of(text, question.expected, question.extra) for text in answers]

        try:
            async with asyncio.TaskGroup() as tasks:
                found = [tasks.create_task(scored(question)) for question in questions]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        scores = [score for task in found for score in task.result()]
        return sum(scores) / len(scores)

    async def _answers(self, evaluation: Evaluation, question: Question, instance: InstanceRecord) -> list[str]:
        import httpx

        body: dict[str, Any] = {
            "model": self.model, "max_tokens": evaluation.max_tokens, "temperature": evaluation.temperature,
            "n": evaluation.samples,
        }  # fmt: skip
        chat = bool(question.messages)
        body |= {"messages": question.messages} if chat else {"prompt": question.prompt}
        headers = {"x-hotswap-cache-scope": secrets.token_hex(16), "x-hotswap-probe": "1"}
        headers |= {"authorization": f"Bearer {instance.key}"} if instance.key else {}
        url = f"{instance.address}/v1/{'chat/' if chat else ''}completions"
        try:
            said = await self.client.post(url, json=body, headers=headers, timeout=ANSWER_S)
            if said.status_code != 200:
                raise ServerError(f"instance {instance.id} answers with status {said.status_code}: {said.text[:200]}")
            choices = said.json()["choices"]
            return [str((choice["message"]["content"] or "") if chat else choice["text"]) for choice in choices]
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise ServerError(f"instance {instance.id} does not answer ({why})") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"instance {instance.id} gave an answer that cannot be read ({error!r})") from error
