"""On several ranks a client's training is that of one rank, a state goes on in any layout, and a killed rank loses
nothing."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.trainer.api.finetuning.client import ended, preferences, sdk, upload
from tests.trainer.api.finetuning.client import losses as job_losses
from tests.trainer.api.server import ApiServer, datum, learn, new, serving, sums
from tests.trainer.api.test_losses import body, data_for
from tests.trainer.faults.test_ranks import rank_process
from tests.trainer.fleet import exported
from tests.trainer.ranks import Ranks
from tests.waiting import wait_until
from trainer.api.__main__ import main

PASS = "forward_backward"

PASSES = [
    [body("cross_entropy", {}, data_for("cross_entropy", 1)), body("ppo", {}, data_for("ppo", 2)[:1])],
    [body("importance_sampling", {}, data_for("importance_sampling", 3))],
    [body("cross_entropy", {}, data_for("cross_entropy", 4)) for _ in range(3)],
]
LAYOUTS: list[tuple[str, dict[str, Any], bool]] = [  # the first tier takes numbers 0, 3, 7 and 10
    ("qwen3", {"tensor": 2}, False),
    ("qwen2", {"data": 2}, False),
    ("qwen2", {"context": 2}, False),
    ("qwen3_moe", {"data": 2, "expert": 2}, False),
    ("qwen2", {"pipeline": 2, "virtual_pipeline": 2}, False),
    ("mixtral", {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}, False),
    ("qwen3", {"tensor": 2}, True),
    ("llama-tied", {"pipeline": 2}, True),
    ("qwen2", {"data": 2}, True),
    ("qwen3", {"tensor": 2, "sequence": True}, True),
    ("qwen2", {"tensor": 2, "data": 2}, False),
    ("qwen3_moe", {"data": 2, "expert": 2}, True),
    ("mixtral", {"tensor": 2, "sequence": True}, True),
    ("mixtral", {"pipeline": 2, "data": 2, "expert": 2}, True),
]


def close(said: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(said, expected, strict=True):
        for row, reference in zip(mine["logprobs"], theirs["logprobs"], strict=True):
            assert row == pytest.approx(reference, rel=1e-3, abs=1e-4)
        for told, reference in zip(mine["losses"], theirs["losses"], strict=True):
            assert told == pytest.approx(reference, rel=5e-4, abs=1e-4)
        assert mine["norm"] == pytest.approx(theirs["norm"], rel=5e-4)


def alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-2, atol=1e-2 * float(tensor.abs().max())), name


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("model", "parallel", "full"), LAYOUTS, ids=["-".join([m, *p, "full" if f else "lora"]) for m, p, f in LAYOUTS]
)
def test_ranks_train_as_one_does_and_go_on_in_its_place(
    one_rank: Ranks, every_model: dict[str, str], tmp_path: Path, model: str, parallel: dict[str, Any], full: bool
) -> None:
    """The numbers of each pass, the norm, the state and what a sampler would get; then one rank goes on from the state
    of several, and they from its."""

    def told(layout: dict[str, Any], passes: Any, into: str, begin: str | None = None) -> list[dict[str, Any]]:
        about = {"path": every_model[model], "parallel": layout, "full": full, "passes": passes}
        places = {"directory": f"{tmp_path}/{into}", "begin": begin and f"{tmp_path}/{begin}"}
        found: list[dict[str, Any]] = one_rank.spread(layout).call("several_ranks", **about, **places)[0]
        return found

    alone, said = told({}, PASSES, "one"), told(parallel, PASSES, "more")
    assert alone[0]["losses"] != alone[-1]["losses"][:2]
    close(said, alone)
    one, several = exported(tmp_path / "one"), exported(tmp_path / "more")
    alike(several, one)
    exports = [exported(tmp_path / state / "export") for state in ("one", "more")]
    assert exports[0].keys() == exports[1].keys()
    assert {f"weight.{name}" for name in exports[0]} == {name for name in one if name.startswith("weight.")}
    on = [told(layout, PASSES[:1], "on", begin) for layout, begin in (({}, "more"), (parallel, "one"))]
    close(on[0], on[1])
    assert on[0][0]["losses"] != alone[0]["losses"]


def through_the_sdk(api: ApiServer) -> dict[str, Any]:
    """Answers to two clients of the stock SDK while they train by turns, save, load and are saved for a sampler."""
    service = api.service()
    first, second = new(service), new(service)
    odd = [datum([3, 4, 5, 6, 7, 8, 9][: 2 + i % 5], weights=[1.0] * (1 + i % 5)) for i in range(7)]
    losses = []
    for _ in range(3):
        losses += learn(first, sums(), 1) + learn(second, odd, 1)
    path = first.save_state("three").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    losses += learn(resumed, sums(), 2)
    with pytest.raises(tinker.RequestFailedError, match="call forward_backward before"):
        resumed.optim_step(types.AdamParams()).result()
    with pytest.raises(tinker.RequestFailedError, match="which ppo needs"):
        resumed.forward_backward(odd, "ppo").result()
    said = second.forward(odd, "cross_entropy").result()
    rows = [output["logprobs"].tolist() for output in said.loss_fn_outputs]
    sampler = resumed.save_weights_and_get_sampling_client().result()
    answer = sampler.sample(types.ModelInput.from_ints([4, 13]), 1, types.SamplingParams(max_tokens=2)).result()
    assert answer.sequences[0].tokens
    (saved,) = (api.root / "api/models" / resumed.model_id / "snapshots").iterdir()
    service.close("success").result(120)
    return {"losses": losses, "rows": rows, "adapter": load_file(saved / "adapter_model.safetensors")}


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory, small_models: dict[str, str]) -> dict[str, Any]:
    with serving(tmp_path_factory.mktemp("api"), small_models["qwen3"]) as (api, _):
        return through_the_sdk(api)


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"data": 2}], ids=["tensor", "data"])
def test_the_stock_sdk_is_told_the_same(
    on_one_rank: dict[str, Any], tmp_path: Path, small_models: dict[str, str], parallel: dict[str, Any]
) -> None:
    with serving(tmp_path, small_models["qwen3"], parallel=parallel) as (api, _):
        found = through_the_sdk(api)
    assert found["losses"] == pytest.approx(on_one_rank["losses"], rel=5e-4)
    for row, reference in zip(found["rows"], on_one_rank["rows"], strict=True):
        assert row == pytest.approx(reference, rel=1e-3, abs=1e-4)
    alike(found["adapter"], on_one_rank["adapter"])


@pytest.mark.broad
@pytest.mark.timeout(900)
def test_a_rank_that_is_killed(tmp_path: Path, tiny_model: str) -> None:
    """In the middle of a pass a follower, then rank 0: the launcher starts all again, the SDK waits, who asks for a
    result is told to ask again, and the numbers are those of a server whose ranks all lived. So are a job's."""
    data = sums() * 200
    with serving(tmp_path, tiny_model, parallel={"data": 2}, launched=True) as (api, _):
        service, client_of_jobs = api.service(), sdk(api)
        calm, client = new(service), new(service)
        expected, losses = learn(calm, data, 4), learn(client, data, 1)
        file = upload(client_of_jobs, preferences())
        method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 12, "batch_size": 3}}}
        asked: dict[str, Any] = {"model": "tiny", "training_file": file, "method": method, "seed": 4}
        undisturbed = ended(client_of_jobs, client_of_jobs.fine_tuning.jobs.create(**asked).id)
        job = client_of_jobs.fine_tuning.jobs.create(**asked)
        for rank in (1, 0):
            passed = client.forward_backward(data, "cross_entropy")
            stepped = client.optim_step(types.AdamParams(learning_rate=1e-3))
            killed = rank_process(api.process.pid, rank)
            wait_until(lambda: _in_a_pass(api, client), 240, what=lambda: f"both on disk: {_open(api, client)}")
            killed.suspend()  # so that the pass is not over before the request is there
            with ThreadPoolExecutor(1) as asking:
                about = {"request_id": f"{client.model_id}:{_open(api, client)[0][1]}"}
                answer = asking.submit(api.post, "retrieve_future", json=about)
                killed.kill()
                if rank == 1:
                    assert answer.result().status_code == 503
                    assert answer.result().json()["error"]["code"] == "server_ended"
                else:
                    assert isinstance(answer.exception(), httpx.HTTPError)
            assert _open(api, client)[0][0] == PASS
            losses.append(passed.result(timeout=240).metrics["loss:sum"])
            stepped.result(timeout=240)
            assert not killed.is_running()
            kept = api.journal("SELECT about FROM records WHERE kind = 'fault' AND parent = ?", client.model_id)
            assert [json.loads(about)["times"] for (about,) in kept] == [1], "rank 0 cannot count its own end"
        assert losses + learn(client, data, 1) == expected
        assert _open(api, client) == []
        done = ended(client_of_jobs, job.id)
        assert job_losses(client_of_jobs, done.id) == job_losses(client_of_jobs, undisturbed.id)
        assert done.status == "succeeded"

        idle = rank_process(api.process.pid, 1)
        os.kill(idle.pid, signal.SIGKILL)
        before = client.forward(data[:20], "cross_entropy").result(timeout=240)
        assert before.metrics["loss:sum"] > 0
        ranks = psutil.Process(api.process.pid).children(recursive=True)
        api.process.terminate()
        assert api.process.wait(120) == 128 + signal.SIGTERM
        assert not [rank for rank in ranks if rank.is_running()]
    said = api.log.read_text()
    assert "Traceback" not in said, said


