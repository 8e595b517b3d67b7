"""Carries versions out of slots into a bucket, in a process of its own, so that the publisher goes on meanwhile.

    carrier = Carrier("s3://models/run", model="demo")
    carrier.hand(slot, manifest_digest)      # back at once: the slot is held until it is there and the next one too
    for outcome in carrier.outcomes(): ...

One version is on its way at a time. One more waits, and a newer one takes its place: followers take the newest anyway.
The process ends with this one. No record then names the objects of a version under way, and no follower reads them.

Orders and answers are JSON, a line each:

    {"url", "model", "keep", "full_every", "metrics"}  -> {"ready": true}, or {"error", "code"} and the end
    {"order", "slot", "digest", "part", "source"}      -> {"order"}, or {"order", "error", "code"}
                                                       -> later {"outcome": ...} of each taken, in order
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

import orjson

from weightsync.bucket.metrics import serve
from weightsync.bucket.objects import redacted
from weightsync.bucket.publisher import BucketPublisher
from weightsync.control.parts import BASE
from weightsync.errors import BucketError, WeightSyncError
from weightsync.memory.receiver import SlotReader

START_S = 120.0
TAKEN_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a version that was handed over. `number` is the bucket's, `sent` in bytes; `error` says what to do
    and `code` is its code, "" where the version is there. `skipped`: a newer one took its place."""

    number: int = 0
    sent: int = 0
    full: bool = False
    seconds: float = 0.0
    error: str = ""
    code: str = ""
    skipped: bool = False

    @property
    def final(self) -> bool:
        """Whether no later version can get there either."""
        return self.code == "bucket_taken"


class Carrier:
    """The process, and what it says. It is started anew if it has ended, by the next version."""

    def __init__(self, url: str, *, model: str, keep: int = 3, full_every: int = 10, metrics: str = "") -> None:
        """`metrics`: ADDRESS:PORT that answers /metrics. Raises BucketError where `url` cannot be written."""
        self._options = {"url": url, "model": model, "keep": keep, "full_every": full_every, "metrics": metrics}
        self._pending = 0  # handed over, without an outcome
        self._given = 0  # orders
        self._start()

    def hand(self, slot: Path | str, manifest_digest: str, *, part: str = BASE, source: str = "") -> None:
        """Returns when the slot is held. Raises BucketError, ManifestError's and SlotBusy's text as BucketError."""
        if self._process.poll() is not None:
            self.close()  # the end of its reader is told to the queues of that process
            self._start()
        self._given += 1
        self._pending += 1
        self._send({"order": self._given, "slot": str(slot), "digest": manifest_digest, "part": part, "source": source})
        self._answer(TAKEN_S)

    def outcomes(self) -> list[Outcome]:
        """Those since this was asked last, in order."""
        found: list[Outcome] = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._outcomes.get_nowait())
        self._pending -= len(found)
        return found

    def finish(self, timeout_s: float) -> list[Outcome]:
        """The outcomes of all that was handed over; what is not there in time has an error."""
        found, deadline = self.outcomes(), time.monotonic() + timeout_s
        while self._pending > 0:
            try:
                found.append(self._outcomes.get(timeout=max(0.0, deadline - time.monotonic())))
                self._pending -= 1
            except Empty:
                error = f"the last version was not in the bucket after {timeout_s:g} s: allow more, or look at the link"
                found.append(Outcome(error=error, code="bucket_unavailable"))
                break
        return found

    def close(self) -> None:
        """Ends the process, whatever is on its way; twice is fine."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()  # type: ignore[union-attr]

    def _start(self) -> None:
        command = [sys.executable, "-m", "weightsync.bucket.carrier"]
        self._taken: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._pending = 0
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), name="carrier", daemon=True)
        self._reader.start()
        try:
            self._send(self._options)
            self._answer(START_S)
        except BaseException:
            self.close()
            raise

    def _send(self, order: dict[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # the missing answer tells it
            stdin.write(orjson.dumps(order) + b"\n")
            stdin.flush()

    def _answer(self, within_s: float) -> None:
        """Wait for the answer to the last order; an earlier one may have been answered after its time."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                answer = self._taken.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                told = f"the carrier to the bucket did not answer in {within_s:g} s: is the host overloaded?"
                raise BucketError(told, code="bucket_unavailable") from None
            self._pending -= "error" in answer
            if answer.get("order") in (self._given, None):  # None: of the process
                break
        if "error" in answer:
            code = "bucket_unavailable" if answer["code"] == "bucket_unavailable" else None
            raise BucketError(answer["error"], code=code)

    def _read(self, answers: BinaryIO) -> None:
        """On a thread: answers to where they are waited for; at their end what is left has none."""
        for line in answers:
            answer = orjson.loads(line)
            if "outcome" in answer:
                self._outcomes.put(Outcome(**answer["outcome"]))
            else:
                self._taken.put(answer)
        ended = "the process that carries versions to the bucket has ended; the next version starts it anew"
        self._taken.put({"error": ended, "code": BucketError.code})
        self._outcomes.put(Outcome(error=ended, code=BucketError.code))


