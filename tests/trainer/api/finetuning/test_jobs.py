"""The stock openai SDK uploads files, has jobs train, and asks what they have trained; jobs go on after their server
was killed, as if nothing had been."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sqlite3
from collections.abc import Callable
from statistics import fmean
from typing import Any

import httpx
import openai
import peft
import pytest
import torch
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers import AutoModelForCausalLM

from tests.trainer.api.finetuning.client import ended, losses, preferences, sdk, sums, upload
from tests.trainer.api.server import ApiServer
from tests.trainer.fleet import Fleet
from tests.waiting import wait_until
from trainer.api.finetuning.steps import Plan
from trainer.data.tokenizer import Tokenizer

SERVING = {"limits": {"rank": 16, "models": 30, "resident": 2, "served": 2, "jobs": 3, "files": 40, "file_mb": 1}}
LONG = {"n_epochs": 50, "batch_size": 1}  # longer than any test waits for it
NOBODY = "another"


@pytest.fixture(scope="module")
def client(api: ApiServer) -> openai.OpenAI:
    return sdk(api)


@pytest.fixture(scope="module")
def examples(client: openai.OpenAI) -> str:
    return upload(client, sums())


def create(client: openai.OpenAI, file: str, kind: Any = "supervised", model: str = "tiny", **asked: Any) -> Any:
    """A job; what is no hyperparameter goes beside the method."""
    names = ("n_epochs", "batch_size", "learning_rate_multiplier", "beta")
    chosen = {name: asked.pop(name) for name in names if name in asked}
    method: Any = {"type": kind, kind: {"hyperparameters": chosen}}
    return client.fine_tuning.jobs.create(model=model, training_file=file, method=method, **asked)


@pytest.fixture(scope="module")
def trained(client: openai.OpenAI, examples: str) -> Any:
    """A job that has succeeded."""
    asked: dict[str, Any] = {"n_epochs": 2, "batch_size": 5, "learning_rate_multiplier": 10.0, "suffix": "sums"}
    held_out = upload(client, sums(4))
    made = create(client, examples, validation_file=held_out, seed=3, metadata={"of": "test"}, **asked)
    assert (made.status, made.fine_tuned_model, made.finished_at) == ("validating_files", None, None)
    return ended(client, made.id)


def test_files(client: openai.OpenAI) -> None:
    content = "".join(json.dumps(line) + "\n" for line in sums()).encode()
    made = client.files.create(file=("sums.jsonl", io.BytesIO(content)), purpose="fine-tune")
    assert (made.filename, made.bytes) == ("sums.jsonl", len(content))
    assert (made.purpose, made.status) == ("fine-tune", "processed")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == content
    assert client.files.wait_for_processing(made.id) == made
    other = upload(client, sums(2))
    listed = [file.id for file in client.files.list(limit=1)]  # the SDK asks for page after page
    assert listed[:2] == [other, made.id]
    assert [file.id for file in client.files.list(order="asc")] == listed[::-1]
    assert not {other, made.id} & {file.id for file in client.files.list(purpose="fine-tune-results", limit=1)}
    assert client.files.delete(other).deleted
    with pytest.raises(openai.NotFoundError, match="upload one first"):
        client.files.retrieve(other)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (b'{"messages": 1}\n{', r"2 lines of the file .*Line 1: 'messages' is no list.* Line 2: it is not JSON"),
        (b" " * (2 << 20), "more than 1 MB: send fewer examples"),
    ],
    ids=["bad", "large"],
)
def test_a_file_that_cannot_be_used(client: openai.OpenAI, lines: bytes, says: str) -> None:
    before = client.files.list().data
    with pytest.raises(openai.BadRequestError, match=says) as raised:
        upload(client, lines)
    assert raised.value.param == "file"
    assert client.files.list().data == before


def test_requests_that_no_sdk_sends(api: ApiServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="use 'fine-tune'"):
        client.files.create(file=b"{}", purpose="vision")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(file=b"{}", purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600})
    headers = {"authorization": "Bearer somebody"}
    form = headers | {"content-type": "multipart/form-data"}
    cases: list[tuple[int, str, dict[str, Any]]] = [
        (400, "files", {"json": {}}),
        (400, "files", {"data": {"purpose": "fine-tune"}, "files": {"another": b""}}),
        (400, "files", {"content": b"x", "headers": form}),
        (400, "files", {"content": b"x", "headers": headers | {"content-type": "multipart/form-data; boundary=y"}}),
        (400, "completions", {"content": b"{"}),
        (400, "completions", {"content": b"[]"}),
        (400, "completions", {"content": b"{}"}),
        (404, "nothing", {}),
    ]
    for status, route, request in cases:
        answer = httpx.post(f"{api.url}/v1/{route}", **({"headers": headers} | request))
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error"), route
    assert answer.json()["error"]["code"] == "not_found"
    assert httpx.put(f"{api.url}/v1/files", headers=headers).status_code == 405


def test_a_job_trains_and_says_what_it_did(client: openai.OpenAI, trained: Any, examples: str) -> None:
    assert (trained.status, trained.error) == ("succeeded", None)
    assert trained.fine_tuned_model == f"ft:tiny:sums:{trained.id[6:16]}"
    assert (trained.model, trained.training_file, trained.seed) == ("tiny", examples, 3)
    assert trained.trained_tokens == 2 * 12 * 2
    assert trained.finished_at >= trained.created_at
    assert (trained.hyperparameters.n_epochs, trained.hyperparameters.batch_size) == (2, 5)
    events = list(client.fine_tuning.jobs.list_events(trained.id, limit=4))[::-1]
    said = [event.message for event in events]
    assert said[0] == f"Created fine-tuning job: {trained.id}"
    assert said[-1] == "The job has successfully completed"
    found = losses(client, trained.id)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert found[6] < 0.9 * found[1]
    rows = list(csv.DictReader(io.StringIO(client.files.content(trained.result_files[0]).text)))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [float(row["train_loss"]) for row in rows] == list(found.values())
    assert [bool(row["valid_loss"]) for row in rows] == [False, False, True] * 2
    assert [bool(row["valid_mean_token_accuracy"]) for row in rows] == [False, False, True] * 2
    assert client.files.retrieve(trained.result_files[0]).purpose == "fine-tune-results"


def measured(network: Any, conversations: list[dict[str, Any]]) -> dict[str, float]:
    """Of the answers' tokens and the ends behind them: the share that the network finds likeliest, and the mean loss;
    and the first of all tokens, the questions' too."""
    right, losses, of_all, tokenizer = [], [], [], Tokenizer(network.config.name_or_path)
    for conversation in conversations:
        asked, answered = (message["content"] for message in conversation["messages"])
        prompt, learned = tokenizer.prompt(asked), tokenizer.continuation(answered)
        targets = torch.tensor([*prompt, *learned][1:])
        with torch.no_grad():
            logits = network(torch.tensor([[*prompt, *learned]])).logits[0, :-1]
        hits = (logits.argmax(-1) == targets).tolist()
        of_all += hits
        right += hits[len(prompt) - 1 :]
        losses += (-logits.log_softmax(-1).gather(-1, targets[:, None])[len(prompt) - 1 :, 0]).tolist()
    return {"right": fmean(right), "loss": fmean(losses), "of_all": fmean(of_all)}