def _open(api: ApiServer, client: tinker.TrainingClient) -> list[tuple[str, int]]:
    """Requests that are not done, by kind and number."""
    return api.journal("SELECT kind, seq FROM requests WHERE done IS NULL AND model = ? ORDER BY seq", client.model_id)


def _in_a_pass(api: ApiServer, client: tinker.TrainingClient) -> bool:
    """And the step after it is on disk, too. (The SDK cuts a large pass into several requests.)"""
    kinds = [kind for kind, _ in _open(api, client)]
    return kinds[:1] == [PASS] and kinds[-1:] == ["optim_step"]


def test_ranks_that_the_layout_does_not_have(tmp_path: Path, tiny_model: str) -> None:
    """Each says what is wrong and ends with 2."""
    api = ApiServer(tmp_path, tiny_model, "http://127.0.0.1:9", "sqlite:///none", parallel={"data": 2})
    api.config["parallel"] = {"data": 1}
    with pytest.raises(AssertionError, match="1 ranks, but the launcher has started 2"):
        api.start()
    assert [process.wait(120) for process in api._processes] == [2, 2]


@pytest.mark.broad
def test_what_fails_at_the_first_start_is_not_started_again(tmp_path: Path, tiny_model: str) -> None:
    """For all the restarts that there may be."""
    (tmp_path / "api").mkdir()
    (tmp_path / "api/journal.db").write_text("no journal" * 100)
    about: dict[str, Any] = {"parallel": {"data": 2}, "launched": True}
    api = ApiServer(tmp_path, tiny_model, "http://127.0.0.1:9", "sqlite:///none", **about)
    with pytest.raises(AssertionError, match="not a database"):
        api.start()
    assert api.process.wait(120) == 1
    assert api.log.read_text().count("sqlite3.DatabaseError: file is not a database") == 1


def test_a_layout_that_the_model_cannot_have(
    tmp_path: Path, small_models: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    cases = {
        "parallel.tensor=3": "parallel.tensor: 3 does not divide the model's 4 (attention heads)",
        "parallel.pipeline=5": "parallel.pipeline: 5 does not divide the model's 2 (layers)",
        "parallel.expert=2": "parallel.expert: 2 x expert_tensor 1 does not divide the 1 ranks",
        "faults.max_restarts=-1": "faults.max_restarts: cannot be -1 (int). Expected int >= 0",
    }
    api = ApiServer(tmp_path, small_models["qwen2"], "http://127.0.0.1:9", "sqlite:///none")
    (tmp_path / "api.json").write_text(json.dumps(api.config))
    for change, says in cases.items():
        assert main(["--config", str(tmp_path / "api.json"), "--set", change]) == 2
        assert says in capfd.readouterr().err
