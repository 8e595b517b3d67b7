"""A job goes on after its server was killed, as if nothing had been."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import Any

import openai
import pytest

from tests.trainer.api.finetuning.client import ended, losses, preferences, sdk, sums, upload
from tests.trainer.api.server import ApiServer
from tests.waiting import wait_until

pytestmark = pytest.mark.broad
METHODS: dict[str, Any] = {
    "supervised": (sums(), {"n_epochs": 6, "batch_size": 3, "learning_rate_multiplier": 10.0}),
    "dpo": (preferences(), {"n_epochs": 6, "batch_size": 2, "learning_rate_multiplier": 100.0}),
}


def events(client: openai.OpenAI, job: str) -> list[Any]:
    """Oldest first."""
    return list(client.fine_tuning.jobs.list_events(job, limit=100))[::-1]


@pytest.mark.parametrize("kind", METHODS)
def test_a_job_goes_on_at_the_step_where_it_was(api: ApiServer, kind: str) -> None:
    """Killed in one of the first steps, behind an epoch, and once more: its numbers are those of a job that was not
    killed, and whatever the SDK was told stays so."""
    client = sdk(api)
    lines, chosen = METHODS[kind]
    file = upload(client, lines)
    method: Any = {"type": kind, kind: {"hyperparameters": chosen}}
    asked: dict[str, Any] = {"model": "tiny", "training_file": file, "validation_file": file, "seed": 5}
    calm = ended(client, client.fine_tuning.jobs.create(**asked, method=method).id)
    expected = losses(client, calm.id)
    job = client.fine_tuning.jobs.create(**asked, method=method)
    behind = client.fine_tuning.jobs.create(model="tiny", training_file=file, method={"type": kind})
    for step in (2, 6, 13):
        wait_until(lambda least=step: len(losses(client, job.id)) >= least, what=f"step {step} is done")  # type: ignore[misc]
        told = events(client, job.id)
        api.restart()
        assert events(client, job.id)[: len(told)] == told
    done = ended(client, job.id)
    assert done.status == "succeeded", done.error
    assert losses(client, job.id) == expected
    steps = [event.data["step"] for event in events(client, job.id) if event.data and "valid_loss" not in event.data]
    assert steps == sorted(expected)  # each is told once
    content = [client.files.content(one.result_files[0]).text for one in (calm, done)]
    assert content[0] == content[1]
    assert client.files.content(file).content
    metrics = [[c.metrics for c in client.fine_tuning.jobs.checkpoints.list(one.id)] for one in (calm, done)]
    assert metrics[0] == metrics[1]
    assert len(metrics[0]) == 6
    assert ended(client, behind.id).status == "succeeded"  # it had waited through all of that


def test_a_job_whose_server_was_away_for_days(api: ApiServer) -> None:
    """It was killed between a step and the job's word of it, and the answers are no longer kept: the step counts, and
    all after it are what they would have been."""
    client = sdk(api)
    lines, chosen = METHODS["supervised"]
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": chosen}}
    asked: dict[str, Any] = {"model": "tiny", "training_file": upload(client, lines), "seed": 5, "method": method}
    expected = losses(client, ended(client, client.fine_tuning.jobs.create(**asked).id).id)
    job = client.fine_tuning.jobs.create(**asked)
    wait_until(lambda: len(losses(client, job.id)) >= 2, what="two steps are done")
    client.fine_tuning.jobs.pause(job.id)
    statement = "SELECT count(*) FROM requests WHERE model = ? AND done IS NULL"
    wait_until(lambda: api.journal(statement, f"{job.id}:train:0") == [(0,)], what="no request is under way")
    api.kill()
    ((last,),) = api.journal("SELECT MAX(seq) FROM requests WHERE model = ?", f"{job.id}:train:0")
    ((said,),) = api.journal("SELECT about FROM records WHERE kind = 'job' AND id = ?", job.id)
    about = json.loads(said)
    lost = about["at"]["step"]
    untold = {lost + 1} if last == about["at"]["seqs"][0] + 1 else set()  # it had been killed at that very place
    if last == about["at"]["seqs"][0] - 1:
        lost -= 1
        about["at"] |= {"step": lost, "seqs": [last - 1, 1], "epochs": min(about["at"]["epochs"], lost // 4)}
    with contextlib.closing(sqlite3.connect(api.root / "api/journal.db")) as db, db:
        db.execute("DELETE FROM requests WHERE model = ? AND seq < ?", (f"{job.id}:train:0", last))
        db.execute("UPDATE records SET about = ? WHERE kind = 'job' AND id = ?", (json.dumps(about), job.id))
    api.start()
    client.fine_tuning.jobs.resume(job.id)
    done = ended(client, job.id)
    assert done.status == "succeeded", done.error
    assert losses(client, job.id) == {step: loss for step, loss in expected.items() if step not in untold}