def test_accuracies_are_those_of_transformers(client: openai.OpenAI, api: ApiServer, tiny_model: str) -> None:
    """Of the model that a job began with, and of the adapter that it has left: of learned tokens and of no others."""

    def said(asked: str, answered: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}

    training, validation = [said(f"{a}=", "1+1+1+1") for a in range(10)], [said("1+1+1", str(a)) for a in range(7)]
    asked: dict[str, Any] = {"n_epochs": 1, "batch_size": 5, "learning_rate_multiplier": 100.0, "seed": 3}
    job = create(client, upload(client, training), validation_file=upload(client, validation), **asked)
    done = ended(client, job.id)
    first, last = csv.DictReader(io.StringIO(client.files.content(done.result_files[0]).text))
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rows, _ = Plan(len(training), 1, 5, 1.0, 3).of_step(0)
    begun = measured(network, [training[row] for row in rows])
    assert float(first["train_accuracy"]) == pytest.approx(begun["right"])
    assert float(first["train_loss"]) == pytest.approx(begun["loss"], rel=1e-4)
    (adapter,) = (api.root / "api" / "models" / f"{job.id}:train:0" / "sampler_weights").iterdir()
    tuned = peft.PeftModel.from_pretrained(network, str(adapter))
    assert tuned.peft_config["default"].r == SERVING["limits"]["rank"]
    left = measured(tuned, validation)
    assert 0 < left["right"] < left["of_all"]
    assert float(last["valid_mean_token_accuracy"]) == pytest.approx(left["right"])
    assert float(last["valid_loss"]) == pytest.approx(left["loss"], rel=1e-3)
    (checkpoint,) = client.fine_tuning.jobs.checkpoints.list(job.id)
    metrics = checkpoint.metrics
    assert metrics.train_mean_token_accuracy == pytest.approx(float(last["train_accuracy"]))
    assert metrics.valid_mean_token_accuracy == metrics.full_valid_mean_token_accuracy == pytest.approx(left["right"])