@dataclass(frozen=True)
class Order:
    """A version that is held, since when it was ready."""

    slot: SlotReader
    part: str
    source: str
    since: float


class Desk:
    """The process's side: one order on its way, and the newest that waits."""

    def __init__(self, publisher: BucketPublisher, answers: BinaryIO) -> None:
        self._publisher, self._answers = publisher, answers
        self._changed = threading.Condition()
        self._waiting: dict[str, Order] = {}  # by part

    def take(self, order: Order) -> None:
        """The newest of its part waits now."""
        with self._changed:
            before = self._waiting.pop(order.part, None)
            self._waiting[order.part] = order
            self._publisher.metrics.began(order.since)
            if before is not None:
                before.slot.close()
                self._say(Outcome(skipped=True))
            self._changed.notify()

    def work(self) -> None:
        """For ever."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                order = self._waiting.pop(next(iter(self._waiting)))
                self._publisher.metrics.began(order.since)
            outcome = self._carried(order)
            with self._changed:
                self._say(outcome)

    def _carried(self, order: Order) -> Outcome:
        try:
            self._publisher.publish_slot(order.slot, part=order.part, source=order.source)
        except WeightSyncError as error:
            return Outcome(error=str(error), code=error.code)
        except Exception as error:
            told = f"the version could not be carried to the bucket ({redacted(repr(error))})"
            return Outcome(error=told, code=BucketError.code)
        last = self._publisher.last
        return Outcome(last["number"], last["sent"], last["full"], last["seconds"])

    def _say(self, outcome: Outcome) -> None:
        answer(self._answers, {"outcome": asdict(outcome)})


def answer(answers: BinaryIO, what: dict[str, Any]) -> None:
    """One line, at once."""
    answers.write(orjson.dumps(what) + b"\n")
    answers.flush()


def orders(lines: BinaryIO) -> Iterator[dict[str, Any]]:
    """Until whoever gives them closes the pipe, or ends."""
    while line := lines.readline():
        yield orjson.loads(line)


def main() -> None:
    """The process."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    asked = orders(sys.stdin.buffer)
    options = next(asked, None)
    if options is None:
        return
    listen = options.pop("metrics")
    try:
        publisher = BucketPublisher(options.pop("url"), **options)
        publisher.bucket.try_out()
        if listen:
            serve(publisher.metrics.registry, listen)
    except WeightSyncError as error:
        answer(answers, {"error": str(error), "code": error.code})
        return
    except (OSError, ValueError) as error:
        problem = f"metrics cannot be served at {listen} ({error}): name a free ADDRESS:PORT of this host"
        answer(answers, {"error": problem, "code": BucketError.code})
        return
    desk = Desk(publisher, answers)
    threading.Thread(target=desk.work, name="desk", daemon=True).start()
    answer(answers, {"ready": True})
    for order in asked:
        try:
            slot = SlotReader.open(order["slot"], manifest_digest=order["digest"], populate=False)
        except WeightSyncError as error:
            answer(answers, {"order": order["order"], "error": str(error), "code": error.code})
            continue
        answer(answers, {"order": order["order"]})
        desk.take(Order(slot, order["part"], order["source"], time.monotonic()))
    os._exit(0)  # nobody waits for what is on its way


if __name__ == "__main__":
    main()
