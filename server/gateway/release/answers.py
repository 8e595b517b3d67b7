"""A release's evidence from the text of answers: its reader of the answers' desk, shadow answers, and feedback.

The reader is at the desk (server/answers/desk.py) while a step is judged whose conditions need texts or feedback, and
gone otherwise: answers are not read for nothing. It keeps nothing of them. Rewards are asked a few at a time; an answer
that finds no room is not scored, whatever version wrote it, so that the scored ones stay a fair sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from server.answers.desk import Desk, about_of
from server.answers.feedback import Feedback
from server.answers.measures import Pattern, measure
from server.answers.parse import Answer, parse
from server.errors import ServerError
from server.gateway.access.keys import Principal
from server.gateway.config import NamedSettings
from server.gateway.fleet.shadow import Repeated, Shadows
from server.gateway.release.evidence import Observer, needs_text
from server.gateway.release.policy import SCORED, Policy, searched
from server.gateway.release.records import Kind
from server.gateway.release.scoring import RewardClient, needed

log: Final = logging.getLogger("hotswap.gateway")

SCORERS: Final = 8  # answers that are scored at a time
WAITING: Final = 64  # that wait for it
# Those of every request the gateway counts by itself (evidence.measured). A repetition waits for other requests, so how
# long it takes shows nothing.
_TEXT: Final = ("cut", "repetition", "refusals", "logprob")
_SHADOW: Final = ("errors", "tokens", *_TEXT)


class AnswerReader:
    """A consumer of the desk (desk.Consumer) that reads the answers of a release's step."""

    name = "release"
    share = 1.0
    most = 512
    all_keys = True

    def __init__(self, model: str, desk: Desk, shadows: Shadows, observer: Observer, named: NamedSettings) -> None:
        self._model, self._named = model, named
        self._desk, self._shadows, self._observer = desk, shadows, observer
        self._policy: Policy | None = None
        self._refusals: tuple[Pattern, ...] = ()
        self._metrics: frozenset[str] = frozenset()
        self._scoring: asyncio.Queue[tuple[Answer, Kind]] = asyncio.Queue(WAITING)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def watch(self, policy: Policy, step: int) -> None:
        """Read for the conditions of this step from now on."""
        await self.stop()
        conditions = policy.of_step(step)
        metrics = frozenset(c.metric for c in conditions if needs_text(c.metric) or c.metric == "feedback")
        self._policy, self._metrics = policy, metrics
        self._refusals = searched(policy.refusal_patterns)
        self._loop = asyncio.get_running_loop()
        if metrics:
            self._desk.add(self)
        if policy.steps[step].shadow > 0:
            self._tasks.append(asyncio.create_task(self._read_shadows()))
        if any(metric.startswith(SCORED) for metric in metrics):
            self._tasks.append(asyncio.create_task(self._score_all(policy)))

    async def stop(self) -> None:
        """Read nothing more."""
        self._desk.remove(self)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._policy, self._metrics = None, frozenset()
        while not self._scoring.empty():
            self._scoring.get_nowait()

    # of the desk: `wants` on the event loop, the others on its thread

    def wants(self, principal: Principal) -> bool:
        return bool(self._metrics)

    def take(self, answer: Answer) -> None:
        if answer.about.served == self._model:
            self._observe(answer, "live", _TEXT)

    def rate(self, feedback: Feedback) -> None:
        if feedback.score is not None and feedback.model == self._model:
            drawn = feedback.drawn_version if feedback.version == feedback.drawn_version else None
            self._observer.observe("feedback", feedback.score, drawn, cluster=feedback.cluster)

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _observe(self, answer: Answer, kind: Kind, metrics: Sequence[str]) -> None:
        version, found = answer.about.drawn_version, measure(answer, self._refusals)
        if answer.version != version and found.get("errors") != 1.0:
            return
        for metric in metrics:
            if metric in found:
                self._observer.observe(metric, found[metric], version, kind, answer.about.cluster)
        watched, loop = self._observer.watched, self._loop
        rewarded = any(metric.startswith(SCORED) for metric in self._metrics)
        if rewarded and answer.whole and watched is not None and version in watched.versions and loop is not None:
            loop.call_soon_threadsafe(self._queue, answer, kind)

    def _queue(self, answer: Answer, kind: Kind) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self._scoring.put_nowait((answer, kind))

    # on the event loop

    async def _read_shadows(self) -> None:
        answers = self._shadows.listen()
        try:
            while True:
                repeated = await answers.get()
                if repeated.failed:
                    repeated.capture.drop()
                    failed = repeated.finished
                    self._observer.observe("errors", 1.0, failed.drawn_version, "shadow", failed.cluster)
                    continue
                await asyncio.to_thread(self._take_shadow, repeated)
        finally:
            self._shadows.ignore()

    def _take_shadow(self, repeated: Repeated) -> None:
        capture = repeated.capture
        try:
            about = about_of(repeated.finished, capture.wanted)
            answer = parse(capture.body, b"".join(capture.pieces), about)
        except ValueError as error:
            log.warning("a shadow answer cannot be read: %s", error)
            return
        finally:
            capture.close()
        self._observe(answer, "shadow", _SHADOW)

    async def _score_all(self, policy: Policy) -> None:
        import httpx

        async with httpx.AsyncClient(trust_env=False) as client, asyncio.TaskGroup() as tasks:
            rewards = RewardClient(client, self._named)
            for _ in range(SCORERS):
                tasks.create_task(self._score(policy, rewards))

    async def _score(self, policy: Policy, rewards: RewardClient) -> None:
        while True:
            answer, kind = await self._scoring.get()
            for metric in self._metrics:
                if not metric.startswith(SCORED):
                    continue
                name = metric.removeprefix(SCORED)
                reward = policy.rewards[name]
                if (fields := needed(reward, answer.metadata)) is None:
                    continue
                expected, extra = fields
                prompt = asked(answer)
                try:
                    scores = [
                        await rewards.score(name, reward, prompt, choice.text, expected, extra)
                        for choice in answer.choices
                    ]
                except ServerError as error:
                    self._observer.lose(metric, str(error))
                    continue
                mean = sum(scores) / len(scores)
                if not 0.0 <= mean <= 1.0:
                    self._observer.lose(metric, f"reward {name} gives {mean:g}, and must give 0 to 1: scale it")
                    continue
                self._observer.lose(metric, "")
                about = answer.about
                self._observer.observe(metric, mean, about.drawn_version, kind, about.cluster)


def asked(answer: Answer) -> str:
    """The question as a reward is shown it: the prompt, or the last message of the user."""
    if isinstance(answer.prompt, str):
        return answer.prompt
    said = [message.get("content") for message in answer.messages if message.get("role") == "user"]
    return str(said[-1]) if said else ""