def test_each_epoch_leaves_a_model(client: openai.OpenAI, trained: Any) -> None:
    pages = client.fine_tuning.jobs.checkpoints.list(trained.id, limit=1)
    assert pages.has_more
    last, first = list(pages)
    assert (first.step_number, last.step_number) == (3, 6)
    assert first.fine_tuned_model_checkpoint == f"{trained.fine_tuned_model}:ckpt-step-3"
    assert last.fine_tuned_model_checkpoint == trained.fine_tuned_model
    assert first.metrics.full_valid_loss is not None
    assert last.metrics.full_valid_loss is not None
    assert last.metrics.full_valid_loss < first.metrics.full_valid_loss
    listed = {model.id for model in client.models.list()}
    assert {"tiny", trained.fine_tuned_model, first.fine_tuned_model_checkpoint} <= listed
    assert client.models.retrieve(trained.fine_tuned_model).object == "model"


def test_jobs_are_listed_by_pages(client: openai.OpenAI, trained: Any, examples: str) -> None:
    newer = create(client, examples, n_epochs=1)
    page = client.fine_tuning.jobs.list(limit=1)
    assert ([job.id for job in page.data], page.has_more) == ([newer.id], True)
    assert trained.id in [job.id for job in client.fine_tuning.jobs.list(limit=1)]
    assert [job.id for job in client.fine_tuning.jobs.list(metadata={"of": "test"})] == [trained.id]
    without = client.fine_tuning.jobs.list(extra_query={"metadata": "null"})
    assert newer.id in [job.id for job in without]
    assert trained.id not in [job.id for job in without]
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.list(after="ftjob-none")
    with pytest.raises(openai.NotFoundError, match="the last id of the page before"):
        client.fine_tuning.jobs.list_events(trained.id, after="ftevent-none")
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.fine_tuning.jobs.list(limit=0)
    assert ended(client, newer.id).hyperparameters.batch_size == 1  # of so few examples


def test_the_seed_decides_everything(client: openai.OpenAI, examples: str) -> None:
    asked: dict[str, Any] = {"n_epochs": 2, "batch_size": 5}
    one, two = (create(client, examples, seed=7, **asked) for _ in range(2))
    old = client.fine_tuning.jobs.create(  # as before there were methods
        model="tiny", training_file=examples, seed=8, hyperparameters={"n_epochs": 2, "batch_size": 5}
    )
    first, same, other = (losses(client, ended(client, job.id).id) for job in (one, two, old))
    assert first == same
    assert first != other
    events = list(client.fine_tuning.jobs.list_events(one.id))
    assert [event.type for event in events].count("metrics") == 6, "one of each step, and none twice"


def test_preferences_raise_what_is_preferred(client: openai.OpenAI) -> None:
    """Behind the loss of a policy that is the reference, log 2, it falls."""
    file = upload(client, preferences())
    asked: dict[str, Any] = {"n_epochs": 4, "batch_size": 8, "learning_rate_multiplier": 100, "beta": 0.5}
    job = create(client, file, "dpo", validation_file=file, **asked)
    done = ended(client, job.id)
    assert done.status == "succeeded", done.error
    assert done.method.dpo.hyperparameters.beta == 0.5
    found = losses(client, job.id)
    assert found[1] == pytest.approx(0.6931, abs=1e-3)
    assert found[4] < 0.6
    (last, *_) = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert last.metrics.full_valid_loss is not None
    assert last.metrics.full_valid_loss < found[4]


