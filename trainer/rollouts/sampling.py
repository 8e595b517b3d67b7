"""Rollouts: records in; trajectories, with their scores, out. On rank 0 only.

`Rollouts` samples and scores on a thread of its own, so that prompts decode while the training thread computes. A
trajectory goes to its rewards the moment it is complete, while the others of its prompt still decode.

What fails outside of the model never becomes a reward: an episode that fails is played again, a score that is missing
is asked for again, and in the end the trajectory is left out of its group.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from trainer.config import EnvironmentConfig, EvalConfig, GatewayConfig, RolloutConfig, SingleTurnEnvironment
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.environments import EnvironmentHost, Episode, Message, Observation, Task, messages_of
from trainer.errors import ConfigError, EnvironmentFailed, RolloutError
from trainer.rewards.scorer import RewardRequest, Score, Scorer
from trainer.rollouts.generate import SEEDS, GenerateClient, Request
from trainer.trajectory import LENGTH, REPEAT, Group, Trajectory, Turn

log = logging.getLogger(__name__)
T = TypeVar("T")
ENVIRONMENT = "environment"  # the name of its part in a score
EVALUATIONS = 2**40  # the first number of their seeds: none of the training's
CUT = "\n[cut]"  # after what an environment said too much of


@dataclass
class _Times:
    samples: int = 0
    generate_s: float = 0.0
    score_s: float = 0.0


@dataclass(frozen=True)
class _Played:
    """A trajectory, the prompt that it began with, and all that was said in it as messages."""

    prompt_ids: tuple[int, ...]
    trajectory: Trajectory
    said: tuple[Message, ...]


class Rollouts:
    """The gateway's `/generate`, the environment, and the rewards behind them. Close it, or use it as a context."""

    def __init__(
        self,
        gateway: GatewayConfig,
        rollout: RolloutConfig,
        scorer: Scorer,
        tokenizer: Tokenizer,
        seed: int,
        environment: EnvironmentConfig | None = None,
        model: str | None = None,
    ) -> None:
        """`model`: the name to ask for; None: what the gateway serves. Raises ConfigError for an environment that
        cannot be made, or a key that is missing."""
        self._model = model
        self._rollout, self._scorer, self._tokenizer, self._seed = rollout, scorer, tokenizer, seed
        self._client = GenerateClient(gateway)
        self._times, self._counts, self._tasks = _Times(), Counter[str](), set[Future[Any]]()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()
        self._host: EnvironmentHost | None = None
        if environment is not None and not isinstance(environment, SingleTurnEnvironment):
            self._host = EnvironmentHost(environment)
            try:
                asyncio.run_coroutine_threadsafe(self._host.open(), self._loop).result()
            except BaseException:
                self.close()
                raise

    def submit(self, record: Record, n: int, number: int) -> Future[Group]:
        """Begin to sample and score `n` trajectories at temperature 1. `number` is the record's place in the run's
        order: with `rollout.seeded` it decides the samples. The future raises RolloutError."""
        request = replace(self._request(record, n), seed=self._seed_of(number), on_swap=self._rollout.on_swap)
        return self._start(self._group(record, request, self._scorer))

    def evaluate(self, records: Sequence[Record], config: EvalConfig, scorer: Scorer | None = None) -> list[Group]:
        """Answers to each record as `config` says, scored by `scorer` (None: by the training's rewards). The samples
        are those of the same seeds each time. Raises RolloutError."""
        running = []
        for i, record in enumerate(records):
            request = replace(self._request(record, config.samples), temperature=config.heat, top_p=config.top_p)
            if config.heat:
                request = replace(request, seed=self._seed_of(EVALUATIONS + i))
            running.append(self._start(self._group(record, request, scorer or self._scorer)))
        return [future.result() for future in running]

    def _request(self, record: Record, n: int) -> Request:
        c = self._rollout
        about = Request(record.prompt_ids, n, c.max_tokens, c.temperature, stop_token_ids=c.stop_token_ids)
        return replace(about, model=self._model, stop_repeats=c.stop_repeats)

    def stats(self) -> dict[str, float]:
        """Since the last call: mean milliseconds from a sample's request to its last token, and from there to its
        score; trajectories that were sampled again and left out, if any; and what the rewards say of themselves
        (`Scorer.stats`)."""
        times, self._times = self._times, _Times()
        counts, self._counts = self._counts, Counter[str]()
        count = max(times.samples, 1)
        return {
            "generate_ms_mean": round(times.generate_s * 1e3 / count, 3),
            "score_ms_mean": round(times.score_s * 1e3 / count, 3),
            **{name: float(number) for name, number in counts.items()},
            **self._scorer.stats(),
        }

    def close(self) -> None:
        """Cancel what is in flight; the server sees its clients leave and frees their memory."""
        for future in list(self._tasks):
            future.cancel()
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result()
        self._scorer.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)
        return future

    async def _leave(self) -> None:
        """Cancel all tasks and wait for them, then close their connections."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()
        if self._host is not None:
            await self._host.close()

    async def _group(self, record: Record, request: Request, scorer: Scorer) -> Group:
        whole = self._rollout.request == "group" and self._host is None
        parts = [request] if whole else request.split()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._scored(record, part, scorer)) for part in parts]
        except ExceptionGroup as errors:  # one failure cancels the rest; it is what the user needs to see
            raise errors.exceptions[0] from None
        pairs = [pair for task in running for pair in task.result()]
        prompts = {played.prompt_ids for played, _ in pairs}
        if len(prompts) > 1:
            raise RolloutError(
                f"the environment began {len(prompts)} episodes of record {record.index} in different ways. Make "
                "`reset` depend on the task alone: only then can their rewards be compared."
            )
        prompt = prompts.pop() if prompts else record.prompt_ids
        return Group(prompt, tuple(played.trajectory for played, _ in pairs), tuple(score for _, score in pairs))

    async def _scored(self, record: Record, request: Request, scorer: Scorer) -> list[tuple[_Played, Score]]:
        """The trajectories that were played and have a score."""
        began = time.perf_counter()
        host = self._host
        played = await self._answers(request) if host is None else await self._episode(host, record, request)
        generated = time.perf_counter()
        scores = await asyncio.gather(*(self._score(record, each, scorer) for each in played))
        self._times.samples += len(played)
        self._times.generate_s += (generated - began) * len(played)
        self._times.score_s += (time.perf_counter() - generated) * len(played)
        return [(each, score) for each, score in zip(played, scores, strict=True) if score is not None]

    async def _score(self, record: Record, played: _Played, scorer: Scorer) -> Score | None:
        """None when a reward has no value, though it was asked again."""
        answers = [message["content"] for message in played.said if message["role"] == "assistant"]
        trajectory = played.trajectory
        request = RewardRequest(
            record.prompt, answers[-1] if answers else "", record.answer, record.extra,
            played.said, trajectory.policy_tokens, trajectory.truncated,
        )  # fmt: skip
        for _ in range(self._rollout.attempts):
            score = await scorer(request)
            if not score.missing:
                if self._host is None:
                    return score
                own = sum(turn.reward for turn in trajectory.turns)
                return score.plus(ENVIRONMENT, own, self._host.config.weight)
        self._counts["trajectories_without_reward"] += 1
        return None

    async def _answers(self, request: Request) -> list[_Played]:
        """Trajectories of one turn."""
        return [
            _Played(
                request.prompt_ids,
                Trajectory((answer.turn,), answer.finish_reason),
                ({"role": "assistant", "content": self._tokenizer.decode(answer.turn.token_ids)},),
            )
            for answer in await self._client.generate(request)
        ]

    async def _episode(self, host: EnvironmentHost, record: Record, request: Request) -> list[_Played]:
        """One trajectory, or none if every attempt failed."""
        for attempt in range(1, host.config.attempts + 1):
            try:
                episode, first = await host.begin(self._task(record))
                try:
                    return [await self._play(episode, first, record, request)]
                finally:
                    await episode.close()
            except EnvironmentFailed as error:
                self._counts["episodes_failed"] += 1
                log.warning("an episode of record %d failed (attempt %d): %s", record.index, attempt, error)
        self._counts["episodes_left_out"] += 1
        return []

    async def _play(self, episode: Episode, first: Observation, record: Record, request: Request) -> _Played:
        """Turn by turn, until the environment says it is done, or the turns or tokens are used up."""
        config = episode.host.config
        prompt_ids = self._prompt(first, record)
        turns: list[Turn] = []
        said: list[Message] = []
        finish_reason = LENGTH
        for number in range(config.max_turns):
            written = tuple(token for turn in turns for token in turn.token_ids)
            rest = replace(request, prompt_ids=prompt_ids).after(written)
            if rest.max_tokens <= 0:
                break
            (answer,) = await self._client.generate(rest)
            turns.append(answer.turn)
            said.append({"role": "assistant", "content": self._tokenizer.decode(answer.turn.token_ids)})
            if answer.finish_reason in (LENGTH, REPEAT):
                finish_reason = answer.finish_reason
                break
            seen = await episode.step(said[-1]["content"])
            turns[-1] = replace(answer.turn, reward=seen.reward)
            if seen.done:
                finish_reason = answer.finish_reason
                break
            if number < config.max_turns - 1:
                turns.append(self._observed(seen, answer.turn, config.max_observation_tokens))
                said += seen.messages
        while turns and not turns[-1].of_policy:
            turns.pop()  # nothing was written after it
        return _Played(prompt_ids, Trajectory(tuple(turns), finish_reason), tuple(said))

    def _task(self, record: Record) -> Task:
        return Task(record.prompt, messages_of(record.prompt, record.messages), record.answer, record.extra)

    def _prompt(self, first: Observation, record: Record) -> tuple[int, ...]:
        if not first.messages:
            return record.prompt_ids
        if not self._tokenizer.has_chat_template:
            return self._tokenizer.prompt("".join(message["content"] for message in first.messages))
        try:
            return self._tokenizer.chat(first.messages)[1]
        except ValueError as error:
            raise _unwritable(error) from None

    def _observed(self, seen: Observation, turn: Turn, most: int) -> Turn:
        messages = [{**m, "content": self._shortened(m["content"], most // len(seen.messages))} for m in seen.messages]
        try:
            return Turn(self._tokenizer.reply(messages, turn.token_ids))
        except ValueError as error:
            raise _unwritable(error) from None

    def _shortened(self, text: str, most: int) -> str:
        """At most about so many tokens of it. A flood is cut before it is tokenised."""
        text = text[: most * 64]
        ids = self._tokenizer.continuation(text)[:-1]
        return text if len(ids) <= most else self._tokenizer.decode(ids[:most]) + CUT

    def _seed_of(self, number: int) -> int | None:
        if not self._rollout.seeded:
            return None
        rng = np.random.default_rng([self._seed, number])
        return int(rng.integers(0, SEEDS - 1024))  # room for the sample's index, which is added to it


def _unwritable(error: ValueError) -> ConfigError:
    problem = f"the model's chat template cannot write what the environment says: {error}"
    return ConfigError("environment", problem, "Use a model whose template knows these roles, or other roles")
