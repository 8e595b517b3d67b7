"""One job's requests to the training API, one after the other.

A job is a client of the training API like any other: it has a session, a training client in it, and for preferences a
second one that is never trained, the reference. Its requests follow from its record alone, and each has a number. So
after a crash the job sends those again that its record does not count, and the journal answers what was done already.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from trainer.algorithms.base import REFERENCE_LOGPROBS
from trainer.algorithms.offline import Dpo, Sft
from trainer.api import wire
from trainer.api.errors import ApiError
from trainer.api.finetuning.examples import Lines, Reader
from trainer.api.finetuning.steps import Plan, derivatives
from trainer.api.journal import Answer, Record
from trainer.api.sampling import Client
from trainer.api.service import MODEL, SAVE, SAVE_FOR_SAMPLER, STEP, Service
from trainer.api.tenants import CORRECT, LOSS
from trainer.batch import MASK, Fields, collate
from trainer.batch import Sequence as Tokens
from trainer.config import DpoConfig, SftConfig
from trainer.errors import TrainerError

POLICY, REFERENCE = 0, 1  # the numbers of the training clients in the job's session
CLIP_NORM: Final = 1.0
ATTEMPTS, DELAY_S = 20, 3.0  # for an adapter to be published, while the serving side is away
BUSY_S: Final = 1.0


@dataclass(frozen=True)
class At:
    """How far a job is: optimizer steps, epochs whose end is done, learned tokens, and the next number of a request to
    each of its training clients."""

    step: int = 0
    epochs: int = 0
    tokens: int = 0
    seqs: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Checkpoint:
    """The result of an epoch: the path of the adapter and, after the last epoch, of the state to train on from."""

    step: int
    adapter: str
    state: str | None
    metrics: Mapping[str, float]


Report = Callable[[At, Mapping[str, Any], Checkpoint | None], Awaitable[bool]]


class Run:
    """`report` is told how far the job is, what was measured on the way there, and what an epoch has left; it says
    whether the job is to go on."""

    def __init__(self, service: Service, job: Record, plan: Plan, reader: Reader, files: tuple[Lines, Lines | None]):
        self._service, self._job, self._plan, self._reader = service, job, plan, reader
        self._training, self._validation = files
        self._client = Client(job.owner, "", 0, 0.0)
        given = job.about["at"]
        self._at = At(given["step"], given["epochs"], given["tokens"], (given["seqs"][0], given["seqs"][1]))
        self._seqs = list(self._at.seqs)
        self._last: Mapping[str, float] = job.about["last"]  # measured at the last step
        beta = job.about["hyperparameters"].get("beta")
        self._algorithm: Sft | Dpo = Sft(SftConfig()) if beta is None else Dpo(DpoConfig(beta=beta))

    async def go(self, report: Report) -> None:
        """Returns when all steps are done, or `report` ended it. Raises TrainerError when a request is refused."""
        for number in (POLICY, REFERENCE) if self._algorithm.needs else (POLICY,):
            await self._create(number)
        while self._at.step < self._plan.steps or self._at.epochs < self._plan.epochs:
            if self._at.step == (self._at.epochs + 1) * self._plan.steps_per_epoch:
                checkpoint = await self._epoch_end()
                goes_on = await self._reached(report, checkpoint.metrics, checkpoint, epochs=self._at.epochs + 1)
            else:
                self._last, tokens = await self._step()
                more = {"step": self._at.step + 1, "tokens": self._at.tokens + tokens}
                goes_on = await self._reached(report, self._last, None, **more)
            if not goes_on:
                return

    async def _reached(self, report: Report, measured: Mapping[str, Any], left: Checkpoint | None, **at: int) -> bool:
        now = {"step": self._at.step, "epochs": self._at.epochs, "tokens": self._at.tokens} | at
        self._at = At(**now, seqs=(self._seqs[POLICY], self._seqs[REFERENCE]))
        return await report(self._at, measured, left)

    async def _create(self, number: int) -> None:
        about, session = self._job.about, self._job.id
        if self._service.journal.get(MODEL, self._model(number)) is not None:
            return
        if about["from"] is not None:
            load = wire.LoadWeights(path=about["from"], session_id=session, model_seq_id=number)
            await self._answer(lambda: self._service.load(self._client, load))
            return
        rank = about["rank"] if number == POLICY else 1  # a fresh adapter of any rank changes nothing
        create = wire.CreateModel(
            session_id=session,
            model_seq_id=number,
            base_model=self._service.config.name,
            user_metadata={"fine_tuning_job": self._job.id},
            lora_config=wire.Lora(rank=rank, seed=about["seed"]),
        )

        async def created() -> tuple[str, int]:
            return await self._service.create(self._client, create), 0

        await self._answer(created)

    async def _step(self) -> tuple[dict[str, float], int]:
        """The measured metrics, and the number of learned tokens."""
        rows, learning_rate = self._plan.of_step(self._at.step)
        sequences = await asyncio.to_thread(self._sequences, self._training, rows)
        before = list(self._seqs)
        fields = collate(sequences)
        tokens = int(fields[MASK].sum())
        adam = wire.Adam(learning_rate=learning_rate, grad_clip_norm=CLIP_NORM)
        try:
            measured, weights_BT = await self._gradient(sequences, fields)
            _, said = await self._batch(POLICY, sequences, weights_BT, forward=False)
            step = wire.OptimStep(model_id=self._model(POLICY), seq_id=self._next(POLICY), adam_params=adam)
            await self._answer(lambda: self._service.numbered(self._client, STEP, step))
        except ApiError as error:
            if error.status != 410:  # the server was away for a day between the step and this job's word of it
                raise
            passes = 3 if self._algorithm.needs else 2
            self._seqs = [before[POLICY] + passes, before[REFERENCE] + passes - 2]
            return {}, tokens
        if not self._algorithm.needs:
            accuracy = said[CORRECT] / tokens
            measured = {"train_accuracy": accuracy, "train_mean_token_accuracy": accuracy}
        return {"train_loss": said[LOSS]} | measured, tokens

    async def _gradient(self, sequences: Sequence[Tokens], fields: Fields) -> tuple[dict[str, float], Tensor]:
        """The metrics of the loss, and the weights [B, T] that make cross_entropy's gradient the loss's."""
        logprobs_BT = torch.zeros_like(fields[MASK])
        if not self._algorithm.needs:  # its derivatives are the same everywhere
            return {}, derivatives(self._algorithm, logprobs_BT, fields)[1]
        reference_BT, _ = await self._forward(REFERENCE, sequences, fields)
        logprobs_BT, _ = await self._forward(POLICY, sequences, fields)
        fields = fields | {REFERENCE_LOGPROBS: reference_BT}
        measured, weights_BT = derivatives(self._algorithm, logprobs_BT, fields)
        return {"train_loss": measured["loss"], "train_accuracy": measured["preference_accuracy"]}, weights_BT

    async def _epoch_end(self) -> Checkpoint:
        step = self._at.step
        metrics = dict(self._last)
        if self._validation is not None:
            for name, value in (await self._validated(self._validation)).items():
                metrics |= {f"valid_{name}": value, f"full_valid_{name}": value}
        state = None
        if step == self._plan.steps:
            save = wire.SaveWeights(model_id=self._model(POLICY), seq_id=self._next(POLICY), path="last")
            answer = await self._answer(lambda: self._service.numbered(self._client, SAVE, save))
            state = json.loads(answer.content)["path"]
        return Checkpoint(step, await self._published(step), state, metrics)

    async def _published(self, step: int) -> str:
        """The path of the adapter as it is, which has been a part of a version. Raises TrainerError."""
        attempt = 0
        while True:
            body = wire.SaveForSampler(model_id=self._model(POLICY), seq_id=self._next(POLICY), path=f"step-{step}")

            async def send(body: wire.SaveForSampler = body) -> tuple[str, int]:
                return await self._service.numbered(self._client, SAVE_FOR_SAMPLER, body)

            attempt += 1
            answer = await self._answer(send, may_fail=attempt < ATTEMPTS)
            if not answer.failed:
                return str(json.loads(answer.content)["path"])
            await asyncio.sleep(DELAY_S)

    async def _validated(self, lines: Lines) -> dict[str, float]:
        """Means over all examples' tokens, or over their pairs."""
        total = right = count = 0.0
        for first in range(0, len(lines), self._plan.batch):
            rows = range(first, min(first + self._plan.batch, len(lines)))
            sequences = await asyncio.to_thread(self._sequences, lines, rows)
            fields = collate(sequences)
            if self._algorithm.needs:
                fields[REFERENCE_LOGPROBS], _ = await self._forward(REFERENCE, sequences, fields)
            logprobs_BT, correct = await self._forward(POLICY, sequences, fields)
            with torch.no_grad():
                found = self._algorithm.loss(logprobs_BT, fields)
            total, count, right = total + float(found.total), count + float(found.denominator), right + correct
        return {"loss": total / count} | ({} if self._algorithm.needs else {"mean_token_accuracy": right / count})

    async def _forward(self, number: int, sequences: Sequence[Tokens], fields: Fields) -> tuple[Tensor, float]:
        """Log-probs [B, T] of the tokens at t + 1, and how many of the learned ones are the likeliest."""
        rows, said = await self._batch(number, sequences, fields[MASK], forward=True)
        found = torch.zeros_like(fields[MASK])
        for row, values in zip(found, rows, strict=True):
            row[: len(values)] = torch.from_numpy(values.copy())
        return found, said[CORRECT]

    async def _batch(
        self, number: int, sequences: Sequence[Tokens], weights_BT: Tensor, *, forward: bool
    ) -> tuple[list[Any], dict[str, float]]:
        """A pass with gradient, or a forward pass: log-probs, and the metrics."""
        data = []
        for row, sequence in enumerate(sequences):
            ids = np.array(sequence.prompt + sequence.continuation, np.int64)
            weights = weights_BT[row, : len(ids) - 1].numpy()
            data.append(wire.Datum(ids[:-1], {"target_tokens": ids[1:], "weights": weights}))
        seq = self._next(number)
        batch = wire.Batch(self._model(number), seq, "cross_entropy", tuple(data), forward_only=forward)
        body = wire.batch_body(batch)
        answer = await self._answer(lambda: self._service.batch(self._client, body))
        return wire.read_output(answer.content)

    async def _answer(self, send: Callable[[], Awaitable[tuple[str, int]]], *, may_fail: bool = False) -> Answer:
        """Raises TrainerError for one that failed, unless it may; ApiError (410)."""
        while True:
            try:
                model, seq = await send()
                break
            except ApiError as error:
                if error.status != 429:
                    raise
                await asyncio.sleep(BUSY_S)  # the key's other clients have sent as many as it may, and are answered
        while (answer := await self._service.result(self._client, model, seq)) is None:
            pass
        if answer.failed and not may_fail:
            raise TrainerError(json.loads(answer.content)["error"])
        return answer

    def _next(self, number: int) -> int:
        self._seqs[number] += 1
        return self._seqs[number] - 1

    def _model(self, number: int) -> str:
        return f"{self._job.id}:train:{number}"

    def _sequences(self, lines: Lines, rows: Sequence[int]) -> list[Tokens]:
        return [sequence for row in rows for sequence in self._reader.sequences(lines.read(row))]