def test_a_trained_model_is_trained_further(client: openai.OpenAI, trained: Any, examples: str) -> None:
    """It begins where the other has ended."""
    file = upload(client, sums(4))
    job = create(client, file, model=trained.fine_tuned_model, n_epochs=1, batch_size=4)
    (first, *_) = losses(client, ended(client, job.id).id).values()
    (checkpoint, *_) = client.fine_tuning.jobs.checkpoints.list(trained.id)
    assert first == pytest.approx(checkpoint.metrics.full_valid_loss, rel=1e-5)
    with pytest.raises(openai.BadRequestError, match="train the job's last model further"):
        create(client, file, model=f"{trained.fine_tuned_model}:ckpt-step-3")


def test_a_bad_example_fails_the_job_by_its_line(client: openai.OpenAI, examples: str) -> None:
    file = upload(client, [sums()[0], {"prompt": "1" * 300, "completion": "2"}])
    for param, asked in (("training_file", {}), ("validation_file", {"validation_file": file})):
        failed = ended(client, create(client, examples if asked else file, **asked).id)
        assert (failed.status, failed.error.param, failed.error.code) == ("failed", param, f"invalid_{param}")
        assert "Line 2: it has 302 tokens" in failed.error.message
        assert client.fine_tuning.jobs.list_events(failed.id).data[0].level == "error"


AUTO: Any = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}


@pytest.mark.parametrize(
    ("asked", "kind", "chosen"),
    [
        ({"hyperparameters": AUTO}, "supervised", AUTO),
        ({"hyperparameters": AUTO | {"n_epochs": 2}}, "supervised", AUTO | {"n_epochs": 2}),
        ({"method": {"type": "supervised", "supervised": {"hyperparameters": AUTO}}}, "supervised", AUTO),
        ({"method": {"type": "dpo", "dpo": {"hyperparameters": AUTO | {"beta": "auto"}}}}, "dpo", {"beta": "auto"}),
    ],
    ids=["beside", "in-part", "supervised", "dpo"],
)
def test_the_server_chooses_what_is_auto(client: openai.OpenAI, asked: Any, kind: str, chosen: Any) -> None:
    file = upload(client, sums(1) if kind == "supervised" else preferences()[:1])
    made = client.fine_tuning.jobs.create(model="tiny", training_file=file, **asked)
    told = getattr(made.method, kind).hyperparameters
    assert chosen.items() <= told.model_dump().items()
    assert ended(client, made.id).status == "succeeded"


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        ({"model": "gpt-9"}, "model", "use 'tiny', or train one"),
        ({"training_file": "file-none"}, "training_file", "upload one first"),
        ({"validation_file": "file-none"}, "validation_file", "upload one first"),
        ({"method": {"type": "dpo"}}, "training_file", "are for supervised, the job's method is dpo"),
        ({"method": {"type": "reinforcement"}}, "method.type", "learn from rewards"),
        ({"method": {"type": "supervised", "dpo": {}}}, "method.dpo", "leave it out"),
        ({"method": {"type": "supervised"}, "hyperparameters": {}}, "hyperparameters", "not both"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", "greater than or equal to 1"),
        ({"hyperparameters": AUTO | {"batch_size": "some"}}, "hyperparameters.batch_size", "valid integer"),
        ({"hyperparameters": {"learning_rate_multiplier": 0}}, "hyperparameters.learning_rate_multiplier", "than 0"),
        ({"hyperparameters": {"beta": 1}}, "hyperparameters.beta", "not permitted"),
        ({"suffix": "a/b"}, "suffix", "up to 64 letters"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations", "leave it out"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "512"),
    ],
)
def test_a_job_that_cannot_be(client: openai.OpenAI, examples: str, asked: Any, param: str, says: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=says) as raised:
        client.fine_tuning.jobs.create(**({"model": "tiny", "training_file": examples} | asked))
    assert raised.value.param == param


