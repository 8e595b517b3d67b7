"""Rollouts: records in; trajectories, with their scores, out. On rank 0 only.

`RolloutSampler` samples and scores on a thread of its own, so that prompts decode while the training thread computes. A
failure outside of the model never becomes a reward: the part that failed is tried again, and in the end the trajectory
is left out of its group.

With `rollout.token_budget` a group is sampled in rounds (docs/trainer/schedules.md). A round leaves a
`Partial`, plain data that a checkpoint can hold; the next round goes on from it, whatever weights are there then. An
episode waits in its environment's process; where that has lost it, the recorded answers are played to a new one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from trainer import routing
from trainer.config import (
    EnvironmentConfig,
    EvalConfig,
    GatewayConfig,
    RolloutConfig,
    SingleTurnEnvironment,
    TeacherConfig,
    ToolsEnvironment,
)
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.environments import EnvironmentHost, Episode, Message, Observation, Task, messages_of
from trainer.environments.base import CHARACTERS
from trainer.errors import ConfigError, EnvironmentFailed, RolloutError
from trainer.rewards.scorer import RewardRequest, Score, Scorer
from trainer.rollouts.generate import SEEDS, GenerateClient, Request
from trainer.rollouts.teacher import Teacher
from trainer.trajectory import (
    LENGTH,
    REPEAT,
    UNFINISHED,
    Outcome,
    Partial,
    PartialSample,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

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
    """A trajectory, the prompt that it began with, all that was said in it as messages, and the sum of what the
    environment gave (unweighted)."""

    prompt_ids: tuple[int, ...]
    trajectory: Trajectory
    said: tuple[Message, ...]
    given: float = 0.0


@dataclass
class _Playing:
    """An episode that is under way, and what has been written in it. A last turn of the policy is still being
    written."""

    episode: Episode
    prompt_ids: tuple[int, ...]
    turns: list[Turn] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    given: float = 0.0

    @property
    def written(self) -> tuple[int, ...]:
        return tuple(token for turn in self.turns for token in turn.token_ids)

    def is_at(self, sample: PartialSample) -> bool:
        return self.prompt_ids == sample.prompt_ids and tuple(self.turns) == sample.trajectory.turns


@dataclass(frozen=True)
class _How:
    """The scorer of trajectories, whether it compares those of a group too (training does, and evaluations do not), the
    most tokens that each gets in a round, and the teacher who is asked about them."""

    scorer: Scorer
    compared: bool = False
    budget: int | None = None
    teacher: Teacher | None = None


_Key = tuple[int, int]  # of an episode: the group's number, the sample's


class RolloutSampler:
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
        teacher: TeacherConfig | None = None,
    ) -> None:
        """`model`: the name to ask for; None: what the gateway serves. `teacher`: whom to ask about samples too. Raises
        ConfigError for an environment that cannot be made, a key that is missing, or a teacher that is of no use;
        RolloutError."""
        self._model = model
        self._rollout, self._scorer, self._tokenizer, self._seed = rollout, scorer, tokenizer, seed
        self._client = GenerateClient(gateway)
        self._times, self._counts, self._tasks = _Times(), Counter[str](), set[Future[Any]]()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()
        self._host: EnvironmentHost | None = None
        self._teacher: Teacher | None = None
        self._waiting: dict[_Key, _Playing] = {}  # until their next round
        self._said = False  # that no reward applies to some record
        try:
            if environment is not None and not isinstance(environment, SingleTurnEnvironment):
                self._host = EnvironmentHost(environment)
                asyncio.run_coroutine_threadsafe(self._host.open(), self._loop).result()
            if teacher is not None:
                self._teacher = Teacher(teacher, tokenizer)
                asyncio.run_coroutine_threadsafe(self._teacher.open(), self._loop).result()
        except BaseException:
            self.close()
            raise

    def submit(self, record: Record, n: int, number: int) -> Future[TrajectoryGroup]:
        """Begin to sample and score `n` trajectories at temperature 1. `number` is the record's place in the run's
        order: with `rollout.seeded` it decides the samples. No teacher is asked. The future raises RolloutError."""
        return self._start(
            self._whole(record, self._training(record, n, number), number, _How(self._scorer, compared=True))
        )

    def round(self, record: Record, n: int, number: int, before: Future[Outcome] | None = None) -> Future[Outcome]:
        """`submit` for training: the teacher is asked, if there is one, and each trajectory gets at most
        `rollout.token_budget` tokens, so the group may be left Partial. `before` is the round to go on from, once it is
        over; a group that is complete stays as it is. The future raises RolloutError."""
        how = _How(self._scorer, True, self._rollout.token_budget, self._teacher)
        return self._start(self._round(record, self._training(record, n, number), number, how, before))

    def evaluate(
        self, records: Sequence[Record], config: EvalConfig, scorer: Scorer | None = None
    ) -> list[TrajectoryGroup]:
        """Answers to each record as `config` says, scored by `scorer` (None: by the training's rewards). The samples
        are those of the same seeds each time. Raises RolloutError."""
        running = []
        for i, record in enumerate(records):
            request = replace(self._request(record, config.samples), temperature=config.heat, top_p=config.top_p)
            if config.heat:
                request = replace(request, seed=self._seed_of(EVALUATIONS + i))
            running.append(self._start(self._whole(record, request, EVALUATIONS + i, _How(scorer or self._scorer))))
        return [future.result() for future in running]

    def _request(self, record: Record, n: int) -> Request:
        c = self._rollout
        about = Request(record.prompt_ids, n, c.max_tokens, 1.0, stop_token_ids=c.stop_token_ids)
        return replace(about, model=self._model, stop_repeats=c.stop_repeats)

    def _training(self, record: Record, n: int, number: int) -> Request:
        asked = replace(self._request(record, n), seed=self._seed_of(number), on_swap=self._rollout.on_swap)
        return replace(asked, routed_from=0) if self._rollout.routed_experts else asked

    def stats(self) -> dict[str, float]:
        """Since the last call: mean milliseconds from a sample's request to its last token, and from there to its
        score; episodes that were played again, what was left out, and the groups that lack it, if any; and what the
        rewards say of themselves (`Scorer.stats`)."""
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

    def __enter__(self) -> RolloutSampler:
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
        if self._teacher is not None:
            await self._teacher.close()
        if self._host is not None:
            await self._host.close()

    async def _whole(self, record: Record, request: Request, number: int, how: _How) -> TrajectoryGroup:
        outcome = await self._round(record, request, number, how)
        assert isinstance(outcome, TrajectoryGroup)  # nothing ended it before its time
        return outcome

    async def _round(
        self, record: Record, request: Request, number: int, how: _How, before: Future[Outcome] | None = None
    ) -> Outcome:
        fresh = Partial.fresh(record.prompt_ids, request.n)
        begun: Outcome = fresh if before is None else await asyncio.wrap_future(before)
        if isinstance(begun, TrajectoryGroup):
            return begun
        samples, whole = list(begun.samples), list(enumerate(request.split()))
        if self._rollout.request == "group" and self._host is None and begun == fresh:
            whole = [(0, request)]
        parts = [(i, part, one) for i, part in whole if (one := samples[i]) is not None and one.score is None]
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._scored(record, part, one, (number, i), how)) for i, part, one in parts
                ]
        except ExceptionGroup as errors:  # one failure cancels the rest; it is what the user needs to see
            raise errors.exceptions[0] from None
        for (i, part, _), task in zip(parts, running, strict=True):
            samples[i : i + part.n] = task.result()
        partial = Partial(tuple(samples))
        return partial if partial.unfinished else await self._complete(record, request.n, partial, how)

    async def _scored(
        self,
        record: Record,
        request: Request,
        begun: PartialSample,
        key: _Key,
        how: _How,
    ) -> list[PartialSample | None]:
        """The trajectories further on; those that are complete have a score, and the teacher's log-probs if it is to be
        asked, or are left out."""
        started = time.perf_counter()
        host = self._host
        if host is None:
            played: list[_Played | None] = [*await self._answers(request, begun, how.budget)]
        else:
            played = [await self._episode(host, record, request, begun, key, how.budget)]
        generated = time.perf_counter()
        samples = await asyncio.gather(*(self._sample(record, each, how) for each in played))
        finished = sum(sample is not None and sample.score is not None for sample in samples)
        self._times.samples += finished
        self._times.generate_s += (generated - started) * len(played)
        self._times.score_s += (time.perf_counter() - generated) * finished
        return list(samples)

    async def _sample(self, record: Record, played: _Played | None, how: _How) -> PartialSample | None:
        if played is None:
            return None
        if played.trajectory.finish_reason == UNFINISHED:
            return PartialSample(played.prompt_ids, played.trajectory)
        asked = asyncio.ensure_future(self._taught(how.teacher, played))
        try:
            score, taught = await self._score(record, played, how.scorer), await asked
        finally:
            asked.cancel()
        if score is None or taught is None:
            return None
        return PartialSample(played.prompt_ids, taught.trajectory, played.said, score)

    async def _taught(self, teacher: Teacher | None, played: _Played) -> _Played | None:
        """With the teacher's log-probs; None when the teacher cannot take it."""
        if teacher is None:
            return played
        found = await teacher.logprobs(played.prompt_ids, played.trajectory)
        if found is None:
            self._counts["trajectories_without_teacher"] += 1
            return None
        return replace(played, trajectory=replace(played.trajectory, teacher_logprobs=found))

    async def _complete(self, record: Record, count: int, partial: Partial, how: _How) -> TrajectoryGroup:
        kept = [sample for sample in partial.samples if sample is not None]
        prompts = {sample.prompt_ids for sample in kept}
        if len(prompts) > 1:
            raise RolloutError(
                f"the environment began {len(prompts)} episodes of record {record.index} in different ways. Make "
                "`reset` depend on the task alone: only then can their rewards be compared."
            )
        scores = [sample.score for sample in kept if sample.score is not None]
        if how.compared:
            asked = [_asked(record, sample.trajectory, sample.said) for sample in kept]
            compared = await self._compared(how.scorer, asked, scores)
            kept, scores = (kept, compared) if compared is not None else ([], [])
        if len(kept) < count:
            self._counts["groups_incomplete" if kept else "groups_lost"] += 1
        prompt = prompts.pop() if prompts else record.prompt_ids
        return TrajectoryGroup(prompt, tuple(sample.trajectory for sample in kept), tuple(scores))

    async def _compared(self, scorer: Scorer, requests: list[RewardRequest], alone: list[Score]) -> list[Score] | None:
        """With what group rewards add; None when one has no value, though it was asked again."""
        for _ in range(self._rollout.attempts):
            scores = await scorer.compared(requests, alone)
            if not any(score.missing for score in scores):
                return list(scores)
        self._counts["trajectories_without_reward"] += len(alone)
        return None

    async def _score(self, record: Record, played: _Played, scorer: Scorer) -> Score | None:
        """None when a reward has no value, though it was asked again, or none applies."""
        request = _asked(record, played.trajectory, played.said)
        for _ in range(self._rollout.attempts):
            score = await scorer(request)
            if not score.missing:
                break
        else:
            self._counts["trajectories_without_reward"] += 1
            return None
        if self._host is not None and not isinstance(self._host.config, ToolsEnvironment):
            return score.plus(ENVIRONMENT, played.given, self._host.config.weight)
        if score.parts or not scorer.alone:
            return score
        self._counts["trajectories_no_reward_applies_to"] += 1
        if not self._said:
            self._said = True
            log.warning("no reward applies to record %d (counted from now on): it is left out", record.index)
        return None

    async def _answers(self, request: Request, begun: PartialSample, budget: int | None) -> list[_Played]:
        """Trajectories of one turn."""
        turn = begun.trajectory.turns[0] if begun.trajectory.turns else None
        return [
            _Played(
                request.prompt_ids,
                Trajectory((answer.turn,), answer.finish_reason),
                ({"role": "assistant", "content": self._tokenizer.decode(answer.turn.token_ids)},),
            )
            for answer in await self._client.generate(request, turn, budget)
        ]

    async def _episode(
        self,
        host: EnvironmentHost,
        record: Record,
        request: Request,
        begun: PartialSample,
        key: _Key,
        budget: int | None,
    ) -> _Played | None:
        """One trajectory further on, or None if every attempt failed."""
        attempt = 1
        while attempt <= host.config.attempts:
            try:
                playing = await self._playing(host, record, begun, key)
                try:
                    played = await self._play(playing, request, budget)
                except BaseException:
                    await playing.episode.close()
                    raise
                if played.trajectory.finish_reason == UNFINISHED:
                    self._waiting[key] = playing
                else:
                    await playing.episode.close()
                return played
            except EnvironmentFailed as error:
                if error.code == "interrupted":  # each time another one has failed, so there is an end to it
                    self._counts["episodes_interrupted"] += 1
                    continue
                self._counts["episodes_failed"] += 1
                log.warning("an episode of record %d failed (attempt %d): %s", record.index, attempt, error)
                attempt += 1
        self._counts["episodes_left_out"] += 1
        return None

    async def _playing(self, host: EnvironmentHost, record: Record, begun: PartialSample, key: _Key) -> _Playing:
        """The episode where `begun` stands: the one that waits there, or another that is brought there, or a new one.
        Raises EnvironmentFailed."""
        if (waiting := self._waiting.pop(key, None)) is not None:
            if waiting.is_at(begun) and waiting.episode.alive:
                return waiting
            await waiting.episode.close()
        playing = await self._begin(host, record)
        if not begun.trajectory.turns:
            return playing
        try:
            if await self._replay(playing, begun):
                return playing
        except BaseException:
            await playing.episode.close()
            raise
        self._counts["episodes_begun_anew"] += 1
        await playing.episode.close()
        return await self._begin(host, record)

    async def _begin(self, host: EnvironmentHost, record: Record) -> _Playing:
        episode, first = await host.begin(self._task(record))
        return _Playing(episode, self._prompt(first, record))

    async def _replay(self, playing: _Playing, begun: PartialSample) -> bool:
        """Play the recorded answers to a new episode; whether it said what is recorded, and is where `begun` stands."""
        turns = list(begun.trajectory.turns)
        unwritten = [turns.pop()] if turns[-1].of_policy else []
        for turn, recorded in zip(turns[::2], turns[1::2], strict=True):
            seen = await self._step(playing, turn)
            if seen.done or playing.turns[-1].reward != turn.reward:
                return False
            self._listen(playing, seen)
            if playing.turns[-1] != recorded:
                return False
        playing.turns += unwritten
        return playing.is_at(begun)

    async def _play(self, playing: _Playing, request: Request, budget: int | None) -> _Played:
        """Turn by turn, until the environment says it is done, or the turns or tokens are used up, or the budget is."""
        most, left, finish_reason = playing.episode.host.config.max_turns, budget, LENGTH
        while True:
            begun = playing.turns.pop() if playing.turns and playing.turns[-1].of_policy else None
            number = sum(turn.of_policy for turn in playing.turns)
            rest = replace(request, prompt_ids=playing.prompt_ids).after(playing.written)
            if rest.routed_from is not None:
                rest = replace(rest, routed_from=sum(routing.tokens(turn.routing) for turn in playing.turns))
            if number == most or rest.max_tokens <= 0:
                break
            if left == 0:
                finish_reason = UNFINISHED
                break
            (answer,) = await self._client.generate(rest, begun, left)
            if answer.finish_reason == UNFINISHED:
                playing.turns.append(answer.turn)
                finish_reason = UNFINISHED
                break
            if left is not None:
                left -= len(answer.turn.token_ids) - len(begun.token_ids if begun is not None else ())
            if answer.finish_reason in (LENGTH, REPEAT):
                self._say(playing, answer.turn)
                finish_reason = answer.finish_reason
                break
            seen = await self._step(playing, answer.turn)
            if seen.done:
                finish_reason = answer.finish_reason
                break
            if number == most - 1:
                break
            self._listen(playing, seen)
        while finish_reason != UNFINISHED and playing.turns and not playing.turns[-1].of_policy:
            playing.turns.pop()  # nothing was written after it
        trajectory = Trajectory(tuple(playing.turns), finish_reason)
        return _Played(playing.prompt_ids, trajectory, tuple(playing.said), playing.given)

    def _say(self, playing: _Playing, turn: Turn) -> str:
        text = self._tokenizer.decode(turn.token_ids)
        playing.turns.append(turn)
        playing.said.append({"role": "assistant", "content": text})
        return text

    async def _step(self, playing: _Playing, turn: Turn) -> Observation:
        seen = await playing.episode.step(self._say(playing, turn))
        playing.turns[-1] = replace(turn, reward=playing.episode.host.config.weight * seen.reward)
        playing.given += seen.reward
        return seen

    def _listen(self, playing: _Playing, seen: Observation) -> None:
        most = playing.episode.host.config.max_observation_tokens
        playing.turns.append(self._observed(seen, playing.turns[-1], most))
        playing.said += seen.messages

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
        """At most about so many tokens of it."""
        text = text[: most * CHARACTERS]
        ids = self._tokenizer.continuation(text)[:-1]
        return text if len(ids) <= most else self._tokenizer.decode(ids[:most]) + CUT

    def _seed_of(self, number: int) -> int | None:
        if not self._rollout.seeded:
            return None
        rng = np.random.default_rng([self._seed, number])
        return int(rng.integers(0, SEEDS - 1024))  # room for the sample's index, which is added to it


def _asked(record: Record, trajectory: Trajectory, said: Sequence[Message]) -> RewardRequest:
    """The question to the rewards about a trajectory."""
    answers = [message["content"] for message in said if message["role"] == "assistant"]
    return RewardRequest(
        record.prompt, answers[-1] if answers else "", record.answer, record.extra,
        tuple(said), trajectory.policy_tokens, trajectory.truncated, record.messages, trajectory.token_ids,
        record.alternatives,
    )  # fmt: skip


def _unwritable(error: ValueError) -> ConfigError:
    problem = f"the model's chat template cannot write what the environment says: {error}"
    return ConfigError("environment", problem, "Use a model whose template knows these roles, or other roles")