def test_what_one_key_has_no_other_sees(api: ApiServer, client: openai.OpenAI, trained: Any, examples: str) -> None:
    stranger = sdk(api, NOBODY)
    refused: list[Callable[[], Any]] = [
        lambda: stranger.files.retrieve(examples),
        lambda: stranger.files.content(examples),
        lambda: stranger.files.delete(examples),
        lambda: stranger.files.list(after=examples),
        lambda: create(stranger, examples),
        lambda: create(stranger, upload(stranger, sums()), model=trained.fine_tuned_model),
        lambda: stranger.fine_tuning.jobs.retrieve(trained.id),
        lambda: stranger.fine_tuning.jobs.cancel(trained.id),
        lambda: stranger.fine_tuning.jobs.list_events(trained.id),
        lambda: stranger.fine_tuning.jobs.checkpoints.list(trained.id),
        lambda: stranger.models.retrieve(trained.fine_tuned_model),
        lambda: stranger.models.delete(trained.fine_tuned_model),
        lambda: stranger.completions.create(model=trained.fine_tuned_model, prompt="1"),
    ]
    for ask in refused:
        with pytest.raises(openai.NotFoundError, match="of this key"):
            ask()
    assert list(stranger.fine_tuning.jobs.list()) == []
    assert [model.id for model in stranger.models.list()] == ["tiny"]
    assert len(list(stranger.files.list())) == 1
    with pytest.raises(openai.AuthenticationError, match="A key is required"):
        client.with_options(default_headers={"authorization": ""}).files.list()
    same = sdk(api, "tml-somebody")  # the tinker SDK's form of the key
    assert same.files.retrieve(examples).id == examples


def test_keys_take_turns(client: openai.OpenAI, api: ApiServer, examples: str) -> None:
    """The key that has waited longest is the next one, however old the job of another is."""
    other = sdk(api, "third")
    first, second = create(client, examples, **LONG), create(client, examples, n_epochs=1)
    theirs = create(other, upload(other, sums()), **LONG)
    wait_until(lambda: client.fine_tuning.jobs.retrieve(first.id).status == "running", 120)
    client.fine_tuning.jobs.cancel(first.id)
    wait_until(lambda: other.fine_tuning.jobs.retrieve(theirs.id).status == "running", 120)
    assert client.fine_tuning.jobs.retrieve(second.id).status == "queued"
    other.fine_tuning.jobs.cancel(theirs.id)
    assert ended(client, second.id).status == "succeeded"


def test_a_running_job(client: openai.OpenAI, api: ApiServer, examples: str) -> None:
    """It is paused, resumed and cancelled between two steps; its file stays; more than three wait for nothing."""
    file = upload(client, sums())
    job = create(client, file, **LONG)
    wait_until(lambda: client.fine_tuning.jobs.checkpoints.list(job.id).data, 120, what="an epoch is over")
    waiting = [create(client, examples, n_epochs=1) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="3 jobs of this key have not ended"):
        create(client, examples)
    with pytest.raises(openai.BadRequestError, match=rf"{job.id} uses {file}"):
        client.files.delete(file)
    with pytest.raises(openai.BadRequestError, match="the job is running; it must be one of paused"):
        client.fine_tuning.jobs.resume(job.id)
    assert client.fine_tuning.jobs.pause(job.id).status == "paused"
    assert all(ended(client, other.id).status == "succeeded" for other in waiting)  # its turn is over
    taken = losses(client, job.id)
    assert client.fine_tuning.jobs.resume(job.id).status == "queued"
    wait_until(lambda: len(losses(client, job.id)) > len(taken), 120, what="it goes on")
    found = losses(client, job.id)
    assert sorted(found) == list(range(1, len(found) + 1))
    cancelled = client.fine_tuning.jobs.cancel(job.id)
    assert (cancelled.status, cancelled.fine_tuned_model) == ("cancelled", None)
    said = client.fine_tuning.jobs.list_events(job.id).data[0]
    assert said.message == "Fine-tuning job cancelled"
    for ask in (client.fine_tuning.jobs.cancel, client.fine_tuning.jobs.pause):
        with pytest.raises(openai.BadRequestError, match="the job is cancelled"):
            ask(job.id)
    assert client.files.delete(file).deleted
    kept = [c.fine_tuned_model_checkpoint for c in client.fine_tuning.jobs.checkpoints.list(job.id)]
    assert kept  # of the epochs before
    for name in kept:
        assert client.models.delete(name).deleted
    statement = "SELECT count(*) FROM records WHERE kind = 'model' AND parent = ?"
    wait_until(lambda: api.journal(statement, job.id) == [(0,)], 120, what="its training client is gone")
    after = create(client, examples, n_epochs=1)  # and nobody waits for it
    assert ended(client, after.id).status == "succeeded"
    assert client.fine_tuning.jobs.list_events(job.id).data[0] == said


def test_a_deleted_model_is_gone(client: openai.OpenAI, examples: str, api: ApiServer) -> None:
    job = ended(client, create(client, examples, n_epochs=1, batch_size=12).id)
    assert client.models.delete(job.fine_tuned_model).deleted
    for ask in (client.models.delete, client.models.retrieve):
        with pytest.raises(openai.NotFoundError, match="or train one"):
            ask(job.fine_tuned_model)
    assert not (api.root / "api/models" / f"{job.id}:train:0").exists()


def test_a_trained_model_answers_by_its_name(
    both: tuple[ApiServer, Fleet], client: openai.OpenAI, trained: Any
) -> None:
    """Under the client's key and by the edition of an adapter that has been published."""
    _, running = both
    asked: list[dict[str, Any]] = []
    misplaced: list[int] = []

    async def answered(request: Request) -> Response:
        asked.append(body := await request.json())
        assert request.headers["authorization"] == "Bearer somebody"
        if misplaced:
            return JSONResponse({"error": {"message": "no such model"}}, misplaced.pop())
        said = {"id": "1", "object": "text_completion", "created": 1, "model": body["model"], "choices": []}
        if not body.get("stream"):
            return JSONResponse(said)
        events = [f"data: {json.dumps(said)}\n\n", "data: [DONE]\n\n"]
        return StreamingResponse(iter(events), media_type="text/event-stream")

    for route in ("completions", "chat/completions"):
        running.server.app.post(f"/v1/{route}")(answered)
    name = trained.fine_tuned_model
    assert client.completions.create(model=name, prompt="1").model == name
    assert [event.model for event in client.completions.create(model=name, prompt="1", stream=True)] == [name]
    message: Any = {"role": "user", "content": "1"}
    assert client.chat.completions.create(model=f"{name}:ckpt-step-3", messages=[message]).model.endswith("step-3")
    assert client.completions.create(model="tiny", prompt="1").model == "tiny"
    first, second, third, base = asked
    assert first["model"] == second["model"] != third["model"]
    assert {first["model"].partition("@")[0], third["model"].partition("@")[0]} == {"tinker-0", "tinker-1"}
    assert not any("hotswap" in body for body in asked)
    assert base["model"] == "tiny"
    misplaced.append(404)
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.completions.create(model=name, prompt="1")
    client.completions.create(model=name, prompt="1")
    refused, answered_now = (int(body["model"].partition("@")[2]) for body in asked[-2:])
    assert answered_now > refused, "it was published again"


METHODS: dict[str, Any] = {
    "supervised": (sums(), {"n_epochs": 6, "batch_size": 3, "learning_rate_multiplier": 10.0}),
    "dpo": (preferences(), {"n_epochs": 6, "batch_size": 2, "learning_rate_multiplier": 100.0}),
}


def events(client: openai.OpenAI, job: str) -> list[Any]:
    """Oldest first."""
    return list(client.fine_tuning.jobs.list_events(job, limit=100))[::-1]


@pytest.mark.broad
@pytest.mark.parametrize("kind", METHODS)
def test_a_job_goes_on_at_the_step_where_it_was(api: ApiServer, client: openai.OpenAI, kind: str) -> None:
    """Killed in one of the first steps, behind an epoch, and once more: its numbers are those of a job that was not
    killed, and whatever the SDK was told stays so."""
    lines, chosen = METHODS[kind]
    file = upload(client, lines)
    calm = ended(client, create(client, file, kind, validation_file=file, seed=5, **chosen).id)
    expected = losses(client, calm.id)
    job = create(client, file, kind, validation_file=file, seed=5, **chosen)
    behind = create(client, file, kind)
    for step in (2, 6, 13):
        wait_until(lambda least=step: len(losses(client, job.id)) >= least, 120, what=f"step {step} is done")  # type: ignore[misc]
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


@pytest.mark.broad
def test_a_job_whose_server_was_away_for_days(api: ApiServer, client: openai.OpenAI) -> None:
    """It was killed between a step and the job's word of it, and the answers are no longer kept: the step counts, and
    all after it are what they would have been."""
    lines, chosen = METHODS["supervised"]
    file = upload(client, lines)
    expected = losses(client, ended(client, create(client, file, seed=5, **chosen).id).id)
    job = create(client, file, seed=5, **chosen)
    wait_until(lambda: len(losses(client, job.id)) >= 2, 120, what="two steps are done")
    client.fine_tuning.jobs.pause(job.id)
    statement = "SELECT count(*) FROM requests WHERE model = ? AND done IS NULL"
    wait_until(lambda: api.journal(statement, f"{job.id}:train:0") == [(0,)], 120, what="no request is under way")
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
